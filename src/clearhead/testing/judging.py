"""Calls the tested function three times on a problem, compares its results, and names the cause of errors."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead.core import definition
from clearhead.core.arrays import FLOATS, as_array, on_cpu, statistics_dtype, to_torch
from clearhead.core.axes import Array, named
from clearhead.core.call import describe
from clearhead.core.visibility import dense
from clearhead.diagnosing.recipe import eps
from clearhead.digits import significant
from clearhead.errors import DtypeError, ShapeError
from clearhead.testing.drawing import ProblemPlan, drawn, parts

FACTOR = 4.0  # the error of a right number may be this many times what rounding explains
CALLS = (
    "first call",
    "second call, with equal shapes and other numbers",
    "third call, with other numbers in the same arrays",
)
_OUTPUT = ("batch", "heads", "queries", "d_v")


class Truth(NamedTuple):
    """The right numbers of one result, and by how much rounding may change each; infinite where any number passes."""

    name: str  # output, dq, dk or dv
    right: Array
    rounding: Array
    dtype: np.dtype[Any]

    def off(self, theirs: Array) -> Array:
        """The error of each number in units of rounding; infinite where only one of the two is NaN."""
        a, b = theirs.astype(np.float64), self.right
        with np.errstate(all="ignore"):
            same = (a == b) | (np.isnan(a) & np.isnan(b)) | np.isinf(self.rounding)
            off = np.where(same, 0.0, abs(a - b) / self.rounding)
        return np.where(np.isnan(off), np.inf, off)

    def fits(self, theirs: Array, factor: float = FACTOR) -> bool:
        """Are all these numbers right?"""
        return bool((self.off(theirs) <= factor).all())

    def wrong(self, theirs: Array) -> tuple[str, ...]:
        """Describe what is wrong with these numbers, as lines; () if they are right."""
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


@np.errstate(all="ignore")
def truths(plan: ProblemPlan, problem: Mapping[str, Any], *, gradients: bool = False) -> tuple[list[Truth], Any]:
    """Compute the right output; with gradients, also those of Σ g·output at q, k and v; and return g, else None.

    Error bounds: a logit's is eps times the absolute values that are added up in it, a weight's that plus its row's
    log-sum-exp's, an output's the sum of its terms'; likewise for gradients. Rows that see no key are compared only in
    the kind "empty rows".
    """
    arrays, rules = parts(problem)
    stated, dtype = describe(arrays[0], arrays[1], arrays[2], rules).problem, max(plan.dtype, plan.result, key=eps)
    q, k, v = (np.nan_to_num(x.astype(np.float64), posinf=0.0, neginf=0.0) for x in arrays)  # they occur hidden only
    book = definition.attend(stated, q, k, v)
    a, few, scale = book.weights, k.shape[1], np.asarray(stated.scale)[:, None, None]
    unit = eps(dtype) * (3 if dtype == np.float64 else 1)  # in float64 the truth is rounded too
    logits = scale * definition.product(abs(q), abs(k).swapaxes(-1, -2)) + abs(book.biased - book.capped)
    logits = unit * np.where(book.hidden(), 0.0, logits)
    sums = np.nan_to_num(abs(book.logsumexp), posinf=0.0)[..., None] * max(eps(statistics_dtype(dtype)), unit / 256)
    tiny = 2.0**-24 if dtype == np.float16 else 2.0**-126  # smaller weights and results may be 0
    weights = tiny + a * (unit + logits + (a * logits).sum(axis=-1, keepdims=True) + sums)
    compared, g = np.asarray(dense(stated).any(axis=-1, keepdims=True)) | (plan.kind == "empty rows"), None
    results = [("output", book.output, np.where(compared, definition.product(weights, abs(v)), np.inf))]

    def by_keys(x: Array, y: Array) -> Array:
        columns = x.swapaxes(-1, -2) @ y
        return cast("Array", columns.reshape(len(x), few, -1, *columns.shape[2:]).sum(axis=2))

    if gradients:
        normal = np.random.default_rng([plan.seed, 4]).standard_normal(book.output.shape)
        g = np.where(compared, normal, 0.0).astype(plan.dtype).astype(np.float64)
        slopes = definition.product(g, v.swapaxes(-1, -2)) - (g * book.output).sum(axis=-1, keepdims=True)
        by_scores = definition.by_scores(book.block, book.capped, np.where(book.hidden(), 0.0, a * slopes))
        moved = weights * definition.product(abs(g), abs(v).swapaxes(-1, -2))
        moved = scale * (moved + a * moved.sum(axis=-1, keepdims=True))
        results += [("dq", definition.product(by_scores, k), definition.product(moved, abs(k)))]
        results += [
            ("dk", by_keys(by_scores, q), by_keys(moved, abs(q))),
            ("dv", by_keys(a, g), by_keys(weights, abs(g))),
        ]
    return [Truth(name, right, rounding + tiny, dtype) for name, right, rounding in results], g


class Failure(NamedTuple):
    """One wrong problem: what is wrong with its result, and the causes."""

    plan: ProblemPlan
    problem: dict[str, Any]
    lines: tuple[str, ...]  # what is wrong, and where
    causes: tuple[str, ...] = ()
    theirs: Array | None = None  # the wrong output of a first call
    error: Exception | None = None


def _given(problem: dict[str, Any], arrays: str, *, swapped: bool) -> dict[str, Any]:
    """Copy a problem into arrays that the function takes; `arrays` as in `assert_attention`.

    swapped   should q, k and v lie in memory with heads and tokens swapped?
    """
    result = dict(problem)
    for name in _arrays(problem):
        turned = swapped and name in "qkv"
        copy: Any = np.array(problem[name].swapaxes(1, 2) if turned else problem[name], order="C")
        if arrays != "numpy":
            copy = to_torch(sys.modules["torch"], copy).to("cpu" if arrays == "torch" else arrays)
        result[name] = copy.swapaxes(1, 2) if turned else copy
    return result


def _called(fn: Any, given: dict[str, Any], g: Array | None = None) -> tuple[Any, list[Array]]:
    """Call the function: return its result, a copy, and copies of the gradients of Σ g·output at q, k and v.

    Raises what the function raises, and ShapeError or DtypeError for a wrong result.
    """
    inputs, rules = parts(given)
    inputs = inputs if g is None else [x.detach().requires_grad_() for x in inputs]
    with np.errstate(all="ignore"):  # the NaN and infinities are given on purpose
        result = fn(*inputs, **rules)
    array, shape = _copy(result), (*given["q"].shape[:3], given["v"].shape[3])
    if array.dtype not in FLOATS:
        raise DtypeError(f"the result is {array.dtype}: expected a float dtype.")
    if array.shape != shape:
        raise ShapeError(f"the result has shape {array.shape}: expected {named(shape, _OUTPUT)}.")
    if g is None:
        return result, [array]
    torch = sys.modules["torch"]
    slopes = torch.autograd.grad(result, inputs, torch.from_numpy(g).to(result))
    return result, [array, *map(_copy, slopes)]


def judged(fn: Any, arrays: str, plan: ProblemPlan, *, gradients: bool) -> Failure | None:
    """Call the function three times on a plan's problem; None if all its results are right."""
    first, second = (drawn(plan, again=again) for again in (False, True))
    names, swapped, results = _arrays(first), plan.kind == "strides", list[tuple[Any, list[Array]]]()
    kept = given = _given(first, arrays, swapped=swapped)
    for place, problem in enumerate((first, second, second)):
        if place:
            given = _given(second, arrays, swapped=swapped)
        if place < 2:
            right, g = truths(plan, problem, gradients=gradients)
        if place == 2:
            for name in names:
                kept[name][...] = given[name]
            given = kept
        before = {name: _copy(given[name]).tobytes() for name in names}
        earlier = [_copy(result).tobytes() for result, _ in results]
        try:
            results.append(_called(fn, given, g))
        except Exception as error:  # the tested function may raise anything
            told = f"{CALLS[place]}: it raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return Failure(plan, problem, (told,), error=error)
        changed = [name for name in names if _copy(given[name]).tobytes() != before[name]]
        moved = any(_copy(result).tobytes() != old for (result, _), old in zip(results, earlier, strict=False))
        theirs = results[-1][1]
        causes = tuple(_misbehaved(plan, theirs[0].dtype, changed, moved=moved))
        lines = [line for truth, x in zip(right, theirs, strict=True) for line in truth.wrong(x)]
        if lines and not causes and right[0].fits(theirs[0]):
            causes = ("the output is right, its derivatives are not",)
        if lines and not causes:
            causes = _stale(plan, first, second, theirs[0], place) if place else ()
            with suppress(Exception):  # the tested function may raise anything
                again = _called(fn, _given(problem, arrays, swapped=swapped))[1][0].astype(np.float64)
                if not causes and not right[0]._replace(right=again).fits(theirs[0]):
                    causes = ("it is not deterministic: another call with the same inputs gives other numbers",)
        if causes or lines:
            return Failure(plan, problem, (CALLS[place], *lines), causes, None if place else theirs[0])
    return None


def _arrays(problem: Mapping[str, Any]) -> list[str]:
    return [name for name, x in problem.items() if isinstance(x, np.ndarray)]


def _copy(x: Any) -> Array:
    array: Array = np.array(on_cpu(as_array(x.detach() if hasattr(x, "detach") else x, "the result")[0]))
    return array


def _misbehaved(plan: ProblemPlan, dtype: np.dtype[Any], changed: list[str], *, moved: bool) -> Iterator[str]:
    """Yield faults of a call apart from its numbers: changed inputs, a changed earlier result, a wrong dtype."""
    if changed:
        yield f"it writes into its inputs: {', '.join(changed)} changed during the call"
    if moved:
        yield "an earlier result changed when it was called again: it returns a buffer that it keeps and reuses"
    if dtype != plan.result and dtype.itemsize <= plan.result.itemsize:
        declared = f'dtypes=[("{plan.dtype}", "{dtype}")]'
        yield f"it returns {dtype} where {plan.result} is expected; if that is meant, say {declared}"


def _stale(
    plan: ProblemPlan, first: dict[str, Any], second: dict[str, Any], theirs: Array, place: int
) -> tuple[str, ...]:
    """Name the inputs of an earlier call that give these numbers, as a cache would."""
    arrays = _arrays(first)
    for names in (arrays, *([name] for name in arrays), ["k", "v"]):
        if truths(plan, second | {name: first[name] for name in names})[0][0].fits(theirs):
            what = "the result" if names is arrays else ", ".join(names)
            by = "address" if place == 2 else "shape, or by some of their numbers"
            return (f"a cache: it uses {what} of an earlier call; it knows inputs again by their {by}",)
    return ()
