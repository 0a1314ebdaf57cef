"""From a loss's derivatives by what attention answered to its derivatives by what attention was given.

With a_ij the weights, s_ij the logits, L_i the log-sum-exp, O the output, H the entropy, R what each key received, and
dX the loss's derivative by X, every answer depends on the logits through the weights and L:

    dA_ij = dO_i·v_j + dR_j - dH_i·(ln a_ij + 1)
    dS_ij = a_ij·(dA_ij - Σ_l a_il·dA_il + dL_i)           the softmax's own derivative, and ∂L_i/∂s_ij = a_ij
    Σ_j a_ij·dA_ij = dO_i·O_i + (A·dR)_i + dH_i·(H_i - Σ_j a_ij)

so an engine needs one number for each row besides dO, dR and dH, and no weight is stored (Dao et al. 2022, appendix B).
A sink is a logit without a value: its weight is exp(sink - L_i), and it takes part in the sum's place alone.
"""

from dataclasses import dataclass, replace

import numpy as np

from clearhead.arrays import statistics_dtype
from clearhead.axes import Array
from clearhead.engines.base import Engine, Upstream
from clearhead.observations import Wanted
from clearhead.problem import Problem


@dataclass(frozen=True, slots=True)
class Answered:
    """Attention's answers and the loss's derivatives by them; (batch, heads, …), None where not asked or used."""

    logsumexp: Array  # (batch, heads, queries)
    output: Array | None = None  # (batch, heads, queries, d_v)
    entropy: Array | None = None  # (batch, heads, queries)
    d_output: Array | None = None
    d_logsumexp: Array | None = None
    d_entropy: Array | None = None
    d_received: Array | None = None  # (batch, heads, keys)


@np.errstate(all="ignore")  # NaN and infinity are values here, from the loss too
def gradients(
    engine: Engine,
    problem: Problem,
    q: Array,
    k: Array,
    v: Array | None,
    answered: Answered,
    bias: tuple[int, int, int, int] | None = None,
) -> dict[str, Array]:
    """The loss's derivatives by "q", "k", "v", and, where the problem has them, "sinks" (heads,) and "bias".

    `bias` is the bias's own shape, 1 where it is broadcast, if its derivative is asked for.
    O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory beyond inputs and answers.
    """
    rows = _row_terms(engine, problem, q, k, answered)
    dtype = statistics_dtype(problem.dtype)
    upstream = Upstream(
        rows=rows.astype(dtype),
        output=answered.d_output,
        keys=_in(dtype, answered.d_received),
        entropy=_in(dtype, answered.d_entropy),
        bias=bias,
    )
    found = dict(engine.gradients(problem, q, k, v, answered.logsumexp, upstream))
    if problem.sinks is not None:
        by_logit = rows if answered.d_entropy is None else rows + answered.d_entropy
        weights = _sink_weights(problem.sinks, answered.logsumexp)
        found["sinks"] = np.where(weights == 0, 0.0, weights * by_logit).sum(axis=(0, 2))
    return found


def _row_terms(engine: Engine, problem: Problem, q: Array, k: Array, answered: Answered) -> Array:
    """dL_i - Σ_j a_ij·dA_ij - dH_i, (batch, heads, queries) in float64."""
    terms = np.zeros(answered.logsumexp.shape)
    if answered.d_logsumexp is not None:
        terms += answered.d_logsumexp
    if answered.d_output is not None and answered.output is not None:
        dtype = statistics_dtype(problem.dtype)
        wide = (x.astype(dtype, copy=False) for x in (answered.d_output, answered.output))
        terms -= np.einsum("bhnd,bhnd->bhn", *wide)
    if answered.d_received is not None:
        terms -= _mixed(engine, problem, q, k, answered.d_received)
    if answered.d_entropy is not None and answered.entropy is not None:
        mass = 1.0 if problem.sinks is None else 1 - _sink_weights(problem.sinks, answered.logsumexp)
        terms -= answered.d_entropy * (answered.entropy - mass + 1)
    return terms


def _sink_weights(sinks: Array, logsumexp: Array) -> Array:
    """exp(sink - L_i), (batch, heads, queries); 0 for a row that sees nothing."""
    empty = np.isneginf(logsumexp)
    weights: Array = np.exp(np.where(empty, -np.inf, sinks[:, None] - np.where(empty, 0.0, logsumexp)))
    return weights


def _mixed(engine: Engine, problem: Problem, q: Array, k: Array, numbers: Array) -> Array:
    """Σ_j a_ij·numbers_j, (batch, heads, queries), not rounded to a half."""
    dtype = statistics_dtype(problem.dtype)
    wide = replace(problem, dtype=dtype)
    values = numbers.astype(dtype, copy=False)[..., None]
    found = engine.rows(wide, q.astype(dtype, copy=False), k.astype(dtype, copy=False), values, Wanted(output=True))
    return found["output"][..., 0]


def _in(dtype: np.dtype[np.generic], x: Array | None) -> Array | None:
    return None if x is None else np.ascontiguousarray(x, dtype)
