"""Random calls of public functions: a correct result or a library error, never another exception, hang or crash."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.core import definition
from clearhead.core.arrays import FLOATS
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.engines import native
from clearhead.errors import ClearheadError
from problems import examples

SIZES = st.sampled_from((0, 1, 2, 3, 5, 17, 64, 65))
DTYPES = st.sampled_from([*FLOATS] * 4 + [np.dtype(name) for name in ("int32", "bool", "complex64", "O", "uint8")])
BAD = st.sampled_from(
    [
        *(None, True, 1, 0, -1, 2**70, 1.5, -0.0, float("nan"), float("inf"), np.float32(3), np.int64(-4), 1 + 2j),
        *("1", "x", b"1", [], [1], [[1], [2, 3]], (1,), (1, 2), (None, None), (-1, 2), {}, object()),
        *(np.ones(3), np.ones((2, 2), bool)),
    ]
)
ARRAYS = ("bias", "mask", "alibi_slopes", "sinks", "kv_lengths", "query_lengths", "query_segments", "kv_segments")
NAMES = (*ARRAYS, "scale", "softcap", "causal", "window", "query_offset", "engine", "causl")


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...]) -> Array:
    """An array of about that shape in any dtype, with any strides, as a view of a larger one."""
    wanted = list(shape)
    if draw(st.integers(0, 9)) == 0 and wanted:
        wanted[draw(st.integers(0, len(wanted) - 1))] = draw(SIZES)
    if draw(st.integers(0, 19)) == 0:
        wanted = wanted[1:]
    steps = [draw(st.sampled_from((1, 1, 1, 2, -1, -3, 0))) for _ in wanted]
    room = [max(1, size * max(1, abs(step))) for size, step in zip(wanted, steps, strict=True)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    full = (rng.standard_normal([*room[:-1], room[-1] + 1]) if room else rng.standard_normal(())).astype(draw(DTYPES))
    if room and full.dtype != object:  # shifted by a byte: an address that is no multiple of the element's size
        odd = np.frombuffer(b"\0" + full.tobytes() if draw(st.booleans()) else full.tobytes(), np.uint8)
        full = odd[len(odd) - full.nbytes :].view(full.dtype).reshape(full.shape)
    for axis, (size, step) in enumerate(zip(wanted, steps, strict=True)):
        place: Any = slice(None, size) if step == 1 else slice(None, None, step or 1)
        full = full[(slice(None),) * axis + (place,)][(slice(None),) * axis + (slice(None, size),)]
        if step == 0 and full.shape[axis] == size and size:
            first = full[(slice(None),) * axis + (slice(0, 1),)]
            full = np.broadcast_to(first, (*full.shape[:axis], size, *full.shape[axis + 1 :]))
    return full


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Array, ...], dict[str, Any]]:
    n, m, d, d_v, kv = (draw(SIZES) for _ in range(5))
    kv = min(kv, 3)
    lead = draw(st.sampled_from(((), (kv,), (2, kv), (1, 2, kv))))
    group = draw(st.sampled_from((1, 1, 2, 3)))
    grouped = (*lead[:-1], lead[-1] * group) if lead else ()
    shapes = (*grouped, n, d), (*lead, m, d), (*lead, m, d_v)
    rules: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True)):
        shape = draw(
            st.sampled_from([(n, m), (1, m), (grouped[-1] if grouped else 1,), (2,), (n,), (m,), (*grouped, n, m)])
        )
        rules[name] = draw(arrays(shape)) if name in ARRAYS and draw(st.booleans()) else draw(BAD)
        if name == "mask" and isinstance(rules[name], np.ndarray) and rules[name].dtype != object:
            rules[name] = rules[name] != 0
    return tuple(draw(arrays(shape)) for shape in shapes), rules


@given(calls())
@examples(4)
def test_a_call_gives_a_correct_result_or_raises_a_library_error(call: tuple[tuple[Array, ...], dict[str, Any]]):
    (q, k, v), rules = call
    try:
        output = ch.attention(q, k, v, **rules)
    except ClearheadError:
        return
    rules.pop("engine", None)
    read = describe(q, k, v, rules)
    book = definition.attend(read.problem, read.q, read.k, read.v)
    assert book.output is not None
    loose = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 1e-3}.get(q.dtype, 0.1)
    truth = read.problem.restore(book.output)
    fine = np.isfinite(truth) & (np.abs(truth) < 1e4)
    assert output.shape == truth.shape
    np.testing.assert_allclose(output.astype(np.float64)[fine], truth[fine], rtol=loose, atol=loose)


@given(
    st.lists(st.tuples(st.sampled_from((0, 1, 2, 3, 6, 7, 2**40)), st.integers(1, 5)), min_size=5, max_size=5),
    st.data(),
)
@pytest.mark.skipif(bool(native.missing()), reason="the compiled kernel is not here")
def test_the_native_binding_refuses_mismatched_shapes(sizes: list[tuple[int, int]], data: st.DataObject):
    problem = describe(np.ones((2, 3, 4), np.float32), np.ones((2, 5, 4), np.float32), None, {}).problem
    rules = native.described(problem)
    right = [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6), (1, 2, 3, 6), (1, 2, 3)]
    shapes = [
        tuple(min(s, 9) for s, _ in sizes[: len(shape)]) if data.draw(st.booleans()) else shape for shape in right
    ]
    dtype = data.draw(st.sampled_from((np.float32, np.float64, np.uint8, ml_dtypes.bfloat16)))
    q, k, v, output, logsumexp = (np.ones(shape, dtype if i == 2 else np.float32) for i, shape in enumerate(shapes))
    try:
        native._native.rows(1, rules, q, k, v, {"output": output, "logsumexp": logsumexp})
    except (ValueError, TypeError):
        return
    assert shapes[:2] == right[:2]
    assert v.dtype == np.float32
    assert v.shape[:3] == (1, 2, 5) or v.shape[1] in (1, 2)
    assert output.size == 6 * v.shape[-1]
    assert logsumexp.size == 6
