"""Derivatives along a direction: the tangents of what attention answers, and of its gradients.

backward.py has the gradients' formulas, core/directions.py those of weights along a direction. The gradient of the
logits, dS_ij = a_ij·(dO_i·v_j + X_i·Y_j + rows_i - …), becomes by the product rule

    ȧ_ij·(dO_i·v_j + …) + a_ij·(ġ_i·v_j + dO_i·v̇_j + …),    ġ the tangent of dO

so an engine needs the tangents of the same few numbers. What keys received is here a product of rank 1, X_i = 1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import numpy as np

from clearhead.core.arrays import on_cpu, statistics_dtype, to_device_of
from clearhead.core.axes import Array, group_size
from clearhead.core.device_array import DeviceArray
from clearhead.core.directions import Directions
from clearhead.core.merging import sink_weights
from clearhead.core.problem import Problem
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines.base import Kept, TangentEngine, Upstream
from clearhead.engines.remote import Remote
from clearhead.errors import DerivativeError
from clearhead.ops import backward

ROWS = ("entropy", "distance", "own")  # statistics of a row that are neither its output nor its log-sum-exp
SMOOTH = ("output", "logsumexp", *ROWS, "received", "image", "groups")
_TANGENT = "_tangent"
Arrays = tuple[Array, Array, Array | None]


def check_smooth(names: Iterable[str], what: str, hint: str = "observe it under torch.no_grad().") -> None:
    """Raise DerivativeError for a result that jumps from key to key, and so has no such derivative."""
    missing = sorted({*names} - {*SMOOTH})
    if missing:
        raise DerivativeError(
            f"{', '.join(missing)} has no {what} here, since it jumps from one key to another.",
            hint,
        )


@np.errstate(all="ignore")  # NaN and infinity are legal values
def forward(
    engine: TangentEngine,
    problem: Problem,
    arrays: Arrays,
    along: Directions,
    want: Wanted,
    logsumexp: Array | None = None,
    output: Array | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Everything wanted, and its tangents, by array name; tangents alone where the log-sum-exp is known.

    With it the output may be given too, which saves the engine its product.

    The log-sum-exp is always among both.

    arrays   q (batch, heads, queries, d_k), k (batch, kv_heads, keys, d_k), v (batch, kv_heads, keys, d_v) or None
    Raises DerivativeError for what has no tangent. O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory.
    """
    check_smooth(want.names(), "forward-mode derivative")
    found = engine.tangents(problem, *arrays, along, replace(want, logsumexp=True), logsumexp, output)
    answers = {name: x for name, x in found.items() if not name.endswith(_TANGENT)}
    moved = {name.removesuffix(_TANGENT): x for name, x in found.items() if name.endswith(_TANGENT)}
    if logsumexp is not None:
        answers = {"logsumexp": logsumexp}
    if want.columns():
        kept = Kept(answers["logsumexp"], moved["logsumexp"])
        if logsumexp is None:
            answers |= engine.columns(problem, *arrays[:2], kept.logsumexp, want)
        moved |= engine.column_tangents(problem, *arrays[:2], along, kept, want)
    return answers, moved


@dataclass(frozen=True, eq=False, slots=True)
class Second:
    """A backward pass along a direction, (batch, heads, …).

    answers   results of the forward pass: the log-sum-exp, and every result in `by` or `changing`
    by        the upstream gradients of results; changing: their tangents; what is missing is zero
    groups, bias, spans   as in `backward.gradients`
    """

    engine: TangentEngine
    problem: Problem
    arrays: Arrays
    answers: Mapping[str, Array]
    by: Mapping[str, Array]
    along: Directions
    changing: Mapping[str, Array]
    groups: Groups | None = None
    bias: tuple[int, int, int, int] | None = None
    spans: tuple[int, int, int, int] | None = None


@np.errstate(all="ignore")
def gradient_tangents(call: Second) -> tuple[dict[str, Array], dict[str, Array]]:
    """The tangents of the gradients of "q", "k", "v", "sinks", "bias" and "spans"; and those of the row statistics.

    Raises DerivativeError for a result without a second derivative. O(queries·keys·(d_k + d_v)) time,
    O(queries + keys) memory beyond inputs and answers.
    """
    check_smooth({*call.by, *call.changing}, "second derivative")
    if isinstance(call.arrays[0], DeviceArray):
        return _on_device(call)
    problem = call.problem
    if not prod((problem.batch, problem.heads, problem.queries, problem.keys)):
        still = {"logsumexp": call.answers["logsumexp"], **call.by, **call.changing}
        return _zeros(call), {name: np.zeros(x.shape, x.dtype) for name, x in still.items()}
    products = _products(call)
    problem, (q, k, v), along = products.problem, products.arrays, products.along
    named = {*call.by, *call.changing}
    want = Wanted(output=v is not None, entropy="entropy" in named, distance="distance" in named, own="own" in named)
    known = None if products.extra else call.answers["logsumexp"]
    output = None if products.extra else call.answers.get("output")
    moved = dict(call.engine.tangents(problem, q, k, v, along, want, known, output))
    kept = Kept(call.answers["logsumexp"], moved["logsumexp_tangent"])
    sides = _without_products(call.by, products.by), _without_products(call.changing, products.changing)
    given, moving, by_sinks = upstreams(problem, call.answers, sides, moved, along.sinks, call.bias, call.spans)
    found = dict(call.engine.gradient_tangents(problem, q, k, v, along, kept, given, moving))
    products.restore(found, call)
    if by_sinks is not None:
        found["sinks"] = by_sinks
    answered = {name.removesuffix(_TANGENT): x for name, x in moved.items() if name.endswith(_TANGENT)}
    if products.extra and "output" in answered:
        own = answered["output"][..., : answered["output"].shape[-1] - products.extra]
        answered["output"] = own.astype(call.problem.dtype)
    return found, answered


def upstreams(
    problem: Problem,
    answers: Mapping[str, Array],
    sides: tuple[Mapping[str, Array], Mapping[str, Array]],
    moved: Mapping[str, Array],
    along_sinks: Array | None,
    bias: tuple[int, int, int, int] | None = None,
    spans: tuple[int, int, int, int] | None = None,
    *,
    keep_float32: bool = False,
) -> tuple[Upstream, Upstream, Array | None]:
    """The upstream gradient and its tangent as engines take them, and the tangent of the sinks' gradient, (heads,).

    sides    upstream gradients of the output and of row statistics, by name, and their tangents
    moved    tangents of row statistics, as an engine's `tangents` answers them
    """
    dtype, kept = statistics_dtype(problem.dtype), Kept(answers["logsumexp"], moved["logsumexp_tangent"])
    sinks = None if problem.sinks is None else sink_weights(np, problem.sinks, kept.logsumexp)
    along = 0.0 if along_sinks is None else along_sinks[:, None]
    sinks_moved = None if sinks is None else sinks * (along - kept.tangent)
    parts, parts_moved = _row_parts(answers, moved, sinks, sinks_moved)
    by, changing = sides
    rows = _row_terms(by, parts, dtype)
    rows_moved = _row_terms(changing, parts, dtype) + _row_terms(by, parts_moved, dtype)
    given, moving = (
        Upstream(
            rows=np.ascontiguousarray(np.broadcast_to(total, kept.logsumexp.shape), dtype),
            output=side.get("output"),
            entropy=_in(dtype, side.get("entropy")),
            distance=_in(dtype, side.get("distance")),
            own=_in(dtype, side.get("own")),
            bias=bias,
            spans=spans,
            keep_float32=keep_float32,
        )
        for side, total in ((by, rows), (changing, rows_moved))
    )
    if sinks is None or sinks_moved is None:
        return given, moving, None
    logit, logit_moved = (total + side.get("entropy", 0.0) for side, total in ((by, rows), (changing, rows_moved)))
    each = np.where(sinks == 0, 0.0, sinks_moved * logit + sinks * logit_moved)
    return given, moving, each.sum((0, 2))


def _on_device(call: Second) -> tuple[dict[str, Array], dict[str, Array]]:
    """`gradient_tangents` for arrays on a GPU: the passes are there, what is between them is on the CPU.

    Copies O((queries + keys)·(d_k + d_v)) numbers.
    """

    def near(given: Mapping[str, Array]) -> dict[str, Array]:
        return {name: on_cpu(x) for name, x in given.items()}

    like = call.arrays[0]
    q, k, v = (None if x is None else on_cpu(x) for x in call.arrays)
    assert q is not None
    assert k is not None
    found = gradient_tangents(
        replace(
            call,
            engine=cast("TangentEngine", Remote(call.engine, like)),
            arrays=(q, k, v),
            answers=near(call.answers),
            by=near(call.by),
            along=replace(call.along, **near({name: x for name, x in call.along.given.items() if name in "qkv"})),
            changing=near(call.changing),
        )
    )
    by, moved = ({name: to_device_of(x, like) for name, x in part.items()} for part in found)
    return by, moved


def _zeros(call: Second) -> dict[str, Array]:
    shapes = {name: x.shape for name, x in zip("qkv", call.arrays, strict=True) if x is not None}
    shapes |= {name: shape for name, shape in (("bias", call.bias), ("spans", call.spans)) if shape is not None}
    shapes |= {} if call.problem.sinks is None else {"sinks": (call.problem.heads,)}
    return {name: np.zeros(shape) for name, shape in shapes.items()}


@dataclass(frozen=True, eq=False, slots=True)
class _Products:
    """The problem with the products X·Y of images, groups and received appended to the upstream gradient and to v."""

    problem: Problem
    arrays: Arrays
    along: Directions
    by: Array | None  # dO with X
    changing: Array | None
    extra: int  # columns that were appended

    def restore(self, found: dict[str, Array], call: Second) -> None:
        """Give q, k and v back their own dtypes and heads."""
        values = found.pop("v", None)
        v = call.arrays[2]
        if self.extra and v is not None and values is not None and values.shape[-1] > self.extra:
            own = values[..., : v.shape[-1]]
            found["v"] = own.reshape(*v.shape[:2], -1, *own.shape[2:]).sum(2)
        elif not self.extra and values is not None:
            found["v"] = values


def _products(call: Second) -> _Products:
    problem, (q, k, v), along = call.problem, call.arrays, call.along
    by, changing = call.by.get("output"), call.changing.get("output")
    sides = [*_low_rank(call)]
    if by is None and changing is None:
        v, along = None, replace(along, v=None)
    if not sides:
        return _Products(problem, (q, k, v), along, by, changing, 0)
    dtype = statistics_dtype(problem.dtype)
    left: list[list[Any]] = [[], []]  # dO and X, their tangents
    right: list[list[Any]] = [[], []]  # v and Y, their tangents
    rows, cols = ((problem.batch, problem.heads, size) for size in (problem.queries, problem.keys))
    if v is not None:
        each = group_size(problem.heads, v.shape[1])
        left[0].append(np.zeros((*rows, v.shape[-1])) if by is None else by)
        left[1].append(np.zeros((*rows, v.shape[-1])) if changing is None else changing)
        right[0].append(np.repeat(v, each, axis=1))
        right[1].append(np.zeros((*cols, v.shape[-1])) if along.v is None else np.repeat(along.v, each, axis=1))
    for (x, x_moved), (y, y_moved) in sides:
        for side, size, pair in ((left, rows, (x, x_moved)), (right, cols, (y, y_moved))):
            for into, part in zip(side, pair, strict=True):
                into.append(np.broadcast_to(part, (*size, part.shape[-1])))
    extra = sum(x.shape[-1] for (x, _), _ in sides)
    outputs, values = ([np.concatenate(part, -1, dtype=dtype) for part in side] for side in (left, right))
    moved = {name: None if x is None else x.astype(dtype, copy=False) for name, x in (("q", along.q), ("k", along.k))}
    return _Products(
        replace(problem, dtype=dtype),
        (q.astype(dtype, copy=False), k.astype(dtype, copy=False), values[0]),
        replace(along, **moved, v=values[1]),
        outputs[0],
        outputs[1],
        extra,
    )


def _low_rank(call: Second) -> Iterable[tuple[Any, Any]]:
    """For each part of low rank (X, Ẋ) and (Y, Ẏ): one side is known shares, the other the upstream gradient's."""
    for name in ("received", "image", "groups"):
        if name not in call.by and name not in call.changing:
            continue
        like = call.by.get(name, call.changing.get(name))
        assert like is not None
        given, moved = (side.get(name, np.zeros_like(like)) for side in (call.by, call.changing))
        if name == "received":
            ones = np.ones((1, 1, call.problem.queries, 1))
            yield (ones, 0 * ones), (given[..., None], moved[..., None])
            continue
        low, low_moved = (backward.low_rank(call.problem, name, x, call.groups) for x in (given, moved))
        if backward.spread_over_keys(given):
            yield (low.queries, 0 * low.queries), (low.keys, low_moved.keys)
        else:
            yield (low.queries, low_moved.queries), (low.keys, 0 * low.keys)


def _without_products(side: Mapping[str, Array], output: Array | None) -> dict[str, Array]:
    kept = {name: x for name, x in side.items() if name in ("logsumexp", *ROWS)}
    return kept if output is None else {**kept, "output": output}


def _row_parts(
    answers: Mapping[str, Array], moved: Mapping[str, Array], sinks: Array | None, sinks_moved: Array | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each upstream gradient is multiplied by in a row's term, and the tangents of that."""
    parts: dict[str, Any] = {"logsumexp": -1.0}
    parts_moved: dict[str, Any] = {"logsumexp": 0.0}
    if "output_tangent" in moved:
        parts["output"] = moved.get("output", answers.get("output"))
        parts_moved["output"] = moved["output_tangent"]
    for name in ROWS:
        if f"{name}_tangent" in moved:
            parts[name], parts_moved[name] = answers[name], moved[f"{name}_tangent"]
    if "entropy" in parts:
        parts["entropy"] = parts["entropy"] + (0.0 if sinks is None else sinks)
        parts_moved["entropy"] = parts_moved["entropy"] + (0.0 if sinks_moved is None else sinks_moved)
    return parts, parts_moved


def _row_terms(by: Mapping[str, Array], parts: Mapping[str, Any], dtype: Any) -> Any:
    """-Σ of the upstream gradients times the parts, (batch, heads, queries)."""
    total: Any = 0.0
    for name, given in by.items():
        part = parts[name]
        wide = given.astype(dtype, copy=False)
        total = total - (
            np.einsum("bhnd,bhnd->bhn", wide, part.astype(dtype, copy=False)) if name == "output" else wide * part
        )
    return total


def _in(dtype: Any, x: Array | None) -> Array | None:
    return None if x is None else np.ascontiguousarray(x, dtype)
