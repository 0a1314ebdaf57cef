"""What the explaining page tells: attention from its inputs to its output, as a document of numbers and words.

The page computes every score and weight itself, from q, k and the rules; this file hands them over as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead import __version__
from clearhead.axes import Array
from clearhead.problem import Problem
from clearhead.steps import Convention, Steps
from clearhead.values import read_language
from clearhead.view.container import Document
from clearhead.view.packing import packed
from clearhead.words import IN_FORMULAS, Language, say

_STEPS = ("x", "context", "q", "k", "v", "scores", "scaled", "capped", "biased", "masked", "weights", "heads", "concat")
Words = dict[Language, str]


@dataclass(frozen=True, eq=False, slots=True)
class Layer:
    """One attention of a story; all arrays with tokens as rows."""

    problem: Problem
    steps: Steps
    arrays: Mapping[str, Array]  # q, k, v (batch, heads, tokens, width), logsumexp; where known x, w_q, …, output
    number: int | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Scene:
    """What the page says around the numbers, and where it begins."""

    title: str
    language: Language = "en"
    convention: Convention = "rows"
    tokens: Sequence[str] | None = None
    chosen: Mapping[str, int] = field(default_factory=dict)  # layer, head, query
    facts: Mapping[str, Any] = field(default_factory=dict)
    claims: Sequence[Mapping[str, Any]] = ()
    claimed: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        read_language(self.language)


def story(layers: Sequence[Layer], scene: Scene) -> Document:
    """The document of kind "trace"; docs/page-format.md says what is in it."""
    arrays: dict[str, Array] = {}
    told = [_layer(layer, place, arrays) for place, layer in enumerate(layers)]
    arrays |= {f"claimed.{name}": array for name, array in scene.claimed.items()}
    header = {
        "kind": "trace",
        "maker": f"clearhead {__version__}",
        "title": scene.title,
        "language": scene.language,
        "convention": scene.convention,
        "tokens": None if scene.tokens is None else list(scene.tokens),
        "words": {language: _words(language, layers) for language in ("en", "zh")},
        "layers": told,
        "chosen": {"layer": 0, "head": 0, "query": -1} | dict(scene.chosen),
        "facts": dict(scene.facts),
        "claims": list(scene.claims),
    }
    return Document(header, arrays)


def both(key: str, **values: object) -> Words:
    """One sentence in both languages."""
    return {"en": say("en", key, **values), "zh": say("zh", key, **values)}


def _words(language: Language, layers: Sequence[Layer]) -> dict[str, Any]:
    """The reports' own sentences, and what replaces the few words in a formula."""
    said = {name: say(language, name) for name in (*_STEPS, "output", "layer output", "illustration")}
    for step in layers[0].steps if layers else ():
        said["layer output" if step.words.startswith("layer output") else step.name] = say(language, step.words)
    return {**said, "formulas": IN_FORMULAS if language == "zh" else {}}


def _layer(layer: Layer, place: int, arrays: dict[str, Array]) -> dict[str, Any]:
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
