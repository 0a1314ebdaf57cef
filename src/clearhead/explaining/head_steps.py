"""`HeadSteps` is one head of a run step by step, with the text and what the model says next; its page and its JSON.

It is data from the run; `report` prints it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead.core.axes import Array, brief
from clearhead.core.call import describe
from clearhead.core.rules import Rules
from clearhead.digits import fixed, percent, rounded
from clearhead.explaining.attribution import Way, for_page
from clearhead.explaining.rerun import forward_pass
from clearhead.explaining.texts import parts_of, token_name
from clearhead.models.model import SHIPPED, Model, load
from clearhead.models.protocol import Choice, Each, LanguageModel, LayerRun, Token, layer_numbers, next_tokens
from clearhead.ops.matrix import AttentionMatrix
from clearhead.spelling import cut, spelled, visible
from clearhead.tables import Table, Tabular
from clearhead.textbook.computed import listed
from clearhead.textbook.page import PageLayer, Translations, both, capitalised, story
from clearhead.textbook.shapes import Sizes, Steps, layer_steps
from clearhead.textbook.trace import TokenTrace, Trace
from clearhead.view.captions import KINDS, Caption, captions
from clearhead.view.container import Document, narrowed
from clearhead.view.head_summary import even_heads, summarise_heads
from clearhead.view.long import ROOM, ShownLayer, ShownRun, characters, fitting, pixels_of
from clearhead.view.page import Framing
from clearhead.words import LANGUAGES, Language, say

_KEYS, _TEXT = 8, 100  # shown: keys, and columns of the text
_WEIGHTS = 10**5  # characters: of larger ones a page has no projection matrices, so that a short text's stays small
_LOOKS, _LOOK = 4, 0.005  # shown for each head: keys of the row that answers, and the least weight


class CaptionedHead(NamedTuple):
    """A head's five statistics over the whole text, those of `HeadSummary`, and its caption."""

    layer: int
    head: int
    statistics: dict[str, float]
    caption: Caption | None

    @property
    def clearness(self) -> float:
        """How clear the caption's pattern is; 0 without a caption."""
        return 0.0 if self.caption is None else self.caption.clearness

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain numbers and strings; an unknown statistic is None."""
        known = {name: x if np.isfinite(x) else None for name, x in self.statistics.items()}
        caption = None if self.caption is None else self.caption._asdict()
        return {"layer": self.layer, "head": self.head, "statistics": known, "caption": caption}


def captioned_heads(runs: Sequence[LayerRun], numbers: Sequence[int]) -> list[CaptionedHead]:
    """Caption every head of every layer. O(tokens²·d_k) time for each, O(tokens) memory."""
    made = []
    for number, run in zip(numbers, runs, strict=True):
        matrix = AttentionMatrix(run.q, run.k, **run.rules).part(0)
        heads = summarise_heads(matrix, matrix.observe(logsumexp=True))
        for head, (caption, *means) in enumerate(
            zip(captions(heads, even_heads(matrix)), *heads.values(), strict=True)
        ):
            made.append(CaptionedHead(number, head, dict(zip(heads, means, strict=True)), caption))
    return made


def clearest(heads: Sequence[CaptionedHead]) -> list[tuple[CaptionedHead, int]]:
    """For each kind of pattern, return the clearest head and how many more there are, in the order of `KINDS`."""
    kinds: dict[str, list[CaptionedHead]] = {kind: [] for kind in KINDS}
    for head in heads:
        if head.caption is not None and head.clearness > 0:
            kinds[head.caption.kind].append(head)
    return [(max(same, key=lambda head: head.clearness), len(same) - 1) for same in kinds.values() if same]


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class HeadSteps(Tabular, Framing):
    """A text, the model's next tokens, and one head of one layer, step by step; made by `explain`."""

    model: LanguageModel
    text: str
    tokens: list[Token]
    next: list[Choice]  # after the whole text
    after: list[Choice]  # after the chosen token
    layer: int  # its number among all layers of the model
    head: int
    chosen: tuple[bool, bool]  # were layer and head chosen automatically?
    token: int
    run: LayerRun
    runs: Sequence[LayerRun]  # every layer
    steps: Steps  # the steps of the whole layer, all heads: shapes without numbers
    trace: Trace  # the chosen head, with its numbers
    row: TokenTrace  # the chosen token, computed alone
    entropy: Array  # (layers, heads): of the chosen token's row, in nats
    sinks: int = 0  # heads with over half of that row's weight on the first token
    change: float | None = None  # change of the next token's log-odds in a run without the head
    generated: int = 0  # how many of the last tokens the model generated
    logits: Array | None = None  # (vocabulary,): of the token after the whole text
    ways: Sequence[Way] = ()  # for each token of `after`, what each part of the model adds to its logit
    following: Sequence[list[Choice]] = ()  # for each token the likeliest next ones; empty if the model predicts none

    def __repr__(self) -> str:
        return brief(
            "HeadSteps", {"text": repr(self.text), "layer": self.layer, "head": self.head, "token": self.token}
        )

    def _tables(self, language: Language) -> list[Table]:
        return [*tables(self, language), Table("", notes=[say(language, "whole page")])]

    def _document(self, language: Language) -> Document:
        return document(self, language)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain numbers, lists and strings; -∞ becomes None."""
        arithmetic = ("scores", "masked", "weights", "contributions", "output")
        data: dict[str, Any] = {
            "model": {"name": self.model.name, **self.model.config.facts()},
            "text": self.text,
            "tokens": [token._asdict() for token in self.tokens],
            "generated": self.generated,
            "next": [choice._asdict() for choice in self.next],
            "answer": {
                "next": [choice._asdict() for choice in self.after],
                "heads": [head.to_json() for head in self.heads()],
            },
            "layer": self.layer,
            "head": self.head,
            "token": self.token,
            "entropy": listed(self.entropy),
            "layer_steps": [step.to_json() for step in self.steps],
            "head_steps": {"x": listed(self.run.x), **{s.name: listed(s.array) for s in self.trace.steps}},
            "logsumexp": listed(self.trace.logsumexp),
            "layer_output": listed(self.run.output),
            "token_arithmetic": {name: listed(getattr(self.row, name)) for name in arithmetic}
            | {"difference_from_the_matrix": self.row.difference},
            "check": {"engine": self.trace.engine, "largest_difference": self.trace.difference},
            "way": None if self.way is None else self.way.to_json(),
            "ways": [each.to_json() for each in self.ways],
        }
        return data

    @property
    def way(self) -> Way | None:
        """The way to the likeliest token after the chosen one; None if the model's parts do not add up."""
        return next(iter(self.ways), None)

    def heads(self) -> list[CaptionedHead]:
        """Describe every head by its statistics over the whole text and a caption. O(tokens²·d_k) for each."""
        return captioned_heads(self.runs, layer_numbers(self.model))


def attending(seen: Any, language: Language) -> str:
    """Say what the chosen token attends to most."""
    weights, masked = seen.row.weights, np.isneginf(seen.row.masked)
    place = {"layer": seen.layer, "head": seen.head, "token": token_name(seen, seen.token)}
    if masked.all():
        return say(language, "attends to nothing", **place)
    key = int(np.where(masked, -1.0, weights).argmax())
    facts = {"most": token_name(seen, key), "share": percent(float(weights[key]))}
    return say(language, "attends most to itself" if key == seen.token else "attends most", **place, **facts)


def following(seen: Any, language: Language) -> str:
    """Return the heading above the tokens that may follow the chosen one."""
    last = seen.token == len(seen.tokens) - 1
    return say(language, "next" if last else "next after", token=token_name(seen, seen.token))


def kinds_of(seen: Any) -> list[tuple[CaptionedHead, int]]:
    """Return the chosen head, then the clearest of each kind and how many more there are; empty without captions."""
    heads = seen.heads()
    chosen = next(head for head in heads if (head.layer, head.head) == (seen.layer, seen.head))
    if chosen.caption is None:
        return []
    kinds = clearest(heads)
    first = (chosen, next((more for head, more in kinds if head is chosen), 0))
    return [first, *(kind for kind in kinds if kind[0] is not chosen)]


def tables(seen: Any, language: Language) -> list[Table]:
    """Make tables of what follows, what the chosen token attends to, and what heads do."""
    result = [Table(cut(visible(seen.text), _TEXT))]
    shares = [choice.probability for choice in seen.after]
    names = [say(language, key) for key in ("key", "weight")]
    rows = [(spelled(choice.text), percent(choice.probability)) for choice in seen.after]
    if rows:
        result.append(Table(following(seen, language), [say(language, "column token"), "p"], rows, shares))
    order = np.argsort(-seen.row.weights, kind="stable")[:_KEYS]
    weights = seen.row.weights[order]
    rows = [(token_name(seen, j), fixed(float(x), 4, 9)) for j, x in zip(order.tolist(), weights, strict=True)]
    result.append(Table(attending(seen, language), names, rows, weights.tolist()))
    kinds = [(head, head.caption) for head, _ in kinds_of(seen)]
    rows = [(f"{head.layer}.{head.head}", caption.said[language]) for head, caption in kinds if caption is not None]
    columns = [say(language, "why head"), ""]
    return [*result, Table(say(language, "what heads do"), columns, rows)] if rows else result


def document(seen: HeadSteps, language: Language = "en", named: Sequence[int] = ()) -> Document:
    """Make the page's document: every head of every layer.

    X, U and the projection matrices are those of the chosen layer, if the matrices are small; of every layer, if the
    page holds the model.

    named  the layers to keep next after the chosen one, if the page has no room for all layers' weights and steps
    """
    numbers = list(layer_numbers(seen.model))
    facts: dict[str, Any] = {"model": model_line(seen.model), "illustration": seen.model.name == SHIPPED}
    facts |= {"text": seen.text, "generated": seen.generated} | _run_facts(seen)
    chosen = {"layer": seen.layer, "head": seen.head, "query": seen.token}
    weights, live = _projections(seen.model, seen.layer), seen.model is load()
    room = ROOM - sum(characters(x.size, x.itemsize)[0] for x in weights.values())
    if not live and room < ROOM - _WEIGHTS:
        weights, room = {}, ROOM
    some = _kept(seen.runs, [*map(numbers.index, (seen.layer, *named)), *range(len(numbers))], room)
    kept = some and [numbers[place] for place in some]
    facts["kept"] = kept and both("why kept", layers=", ".join(map(str, sorted(kept))))
    told = {"tokens": parts_of(seen.tokens, seen.text).names, "chosen": chosen, "facts": facts}
    shown = {number: _projections(seen.model, number) for number in numbers} if live else {seen.layer: weights}
    layers = [_page_layer(seen, number, run, shown.get(number)) for number, run in zip(numbers, seen.runs, strict=True)]
    made = story(layers, seen.text, language, told, kept=kept)
    return _with_model(made, seen.model) if isinstance(seen.model, Model) and live else made


def _projections(model: LanguageModel, layer: int) -> dict[str, Array]:
    """Return one layer's projection matrices and biases, as the page stores them."""
    return {name: narrowed(array) for name, array in model.projections(layer).items()}


def _with_model(page: Document, model: Model) -> Document:
    """Add the model's tokenizer and stored weights to the page, so that it can run other texts.

    Matrices of layers are (d_in, d_out), as in the steps, so that the page holds the same bytes once.
    """
    stored, config = model.decoder.weights.stored, model.config
    arrays = {f"live.{name}": tensor.rows(dtype=np.float16) for name, tensor in stored.items()}
    arrays = {name: array.T if "blk." in name else array for name, array in arrays.items()}
    encoder = json.loads(model.tokenizer.encoder.to_str())["model"]
    live = {name: getattr(config, name) for name in ("layers", "heads", "d_model", "epsilon", "positions")}
    live |= {"vocabulary": sorted(encoder["vocab"], key=encoder["vocab"].get)}
    live |= {"merges": [" ".join(pair) for pair in encoder["merges"]], "neutral": model.tokenizer.neutral}
    return replace(page, header={**page.header, "live": live}, arrays={**page.arrays, **arrays})


def _run_facts(seen: HeadSteps) -> dict[str, Any]:
    """Collect the page's facts about the run: next tokens, entropy, the check, the way, where heads look."""
    following = [[[c.text, rounded(c.probability, 6)] for c in choices] for choices in seen.following]
    looks = []  # for each head of each layer, the row's largest weights and their keys
    for run in seen.runs:
        rows = np.asarray(AttentionMatrix(run.q, run.k, **run.rules)[:, seen.token], np.float64)
        order = np.argsort(-rows, axis=-1, kind="stable")[:, :_LOOKS].tolist()
        pairs = zip(rows, order, strict=True)
        looks.append([[(key, round(row[key], 4)) for key in keys if row[key] > _LOOK] for row, keys in pairs])
    return {
        "next": [[c.text, c.probability] for c in seen.next] or None,
        "following": following,
        "entropy": listed(seen.entropy),
        "check": both("check", engine=seen.trace.engine, difference=seen.trace.difference),
        "way": for_page(seen.ways),
        "looks": {"query": seen.token, "heads": looks},
    }


def _kept(runs: Sequence[LayerRun], order: Iterable[int], room: float) -> list[int] | None:
    """Return the first of these layers, as many as fit into the page; None if all fit."""
    chosen = list(dict.fromkeys(order))
    parts = []
    for number in chosen:
        run = runs[number]
        streams = 2 * run.x.size * (number == chosen[0])  # x, output
        parts.append(characters(run.q.size + run.k.size + run.v.size + streams, run.q.itemsize))
    count, narrow = fitting(parts, room, pixels_of(sum(len(run.q) for run in runs)))
    return chosen[: max(1, count)] if narrow else None


def _page_layer(seen: HeadSteps, number: int, run: LayerRun, weights: Mapping[str, Array] | None) -> PageLayer:
    """Describe a layer for the page.

    weights   its projections; None: the page has neither these nor X and U
    """
    described = describe(run.q, run.k, run.v, cast("Rules", run.rules))
    logsumexp = np.asarray(AttentionMatrix(run.q, run.k, **run.rules).logsumexp())
    assert described.v is not None
    arrays = {"q": described.q, "k": described.k, "v": described.v, "logsumexp": logsumexp[None]}
    if weights is not None:
        arrays |= {"x": run.x[None], "output": run.output[None], **weights}
    return PageLayer(described.problem, seen.steps if number == seen.layer else steps_of(run), arrays, number)


def sizes_of(model: LanguageModel) -> tuple[str, dict[str, Any]]:
    """Return the key of the sentence on a model's sizes, and the sizes; also which layers attend, if not all do."""
    sizes, numbers = (
        {name: getattr(model.config, name) for name in ("layers", "heads", "d_model")},
        layer_numbers(model),
    )
    depth = getattr(model, "depth", len(numbers))
    if len(numbers) >= depth:
        return "model", sizes
    return "model some", sizes | {"layers": depth, "count": len(numbers), "numbers": ", ".join(map(str, numbers))}


def model_line(model: LanguageModel) -> Translations:
    """Describe the model in a line of the page."""
    place, (key, sizes) = Path(model.name), sizes_of(model)
    return both(key, name=place.resolve().name if place.is_dir() else model.name, **sizes)


def steps_of(run: LayerRun) -> Steps:
    """Return the steps of a whole layer, all heads: shapes without numbers."""
    (heads, n, d_k), (kv_heads, m, d_v) = run.q.shape, run.v.shape
    sizes = Sizes((), heads, kv_heads, n, m, d_k, d_v, itemsize=run.x.itemsize)
    widths, rules = (run.x.shape[-1], None, run.output.shape[-1]), cast("Rules", run.rules)
    return layer_steps(sizes, *widths, rules, run.biases, run.through, normalised=run.normalised)


def shown_run(model: LanguageModel, text: str, each: Each = iter) -> ShownRun:
    """Run a text through a model and keep every layer's attention, for the long page. Raises as `explain`."""
    tokens = model.tokenizer.tokens(text)
    run, layers = forward_pass(model, tokens, each), []
    for number, part in zip(layer_numbers(model), run.layers, strict=True):
        matrix = AttentionMatrix(part.q, part.k, **part.rules).part(0)
        layers.append(ShownLayer(str(number), range(len(part.q)), matrix, v=part.v[None]))
    following = [] if run.logits is None else next_tokens(model, run.logits[len(tokens) - 1], 5)
    facts = {"model": model_line(model), "next": [choice[1:3] for choice in following] or None}
    words = {each: {"page": {"next": capitalised(say(each, "next"))}} for each in LANGUAGES}
    return ShownRun(model.name, layers, [token.text for token in tokens], header={"facts": facts, "words": words})
