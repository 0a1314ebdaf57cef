"""The check of a worked example: which claimed step is the first wrong one, by how much, and what was done instead.

A file (.json, .npz or .safetensors) holds q, k, v, or a layer's x, w_q, w_k, w_v, w_o, num_heads, context and biases;
any score rules; and, if wanted, the values that it claims for steps: scores, scaled, capped, biased, masked, weights,
output.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import reference
from clearhead.core.axes import Array
from clearhead.core.rules import Rules
from clearhead.diagnosing.diagnose import examined
from clearhead.diagnosing.verdict import Diagnosis
from clearhead.errors import FileError, unknown
from clearhead.textbook.case_file import INPUTS, LAYER, half_a_decimal, inputs_of, numbers, read, value_of
from clearhead.textbook.page import Scene, Translations, both
from clearhead.textbook.shapes import turned
from clearhead.textbook.trace import Trace, listed, trace, values_of
from clearhead.textbook.trace_layer import trace_layer
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.words import LANGUAGES, Language, say

CLAIMABLE = ("scores", "scaled", "capped", "biased", "masked", "weights", "output")
_KNOWN = (*INPUTS, *LAYER, "num_heads", "convention", *Rules.__annotations__, *CLAIMABLE)


class Claim(NamedTuple):
    """A claimed array and its tolerance, relative to the largest number: half its last decimal, or dtype rounding."""

    array: Array
    tolerance: float


@dataclass(frozen=True, eq=False, slots=True)
class Verdict:
    """One claimed step compared with the truth, and with what follows from the file's own earlier claims."""

    name: str
    claimed: Array
    truth: Array
    difference: float
    right: bool
    source: str | None  # the earlier claim it should follow from, where that one is wrong
    follows: Array | None  # what follows from that claim
    off_source: float
    diagnosis: Diagnosis | None  # of a wrong one: which mistake gives the claimed numbers

    @property
    def mistake(self) -> str | None:
        """The names of the mistakes that give the claimed numbers, if any are known."""
        known = self.diagnosis.explanations if self.diagnosis else ()
        return " + ".join(known[0].mistakes) if known else None

    def did(self, language: Language) -> list[str]:
        """Sentences on what was done instead, where known mistakes explain the numbers and no earlier claim does."""
        if self.diagnosis is None or not self.diagnosis.explanations or self.follows is not None:
            return []
        return self.diagnosis.explanations[0].did(language)


@dataclass(frozen=True, eq=False, slots=True)
class CheckedExample:
    """A file's inputs traced, and a verdict on every step that it claims."""

    trace: Trace
    verdicts: list[Verdict]

    @property
    def first_wrong(self) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if not verdict.right), None)

    def save(self, path: str | os.PathLike[str], language: Language = "en") -> None:
        """Write the explaining page, with a verdict on every claimed step, to an .html file."""
        page.write(path, lambda: self._page(language))

    def _page(self, language: Language) -> Document:
        said = [
            {"name": v.name, "right": v.right, "difference": v.difference, "text": _said(v), "mistake": _sentences(v)}
            for v in self.verdicts
        ]
        claimed = {v.name: np.asarray(v.claimed, dtype=np.float64) for v in self.verdicts if not v.right}
        scene = Scene("attention, step by step", language, claims=said, claimed=claimed)
        return self.trace.document(scene)

    def to_json(self) -> dict[str, Any]:
        """Every step's numbers and every verdict, as plain lists and words; -∞ is null."""
        described = [
            {"name": s.name, "symbol": s.symbol, "formula": s.formula, "axes": s.axes, "shape": s.shape}
            | {"multiply_adds": s.multiply_adds, "bytes": s.bytes, "values": listed(s.array)}
            for s in self.trace.steps
        ]
        judged = [
            {"name": v.name, "right": v.right, "largest_difference": listed(v.difference), "mistake": v.mistake}
            | {"claimed": listed(v.claimed), "truth": listed(v.truth), "source": v.source}
            | {
                "from_source": None if v.follows is None else listed(v.follows),
                "difference_from_source": listed(v.off_source),
            }
            for v in self.verdicts
        ]
        first = None if self.first_wrong is None else self.first_wrong.name
        return {
            "steps": described,
            "claims": judged,
            "first_wrong": first,
            "check": {name: listed(x) if name != "engine" else x for name, x in self.trace.check._asdict().items()},
        }


def _said(verdict: Verdict) -> Translations:
    if verdict.right:
        return both("claim right", name=verdict.name)
    wrong = both("claim wrong", name=verdict.name, difference=verdict.difference)
    if verdict.source is None or verdict.follows is None:
        return wrong
    more = both(
        "follows" if is_consequence(verdict) else "also off", source=verdict.source, difference=verdict.off_source
    )
    return {language: f"{wrong[language]}{say(language, 'also')}{more[language]}" for language in LANGUAGES}


def _sentences(verdict: Verdict) -> Translations | None:
    sentences = {language: say(language, "and").join(verdict.did(language)) for language in LANGUAGES}
    return sentences if verdict.did("en") else None


def check_file(path: str | Path) -> CheckedExample:
    """Trace a file's inputs and check what it claims.

    Raises FileError when the file is missing, malformed or of the wrong form, and what `trace` raises.
    """
    place = Path(path)
    data = read(place)
    for name in data:
        if name not in _KNOWN:
            raise unknown(f"key in {place.name}:", name, _KNOWN)
    claims = {name: _claim(name, data.pop(name)) for name in CLAIMABLE if name in data}
    values = {name: value_of(name, value) for name, value in data.items()}
    traced = _trace(place, dict(values))

    def diagnosed(name: str, claimed: Array, slack: float) -> Diagnosis:
        return examined(place, values, claimed, name, slack)

    return CheckedExample(traced, list(_verdicts(traced, claims, diagnosed)))


def _trace(place: Path, values: dict[str, Any]) -> Trace:
    needed = inputs_of(place, values)
    call: Callable[..., Trace] = trace_layer if needed != INPUTS else trace
    inputs = [values.pop(name) for name in needed]
    return call(*inputs, **values)


def _verdicts(
    traced: Trace, claims: dict[str, Claim], diagnosed: Callable[[str, Array, float], Diagnosis]
) -> Iterator[Verdict]:
    wrong: dict[str, Array] = {}
    for name, claim in claims.items():
        truth = np.asarray(getattr(traced, name))
        claimed = _shaped(name, claim.array, truth)
        difference = _largest(claimed, truth)
        slack = claim.tolerance * max(1.0, float(np.abs(truth[np.isfinite(truth)]).max(initial=0.0)))
        right = difference <= slack
        source = next((earlier for earlier in reversed(wrong)), None)
        follows = None if source is None else _onward(traced, source, wrong[source], name)
        verdict = Verdict(
            name=name,
            claimed=claimed,
            truth=truth,
            difference=difference,
            right=right,
            source=None if follows is None else source,
            follows=follows,
            off_source=0.0 if follows is None else _largest(claimed, follows),
            diagnosis=None if right else diagnosed(name, claimed, slack),
        )
        if not right:
            wrong[name] = claimed
        yield verdict


def is_consequence(verdict: Verdict) -> bool:
    """Does a wrong claim follow from the earlier, wrong claim, within the precision of printed numbers?"""
    return verdict.follows is not None and verdict.off_source <= max(1e-5, 0.02 * verdict.difference)


def _onward(traced: Trace, source: str, claimed: Array, target: str) -> Array | None:
    """What `target` would be if the claim for `source` were right; None where it does not depend on that alone."""
    problem = traced.problem
    array = turned(claimed, traced.convention).reshape(problem.batch, problem.heads, problem.queries, problem.keys)
    if source == "weights":
        if target != "output" or hasattr(traced, "concat"):
            return None
        return turned(problem.restore(array @ values_of(traced)), traced.convention)
    if source == "scores":
        then = reference.from_scores(problem, array)
    elif source == "scaled" and problem.scale.all():
        then = reference.from_scores(problem, array / problem.scale[:, None, None])
    else:
        return None
    if target == "output":
        return _onward(traced, "weights", turned(problem.restore(then.weights), traced.convention), target)
    return turned(problem.restore(getattr(then, target)), traced.convention)


def _shaped(name: str, claimed: Array, truth: Array) -> Array:
    if claimed.shape == truth.shape:
        return claimed
    if claimed.size == truth.size and tuple(s for s in claimed.shape if s != 1) == tuple(
        s for s in truth.shape if s != 1
    ):
        return claimed.reshape(truth.shape)
    raise FileError(f"the claimed {name} has shape {claimed.shape}, but this step has shape {truth.shape}.")


def gaps(a: Array, b: Array) -> Array:
    """|a - b| element by element: 0 where both are NaN, ∞ where only one is."""
    with np.errstate(invalid="ignore"):
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(gap), np.inf, gap)


def _largest(a: Array, b: Array) -> float:
    return float(gaps(a, b).max(initial=0.0))


def _claim(name: str, value: Any) -> Claim:
    array = numbers(name, value).astype(np.float64)
    if isinstance(value, np.ndarray):
        return Claim(array, 32 * float(np.finfo(value.dtype).eps) if value.dtype.kind == "f" else 1e-6)
    largest = max(1.0, float(np.abs(array[np.isfinite(array)]).max(initial=0.0)))
    return Claim(array, half_a_decimal(value) / largest + 1e-5)
