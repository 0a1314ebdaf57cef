"""The backward pass: computes gradients of the inputs from upstream gradients of the results.

With a_ij the weights, s_ij the logits, L_i the log-sum-exp, O the output, H the entropy, D the mean distance, R the
weight each key received, and dX the gradient of the loss with respect to X, the chain rule through a and L gives:

    dA_ij = dO_i·v_j + dR_j - dH_i·(ln a_ij + 1) + dD_i·|i - j|
    dS_ij = a_ij·(dA_ij - Σ_l a_il·dA_il + dL_i)

So besides dO, dR, dH and dD, an engine needs only one number per row, and no weight is stored (Dao et al. 2022,
appendix B). torch_recomputed.py handles results whose derivative has another form. A sink is a logit without a value:
its weight is exp((sink - m_i) - l_i), from the row's state, and it enters only the sum over l.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from clearhead.core.arrays import statistics_dtype, to_device_of
from clearhead.core.axes import Array
from clearhead.core.call import Call
from clearhead.core.namespace import astype, beside, namespace, raw, wrapped
from clearhead.core.state import State
from clearhead.core.statistics import STATISTICS, Wanted, arrays_of
from clearhead.engines.base import Engine, Upstream
from clearhead.errors import DerivativeError

_READY = frozenset(  # of a row's state, log_sum has the derivative of the log-sum-exp
    "log_sum" if name == "logsumexp" else arrays_of(name)[0] for name, one in STATISTICS.items() if one.derivative
)
READS = frozenset(  # the results that a gradient reads: terms per row, and top's keys, where it is recomputed
    array for name, one in STATISTICS.items() if one.derivative == "row" or name == "top" for array in arrays_of(name)
)
_PARTS = {"keys": "received", "entropy": "entropy", "distance": "distance"}  # terms of Upstream, and their statistics


def check_derivatives(by: Iterable[str]) -> None:
    """Raise DerivativeError if the loss depends on a result without a derivative."""
    missing = sorted({*by} - _READY)
    if missing:
        raise DerivativeError(f"{', '.join(missing)} has no derivative here.", "take it under torch.no_grad().")


@np.errstate(all="ignore")  # NaN and infinity are legal values, in upstream gradients too
def gradients(
    engine: Engine,
    call: Call,
    answers: Mapping[str, Array],
    by: Mapping[str, Array],
    *,
    bias: tuple[int, int, int, int] | None = None,
    spans: tuple[int, int, int, int] | None = None,
) -> dict[str, Array]:
    """Compute the gradients of "q", "k", "v" and, if the problem has them, "sinks" (heads,), "bias" and "spans".

    answers  results of the forward pass, (batch, heads, …): the rows' states, and each result per row that `by` names
    by       upstream gradients, shaped as the results, of results with a term per row or per key; the log-sum-exp's as
             "log_sum"
    bias     the bias's shape before broadcasting, padded with 1, if its gradient is requested
    spans    likewise for the table of spans
    Gradients of empty inputs are zero. O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory beyond inputs and
    answers.
    """
    problem, q = call.problem, call.q
    if not prod((problem.batch, problem.heads, problem.queries, problem.keys)):  # no weights: gradients are zero
        shapes = {name: x.shape for name, x in zip("qkv", (q, call.k, call.v), strict=True) if x is not None}
        shapes |= {name: shape for name, shape in (("bias", bias), ("spans", spans)) if shape is not None}
        shapes |= {} if problem.sinks is None else {"sinks": (problem.heads,)}
        return {name: to_device_of(np.zeros(shape), q) for name, shape in shapes.items()}
    xp, dtype = namespace(raw(q)), statistics_dtype(problem.dtype)
    kept, loss = ({name: astype(raw(x), dtype) for name, x in some.items()} for some in (answers, by))
    rows = xp.zeros_like(kept["log_sum"], dtype=xp.float64)  # dL_i - Σ_j a_ij·dA_ij - dH_i
    shares = 0.0 if problem.sinks is None else _sink_weights(xp, beside(problem.sinks, rows), _state(kept))
    if "log_sum" in by:
        rows += loss["log_sum"]
    if "output" in by:
        rows -= xp.einsum("bhnd,bhnd->bhn", loss["output"], kept["output"])
    if "entropy" in by:
        rows -= loss["entropy"] * (kept["entropy"] - (1 - shares) + 1)
    if "distance" in by:
        rows -= loss["distance"] * kept["distance"]
    if "received" in by:  # A·dR, in the statistics' dtype even for half-precision inputs
        columns = call.with_values(wrapped(loss["received"][..., None], q)).astype(dtype)
        rows -= raw(engine.rows(columns, Wanted(output=True))["output"])[..., 0]
    parts = {part: wrapped(loss[name], q) for part, name in _PARTS.items() if name in by}
    upstream = Upstream(wrapped(astype(rows, dtype), q), by.get("output"), **parts, bias=bias, spans=spans)
    result = dict(engine.gradients(call, _state(answers), upstream))
    if problem.sinks is not None:
        total = xp.where(shares == 0, 0.0, shares * (rows + loss.get("entropy", 0.0))).sum((0, 2))
        result["sinks"] = wrapped(total, q)
    return result


def _sink_weights(xp: Any, sinks: Any, state: State) -> Any:
    """exp((sink - m_i) - l_i), (batch, heads, queries); 0 for a row without visible keys."""
    empty = xp.isneginf(state.largest)
    above = sinks[:, None] - xp.where(empty, 0.0, state.largest)
    return xp.exp(xp.where(empty, -np.inf, above - state.log_sum))


def _state(answers: Mapping[str, Any]) -> State:
    return State(answers["largest"], answers["log_sum"])
