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

from clearhead.core.axes import Array, group_size
from clearhead.core.effects import Others, Terms, WantedEffects, merged, no_keys
from clearhead.core.problem import Problem
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines.base import Upstream, kinds, narrowed, row_kinds, unsupported, widened

try:
    import torch
    import triton

    from clearhead.engines.gpu import columns as column_kernels
    from clearhead.engines.gpu import library
    from clearhead.engines.gpu import rows as row_kernels
    from clearhead.engines.gpu import tensors as gpu
    from clearhead.engines.gpu.backward import Derivatives
    from clearhead.engines.gpu.causes import Edges
    from clearhead.engines.gpu.columns import Columns
    from clearhead.engines.gpu.labels import ordered
    from clearhead.engines.gpu.rows import Partial, Rows

    STATISTICS = row_kernels.STATISTICS | column_kernels.STATISTICS
    _NOTHING = Columns(None, None, None, None)
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
_BAND = 64  # pixel rows or query groups per launch
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
    device = gpu.device_of(q)
    found = {
        name: torch.zeros(shape, dtype=gpu.torch_dtype(dtype), device=device)
        for name, (shape, dtype) in kinds(problem, want, want.columns(), STATISTICS).items()
    }
    look = _Look(problem, q, k, logsumexp)
    per_key = {name: tensor for name, tensor in found.items() if name in Columns._fields}
    if "image" in found:
        _image(look, found["image"], per_key)
    elif per_key:
        look.launch(_NOTHING._replace(**per_key))
    if want.groups is not None:
        _groups(look, want.groups, found["groups"])
    return {name: gpu.from_tensor(tensor, q) for name, tensor in found.items()}


@_there
def weights(problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
    """Every weight of this (small) problem: exp(logit - log-sum-exp)."""
    shape = problem.batch, problem.heads, problem.queries, problem.keys
    found = torch.zeros(shape, dtype=gpu.statistics(problem), device=gpu.device_of(q))
    _Look(problem, q, k, logsumexp).launch(_NOTHING._replace(weights=found))
    return gpu.from_tensor(found, q)


@_there
def transposed(problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d)."""
    shape = problem.batch, problem.heads, problem.keys, g.shape[-1]
    found = torch.zeros(shape, dtype=gpu.statistics(problem), device=gpu.device_of(q))
    look = _Look(problem, q, k, logsumexp)
    for start in range(0, g.shape[-1], _COLUMNS):
        part = found[..., start : start + _COLUMNS]
        here = part if found.shape[-1] <= _COLUMNS else torch.empty_like(part, memory_format=torch.contiguous_format)
        look.launch(_NOTHING._replace(product=here), g=g[..., start : start + _COLUMNS])
        if here is not part:
            part.copy_(here)
    return gpu.from_tensor(found, q)


class _Look:
    """The column pass over one problem; `launch` runs it for the results requested."""

    def __init__(self, problem: Problem, q: Array, k: Array, logsumexp: Array) -> None:
        self.problem, self.device = problem, gpu.device_of(q)
        self.q, self.k = gpu.as_tensor(q), gpu.as_tensor(k)
        self.logsumexp = gpu.contiguous(logsumexp, gpu.statistics(problem))
        self.per_key = problem.group
        self.rules = gpu.rules(problem, self.device)

    def launch(
        self,
        to: "Columns",
        g: Array | None = None,
        labels: Any = None,
        band: tuple[int, int, int] = (0, 1, 0),  # first pixel row or group, image height, count
        span: tuple[int, int] | None = None,
        only: tuple[int, int] | None = None,
    ) -> None:
        problem = self.problem
        columns = band[2] if g is None else g.shape[-1]
        tiles = gpu.tiles(problem, 0, "columns")
        if not problem.batch * problem.heads * problem.keys * problem.queries:
            return

        def whole(part: tuple[int, int] | None) -> tuple[int, int] | None:
            return None if part is None else tuple(-(-x // tiles.passed) * tiles.passed for x in part)  # type: ignore[return-value]

        if span is not None:
            span = span[0] // tiles.passed * tiles.passed, -(-span[1] // tiles.passed) * tiles.passed
        owned = tiles.owned if to.product is None else min(tiles.owned, 64)  # a product takes many registers
        given = None if g is None else gpu.as_tensor(g)
        if g is not None and given is not None and g.shape[1] == 1:
            given = given._replace(strides=(given.strides[0], 0, *given.strides[2:]))
        column_kernels.columns[(-(-problem.keys // owned) * problem.batch * problem.heads,)](
            **gpu.by_name(q=self.q, k=self.k, g=given), lse=self.logsumexp, labels=labels, d_k=problem.d_k,
            rules=self.rules, to=to, per_key=self.per_key, first=band[0], size=band[1], columns=columns, span=span,
            only=whole(only), M=owned, N=tiles.passed, DK=gpu.padded(problem.d_k), D=gpu.padded(columns),
            FLOAT=tiles.number, PRECISION=tiles.precision, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


def _image(look: _Look, image: Any, per_key: dict[str, Any]) -> None:
    """Image in bands of pixel rows: each launch covers the band's queries, then keys are pooled into pixel columns."""
    height, n = image.shape[-2], look.problem.queries
    for first in range(0, height, _BAND):
        count = min(_BAND, height - first)
        span = first * n // height, -(-(first + count) * n // height)
        only = first * n // height, (first + count) * n // height
        product = torch.zeros((*image.shape[:2], look.problem.keys, count), dtype=image.dtype, device=look.device)
        to = _NOTHING._replace(**per_key, product=product)
        look.launch(to, band=(first, height, count), span=span, only=only)
        _pool(look, product, image, first)


def _groups(look: _Look, groups: Groups, found: Any) -> None:
    """Sums between groups in bands of query groups: each launch covers the queries from the band's first to last."""
    if not found.numel():
        return
    labels = gpu.to_device(groups.queries, np.int32, look.device)
    table = tuple(gpu.to_device(x, np.int32, look.device) for x in ordered(groups.keys, groups.counts[1]))
    for first in range(0, groups.counts[0], _BAND):
        count = min(_BAND, groups.counts[0] - first)
        inside = np.flatnonzero(((groups.queries >= first) & (groups.queries < first + count)).any(axis=0))
        if len(inside):
            product = torch.zeros((*found.shape[:2], look.problem.keys, count), dtype=found.dtype, device=look.device)
            span = int(inside[0]), int(inside[-1]) + 1
            look.launch(_NOTHING._replace(product=product), labels=labels, band=(first, 1, count), span=span)
            _pool(look, product, found, first, table)


def _pool(look: _Look, product: Any, found: Any, first: int, table: tuple[Any, ...] = (None, None)) -> None:
    """Sum the product over the keys of each pixel column or key group, into found[:, :, first:, :]."""
    batch, heads, height, parts = found.shape
    if found.numel() and product.numel():
        number = gpu.tiles(look.problem, 0, "columns").number
        columns = product.shape[-1]
        column_kernels.pool[(parts * batch * heads,)](
            product, found, *table, look.problem.keys, parts, heads, columns, first, height,
            D=gpu.padded(columns), FLOAT=number, N=32,
        )  # fmt: skip


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
    own = gpu.statistics(problem) if upstream.keep_float32 else gpu.input_dtype(problem)
    if v is None or upstream.output is None or v.shape[-1] <= MOST_D:
        found = Derivatives(problem, q, k, v, logsumexp, upstream).all(own)
    else:
        parts = _derivatives_in_parts(problem, q, k, v, logsumexp, upstream)
        found = {name: x if name in ("bias", "spans") else x.to(own) for name, x in parts.items()}
    return {name: gpu.from_tensor(tensor, q) for name, tensor in found.items()}


def _derivatives_in_parts(
    problem: Problem, q: Array, k: Array, v: Array, logsumexp: Array, upstream: Upstream
) -> dict[str, Any]:
    """For d_v above MOST_D: gradients from slices of d_v, summed in the statistics' dtype, as dS is linear in dO."""
    found: dict[str, Any] = {}
    by_v = []
    for start in range(0, v.shape[-1], MOST_D):
        told = replace(upstream, output=upstream.output[..., start : start + MOST_D])  # type: ignore[index]
        if found:
            nothing = gpu.from_tensor(torch.zeros(upstream.rows.shape, device=gpu.device_of(q)), q)
            told = Upstream(nothing, told.output, bias=told.bias, spans=told.spans)
        part = Derivatives(problem, q, k, v[..., start : start + MOST_D], logsumexp, told).all(gpu.statistics(problem))
        by_v.append(part.pop("v"))
        found = {name: found[name] + x if found else x for name, x in part.items()}
    return {**found, "v": torch.cat(by_v, -1)}


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
