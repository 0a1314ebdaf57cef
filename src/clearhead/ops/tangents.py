"""Derivatives along a direction: the tangents of what attention answers, and of its gradients.

backward.py has the gradients' formulas, core/directions.py those of weights along a direction. The gradient of the
logits, dS_ij = a_ij·(dO_i·v_j + X_i·Y_j + rows_i - …), becomes by the product rule

    ȧ_ij·(dO_i·v_j + …) + a_ij·(ġ_i·v_j + dO_i·v̇_j + …),    ġ the tangent of dO

so an engine needs the tangents of the same few numbers. What keys received is here a product of rank 1, X_i = 1.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import numpy as np

from clearhead.core.arrays import statistics_dtype, to_device_of
from clearhead.core.axes import Array, as_slice
from clearhead.core.device_array import DeviceArray
from clearhead.core.directions import Directions
from clearhead.core.merging import sink_weights
from clearhead.core.problem import Described, Inputs, Problem
from clearhead.core.statistics import ROW_TERMS, Groups, Wanted, arrays_of, smooth
from clearhead.engines.base import Kept, TangentEngine, Upstream
from clearhead.engines.remote import Remote
from clearhead.errors import DerivativeError
from clearhead.ops import backward

ROWS, SMOOTH = ROW_TERMS, smooth()
_TANGENT = "_tangent"


def check_smooth(names: Iterable[str], what: str, hint: str = "observe it under torch.no_grad().") -> None:
    """Raise DerivativeError for a result that jumps from key to key, and so has no such derivative.

    names   of statistics or of their arrays
    """
    missing = sorted({"top" if name in arrays_of("top") else name for name in names} - {*SMOOTH})
    if missing:
        raise DerivativeError(f"{', '.join(missing)} has no {what} here, since it jumps from one key to another.", hint)


@np.errstate(all="ignore")  # NaN and infinity are legal values
def forward(
    engine: TangentEngine,
    inputs: Inputs,
    along: Directions,
    want: Wanted,
    logsumexp: Array | None = None,
    output: Array | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Everything wanted, and its tangents, by array name; where the log-sum-exp is known, the tangents alone.

    The log-sum-exp is always among the answers, and its tangent among the tangents. An output that is known beside it
    is not computed again.

    Raises DerivativeError for what has no tangent. O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory.
    """
    check_smooth(want.names(), "forward-mode derivative")
    result = engine.tangents(inputs, along, replace(want, logsumexp=True), logsumexp, output)
    answers = {name: x for name, x in result.items() if not name.endswith(_TANGENT)}
    moved = {name.removesuffix(_TANGENT): x for name, x in result.items() if name.endswith(_TANGENT)}
    if logsumexp is not None:
        answers = {"logsumexp": logsumexp}
    if want.columns():
        kept = Kept(answers["logsumexp"], moved["logsumexp"])
        if logsumexp is None:
            answers |= engine.columns(inputs, kept.logsumexp, want)
        moved |= engine.column_tangents(inputs, along, kept, want)
    return answers, moved


def directions(moving: Described, rows: range, along: Container[str]) -> Directions:
    """Tangents that were read as the inputs and rules are, as engines take them; `along` says which of q and k move."""
    chosen = moving.problem.take(queries=rows)
    return Directions(
        q=moving.q[:, :, as_slice(rows)] if "q" in along else None,
        k=moving.k if "k" in along else None,
        v=moving.v,
        bias=chosen.bias,
        spans=chosen.span_table,
        sinks=chosen.sinks,
    )


def shared_shape(problem: Problem, name: str, shape: Sequence[int] | None) -> tuple[int, int, int, int] | None:
    """The shape in which a bias's or a table's gradient is asked for, from the input's: 1 where it is broadcast."""
    if shape is None:
        return None
    *lead, heads, height, width = 1, 1, 1, *shape
    batch = problem.batch if any(size != 1 for size in lead) else 1
    return batch, heads, problem.queries if name == "bias" and height != 1 else height, width


@dataclass(frozen=True, eq=False, slots=True)
class Derivative:
    """A linear map of the inputs' tangents and of upstream gradients.

        asked = H·along + Jᵀ·changing          gradients of inputs, or their tangents
        moved = J·along                        tangents of results

    J is the derivative of the results by the inputs, H the second derivative of Σ by·results. So a gradient is Jᵀ,
    forward mode J, and the tangent of a gradient all of it; what is missing is zero. H is symmetric: the map's
    transpose is the same map, from asked and moved to along and changing.

    answers   results of the forward pass: the log-sum-exp, and every result in `by` or `changing`
    by        upstream gradients of results; changing: upstream gradients, or the tangents of those in `by`
    groups, bias, spans   as in `backward.gradients`
    """

    engine: TangentEngine
    inputs: Inputs
    answers: Mapping[str, Array]
    by: Mapping[str, Array]
    along: Directions
    changing: Mapping[str, Array]
    groups: Groups | None = None
    bias: tuple[int, int, int, int] | None = None
    spans: tuple[int, int, int, int] | None = None


def derivative(call: Derivative, want: Wanted) -> tuple[Mapping[str, Array], dict[str, Array], dict[str, Array]]:
    """The gradients of inputs, or their tangents, the tangents of what is wanted, and the results where none are known.

    Raises DerivativeError for a result without this derivative.
    """
    engine: Any = call.engine
    if not call.along.nonzero:
        shapes: Any = {"groups": call.groups, "bias": call.bias, "spans": call.spans}
        return backward.gradients(engine, call.inputs, call.answers, call.changing, **shapes), {}, {}
    if not call.by and not call.changing:
        known = call.answers.get("logsumexp"), call.answers.get("output")
        values, moved = forward(engine, call.inputs, call.along, want, *known)
        return {}, moved, values
    gradients, moved = gradient_tangents(call)
    if want.columns():
        kept = Kept(call.answers["logsumexp"], moved["logsumexp"])
        moved |= engine.column_tangents(call.inputs, call.along, kept, want)
    return gradients, moved, {}


@np.errstate(all="ignore")
def gradient_tangents(call: Derivative) -> tuple[dict[str, Array], dict[str, Array]]:
    """The tangents of the gradients of "q", "k", "v", "sinks", "bias" and "spans"; and those of the row statistics.

    Raises DerivativeError for a result without a second derivative. O(queries·keys·(d_k + d_v)) time,
    O(queries + keys) memory beyond inputs and answers. On a GPU it copies O((queries + keys)·(d_k + d_v)) numbers.
    """
    check_smooth({*call.by, *call.changing}, "second derivative")
    like = call.inputs.q
    if isinstance(like, DeviceArray):  # the passes are there, what is between them is on the CPU
        along = {name: x for name, x in call.along.nonzero.items() if name in "qkv"}
        named = {name: getattr(call, name) for name in ("inputs", "answers", "by", "changing")}
        near: Any = backward.nearby(named) | {"along": replace(call.along, **backward.nearby(along))}
        pair = gradient_tangents(replace(call, engine=cast("TangentEngine", Remote(call.engine, like)), **near))
        by, changes = ({name: to_device_of(x, like) for name, x in part.items()} for part in pair)
        return by, changes
    problem, known = call.inputs.problem, call.answers
    if not prod((problem.batch, problem.heads, problem.queries, problem.keys)):
        still = {"logsumexp": known["logsumexp"], **call.by, **call.changing}
        zeros = backward.zeros(call.inputs, call.bias, call.spans)
        return zeros, {name: np.zeros(x.shape, x.dtype) for name, x in still.items()}
    wide, extra = _with_products(call)
    named = {*call.by, *call.changing}
    flags: Any = {name: name in named for name in ROWS}
    want = Wanted(output=wide.inputs.v is not None, **flags)
    saved = (None, None) if extra else (known["logsumexp"], known.get("output"))
    moved = dict(call.engine.tangents(wide.inputs, wide.along, want, *saved))
    kept, sides = Kept(known["logsumexp"], moved["logsumexp_tangent"]), (wide.by, wide.changing)
    upstream, moving, by_sinks = upstreams(problem, known, sides, moved, call.along.sinks, call.bias, call.spans)
    result = dict(call.engine.gradient_tangents(wide.inputs, wide.along, kept, upstream, moving))
    answered = {name.removesuffix(_TANGENT): x for name, x in moved.items() if name.endswith(_TANGENT)}
    if extra:
        by_values, v = result.pop("v", None), call.inputs.v
        if v is not None and by_values is not None and by_values.shape[-1] > extra:
            result["v"] = backward.without_columns(v, by_values)
        if "output" in answered:
            answered["output"] = answered["output"][..., : answered["output"].shape[-1] - extra].astype(problem.dtype)
    if by_sinks is not None:
        result["sinks"] = by_sinks
    return result, answered


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
    upstream, moving = (
        Upstream(
            rows=np.ascontiguousarray(np.broadcast_to(total, kept.logsumexp.shape), dtype),
            output=side.get("output"),
            **{name: np.ascontiguousarray(side[name], dtype) for name in ROWS if name in side},
            bias=bias,
            spans=spans,
            keep_float32=keep_float32,
        )
        for side, total in ((by, rows), (changing, rows_moved))
    )
    if sinks is None or sinks_moved is None:
        return upstream, moving, None
    logit, logit_moved = (total + side.get("entropy", 0.0) for side, total in ((by, rows), (changing, rows_moved)))
    each = np.where(sinks == 0, 0.0, sinks_moved * logit + sinks * logit_moved)
    return upstream, moving, each.sum((0, 2))


def _with_products(call: Derivative) -> tuple[Derivative, int]:
    """The call with the products X·Y of images, groups and received as further columns of dO and v; and how many.

    Without an upstream gradient of the output it has no v besides them.
    """
    by, changing, (problem, q, k, v) = call.by.get("output"), call.changing.get("output"), call.inputs
    if by is None and changing is None:
        v = None
    along = call.along if v is not None else replace(call.along, v=None)
    sides = [{name: x for name, x in side.items() if name in ("logsumexp", *ROWS)} for side in (call.by, call.changing)]
    parts = [*_low_rank(call)]
    if parts:
        dtype = statistics_dtype(problem.dtype)
        still, shifted = ([(x[side], y[side]) for x, y in parts] for side in (0, 1))
        moving = np.zeros_like(v) if v is not None and along.v is None else along.v
        by, v = backward.with_columns(problem, v, by, still)
        changing, moving = backward.with_columns(problem, moving, changing, shifted)
        moved = {name: x.astype(dtype, copy=False) for name, x in along.nonzero.items() if name in "qk"}
        problem, along = replace(problem, dtype=dtype), replace(along, **moved, v=moving)
        q, k = (x.astype(dtype, copy=False) for x in (q, k))
    for side, output in zip(sides, (by, changing), strict=True):
        side |= {} if output is None else {"output": output}
    wide = replace(call, inputs=Inputs(problem, q, k, v), along=along, by=sides[0], changing=sides[1])
    return wide, sum(x[0].shape[-1] for x, _ in parts)


def _low_rank(call: Derivative) -> Iterable[tuple[Any, Any]]:
    """For each part of low rank (X, Ẋ) and (Y, Ẏ): one side is known shares, the other the upstream gradient's."""
    for name in ("received", "image", "groups"):
        if name not in call.by and name not in call.changing:
            continue
        like = call.by.get(name, call.changing.get(name))
        assert like is not None
        upstream, moved = (side.get(name, np.zeros_like(like)) for side in (call.by, call.changing))
        if name == "received":
            ones = np.ones((1, 1, call.inputs.problem.queries, 1))
            yield (ones, 0 * ones), (upstream[..., None], moved[..., None])
            continue
        low, low_moved = (backward.low_rank(call.inputs.problem, name, x, call.groups) for x in (upstream, moved))
        if backward.spread_over_keys(upstream):
            yield (low.queries, 0 * low.queries), (low.keys, low_moved.keys)
        else:
            yield (low.queries, low_moved.queries), (low.keys, 0 * low.keys)


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
    for name, upstream in by.items():
        part = parts[name]
        wide = upstream.astype(dtype, copy=False)
        total = total - (
            np.einsum("bhnd,bhnd->bhn", wide, part.astype(dtype, copy=False)) if name == "output" else wide * part
        )
    return total
