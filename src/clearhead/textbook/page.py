"""The document of the page that explains a trace: attention from its inputs to its output, in numbers and sentences.

The page computes every score and weight itself, from the q, k and rules that the document holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead import __version__
from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.rule_values import read_language
from clearhead.textbook.shapes import Convention, Steps
from clearhead.view.container import Document
from clearhead.view.packing import packed
from clearhead.words import IN_FORMULAS, Language, say

_STEPS = ("x", "context", "q", "k", "v", "scores", "scaled", "capped", "biased", "masked", "weights", "heads", "concat")
_SENTENCES = (*_STEPS, "scaled by", "weights with sink", "output", "layer output", "illustration")
Translations = dict[Language, str]


@dataclass(frozen=True, eq=False, slots=True)
class PageLayer:
    """One attention of a page; in all arrays tokens are rows."""

    problem: Problem
    steps: Steps
    arrays: Mapping[str, Array]  # q, k, v (batch, heads, tokens, width), logsumexp; where known x, w_q, …, output
    number: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Scene:
    """A page's title, language, tokens, claims and facts, and which layer, head and query it shows first."""

    title: str
    language: Language = "en"
    convention: Convention = "rows"
    tokens: Sequence[str] | None = None
    sources: Sequence[str] | None = None  # the keys' texts, where they are not the queries'
    chosen: Mapping[str, int] = field(default_factory=dict)  # layer, head, query
    facts: Mapping[str, Any] = field(default_factory=dict)
    claims: Sequence[Mapping[str, Any]] = ()
    claimed: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        read_language(self.language)


def story(layers: Sequence[PageLayer], scene: Scene) -> Document:
    """The document of kind "trace"; docs/page-format.md says what is in it."""
    arrays: dict[str, Array] = {}
    described = [_layer(layer, index, arrays) for index, layer in enumerate(layers)]
    arrays |= {f"claimed.{name}": array for name, array in scene.claimed.items()}
    header = {
        "kind": "trace",
        "maker": f"clearhead {__version__}",
        "title": scene.title,
        "language": scene.language,
        "convention": scene.convention,
        "tokens": None if scene.tokens is None else list(scene.tokens),
        "sources": None if scene.sources is None else list(scene.sources),
        "words": {language: _words(language, layers) for language in ("en", "zh")},
        "layers": described,
        "chosen": {"layer": 0, "head": 0, "query": -1} | dict(scene.chosen),
        "facts": dict(scene.facts),
        "claims": list(scene.claims),
    }
    return Document(header, arrays)


def both(key: str, **values: object) -> Translations:
    """One sentence in both languages."""
    return {"en": say("en", key, **values), "zh": say("zh", key, **values)}


def _words(language: Language, layers: Sequence[PageLayer]) -> dict[str, Any]:
    """The sentences that the reports use too, and the translations of the few words in formulas."""
    sentences = {name: say(language, name) for name in _SENTENCES}
    for step in layers[0].steps if layers else ():
        if step.name in (
            "x",
            "biased",
            "output",
        ):  # the page chooses the other sentences, since its controls change the rules
            name = "layer output" if step.words.startswith("layer output") else step.name
            sentences[name] = say(language, step.words)
    return {**sentences, "formulas": IN_FORMULAS if language == "zh" else {}}


def _layer(layer: PageLayer, place: int, arrays: dict[str, Array]) -> dict[str, Any]:
    problem = layer.problem
    rules, rule_arrays = packed(problem)
    named = {**layer.arrays, **rule_arrays}
    arrays |= {f"{place}.{name}": array for name, array in named.items()}
    return {
        "number": layer.number,
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "queries": problem.queries,
        "keys": problem.keys,
        "rules": rules,
        "steps": [
            {"name": s.name, "symbol": s.symbol, "formula": s.formula, "axes": s.axes, "shape": s.shape}
            | {"multiply_adds": s.multiply_adds, "bytes": s.bytes}
            for s in layer.steps
        ],
        "arrays": {name: f"{place}.{name}" for name in named},
    }
