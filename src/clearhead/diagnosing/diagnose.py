"""`ch.diagnose`: which mistake an attention code made, from its inputs and its numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from clearhead.core.arrays import FLOATS
from clearhead.core.axes import Array
from clearhead.core.rules import Rules, check_supported
from clearhead.core.torch_state import ungraphed
from clearhead.diagnosing.reasons import doubts, known_about, nonfinite_inputs, telling
from clearhead.diagnosing.recipe import (
    RIGHT,
    RULES,
    Diagnosed,
    Stage,
    file_inputs,
    layer_inputs,
    plain_inputs,
    rotary_of,
    weights_inputs,
)  # fmt: skip
from clearhead.diagnosing.search import Search
from clearhead.diagnosing.verdict import Confidence, Diagnosis, MistakeExplanation, Outcome, Place, Reason
from clearhead.errors import FileError
from clearhead.textbook import case_file
from clearhead.textbook.case_file import INPUTS, LAYER, NAMES
from clearhead.textbook.computed import differences
from clearhead.textbook.shapes import Convention
from clearhead.view.names import token_names

_OPTIONS = "num_heads", "convention", "stage", "rotary", "rotary_interleaved"
_KNOWN = (*INPUTS, *LAYER, "weights", *NAMES, "theirs", *_OPTIONS, *Rules.__annotations__)


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
    """What did their code do? Names the mistake, or the two mistakes, that give their numbers from these inputs.

    q, k, v   the inputs of their code: q (…, heads, queries, d_k), k (…, kv_heads, keys, d_k),
              v (…, kv_heads, keys, d_v), as in `attention`
    theirs    its result in any float dtype: the output (…, heads, queries, d_v), or a step (…, heads, queries, keys)
    stage     which step: "output"; "weights"; "scores" (q·kᵀ before the scale), "scaled", "capped", "biased" or
              "masked"
    rotary    the base of rotary positions, if q and k are given before rotation: pairs are (i, i + d_k/2),
              or (2i, 2i + 1) with rotary_interleaved=True
    rules     what their code should have done, as in `attention`

    Returns a Diagnosis, which prints as an answer: the verdict, explanations with residual and the line to change, the
    first difference, and what was compared: every weight up to 2 million of them, beyond that a sample of rows.
    Numbers are right when they are no further from the truth than four times the error of a plain run in the coarser
    of q's and theirs' dtype; in doubtful cases the worst of five such runs counts.
    O(queries·keys·d_k) for each head where the numbers are right. Where they are wrong, each candidate costs that for
    a few rows, and in full where it fits there; pairs of mistakes make up to some ten thousand candidates.
    Raises what `attention` raises, RuleError for a stage or rotary base that makes no sense, DtypeError and ShapeError
    where theirs does not fit, with the axes to swap where that would help.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> ch.diagnose(q, k, v, q @ k.T, stage="scaled").explanations[0].mistakes
    ('no scale',)
    """
    rotation = rotary_of(rotary, interleaved=rotary_interleaved)
    with ungraphed():
        return judged(plain_inputs(q, k, v, theirs, stage, rotation, rules))


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
    """`diagnose` for a whole layer: from X through projections, heads and attention to U.

    x, w_q … convention   as in `trace_layer`; w_o may be None
    theirs                U (…, queries, d_out), or with another stage (…, heads, queries, keys)
    stage, rotary, rules  as in `diagnose`; queries and keys are rotated after their projection

    Returns a Diagnosis. Costs what `diagnose` costs, and the projections for each candidate that changes them.
    Raises what `trace_layer` and `diagnose` raise: ShapeError, DtypeError or RuleError, naming the argument.

    >>> import numpy as np, clearhead as ch
    >>> x, w_q, w_k, w_v, w_o = np.random.default_rng(0).standard_normal((5, 4, 4))
    >>> theirs = ch.trace_layer(x, w_q, w_k, w_v, num_heads=2).output
    >>> ch.diagnose_layer(x, w_q, w_k, w_v, w_o, theirs, num_heads=2).explanations[0].mistakes
    ('output projection left out',)
    """
    optional = {"w_o": w_o, "context": context, "b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
    arrays = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, **optional}
    rotation = rotary_of(rotary, interleaved=rotary_interleaved)
    with ungraphed():
        inputs = layer_inputs(arrays, theirs, num_heads, convention, stage, rotation, rules)
    return replace(judged(inputs), convention=convention)


def diagnose_weights(weights: Any, v: Any, theirs: Any, *, convention: Convention = "rows") -> Diagnosis:
    """`diagnose` where the weights are given: what did their code do on the way from weights and values to the output?

    weights, v, convention   as in `trace_weights`
    theirs                   the output (…, heads, queries, d_v)

    Returns a Diagnosis. Raises what `trace_weights` raises, ShapeError or DtypeError where theirs does not fit.
    O(queries·keys·d_v) for each head and each candidate.

    >>> import numpy as np, clearhead as ch
    >>> a, v = np.array([[0.5, 0.5], [0.2, 0.8]]), np.array([[1.0, 0], [0, 3]])
    >>> ch.diagnose_weights(a, v, a.T @ v).explanations[0].mistakes
    ('weights transposed',)
    """
    with ungraphed():
        inputs = weights_inputs(weights, v, theirs, convention, "output")
    return replace(judged(inputs), convention=convention)


def diagnose_file(path: str | Path) -> Diagnosis:
    """`diagnose`, `diagnose_layer` or `diagnose_weights` on a file's values: .json, .npz, .safetensors or .pt.

    Numbers in a .json file may be rounded for printing: all are as precise as the one with the most decimals.

    Raises FileError when the file is missing, malformed or of the wrong form, and what those three raise.
    """
    place = Path(path)
    data = case_file.read(place, _KNOWN)
    if "theirs" not in data:
        raise FileError(f"{place.name} lacks theirs.", "it is what your code gave for these inputs.")
    written = data.pop("theirs")
    theirs = case_file.numbers("theirs", written)
    theirs = theirs if theirs.dtype in FLOATS else theirs.astype(np.float64)
    slack = 0.0
    if not isinstance(written, np.ndarray):
        theirs, slack = case_file.precision(written, theirs), case_file.half_a_decimal(written)
    stage, names = data.pop("stage", "output"), case_file.names_of(data)
    values = {name: case_file.value_of(name, value) for name, value in data.items()}
    inputs = file_inputs(place, values, theirs, stage)
    tokens, _ = token_names(names["tokens"], names["source_tokens"], inputs.problem)
    return replace(judged(inputs, slack), tokens=tokens, convention=values.get("convention", "rows"))


@np.errstate(all="ignore")  # wrong recipes overflow and divide by 0
def judged(inputs: Diagnosed, slack: float = 0.0) -> Diagnosis:
    """The verdict on checked inputs; `slack` is half the last decimal of theirs where it was printed, else 0."""
    check_supported("ch.diagnose", RULES, inputs.problem.active_rules())
    search = Search(inputs, slack)
    right, theirs = search.fit.exact.answer(RIGHT, search.everything), search.fit.theirs(search.everything)
    _, tolerance = search.fit.measure(RIGHT, search.everything, right)
    gaps = differences(theirs, right)
    first: Place | None = None
    if len(wrong := np.argwhere(gaps > tolerance)):  # the first number that is further off than rounding allows
        place = batch, head, row, column = tuple(wrong[0].tolist())
        batch, row = search.coverage.batches[batch], search.coverage.queries[row]
        head = None if search.inputs.merged else head
        first = Place(batch, head, row, column, float(theirs[place]), float(right[place]))
    verdict: Outcome = "right" if first is None else "unexplained"
    explanations: tuple[MistakeExplanation, ...] = ()
    known: tuple[Reason, ...] = ()
    if first is not None and (sign := telling(theirs)):
        known = (sign,)
    elif first is not None:
        verdict, explanations = _explanations(search, gaps, tolerance)
        known = tuple(known_about(search, theirs, right, gaps, tolerance)) if verdict == "unexplained" else ()
    named = {mistake for explanation in explanations for mistake in explanation.entries}
    hidden = [] if verdict == "unexplained" else search.unseen()
    unseen = tuple(each for each in hidden if each.entries[0] not in named)
    difference, nonfinite = float(gaps.max(initial=0.0)), nonfinite_inputs(inputs)
    return Diagnosis(verdict, explanations, difference, tolerance, first, search.coverage, unseen, nonfinite, known)


def _explanations(search: Search, gaps: Array, tolerance: float) -> tuple[Outcome, tuple[MistakeExplanation, ...]]:
    """What explains wrong numbers: one mistake before two, and the explanations that fit equally well together."""
    fitting = search.explanations() if search.inputs.problem.keys else []  # without keys all recipes give 0
    if not fitting:
        return "unexplained", ()
    best = fitting[0]
    equal = [f for f in fitting if f.residual <= max(2 * best.residual, 0.1 * best.tolerance)]
    groups: dict[Any, list[MistakeExplanation]] = {}
    for candidate in fitting:
        groups.setdefault((candidate.mistakes, candidate in equal), []).append(candidate)
    several = sum(as_good for _, as_good in groups) > 1
    explanations = [
        replace(first, confidence="ambiguous" if several and as_good else "likely", alike=tuple(others))
        for (_, as_good), (first, *others) in groups.items()
    ]
    if several:
        return "ambiguous", tuple(explanations)
    doubted = tuple(doubts(search, best, gaps, tolerance))
    confidence: Confidence = "sure" if len(groups) == 1 and not doubted else "likely"
    return "mistake", (replace(explanations[0], confidence=confidence, doubts=doubted), *explanations[1:])
