"""Takes a log-sum-exp that another kernel computed, once some of its rows are checked; an error names the mistake.

A row is right where |given - computed| is at most

    ε_L·|L_i| + 8ε·(1 + |L_i| + √keys + |scale|·‖q_i‖·Σ_j a_ij·‖k_j‖)

ε_L belongs to the dtype of the given numbers; ε is float64's where they and q are float64, else float32's. The terms
bound the rounding of the number itself, of the sum, and of the scores: errors δs_ij of a row's scores change L_i by
Σ_j a_ij·δs_ij. For float16 and bfloat16, half of that dtype's own ε is allowed in addition, since kernels may round
weights to it, unless a usual mistake gives the number without that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import log, sqrt
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from clearhead.core.arrays import FLOATS, as_array, on_cpu, statistics_dtype, to_device_of
from clearhead.core.axes import Array, as_slice, named
from clearhead.core.problem import Problem
from clearhead.core.rules import RULES
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Engine
from clearhead.errors import DtypeError, RuleError, ShapeError

ROWS = 8  # checked in every batch item and head
_MOST_RUNS = 64  # of rows that are not finite: one call of the engine for each
Change = Callable[[Problem], Problem]


def checked(problem: Problem, q: Array, k: Array, engine: Engine, value: Any) -> Array:
    """The given log-sum-exp as (batch, heads, queries) in the statistics' dtype; -inf where a query sees no key.

    value   (…, heads, queries), by the natural logarithm, in any float dtype, on q's device. Where a query sees no key
            it may be -inf, as here and in PyTorch, or +inf, as in FlashAttention

    Raises ShapeError or DtypeError for another array, RuleError where a row that is checked differs. Checked are
    `ROWS` rows of every batch item and head (the first, the last and some between), and all that are not finite.
    O(checked rows·keys·d_k) time; rows that see no key cost nothing.
    """
    array = as_array(value, "logsumexp", problem.device)[0]
    if array.dtype not in FLOATS:
        raise DtypeError(f"logsumexp is {array.dtype}: expected float64, float32, bfloat16 or float16.")
    _check_shape(problem, array.shape)
    taken = array.reshape(problem.batch, problem.heads, problem.queries).astype(statistics_dtype(problem.dtype))
    if not problem.batch * problem.heads * problem.queries:
        return taken
    given = on_cpu(array).reshape(taken.shape).astype(np.float64)
    _Sample(problem, q, k, engine, given, array.dtype).check()
    strange = ~np.isfinite(given)
    if not strange.any():
        return taken
    final = on_cpu(taken)
    for batch, rows in _runs(strange):
        item, places = slice(batch, batch + 1), as_slice(rows)
        part = problem.take(queries=rows, batches=np.array([batch]))
        own = on_cpu(engine.rows(part, q[item, :, places], k[item], None, Wanted(logsumexp=True))["logsumexp"])[0]
        here = strange[batch, :, places]
        if (here & np.isfinite(own)).any():
            head, row = (int(place) for place in np.argwhere(here & np.isfinite(own))[0])
            at = batch, head, rows[row]
            raise RuleError(_told(problem, at, given[at], own[head, row]), "only a row that sees no key is infinite.")
        final[batch, :, places][here] = own[here]
    return to_device_of(final, taken)


def _check_shape(problem: Problem, shape: tuple[int, ...]) -> None:
    expected, axes = problem.shape[:-1], ("batch", "heads", "queries")
    if shape == expected:
        return
    hint = f"the matrix has {named(expected, axes)}."
    if shape == (*expected, 1):
        hint = "logsumexp[..., 0]"
    elif len(shape) == len(expected) > 1 and shape == (*expected[:-2], expected[-1], expected[-2]):
        hint = "yours is (…, queries, heads): logsumexp.swapaxes(-1, -2)"
    elif len(shape) == len(expected) and shape[:-1] == expected[:-1] and shape[-1] > expected[-1]:
        hint = f"some kernels pad the queries: logsumexp[..., :{expected[-1]}]"
    elif (1,) * (len(expected) - len(shape)) + shape == expected:
        hint = f"logsumexp.reshape{expected}"
    raise ShapeError(f"logsumexp has shape {shape}: expected one number per query, {named(expected, axes)}.", hint)


@dataclass(eq=False)
class _Sample:
    """Some rows of every batch item and head; arrays of them are (batch, heads, sampled rows), in float64."""

    problem: Problem
    q: Array
    k: Array
    engine: Engine
    everything: Array  # all that was given, (batch, heads, queries), in float64
    dtype: np.dtype[Any]  # in which it was given

    @cached_property
    def rows(self) -> list[range]:
        """The first row, some between and the last, as at most two ranges."""
        last = self.problem.queries - 1
        even = range(0, last + 1, max(1, -(-last // (ROWS - 1))))
        return [even] if even[-1] == last else [even, range(last, last + 1)]

    def of(self, x: Array) -> Array:
        """These rows of an array (batch, heads, queries)."""
        return np.concatenate([x[:, :, as_slice(rows)] for rows in self.rows], axis=2)

    def answers(self, want: Wanted, v: Array | None = None, change: Change | None = None) -> dict[str, Array]:
        """What the engine answers for these rows, or for these rows of a changed problem."""
        parts = []
        for rows in self.rows:
            part = self.problem.take(queries=rows)
            part = part if change is None else change(part)
            parts.append(self.engine.rows(part, self.q[:, :, as_slice(rows)], self.k, v, want))
        return {
            name: np.concatenate([on_cpu(part[name]) for part in parts], axis=2).astype(np.float64) for name in parts[0]
        }

    def check(self) -> None:
        """Raise RuleError where what was given is not these rows' log-sum-exp."""
        want = Wanted(output=True, logsumexp=True, keep_float32=True)
        found = self.answers(want, to_device_of(_norms(self.k)[..., None], self.k))
        own, given = found["logsumexp"], self.of(self.everything)
        norms = np.concatenate([_norms(self.q[:, :, as_slice(rows)]) for rows in self.rows], axis=2)
        with np.errstate(invalid="ignore", over="ignore"):
            size = abs(self.problem.scale)[:, None] * norms * found["output"][..., 0]
            tolerance = self.tolerance(own, size)
        if _agree(given, own, tolerance):
            return
        candidates = list(self.mistakes(given, own))
        usual = _explaining(candidates, tolerance)
        if self.problem.dtype.itemsize == 2 and not usual:
            tolerance = tolerance + _epsilon(self.problem.dtype) / 2
            if _agree(given, own, tolerance):
                return
            usual = _explaining(candidates, tolerance)
        self.refuse(given, own, tolerance, usual)

    def tolerance(self, own: Array, size: Array) -> Array:
        wide = self.problem.dtype == np.float64 and self.dtype == np.float64
        epsilon = _epsilon(np.dtype(np.float64 if wide else np.float32))
        number = _epsilon(self.dtype) * np.abs(own)
        return number + 8 * epsilon * (1 + np.abs(own) + sqrt(self.problem.keys) + size)

    def mistakes(self, given: Array, own: Array) -> Iterator["_Mistake"]:
        """The usual mistakes, each with the numbers that are equal if it was made."""
        peak = self.answers(Wanted(max_logit=True))["max_logit"]
        numbers = [("", "", own), ("of the largest logit alone", "add ln Σ_j exp(s_ij - max).", peak)]
        for words, hint, change in _changes(self.problem):
            numbers.append((words, hint, self.answers(Wanted(logsumexp=True), change=change)["logsumexp"]))
        for words, hint, would in numbers:
            if words:
                yield _Mistake(words, hint, given, would)
            both = f"in base 2 and {words}" if words else "in base 2"
            yield _Mistake(both, "logsumexp * math.log(2)", given * log(2), would)
        if self.problem.heads == self.problem.queries:
            swapped = self.of(self.everything.swapaxes(1, 2))
            yield _Mistake("with heads and queries swapped", "logsumexp.swapaxes(-1, -2)", swapped, own)

    def refuse(self, given: Array, own: Array, tolerance: Array, usual: list["_Mistake"]) -> None:
        """Raise RuleError, with the mistakes that explain the given numbers."""
        wrong = ~_near(given, own, tolerance)
        with np.errstate(invalid="ignore"):
            off = np.where(wrong, np.nan_to_num(np.abs(given - own), nan=np.inf), -1.0)
        batch, head, place = (int(i) for i in np.unravel_index(np.argmax(off), off.shape))
        row = [row for rows in self.rows for row in rows][place]
        what = _told(self.problem, (batch, head, row), given[batch, head, place], own[batch, head, place])
        if np.isneginf(own[wrong]).all():
            hint = "give -inf, or +inf, for rows that see no key; or leave logsumexp out."
            raise RuleError(f"{what} This row sees no key; all others that were checked are right.", hint)
        if usual:
            raise RuleError(f"{what} It is as it would be {', or '.join(one.words for one in usual)}.", usual[0].hint)
        hint = "it must be of these q, k and rules, by the natural logarithm; left out, it is computed here."
        raise RuleError(what, hint)


class _Mistake(NamedTuple):
    """A mistake in words, what to type instead, and two arrays that agree where it was made."""

    words: str
    hint: str
    given: Array
    would: Array


def _explaining(mistakes: list[_Mistake], tolerance: Array) -> list[_Mistake]:
    return [one for one in mistakes if _agree(one.given, one.would, tolerance)]


def _told(problem: Problem, at: tuple[int, int, int], given: float, own: float) -> str:
    lead = np.unravel_index(at[0] * problem.heads + at[1], problem.prefix) if problem.prefix else ()
    place = ", ".join(str(i) for i in (*lead, at[2]))
    return f"logsumexp is not that of these q, k and rules: logsumexp[{place}] is {given:.7g}, computed {own:.7g}."


def _changes(problem: Problem) -> Iterator[tuple[str, str, Change]]:
    """What kernels are often asked by mistake: in words, what to type instead, and what it makes of some rows."""
    default = 1 / sqrt(problem.d_k) if problem.d_k else 1.0
    scales = {1.0: "scale=1.0, without 1/√d_k", default: "the default scale 1/√d_k", default**2: "the scale 1/d_k"}
    for scale, words in scales.items():
        if (problem.scale != scale).any():
            own = np.unique(problem.scale)
            right = f"{own[0]:.6g}" if len(own) == 1 else "the scale of each head"
            hint = f"scale={scale:.6g} here if that is meant, else give the kernel {right}."
            yield f"with {words}", hint, _with(scale=np.full_like(problem.scale, scale))
    for rule in problem.active_rules():
        entry = RULES[rule]
        if not entry.always and rule != "kv_segments":
            names = ("query_segments", "kv_segments") if rule == "query_segments" else tuple(entry.fields)
            unused = dict.fromkeys(names, entry.unused)
            hint = f"leave {rule} out here if that is meant, else give it to the kernel."
            yield f"without `{rule}`", hint, _with(**unused)
    if isinstance(problem.mask, np.ndarray):
        yield "with `mask` inverted", "mask=~mask: True = may attend.", _inverted
    corners = {0: "upper left", problem.keys - problem.queries: "lower right"}
    for offset, corner in corners.items():
        moved = np.full_like(problem.query_offset, offset)
        if not problem.causal or (problem.query_offset != moved).any():
            hint = f"causal=True, query_offset={offset} here if that is meant."
            words = f"with a causal mask at the {corner} corner" if len(corners) > 1 else "with a causal mask"
            yield words, hint, _with(causal=True, query_offset=moved)


def _with(**fields: Any) -> Change:
    return lambda part: replace(part, **fields)


def _inverted(part: Problem) -> Problem:
    assert part.mask is not None
    return replace(part, mask=~part.mask)


def _near(given: Array, own: Array, tolerance: Array) -> Array:
    """Where the two agree: within the tolerance, or where neither is finite."""
    strange, lost = ~np.isfinite(given), ~np.isfinite(own)
    with np.errstate(invalid="ignore"):
        return np.where(strange | lost, strange & lost, np.abs(given - own) <= tolerance)


def _agree(given: Array, own: Array, tolerance: Array) -> bool:
    return bool(_near(given, own, tolerance).all())


def _epsilon(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _norms(x: Array) -> Array:
    """‖x‖ of each vector, (batch, heads, length), in the statistics' dtype."""
    dtype = statistics_dtype(x.dtype)
    found = np.zeros(x.shape[:3], dtype)
    for batch, head in np.ndindex(*x.shape[:2]):
        with np.errstate(over="ignore", invalid="ignore"):  # padding may hold anything
            found[batch, head] = np.linalg.norm(on_cpu(x[batch, head]).astype(dtype), axis=-1)
    return found


def _runs(strange: Array) -> Iterator[tuple[int, range]]:
    """Runs of queries that are strange in some head, by batch item; one run over them all where there are many."""
    for batch, heads in enumerate(strange):
        found = np.flatnonzero(heads.any(axis=0))
        if not len(found):
            continue
        breaks = np.flatnonzero(np.diff(found) > 1)
        starts, stops = found[np.r_[0, breaks + 1]], found[np.r_[breaks, len(found) - 1]]
        if len(starts) > _MOST_RUNS:
            starts, stops = found[:1], found[-1:]
        yield from ((batch, range(int(start), int(stop) + 1)) for start, stop in zip(starts, stops, strict=True))
