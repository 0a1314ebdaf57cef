"""How the compiled kernel is called: the problem and the arrays as it reads them; an error where memory is short."""

from functools import cache
from typing import Any

import numpy as np

from clearhead.core import rules
from clearhead.core.arrays import bfloat16, kernel, statistics_dtype, unrepeated
from clearhead.core.axes import WEIGHTS, Array
from clearhead.core.problem import Problem
from clearhead.engines.threads import get_num_threads, openmp_of_torch
from clearhead.errors import SizeError

RULES = rules.EVERYWHERE
TYPES = {np.dtype(np.float64): 0, np.dtype(np.float32): 1, bfloat16: 2, np.dtype(np.float16): 3}
_NO_LIMIT = 1 << 62
_ARRAYS = [pair for name in RULES - {"scale"} for pair in rules.RULES[name].fields.items() if pair[1]]  # field, axes


def run(name: str, problem: Problem, *arguments: Any) -> None:
    """Call the kernel, which fills the arrays given. Raises SizeError if its working memory cannot be allocated."""
    threads = get_num_threads() if problem.num_threads is None else problem.num_threads
    try:
        getattr(kernel, name)(threads, described(problem), *arguments)
    except MemoryError:
        raise SizeError(
            "what the kernel needs to work in is larger than the machine's memory.",
            "observe(queries=slice(0, 4096)) takes a part; merge_keys joins what disjoint keys answered.",
        ) from None


def output(problem: Problem, q: Any, k: Any, v: Any, *, state: bool = False) -> Any:
    """The output alone, of q's kind, from arrays or tensors as they were given; None where `rows` must read them.

    With `state` a tuple of the output and the two arrays of the rows' states.
    """
    threads = get_num_threads() if problem.num_threads is None else problem.num_threads
    return kernel.output(threads, problem.described or described(problem), q, k, v, state)


def step(problem: Problem, q: Any, k: Any, v: Any, room: tuple[Any, Any], place: int, turns: Any) -> Any:
    """One step of decoding: write k and v to `place` of the room, and attend to all up to it; arrays or tensors.

    problem   of one query and any number of keys, without a rule that asks for positions
    room      keys and values, (batch, kv_heads, places, d) each
    turns     by how much q and k are turned before, (2, d_k): see nn/cache.py; None: not at all

    Returns the output (batch, heads, 1, d_v); None, before anything is changed, where the arrays are no such ones.
    """
    return kernel.step(get_num_threads(), described(problem), q, k, v, *room, place, turns)


def described(problem: Problem) -> Any:
    """The problem as the kernel reads it, converted once and kept with it; contiguous arrays are not copied.

    Arrays over queries and keys keep their strides. The kernel raises for an unknown name and for a missing one.
    """
    if problem.described is not None:
        return problem.described
    arrays: dict[str, Any] = {}
    for field, axes in _ARRAYS:
        x = getattr(problem, field)
        if x is not None and axes == WEIGHTS:
            x = x.view(np.uint8) if x.dtype == np.bool_ else bits(x)
        elif x is not None:
            once = unrepeated(x, 2) if field == "span_table" else x  # size 1 along batch and heads that share a table
            x = np.ascontiguousarray(once, statistics_dtype(problem.dtype) if field == "span_table" else None)
        arrays[field] = x
    scale, (left, right) = problem.one_scale, problem.reach
    arrays["scales"] = np.ascontiguousarray(problem.scale) if scale is None else None
    made = kernel.describe(
        type=TYPES[problem.dtype],
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        queries=problem.queries,
        keys=problem.keys,
        d_k=problem.d_k,
        row_start=problem.rows.start,
        row_step=problem.rows.step,
        column_start=problem.cols.start,
        column_step=problem.cols.step,
        left=_NO_LIMIT if left is None else left,
        right=_NO_LIMIT if right is None else right,
        scale=float(problem.scale[0]) if scale is None else scale,
        softcap=problem.softcap or 0.0,
        team=problem.library == "torch" and _has_team(),
        bias_type=1 if problem.bias is None else TYPES[problem.bias.dtype],
        kept=arrays,
        **arrays,
    )
    object.__setattr__(problem, "described", made)
    return made


@cache
def _has_team() -> bool:
    """Whether PyTorch's OpenMP threads can run the kernel, which is told of them here."""
    functions = openmp_of_torch()
    if functions is not None:
        kernel.use_team(*functions)
    return functions is not None


def bits(x: Array | None) -> Array | None:
    """An array for the bindings: bfloat16 as uint16; copied if unaligned or if strides are no multiple of the item."""
    if x is None:
        return None
    layout = x.flags
    if not (layout.c_contiguous and layout.aligned) and (
        not layout.aligned or any(step % x.itemsize for step in x.strides)
    ):
        x = x.copy()
    return x.view(np.uint16) if x.dtype == bfloat16 else x
