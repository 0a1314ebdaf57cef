"""Attention inside JAX: jit, grad, vmap, scan, checkpoint; against the float64 reference and JAX's own attention."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.core.arrays import bfloat16
from clearhead.core.axes import Array
from clearhead.core.statistics import STATISTICS, askable, separate_arrays
from clearhead.errors import ClearheadError, DerivativeError, DtypeError, EngineError, RuleError, ShapeError
from clearhead.jax import attention, observe
from clearhead.ops.jax_host import now
from losses import ANSWERS, Losses
from problems import Case, cases, examples
from seeds import fresh
from slack import Slack, assert_close

jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of these tests' time
HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 4, 2, 7, 9, 8
NAMES = ("q", "k", "v")
FLOAT32, FLOAT64 = 2e-4, 1e-10  # tolerances for numbers of order one to a hundred


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return fresh().standard_normal(shape).astype(dtype)


def qkv(*lead: int, dtype: Any = np.float32) -> list[Array]:
    """Grouped heads, fewer queries than keys, values wider than keys."""
    shapes = (HEADS, QUERIES, WIDTH), (KV_HEADS, KEYS, WIDTH), (KV_HEADS, KEYS, WIDTH + 1)
    return [normal(*lead, *shape, dtype=dtype) for shape in shapes]


def same(result: Any, expected: Array) -> None:
    assert isinstance(result, jax.Array)
    np.testing.assert_array_equal(np.asarray(result), expected, strict=True)


def near(result: Any, expected: Any, most: float = 1e-8) -> None:
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=most, atol=most)


@examples(0.15)
@given(cases(most=2_000, most_heads=6), st.sets(st.sampled_from(ANSWERS), min_size=1).map(sorted))
def test_values_and_gradients_against_the_reference(case: Case, answers: list[str]):
    """Every rule that may be traced is an argument of a compiled function, every dtype is a problem's."""
    with jax.enable_x64(True):
        losses, slack = Losses(case, answers), Slack(case)
        static = {name: x for name, x in case.rules.items() if name in ("scale", "softcap", "causal", "window")}
        traced = {name: np.asarray(x) for name, x in case.rules.items() if name not in {"spans", *static}}
        moving = {name: getattr(case, name) for name in NAMES}
        labels: Any = case.rules.get("spans", ())[:2]
        moving |= {"spans": case.rules["spans"][2]} if labels else {}
        moving |= {name: traced.pop(name) for name in ("bias", "sinks") if name in traced}
        by = {name: case.restore(x) for name, x in losses.by.items()}

        def loss(moving: dict[str, Any], traced: dict[str, Any], labels: Any) -> Any:
            rules = {name: x for name, x in moving.items() if name not in NAMES}
            if labels:
                rules["spans"] = (*labels, rules["spans"])
            flags: Any = {name: True for name in answers if name != "output"}
            seen = observe(*(moving[name] for name in NAMES), **flags, **rules, **traced, **static)
            parts = [jnp.where(by[name] == 0, 0, getattr(seen, name) * by[name]).sum() for name in answers]
            return sum(part.astype(float) for part in parts), seen

        result, seen = jax.jit(jax.grad(loss, has_aux=True))(moving, traced, labels)
        assert_close(
            np.asarray(seen.output), case.restore(case.book.output), case.restore(slack.output(case.q.dtype)), "output"
        )
        losses.check({name: np.asarray(x) for name, x in result.items()})


THEIRS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {  # rules, and what JAX calls them
    "bias": lambda: (bias := {"bias": normal(1, QUERIES, QUERIES), "scale": 0.3}, bias),
    "mask": lambda: (
        mask := {"mask": (fresh().random((HEADS, QUERIES, QUERIES)) < 0.7) | np.eye(QUERIES, dtype=bool)},
        mask,
    ),
    "causal": lambda: ({"causal": True}, {"is_causal": True}),
    "window": lambda: ({"window": (2, 1)}, {"local_window_size": (2, 1)}),
    "lengths": lambda: ({"kv_lengths": np.array([QUERIES, 3])}, {"key_value_seq_lengths": np.array([QUERIES, 3])}),
}


def jax_attention(q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None, **options: Any) -> Any:
    """jax.nn.dot_product_attention, whose axes are (batch, length, heads, d), for q (batch, heads, queries, d_k)."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    batched = [None if x is None else jnp.broadcast_to(x, (1, *x.shape)[-4:]) for x in (bias, mask)]
    return jnp.swapaxes(jax.nn.dot_product_attention(q, k, v, *batched, **options), 1, 2)


@pytest.mark.parametrize("rules", THEIRS.values(), ids=THEIRS)
def test_values_and_gradients_are_those_of_jaxs_own_attention(rules: Callable[[], Any]):
    moving = dict(zip(NAMES, (x[..., :QUERIES, :WIDTH] for x in qkv(2)), strict=True))
    (ours, theirs), g = rules(), normal(2, HEADS, QUERIES, WIDTH)

    def slopes(function: Callable[..., Any], rest: dict[str, Any]) -> Any:
        def loss(moving: dict[str, Any]) -> Any:
            output = function(**{**rest, **moving})
            return (output * g).sum(), output

        return jax.jit(jax.grad(loss, has_aux=True))(moving | {name: x for name, x in rest.items() if name == "bias"})

    near(slopes(attention, ours), slopes(jax_attention, theirs), FLOAT32)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16], ids=str)
def test_the_bits_are_those_of_numpy_in_every_dtype(dtype: Any):
    arrays = qkv(2, dtype=dtype)
    expected = ch.attention(*arrays)
    same(jax.jit(attention)(*arrays), expected)
    same(attention(*arrays), expected)
    same(attention(*(jnp.asarray(x) for x in arrays)), expected)
    same(attention(*(x[0, 0] for x in arrays)), ch.attention(*(x[0, 0] for x in arrays)))


TRACED: dict[str, Callable[[], dict[str, Any]]] = {
    "bias": lambda: {"bias": normal(2, 1, QUERIES, 1)},
    "alibi_slopes": lambda: {"alibi_slopes": normal(HEADS), "query_offset": 2},
    "mask": lambda: {"mask": fresh().random((QUERIES, KEYS)) < 0.5},
    "lengths": lambda: {"kv_lengths": np.array([3, KEYS]), "query_lengths": np.array([QUERIES, 0])},
    "segments": lambda: {"query_segments": np.arange(QUERIES) // 3, "kv_segments": np.arange(KEYS) // 3},
    "sinks": lambda: {"sinks": normal(HEADS)},
    "query_offset": lambda: {"query_offset": np.array([0, -3]), "causal": True, "window": (3, None)},
}


@pytest.mark.parametrize("make", TRACED.values(), ids=TRACED)
def test_rules_may_be_traced_or_known(make: Callable[[], dict[str, Any]]):
    arrays, rules = qkv(2), make()
    traced = {name: x for name, x in rules.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in rules.items() if name not in traced}
    expected = ch.attention(*arrays, **rules)
    same(jax.jit(lambda traced: attention(*arrays, **traced, **static))(traced), expected)
    same(jax.jit(lambda *x: attention(*x, **rules))(*arrays), expected)
    for kind in (np.asarray, jnp.asarray, np.ndarray.tolist):
        same(attention(*arrays, **{name: kind(x) for name, x in traced.items()}, **static), expected)


def test_a_compiled_function_keeps_the_rules_of_its_tracing():
    q, k, v = qkv()
    mask = fresh().random((QUERIES, KEYS)) < 0.5
    compiled = jax.jit(lambda q: attention(q, k, v, mask=mask))
    before = np.asarray(compiled(q))
    mask[:] = ~mask
    same(compiled(q), before)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (1, None, 0), (-1, 2, None)], ids=str)
def test_vmap_is_one_call_per_element(axes: Sequence[int | None]):
    """Whichever axes of q, k and v are mapped, before and after jax.grad."""
    whole = [
        x if index is None else np.stack([x, 2 * x, -x], index) for x, index in zip(qkv(dtype=float), axes, strict=True)
    ]
    each = [
        [x if axis is None else np.take(x, place, axis) for x, axis in zip(whole, axes, strict=True)]
        for place in range(3)
    ]

    def loss(*x: Any) -> Any:
        output = attention(*x)
        return (output**2).sum(), output

    def summed(*x: Any) -> Any:
        losses, outputs = jax.vmap(loss, axes)(*x)
        return losses.sum(), outputs

    with jax.enable_x64(True):
        slopes = jax.grad(loss, (0, 1, 2), has_aux=True)
        (apart, outputs), (together, again) = jax.jit(
            lambda *x: (jax.vmap(slopes, axes)(*x), jax.grad(summed, (0, 1, 2), has_aux=True)(*x))
        )(*whole)
        singly = [jax.jit(slopes)(*x)[0] for x in each]
    for result in (outputs, again):
        same(result, np.stack([ch.attention(*x) for x in each]))
    for index, axis in enumerate(axes):
        expected = np.stack([np.asarray(one[index]) for one in singly])
        near(apart[index], expected, FLOAT64)
        near(together[index], expected.sum(0) if axis is None else np.moveaxis(expected, 0, axis), FLOAT64)


def test_vmap_of_vmap_of_rules_and_of_nothing():
    q, k, v = qkv(2, 3)
    lengths = np.array([1, 4, KEYS])
    inner = jax.vmap(lambda q, k, v, n: attention(q, k, v, kv_lengths=n))
    result = jax.vmap(inner, (0, 0, 0, None))(q, k, v, lengths)
    same(result, ch.attention(q, k, v, kv_lengths=np.stack([lengths, lengths])))
    sinks = normal(3, HEADS)
    each = np.stack([ch.attention(q[0, i], k[0, i], v[0, i], sinks=sinks[i]) for i in range(3)])
    same(jax.vmap(lambda q, k, v, s: attention(q, k, v, sinks=s))(q[0], k[0], v[0], sinks), each)
    assert jax.vmap(attention)(q[:0], k[:0], v[:0]).shape == (0, 3, HEADS, QUERIES, WIDTH + 1)


ALL: dict[str, Any] = {
    name: {"flag": True, "count": 3, "size": (3, 4), "labels": (np.arange(QUERIES) // 3, np.arange(KEYS) // 4)}[
        STATISTICS[name].asked
    ]
    for name in askable()
}


def test_observations_are_those_of_numpy():
    q, k, v = qkv(2)
    for queries in (slice(None), slice(-3, None), slice(None, None, -2)):
        rules: dict[str, Any] = {"causal": True, "query_offset": 1, "sinks": [0.0] * HEADS}
        expected = ch.AttentionMatrix(q, k, **rules).observe(v, queries=queries, **ALL)
        result = jax.jit(lambda q, k, v, place=queries, rules=rules: observe(q, k, v, queries=place, **ALL, **rules))(
            q, k, v
        )
        assert (result.queries, result.keys, result.sinks) == (expected.queries, expected.keys, True)
        for name, x in separate_arrays(expected).items():
            ours = separate_arrays(result)[name]
            same(ours, x.astype(np.int32) if name == "top_indices" else x)
    assert separate_arrays(observe(q, k)) == {}


@pytest.mark.parametrize("queries", [slice(None), slice(4, 1, -1)], ids=str)
@pytest.mark.parametrize("name", ["output", *askable()])
def test_every_statistic_has_the_derivatives_that_it_has_in_pytorch(name: str, queries: slice):
    with jax.enable_x64(True):
        arrays = dict(zip(NAMES, qkv(2, dtype=np.float64), strict=True))
        arrays |= {"bias": normal(2, 1, QUERIES, KEYS, dtype=float), "sinks": normal(HEADS, dtype=float)}
        asked = {name: ALL[name]} if name in ALL else {}
        flat = {"causal": True, "query_offset": 2, "queries": queries, **asked}

        def answer(seen: Any) -> Any:
            result = getattr(seen, name)
            return result.weights if name == "top" else result

        def loss(given: dict[str, Any]) -> Any:
            v = given["v"] if name == "output" else None
            result = observe(given["q"], given["k"], v, bias=given["bias"], sinks=given["sinks"], **flat)
            return (answer(result) ** 2).sum()

        ours = jax.jit(jax.grad(loss))(arrays)
        leaves = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
        matrix = ch.AttentionMatrix(
            leaves["q"], leaves["k"], bias=leaves["bias"], sinks=leaves["sinks"], causal=True, query_offset=2
        )
        seen = matrix.observe(leaves["v"] if name == "output" else None, queries=queries, **asked)
        (answer(seen) ** 2).sum().backward()
        for place, leaf in leaves.items():
            theirs = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
            np.testing.assert_allclose(np.asarray(ours[place]), theirs, rtol=1e-12, atol=1e-12, err_msg=place)


@pytest.mark.parametrize("shape", [(), (KEYS,), (QUERIES, 1), (HEADS, 1, 1), (3, 1, 1, KEYS), (2, 1, 1, 1, KEYS)])
def test_the_gradient_of_a_bias_has_its_shape(shape: tuple[int, ...]):
    arrays, bias, whole = qkv(2, 3, dtype=float), normal(*shape, dtype=float), (2, 3, HEADS, QUERIES, KEYS)
    g = normal(2, 3, HEADS, QUERIES, WIDTH + 1, dtype=float)

    def loss(bias: Any) -> Any:
        return (attention(*arrays, bias=bias) * g).sum()

    with jax.enable_x64(True):
        result, full = jax.jit(jax.grad(loss))(bias), jax.jit(jax.grad(loss))(np.broadcast_to(bias, whole))
    local = (1,) * (5 - len(shape)) + shape
    shared = tuple(axis for axis, size in enumerate(local) if size == 1)
    near(result, np.asarray(full).sum(shared).reshape(shape), FLOAT64)


def test_scan_and_checkpoint_leave_gradients_as_they_are():
    x, weights = normal(2, QUERIES, WIDTH, dtype=float), normal(3, WIDTH, WIDTH, dtype=float) / WIDTH

    def layer(x: Any, w: Any) -> Any:
        return x + attention(x @ w, x, x, causal=True)

    def unrolled(x: Any, weights: Any) -> Any:
        for w in weights:
            x = layer(x, w)
        return x

    def scanned(x: Any, weights: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, weights)[0]

    def slopes(run: Callable[..., Any]) -> Any:
        return jax.jit(jax.grad(lambda *given: (run(*given) ** 2).mean(), (0, 1)))(x, weights)

    with jax.enable_x64(True):
        expected = slopes(unrolled)
        near(slopes(scanned), expected, FLOAT64)
        near(slopes(jax.checkpoint(unrolled)), expected, FLOAT64)


def block(attend: Callable[..., Any], weights: dict[str, Any], tokens: Any) -> Any:
    """The loss of a decoder of one block, (batch, length) tokens."""
    x = weights["embed"][tokens]
    heads = [jnp.swapaxes((x @ w).reshape(*x.shape[:2], 2, -1), 1, 2) for w in weights["qkv"]]
    x = x + jnp.swapaxes(attend(*heads), 1, 2).reshape(x.shape) @ weights["out"]
    x = x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]
    logs = jax.nn.log_softmax(x @ weights["embed"].T)[:, :-1]
    return -jnp.take_along_axis(logs, tokens[:, 1:, None], -1).mean()


@pytest.mark.gate
def test_a_transformer_trains_as_with_jaxs_own_attention():
    width, words = 16, 11
    weights = {"embed": normal(words, width), "qkv": normal(3, width, width) / 4, "out": normal(width, width) / 4}
    weights |= {"up": normal(width, 32) / 4, "down": normal(32, width) / 6}
    tokens = fresh().integers(0, words, (2, 9))

    def step(attend: Callable[..., Any]) -> Callable[..., Any]:
        def update(weights: Any) -> Any:
            loss, slopes = jax.value_and_grad(lambda w: block(attend, w, tokens))(weights)
            return loss, jax.tree.map(lambda w, g: w - 0.1 * g, weights, slopes)

        return jax.jit(update)

    actual, theirs = step(lambda *x: attention(*x, causal=True)), step(lambda *x: jax_attention(*x, is_causal=True))
    ours, local = weights, weights
    for _ in range(3):
        (loss, ours), (expected, local) = actual(ours), theirs(local)
        near((loss, ours), (expected, local), 1e-3)


def test_outside_of_jit_the_host_reads_jaxs_buffers_without_a_copy():
    seen: list[int] = []
    x = jnp.ones((256, 256))
    now(lambda x: [seen.append(x.ctypes.data) or x.sum()], [((), np.float32)], x)
    assert seen == [x.unsafe_buffer_pointer()]


ONE_PROCESSOR = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp
from clearhead.jax import attention

@jax.jit
@jax.grad
def slopes(x):
    return sum((attention(x + i, x[1:], x[1:]) ** 2).mean() for i in range(3))

for i in range(10):
    jax.block_until_ready(slopes(jnp.ones((2049, 128)) + i))
print("done")
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_one_processor_is_enough():
    """A callback by jax.pure_callback can wait for ever here, for a thread of the pool that it occupies itself."""
    run = subprocess.run([sys.executable, "-c", ONE_PROCESSOR], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "done\n"


X, LABELS = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32), np.arange(4)


def total(q: Any, **rules: Any) -> Any:
    return attention(q, X, X, **rules).sum()


def of_slopes(slopes: Any) -> Any:
    return total(X, alibi_slopes=slopes)


AGAIN = r"attention has no such derivative in JAX: (.|\n)*hint: jax\.jvp of jax\.grad, jax\.grad of"
REFUSED: dict[str, tuple[Callable[[], Any], type[ClearheadError], str]] = {
    "jvp of jvp": (lambda: jax.jvp(lambda x: jax.jvp(total, (x,), (x,))[1], (X,), (X,)), DerivativeError, AGAIN),
    "grad of jvp": (lambda: jax.jit(jax.grad(lambda x: jax.jvp(total, (x,), (X,))[1]))(X), DerivativeError, AGAIN),
    "jacfwd of jacfwd": (lambda: jax.jacfwd(jax.jacfwd(total))(X), DerivativeError, AGAIN),
    "jacrev of hessian": (lambda: jax.jacrev(jax.hessian(total))(X), DerivativeError, AGAIN),
    "jvp by slopes": (lambda: jax.jvp(of_slopes, (X[0, 0, :2],), (X[0, 0, :2],)), RuleError, "alibi_slopes"),
    "slopes": (lambda: jax.grad(of_slopes)(X[0, 0, :2]), RuleError, "alibi_slopes is differentiated"),
    "a traced scale": (lambda: jax.jit(lambda x: total(X, scale=x))(1.0), RuleError, "scale is traced by JAX"),
    "a traced flag": (lambda: jax.jit(lambda x: total(X, causal=x))(True), RuleError, "causal is traced by JAX"),
    "label": (lambda: jax.jit(lambda x: observe(X, X, groups=(x, x)))(LABELS), DtypeError, "query_groups is traced by"),
    "a wrong width": (lambda: jax.jit(total)(X[..., :2]), ShapeError, "q has d_k 2 but k has d_k 3"),
    "a wrong width of k": (lambda: jax.grad(lambda k: attention(X, k, X).sum())(X[..., :2]), ShapeError, "q has d_k"),
    "a wrong mask": (lambda: jax.jit(lambda x: total(X, mask=x))(X[0, :3] > 0), ShapeError, "mask has shape"),
    "numbers as a mask": (lambda: jax.jit(lambda x: total(X, mask=x))(X[0]), DtypeError, "mask is float32"),
    "whole numbers": (lambda: jax.jit(attention)(*[np.arange(6).reshape(2, 3)] * 3), DtypeError, "q is int32"),
    "two dtypes": (lambda: jax.jit(total)(X.astype(np.float16)), DtypeError, "k is float32 but q is float16"),
    "no offset": (lambda: jax.jit(lambda x: total(x, causal=True))(X[:, :3]), RuleError, "causal and window need"),
    "a known length": (lambda: jax.jit(lambda x: total(x, kv_lengths=9))(X), RuleError, "kv_lengths is"),
    "a length, outside of jit": (lambda: total(X, kv_lengths=jnp.array(9)), RuleError, "kv_lengths is"),
    "a list": (lambda: attention(X.tolist(), X, X), DtypeError, "q is a list"),
    "no values": (lambda: attention(X, X, None), DtypeError, "v is a NoneType"),
    "an unknown rule": (lambda: attention(X, X, X, entropy=True), ClearheadError, "unknown rule `entropy`"),  # type: ignore[call-arg]
    "an unknown statistic": (lambda: observe(X, X, mass=True), ClearheadError, "unknown statistic `mass`"),  # type: ignore[call-arg]
    "no slice": (lambda: observe(X, X, queries=3), ClearheadError, "queries is 3: expected a slice"),  # type: ignore[arg-type]
    "an unknown engine": (lambda: attention(X, X, X, engine="cuda"), ClearheadError, "unknown engine `cuda`"),
    "another device": (
        lambda: jax.jit(total).trace(X).lower(lowering_platforms=("cuda",)), EngineError, "clearhead.jax computes on"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("refused", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals_are_clearheads_own(refused: Callable[[], Any], error: type[ClearheadError], words: str):
    with pytest.raises(error, match=f"^{words}"):
        refused()


def test_what_is_not_differentiated_may_carry_what_has_no_derivative():
    slopes = np.ones(2, np.float32)
    result = jax.jit(jax.grad(lambda q, slopes: total(q, alibi_slopes=slopes)))(X, slopes)
    np.testing.assert_array_equal(result, jax.grad(lambda q: total(q, alibi_slopes=slopes))(X))
    value, slope = jax.jvp(lambda x: total(jax.lax.stop_gradient(x)) * x.sum(), (X,), (X,))
    assert value == slope


def test_a_wrong_traced_value_is_named_when_the_program_runs():
    with pytest.raises(jax.errors.JaxRuntimeError, match="kv_lengths is"):
        jax.block_until_ready(jax.jit(lambda n: total(X, kv_lengths=n))(9))
