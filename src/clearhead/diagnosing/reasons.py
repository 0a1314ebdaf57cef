"""What is known about wrong numbers that no mistake explains, and why an explanation is likely at most.

Each is said only where it is so: equal within rounding, or a correlation that leaves no doubt.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing.fitting import correlated, largest
from clearhead.diagnosing.mistakes import tail_length
from clearhead.diagnosing.recipe import RIGHT, Diagnosed, Recipe
from clearhead.diagnosing.recipe_visibility import windowed
from clearhead.diagnosing.search import Candidate, Search
from clearhead.diagnosing.verdict import Nonfinite, Reason

Other = tuple[str, dict[str, Any], Array]  # a key, the values that it names, and the numbers
_POSITIONS = 4  # fewer queries are no evidence: what is wrong with them could be wrong with these alone
_LENGTHS = 4  # fewer distinct lengths are no evidence: they may be right by luck, or rounded up alike
_CHANCE = 1e-3  # of any candidate fitting so well
_CLEAR = 0.95  # a correlation from which on the difference is said to go with something
_MOST = 6  # the most runs of positions that are listed


# ── why an explanation is not sure ──


def doubts(search: Search, candidate: Candidate, gaps: Array, tolerance: float) -> Iterator[Reason]:
    """What keeps the explanation from being sure, where no other explanation fits as well; but for rare rivals.

    gaps, tolerance   how far theirs lie from the right numbers, and what rounding allows
    """
    inputs = search.full.inputs
    if len(candidate.mistakes) > 1:
        yield Reason("a pair")
    if any(mistake.evidence == "rounding" for mistake in candidate.mistakes):
        yield Reason("only rounding")
    positions = int((gaps > tolerance).any(axis=(0, 1, 3)).sum())
    if positions < _POSITIONS:
        yield Reason("one position" if positions == 1 else "few positions", {"count": positions})
    if candidate.rare or _by_count(candidate.recipe, inputs.problem.kv_lengths):
        yield Reason("a size")
    if special := _special_window(candidate.recipe, inputs.problem.window):
        yield Reason(special)
    several = {name: x for name, x in inputs.tokens.items() if x.size and x.shape[-2] > 1}
    if names := [name for name, x in several.items() if bool(np.all(x == x[..., :1, :]))]:  # these tell no keys apart
        yield Reason("same tokens", {"names": names})
    difference = float(gaps.max(initial=0.0))
    by_chance = search.tried * min(1.0, 4 * tolerance / difference) ** (inputs.theirs.size / 2)
    if not by_chance < _CHANCE:
        yield Reason("small difference")


def _by_count(recipe: Recipe, lengths: Array | None) -> bool:
    """Is all that shows it how many keys or queries come last, or the lengths of a few batch entries?"""
    if recipe.padding in ("shortest", "longest", "tiled") or recipe.padding_shift:
        return lengths is None or len(np.unique(lengths)) < _LENGTHS
    return bool(recipe.key_tail[0] or recipe.tail[0]) or recipe.blocks[0].startswith("last")


def _special_window(recipe: Recipe, window: tuple[int | None, int | None]) -> str:
    """What a window that is off by one may be as well: one width for both sides, or no right side; "" if neither."""
    if recipe.window in ((0, 0), "missing") or None in window:
        return ""
    (left, right), became = ([int(side or 0) for side in sides] for sides in (window, windowed(window, recipe)))
    if abs(became[0] - left) > 1 or abs(became[1] - right) > 1:
        return ""
    if became[0] == became[1] and left != right:
        return "equal sides"
    return "no right side" if became[1] == 0 and right else ""


# ── what is known where nothing explains them ──


def telling(theirs: Array) -> Reason | None:
    """An output that says by itself what to look for: no number in it, or everywhere the same one."""
    if not theirs.size:
        return None
    if np.isnan(theirs).all():
        return Reason("all NaN")
    if not np.isfinite(theirs).any():
        return Reason("no finite number")
    if not theirs.any():
        return Reason("all zero")
    constant = theirs.size > 1 and (theirs == theirs.flat[0]).all()
    return Reason("constant", {"value": float(theirs.flat[0])}) if constant else None


def known_about(search: Search, theirs: Array, right: Array, gaps: Array, tolerance: float) -> tuple[Reason, ...]:
    """What is known, the most telling first: gaps are |theirs - right|, all (batch, heads, queries, columns)."""
    if theirs.shape != right.shape or not theirs.size:
        return ()
    wrong, stage, nonfinite = gaps > tolerance, search.full.inputs.stage, ~np.isfinite(theirs) & np.isfinite(right)
    known = [*_where(search, wrong)]
    if nonfinite.any():
        whole = bool(nonfinite[nonfinite.any(axis=-1)].all())
        known.append(Reason("some nonfinite", _counts(nonfinite) | {"whole": whole}))
    others = [other for other in _moved(search, right) if other[2].shape == theirs.shape]
    same = _another(others, theirs, right, tolerance)
    if same is not None:
        known.append(same)
    elif np.isfinite(theirs).all() and np.isfinite(right).all():
        known += _difference(search, others, theirs, right, wrong)
    if search.untried:
        known.append(Reason("too long", {"how": "alone" if search.untried == "pairs" else "not"}))
    for candidate in search.as_if():
        kind, block = candidate.recipe.key_tail
        count = tail_length(kind, block, search.full.inputs.problem.keys)
        known.append(Reason("as if unread" if kind == "skipped" else "as if zeros", {"count": count}))
    if stage == "weights":
        known += _of_weights(theirs, right, tolerance)
    if stage == "output" and np.isfinite(theirs).all():
        known += _outside(search, theirs)
        known.append(Reason("ask for weights"))
    return tuple(known)


def _where(search: Search, wrong: Array) -> Iterator[Reason]:
    """The batch entries, heads, queries and columns that are right as a whole, where others are not."""
    coverage, inputs = search.coverage, search.full.inputs
    names = "batch", "head", "query", "column" if inputs.stage == "output" else "key"
    indices = coverage.batches, range(wrong.shape[1]), coverage.queries, range(wrong.shape[3])
    for axis, (name, places) in enumerate(zip(names, map(np.array, indices), strict=True)):
        bad = wrong.any(axis=tuple(other for other in range(4) if other != axis))
        if not bad.all() and not (name == "head" and inputs.merged):
            yield Reason(f"right {name}", {"right": _ranges(places[~bad]), "wrong": _ranges(places[bad])})
    if float(wrong.mean()) < 0.05:
        yield Reason("few wrong", {"count": int(wrong.sum()), "all": wrong.size})


def _ranges(places: Array) -> str:
    """0-12, 14, 20-22, …"""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts[:_MOST]) + (", …" if len(texts) > _MOST else "")


def _counts(numbers: Array) -> dict[str, Any]:
    """How many numbers, and in how many rows."""
    return {"count": int(numbers.sum()), "rows": int(numbers.any(axis=-1).sum())}


def _moved(search: Search, right: Array) -> Iterator[Other]:
    """Other arrays that code may give in place of the right one: other positions of it, and the inputs."""
    sampled, shape = not search.coverage.everything, right.shape
    for axis, name in enumerate(("batch", "head", "query", "column")):
        if shape[axis] < 2 or (sampled and name in ("batch", "query")):
            continue
        for by in (1, -1):
            yield f"next {name}", {"by": by}, np.roll(right, -by, axis)
        yield f"reversed {name}", {}, np.flip(right, axis)
        yield f"first {name}", {}, np.broadcast_to(right.take([0], axis), shape)
        yield f"mean {name}", {}, np.broadcast_to(right.mean(axis, keepdims=True), shape)
    inputs = search.full.inputs
    if inputs.stage != "output" or inputs.merged or inputs.weights is not None:
        return
    exact, (heads, rows) = search.full.exact, search.everything
    values = exact.served(RIGHT, "v", heads)
    yield "mean of v", {}, np.broadcast_to(values.mean(axis=2, keepdims=True), shape)
    weights = exact.weights(RIGHT, search.everything)
    for axis, name in enumerate(("batch", "head", "key", "column")):
        for by in (1, -1) if values.shape[axis] > 1 and not (sampled and name == "batch") else ():
            yield f"values {name}", {"by": by}, weights @ np.roll(values, -by, axis)
    if values.shape[2] == inputs.problem.queries:
        yield "v itself", {}, values[:, :, list(rows)]
    q = exact.operand(RIGHT, "q")
    if q.shape[-1] == shape[-1]:
        yield "q itself", {}, q[:, :, list(rows)]


def _another(others: list[Other], theirs: Array, right: Array, tolerance: float) -> Reason | None:
    """The array that theirs equal: the right one of other positions, or an input."""
    for key, values, other in others:
        if bool((np.abs(theirs - other) <= tolerance).all()):
            return Reason(f"is {key}", values)
    if not (np.isfinite(theirs).all() and np.isfinite(right).all()):
        return None
    if (shares := _shares(theirs, [right], tolerance)) and shares[0]:
        return Reason("is a multiple", {"factor": shares[0]})
    if shares := _shares(theirs - right, [np.ones_like(right)], tolerance):
        return Reason("is shifted", {"shift": shares[0]})
    for key, values, other in others:
        if np.isfinite(other).all() and (shares := _shares(theirs, [right, other], tolerance)):
            return Reason(f"mixes {key}", {**values, "factor": shares[0], "share": shares[1]})
    if right.shape[2] > 1 and bool((np.abs(theirs - theirs[:, :, :1]) <= tolerance).all()):
        return Reason("one row for all")
    return None


def _shares(theirs: Array, arrays: list[Array], tolerance: float) -> list[float]:
    """The factors of theirs = Σ factor·array, all finite; none where theirs are no such sum."""
    parts = np.stack([array.ravel() for array in arrays], axis=1)
    factors, _, rank, _ = np.linalg.lstsq(parts, theirs.ravel(), rcond=1e-6)
    allowed = 2 * max(1.0, float(np.abs(factors).sum())) * tolerance
    fits = rank == len(arrays) and np.abs(parts @ factors - theirs.ravel()).max() <= allowed
    return [float(factor) for factor in factors] if fits else []


def _difference(search: Search, others: list[Other], theirs: Array, right: Array, wrong: Array) -> Iterator[Reason]:
    """What the difference goes with, and how it is spread."""
    error = np.where(wrong, theirs - right, 0.0)
    clearest, reason = _CLEAR, None
    for key, values, other in [("output", {}, right), *others]:
        correlation = correlated(error, other) if np.isfinite(other).all() else 0.0
        if abs(correlation) > clearest + 1e-6:
            clearest, factor = abs(correlation), float((error * other).sum() / (other**2).sum())
            reason = Reason(f"goes with {key}", {**values, "correlation": clearest, "factor": factor})
    if reason is not None:
        yield reason
    by_row = np.sqrt((error**2).mean(axis=(0, 1, 3)))
    rising = by_row[by_row > 0]
    if len(rising) > 7:
        rows, ranks = np.array(search.coverage.queries)[by_row > 0], np.argsort(np.argsort(rising))
        correlation = float(np.corrcoef(rows, ranks)[0, 1])
        if abs(correlation) > 0.9:
            yield Reason("grows" if correlation > 0 else "shrinks", {"first": rising[0], "last": by_row[-1]})


def _of_weights(theirs: Array, right: Array, tolerance: float) -> Iterator[Reason]:
    """Weights: do they sum to 1, and are they 0 where they should be?"""
    if not np.isfinite(theirs).all():
        return
    sums = theirs.sum(axis=-1)
    sums_right = (np.abs(sums - right.sum(axis=-1)) <= theirs.shape[-1] * tolerance).all()
    extremes = {"least": float(sums.min()), "most": float(sums.max())}
    yield Reason("sums right") if sums_right else Reason("sums wrong", extremes)
    if (right == 0).any():
        off = (theirs > tolerance) & (right == 0)
        yield Reason("zeros wrong", {"count": int(off.sum())}) if off.any() else Reason("zeros right")
    if (theirs < -tolerance).any():
        yield Reason("negative weights", {"least": float(theirs.min())})


def _outside(search: Search, theirs: Array) -> Iterator[Reason]:
    """Outputs beyond the values of their column, which no weights of sum 1 and no weights between 0 and 1 can give."""
    inputs = search.full.inputs
    if inputs.merged:
        return
    values = search.full.exact.served(RIGHT, "v", search.everything.heads)
    if values.shape[-1] != theirs.shape[-1] or not values.shape[2]:
        return
    low, high = values.min(axis=2, keepdims=True), values.max(axis=2, keepdims=True)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return
    slack = 1e-3 * max(largest(low), largest(high))
    if inputs.problem.sinks is not None:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    outside = (theirs < low - slack) | (theirs > high + slack)
    outside &= np.abs(theirs) > slack  # an empty row is 0
    if outside.any():
        yield Reason("outside the values", _counts(outside))


def nonfinite_inputs(inputs: Diagnosed) -> tuple[Nonfinite, ...]:
    """The inputs that hold NaN or infinity, which spread into whatever reads them."""
    arrays = inputs.tokens
    if inputs.layer is not None:
        if np.shares_memory(inputs.layer.context, inputs.layer.x):
            del arrays["context"]
        arrays |= {f"w_{name}": w for name, w in inputs.layer.w.items()}
        arrays |= {f"b_{name}": b for name, b in inputs.layer.b.items()}
    nonfinite = []
    for name, array in arrays.items():
        if len(indices := np.argwhere(~np.isfinite(array))):
            first = tuple(indices[0].tolist())
            added = 0 if name[1:2] == "_" else max(0, 2 - len(inputs.problem.prefix))  # axes that the caller's lacks
            nonfinite.append(Nonfinite(name, first[added:], float(array[first]), len(indices)))
    return tuple(nonfinite)
