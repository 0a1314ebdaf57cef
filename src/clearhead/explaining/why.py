"""`ch.why`: why a model gives an answer, from the parts of the text, the heads and the edges that did it.

Everything here is data, taken from runs; `report` prints it.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.changing.edits_json import edits_to_json
from clearhead.core.agreement import spearman
from clearhead.core.axes import Array, brief
from clearhead.core.rule_values import whole_number
from clearhead.errors import RuleError, SelectionError, expected
from clearhead.explaining import editing, rerun, why_page
from clearhead.explaining.answers import Answers, read_answers, runner_up
from clearhead.explaining.attribution import Way, way
from clearhead.explaining.forward import forward_pass
from clearhead.explaining.integral import integral
from clearhead.explaining.rerun import Based, Edge
from clearhead.explaining.stream import of_decoder
from clearhead.explaining.text_parts import Part, parts_of_text, read_slices
from clearhead.explaining.texts import Reading, read
from clearhead.models.model import Model
from clearhead.models.protocol import Each, LanguageModel, Token, probabilities
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.words import Language

if TYPE_CHECKING:
    from clearhead.models.hub import HubModel

_MOST_POINTS = 16
_GAP = 0.05  # of the total: points double while the parts' sum misses more
_ESTIMATED = 20  # edges that the integral names for a run
_HEADS = 6  # whose largest weights are run again too, four each


class Candidate(NamedTuple):
    """A token that may come next, its probability and its logit."""

    id: int
    text: str
    probability: float
    logit: float


class PartEffect(NamedTuple):
    """A part of the text, its characters, and what it did to the number y.

    effect   φ: above 0 where the part speaks for the answer; all parts' add up to total − gap
    hidden   what y changes by when no later token may see the part, in a run; None where it was not run
    share    the answer's probability then: of its first token
    likeliest   the likeliest next token then
    """

    text: str
    start: int
    stop: int
    tokens: tuple[int, ...]
    effect: float
    hidden: float | None = None
    share: float | None = None
    likeliest: Candidate | None = None


class HeadEffect(NamedTuple):
    """One head: its share of the effect φ, and what y changes by when it is off in the rows that answer.

    truth is None where it was not run.
    """

    layer: int
    head: int
    effect: float
    truth: float | None


class EdgeEffect(NamedTuple):
    """One edge of a row that answers: its weight, its share of φ, and what y changes by without it, in a run."""

    layer: int
    head: int
    query: int
    key: int
    weight: float
    effect: float
    truth: float
    share: float  # the probability of the answer's first token then


class Trust(NamedTuple):
    """How far a list of parts says what happens when random halves of the text are hidden.

    score    the linear datamodeling score: Spearman's correlation between the sum of the kept parts' effects and y
    """

    score: float | None
    masks: int


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Why:
    """Why an answer follows a text; made by `why`.

    `value` is y: ln P − ln(1 − P) of the answer's probability P, or with `compared` how far the answer is ahead of the
    other, in natural logarithms. Effects φ are above 0 where something speaks for the answer; what was run again says
    what y changes by without it, below 0 where it spoke for it.
    """

    model: LanguageModel
    text: str
    tokens: list[Token]
    answer: str
    token: Candidate  # the answer's first token
    against: Candidate  # the other answer's first token, or the runner-up
    compared: bool  # is y about the other answer too?
    value: float
    parts: list[PartEffect]  # in the order of the text
    by_token: Array  # (tokens,): φ
    by_head: Array  # (layers, heads): φ
    heads: list[HeadEffect]  # the strongest in a run first
    heads_run: Array  # (layers, heads): what y changes by when each is off; NaN where it was not run
    edges: list[EdgeEffect]  # the strongest in a run first
    total: float  # y with everything less y with nothing of the parts
    gap: float  # total less the sum of all effects
    points: int
    sinks: int  # heads that give the first token over half of their weight in the row that answers
    missed: bool  # is the strongest edge none of the 20 that the effects name?
    edits: tuple[Edit, ...] = ()  # of the attention, in force in all runs
    ways: Sequence[Way] = ()  # to the first token and to the other one, where the model's parts can be added up
    next: Sequence[Candidate] = ()
    based: Sequence[Based] = field(default=(), repr=False)  # the runs that effects are changes of

    def __repr__(self) -> str:
        parts = {"": repr(self.text), "answer": repr(self.answer), "value": f"{self.value:.3g}"}
        return brief("Why", parts | {"parts": len(self.parts)}).replace("( ", "(")

    @property
    def layers(self) -> Array:
        """φ by layer, (layers,)."""
        return np.asarray(self.by_head.sum(axis=1))

    @property
    def lead(self) -> float:
        """How far the answer's first token is ahead of the other one, in logits."""
        return self.token.logit - self.against.logit

    def trust(self, masks: int = 16, *, seed: int = 0) -> Trust:
        """How far to believe the list of parts: `masks` runs in which each part is hidden with probability ½.

        >>> import clearhead as ch
        >>> ch.why("mary had a little").trust(8).score > 0
        True
        """
        count = whole_number("masks", masks, 1)
        kept = np.random.default_rng(seed).random((count, len(self.parts))) < 0.5
        off = [
            [token for part, keep in zip(self.parts, row, strict=True) if not keep for token in part.tokens]
            for row in kept
        ]
        ran = [
            rerun.hidden(self.model, self.based, [keys], self._placed())[0].value if keys else self.value
            for keys in off
        ]
        effects = np.array([part.effect for part in self.parts])
        return Trust(spearman((kept @ effects).tolist(), ran), count)

    def _placed(self) -> tuple[Edit, ...]:
        return editing.by_position(self.edits, self.tokens, self.text)

    def to_html(self, language: Language = "en") -> str:
        """A page with these causes above every step of the run. Raises RuleError for another language."""
        return page.html(self._document(language))

    def save(self, path: str | os.PathLike[str], language: Language = "en") -> None:
        """Write that page to an .html file, whole or not at all. Raises FileError, RuleError for another language."""
        page.write(path, lambda: self._document(language))

    def _document(self, language: Language) -> Document:
        return why_page.document(self, language)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain numbers, lists and words."""

        def plain(value: Any) -> Any:
            return {k: plain(v) for k, v in value._asdict().items()} if hasattr(value, "_asdict") else value

        listed = {name: [plain(each) for each in getattr(self, name)] for name in ("parts", "heads", "edges", "next")}
        whole = ("text", "answer", "compared", "value", "lead", "total", "gap", "points", "sinks", "missed")
        return {
            "model": {"name": self.model.name, **self.model.config.facts()},
            "tokens": [token._asdict() for token in self.tokens],
            "token": self.token._asdict(),
            "against": self.against._asdict(),
            **{name: getattr(self, name) for name in whole},
            **listed,
            "by_token": self.by_token.tolist(),
            "by_head": self.by_head.tolist(),
            "layers": self.layers.tolist(),
            "ways": [each.to_json() for each in self.ways],
        } | ({"edits": json.loads(edits_to_json(self.edits))} if self.edits else {})


def why(
    text: Any,
    model: "str | os.PathLike[str] | Model | HubModel | None" = None,
    *,
    answer: str | None = None,
    token: int | str | None = None,
    against: int | str | None = None,
    parts: str | Sequence[Any] = "words",
    hide: Any = None,
    points: int = 4,
    verify: int = 6,
    count: int = 8,
    edits: Any = None,
    each: Callable[[range], Iterable[int]] = iter,
) -> Why:
    """Say why a model gives an answer to a text: `clearhead explain --why` as an object.

    Every weight on a key of the text is multiplied by a factor α before its row is normalised, and the derivative of y
    by it is integrated from α = 0, where nothing of the text can be seen, to α = 1: Σ φ = y(everything) − y(nothing).
    y is ln P − ln(1 − P) of the answer's probability, or, with `against`, how far it is ahead of the other answer.

    text      a text, or a list of messages: {"role": "system", "user" or "assistant", "content": a text}
    model     a path or a name, as `load_model` takes them, or a loaded one; None is the small one that ships with
              clearhead
    answer    a text of one or more tokens; without a leading space it stands for the likelier of both spellings
    token     one token instead: a word of the vocabulary, or an id. The likeliest next token where neither is given
    against   another answer, as `answer` or as `token`; None explains the answer alone
    parts     "tokens", "words", "sentences", "paragraphs", "turns" (of a chat), or (start, stop) pairs of characters
    hide      (start, stop) pairs: what of the text may be hidden. None: all of it; of a chat all but the last message
              of the user, which is the question, where there is anything else. The first token, where idle heads rest,
              the last, which answers, and those of a chat's template are never hidden
    points    of the integral, 2 passes each; they double while the gap is above 5 % of the total, up to 16
    verify    how many of the strongest parts to hide in a run of their own
    count     how many heads and edges to list at most
    edits     an edit or a list of edits that are in force in all runs: cut, boost, tempered, scaled or off
    each      iterates over points, such as a progress bar

    Returns a Why: `parts` in the order of the text, `heads`, `edges`, `layers`, `by_token`, `total`, `gap`, `sinks`,
    `trust()`; `save`, `to_html`, `to_json`. Heads are off, and edges are without their weight, in the rows that say the
    answer; an edge's weight goes to the first token, so that edges to it have no effect.
    Raises as `explain`; RuleError for a model without next tokens, for attention that is not causal, and for an edit
    without a derivative; SelectionError for a word that is not one token, for parts that overlap or are outside the
    text, and where both answers are the same; ShapeError for an empty answer. O(points) passes, O(tokens) memory.
    Source: integrated gradients (Sundararajan et al. 2017) over gates of attention; Aumann and Shapley 1974.

    >>> import clearhead as ch
    >>> cause = ch.why("mary had a little", against=" girl")
    >>> cause.answer, max(cause.parts, key=lambda part: part.effect).text
    (' lamb', 'had')
    """
    if not callable(each):
        raise RuleError(expected("each", each, "what walks the points"), "each=tqdm")
    from clearhead.models.finding import load_model

    loaded = load_model(model)
    points, verify = whole_number("points", points, 1), whole_number("verify", verify, 0)
    count = whole_number("count", count, 1)
    acting = editing.checked(edits, loaded.config.layers, loaded.config.heads, loaded.name)
    reading = read(loaded, text)
    placed = editing.by_position(acting, reading.tokens, reading.text)
    run = forward_pass(loaded, reading.tokens, iter, placed)
    editing.check_acts(acting, placed, run.layers)
    asked = read_answers(loaded, reading.tokens, run, answer, token, against)
    found = parts_of_text(parts, reading.text, reading.tokens, reading.turns, _hidden_where(reading, hide))
    based = []
    for target in asked.targets:
        own = (
            run if list(target.ids) == [token.id for token in reading.tokens] else loaded.run(target.ids, iter, placed)
        )
        rows = np.stack([np.asarray(own.logits[row]) for row in target.rows])
        based.append(Based(target, own, target.value(rows)[0]))
    return _explained(loaded, reading, asked, based, found, acting, placed, (points, verify, count), each)


def _hidden_where(reading: Reading, hide: Any) -> list[tuple[int, int]]:
    """Where tokens can be hidden."""
    if hide is not None:
        return read_slices("hide", hide, reading.text)
    return reading.turns[:-1] or reading.turns or [(0, len(reading.text))]


def _explained(
    model: LanguageModel,
    reading: Reading,
    asked: Answers,
    based: list[Based],
    parts: list[Part],
    edits: tuple[Edit, ...],
    placed: tuple[Edit, ...],
    counts: tuple[int, int, int],
    each: Each,
) -> Why:
    points, verify, count = counts
    value = sum(one.value for one in based)
    gated = [token for part in parts for token in part.tokens]
    if not gated:
        raise SelectionError("the text has no part that can be hidden: its first token and its last never are.")
    total = value - rerun.hidden(model, based, [gated], placed)[0].value
    last = len(reading.tokens)
    while True:
        made = [integral(model, one.target, gated, points, placed, each) for one in based]
        by_head = sum(one.heads[:, :, :last] for one in made)
        gap = total - float(by_head.sum())
        if abs(gap) <= _GAP * abs(total) or points >= _MOST_POINTS:
            break
        points = min(2 * points, _MOST_POINTS)
    by_token = by_head.sum(axis=(0, 1))
    effects = [PartEffect(*part, float(by_token[list(part.tokens)].sum())) for part in parts]
    base = np.asarray(based[0].run.logits[last - 1])
    heads, heads_run = _heads(model, based, by_head.sum(axis=2), placed, count)
    edges, missed = _edges(model, based, made[0].edges, heads, placed, count)
    other = asked.against[0] if asked.against else runner_up(base, asked.answer[0])
    candidates = [_candidate(model, base, i) for i in (asked.answer[0], other)]
    return Why(
        model=model,
        text=reading.text,
        tokens=reading.tokens,
        answer="".join(map(model.text, asked.answer)),
        token=candidates[0],
        against=candidates[1],
        compared=bool(asked.against),
        value=value,
        parts=_verified(model, based, effects, placed, verify),
        by_token=by_token,
        by_head=by_head.sum(axis=2),
        heads=heads,
        heads_run=heads_run,
        edges=edges,
        total=total,
        gap=gap,
        points=points,
        sinks=int(
            sum((rerun.row_weights(based[0].run, layer, last - 1)[:, 0] > 0.5).sum() for layer in range(len(by_head)))
        ),
        missed=missed,
        edits=edits,
        ways=_ways(model, based[0], candidates),
        next=[_candidate(model, base, int(i)) for i in np.argsort(-base, kind="stable")[:5]],
        based=based,
    )


def _candidate(model: LanguageModel, logits: Array, token: int) -> Candidate:
    return Candidate(token, model.text(token), float(probabilities(logits)[token]), float(logits[token]))


def _verified(
    model: LanguageModel, based: Sequence[Based], parts: list[PartEffect], edits: tuple[Edit, ...], count: int
) -> list[PartEffect]:
    """The parts, the strongest of them hidden in a run of their own."""
    value, answer = sum(one.value for one in based), based[0].target.answer[0]
    strongest = sorted(range(len(parts)), key=lambda place: -abs(parts[place].effect))[:count]
    ran = rerun.hidden(model, based, [parts[place].tokens for place in strongest], edits)
    result = list(parts)
    for place, (then, logits) in zip(strongest, ran, strict=True):
        likeliest = _candidate(model, logits, int(np.argmax(logits)))
        share = float(probabilities(logits)[answer])
        result[place] = parts[place]._replace(hidden=then - value, share=share, likeliest=likeliest)
    return result


def _heads(
    model: LanguageModel, based: Sequence[Based], by_head: Array, edits: tuple[Edit, ...], count: int
) -> tuple[list[HeadEffect], Array]:
    """The heads by what y changes by when each is off in the rows that answer, and all these changes."""
    value = sum(one.value for one in based)
    order = [divmod(int(place), by_head.shape[1]) for place in np.argsort(-np.abs(by_head), axis=None, kind="stable")]
    chosen = order if model.exact_heads else order[: 2 * count]
    truths = np.full(by_head.shape, np.nan)
    for place, ran in zip(chosen, rerun.heads_off(model, based, chosen, edits), strict=True):
        truths[place] = ran.value - value
    listed = sorted(chosen, key=lambda place: -abs(truths[place]))[:count]
    return [HeadEffect(*place, float(by_head[place]), float(truths[place])) for place in listed], truths


def _edges(
    model: LanguageModel,
    based: Sequence[Based],
    effects: Array,
    heads: Sequence[HeadEffect],
    edits: tuple[Edit, ...],
    count: int,
) -> tuple[list[EdgeEffect], bool]:
    """The edges of the rows that answer by what y changes by without each, and whether the effects missed the first.

    Those are run that the effects name, and the largest weights of the heads that did most.
    """
    rows, value = based[0].target.rows, sum(one.value for one in based)
    order = np.argsort(-np.abs(effects), axis=None, kind="stable")[:_ESTIMATED]
    named = [
        Edge(int(i), int(h), rows[int(r)], int(k))
        for i, h, r, k in zip(*np.unravel_index(order, effects.shape), strict=True)
    ]
    chosen = {edge: None for edge in named if effects[edge.layer, edge.head, edge.query - rows.start, edge.key]}
    estimated = set(chosen)
    weights: dict[tuple[int, int], Array] = {}
    for head in heads[:_HEADS]:
        row = rerun.row_weights(based[0].run, head.layer, rows.start)[head.head]
        keys = [int(key) for key in np.argsort(-row)[:5] if key and row[key]]
        chosen |= {Edge(head.layer, head.head, rows.start, key): None for key in keys[:4]}
    listed, answer, made = list(chosen), based[0].target.answer[0], []
    for edge, (then, logits) in zip(listed, rerun.edges_without(model, based, listed, edits), strict=True):
        place = edge.layer, edge.query
        if place not in weights:
            weights[place] = rerun.row_weights(based[0].run, *place)
        effect = float(effects[edge.layer, edge.head, edge.query - rows.start, edge.key])
        share = float(probabilities(logits)[answer])
        made.append(EdgeEffect(*edge, float(weights[place][edge.head, edge.key]), effect, then - value, share))
    made.sort(key=lambda edge: -abs(edge.truth))
    return made[:count], bool(made) and Edge(*made[0][:4]) not in estimated


def _ways(model: LanguageModel, based: Based, candidates: Sequence[Candidate]) -> list[Way]:
    """What each part of the model adds to both candidates' logits; none where its parts cannot be added up."""
    if not isinstance(model, Model):
        return []
    stream = of_decoder(model, list(based.run.ids), based.run, based.target.rows.start)
    return [way(stream, candidate.id, candidate.text) for candidate in candidates]
