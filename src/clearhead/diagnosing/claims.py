"""Checks a worked example: finds the first wrong step that it claims, by how much, and what was done instead.

A file (.json, .npz or .safetensors) holds q, k, v, or a layer's x, w_q, w_k, w_v, w_o, num_heads, context and biases;
any score rules; the names of its tokens; and, if wanted, the values that it claims for steps: scores, scaled, capped,
biased, masked, weights, output, and of a layer also q, k, v, heads and concat, the heads joined, which may be called H.

A wrong claim replaces its step, and everything after it is computed from there, which tells a mistake from its
consequences.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core.axes import Array, split_heads
from clearhead.core.definition import STEPS
from clearhead.core.rules import Rules
from clearhead.diagnosing.changes import Workings
from clearhead.diagnosing.diagnose import judged
from clearhead.diagnosing.recipe import RIGHT, STAGES, Diagnosed, file_inputs, read_written
from clearhead.diagnosing.verdict import MistakeExplanation
from clearhead.diagnosing.workings import answer
from clearhead.errors import FileError
from clearhead.textbook import case_file
from clearhead.textbook.case_file import INPUTS, LAYER, NAMES
from clearhead.textbook.computed import largest_difference, listed
from clearhead.textbook.page import Translations, both
from clearhead.textbook.shapes import Convention, turned
from clearhead.textbook.trace import Trace, trace, trace_layer
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.view.names import Names, token_names
from clearhead.words import LANGUAGES, Language, say

_KNOWN = (*LAYER, "num_heads", "convention", *NAMES, *Rules.__annotations__, *STAGES, "h")
_NEEDS = {  # the steps that each is computed from
    "scores": ("q", "k"),
    **{name: (before,) for before, name in pairwise(("scores", *STEPS, "weights"))},
    "heads": ("weights", "v"),
    "concat": ("heads",),
    "output": ("concat",),
}


@dataclass(frozen=True, eq=False, slots=True)
class Verdict:
    """One claimed step, compared with the truth and with what follows from the file's earlier claims."""

    name: str
    claimed: Array
    truth: Array
    difference: float
    right: bool
    source: str | None = None  # the earlier claims it should follow from, if these are wrong
    follows: Array | None = None  # what follows from those claims
    off_source: float = 0.0
    explanations: tuple[MistakeExplanation, ...] = ()  # of a wrong one: mistakes that give the claimed numbers

    @property
    def mistake(self) -> str | None:
        """The names of the mistakes that give the claimed numbers, if any are known."""
        return " + ".join(self.explanations[0].mistakes) if self.explanations else None

    def did(self, language: Language) -> list[str]:
        """Say what was done instead, if known mistakes explain the numbers and no earlier claim does."""
        return self.explanations[0].did(language) if self.explanations and self.follows is None else []


@dataclass(frozen=True, eq=False, slots=True)
class CheckedExample:
    """A file's inputs traced, a verdict on every step that it claims, and the names of its tokens, if it has any."""

    trace: Trace
    verdicts: list[Verdict]
    tokens: Names = None  # (queries,)
    sources: Names = None  # (keys,)

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
        return self.trace.document(language, self.tokens, self.sources, said)

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
            "check": {"engine": self.trace.engine, "largest_difference": listed(self.trace.difference)},
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
    """Trace a file's inputs and check its claims.

    Raises FileError if the file is missing, malformed or of the wrong form, and as `trace`, `trace_layer` and
    `token_names`.
    """
    place = Path(path)
    data = case_file.read(place, _KNOWN)
    names, needed = case_file.names_of(data), case_file.inputs_of(place, data)
    claims = _claimed(place, data, needed)
    values = {name: case_file.value_of(name, value) for name, value in data.items() if name not in claims}
    rules = {name: value for name, value in values.items() if name not in needed}
    call: Any = trace if needed == INPUTS else trace_layer
    traced = call(*(values[name] for name in needed), **rules)
    rows, cols = token_names(names["tokens"], names["source_tokens"], traced.problem)
    return CheckedExample(traced, list(_verdicts(place, values, traced, claims)), rows, cols)


def _claimed(place: Path, data: dict[str, Any], needed: tuple[str, ...]) -> dict[str, Any]:
    """The claims in a file's values, by the names of their steps."""
    if "h" in data:
        data["concat"] = data.pop("h")
    claimed: dict[str, Any] = {name: data[name] for name in STAGES if name in data and name not in needed}
    if "x" not in needed and (steps := {"heads", "concat"} & claimed.keys()):
        raise FileError(f"{place.name} claims {min(steps)}, a step of a layer.", "give the layer's x, w_q, w_k, w_v.")
    return claimed


def _verdicts(place: Path, values: dict[str, Any], traced: Trace, claims: dict[str, Any]) -> Iterator[Verdict]:
    wrong: dict[str, Array] = {}  # the wrong claims by step, (batch, heads, …)
    for name, written in claims.items():
        truth, (array, slack) = np.asarray(getattr(traced, name)), read_written(name, written)
        claimed = _shaped(name, array, truth, traced.convention)
        inputs = file_inputs(place, values, claimed, name)
        found, behind = judged(inputs, slack), _behind(name, wrong)
        follows = _following(inputs, wrong, truth, traced.convention) if behind else None
        off_source = 0.0 if follows is None else largest_difference(claimed, follows)
        compared = name, claimed, truth, found.difference, found.verdict == "right"
        yield Verdict(*compared, ", ".join(behind) or None, follows, off_source, found.explanations)
        wrong |= {} if found.verdict == "right" else {name: inputs.theirs.astype(np.float64)}


def _behind(step: str, wrong: Mapping[str, Array]) -> list[str]:
    """The nearest wrong claims that a step depends on."""
    nearest = ([one] if one in wrong else _behind(one, wrong) for one in _NEEDS.get(step, ()))
    return list(dict.fromkeys(name for names in nearest for name in names))


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _following(inputs: Diagnosed, wrong: Mapping[str, Array], truth: Array, convention: Convention) -> Array:
    """Compute a step from the wrong claims before it, in the shape of the right numbers."""
    made = answer(Workings(inputs, given=wrong), RIGHT, tuple(range(inputs.theirs.shape[2])))
    return turned(made.reshape(turned(truth, convention).shape), convention)


def is_consequence(verdict: Verdict) -> bool:
    """Does a wrong claim follow from the earlier, wrong claim, within the precision of printed numbers?"""
    return verdict.follows is not None and verdict.off_source <= max(1e-5, 0.02 * verdict.difference)


def _shaped(name: str, claimed: Array, truth: Array, convention: Convention) -> Array:
    """Reshape claimed numbers to the step's shape; axes of size 1 may be missing, and Q, K and V may be unsplit."""
    rows, heads = turned(claimed, convention), truth.shape[-3] if truth.ndim > 2 else 1
    joined = name in INPUTS and rows.ndim > 1 and rows.shape[-1] == heads * turned(truth, convention).shape[-1]
    by_head = turned(split_heads(rows, heads), convention) if truth.ndim > 2 and joined else claimed
    for shaped in (claimed, by_head):
        if [size for size in shaped.shape if size != 1] == [size for size in truth.shape if size != 1]:
            return shaped.reshape(truth.shape)
    raise FileError(f"the claimed {name} has shape {claimed.shape}, but this step has shape {truth.shape}.")
