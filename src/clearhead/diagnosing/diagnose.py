"""`ch.diagnose`: which mistake an attention code made, from its inputs and its numbers."""

from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np

from clearhead.core.arrays import FLOATS, as_array, ungraphed
from clearhead.core.axes import Array, heads_first
from clearhead.core.problem import describe, describe_whole
from clearhead.core.rule_values import read_flag, read_number, read_numbers
from clearhead.core.rules import Rules, check_names, check_supported
from clearhead.diagnosing.certainty import doubts
from clearhead.diagnosing.decimals import judged_by_decimals
from clearhead.diagnosing.fitting import differences
from clearhead.diagnosing.known import known_about, nonfinite_inputs, telling
from clearhead.diagnosing.reason import Reason
from clearhead.diagnosing.recipe import RIGHT, RULES, Inputs, LayerInputs, Rotary, Stage
from clearhead.diagnosing.search import Candidate, Search
from clearhead.diagnosing.theirs import read_theirs
from clearhead.diagnosing.verdict import Confidence, Diagnosis, MistakeExplanation, Outcome, Place
from clearhead.errors import ClearheadError, FileError, RuleError, ShapeError, shown, unknown
from clearhead.textbook.case_file import (
    GIVEN_WEIGHTS,
    INPUTS,
    LAYER,
    NAMES,
    check_alone,
    half_decimals,
    inputs_of,
    names_of,
    numbers,
    precision,
    read,
    value_of,
)
from clearhead.textbook.shapes import Convention, check_convention, layer_sizes, turned
from clearhead.textbook.trace_weights import describe_weights
from clearhead.view.names import token_names

_OPTIONS = ("stage", "rotary", "rotary_interleaved")
_KNOWN = (
    *(*INPUTS, *LAYER, "weights", *NAMES, "num_heads", "convention", "theirs"),
    *(*_OPTIONS, *Rules.__annotations__),
)


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
    rotation = _rotary(rotary, interleaved=rotary_interleaved)
    with ungraphed():
        found = judged(plain_inputs(q, k, v, theirs, stage, rotation, rules))
        suspected = found.verdict == "unexplained" or any("across" in e.details for e in found.explanations)
        if suspected and _right_with_axes_swapped(q, k, v, theirs, stage, rotation, rules):
            return _doubted(found, Reason("axes swapped", {}))
    return found


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
    rotation = _rotary(rotary, interleaved=rotary_interleaved)
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
        inputs = _weights(weights, v, theirs, convention, "output")
    return replace(judged(inputs), convention=convention)


def diagnose_file(path: str | Path) -> Diagnosis:
    """`diagnose`, `diagnose_layer` or `diagnose_weights` on a file's values: .json, .npz, .safetensors or .pt.

    Raises FileError when the file is missing, malformed or of the wrong form, and what those three raise.
    """
    place = Path(path)
    data = read(place)
    for name in data:
        if name not in _KNOWN:
            raise unknown(f"key in {place.name}:", name, _KNOWN)
    if "theirs" not in data:
        raise FileError(f"{place.name} lacks theirs.", "it is what your code gave for these inputs.")
    written = data.pop("theirs")
    theirs = numbers("theirs", written)
    theirs = theirs if theirs.dtype in FLOATS else theirs.astype(np.float64)
    by_hand = not isinstance(written, np.ndarray)
    theirs = precision(written, theirs) if by_hand else theirs
    stage, names = data.pop("stage", "output"), names_of(data)
    values = {name: value_of(name, value) for name, value in data.items()}
    inputs = _read(place, values, theirs, stage)
    tokens, _ = token_names(names["tokens"], names["source_tokens"], inputs.problem)
    if by_hand:
        halves = _read(place, values, np.asarray(half_decimals(written)), stage).theirs
        found = judged_by_decimals(judged, inputs, halves)
    else:
        found = judged(inputs)
    return replace(found, tokens=tokens, convention=values.get("convention", "rows"))


def examined(place: Path, values: dict[str, Any], theirs: Array, stage: Any, slack: float) -> Diagnosis:
    """The verdict on a file's values: inputs and rules by name."""
    return judged(_read(place, values, theirs, stage), slack)


def _read(place: Path, values: dict[str, Any], theirs: Array, stage: Any) -> Inputs:
    values = dict(values)
    needed = inputs_of(place, values)
    stage = str(stage.item()) if isinstance(stage, np.ndarray) and stage.ndim == 0 else stage
    rotation = _rotary(values.pop("rotary", None), interleaved=values.pop("rotary_interleaved", False))
    if needed == GIVEN_WEIGHTS:
        weights, v, convention = values.pop("weights"), values.pop("v"), values.pop("convention", "rows")
        check_alone(place, [*values, *(["rotary"] if rotation else [])])
        return _weights(weights, v, theirs, convention, stage)
    if needed == INPUTS:
        q, k, v = (values.pop(name) for name in INPUTS)
        convention = values.pop("convention", "rows")
        check_convention(convention)
        q, k, v, theirs = (turned(x, convention) for x in (q, k, v, theirs))
        return plain_inputs(q, k, v, theirs, stage, rotation, cast("Rules", values))
    arrays = {name: values.pop(name, None) for name in LAYER}
    heads, convention = values.pop("num_heads", 1), values.pop("convention", "rows")
    return layer_inputs(arrays, theirs, heads, convention, stage, rotation, cast("Rules", values))


@np.errstate(all="ignore")  # wrong recipes overflow and divide by 0
def judged(inputs: Inputs, slack: float = 0.0) -> Diagnosis:
    """The verdict on checked inputs; `slack` is half the last decimal of theirs where it was printed, else 0."""
    check_supported("ch.diagnose", RULES, inputs.problem.active_rules())
    search = Search(inputs, slack)
    computed = search.full.exact.answer(RIGHT, search.everything)
    _, tolerance = search.full.measure(RIGHT, search.everything, computed)
    theirs = search.full.theirs(search.everything)
    gaps = differences(theirs, computed) if computed.shape == theirs.shape else np.full(theirs.shape, inf)
    first = _first(search, gaps, theirs, computed, tolerance)
    difference = float(gaps.max(initial=0.0))
    verdict: Outcome = "right" if first is None else "unexplained"
    explanations: tuple[MistakeExplanation, ...] = ()
    sign = None if first is None else telling(theirs)
    if first is not None and sign is None:
        verdict, explanations = _explanations(search, gaps, tolerance)
    known = {mistake for explanation in explanations for mistake in explanation.candidate.mistakes}
    hidden = [] if verdict == "unexplained" else search.unseen()
    unseen = tuple(MistakeExplanation(f, "ambiguous") for f in hidden if f.mistakes[0] not in known)
    facts: tuple[Reason, ...] = () if sign is None else (sign,)
    if verdict == "unexplained" and sign is None:
        facts = known_about(search, theirs, computed, gaps, tolerance)
    return Diagnosis(
        *(verdict, explanations, difference, tolerance, first, search.coverage, unseen),
        nonfinite=nonfinite_inputs(inputs),
        known=facts,
    )


def _explanations(search: Search, gaps: Array, tolerance: float) -> tuple[Outcome, tuple[MistakeExplanation, ...]]:
    """What explains wrong numbers: one mistake before two, and the explanations that fit equally well together."""
    fitting = search.explanations() if search.full.inputs.problem.keys else []  # without keys all recipes give 0
    if not fitting:
        return "unexplained", ()
    best = fitting[0]
    equal = [f for f in fitting if f.residual <= max(2 * best.residual, 0.1 * best.tolerance)]
    by_mistakes: dict[Any, list[Candidate]] = {}
    for candidate in fitting:
        by_mistakes.setdefault((frozenset(candidate.mistakes), candidate in equal), []).append(candidate)
    groups = [(group[0], tuple(group[1:]), as_good) for (_, as_good), group in by_mistakes.items()]
    several = sum(as_good for *_, as_good in groups) > 1
    explanations = [
        MistakeExplanation(first, "ambiguous" if several and as_good else "likely", others)
        for first, others, as_good in groups
    ]
    if several:
        return "ambiguous", tuple(explanations)
    doubted = doubts(search, best, gaps, tolerance)
    confidence: Confidence = "sure" if len(groups) == 1 and not doubted else "likely"
    return "mistake", (replace(explanations[0], confidence=confidence, doubts=doubted), *explanations[1:])


def _doubted(found: Diagnosis, reason: Reason) -> Diagnosis:
    """The same with one more thing that is known, which speaks against every explanation."""
    if not found.explanations:
        return replace(found, known=(reason, *found.known))
    best, *others = found.explanations
    confidence: Confidence = "likely" if best.confidence == "sure" else best.confidence
    best = replace(best, confidence=confidence, doubts=(reason, *best.doubts))
    return replace(found, explanations=(best, *others))


def plain_inputs(q: Any, k: Any, v: Any, theirs: Any, stage: Stage, rotary: Rotary | None, rules: Rules) -> Inputs:
    """The inputs of `diagnose`, checked."""
    described, values = describe_whole(q, k, v, rules)
    shape = (*described.problem.prefix, described.problem.queries, values.shape[-1])
    given = heads_first(read_theirs(theirs, shape, described.problem, stage))
    return Inputs(described.problem, described.q, described.k, values, given, stage, None, rotary)


@np.errstate(all="ignore")
def _right_with_axes_swapped(
    q: Any, k: Any, v: Any, theirs: Any, stage: Stage, rotary: Rotary | None, rules: Rules
) -> bool:
    """Are the numbers right if all four arrays are (batch, length, heads, d)?"""
    if stage != "output" or rotary is not None or any(len(getattr(x, "shape", ())) != 4 for x in (q, k, v, theirs)):
        return False
    q, k, v, theirs = (as_array(x, "q")[0].swapaxes(1, 2) for x in (q, k, v, theirs))
    try:
        search = Search(plain_inputs(q, k, v, theirs, stage, rotary, rules))
    except ClearheadError:  # the rules fit the other order of axes only
        return False
    gap, allowed = search.full.measure(RIGHT, search.sample)
    return gap <= allowed


def _weights(weights: Any, v: Any, theirs: Any, convention: Convention, stage: Stage) -> Inputs:
    described, given = describe_weights(weights, v, convention)
    values, problem = described.v, described.problem
    assert values is not None
    if stage != "output":
        raise RuleError(f"stage is {shown(stage)}: where the weights are given, only the output can be wrong.")
    shape = (*problem.prefix, problem.queries, values.shape[-1])
    mine = heads_first(read_theirs(turned(as_array(theirs, "theirs")[0], convention), shape, problem, stage))
    return Inputs(problem, described.q, described.k, values, mine, stage, weights=given)


def layer_inputs(
    arrays: dict[str, Any],
    theirs: Any,
    num_heads: int,
    convention: Convention,
    stage: Stage,
    rotary: Rotary | None,
    rules: Rules,
) -> Inputs:
    """The inputs of a layer's diagnosis, checked; arguments as in `diagnose_layer`."""
    check_convention(convention)
    check_names(rules)
    arrays = arrays | {"context": arrays["x"] if arrays["context"] is None else arrays["context"]}
    needed = ("x", "w_q", "w_k", "w_v")
    ready = {name: read_numbers(name, a) for name, a in arrays.items() if a is not None or name in needed}
    for name in ("x", "context", "w_q", "w_k", "w_v", "w_o"):
        if name in ready and ready[name].ndim < 2:
            raise ShapeError(f"{name} has {ready[name].ndim} axes: expected at least two.")
    w = {name[2:]: turned(a, convention) for name, a in ready.items() if name.startswith("w_")}
    b = {name[2:]: a for name, a in ready.items() if name.startswith("b_")}
    x, context = (turned(ready[name], convention) for name in ("x", "context"))
    out = w["o"].shape if "o" in w else None
    w_qkv = (w["q"].shape, w["k"].shape, w["v"].shape)
    sizes = layer_sizes(x.shape, context.shape, w_qkv, out, num_heads, convention)
    for name, bias in b.items():
        if name not in w:
            raise RuleError("b_o is given but w_o is not: a bias of the output projection needs one.")
        if bias.shape != w[name].shape[-1:]:
            raise ShapeError(
                f"b_{name} has shape {bias.shape}: expected one number per output column, {w[name].shape[-1:]}."
            )
    kv_heads = sizes.kv_heads or 1
    q, k, v = (  # only their shapes and dtype are used: `workings` computes the projections of each recipe
        np.broadcast_to(np.zeros((), x.dtype), (*sizes.lead, heads, length, width))
        for heads, length, width in (
            (num_heads, sizes.queries, sizes.d_k),
            (kv_heads, sizes.keys, sizes.d_k),
            (kv_heads, sizes.keys, sizes.d_v),
        )
    )
    described = describe(q, k, v, rules)
    assert described.v is not None
    joined = (*sizes.lead, sizes.queries, num_heads * sizes.d_v if out is None else out[1])
    theirs = read_theirs(turned(as_array(theirs, "theirs")[0], convention), joined, described.problem, stage)
    theirs = theirs.reshape(described.problem.batch, 1 if stage == "output" else num_heads, *theirs.shape[-2:])
    flat = [array.reshape(prod(sizes.lead), *array.shape[-2:]) for array in (x, context)]
    layer = LayerInputs(flat[0], flat[1], w, b)
    return Inputs(described.problem, described.q, described.k, described.v, theirs, stage, layer, rotary)


def _rotary(base: Any, *, interleaved: Any) -> Rotary | None:
    if base is None:
        return None
    number = read_number("rotary", base, 0.0)
    if number <= 0:
        raise RuleError(
            f"rotary is {shown(base)}: expected the base of the angles, a positive number.", "rotary=10000.0"
        )
    return Rotary(number, read_flag("rotary_interleaved", interleaved))


def _first(search: Search, gaps: Array, theirs: Array, right: Array, tolerance: float) -> Place | None:
    """The first number, by batch, head and query, that is further off than rounding allows."""
    wrong = np.argwhere(gaps > tolerance)
    if not len(wrong):
        return None
    batch, head, row, column = (int(i) for i in wrong[0])
    return Place(
        search.coverage.batches[batch],
        None if search.full.inputs.merged else head,
        search.coverage.queries[row],
        column,
        float(theirs[batch, head, row, column]),
        float(right[batch, head, row, column]),
    )
