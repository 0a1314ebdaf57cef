"""Arrays of any library: results have the array type of the inputs, and inputs are not copied."""

import tempfile
from collections.abc import Callable
from typing import Any

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch

import clearhead as ch
from cause_problems import EVERYTHING
from clearhead import engines
from clearhead.core.arrays import as_array
from clearhead.core.axes import Array
from clearhead.core.statistics import STATISTICS
from clearhead.errors import DtypeError
from clearhead.torch import scaled_dot_product_attention
from problems import LAYOUTS, each_engine
from seeds import normal

TORCH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


LIBRARIES: dict[str, Callable[[Array], Any]] = {
    **{str(dtype): lambda x, dtype=dtype: torch.from_numpy(x).to(dtype) for dtype in TORCH_DTYPES},
    "array_api_strict": array_api_strict.asarray,
}


def everything(engine: str, q: Any, k: Any, v: Any, g: Any) -> dict[str, Any]:
    """What calls with these arrays give, by name."""
    A = ch.AttentionMatrix(q, k, causal=True, engine=engine)
    E, labels = A.cut_effects(v, g), (np.zeros(6, int), np.arange(6) % 3)
    rows = {"entropy": True, "logsumexp": True, "received": True, "image": (2, 3)}
    seen, effects = A.observe(v, top=2, groups=labels, **rows), E.observe(**EVERYTHING, groups=labels)
    result = {name: getattr(seen, name) for name in ("output", "groups", *rows)}
    result |= {"weights": A[...], "row": A[0], "A @ v": A @ v, "A.T @ g": A.T @ g, "top": seen.top.weights}
    result |= {"effects": E[...], "effects of a row": E[1], "E @ v": E @ v, "E.T @ g": E.T @ g}
    result |= {"attention": ch.attention(q, k, v, causal=True, engine=engine)}
    result |= {name: getattr(effects, name) for name in ("by_key", "by_query")} | {"effects of groups": effects.groups}
    result |= {"effects' top": effects.top.values, "effects' top keys": effects.top.indices}
    result |= {"top keys": seen.top.indices, "effects' image": effects.image}
    result |= {f"strongest {name}": x for name, x in effects.strongest._asdict().items()}
    traced = ch.trace(q, k, v)
    return result | {
        "traced": traced.weights, "a token": traced.token(1).contributions, "rolled out": ch.rollout([A], query=1),
    }  # fmt: skip


@each_engine([name for name in engines.NAMES if name != "triton"])  # which computes neither effects nor groups
@pytest.mark.parametrize("library", LIBRARIES)
def test_results_have_the_inputs_library_and_arrays_numbers(engine: str, library: str):
    name = library.removeprefix("torch.")
    narrow = {"bfloat16": ml_dtypes.bfloat16, "array_api_strict": np.float64}.get(name, name)
    arrays = normal(4, 2, 4, 6, 8).astype(narrow)
    inputs = [LIBRARIES[library](x.astype(np.float64)) for x in arrays]
    expected = everything(engine, *arrays)
    for name, x in everything(engine, *inputs).items():
        assert type(x) is type(inputs[0]), name
        assert str(x.dtype).rpartition(".")[2] == expected[name].dtype.name, name
        numbers = x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        np.testing.assert_array_equal(numbers, np.asarray(expected[name], np.float64), err_msg=name)


def test_rules_may_be_tensors_too():
    q, k, v = (torch.from_numpy(normal(2, 2, 5, 4)) for i in range(3))
    rules = {
        "mask": torch.ones(5, 5, dtype=torch.bool).tril(),
        "bias": torch.from_numpy(normal(5, 5)).to(torch.bfloat16),
        "kv_lengths": torch.tensor([5, 3]),
        "sinks": torch.tensor([0.1, 0.2]),
        "query_offset": torch.tensor(1),
    }
    plain = {name: x.double().numpy() if name in ("bias", "sinks") else x.numpy() for name, x in rules.items()}
    expected = ch.attention(q.numpy(), k.numpy(), v.numpy(), **plain)
    np.testing.assert_array_equal(ch.attention(q, k, v, **rules).numpy(), expected)


def test_observations_of_tensors_are_tensors():
    q, k, v = (torch.from_numpy(normal(6, 4)) for i in range(3))
    wanted: dict[str, Any] = {"logsumexp": True, "max_logit": True, "entropy": True, "distance": True, "top": 2}
    seen = ch.AttentionMatrix(q, k).observe(v, **wanted)
    over_queries = ch.AttentionMatrix(q, k).observe(received=True, peak=True, image=(2, 3), groups=([0] * 6, [1] * 6))
    for each in (over_queries, seen):
        fields = [getattr(each, name) for name in each.__dataclass_fields__ if name in STATISTICS and name != "top"]
        assert all(isinstance(x, torch.Tensor) for x in (*fields, *(each.top or ())) if x is not None)
    assert seen.top is not None
    assert seen.top.indices.dtype == torch.int64


def test_a_product_has_the_array_type_of_its_operand():
    q, k, v = normal(3, 4), normal(5, 4), normal(5, 2)
    matrix = ch.AttentionMatrix(torch.from_numpy(q), torch.from_numpy(k))
    assert isinstance(matrix @ v, np.ndarray)
    assert isinstance(matrix @ torch.from_numpy(v), torch.Tensor)
    assert isinstance(matrix.T @ np.ones(3), np.ndarray)
    effects = matrix.cut_effects(torch.from_numpy(v), torch.ones(3, 2, dtype=torch.float64))
    assert isinstance(effects @ np.ones(5), np.ndarray)
    assert isinstance(effects.T @ torch.ones(3), torch.Tensor)
    assert torch.equal(torch.as_tensor(effects), effects[...])
    assert isinstance(ch.attention(q, torch.from_numpy(k), torch.from_numpy(v)), np.ndarray)


def test_tensors_that_require_grad_are_refused_without_a_graph():
    q, k, v = (torch.from_numpy(normal(3, 4)) for i in range(3))
    expected = ch.attention(q, k, v)
    for call in (ch.trace, lambda q, k, v: ch.attention(q.numpy(), k, v)):
        with pytest.raises(DtypeError, match=r"^k requires grad, and this call has no derivative\."):
            call(q, k.requires_grad_(), v)
    with torch.no_grad():
        assert torch.equal(ch.attention(q, k, v), expected)
    assert torch.equal(ch.attention(q, k.detach(), v), expected)


def test_tables_are_converted_with_their_dtype():
    table = type("DataFrame", (), {"__array__": lambda self, *_: np.eye(3, dtype=bool)})()
    with pytest.raises(DtypeError, match=r"^mask is a DataFrame: (.|\n)*hint: np.asarray\(mask\) makes one\.$"):
        ch.attention(normal(3, 4), normal(3, 4), normal(3, 4), mask=table)


class Elsewhere:
    """An array whose DLPack export NumPy cannot read."""

    def __array_namespace__(self) -> Any:
        return np

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("unknown dtype")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.gate  # JAX is large
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jax_arrays_are_read_and_its_tracers_refused(dtype: str):
    jax = pytest.importorskip("jax")
    q, k, v = normal(3, 2, 5, 4).astype(dtype)
    arrays = [jax.numpy.asarray(x) for x in (q, k, v)]
    output, seen = (
        ch.attention(*arrays, causal=True),
        ch.AttentionMatrix(*arrays[:2], causal=True).observe(received=True),
    )
    expected = ch.AttentionMatrix(q, k, causal=True)
    assert isinstance(output, jax.Array)
    assert output.dtype == dtype
    np.testing.assert_array_equal(np.asarray(output), expected @ v)
    np.testing.assert_array_equal(np.asarray(seen.received), expected.received())
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(DtypeError, match=r"^q is a \w+Tracer whose numbers(.|\n)* use jax.pure_callback"):
            transform(lambda x: ch.attention(x, x, x).sum())(arrays[0])
        with pytest.raises(DtypeError, match=r"^bias is a \w+Tracer whose numbers"):
            transform(lambda x: ch.attention(q, k, v, bias=x).sum())(jax.numpy.ones((5, 5)))


def test_arrays_that_dlpack_cannot_read_are_named():
    with pytest.raises(DtypeError, match=r"^q is a Elsewhere whose numbers cannot be read: unknown dtype\n"):
        ch.attention(Elsewhere(), normal(3, 4), normal(3, 4))
    for traced in (lambda x: ch.attention(x, x, x), lambda x: scaled_dot_product_attention(x, x, x)):
        with pytest.raises(DtypeError, match=r"^q(uery)? is a Proxy(.|\n)*torch.export.export"):
            torch.fx.symbolic_trace(traced)


@pytest.mark.parametrize("x", [normal(4, 3), torch.from_numpy(normal(4, 3)), torch.ones(4, 3, dtype=torch.bfloat16).T])
def test_inputs_are_not_copied(x: Any):
    array, restore = as_array(x, "x")
    pointer = x.data_ptr() if isinstance(x, torch.Tensor) else x.__array_interface__["data"][0]
    assert array.__array_interface__["data"][0] == pointer
    assert type(restore(array)) is type(x)


X = normal(4, 3)
HIDDEN = np.ma.masked_array(X, X > 0)
HIDDEN_MASK = np.ma.masked_array(X[:, :1] > 0, X[:, :1] > 1)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("q", lambda: ch.attention(HIDDEN, X, X)),
        ("mask", lambda: ch.attention(X, X, X, mask=HIDDEN_MASK)),
        ("query_groups", lambda: ch.AttentionMatrix(X, X).groups(np.ma.zeros(4, int), [0, 0, 0, 0])),
        ("w_q", lambda: ch.trace_layer(X, np.ma.masked_array(X.T @ X), X.T @ X, X.T @ X)),
    ],
)
def test_masked_arrays_are_refused_by_name(name: str, call: Any):
    """Reading a masked array as a plain array would ignore its mask."""
    with pytest.raises(DtypeError, match=rf"^{name} is a masked array, and clearhead would ignore its mask"):
        call()


class Subclass(np.ndarray):
    """A user's subclass of ndarray."""


def unaligned(x: Array) -> Array:
    room = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    room[...] = x
    return room


def on_disk(x: Array) -> Array:
    """A read-only memory map of a temporary file."""
    with tempfile.TemporaryFile() as file:
        file.write(np.ascontiguousarray(x).tobytes())
        file.flush()
        return np.memmap(file, x.dtype, "r", shape=x.shape)


SAME: dict[str, Callable[[Array], Array]] = {
    **LAYOUTS,
    "not aligned": unaligned,
    "on disk": on_disk,
    "a subclass": lambda x: x.view(Subclass),
    "np.matrix": lambda x: x.view(np.matrix),
}


@pytest.mark.parametrize("how", SAME)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_memory_layout_does_not_change_the_result(how: str, dtype: Any):
    q, k, v, bias = (normal(5, 5).astype(dtype) for i in range(4))
    mask, make = normal(5, 5) > -1, SAME[how]
    plain, other = {"bias": bias, "mask": mask}, {"bias": make(bias), "mask": make(mask)}
    output = ch.attention(make(q), make(k), make(v), **other)
    assert (type(output), output.dtype, output.flags.writeable) == (np.ndarray, dtype, True)
    np.testing.assert_array_equal(output, ch.attention(q, k, v, **plain))
    A, B = ch.AttentionMatrix(q, k, **plain), ch.AttentionMatrix(make(q), make(k), **other)
    np.testing.assert_array_equal(B.T @ make(v), A.T @ v)
    np.testing.assert_array_equal(B[1:3], A[1:3])
    traced = ch.trace(make(q), make(k), make(v), **other)
    np.testing.assert_array_equal(traced.weights, ch.trace(q, k, v, **plain).weights)
    layer = ch.trace_layer(make(q), make(k), make(v), make(bias), num_heads=5)
    np.testing.assert_array_equal(layer.output, ch.trace_layer(q, k, v, bias, num_heads=5).output)
