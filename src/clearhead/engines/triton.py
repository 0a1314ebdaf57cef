"""The Triton engine: launches the kernels in gpu/ on tensors in a GPU's memory; no arithmetic of its own.

Sums are in float32 (float64 for float64); float32 products use full precision unless PyTorch allows TF32
(torch.backends.cuda.matmul.allow_tf32). If TRITON_INTERPRET is set, Triton's interpreter runs the same kernels on the
CPU's memory: slowly, for tests.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from math import gcd
from typing import Any, ParamSpec, TypeVar

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, group_size
from clearhead.core.directions import Directions
from clearhead.core.effects import Others, Terms, WantedEffects, merged, no_keys
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Kept, Upstream, narrowed, row_kinds, unsupported, widened

try:
    import torch
    import triton

    from clearhead.engines.gpu import columns as column_kernels
    from clearhead.engines.gpu import library
    from clearhead.engines.gpu import rows as row_kernels
    from clearhead.engines.gpu import tensors as gpu
    from clearhead.engines.gpu.backward import Derivatives, Moving, in_parts
    from clearhead.engines.gpu.causes import Edges
    from clearhead.engines.gpu.column_pass import NOTHING, ColumnPass
    from clearhead.engines.gpu.rows import Partial, Rows
    from clearhead.engines.gpu.tangents import rows as along_rows
    from clearhead.engines.gpu.tangents import widened_along

    STATISTICS = row_kernels.STATISTICS | column_kernels.STATISTICS
except ImportError:
    triton, STATISTICS = None, frozenset()

RULES = frozenset({
    "scale", "softcap", "bias", "alibi_slopes", "spans", "causal", "window", "mask", "kv_lengths", "query_lengths",
    "query_segments", "kv_segments", "sinks", "query_offset",
})  # fmt: skip
MOST_D = 256
_P = ParamSpec("_P")
_R = TypeVar("_R")
_COLUMNS = 128  # columns of g per launch of Aᵀ·g
_FEW_ROWS = 64  # up to so many rows, the heads that share a key head are packed into one tile (decoding)
_LONG = 4096  # with few rows, more keys than this are split among at most _SPLITS programs
_SPLITS, _SPLIT = 64, 256


def _there(pass_: Callable[_P, _R]) -> Callable[_P, _R]:
    """Launch on q's device; in the interpreter, which computes with NumPy, silence warnings about NaN and infinity."""

    @wraps(pass_)
    def launched(*args: _P.args, **named: _P.kwargs) -> _R:
        device = gpu.device_of(args[1])  # type: ignore[arg-type]
        with torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore"):
            return pass_(*args, **named)

    return launched


def missing() -> str:
    """Why the kernels cannot run at all, as a sentence; "" if they can."""
    return "triton or torch is not installed." if triton is None else ""


def reasons_not(problem: Problem) -> list[str]:
    """Reasons against this engine: no Triton, arrays in the CPU's memory, too large a d_k, or an unsupported rule."""
    against = [missing()] if triton is None else []
    if triton is not None and problem.device == "cpu" and not triton.knobs.runtime.interpret:
        against.append("the arrays are in the CPU's memory, and TRITON_INTERPRET is not set.")
    if problem.d_k > MOST_D:
        against.append(f"d_k is {problem.d_k}: the kernels hold at most {MOST_D}.")
    return against + unsupported("the triton engine", RULES, problem)


@_there
def rows(problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    if want.output and v is not None and v.dtype != problem.dtype:
        wide = widened(problem, v)
        found = rows(wide, q.astype(wide.dtype), k.astype(wide.dtype), v.astype(wide.dtype), want)
        return narrowed(problem, found, keep_float32=want.keep_float32)
    if want.output and v is not None and v.shape[-1] > MOST_D:
        return _rows_in_parts(problem, q, k, v, want)
    if v is not None and not library.reasons_not(problem, q, k, v, want):
        output = library.output(problem, q, k, v)
        if output is not None:
            if problem.causal:
                _launch_rows(problem, q, k, v, 0, {"output": output}, repair=True)
            return {"output": gpu.from_tensor(output, q)}
    device = gpu.device_of(q)
    room = {
        name: torch.empty(shape, dtype=gpu.torch_dtype(dtype), device=device)
        for name, (shape, dtype) in row_kinds(problem, v, want, STATISTICS).items()
    }
    if problem.batch * problem.heads * problem.queries:
        _launch_rows(problem, q, k, v if want.output else None, want.top or 0, room)
    return {name: gpu.from_tensor(tensor, q) for name, tensor in room.items()}


def _rows_in_parts(problem: Problem, q: Array, k: Array, v: Array, want: Wanted) -> dict[str, Array]:
    """For d_v above MOST_D: the output in slices of d_v."""
    first, *others = (v[..., start : start + MOST_D] for start in range(0, v.shape[-1], MOST_D))
    found = rows(problem, q, k, first, want)
    rest = Wanted(output=True, keep_float32=want.keep_float32)
    parts = [found["output"], *(rows(problem, q, k, part, rest)["output"] for part in others)]
    return {**found, "output": gpu.from_tensor(torch.cat([gpu.as_tensor(part).tensor for part in parts], -1), q)}


def _launch_rows(
    problem: Problem, q: Array, k: Array, v: Array | None, top: int, found: dict[str, Any], *, repair: bool = False
) -> None:
    device, number = gpu.device_of(q), gpu.statistics(problem)
    d_v = 0 if v is None else v.shape[-1]
    tiles = gpu.tiles(problem, d_v, "rows")
    per_key = problem.group
    per_value = per_key if v is None else group_size(problem.heads, v.shape[1])
    together = gcd(per_key, per_value)
    pack = together if together * problem.queries <= _FEW_ROWS else 1
    height = min(tiles.owned, max(_FEW_ROWS, gpu.padded(pack * problem.queries)))
    split = None if repair else _split(problem, pack)
    splits = 1 if split is None else -(-problem.keys // split)
    slots = max(2, triton.next_power_of_2(top)) if top else 2
    lines = problem.batch * problem.heads * problem.queries

    def make(*tail: int, dtype: Any = number) -> Any:
        return torch.empty((splits, lines, *tail), dtype=dtype, device=device) if split else None

    want = Rows(**{**dict.fromkeys(Rows._fields), **found})
    part = Partial.room(make, want, slots, d_v)
    sizes = {"DV": gpu.padded(d_v), "TOP": slots, "FLOAT": tiles.number}
    arrays = gpu.by_name(q=gpu.as_tensor(q), k=gpu.as_tensor(k), v=None if v is None else gpu.as_tensor(v))
    rules = gpu.rules(problem, device)
    grid = (-(-pack * problem.queries // height) * (problem.batch * problem.heads // pack), splits)
    row_kernels.rows[grid](
        **arrays, d_k=problem.d_k, d_v=d_v, rules=rules, want=want, part=part, pack=pack, per_key=per_key,
        per_value=per_value, split=split, count=top, M=height, N=tiles.passed, DK=gpu.padded(problem.d_k),
        PRECISION=tiles.precision, **sizes, REPAIR=repair, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if split:
        row_kernels.merge[(-(-lines // 16),)](
            rules=rules, want=want, part=part, lines=lines, splits=splits, d_v=d_v, count=top, M=16, **sizes
        )


def _split(problem: Problem, pack: int) -> int | None:
    """Keys per program if queries are few and keys many, else None; it depends on lengths only, not on the batch."""
    if pack * problem.queries > _FEW_ROWS or problem.keys <= _LONG:
        return None
    return -(-problem.keys // (_SPLITS * _SPLIT)) * _SPLIT


@_there
def columns(problem: Problem, q: Array, k: Array, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """The column statistics, from weights recomputed with the log-sum-exp; images are computed in bands of queries."""
    return ColumnPass(problem, q, k, logsumexp).answers(want, q)


@_there
def weights(problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
    """Every weight of this (small) problem: exp(logit - log-sum-exp)."""
    shape = problem.batch, problem.heads, problem.queries, problem.keys
    found = torch.zeros(shape, dtype=gpu.statistics(problem), device=gpu.device_of(q))
    ColumnPass(problem, q, k, logsumexp).launch(NOTHING._replace(weights=found))
    return gpu.from_tensor(found, q)


@_there
def transposed(problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d)."""
    shape = problem.batch, problem.heads, problem.keys, g.shape[-1]
    found = torch.zeros(shape, dtype=gpu.statistics(problem), device=gpu.device_of(q))
    look = ColumnPass(problem, q, k, logsumexp)
    for start in range(0, g.shape[-1], _COLUMNS):
        part = found[..., start : start + _COLUMNS]
        here = part if found.shape[-1] <= _COLUMNS else torch.empty_like(part, memory_format=torch.contiguous_format)
        look.launch(NOTHING._replace(product=here), g=g[..., start : start + _COLUMNS])
        if here is not part:
            part.copy_(here)
    return gpu.from_tensor(found, q)


@_there
def gradients(
    problem: Problem, q: Array, k: Array, v: Array | None, logsumexp: Array, upstream: Upstream
) -> dict[str, Array]:
    """The gradients of q, k, v, bias and spans. Each element has one writer: results are deterministic."""
    if v is not None and upstream.output is not None and not v.dtype == upstream.output.dtype == problem.dtype:
        wide = widened(problem, v)
        told = replace(upstream, output=upstream.output.astype(wide.dtype))
        q, k, v = (x.astype(wide.dtype) for x in (q, k, v))
        return narrowed(problem, gradients(wide, q, k, v, logsumexp, told), keep_float32=upstream.keep_float32)
    return _derivatives(problem, q, k, v, logsumexp, upstream)


def _derivatives(
    problem: Problem, q: Array, k: Array, v: Array | None, logsumexp: Array, upstream: Upstream,
    moving: "Moving | None" = None,
) -> dict[str, Array]:  # fmt: skip
    own = gpu.statistics(problem) if upstream.keep_float32 else gpu.input_dtype(problem)
    if v is None or upstream.output is None or v.shape[-1] <= MOST_D:
        found = Derivatives(problem, q, k, v, logsumexp, upstream, moving).all(own)
    else:
        parts = in_parts(problem, q, k, v, logsumexp, upstream, moving, MOST_D)
        found = {name: x if name in ("bias", "spans") else x.to(own) for name, x in parts.items()}
    return {name: gpu.from_tensor(tensor, q) for name, tensor in found.items()}


@_there
def tangents(
    problem: Problem, q: Array, k: Array, v: Array | None, along: Directions, want: Wanted,
    logsumexp: Array | None = None, output: Array | None = None,
) -> dict[str, Array]:  # fmt: skip
    """The tangents of the output and of the row statistics; a row pass first where the log-sum-exp is unknown."""
    if v is not None and v.dtype != problem.dtype:
        wide = widened(problem, v)
        q, k, v, along = *(x.astype(wide.dtype) for x in (q, k, v)), widened_along(wide, along)
        found = tangents(wide, q, k, v, along, want, logsumexp, None)
        if "output_tangent" in found and not want.keep_float32:
            found["output_tangent"] = found["output_tangent"].astype(problem.dtype)
        return narrowed(problem, found, keep_float32=want.keep_float32)
    values = v if want.output else None
    found = {}
    exact = output is not None and output.dtype == statistics_dtype(problem.dtype)  # a rounded one would lose digits
    if logsumexp is None or (values is not None and not exact):
        asked = replace(want, logsumexp=True) if logsumexp is None else Wanted(output=True)
        found = rows(problem, q, k, v, replace(asked, keep_float32=True))
        output = found.get("output")
    known = found["logsumexp"] if logsumexp is None else logsumexp
    moved = along_rows(problem, q, k, values, along, want, known, output, MOST_D)
    answers = {f"{name}_tangent": gpu.from_tensor(tensor, q) for name, tensor in moved.items()}
    if logsumexp is not None:
        return answers
    own = statistics_dtype(problem.dtype) if want.keep_float32 else problem.dtype
    return {name: x.astype(own) if name == "output" else x for name, x in found.items()} | answers


@_there
def column_tangents(
    problem: Problem, q: Array, k: Array, along: Directions, kept: Kept, want: Wanted
) -> dict[str, Array]:  # fmt: skip
    """The tangents of the column statistics, from tangents of weights."""
    along = replace(along, v=None)
    return ColumnPass(problem, q, k, kept.logsumexp, along, kept.tangent).answers(want, q)


@_there
def gradient_tangents(
    problem: Problem, q: Array, k: Array, v: Array | None, along: Directions, kept: Kept, upstream: Upstream,
    changing: Upstream,
) -> dict[str, Array]:  # fmt: skip
    """The tangents of the gradients. Each element has one writer: results are deterministic."""
    values = v if upstream.output is not None or changing.output is not None else None
    if values is None:
        return _derivatives(problem, q, k, None, kept.logsumexp, upstream, Moving(along, kept, changing))
    if upstream.output is None and changing.output is not None:
        none = gpu.from_tensor(torch.zeros_like(gpu.as_tensor(changing.output).tensor), q)
        upstream = replace(upstream, output=none)
    given, moving = upstream.output, changing.output
    if any(x is not None and x.dtype != problem.dtype for x in (values, given, moving)):
        wide = widened(problem, values)
        q, k, values = (x.astype(wide.dtype) for x in (q, k, values))
        sides = [
            x if x.output is None else replace(x, output=x.output.astype(wide.dtype)) for x in (upstream, changing)
        ]
        found = gradient_tangents(wide, q, k, values, widened_along(wide, along), kept, *sides)
        return narrowed(problem, found, keep_float32=upstream.keep_float32)
    return _derivatives(problem, q, k, values, kept.logsumexp, upstream, Moving(along, kept, changing))


@_there
def others(problem: Problem, q: Array, k: Array, v: Array, g: Array) -> Others:
    """Each row's strongest key and what all its other keys answer, in the CPU's memory, in one pass over the keys."""
    found = no_keys((problem.batch, problem.heads, problem.queries))
    if found.logit.size and problem.keys:
        for part in Edges(problem, q, k, v, g, None, _split(problem, 1)).others():
            strongest, *rest = (x.cpu().numpy() for x in part)
            found = merged(found, Others(strongest.astype(np.int64), *[x.astype(np.float64) for x in rest]), 0)
    return found


@_there
def effects(
    problem: Problem, q: Array, k: Array, v: Array, g: Array, terms: Terms, want: WantedEffects
) -> dict[str, Array]:
    """What is wanted of the matrix of effects: one pass by queries, one by keys, and one for each band of an image."""
    found = Edges(problem, q, k, v, g, terms, _split(problem, 1)).effects(want)
    return {name: gpu.from_tensor(tensor, q) for name, tensor in found.items()}


@_there
def effect_tile(problem: Problem, q: Array, k: Array, v: Array, g: Array, terms: Terms) -> Array:
    """Every effect of this (small) problem, (batch, heads, queries, keys)."""
    return gpu.from_tensor(Edges(problem, q, k, v, g, terms).tile(), q)


@_there
def effect_product(
    problem: Problem, q: Array, k: Array, v: Array, g: Array, terms: Terms, x: Array, *, transposed: bool
) -> Array:
    """E·x, (batch, heads, queries, d), or with `transposed` Eᵀ·x, (batch, heads, keys, d)."""
    return gpu.from_tensor(Edges(problem, q, k, v, g, terms).product(x, transposed=transposed), q)
