"""What is right, in float64, and how far off rounding in a dtype can make each number."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead.core import definition
from clearhead.core.arrays import bfloat16, statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.visibility import dense
from clearhead.digits import significant
from clearhead.testing.drawing import parts

FACTOR = 4.0  # how many times further off than rounding explains a right number may be


class Truth(NamedTuple):
    """The right numbers of one result, and by how much rounding may change each, infinite where any will do."""

    name: str  # output, dq, dk or dv
    right: Array
    rounding: Array
    dtype: np.dtype[Any]

    def off(self, theirs: Array) -> Array:
        """How far each number is off, in units of rounding; infinite where only one of the two is NaN."""
        a, b = theirs.astype(np.float64), self.right
        with np.errstate(all="ignore"):
            same = (a == b) | (np.isnan(a) & np.isnan(b)) | np.isinf(self.rounding)
            off = np.where(same, 0.0, abs(a - b) / self.rounding)
        return np.where(np.isnan(off), np.inf, off)

    def fits(self, theirs: Array, factor: float = FACTOR) -> bool:
        """Are these the right numbers?"""
        return bool((self.off(theirs) <= factor).all())

    def wrong(self, theirs: Array) -> tuple[str, ...]:
        """What is wrong with these numbers, in lines; none where they are right."""
        off, broken = self.off(theirs), int((~np.isfinite(theirs.astype(np.float64))).sum())
        places = np.argwhere(off > FACTOR)
        if not len(places):
            return ()
        place = tuple(map(int, places[0]))
        axes = "batch", "head", "query" if self.name in ("output", "dq") else "key", "column"
        where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, place, strict=True))
        yours, right = (significant(float(x[place]), 6) for x in (theirs, self.right))
        how = f"by up to {significant(float(off.max()))} times what rounding in {self.dtype} explains ({FACTOR:g} pass)"
        return (
            f"{len(places):,} of {off.size:,} numbers of the {self.name} are wrong, "
            + (f"{broken:,} of them NaN or infinite" if broken else how),
            f"first wrong number: {where}: yours {yours}, right {right}",
        )


def eps(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number."""
    return 2.0**-7 if dtype == bfloat16 else float(np.finfo(dtype).eps)


@np.errstate(all="ignore")
def truths(problem: Mapping[str, Any], dtype: np.dtype[Any], g: Array | None = None) -> tuple[Array, list[Truth]]:
    """Which rows see a key, and the truth of the output and, for a derivative g by it, of those by q, k and v.

    A logit is off by eps times the absolute values that are added up in it, a weight by that and by what its row's
    log-sum-exp L is off by, an output by the sum of what its terms are off by; and so on for the derivatives.
    """
    arrays, rules = parts(problem)
    stated = describe(arrays[0], arrays[1], arrays[2], rules).problem
    q, k, v = (np.nan_to_num(x.astype(np.float64), posinf=0.0, neginf=0.0) for x in arrays)  # only where nobody looks
    book = definition.attend(stated, q, k, v)
    a, few, scale = book.weights, k.shape[1], np.asarray(stated.scale)[:, None, None]
    unit = eps(dtype) * (3 if dtype == np.float64 else 1)  # in float64 the truth is rounded too
    logits = scale * definition.product(abs(q), abs(k).swapaxes(-1, -2)) + abs(book.biased - book.capped)
    logits = unit * np.where(book.hidden(), 0.0, logits)
    sums = np.nan_to_num(abs(book.logsumexp), posinf=0.0)[..., None] * max(eps(statistics_dtype(dtype)), unit / 256)
    tiny = 2.0**-24 if dtype == np.float16 else 2.0**-126  # a smaller weight may be 0
    weights = tiny + a * (unit + logits + (a * logits).sum(axis=-1, keepdims=True) + sums)
    results = [("output", book.output, definition.product(weights, abs(v)))]

    def by_keys(x: Array, y: Array) -> Array:
        columns = x.swapaxes(-1, -2) @ y
        return cast("Array", columns.reshape(len(x), few, -1, *columns.shape[2:]).sum(axis=2))

    if g is not None:
        g = g.astype(np.float64)
        slopes = definition.product(g, v.swapaxes(-1, -2)) - (g * book.output).sum(axis=-1, keepdims=True)
        by_scores = definition.by_scores(book.block, book.capped, np.where(book.hidden(), 0.0, a * slopes))
        moved = weights * definition.product(abs(g), abs(v).swapaxes(-1, -2))
        moved = scale * (moved + a * moved.sum(axis=-1, keepdims=True))
        results += [("dq", definition.product(by_scores, k), definition.product(moved, abs(k)))]
        results += [
            ("dk", by_keys(by_scores, q), by_keys(moved, abs(q))),
            ("dv", by_keys(a, g), by_keys(weights, abs(g))),
        ]
    return np.asarray(dense(stated).any(axis=-1, keepdims=True)), [Truth(*result, dtype) for result in results]
