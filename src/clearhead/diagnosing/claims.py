"""The check of a worked example: which claimed step is the first wrong one, by how much, and what was done instead.

A file (.json, .npz or .safetensors) holds q, k, v, or a layer's x, w_q, w_k, w_v, w_o, num_heads, context and biases;
any score rules; the names of its tokens; and, if wanted, the values that it claims for steps: scores, scaled, capped,
biased, masked, weights, output, and of a layer also q, k, v, heads and concat, the heads joined, which may be called H.

A claim that is wrong takes the place of its step, and everything after it is computed from there: so a mistake is told
from what follows.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core.axes import Array, join_heads, split_heads
from clearhead.core.block import block_of, everything
from clearhead.core.definition import STEPS, product, softmax
from clearhead.core.rules import Rules
from clearhead.diagnosing.diagnose import judged
from clearhead.diagnosing.recipe import STAGES, file_inputs
from clearhead.diagnosing.search import largest
from clearhead.diagnosing.verdict import MistakeExplanation
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
        return self.trace.document(language, self.tokens, self.sources, said, claimed)

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
    """Trace a file's inputs and check what it claims.

    Raises FileError when the file is missing, malformed or of the wrong form, and what `trace`, `trace_layer` and
    `token_names` raise.
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
    return CheckedExample(traced, list(_verdicts(place, values, traced, claims)), rows, cols, values)


def _claimed(place: Path, data: dict[str, Any], needed: tuple[str, ...]) -> dict[str, Any]:
    """The claims in a file's values, by the names of their steps, in the order of the steps."""
    if "h" in data and "concat" in data:
        raise FileError(f"{place.name} holds both H and concat, which are the same.")
    if "h" in data:
        data["concat"] = data.pop("h")
    claimed: dict[str, Any] = {name: data[name] for name in STAGES if name in data and name not in needed}
    for name in ("heads", "concat") if "x" not in needed else ():
        if name in claimed:
            raise FileError(f"{place.name} claims {name}, a step of a layer.", "give the layer's x, w_q, w_k, w_v.")
    return claimed


def _verdicts(place: Path, values: dict[str, Any], traced: Trace, claims: dict[str, Any]) -> Iterator[Verdict]:
    wrong: dict[str, Array] = {}
    for name, written in claims.items():
        truth, array = np.asarray(getattr(traced, name)), case_file.numbers(name, written).astype(np.float64)
        claimed = _shaped(name, array, truth, traced.convention)
        slack = _tolerance(written, array) * max(1.0, largest(truth))
        found = judged(file_inputs(place, values, claimed, name), slack)
        right, (source, follows) = found.verdict == "right", _following(traced, wrong, name)
        off_source = 0.0 if follows is None else largest_difference(claimed, follows)
        yield Verdict(name, claimed, truth, found.difference, right, source, follows, off_source, found.explanations)
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

    `wrong` has each claimed step that is wrong, by name, in the step's shape. None where `target` depends on none.
    """
    problem, convention = traced.problem, traced.convention
    w_o, b_o = (getattr(traced, name, None) for name in ("w_o", "b_o"))

    def rows(x: Any) -> Array:
        """Tokens as rows, (batch, heads, …)."""
        array = turned(np.asarray(x), convention)
        return array.reshape(problem.batch, -1, *array.shape[-2:])

    def projected(joined: Array) -> Array:
        result = joined if w_o is None else joined @ turned(np.asarray(w_o), convention)
        return result if b_o is None else np.asarray(result + b_o)

    block = block_of(problem, everything(problem))
    way: list[tuple[str, tuple[str, ...], Callable[..., Array]]] = [
        ("scores", ("q", "k"), lambda q, k: product(q, k.swapaxes(-1, -2))),
        *((name, (before,), partial(STEPS[name], block)) for before, name in pairwise(("scores", *STEPS))),
        ("weights", ("masked",), lambda x: softmax(x, block.sinks)[1]),
        ("heads" if hasattr(traced, "concat") else "output", ("weights", "v"), product),
        ("concat", ("heads",), lambda heads: join_heads(heads)[:, None]),
        ("output", ("concat",), projected),
    ]
    made: dict[str, tuple[Array, tuple[str, ...]]] = {}  # what follows from wrong claims, and their names
    for name, before, compute in way:
        names = dict.fromkeys(one for b in before for one in ((b,) if b in wrong else made[b][1] if b in made else ()))
        if names:
            arrays = (
                rows(wrong[b]) if b in wrong else made[b][0] if b in made else rows(getattr(traced, b)) for b in before
            )
            made[name] = compute(*arrays), tuple(names)
    if target not in made:
        return None, None
    array, sources = made[target]
    shape = turned(np.asarray(getattr(traced, target)), convention).shape
    return ", ".join(sources), turned(array.reshape(shape), convention)
