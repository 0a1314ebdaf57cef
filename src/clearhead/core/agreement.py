"""How well estimates agree with the truth: rank correlation."""

from collections.abc import Sequence

import numpy as np

from clearhead.core.axes import Array


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None for fewer than three numbers or all equal ones.

    >>> spearman([1, 2, 3, 4], [1, 4, 9, 16]), spearman([1, 2], [1, 2])
    (1.0, None)
    """
    first, second = (_ranks(np.asarray(numbers, np.float64)) for numbers in (x, y))
    if len(x) < 3 or not np.ptp(first) or not np.ptp(second):
        return None
    return round(float(np.corrcoef(first, second)[0, 1]), 12)


def _ranks(x: Array) -> Array:
    order = np.sort(x)
    return np.asarray(np.searchsorted(order, x, "left") + np.searchsorted(order, x, "right")) / 2
