"""`ch.diagnose`: finds the mistake in attention code from its inputs and its numbers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.rules import Rules, check_supported, with_options
from clearhead.core.torch_state import ungraphed
from clearhead.diagnosing.recipe import RIGHT, RULES, Diagnosed, Stage, file_inputs, read_inputs, read_written
from clearhead.diagnosing.search import Search
from clearhead.diagnosing.verdict import Confidence, Diagnosis, MistakeExplanation, Outcome, Reason
from clearhead.diagnosing.workings import answer
from clearhead.errors import FileError
from clearhead.textbook import case_file
from clearhead.textbook.case_file import INPUTS, LAYER, NAMES
from clearhead.textbook.computed import differences
from clearhead.textbook.shapes import Convention

_OPTIONS = "theirs", "stage", "num_heads", "convention", "rotary", "rotary_interleaved"
_KNOWN = (*INPUTS, *LAYER, *NAMES, *_OPTIONS, *Rules.__annotations__)
_POSITIONS = 4  # if fewer queries are wrong, the explanation is not sure: the mistake may concern only these
_CHANCE = 1e-3  # the probability, at most, that any candidate fits so well by chance
_ACROSS = {"causal", "scale", "query_offset"}  # the rules that attention over heads keeps
_MOST = 6  # the most ranges of positions that are listed


@with_options
def diagnose(
    q: Any,
    k: Any,
    v: Any,
    theirs: Any,
    *,
    stage: Stage = "output",
    rotary: float | None = None,
    rotary_interleaved: bool = False,
    **rules: Unpack[Rules],
) -> Diagnosis:
    """Find the mistake, or the two mistakes, with which code computes `theirs` from these inputs.

    q, k, v   the inputs of the code: q (…, heads, queries, d_k), k (…, kv_heads, keys, d_k),
              v (…, kv_heads, keys, d_v), as in `attention`
    theirs    its result in any float dtype: the output (…, heads, queries, d_v), or a step (…, heads, queries, keys)
    stage     what theirs is: "output"; "weights"; "scores" (q·kᵀ before the scale), "scaled", "capped", "biased" or
              "masked"
    rotary    the base of rotary positions, if q and k are given before rotation: pairs are (i, i + d_k/2),
              or (2i, 2i + 1) with rotary_interleaved=True
    rules     what the code should do, as in `attention`

    Returns a Diagnosis, which prints as an answer: the verdict, explanations with residual and the line to change, the
    first difference, and what was compared (all weights up to 2 million, beyond that a sample of rows).
    Numbers are right if they lie no further from the truth than four times the error of a plain run in the coarser of
    q's and theirs' dtype; in doubtful cases the worst of five such runs counts.
    O(queries·keys·d_k) per head if the numbers are right. If they are wrong, each candidate costs that for a few rows,
    and for all rows if it fits there; pairs of mistakes make up to some ten thousand candidates.
    Raises as `attention`; RuleError for a stage or rotary base that makes no sense; DtypeError or ShapeError if theirs
    does not fit, with the axes to swap if that would help.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> ch.diagnose(q, k, v, q @ k.T, stage="scaled").explanations[0].mistakes
    ('no scale',)
    """
    with ungraphed():
        arrays = {"q": q, "k": k, "v": v}
        return judged(read_inputs(arrays, theirs, stage, rotary=(rotary, rotary_interleaved), rules=rules))


@with_options
def diagnose_layer(
    x: Any,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    w_o: Any,
    theirs: Any,
    *,
    num_heads: int = 1,
    context: Any = None,
    b_q: Any = None,
    b_k: Any = None,
    b_v: Any = None,
    b_o: Any = None,
    convention: Convention = "rows",
    stage: Stage = "output",
    rotary: float | None = None,
    rotary_interleaved: bool = False,
    **rules: Unpack[Rules],
) -> Diagnosis:
    """Diagnose a whole layer: from X through projections, heads and attention to U.

    x, w_q … convention   as in `trace_layer`; w_o may be None
    theirs                U (…, queries, d_out), or the step that `stage` names: one of `diagnose`, "q", "k" and "v" of
                          the heads, "heads" (…, heads, queries, d_v), or "concat", these joined
    stage, rotary, rules  as in `diagnose`; queries and keys are rotated after their projection

    Returns a Diagnosis. Takes the time of `diagnose`, and of the projections for each candidate that changes them.
    Raises as `trace_layer` and `diagnose`: ShapeError, DtypeError or RuleError, naming the argument.

    >>> import numpy as np, clearhead as ch
    >>> x, w_q, w_k, w_v, w_o = np.random.default_rng(0).standard_normal((5, 4, 4))
    >>> theirs = ch.trace_layer(x, w_q, w_k, w_v, num_heads=2).output
    >>> ch.diagnose_layer(x, w_q, w_k, w_v, w_o, theirs, num_heads=2).explanations[0].mistakes
    ('output projection left out',)
    """
    optional = {"w_o": w_o, "context": context, "b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
    arrays = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, **optional}
    options: Any = {"num_heads": num_heads, "convention": convention, "rotary": (rotary, rotary_interleaved)}
    with ungraphed():
        return replace(judged(read_inputs(arrays, theirs, stage, rules=rules, **options)), convention=convention)


def diagnose_file(path: str | Path) -> Diagnosis:
    """Run `diagnose` or `diagnose_layer` on a file's values: .json, .npz or .safetensors.

    Numbers in a .json file may be rounded for printing: all count as precise as the one with the most decimals.

    Raises FileError if the file is missing, malformed or of the wrong form, and as these two functions.
    """
    place = Path(path)
    data = case_file.read(place, _KNOWN)
    if "theirs" not in data:
        raise FileError(f"{place.name} lacks theirs.", "add theirs, your code's result for these inputs.")
    theirs, slack = read_written("theirs", data.pop("theirs"))
    stage = data.pop("stage", "output")
    values = {name: case_file.value_of(name, value) for name, value in data.items() if name not in NAMES}
    inputs = file_inputs(place, values, theirs, stage)
    return replace(judged(inputs, slack), convention=values.get("convention", "rows"))


@np.errstate(all="ignore")  # wrong recipes overflow and divide by 0
def judged(inputs: Diagnosed, slack: float = 0.0) -> Diagnosis:
    """Judge checked inputs; `slack` is half of the last decimal if theirs was printed, else 0."""
    check_supported("ch.diagnose", RULES, inputs.problem.active_rules())
    search = Search(inputs, slack)
    rows = search.everything
    right, theirs = answer(search.exact, RIGHT, rows), search.theirs(rows)
    _, tolerance = search.measure(RIGHT, rows)
    gaps = differences(theirs, right)
    found = Diagnosis("right", (), float(gaps.max(initial=0.0)), tolerance, {}, search.looked)
    if found.difference <= tolerance:
        return found
    place = batch, head, row, column = tuple(np.argwhere(gaps > tolerance)[0].tolist())
    where = {"batch": search.looked["batches"][batch]} | ({} if inputs.merged else {"head": head})
    where |= {"query": rows[row], "column": column, "theirs": float(theirs[place]), "right": float(right[place])}
    sign = _telling(theirs)
    verdict, explanations = ("unexplained", ()) if sign else _explanations(search, gaps, tolerance)
    known = () if explanations else sign or tuple(_known_about(search, theirs, right, tolerance))
    return replace(found, verdict=verdict, explanations=explanations, first_difference=where, known=known)


def _explanations(search: Search, gaps: Array, tolerance: float) -> tuple[Outcome, tuple[MistakeExplanation, ...]]:
    """Explain wrong numbers: one mistake before two, and explanations that fit equally well together."""
    fitting = search.explanations() if search.inputs.problem.keys else []  # without keys all recipes give 0
    if not fitting:
        return "unexplained", ()
    best = fitting[0]
    limit = max(2 * best.residual, 0.1 * best.tolerance)
    groups: dict[Any, list[MistakeExplanation]] = {}
    for candidate in fitting:
        groups.setdefault((candidate.mistakes, candidate.residual <= limit), []).append(candidate)
    several = sum(as_good for _, as_good in groups) > 1
    explanations = [
        replace(first, confidence="ambiguous" if several and as_good else "likely", alike=tuple(others))
        for (_, as_good), (first, *others) in groups.items()
    ]
    if several:
        return "ambiguous", tuple(explanations)
    doubted = tuple(_doubts(search, best, gaps, tolerance))
    confidence: Confidence = "sure" if len(groups) == 1 and not doubted else "likely"
    return "mistake", (replace(explanations[0], confidence=confidence, doubts=doubted), *explanations[1:])


def _doubts(search: Search, candidate: MistakeExplanation, gaps: Array, tolerance: float) -> Iterator[Reason]:
    """Yield why an explanation is not sure, even if no other fits as well.

    gaps, tolerance   the differences between theirs and the right numbers, and what rounding allows
    """
    inputs, recipe = search.inputs, candidate.recipe
    if recipe["across"] == "heads" and not set(inputs.problem.active_rules()) - _ACROSS:
        yield "axes swapped", {}  # arrays with heads and queries swapped give the same numbers
    if len(candidate.entries) > 1:
        yield "a pair", {}
    if any(mistake.evidence == "rounding" for mistake in candidate.entries):
        yield "only rounding", {}
    positions = int((gaps > tolerance).any(axis=(0, 1, 3)).sum())
    if positions < _POSITIONS:
        yield "one position" if positions == 1 else "few positions", {"count": positions}
    if any(mistake.evidence == "a size" for mistake in candidate.entries):
        yield "a size", {}
    given = inputs.layer or inputs
    tokens = {name: getattr(given, name) for name in (INPUTS if given is inputs else ("x", "context"))}
    several = {name: x for name, x in tokens.items() if x.size and x.shape[-2] > 1}
    if names := [name for name, x in several.items() if bool(np.all(x == x[..., :1, :]))]:  # these hide what happened
        yield "same tokens", {"names": names}
    difference = float(gaps.max(initial=0.0))
    by_chance = search.tried * min(1.0, 4 * tolerance / difference) ** (inputs.theirs.size / 2)
    if not by_chance < _CHANCE:
        yield "small difference", {}


# ── what is known about numbers that no mistake explains ──


def _telling(theirs: Array) -> tuple[Reason, ...]:
    """Say what an output shows by itself: no finite number, or the same number everywhere."""
    if not np.isfinite(theirs).any():
        return (("no finite number", {}),)
    same = theirs.size > 1 and bool((theirs == theirs.flat[0]).all())
    return (("constant", {"value": float(theirs.flat[0])}),) if same else ()


def _known_about(search: Search, theirs: Array, right: Array, tolerance: float) -> Iterator[Reason]:
    """Yield what is known: which batch entries, heads, queries and columns are right and which wrong; a factor; NaN."""
    inputs, wrong, everywhere = search.inputs, differences(theirs, right) > tolerance, True
    names = "batch", "head", "query", "column" if inputs.stage == "output" else "key"
    indices = search.looked["batches"], range(wrong.shape[1]), search.everything, range(wrong.shape[3])
    for axis, (name, places) in enumerate(zip(names, map(np.array, indices), strict=True)):
        bad = wrong.any(axis=tuple(other for other in range(4) if other != axis))
        if not bad.all() and not (name == "head" and inputs.merged):
            everywhere = False
            yield f"right {name}", {"right": _ranges(places[~bad]), "wrong": _ranges(places[bad])}
    factor = float((theirs * right).sum() / (right * right).sum())
    if differences(theirs, factor * right).max() <= tolerance * max(1, abs(factor)):
        yield "a factor", {"factor": factor}
    elif everywhere:
        yield "wrong everywhere", {}
    nonfinite = ~np.isfinite(theirs) & np.isfinite(right)
    if nonfinite.any():
        yield "some nonfinite", {"count": int(nonfinite.sum()), "rows": int(nonfinite.any(axis=-1).sum())}
    if search.untried:
        yield "too long", {}
    if inputs.stage == "output" and np.isfinite(theirs).all():
        yield "ask for weights", {}


def _ranges(places: Array) -> str:
    """Write places as ranges: 0-12, 14, 20-22, …"""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts[:_MOST]) + (", …" if len(texts) > _MOST else "")
