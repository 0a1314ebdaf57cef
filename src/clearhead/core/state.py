"""The state of each row's softmax: two numbers, the largest logit and the rest of the log-sum-exp.

A log-sum-exp in one number loses digits where a row's logits are far from 0: -10⁹ + ln 6 is -10⁹ in float32. So no code
computes with it. With m_i the largest logit of row i, its sink included, and

    l_i = ln Σ_j exp(s_ij - m_i), the sink included,

every weight is exp((s_ij - m_i) - l_i). The log-sum-exp, where a caller asks for it, is m + l.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array

_SURE = 2.0**-16  # the largest rounding of a log-sum-exp in one number that weights may inherit
_FINE = 2.0**30  # above it, neighbouring float32 numbers are 64 or more apart


def rounded(logits: Array, dtype: np.dtype[Any]) -> Array:
    """Round logits in float64 that are far from 0 to the statistics' dtype.

    A row's largest logit is kept in that dtype, and l has too few digits to make up for so large a rounding.
    """
    if logits.dtype == dtype or not (far := np.abs(logits) > _FINE).any():
        return logits
    return np.where(far, logits.astype(dtype), logits)


class State(NamedTuple):
    """m and l, (batch, heads, queries) each, in the statistics' dtype; -inf and 0 where a row sees nothing.

    In PyTorch's graph, `largest` has no derivative and `log_sum` has the derivative of the log-sum-exp.
    """

    largest: Any
    log_sum: Any

    @property
    def logsumexp(self) -> Any:
        """The sum m + l: -inf where a row sees nothing."""
        return self.largest + self.log_sum


def taken(state: State, *index: Any) -> State:
    """Index both arrays."""
    return State(*(x[index] for x in state))


def share(xp: Any, part: State, whole: State) -> Any:
    """exp(L_part - L_whole), the share of each row's weight that falls on some of its logits; 0 if there are none.

    `xp` is NumPy or torch, whose arrays the states hold.
    """
    # infinity and NaN are legal values; PyTorch's compiler cannot trace NumPy's error state
    with np.errstate(invalid="ignore", over="ignore") if xp is np else nullcontext():
        above = part.largest - xp.where(part.largest == -np.inf, 0.0, whole.largest)
        return xp.exp(above + (part.log_sum - whole.log_sum))


@np.errstate(invalid="ignore", over="ignore")  # infinity and NaN are legal values
def merged(xp: Any, first: State, *others: State) -> State:
    """Merge the states of parts of the same rows; `xp` as in `share`."""
    largest = first.largest
    for part in others:
        largest = xp.maximum(largest, part.largest)
    safe = xp.where(largest == -np.inf, 0.0, largest)
    total: Any = sum(xp.exp((part.largest - safe) + part.log_sum) for part in (first, *others))
    return State(largest, xp.log(xp.where(total == 0, 1.0, total)))


def of_logsumexp(logsumexp: Array) -> State | None:
    """The state from a log-sum-exp in one number; None if one is so large that its rounding shows in the weights."""
    finite = np.isfinite(logsumexp)
    if np.abs(np.where(finite, logsumexp, 0.0)).max(initial=0.0) * np.finfo(logsumexp.dtype).eps > _SURE:
        return None
    return State(logsumexp, np.where(finite | np.isneginf(logsumexp), 0.0, np.nan).astype(logsumexp.dtype))
