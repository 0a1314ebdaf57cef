"""What is known about wrong numbers that no mistake explains, and why an explanation is likely at most."""

from collections.abc import Iterator

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.diagnosing.recipe import Diagnosed, Recipe
from clearhead.diagnosing.rule_changes import changed_rules
from clearhead.diagnosing.search import Search
from clearhead.diagnosing.verdict import MistakeExplanation, Nonfinite, Reason

_POSITIONS = 4  # fewer queries are no evidence: what is wrong with them could be wrong with these alone
_LENGTHS = 4  # fewer distinct lengths are no evidence: they may be right by luck, or rounded up alike
_CHANCE = 1e-3  # of any candidate fitting so well
_ACROSS = {"causal", "scale", "query_offset"}  # the rules that attention over heads keeps
_MOST = 6  # the most runs of positions that are listed


# ── why an explanation is not sure ──


def doubts(search: Search, candidate: MistakeExplanation, gaps: Array, tolerance: float) -> Iterator[Reason]:
    """What keeps the explanation from being sure, where no other explanation fits as well.

    gaps, tolerance   how far theirs lie from the right numbers, and what rounding allows
    """
    inputs = search.inputs
    if candidate.recipe["across"] == "heads" and not set(inputs.problem.active_rules()) - _ACROSS:
        yield Reason("axes swapped")  # such arrays give the same numbers
    if len(candidate.entries) > 1:
        yield Reason("a pair")
    if any(mistake.evidence == "rounding" for mistake in candidate.entries):
        yield Reason("only rounding")
    positions = int((gaps > tolerance).any(axis=(0, 1, 3)).sum())
    if positions < _POSITIONS:
        yield Reason("one position" if positions == 1 else "few positions", {"count": positions})
    if _by_count(candidate.recipe, inputs.problem.kv_lengths):
        yield Reason("a size")
    if special := _special_window(candidate.recipe, inputs.problem):
        yield Reason(special)
    several = {name: x for name, x in inputs.tokens.items() if x.size and x.shape[-2] > 1}
    if names := [name for name, x in several.items() if bool(np.all(x == x[..., :1, :]))]:  # these tell no keys apart
        yield Reason("same tokens", {"names": names})
    difference = float(gaps.max(initial=0.0))
    by_chance = search.tried * min(1.0, 4 * tolerance / difference) ** (inputs.theirs.size / 2)
    if not by_chance < _CHANCE:
        yield Reason("small difference")


def _by_count(recipe: Recipe, lengths: Array | None) -> bool:
    """Is all that shows it how many keys come first or last, or the lengths of a few batch entries?"""
    if recipe["padding"] in ("shortest", "longest") or recipe["padding_shift"]:
        return lengths is None or len(np.unique(lengths)) < _LENGTHS
    first = recipe["tile"] is not None and recipe["tile"][0] == "first missing"
    last = recipe["blocks"] is not None and recipe["blocks"][0].startswith("last")
    return first or last or recipe["key_tail"] is not None


def _special_window(recipe: Recipe, problem: Problem) -> str:
    """What a window that is off by one may be as well: one width for both sides, or no right side; "" if neither."""
    if not isinstance(recipe["window"], (tuple, str)) or recipe["window"] == "missing" or None in problem.window:
        return ""
    became, window = changed_rules(problem, recipe).window, problem.window
    if any(x is None or abs(x - side) > 1 for x, side in zip(became, window, strict=True) if side is not None):
        return ""
    if became[0] == became[1] and window[0] != window[1]:
        return "equal sides"
    return "no right side" if became[1] == 0 and window[1] else ""


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


def known_about(search: Search, theirs: Array, right: Array, gaps: Array, tolerance: float) -> Iterator[Reason]:
    """What is known, the most telling first: gaps are |theirs - right|, all (batch, heads, queries, columns)."""
    if theirs.shape != right.shape or not theirs.size:
        return
    stage, nonfinite = search.inputs.stage, ~np.isfinite(theirs) & np.isfinite(right)
    yield from _where(search, gaps > tolerance)
    if nonfinite.any():
        yield Reason("some nonfinite", {"count": int(nonfinite.sum()), "rows": int(nonfinite.any(axis=-1).sum())})
    if search.untried:
        yield Reason("too long")
    if stage == "output" and np.isfinite(theirs).all():
        yield Reason("ask for weights")


def _where(search: Search, wrong: Array) -> Iterator[Reason]:
    """The batch entries, heads, queries and columns that are right as a whole, where others are not."""
    coverage, inputs = search.coverage, search.inputs
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
