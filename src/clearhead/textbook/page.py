"""Makes the document of the page that explains a trace: attention from inputs to output, in numbers and sentences.

The page computes every score and weight itself, from the q, k and rules that the document holds.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.ops.matrix import AttentionMatrix
from clearhead.textbook.shapes import Convention, Steps
from clearhead.view.container import Document
from clearhead.view.long import NARROW, OPENING, ShownLayer, ShownRun, packed
from clearhead.view.long import described as described_runs
from clearhead.words import LANGUAGES, Language, in_columns, in_formulas, read_language, say, table

_STEPS = ("x", "context", "q", "k", "v", "scores", "scaled", "capped", "biased", "masked", "weights", "heads", "concat")
_SENTENCES = (*_STEPS, "scaled by", "weights with sink", "output", "layer output", "illustration")
Translations = dict[Language, str]


@dataclass(frozen=True, eq=False, slots=True)
class PageLayer:
    """One attention of a page; in all arrays tokens are rows."""

    problem: Problem
    steps: Steps
    arrays: Mapping[str, Array]  # q, k, v (batch, heads, tokens, width), logsumexp; if known x, w_q, …, output
    number: int | None = None


def story(
    layers: Sequence[PageLayer],
    title: str,
    language: Language,
    told: Mapping[str, Any],
    *,
    kept: Collection[int] | None = None,
) -> Document:
    """Make the document of a page with steps.

    told      entries of its header: convention, tokens, sources (the keys' texts, if they differ from the queries'),
              chosen (the layer, head and query shown first), facts, claims
    kept      the numbers of the layers that keep steps and weights, in bfloat16; None: all layers, in their dtype
    Raises RuleError for another language.
    """
    entries = {"convention": "rows", "tokens": None, "sources": None, "facts": {}, "claims": [], **told}
    tokens, sources, convention = (entries[name] for name in ("tokens", "sources", "convention"))
    shown, arrays = described_runs(_runs(layers, tokens, sources), kept)
    described = [_layer(_slim(layer, kept), str(index), arrays) for index, layer in enumerate(layers)]
    header = {
        **opening(shown, title, read_language(language)),
        **entries,
        "chosen": {"layer": 0, "head": 0, "query": -1} | told.get("chosen", {}),
        "words": {each: _words(each, layers, convention) for each in LANGUAGES},
        "layers": described,
    }
    return Document(header, arrays)


def _slim(layer: PageLayer, kept: Collection[int] | None) -> PageLayer:
    """Reduce a layer to what the page has room for: nothing unless it is kept, X and U only with the projections."""
    if kept is None or layer.number not in kept:
        return layer if kept is None else replace(layer, arrays={})
    names = set(layer.arrays if "w_q" in layer.arrays else "qkv") - {"logsumexp"}
    arrays = {name: x for name, x in layer.arrays.items() if name in names}
    return replace(layer, arrays={name: x.astype(NARROW) if x.itemsize > 2 else x for name, x in arrays.items()})


def _runs(layers: Sequence[PageLayer], tokens: Sequence[str] | None, text: Sequence[str] | None) -> list[ShownRun]:
    """Make a run to show of the layers for each batch item; none if there are no weights."""
    problem = layers[0].problem
    if any(0 in (*layer.problem.shape, layer.problem.d_k) for layer in layers):
        return []
    start = int(problem.query_offset[0])
    one_text = text is not None and tokens == text[start : start + problem.queries]
    rows, sources = (text, None) if one_text else (tokens, text)
    shown = ([_shown(layer, b, cross=sources is not None) for layer in layers] for b in range(problem.batch))
    return [ShownRun("", each, rows, sources, batch=b) for b, each in enumerate(shown)]


def _shown(layer: PageLayer, batch: int, *, cross: bool) -> ShownLayer:
    part = layer.problem.take(batches=np.array([batch]))
    q, k, v = (layer.arrays[name][batch : batch + 1] for name in "qkv")
    rules: Any = part.keywords()
    name = "" if layer.number is None else str(layer.number)
    return ShownLayer(name, range(part.heads), AttentionMatrix(q, k, **rules), cross=cross, v=v)


def both(key: str, **values: object) -> Translations:
    """Say one sentence in both languages."""
    return {language: say(language, key, **values) for language in LANGUAGES}


def capitalised(text: str, stop: Language | None = None) -> str:
    """A phrase of the reports as a page's sentence; with the full stop of a language, if any."""
    return text[:1].upper() + text[1:] + ("" if stop is None else "." if stop == "en" else "。")


def opening(runs: list[Any], title: str, language: Language) -> dict[str, Any]:
    """The entries that every page's header has."""
    return {**OPENING, "served": False, "runs": runs, "title": title, "language": language}


def _words(language: Language, layers: Sequence[PageLayer], convention: Convention) -> dict[str, Any]:
    """The sentences that the page shares with the reports, and translations of the words in formulas."""
    columns = convention == "columns"
    sentences = {name: say(language, in_columns(name) if columns else name) for name in _SENTENCES}
    for step in (step for layer in layers for step in layer.steps):
        if step.name in ("x", "biased", "output"):  # the page's controls change the rules: it chooses the others itself
            name = "layer output" if step.words.startswith("layer output") else step.name
            sentences[name] = say(language, step.words)
    page = {key: said[language] for key, said in table("page_steps").items()}
    return {**sentences, "page": page, "formulas": in_formulas(language)}


def _layer(layer: PageLayer, place: str, arrays: dict[str, Array]) -> dict[str, Any]:
    """Make a layer's entry in the header; adds its arrays to `arrays`, without duplicates."""
    problem = layer.problem
    rules, rule_arrays = packed(problem)
    rule_arrays = rule_arrays if layer.arrays else {}
    named = {name: f"{place}.{name}" for name in (*layer.arrays, *rule_arrays)}
    known = {id(array): name for name, array in arrays.items()}
    for name, array in {**layer.arrays, **rule_arrays}.items():
        named[name] = known.get(id(array), named[name])
        arrays[named[name]] = array
    sizes = {name: getattr(problem, name) for name in ("batch", "heads", "kv_heads", "queries", "keys")}
    return {
        "number": layer.number,
        **sizes,
        "rules": rules,
        "steps": [step.to_json() for step in layer.steps],
        "arrays": named,
    }
