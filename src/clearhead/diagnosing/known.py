"""What is known about wrong numbers that no mistake explains: where they are right, and what the difference goes with.

Each is said only where it is so: equal within rounding, or a correlation that leaves no doubt.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.diagnosing import evidence
from clearhead.diagnosing.fitting import largest
from clearhead.diagnosing.reason import Reason
from clearhead.diagnosing.recipe import RIGHT, Inputs
from clearhead.diagnosing.search import Search, tail_length
from clearhead.diagnosing.verdict import Nonfinite

Other = tuple[str, dict[str, Any], Array]  # a key, the values that it names, and the numbers
_CLEAR = 0.95  # a correlation from which on the difference is said to go with something
_RATES = 0.04, 0.6  # of dropout, as models are trained with
_MOST = 6  # the most runs of positions that are listed


def telling(theirs: Array) -> Reason | None:
    """An output that says by itself what to look for: no number in it, or everywhere the same one."""
    if not theirs.size:
        return None
    if np.isnan(theirs).all():
        return Reason("all NaN", {})
    if not np.isfinite(theirs).any():
        return Reason("no finite number", {})
    if not theirs.any():
        return Reason("all zero", {})
    if theirs.size > 1 and (theirs == theirs.flat[0]).all():
        return Reason("constant", {"value": float(theirs.flat[0])})
    return None


def known_about(search: Search, theirs: Array, right: Array, gaps: Array, tolerance: float) -> tuple[Reason, ...]:
    """What is known, the most telling first: gaps are |theirs - right|, all (batch, heads, queries, columns)."""
    if theirs.shape != right.shape or not theirs.size:
        return ()
    wrong = gaps > tolerance
    found = [*_where(search, wrong), *_nonfinite(theirs, right)]
    stage = search.full.inputs.stage
    others = [(key, values, make()) for key, values, make in _moved(search, right)]
    others = [other for other in others if other[2].shape == theirs.shape]
    same = _another(others, theirs, right, tolerance)
    if same is not None:
        found.append(same)
    elif np.isfinite(theirs).all() and np.isfinite(right).all():
        found += _difference(search, others, theirs, right, wrong)
    if search.untried:
        found.append(Reason("too long", {"how": "alone" if search.untried == "pairs" else "not"}))
    found += [Reason(*_as_if(candidate.recipe.key_tail, search)) for candidate in search.as_if()]
    if stage == "weights":
        found += _of_weights(theirs, right, tolerance)
    if stage == "output" and np.isfinite(theirs).all():
        found += _outside(search, theirs)
        rate = evidence.scatter(search.full, RIGHT, search.everything)
        usual = rate is not None and _RATES[0] <= rate <= _RATES[1] and same is None
        found += [Reason("two runs", {"rate": 100 * rate})] if usual and rate is not None else []
        found += [Reason("ask for weights", {})]
    return tuple(found)


def _where(search: Search, wrong: Array) -> Iterator[Reason]:
    """The batch entries, heads, queries and columns that are right as a whole, where others are not."""
    labels = {
        "batch": np.array(search.coverage.batches),
        "head": np.arange(wrong.shape[1]),
        "query": np.array(search.coverage.queries),
        "column": np.arange(wrong.shape[3]),
    }
    for axis, (name, places) in enumerate(labels.items()):
        bad = wrong.any(axis=tuple(other for other in range(4) if other != axis))
        if bad.all() or (name == "head" and search.full.inputs.merged):
            continue
        kind = "key" if name == "column" and search.full.inputs.stage != "output" else name
        right, off = _ranges(places[~bad]), _ranges(places[bad])
        yield Reason(f"right {kind}", {"right": right, "wrong": off})
    share = float(wrong.mean())
    if share < 0.05:
        yield Reason("few wrong", {"count": int(wrong.sum()), "all": wrong.size})


def _ranges(places: Array) -> str:
    """0-12, 14, 20-22, …"""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts[:_MOST]) + (", …" if len(texts) > _MOST else "")


def _nonfinite(theirs: Array, right: Array) -> Iterator[Reason]:
    bad = ~np.isfinite(theirs) & np.isfinite(right)
    if bad.any():
        values = {"count": int(bad.sum()), "rows": int(bad.any(axis=-1).sum())}
        yield Reason("some nonfinite", values | {"whole": bool(bad[bad.any(axis=-1)].all())})


def _moved(search: Search, right: Array) -> Iterator[tuple[str, dict[str, Any], Callable[[], Array]]]:
    """Other arrays that code may give in place of the right one: other positions of it, and the inputs."""
    axes = ("batch", "head", "query", "column")
    sampled = not search.coverage.everything
    for axis, name in enumerate(axes):
        size = right.shape[axis]
        if size < 2 or (sampled and name in ("batch", "query")):
            continue
        for by in (1, -1):
            yield f"next {name}", {"by": by}, partial(np.roll, right, -by, axis)
        yield f"reversed {name}", {}, partial(np.flip, right, axis)
        yield f"first {name}", {}, partial(_for_all, right.take([0], axis), right.shape)
        yield f"mean {name}", {}, partial(_for_all, right.mean(axis, keepdims=True), right.shape)
    inputs = search.full.inputs
    if inputs.stage != "output" or inputs.merged or inputs.weights is not None:
        return
    exact, rows, heads = search.full.exact, list(search.everything.rows), search.everything.heads
    values = exact.served(RIGHT, "v", heads)
    shape = right.shape
    yield "mean of v", {}, partial(_for_all, values.mean(axis=2, keepdims=True), shape)
    weights = exact.weights(RIGHT, search.everything)
    for axis, name in enumerate(("batch", "head", "key", "column")):
        for by in (1, -1) if values.shape[axis] > 1 and not (sampled and name == "batch") else ():
            yield f"values {name}", {"by": by}, partial(_with_values, weights, values, -by, axis)
    if values.shape[2] == inputs.problem.queries:
        yield "v itself", {}, lambda: values[:, :, rows]
    q = exact.operand(RIGHT, "q")
    if q.shape[-1] == shape[-1]:
        yield "q itself", {}, lambda: q[:, :, rows]


def _for_all(x: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(x, shape)


def _with_values(weights: Array, values: Array, by: int, axis: int) -> Array:
    return np.asarray(weights @ np.roll(values, by, axis))


def _another(others: list[Other], theirs: Array, right: Array, tolerance: float) -> Reason | None:
    """The array that theirs equal: the right one of other positions, or an input."""
    for key, values, other in others:
        if bool((np.abs(theirs - other) <= tolerance).all()):
            return Reason(f"is {key}", values)
    if not (np.isfinite(theirs).all() and np.isfinite(right).all()):
        return None
    squared = float((right**2).sum())
    factor = float((theirs * right).sum()) / squared if squared else 0.0
    if factor and bool((np.abs(theirs - factor * right) <= 2 * max(1.0, abs(factor)) * tolerance).all()):
        return Reason("is a multiple", {"factor": factor})
    shift = float((theirs - right).mean())
    if bool((np.abs(theirs - right - shift) <= 2 * tolerance).all()):
        return Reason("is shifted", {"shift": shift})
    for key, values, other in others:
        if (mixed := _mixed(theirs, right, other, tolerance)) is not None:
            return Reason(f"mixes {key}", values | mixed)
    if right.shape[2] > 1 and bool((np.abs(theirs - theirs[:, :, :1]) <= tolerance).all()):
        return Reason("one row for all", {})
    return None


def _mixed(theirs: Array, right: Array, other: Array, tolerance: float) -> dict[str, Any] | None:
    """How much of the right numbers and of others theirs are made of; None where they are not."""
    if other.shape != right.shape or not np.isfinite(other).all():
        return None
    parts = np.stack([right.ravel(), other.ravel()], axis=1)
    (own, share), _, rank, _ = np.linalg.lstsq(parts, theirs.ravel(), rcond=1e-6)
    allowed = 2 * max(1.0, abs(own) + abs(share)) * tolerance
    if rank < 2 or np.abs(parts @ (own, share) - theirs.ravel()).max() > allowed:
        return None
    return {"own": float(own), "share": float(share)}


def _difference(search: Search, others: list[Other], theirs: Array, right: Array, wrong: Array) -> Iterator[Reason]:
    """What the difference goes with, and how it is spread."""
    error = np.where(wrong, theirs - right, 0.0)
    best: tuple[float, str, dict[str, Any], float] = (_CLEAR, "", {}, 0.0)
    for key, values, other in [("output", {}, right), *others]:
        if other.shape == error.shape and np.isfinite(other).all():
            found = evidence.correlation(error, other)
            if abs(found) > best[0] + 1e-6:
                best = (abs(found), key, values, float((error * other).sum() / (other**2).sum()))
    if best[1]:
        yield Reason(f"goes with {best[1]}", {**best[2], "correlation": best[0], "factor": best[3]})
    size = np.sqrt((error**2).mean())
    if size < 0.02 * np.sqrt((right**2).mean()) and error.size > 64 and not evidence.follows(error, right):
        yield Reason("small noise", {"size": float(size / np.sqrt((right**2).mean()))})
    by_row = np.sqrt((error**2).mean(axis=(0, 1, 3)))
    if len(by_row) > 7 and (by_row > 0).sum() > 7:
        rows = np.array(search.coverage.queries)[by_row > 0]
        ranks = np.argsort(np.argsort(by_row[by_row > 0]))
        found = float(np.corrcoef(rows, ranks)[0, 1])
        if abs(found) > 0.9:
            yield Reason("grows" if found > 0 else "shrinks", {"first": by_row[by_row > 0][0], "last": by_row[-1]})


def _as_if(tail: tuple[str, int], search: Search) -> tuple[str, dict[str, Any]]:
    kind, block = tail
    length = tail_length(kind, block, search.full.inputs.problem.keys)
    return ("as if unread" if kind == "skipped" else "as if zeros"), {"count": length}


def _of_weights(theirs: Array, right: Array, tolerance: float) -> Iterator[Reason]:
    """Weights: do they sum to 1, and are they 0 where they should be?"""
    if not np.isfinite(theirs).all():
        return
    sums = theirs.sum(axis=-1)
    one = np.abs(sums - right.sum(axis=-1)) <= theirs.shape[-1] * tolerance
    if one.all():
        yield Reason("sums right", {})
    else:
        yield Reason("sums wrong", {"least": float(sums.min()), "most": float(sums.max())})
    if (right == 0).any():
        off = (theirs > tolerance) & (right == 0)
        yield Reason("zeros wrong", {"count": int(off.sum())}) if off.any() else Reason("zeros right", {})
    if (theirs < -tolerance).any():
        yield Reason("negative weights", {"least": float(theirs.min())})


def _outside(search: Search, theirs: Array) -> Iterator[Reason]:
    """Outputs beyond the values of their column, which no weights of sum 1 and no weights between 0 and 1 can give."""
    inputs = search.full.inputs
    if inputs.merged or inputs.v is None:
        return
    exact, heads = search.full.exact, search.everything.heads
    values = exact.served(RIGHT, "v", heads)
    if values.shape[-1] != theirs.shape[-1] or not values.shape[2]:
        return
    low, high = (extreme(axis=2, keepdims=True) for extreme in (values.min, values.max))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return
    slack = 1e-3 * max(largest(low), largest(high))
    if inputs.problem.sinks is not None:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    outside = (theirs < low - slack) | (theirs > high + slack)
    outside &= np.abs(theirs) > slack  # an empty row is 0
    if outside.any():
        yield Reason("outside the values", {"count": int(outside.sum()), "rows": int(outside.any(axis=-1).sum())})


def nonfinite_inputs(inputs: Inputs) -> tuple[Nonfinite, ...]:
    """The inputs that hold NaN or infinity, which spread into whatever reads them."""
    arrays: dict[str, Any] = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if inputs.layer is not None:
        arrays = {"x": inputs.layer.x, "context": inputs.layer.context}
        arrays |= {f"w_{name}": w for name, w in inputs.layer.w.items()}
        arrays |= {f"b_{name}": b for name, b in inputs.layer.b.items()}
        if arrays["context"] is arrays["x"] or np.shares_memory(arrays["context"], arrays["x"]):
            del arrays["context"]
    nonfinite = []
    for name, array in arrays.items():
        indices = np.argwhere(~np.isfinite(array))
        if len(indices):
            first = tuple(int(i) for i in indices[0])
            added = 0 if name[1:2] == "_" else max(0, 2 - len(inputs.problem.prefix))  # axes that the caller's lacks
            nonfinite.append(Nonfinite(name, first[added:], float(array[first]), len(indices)))
    return tuple(nonfinite)
