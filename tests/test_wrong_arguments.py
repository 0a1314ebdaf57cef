"""Calls of attention with wrong arguments give a right result or one of the library's own errors; so does the kernel.

Python's TypeError is right only where a call does not fit the signature; every call here fits. A failure prints the
line @reproduce_failure(…), which draws the same again; `calls.WRONG[name]()` is the value of that name.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from calls import WRONG
from clearhead.core import definition
from clearhead.core.call import describe
from clearhead.core.rules import RULES
from clearhead.engines import native
from clearhead.errors import ClearheadError
from problems import Case, cases, examples

NAMES = (*"qkv", *RULES, "engine", "causl")


@examples(4)
@given(case=cases(most=5_000), data=st.data())
def test_a_call_is_right_or_raises_a_library_error(case: Case, data: st.DataObject):
    """A call under any rules, of which up to two arguments are wrong ones."""
    inputs: dict[str, Any] = {"q": case.q, "k": case.k, "v": case.v, **case.rules}
    for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True)):
        inputs[name] = WRONG[data.draw(st.sampled_from(sorted(WRONG)), name)]()
    try:
        output = np.asarray(ch.attention(**inputs))
    except ClearheadError:
        return
    inputs.pop("engine", None)
    read = describe(*(inputs.pop(name) for name in "qkv"), inputs)
    book = definition.attend(read.problem, read.q, read.k, read.v)
    assert book.output is not None
    loose = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 1e-3}.get(output.dtype, 0.1)
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
    q, k, v, output, rows = (np.ones(shape, dtype if i == 2 else np.float32) for i, shape in enumerate(shapes))
    try:
        native.kernel.rows(1, rules, q, k, v, {"output": output, "largest": rows, "log_sum": rows})
    except (ValueError, TypeError):
        return
    assert shapes[:2] == right[:2]
    assert v.dtype == np.float32
    assert v.shape[:3] == (1, 2, 5) or v.shape[1] in (1, 2)
    assert output.size == 6 * v.shape[-1]
    assert rows.size == 6
