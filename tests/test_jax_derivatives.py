"""Forward mode and second derivatives in JAX, against JAX's own through the plain formulas in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.arrays import bfloat16
from clearhead.errors import DerivativeError
from clearhead.jax import attention, observe
from problems import of_tiers
from seeds import fresh, normal
from test_jax import near

jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of these tests' time
BATCH, HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 2, 4, 2, 5, 6, 3
SMOOTH = ("output", "logsumexp", "entropy", "distance", "diagonal", "received", "image", "groups")
LABELS = np.array([0, 1, -1, 1, 0]), np.array([0, 0, 1, 2, -1, 2])
ASKED: dict[str, Any] = dict.fromkeys(SMOOTH[1:6], True) | {"image": (3, 4), "groups": LABELS}
Arrays = dict[str, Any]
Path = Callable[[Arrays], Any]


def slow(*values: str) -> list[Any]:
    return of_tiers([], sorted(values), every=2)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)  # in all threads: callbacks run in others than this one
    yield
    jax.config.update("jax_enable_x64", False)


def drawn() -> tuple[Arrays, Arrays]:
    """What is differentiated, and rules of which some are traced; every query sees its own position."""
    rng, inputs = fresh(), {"q": normal(BATCH, HEADS, QUERIES, WIDTH)}
    inputs |= {"k": normal(BATCH, KV_HEADS, KEYS, WIDTH), "v": normal(BATCH, KV_HEADS, KEYS, WIDTH + 1)}
    table = normal(HEADS, 3, 2)
    more = {"bias": normal(BATCH, 1, QUERIES, KEYS), "sinks": normal(HEADS), "table": table}
    inputs |= {name: x for name, x in more.items() if rng.random() < 0.6}
    mask = (rng.random((BATCH, 1, QUERIES, KEYS)) < 0.7) | np.eye(QUERIES, KEYS, dtype=bool)
    every = {"causal": True, "softcap": 1.5, "scale": 0.6, "mask": mask, "alibi_slopes": rng.random(HEADS)}
    return inputs, {name: x for name, x in every.items() if rng.random() < 0.5} | {"query_offset": 0}


def ours(inputs: Arrays, rules: Arrays, **asked: Any) -> Any:
    more = {name: inputs[name] for name in ("bias", "sinks") if name in inputs}
    if "table" in inputs:
        more["spans"] = (np.arange(QUERIES) % 3, np.arange(KEYS) % 2 - 1, inputs["table"])
    return observe(inputs["q"], inputs["k"], inputs.get("v"), **more, **rules, **asked)


def plain(inputs: Arrays, rules: Arrays) -> Arrays:
    """The formulas of the same, each with every weight stored."""
    q, k, v = inputs["q"], *(jnp.repeat(inputs[name], HEADS // KV_HEADS, 1) for name in "kv")
    scores = q @ jnp.swapaxes(k, -1, -2) * rules.get("scale", WIDTH**-0.5)
    cap, places = rules.get("softcap"), jnp.arange(KEYS) - jnp.arange(QUERIES)[:, None]
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    scores = scores + inputs.get("bias", 0.0)
    scores = scores - rules.get("alibi_slopes", np.zeros(HEADS))[:, None, None] * abs(places)
    if "table" in inputs:
        wide = jnp.concatenate([inputs["table"], jnp.zeros((HEADS, 3, 1))], -1)
        scores = scores + wide[:, np.arange(QUERIES) % 3][:, :, np.arange(KEYS) % 2 - 1]
    seen = rules.get("mask", True) & ((places <= 0) | ("causal" not in rules))
    sinks = inputs.get("sinks", jnp.full(HEADS, -jnp.inf))[:, None, None]
    each = jnp.concatenate([jnp.where(seen, scores, -jnp.inf), jnp.broadcast_to(sinks, (*q.shape[:3], 1))], -1)
    whole = jax.nn.logsumexp(each, -1)
    a = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0.0) - whole[..., None]), 0.0)
    logs = jnp.where(seen, scores, 0.0) - whole[..., None]
    diagonal = a * (places == 0)
    image = jnp.einsum("ai,...ij,bj->...ab", _areas(3, QUERIES), a, _areas(4, KEYS))
    members = [jax.nn.one_hot(side, max(side) + 1) for side in LABELS]
    groups = jnp.einsum("ia,...ij,jb->...ab", members[0], a, members[1])
    rows = {"logsumexp": whole, "entropy": -(a * logs).sum(-1), "distance": (a * abs(places)).sum(-1)}
    rows |= {"diagonal": diagonal.sum(-1), "received": a.sum(-2), "image": image, "groups": groups}
    return {"output": a @ v, **rows}


def _areas(pixels: int, size: int) -> Any:
    """The mean over each pixel's share of `size` positions, from each position cut into as many parts as pixels."""
    return jnp.repeat(jnp.eye(pixels), size, 1).reshape(pixels, size, pixels).sum(-1) / size


def losses(names: list[str]) -> tuple[Path, Path, Arrays]:
    """The same curved loss of some answers, ours and by the plain formulas; and what it is of."""
    inputs, rules = drawn()
    asked = {name: ASKED[name] for name in names if name in ASKED}
    by = {name: normal(*np.shape(x)) for name, x in plain(inputs, rules).items()}

    def loss(answers: Callable[[str], Any]) -> Any:
        return sum((jnp.sin(answers(name)) * by[name]).sum() for name in names)

    def actual(x: Arrays) -> Any:
        seen = ours(x, rules, **asked)
        return loss(lambda name: getattr(seen, name))

    def theirs(x: Arrays) -> Any:
        result = plain(x, rules)
        return loss(lambda name: result[name])

    return actual, theirs, {name: jnp.asarray(x) for name, x in inputs.items()}


def moved(x: Arrays) -> Arrays:
    return {name: jnp.cos(3 * x[name]) for name in x}


def penalty(f: Path) -> Path:
    return jax.grad(lambda x: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(f)(x))))


WAYS: dict[str, Callable[[Path], Path]] = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (moved(x),)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](moved(x)),
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (moved(x),)),
    "gradient penalty": penalty,
    "grad by a direction of jvp": lambda f: lambda x: jax.grad(lambda u: jax.jvp(f, (x,), (u,))[1] ** 2)(moved(x)),
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f)),
    "jvp of grad of checkpoint": lambda f: lambda x: jax.jvp(jax.grad(jax.checkpoint(f)), (x,), (moved(x),)),
    "jvp of jit of grad": lambda f: lambda x: jax.jvp(jax.jit(jax.grad(jax.jit(f))), (x,), (moved(x),)),
}
WHOLE = ("jacfwd", "hessian", "jacrev of jacrev")  # matrices, of some inputs only
QUICK = ("jvp of grad",)


@pytest.mark.gate
@pytest.mark.parametrize("way", [*QUICK, *slow(*(WAYS.keys() - {*QUICK}))])
def test_every_derivative_under_drawn_rules(way: str):
    names = [*fresh().choice(SMOOTH, 3, replace=False)]
    ours, theirs, inputs = losses(names)
    some = {name: x for name, x in inputs.items() if way not in WHOLE or name in ("k", "sinks")}
    result, truth = (jax.jit(WAYS[way](lambda x, f=f: f(inputs | x)))(some) for f in (ours, theirs))
    near(result, truth)


@pytest.mark.parametrize("name", slow(*SMOOTH))
def test_every_answer_has_second_derivatives(name: str):
    ours, theirs, inputs = losses([name])
    near(WAYS["jvp of grad"](ours)(inputs), jax.jit(WAYS["jvp of grad"](theirs))(inputs))


@pytest.mark.gate
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_a_tangent_of_any_argument_alone(name: str):
    rules: Arrays = {"query_offset": 0, "causal": True}
    inputs = {"q": normal(BATCH, HEADS, QUERIES, WIDTH), "k": normal(BATCH, KV_HEADS, KEYS, WIDTH)}
    inputs |= {"v": normal(BATCH, KV_HEADS, KEYS, 2), "bias": normal(1, QUERIES, 1), "sinks": normal(HEADS)}
    direction = jnp.asarray(normal(*inputs[name].shape))
    result, truth = (
        jax.jvp(lambda x, f=f: f({**inputs, name: x}), (jnp.asarray(inputs[name]),), (direction,))
        for f in (lambda x: ours(x, rules).output, lambda x: plain(x, rules)["output"])
    )
    near(result, truth)


def test_the_bits_of_values_and_gradients_are_the_usual_ones():
    passed, rules = drawn()
    f = jax.jit(lambda x: ours(x, rules).output)
    inputs = {name: jnp.asarray(x) for name, x in passed.items()}
    value, _ = jax.jvp(f, (inputs,), (moved(inputs),))
    np.testing.assert_array_equal(value, f(inputs))
    usual = jax.grad(lambda x: f(x).sum())(inputs)
    again = jax.jvp(jax.grad(lambda x: f(x).sum()), (inputs,), (moved(inputs),))[0]
    jax.tree.map(np.testing.assert_array_equal, usual, again)


@pytest.mark.parametrize("mapped", ["qkv", "sinks", *slow("q", "kv", "k", "bias", "tangent")])
def test_vmap_of_derivatives_is_each_alone(mapped: str):
    """One call of all that is mapped; a rule with one number for each head is computed call by call."""
    x = {"q": normal(HEADS, QUERIES, WIDTH), "k": normal(KV_HEADS, KEYS, WIDTH), "v": normal(KV_HEADS, KEYS, WIDTH)}
    x |= {"bias": normal(QUERIES, KEYS), "sinks": normal(HEADS), "tangent": normal(HEADS, QUERIES, WIDTH)}
    lengths = np.array([2, KEYS, 0])
    names = [mapped] if mapped in x else [*mapped]
    axes = {name: 1 if name in names else None for name in x}
    many = {name: np.stack([y, 2 * y, -y], 1) if name in names else y for name, y in x.items()}

    def slopes(x: Arrays, n: Any) -> Any:
        def output(y: Arrays) -> Any:
            return attention(y["q"], y["k"], y["v"], bias=y["bias"], sinks=x["sinks"], kv_lengths=n)

        moving = {name: x[name] for name in ("q", "k", "v", "bias")}
        along = {**moved(moving), "q": x["tangent"]}
        of_gradient = jax.jvp(jax.grad(lambda y: (output(y) ** 2).sum()), (moving,), (along,))
        return jax.jvp(output, (moving,), (along,)), of_gradient

    result = jax.vmap(slopes, (axes, 0))(many, lengths)
    each = [
        slopes({name: y.take(place, 1) if name in names else y for name, y in many.items()}, lengths[place])
        for place in range(3)
    ]
    near(result, jax.tree.map(lambda *parts: np.stack(parts), *each), 1e-10)


def test_a_derivative_of_a_mapped_call_sums_over_what_is_shared():
    inputs, _ = drawn()
    q, k, v = (jnp.asarray(inputs[name]) for name in "qkv")

    def loss(k: Any, f: Callable[..., Any]) -> Any:
        return (jax.vmap(lambda q, v: f(q, k, v))(q, v) ** 2).sum()

    def whole(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(x, HEADS // KV_HEADS, 0) for x in (k, v))
        return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / WIDTH**0.5) @ v

    result, truth = (
        jax.jit(lambda k, f=f: jax.jvp(jax.grad(lambda x: loss(x, f)), (k,), (moved({"k": k})["k"],)))(k[0])
        for f in (attention, whole)
    )
    near(result, truth)


def test_rows_that_see_nothing_and_forbidden_nonfinite_numbers():
    inputs, _ = drawn()
    q, k, v = (inputs[name][:1] for name in "qkv")
    k[..., -1, :], v[..., -1, :] = np.nan, np.inf
    mask = np.arange(KEYS) < KEYS - 1
    mask = np.broadcast_to(mask, (QUERIES, KEYS)).copy()
    mask[2] = False

    def loss(q: Any) -> Any:
        return (attention(q, k, v, mask=mask) ** 2).sum()

    output, tangent = jax.jvp(lambda q: attention(q, k, v, mask=mask), (q,), (np.ones_like(q),))
    of_gradient = jax.jvp(jax.grad(loss), (q,), (np.ones_like(q),))[1]
    for result in (output, tangent, of_gradient):
        assert np.isfinite(result).all()
        assert not np.asarray(result)[:, :, 2].any()


@pytest.mark.parametrize("dtype", [np.float32, bfloat16, np.float16], ids=str)
def test_narrow_dtypes_have_the_tangents_that_they_have_in_pytorch(dtype: Any):
    arrays = [(normal(2, 9, 8)).astype(dtype) for _ in range(6)]
    q, k, v, *along = (jnp.asarray(x) for x in arrays)
    result = jax.jvp(lambda *x: attention(*x, causal=True), (q, k, v), tuple(along))[1]
    assert result.dtype == dtype
    name = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(np.dtype(dtype).name, torch.float32)
    inputs = [torch.from_numpy(x.astype(np.float32)).to(name) for x in arrays]
    truth = torch.func.jvp(lambda *x: ch.attention(*x, causal=True), tuple(inputs[:3]), tuple(inputs[3:]))[1]
    most = {np.float32: 1e-5, np.float16: 4e-3}.get(dtype, 3e-2)
    near(result.astype(np.float64), truth.double().numpy(), most)


def test_what_jumps_between_keys_has_a_gradient_and_no_further_derivative():
    x = jnp.asarray(normal(2, 4, 3))
    for name, asked in (("max_logit", True), ("peak", True), ("top", 2)):

        def f(x: Any, name: str = name, asked: Any = asked) -> Any:
            seen = getattr(observe(x, x, **{name: asked}), name)
            return (seen.weights if name == "top" else seen).sum()

        jax.grad(f)(x)
        for way in (lambda f=f: jax.jvp(f, (x,), (x,)), lambda f=f: jax.jit(jax.hessian(f))(x)):
            with pytest.raises(DerivativeError, match=rf"^{name} has no (forward-mode|second) derivative here"):
                way()
