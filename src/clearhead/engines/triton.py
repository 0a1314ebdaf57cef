"""The Triton engine: hands tensors in a GPU's memory to the kernels in gpu/; no arithmetic.

Sums are in float32 (float64 for float64); float32 products are exact ones unless PyTorch was told that TF32 will do
(torch.backends.cuda.matmul.allow_tf32). Where TRITON_INTERPRET is set, Triton's interpreter runs the same kernels on
the CPU's memory: slowly, for tests.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from math import gcd
from typing import Any, ParamSpec, TypeVar

import numpy as np

from clearhead.axes import Array
from clearhead.engines.base import Upstream, narrowed, widened
from clearhead.observations import Groups, Wanted
from clearhead.problem import Problem

try:
    import torch
    import triton

    from clearhead.engines.gpu import given as gpu
    from clearhead.engines.gpu import library
    from clearhead.engines.gpu.backward import Derivatives
    from clearhead.engines.gpu.columns import Columns
    from clearhead.engines.gpu.columns import columns as columns_kernel
    from clearhead.engines.gpu.columns import pool as pool_kernel
    from clearhead.engines.gpu.rows import Partial, Rows
    from clearhead.engines.gpu.rows import merge as merge_kernel
    from clearhead.engines.gpu.rows import rows as rows_kernel

    _NOTHING = Columns(None, None, None, None)
except ImportError:
    triton = None

MOST_D = 256
_P = ParamSpec("_P")
_R = TypeVar("_R")
_COLUMNS = 128  # of a product at a time
_BAND = 64  # pixel rows or query groups at a time
_FEW_ROWS = 64  # so many rows of a key head are one tile: decoding
_LONG = 4096  # more keys than this are split among programs where rows are few, into so many parts of whole blocks
_SPLITS, _SPLIT = 64, 256


def _there(pass_: Callable[_P, _R]) -> Callable[_P, _R]:
    """Launch on the device where q is; in the interpreter, which computes with NumPy, infinities are values."""

    @wraps(pass_)
    def launched(*args: _P.args, **named: _P.kwargs) -> _R:
        device = gpu.place_of(args[1])  # type: ignore[arg-type]
        with torch.cuda.device(device) if device.type == "cuda" else np.errstate(all="ignore"):
            return pass_(*args, **named)

    return launched


def missing() -> str:
    """Why the kernels cannot run at all; "" where they can."""
    return "triton or torch is not installed." if triton is None else ""


def reasons_not(problem: Problem) -> list[str]:
    """Why not: no Triton, arrays elsewhere, rows of q and k that are too wide."""
    against = [missing()] if triton is None else []
    if triton is not None and problem.device == "cpu" and not triton.knobs.runtime.interpret:
        against.append("the arrays are in the CPU's memory, and TRITON_INTERPRET is not set.")
    if problem.d_k > MOST_D:
        against.append(f"d_k is {problem.d_k}: the kernels hold at most {MOST_D}.")
    return against


@_there
def rows(problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    if want.output and v is not None and v.dtype != problem.dtype:
        wide = widened(problem, v)
        found = rows(wide, q.astype(wide.dtype), k.astype(wide.dtype), v.astype(wide.dtype), want)
        return narrowed(problem, found, unrounded=want.unrounded)
    if want.output and v is not None and v.shape[-1] > MOST_D:
        return _rows_in_parts(problem, q, k, v, want)
    if want.output_alone() and not want.unrounded and v is not None and not library.reasons_not(problem, q, k, v):
        output = library.output(problem, q, k, v)
        if output is not None:
            if problem.causal:
                _launch_rows(problem, q, k, v, 0, {"output": output}, repair=True)
            return {"output": gpu.taken(output, q)}
    device, number = gpu.place_of(q), gpu.statistics(problem)
    shape = (problem.batch, problem.heads, problem.queries)
    room: dict[str, Any] = {}
    if want.output and v is not None:
        own = number if want.unrounded else gpu.own_dtype(problem)
        room["output"] = torch.empty((*shape, v.shape[-1]), dtype=own, device=device)
    for name in ("logsumexp", "max_logit", "entropy", "distance"):
        if getattr(want, name):
            room[name] = torch.empty(shape, dtype=number, device=device)
    if want.top is not None:
        room["top_weights"] = torch.empty((*shape, want.top), dtype=number, device=device)
        room["top_indices"] = torch.empty((*shape, want.top), dtype=torch.int64, device=device)
    if problem.batch * problem.heads * problem.queries:
        _launch_rows(problem, q, k, v if want.output else None, want.top or 0, room)
    return {name: gpu.taken(tensor, q) for name, tensor in room.items()}


def _rows_in_parts(problem: Problem, q: Array, k: Array, v: Array, want: Wanted) -> dict[str, Array]:
    """Values too wide for a tile, some columns at a time."""
    first, *others = (v[..., start : start + MOST_D] for start in range(0, v.shape[-1], MOST_D))
    found = rows(problem, q, k, first, want)
    rest = Wanted(output=True, unrounded=want.unrounded)
    parts = [found["output"], *(rows(problem, q, k, part, rest)["output"] for part in others)]
    return {**found, "output": gpu.taken(torch.cat([gpu.given(part).tensor for part in parts], -1), q)}


def _launch_rows(
    problem: Problem, q: Array, k: Array, v: Array | None, top: int, found: dict[str, Any], *, repair: bool = False
) -> None:
    device, number = gpu.place_of(q), gpu.statistics(problem)
    output = found.get("output")
    d_v = 0 if v is None else v.shape[-1]
    tiles = gpu.tiles(problem, d_v, "rows")
    per_key = problem.heads // k.shape[1]
    per_value = per_key if v is None else problem.heads // v.shape[1]
    together = gcd(per_key, per_value)
    pack = together if together * problem.queries <= _FEW_ROWS else 1
    height = min(tiles.owned, max(_FEW_ROWS, gpu.padded(pack * problem.queries)))
    split = None if repair else _split(problem, pack)
    splits = 1 if split is None else -(-problem.keys // split)
    slots = max(2, triton.next_power_of_2(top)) if top else 2
    lines = problem.batch * problem.heads * problem.queries

    def room(wanted: bool, *tail: int, dtype: Any = number) -> Any:  # noqa: FBT001
        return torch.empty((splits, lines, *tail), dtype=dtype, device=device) if wanted and split else None

    want = Rows(*(found.get(name) for name in Rows._fields))
    part = Partial(
        maximum=room(True),
        total=room(True),
        centred=room(want.entropy is not None),
        far=room(want.distance is not None),
        top=room(top > 0, slots),
        places=room(top > 0, slots, dtype=torch.int32),
        output=room(output is not None, d_v),
    )
    sizes = {"DV": gpu.padded(d_v), "TOP": slots, "FLOAT": tiles.number}
    own_q, own_k = gpu.given(q), gpu.given(k)
    own_v = (None, (0, 0, 0, 0)) if v is None else gpu.given(v)
    rules = gpu.rules(problem, device)
    grid = (-(-pack * problem.queries // height) * (problem.batch * problem.heads // pack), splits)
    rows_kernel[grid](
        *own_q, *own_k, *own_v, problem.d_k, d_v, rules, want, part, pack, per_key, per_value, split, top,
        M=height, N=tiles.passed, DK=gpu.padded(problem.d_k), PRECISION=tiles.precision, **sizes,
        REPAIR=repair, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if split:
        merge_kernel[(-(-lines // 16),)](rules, want, part, lines, splits, d_v, top, M=16, **sizes)


def _split(problem: Problem, pack: int) -> int | None:
    """How many keys a program takes where queries are few and keys many: by lengths alone, never by the batch."""
    if pack * problem.queries > _FEW_ROWS or problem.keys <= _LONG:
        return None
    return -(-problem.keys // (_SPLITS * _SPLIT)) * _SPLIT


@_there
def columns(problem: Problem, q: Array, k: Array, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """The column statistics, from the weights computed again; a picture's pass goes through the queries in bands."""
    device, number = gpu.place_of(q), gpu.statistics(problem)
    lead = problem.batch, problem.heads
    found: dict[str, Any] = {}
    for name in ("received", "peak"):
        if getattr(want, name):
            found[name] = torch.zeros((*lead, problem.keys), dtype=number, device=device)
    look = _Look(problem, q, k, logsumexp)
    simple: dict[str, Any] = {name: found[name] for name in ("received", "peak") if name in found}
    if want.image is not None:
        found["image"] = torch.zeros((*lead, *want.image), dtype=number, device=device)
        _image(look, found["image"], simple)
    elif simple:
        look.launch(_NOTHING._replace(**simple))
    if want.groups is not None:
        found["groups"] = torch.zeros((*lead, *want.groups.counts), dtype=number, device=device)
        _groups(look, want.groups, found["groups"])
    return {name: gpu.taken(tensor, q) for name, tensor in found.items()}


@_there
def weights(problem: Problem, q: Array, k: Array, logsumexp: Array) -> Array:
    """Every weight of this (small) problem: exp(logit - log-sum-exp)."""
    shape = problem.batch, problem.heads, problem.queries, problem.keys
    found = torch.zeros(shape, dtype=gpu.statistics(problem), device=gpu.place_of(q))
    _Look(problem, q, k, logsumexp).launch(_NOTHING._replace(weights=found))
    return gpu.taken(found, q)


@_there
def transposed(problem: Problem, q: Array, k: Array, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g: g (batch, heads or 1, queries, d) to (batch, heads, keys, d)."""
    shape = problem.batch, problem.heads, problem.keys, g.shape[-1]
    found = torch.zeros(shape, dtype=gpu.statistics(problem), device=gpu.place_of(q))
    look = _Look(problem, q, k, logsumexp)
    for start in range(0, g.shape[-1], _COLUMNS):
        part = found[..., start : start + _COLUMNS]
        here = part if found.shape[-1] <= _COLUMNS else torch.empty_like(part, memory_format=torch.contiguous_format)
        look.launch(_NOTHING._replace(product=here), g=g[..., start : start + _COLUMNS])
        if here is not part:
            part.copy_(here)
    return gpu.taken(found, q)


class _Look:
    """The column pass over one problem, ready to be launched for different answers."""

    def __init__(self, problem: Problem, q: Array, k: Array, logsumexp: Array) -> None:
        self.problem, self.device = problem, gpu.place_of(q)
        self.q, self.k = gpu.given(q), gpu.given(k)
        self.logsumexp = gpu.gapless(logsumexp, gpu.statistics(problem))
        self.per_key = problem.heads // max(1, k.shape[1])
        self.rules = gpu.rules(problem, self.device)

    def launch(
        self,
        to: "Columns",
        g: Array | None = None,
        labels: Any = None,
        band: tuple[int, int, int] = (0, 1, 0),  # the first column of g to be made, of how many, and how many now
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
        owned = tiles.owned if to.product is None else min(tiles.owned, 64)  # a product fills registers
        given: tuple[Any, tuple[int, ...]] = (None, (0, 0, 0, 0)) if g is None else gpu.given(g)
        if g is not None and g.shape[1] == 1:
            given = (given[0], (given[1][0], 0, *given[1][2:]))
        columns_kernel[(-(-problem.keys // owned) * problem.batch * problem.heads,)](
            *self.q, *self.k, self.logsumexp, *given, labels, problem.d_k, self.rules, to, self.per_key, *band[:2],
            columns, span, whole(only), M=owned, N=tiles.passed, DK=gpu.padded(problem.d_k),
            D=gpu.padded(columns), FLOAT=tiles.number, PRECISION=tiles.precision,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


def _image(look: _Look, image: Any, simple: dict[str, Any]) -> None:
    """The picture in bands of pixel rows: each passes over its own queries, then pools the keys of each column."""
    height, n = image.shape[-2], look.problem.queries
    for first in range(0, height, _BAND):
        count = min(_BAND, height - first)
        span = first * n // height, -(-(first + count) * n // height)
        only = first * n // height, (first + count) * n // height
        product = torch.zeros((*image.shape[:2], look.problem.keys, count), dtype=image.dtype, device=look.device)
        to = Columns(simple.get("received"), simple.get("peak"), None, product)
        look.launch(to, band=(first, height, count), span=span, only=only)
        _pool(look, product, image, first)


def _groups(look: _Look, groups: Groups, found: Any) -> None:
    """Sums between groups in bands of query groups: each passes over the queries from its first to its last."""
    if not found.numel():
        return
    labels = torch.from_numpy(np.ascontiguousarray(groups.queries, np.int32)).to(look.device)
    order = np.argsort(groups.keys, axis=-1, kind="stable")
    ranks = np.take_along_axis(groups.keys, order, axis=-1)
    starts = np.array([np.searchsorted(row, np.arange(groups.counts[1] + 1)) for row in ranks]).reshape(len(ranks), -1)
    table = tuple(torch.from_numpy(np.ascontiguousarray(x, np.int32)).to(look.device) for x in (order, starts))
    for first in range(0, groups.counts[0], _BAND):
        count = min(_BAND, groups.counts[0] - first)
        inside = np.flatnonzero(((groups.queries >= first) & (groups.queries < first + count)).any(axis=0))
        if len(inside):
            product = torch.zeros((*found.shape[:2], look.problem.keys, count), dtype=found.dtype, device=look.device)
            span = int(inside[0]), int(inside[-1]) + 1
            look.launch(_NOTHING._replace(product=product), labels=labels, band=(first, 1, count), span=span)
            _pool(look, product, found, first, table)


def _pool(look: _Look, product: Any, found: Any, first: int, table: tuple[Any, ...] = (None, None)) -> None:
    """Add up the keys of each pixel column or group: into found[:, :, first:, :]."""
    batch, heads, height, parts = found.shape
    if found.numel() and product.numel():
        number = gpu.tiles(look.problem, 0, "columns").number
        columns = product.shape[-1]
        pool_kernel[(parts * batch * heads,)](
            product, found, *table, look.problem.keys, parts, heads, columns, first, height,
            D=gpu.padded(columns), FLOAT=number, N=32,
        )  # fmt: skip


@_there
def gradients(
    problem: Problem, q: Array, k: Array, v: Array | None, logsumexp: Array, upstream: Upstream
) -> dict[str, Array]:
    """The loss's derivatives by q, k, v and the bias; no two programs add to one place."""
    if v is not None and upstream.output is not None and not v.dtype == upstream.output.dtype == problem.dtype:
        wide = widened(problem, v)
        told = replace(upstream, output=upstream.output.astype(wide.dtype))
        q, k, v = (x.astype(wide.dtype) for x in (q, k, v))
        return narrowed(problem, gradients(wide, q, k, v, logsumexp, told), unrounded=upstream.unrounded)
    own = gpu.statistics(problem) if upstream.unrounded else gpu.own_dtype(problem)
    if v is None or upstream.output is None or v.shape[-1] <= MOST_D:
        found = Derivatives(problem, q, k, v, logsumexp, upstream).all(own)
    else:
        parts = _derivatives_in_parts(problem, q, k, v, logsumexp, upstream)
        found = {name: x if name == "bias" else x.to(own) for name, x in parts.items()}
    return {name: gpu.taken(tensor, q) for name, tensor in found.items()}


def _derivatives_in_parts(
    problem: Problem, q: Array, k: Array, v: Array, logsumexp: Array, upstream: Upstream
) -> dict[str, Any]:
    """Values too wide for a tile, some columns at a time, unrounded: dS is linear in what is known of the loss."""
    found: dict[str, Any] = {}
    by_v = []
    for start in range(0, v.shape[-1], MOST_D):
        told = replace(upstream, output=upstream.output[..., start : start + MOST_D])  # type: ignore[index]
        if found:
            nothing = gpu.taken(torch.zeros(upstream.rows.shape, device=gpu.place_of(q)), q)
            told = Upstream(nothing, told.output, bias=told.bias)
        part = Derivatives(problem, q, k, v[..., start : start + MOST_D], logsumexp, told).all(gpu.statistics(problem))
        by_v.append(part.pop("v"))
        found = {name: found[name] + x if found else x for name, x in part.items()}
    return {**found, "v": torch.cat(by_v, -1)}
