"""The backward pass: gradients with respect to the inputs from the upstream gradients of the results.

With a_ij the weights, s_ij the logits, L_i the log-sum-exp, O the output, H the entropy, D the mean distance, R the
mass each key received, and dX the gradient of the loss with respect to X, the chain rule through a and L gives:

    dA_ij = dO_i·v_j + X_i·Y_j + dR_j - dH_i·(ln a_ij + 1) + dD_i·|i - j| + (dT at top weights, dP at each key's peak)
    dS_ij = a_ij·(dA_ij - Σ_l a_il·dA_il + dL_i) + (dM at the maximum)

The gradients of an image and of sums between groups are matrices of low rank, X·Yᵀ: one factor holds each token's
share of the pixels or groups, the other the upstream gradient spread over them. So an engine needs, besides dO, X, Y,
dR, dH and dD, only one number per row, and no weight is stored (Dao et al. 2022, appendix B). Top weights, peaks and
maxima are few and are added one by one. A sink is a logit without a value: its weight is exp((sink - m_i) - l_i), by
the row's state, and it enters only the sum over l.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import statistics_dtype, to_device_of
from clearhead.core.axes import Array, blocks, group_size
from clearhead.core.call import Call
from clearhead.core.definition import members
from clearhead.core.device_array import DeviceArray
from clearhead.core.merging import sink_weights
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.core.state import State
from clearhead.core.statistics import STATISTICS, Groups, Wanted, arrays_of
from clearhead.engines import state_of
from clearhead.engines.base import Engine, Upstream
from clearhead.errors import DerivativeError

_READY = frozenset(  # of a row's state, log_sum has the derivative of the log-sum-exp
    "log_sum" if name == "logsumexp" else arrays_of(name)[0] for name, one in STATISTICS.items() if one.derivative
)
READS = frozenset(  # the results that the backward pass reads; where the largest logit lies, it finds by itself
    array
    for name, one in STATISTICS.items() if one.derivative in ("row", "entries") and name != "max_logit"
    for array in arrays_of(name)
)  # fmt: skip
_PARTS = {"keys": "received", "entropy": "entropy", "distance": "distance"}  # terms of Upstream, and their statistics
# Single weights, (batch, heads, count): their queries, their keys, the gradient at the logit of each before the
# softmax's normalisation is counted, and whether a row sums to 1 and no row term says so: of weights, not of logits
Entries = tuple[Array, Array, Array, bool]
LowRank = tuple[Array, Array]  # X and Y, (batch, heads, queries or keys, rank), of a part of dA: dA_ij = X_i·Y_j
_PEAK_KEYS = 256  # keys whose weights are computed at a time to find each key's peak


def check_derivatives(by: Iterable[str]) -> None:
    """Raise DerivativeError when the loss depends on a result without a gradient."""
    missing = sorted({*by} - _READY)
    if missing:
        raise DerivativeError(f"{', '.join(missing)} has no derivative here.", "take it under torch.no_grad().")


def zeros(
    call: Call, bias: tuple[int, int, int, int] | None, spans: tuple[int, int, int, int] | None
) -> dict[str, Array]:
    """Gradients of zero, by name."""
    problem = call.problem
    shapes = {name: x.shape for name, x in zip("qkv", (call.q, call.k, call.v), strict=True) if x is not None}
    shapes |= {name: shape for name, shape in (("bias", bias), ("spans", spans)) if shape is not None}
    shapes |= {} if problem.sinks is None else {"sinks": (problem.heads,)}
    return {name: np.zeros(shape) for name, shape in shapes.items()}


@np.errstate(all="ignore")  # NaN and infinity are legal values, in upstream gradients too
def gradients(
    engine: Engine,
    call: Call,
    answers: Mapping[str, Array],
    by: Mapping[str, Array],
    *,
    groups: Groups | None = None,
    bias: tuple[int, int, int, int] | None = None,
    spans: tuple[int, int, int, int] | None = None,
) -> dict[str, Array]:
    """The gradients of "q", "k", "v" and, where the problem has them, "sinks" (heads,), "bias" and "spans", by name.

    answers  results of the forward pass, (batch, heads, …): the rows' states always, and each result named in `by`
    by       the upstream gradients of the results, each of its result's shape; that of the log-sum-exp as "log_sum"
    groups   the labels; needed when `by` has groups
    bias     the bias's own shape, 1 where it is broadcast, if its gradient is requested
    spans    the own shape of the table of spans, 1 where it is broadcast, if its gradient is requested
    Gradients of empty inputs are zero. Raises DerivativeError when a result in `by` has no gradient. On a device only
    results with a term per row or per key may be named; torch_recomputed.py has the others there.
    O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory beyond inputs and answers.
    """
    check_derivatives(by)
    problem, q, v = call.problem, call.q, call.v
    shapes: Any = {"bias": bias, "spans": spans}
    if not prod((problem.batch, problem.heads, problem.queries, problem.keys)):  # no weights: gradients are zero
        return {name: to_device_of(x, q) for name, x in zeros(call, bias, spans).items()}
    on_device, kept, loss, sinks = isinstance(q, DeviceArray), answers, by, problem.sinks
    xp: Any = sys.modules["torch"] if on_device else np
    dtype = statistics_dtype(problem.dtype)
    low = _low_rank(problem, by, groups)
    entries = _entries(engine, call, answers, by)
    if on_device:
        real = getattr(xp, dtype.name)
        kept, loss = ({name: cast("Any", x).tensor.to(real) for name, x in part.items()} for part in (answers, by))
        sinks = None if sinks is None else kept["log_sum"].new_tensor(sinks)

    def arranged(x: Any) -> Any:
        return DeviceArray(x) if on_device else np.ascontiguousarray(x, dtype)

    def mixed(x: Any) -> Any:  # A·x in the statistics' dtype, even for half-precision inputs
        product: Any = engine.rows(call.with_values(arranged(x)).astype(dtype), Wanted(output=True))["output"]
        return product.tensor if on_device else product

    rows = _row_terms(xp, replace(problem, sinks=sinks), kept, loss, mixed, low, entries)
    parts = {part: arranged(loss[name]) for part, name in _PARTS.items() if name in by}
    upstream = Upstream(arranged(rows), by.get("output"), **parts, **shapes)
    if low is None:
        result = dict(engine.gradients(call, _state(answers), upstream))
    else:  # X and Y as further columns of dO and v, in the statistics' dtype, since they do not fit half precision
        group, outputs, values = group_size(problem.heads, 1 if v is None else v.shape[1]), [low[0]], [low[1]]
        if v is not None and upstream.output is not None:
            outputs, values = [upstream.output, *outputs], [np.repeat(v, group, axis=1), *values]
        output, columns = _side_by_side(problem, outputs, values, dtype=dtype)
        wide = call.with_values(columns).astype(dtype)
        state = _state(answers) if dtype == problem.dtype else state_of(engine, wide)  # the logits have other bits
        result = dict(engine.gradients(wide, state, replace(upstream, output=output)))
        by_values = result.pop("v")
        if v is not None and upstream.output is not None:
            by_values = by_values[..., : v.shape[-1]]
            result["v"] = by_values.reshape(*v.shape[:2], group, *by_values.shape[2:]).sum(axis=2)
    if entries:
        result = {name: array.astype(np.float64) for name, array in result.items()}
        for one in entries:
            _add_entries(call, result, one)
    if sinks is not None:
        shares: Any = sink_weights(xp, sinks, _state(kept))
        total = xp.where(shares == 0, 0.0, shares * (rows + loss.get("entropy", 0.0))).sum((0, 2))
        result["sinks"] = cast("Array", DeviceArray(total)) if on_device else total
    return result


def _state(answers: Mapping[str, Any]) -> State:
    return State(answers["largest"], answers["log_sum"])


def _row_terms(
    xp: Any,
    problem: Problem,
    answers: Mapping[str, Any],
    by: Mapping[str, Any],
    mixed: Callable[[Any], Any],
    low: LowRank | None = None,
    entries: Sequence[Entries] = (),
) -> Any:
    """dL_i - Σ_j a_ij·dA_ij - dH_i, (batch, heads, queries); `xp` is NumPy, in float64, or torch.

    `mixed` computes A·x for x (batch, heads, keys, columns).
    """
    terms = xp.zeros_like(answers["log_sum"], dtype=xp.float64)
    if "log_sum" in by:
        terms += by["log_sum"]
    if "output" in by:
        pair = by["output"], answers["output"]
        if xp is np:
            pair = tuple(x.astype(statistics_dtype(problem.dtype), copy=False) for x in pair)
        terms -= xp.einsum("bhnd,bhnd->bhn", *pair)
    if "entropy" in by:
        mass = 1.0 if problem.sinks is None else 1 - sink_weights(xp, problem.sinks, _state(answers))
        terms -= by["entropy"] * (answers["entropy"] - mass + 1)
    if "distance" in by:
        terms -= by["distance"] * answers["distance"]
    if "received" in by:
        terms -= mixed(by["received"][..., None])[..., 0]
    if low is not None:
        terms -= np.einsum("bhnc,bhnc->bhn", low[0], mixed(low[1]))
    for batch, head in np.ndindex(terms.shape[:2]):
        for queries, _, slopes, softmax in entries:
            if softmax:
                np.subtract.at(terms[batch, head], queries[batch, head], slopes[batch, head])
    if "diagonal" in by:  # of the whole row, also where the key at its position is among other keys than these
        terms -= by["diagonal"] * answers["diagonal"].astype(np.float64)
    return terms


def _low_rank(problem: Problem, by: Mapping[str, Array], groups: Groups | None) -> LowRank | None:
    """The low-rank part of dA from images and groups, of the smaller possible rank; None where there is neither."""
    parts = []
    for name in (name for name in ("image", "groups") if name in by):
        upstream, sizes = by[name], (problem.queries, problem.keys)
        if name == "image":
            sides = (areas(n, size, slice(0, size))[1] for n, size in zip(upstream.shape[-2:], sizes, strict=True))
        else:
            assert groups is not None
            sides = (members(np.arange(n), x) for n, x in zip(upstream.shape[-2:], groups[:2], strict=True))
        tall, broad = (side.swapaxes(-1, -2) for side in sides)
        wide = upstream.shape[-2] <= upstream.shape[-1]
        parts.append((tall, broad @ upstream.swapaxes(-1, -2)) if wide else (tall @ upstream, broad))
    return _side_by_side(problem, *zip(*parts, strict=True)) if parts else None


def _side_by_side(problem: Problem, *sides: Sequence[Array], dtype: Any = np.float64) -> LowRank:
    """The columns of X and of Y side by side, (batch, heads, …, all columns)."""
    lead = problem.batch, problem.heads
    x, y = (np.concatenate([np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in s], -1, dtype=dtype) for s in sides)
    return x, y


def _entries(engine: Engine, call: Call, answers: Mapping[str, Array], by: Mapping[str, Array]) -> list[Entries]:
    """The single weights with upstream gradients: top weights, weights at the own position, peaks, row maxima."""
    problem, result = call.problem, list[Entries]()
    rows = np.arange(problem.queries)
    if "top_weights" in by:
        keys, slopes = answers["top_indices"], by["top_weights"] * answers["top_weights"].astype(np.float64)
        queries = np.broadcast_to(rows[:, None], keys.shape)
        shape = (*keys.shape[:2], -1)
        there = keys >= 0
        flat = np.where(there, slopes, 0.0).reshape(shape)
        result.append((queries.reshape(shape), np.where(there, keys, 0).reshape(shape), flat, True))
    if "diagonal" in by:
        positions = [visibility.positions(problem, batch, slice(0, problem.queries)) for batch in range(problem.batch)]
        keys, rest = np.divmod(np.stack(positions)[:, None] - problem.cols.start, problem.cols.step)
        there = (rest == 0) & (keys >= 0) & (keys < problem.keys)
        there = there & (answers["diagonal"] != 0)  # a row that does not see its own key may have any upstream gradient
        slopes = np.where(there, by["diagonal"] * answers["diagonal"].astype(np.float64), 0.0)
        keys = np.broadcast_to(np.where(there, keys, 0), slopes.shape)
        result.append((np.broadcast_to(rows, slopes.shape), keys, slopes, False))
    if "max_logit" in by:
        keys = engine.rows(call.with_values(None), Wanted(top=1))["top_indices"][..., 0]
        slopes = np.where(keys < 0, 0.0, by["max_logit"])
        result.append((np.broadcast_to(rows, keys.shape), np.maximum(keys, 0), slopes, False))
    if "peak" in by:
        queries = _peaks(engine, call, _state(answers))
        keys = np.broadcast_to(np.arange(problem.keys), queries.shape)
        slopes = by["peak"] * answers["peak"].astype(np.float64)
        result.append((queries, keys, slopes, True))
    return result


def _peaks(engine: Engine, call: Call, state: State) -> Array:
    """The query with each key's largest weight, (batch, heads, keys); the first one where several are equal."""
    problem, q, k = call.problem, call.q, call.k
    result = np.zeros((problem.batch, problem.heads, problem.keys), np.int64)
    for cols in blocks(problem.keys if problem.queries else 0, _PEAK_KEYS):
        part = problem.take(keys=range(cols.start, cols.stop))
        result[:, :, cols] = engine.weights(Call(part, q, k[:, :, cols]), state).argmax(axis=-2)
    return result


def _add_entries(call: Call, gradients: dict[str, Array], entries: Entries) -> None:
    """Add the contributions of single logits to the gradients of q, k, bias and spans."""
    problem, q, k = call.problem, call.q, call.k
    for batch, head in np.ndindex(q.shape[:2]):
        pair, kv = (batch, head), (batch, problem.kv_head_of(head))
        rows, cols, slopes = entries[0][pair], entries[1][pair], entries[2][pair]
        queries, keys = q[pair][rows].astype(np.float64), k[kv][cols].astype(np.float64)
        scale = problem.scale[head]
        by_score = scale * slopes
        if problem.softcap is not None:
            by_score = by_score * (1 - np.tanh(scale * (queries * keys).sum(-1) / problem.softcap) ** 2)
        used = slopes != 0  # elsewhere q and k may be NaN, and 0·NaN is NaN
        np.add.at(gradients["q"][pair], rows[used], (by_score[:, None] * keys)[used])
        np.add.at(gradients["k"][kv], cols[used], (by_score[:, None] * queries)[used])
        if "bias" in gradients:
            sizes, none = gradients["bias"].shape, np.zeros_like(rows[used])  # index 0 along broadcast axes of the bias
            at_logits = (none + batch, none + head, rows[used], cols[used])
            place = tuple(x if size > 1 else none for x, size in zip(at_logits, sizes, strict=True))
            np.add.at(gradients["bias"], place, slopes[used])
        if "spans" in gradients:
            assert problem.query_spans is not None
            assert problem.key_spans is not None
            labels = problem.query_spans[batch, rows[used]], problem.key_spans[batch, cols[used]]
            total = gradients["spans"][
                tuple(i if n > 1 else 0 for i, n in zip(pair, gradients["spans"].shape, strict=False))
            ]
            there = (labels[0] >= 0) & (labels[1] >= 0)
            np.add.at(total, tuple(side[there] for side in labels), slopes[used][there])
