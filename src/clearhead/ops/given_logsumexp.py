"""Accepts a log-sum-exp that another kernel computed, after checking some of its rows.

A row passes if the given number differs from the one computed here by at most

    ε_L·|L_i| + ε_q/2 + 8ε·(1 + |L_i| + √keys + |scale|·‖q_i‖·Σ_j a_ij·‖k_j‖)

ε_L is the machine epsilon of the given numbers' dtype; ε is float64's if both they and q are float64, else float32's.
The terms bound the rounding of the number itself, of the sum, and of the scores: errors δs_ij of a row's scores change
L_i by Σ_j a_ij·δs_ij. ε_q is q's epsilon if q is float16 or bfloat16, since kernels may round weights to it, else 0.
"""

from math import sqrt
from typing import Any

import ml_dtypes
import numpy as np

from clearhead.core.arrays import FLOATS, as_array, on_cpu, statistics_dtype, to_device_of
from clearhead.core.axes import as_slice, named
from clearhead.core.call import Call
from clearhead.core.state import State, of_logsumexp
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Engine
from clearhead.errors import DtypeError, RuleError, ShapeError

ROWS = 8  # checked in every batch item and head
_WANTED = Wanted(output=True, logsumexp=True, keep_float32=True)
_LAYOUTS = (
    "logsumexp[..., 0] where the last axis is 1; logsumexp.swapaxes(-1, -2) where it is (…, queries, heads); "
    "logsumexp[..., :{queries}] where the kernel pads the queries."
)
_CAUSES = (
    "the usual causes are base 2 (then give logsumexp * math.log(2)), another scale, a rule that only one side was "
    "given, the other corner of the causal mask, heads and queries swapped, and a finite number for a row "
    "without keys. Leave logsumexp out, and it is computed here."
)


@np.errstate(invalid="ignore", over="ignore")  # padding may hold anything
def checked(call: Call, engine: Engine, value: Any) -> State | None:
    """Make the rows' states from the given log-sum-exp; None if it is too large for accurate weights.

    value   (…, heads, queries), by the natural logarithm, in any float dtype, on q's device. Where a query sees no key
            it may be -inf, as here and in PyTorch, or +inf, as in FlashAttention

    Raises ShapeError or DtypeError for another array, RuleError if a checked row differs. It checks `ROWS` rows of
    every batch item and head (the first, the last and some between), and every row that is not finite.
    O(checked rows·keys·d_k) time; rows that see no key cost nothing.
    """
    problem, q, k = call.problem, call.q, call.k
    array = as_array(value, "logsumexp", problem.device)[0]
    if array.dtype not in FLOATS:
        raise DtypeError(f"logsumexp is {array.dtype}: expected float64, float32, bfloat16 or float16.")
    if array.shape != problem.shape[:-1]:
        expected = named(problem.shape[:-1], ("batch", "heads", "queries"))
        raise ShapeError(
            f"logsumexp has shape {array.shape}: expected one number per query, {expected}.",
            _LAYOUTS.format(queries=problem.queries),
        )
    taken = array.reshape(problem.batch, problem.heads, problem.queries).astype(statistics_dtype(problem.dtype))
    if not taken.size:
        return of_logsumexp(on_cpu(taken))
    numbers, result = on_cpu(array).reshape(taken.shape).astype(np.float64), on_cpu(taken)
    norms = np.linalg.norm(on_cpu(k).astype(statistics_dtype(k.dtype)), axis=-1)[..., None]
    last, every = problem.queries - 1, slice(0, problem.batch)
    parts = [(every, range(0, last + 1, max(1, -(-last // (ROWS - 1))))), (every, range(last, last + 1))]
    for batch in map(int, np.flatnonzero(~np.isfinite(numbers).all(axis=(1, 2)))):
        lost = np.flatnonzero(~np.isfinite(numbers[batch]).all(axis=0))
        parts.append((slice(batch, batch + 1), range(int(lost[0]), int(lost[-1]) + 1)))
    wide = problem.dtype == np.float64 and array.dtype == np.float64
    number, sums = (float(ml_dtypes.finfo(x).eps) for x in (array.dtype, np.float64 if wide else np.float32))  # type: ignore[no-untyped-call]
    half = float(ml_dtypes.finfo(problem.dtype).eps) / 2 if problem.dtype.itemsize == 2 else 0.0  # type: ignore[no-untyped-call]
    for items, queries in parts:
        rows = as_slice(queries)
        part, near = problem.take(queries=queries, batches=np.arange(problem.batch)[items]), q[items, :, rows]
        answers = engine.rows(Call(part, near, k[items], to_device_of(norms[items], k)), _WANTED)
        *pair, mean = (on_cpu(answers[name]).astype(np.float64) for name in (*State._fields, "output"))
        computed = State(*pair).logsumexp
        lengths = np.linalg.norm(on_cpu(near).astype(statistics_dtype(q.dtype)), axis=-1)
        size = abs(part.scale)[:, None] * lengths * mean[..., 0]
        tolerance = number * np.abs(computed) + half + 8 * sums * (1 + np.abs(computed) + sqrt(problem.keys) + size)
        claimed, infinite = numbers[items, :, rows], ~np.isfinite(computed)
        right = np.where(infinite, ~np.isfinite(claimed), np.abs(claimed - computed) <= tolerance)
        if not right.all():
            batch, head, row = (int(place) for place in np.argwhere(~right)[0])
            lead = np.unravel_index((batch + items.start) * problem.heads + head, problem.prefix or (1,))
            place = ", ".join(str(i) for i in (*lead[: len(problem.prefix)], queries[row]))
            both = f"{claimed[batch, head, row]:.7g}, computed {computed[batch, head, row]:.7g} here"
            raise RuleError(f"logsumexp does not fit q, k and the rules: logsumexp[{place}] is {both}.", _CAUSES)
        result[items, :, rows] = np.where(infinite, computed, result[items, :, rows])
    state = of_logsumexp(result)
    return None if state is None else State(*(to_device_of(x, taken) for x in state))
