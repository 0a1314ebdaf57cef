"""The check of a worked example: which claimed step is the first wrong one, by how much, and what was done instead.

A file (.json, .npz or .safetensors) holds q, k, v, or a layer's x, w_q, w_k, w_v, w_o, num_heads, context and biases,
or weights and v; any score rules; the names of its tokens; and, if wanted, the values that it claims for steps: scores,
scaled, capped, biased, masked, weights, output, and of a layer also q, k, v, heads and concat, the heads joined, which
may be called H.

A claim that is wrong takes the place of its step, and everything after it is computed from there: so a mistake is told
from what follows.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core import definition
from clearhead.core.axes import Array, join_heads, split_heads
from clearhead.core.rules import Rules
from clearhead.diagnosing.diagnose import judged
from clearhead.diagnosing.fitting import largest
from clearhead.diagnosing.mistakes import mistakes
from clearhead.diagnosing.recipe import STAGES, Diagnosed, Recipe, file_inputs
from clearhead.diagnosing.search import closest
from clearhead.diagnosing.verdict import Confidence, MistakeExplanation
from clearhead.diagnosing.workings import Workings
from clearhead.errors import FileError
from clearhead.textbook import case_file
from clearhead.textbook.case_file import INPUTS, LAYER, NAMES, WEIGHTS_AND_V
from clearhead.textbook.computed import largest_difference, listed
from clearhead.textbook.page import Scene, Translations, both
from clearhead.textbook.shapes import Convention, turned
from clearhead.textbook.trace import Trace, trace, trace_layer, trace_weights
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.view.names import Names, token_names
from clearhead.words import LANGUAGES, Language, say

CLAIMABLE = (*INPUTS, *STAGES[:-1], "heads", "concat", "output")
_KNOWN = (*LAYER, "num_heads", "convention", *NAMES, *Rules.__annotations__, *CLAIMABLE, "h")
# Each step and those that it is computed from.
_FROM: dict[str, tuple[str, ...]] = {"scores": ("q", "k"), "heads": ("weights", "v"), "concat": ("heads",)}
_FROM |= {step: (before,) for before, step in pairwise(STAGES[:-1])}
_ONWARD = {"q", "k", "v", "scores", "scaled", "weights", "heads", "concat"}  # what can be computed on from


@dataclass(frozen=True, eq=False, slots=True)
class Verdict:
    """One claimed step compared with the truth, and with what follows from the file's own earlier claims."""

    name: str
    claimed: Array
    truth: Array
    difference: float
    right: bool
    source: str | None  # the earlier claims it should follow from, where these are wrong
    follows: Array | None  # what follows from those claims
    off_source: float
    explanations: tuple[MistakeExplanation, ...]  # of a wrong one: mistakes that give the claimed numbers

    @property
    def mistake(self) -> str | None:
        """The names of the mistakes that give the claimed numbers, if any are known."""
        return " + ".join(self.explanations[0].mistakes) if self.explanations else None

    def did(self, language: Language) -> list[str]:
        """Sentences on what was done instead, where known mistakes explain the numbers and no earlier claim does."""
        return self.explanations[0].did(language) if self.explanations and self.follows is None else []


@dataclass(frozen=True, eq=False, slots=True)
class CheckedExample:
    """A file's inputs traced, a verdict on every step that it claims, and the names of its tokens, if it has any."""

    trace: Trace
    verdicts: list[Verdict]
    tokens: Names = None  # (queries,)
    sources: Names = None  # (keys,)
    inputs: Mapping[str, Any] = field(default_factory=dict)  # and rules, by name, as they were read

    @property
    def first_wrong(self) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if not verdict.right), None)

    def save(self, path: str | os.PathLike[str], language: Language = "en") -> None:
        """Write the explaining page, with a verdict on every claimed step, to an .html file."""
        page.write(path, lambda: self._page(language))

    def _page(self, language: Language) -> Document:
        said = [
            {"name": v.name, "right": v.right, "difference": listed(v.difference), "text": _said(v)}
            | {"mistake": {x: say(x, "and").join(v.did(x)) for x in LANGUAGES} if v.did("en") else None}
            for v in self.verdicts
        ]
        claimed = {v.name: np.asarray(v.claimed, dtype=np.float64) for v in self.verdicts if not v.right}
        names = self.tokens, self.sources
        scene = Scene("attention, step by step", language, self.trace.convention, *names, claims=said, claimed=claimed)
        return self.trace.document(scene)

    def to_json(self) -> dict[str, Any]:
        """Every step's numbers and every verdict, as plain lists and words; -∞ is null."""
        judged = [
            {"name": v.name, "right": v.right, "largest_difference": listed(v.difference), "mistake": v.mistake}
            | {"claimed": listed(v.claimed), "truth": listed(v.truth), "source": v.source}
            | {"from_source": None if v.follows is None else listed(v.follows)}
            | {"difference_from_source": listed(v.off_source)}
            for v in self.verdicts
        ]
        return {
            "tokens": None if self.tokens is None else {"queries": list(self.tokens), "keys": list(self.sources or ())},
            "steps": [{**step.to_json(), "values": listed(step.array)} for step in self.trace.steps],
            "claims": judged,
            "first_wrong": self.first_wrong and self.first_wrong.name,
            "check": {name: listed(x) if name != "engine" else x for name, x in self.trace.check._asdict().items()},
        }


def _said(verdict: Verdict) -> Translations:
    if verdict.right:
        return both("claim right", name=verdict.name)
    wrong = both("claim wrong", name=verdict.name, difference=verdict.difference)
    if verdict.source is None or verdict.follows is None:
        return wrong
    key = "follows" if is_consequence(verdict) else "also off"
    more = both(key, source=verdict.source, difference=verdict.off_source)
    return {language: f"{wrong[language]}{say(language, 'also')}{more[language]}" for language in LANGUAGES}


def check_file(path: str | Path) -> CheckedExample:
    """Trace a file's inputs and check what it claims.

    Raises FileError when the file is missing, malformed or of the wrong form, and what `trace`, `trace_layer`,
    `trace_weights` and `token_names` raise.
    """
    place = Path(path)
    data = case_file.read(place, _KNOWN)
    names, needed = case_file.names_of(data), case_file.inputs_of(place, data)
    claims = _claimed(place, data, needed)
    values = {name: case_file.value_of(name, value) for name, value in data.items() if name not in claims}
    rules = {name: value for name, value in values.items() if name not in needed}
    if needed == WEIGHTS_AND_V:
        case_file.check_alone(place, [name for name in rules if name != "convention"])
    call: Any = {INPUTS: trace, WEIGHTS_AND_V: trace_weights}.get(needed, trace_layer)
    traced = call(*(values[name] for name in needed), **rules)
    rows, cols = token_names(names["tokens"], names["source_tokens"], traced.problem)
    return CheckedExample(traced, list(_verdicts(place, values, traced, claims)), rows, cols, values)


def _claimed(place: Path, data: dict[str, Any], needed: tuple[str, ...]) -> dict[str, Any]:
    """The claims in a file's values, by the names of their steps, in the order of the steps."""
    if "h" in data and "concat" in data:
        raise FileError(f"{place.name} holds both H and concat, which are the same.")
    if "h" in data:
        data["concat"] = data.pop("h")
    claimed = {name: data[name] for name in CLAIMABLE if name in data and name not in needed}
    for name in ("heads", "concat") if "x" not in needed else ():
        if name in claimed:
            raise FileError(f"{place.name} claims {name}, a step of a layer.", "give the layer's x, w_q, w_k, w_v.")
    return claimed


def _verdicts(place: Path, values: dict[str, Any], traced: Trace, claims: dict[str, Any]) -> Iterator[Verdict]:
    wrong: dict[str, Array] = {}
    for name, written in claims.items():
        truth, array = np.asarray(getattr(traced, name)), case_file.numbers(name, written).astype(np.float64)
        claimed = _shaped(name, array, truth, traced.convention)
        difference = largest_difference(claimed, truth)
        slack = _tolerance(written, array) * max(1.0, largest(truth))
        right = difference <= slack
        source, follows = _following(traced, wrong, name)
        off_source = 0.0 if follows is None else largest_difference(claimed, follows)
        why = () if right else _explanations(place, values, traced, name, claimed, slack)
        yield Verdict(name, claimed, truth, difference, right, source, follows, off_source, why)
        wrong |= {} if right else {name: claimed}


def is_consequence(verdict: Verdict) -> bool:
    """Does a wrong claim follow from the earlier, wrong claim, within the precision of printed numbers?"""
    return verdict.follows is not None and verdict.off_source <= max(1e-5, 0.02 * verdict.difference)


def _shaped(name: str, claimed: Array, truth: Array, convention: Convention) -> Array:
    """The claimed numbers in the step's shape; axes of size 1 may be missing, and Q, K and V not split into heads."""
    rows, heads = turned(claimed, convention), truth.shape[-3] if truth.ndim > 2 else 1
    joined = name in INPUTS and rows.ndim > 1 and rows.shape[-1] == heads * turned(truth, convention).shape[-1]
    by_head = turned(split_heads(rows, heads), convention) if truth.ndim > 2 and joined else claimed
    for shaped in (claimed, by_head):
        if shaped.shape == truth.shape:
            return shaped
        if [size for size in shaped.shape if size != 1] == [size for size in truth.shape if size != 1]:
            return shaped.reshape(truth.shape)
    raise FileError(f"the claimed {name} has shape {claimed.shape}, but this step has shape {truth.shape}.")


def _tolerance(written: Any, array: Array) -> float:
    """Half of the last decimal, or the rounding of the dtype, relative to the largest number."""
    if isinstance(written, np.ndarray):
        return 32 * float(np.finfo(written.dtype).eps) if written.dtype.kind == "f" else 1e-6
    return case_file.half_a_decimal(written) / max(1.0, largest(array)) + 1e-5


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _following(traced: Trace, wrong: Mapping[str, Array], target: str) -> tuple[str, Array] | tuple[None, None]:
    """The nearest wrong claims before `target`, by name, and the numbers that it would have if they were right.

    `wrong` has each claimed step that is wrong, by name, in the step's shape. None where `target` depends on none of
    them, or on one from which its step cannot be computed, such as masked scores.
    """
    layer, problem, convention = hasattr(traced, "concat"), traced.problem, traced.convention
    sources = _sources(target, wrong, layer=layer)
    if not sources or not _ONWARD.issuperset(sources) or ("scaled" in sources and not problem.scale.all()):
        return None, None

    def step(name: str) -> Array:
        """A step as it follows from these claims, tokens as rows, (batch, heads, …)."""
        if name in sources or not _sources(name, wrong, layer=layer):
            rows = turned(wrong[name] if name in sources else np.asarray(getattr(traced, name)), convention)
            rows = rows.reshape(problem.batch, -1, *rows.shape[-2:])
            return np.repeat(rows, problem.group, axis=1) if name in ("k", "v") else rows
        if name == "scores":
            return step("q") @ step("k").swapaxes(-1, -2)
        if name == "heads" or (name == "output" and not layer):
            return step("weights") @ step("v")
        if name == "concat":
            return join_heads(step("heads"))[:, None]
        if name == "output":
            w_o, b_o = getattr(traced, "w_o", None), getattr(traced, "b_o", None)
            projected = step("concat") if w_o is None else step("concat") @ turned(np.asarray(w_o), convention)
            return projected if b_o is None else np.asarray(projected + b_o)
        scores = step("scaled") / problem.scale[:, None, None] if "scaled" in sources else step("scores")
        return np.asarray(getattr(definition.from_scores(problem, scores), name))

    truth = turned(np.asarray(getattr(traced, target)), convention)
    return ", ".join(sources), turned(step(target).reshape(truth.shape), convention)


def _sources(target: str, wrong: Mapping[str, Array], *, layer: bool) -> tuple[str, ...]:
    """The wrong claims from which `target` is computed, each the last one on its way."""
    before = () if target in "qkv" else _FROM.get(target, ("concat",) if layer else ("weights", "v"))
    sources = ((name,) if name in wrong else _sources(name, wrong, layer=layer) for name in before)
    return tuple(dict.fromkeys(name for names in sources for name in names))


def _explanations(
    place: Path, values: dict[str, Any], traced: Trace, name: str, claimed: Array, slack: float
) -> tuple[MistakeExplanation, ...]:
    """What gives the numbers that a file claims for the step `name`, the best first.

    values    the file's inputs and rules, of which `traced` is the trace
    claimed   in the shape of the step, in the file's convention
    slack     how far the written numbers may lie from what was computed
    """
    if name == "concat":  # the output of a layer without W^O
        values, name = {key: value for key, value in values.items() if key not in ("w_o", "b_o")}, "output"
    if name not in ("q", "k", "v", "heads"):
        return judged(file_inputs(place, values, claimed, name), slack).explanations
    inputs = file_inputs(place, values, np.asarray(traced.output), "output")
    rows = turned(claimed, values.get("convention", "rows"))
    rows = rows.reshape(inputs.problem.batch, -1, *rows.shape[-2:])
    if name == "heads":
        return judged(replace(inputs, theirs=rows, per_head=True), slack).explanations
    return _of_projection(inputs, name, rows, slack)


@np.errstate(invalid="ignore", over="ignore")
def _of_projection(inputs: Diagnosed, name: str, claimed: Array, slack: float) -> tuple[MistakeExplanation, ...]:
    """The mistakes in a projection or the split of its heads that give this Q, K or V."""
    fields, workings = {f"w_{name}", f"b_{name}", "split"}, Workings(inputs)
    tried = []
    for mistake in mistakes():
        for change in mistake.variants(inputs):
            if set(change) <= fields:
                gap = largest_difference(claimed, workings.operands(Recipe(change))["qkv".index(name)])
                tried.append(MistakeExplanation((mistake,), (change,), Recipe(change), gap, slack))
    fitting = closest(each for each in tried if each.fits)
    confidence: Confidence = "likely" if len(fitting) == 1 else "ambiguous"
    return tuple(replace(each, confidence=confidence) for each in fitting)
