"""`ch.why`: why a model gives an answer, from the parts of the text, the heads and the edges that did it.

Everything here is data, taken from runs; `report` prints it.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core.axes import Array, brief
from clearhead.core.effects import Rest, spearman
from clearhead.core.rule_values import whole_number
from clearhead.digits import significant
from clearhead.errors import SelectionError
from clearhead.explaining import editing, part_runs, rerun, why_page
from clearhead.explaining.answers import Answers, read_answers, runner_up
from clearhead.explaining.attribution import Way, heads_by_share
from clearhead.explaining.attribution import way as way_to
from clearhead.explaining.derivatives import check_edits
from clearhead.explaining.forward import check_each, forward_pass
from clearhead.explaining.integral import cuts
from clearhead.explaining.other_numbers import of_later_tokens, other_numbers, weight_of
from clearhead.explaining.part_runs import Again, candidate
from clearhead.explaining.rerun import Based, Edge, Rerun
from clearhead.explaining.stream import of_decoder
from clearhead.explaining.text_parts import Part, parts_of_text, read_slices
from clearhead.explaining.texts import Reading, read
from clearhead.explaining.why_lists import Candidate, EdgeEffect, HeadEffect, OtherNumber, PairEffect, PartEffect, Trust
from clearhead.explaining.why_words import causes_table, conclusion, most_likely, parts_table, question
from clearhead.models.model import Model
from clearhead.models.protocol import Each, LanguageModel, Token
from clearhead.tables import Table, Tabular
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.view.notebook import Framing
from clearhead.words import Language, say

if TYPE_CHECKING:
    from clearhead.models.hub import HubModel

_NOISY, _ALL = 0.25, 32  # where they miss more than this, up to so many parts are hidden in runs of their own
_ESTIMATED = 20  # edges that each estimate names for a run
_SHOWN = 8  # parts and heads in a notebook
_HEADS, _KEYS = 6, 4  # the first heads, run again and directly, and of each so many of its largest weights


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Why(Tabular, Framing):
    """Why an answer follows a text; made by `why`.

    `value` is y: ln P − ln(1 − P) of the answer's probability P, or with `compared` how far the answer is ahead of the
    other, in natural logarithms. Effects φ are above 0 where something speaks for the answer; what was run again says
    what y changes by without it, below 0 where it spoke for it.

    >>> import clearhead as ch
    >>> found = ch.why("humpty dumpty sat on")
    >>> isinstance(found, ch.Why), found.carrier[:2]
    (True, (0, 7))
    """

    model: LanguageModel
    text: str  # all that the model read: of messages, by its template
    tokens: list[Token]
    answer: str  # its text
    token: Candidate  # the answer's first token
    against: Candidate  # the other answer's first token, or the runner-up of the same kind
    compared: bool  # is y about the other answer too?
    other: str  # the text of the other answer, or of the runner-up
    value: float  # y, in natural logarithms
    parts: list[PartEffect]  # in the order of the text
    pairs: list[PairEffect]  # of parts that stand in for each other, the strongest first
    by_token: Array  # (tokens,): φ, of the integral alone; without one a part's, in equal shares
    by_head: Array  # (layers, heads): φ
    heads: list[HeadEffect]  # the strongest in a run first
    heads_run: Array  # (layers, heads): what y changes by when each is off; NaN where it was not run
    edges: list[EdgeEffect]  # the strongest in a run first
    total: float  # y with everything less y with nothing of the parts
    gap: float  # total less the sum of the parts' effects
    points: int  # of the integral; 0 without one
    missed: bool  # is the strongest edge in neither estimate's first 20?
    sinks: int = 0  # heads that give the first token over half of their weight in the row that answers
    sink: bool = False  # are these half of all heads or more? Then the first token is set aside
    edits: tuple[Edit, ...] = ()  # of the attention, in force in all runs
    ways: Sequence[Way] = ()  # to the first token and to the other one, where the model's parts can be added up
    next: Sequence[Candidate] = ()  # the likeliest next tokens, the likeliest first
    numbers: Sequence[OtherNumber] = ()  # what the same runs say of each token of the answer, or of other next tokens
    prompt: Any = None  # the text or the messages, as they came
    based: Sequence[Based] = field(default=(), repr=False)  # the runs that effects are changes of

    def __repr__(self) -> str:
        parts = {"": repr(self.text), "answer": repr(self.answer), "value": significant(self.value)}
        return brief("Why", parts | {"parts": len(self.parts)}).replace("( ", "(")

    def _tables(self, language: Language) -> list[Table]:
        parts, heads = sorted(self.parts, key=lambda part: -abs(part.effect))[:_SHOWN], self.heads[:_SHOWN]
        tables = parts_table(self, language, parts), causes_table(self, language, "carried", heads)
        opening = Table(question(self, language), notes=[most_likely(self, language)])
        said, notes = conclusion(self, language, parts)
        return [opening, *tables, Table("", notes=[*said, *notes, say(language, "whole page")])]

    @property
    def noisy(self) -> bool:
        """Do the effects miss so much that only what was run again says anything?"""
        return abs(self.gap) > _NOISY * abs(self.total)

    @property
    def layers(self) -> Array:
        """φ by layer, (layers,)."""
        return np.asarray(self.by_head.sum(axis=1))

    @property
    def probability(self) -> float:
        """The answer's; where two answers are compared, that of its first token."""
        return self.token.probability if self.compared else float(1 / (1 + np.exp(-self.value)))

    @property
    def lead(self) -> float:
        """How far the answer's first token is ahead of the other one, in logits."""
        return self.token.logit - self.against.logit

    @property
    def carrier(self) -> HeadEffect:
        """The head that carries the answer: without it y falls most."""
        return min(self.heads, key=lambda head: head.truth)

    def trust(self, masks: int = 16, *, seed: int = 0) -> Trust:
        """How far to believe the list of parts: `masks` runs in which each part is hidden with probability ½.

        >>> import clearhead as ch
        >>> ch.why("mary had a little").trust(8).score > 0
        True
        """
        again = Again(
            self.model, list(self.based), self._placed(), self.value, "first", 0, (self.token.id, self.against.id)
        )
        kept, ran = part_runs.halves(again, self.parts, whole_number("masks", masks, 1), seed)
        effects = np.array([part.effect for part in self.parts])
        return Trust(spearman((kept @ effects).tolist(), ran.tolist()), len(ran))

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

        listed = {
            name: [plain(each) for each in getattr(self, name)] for name in ("parts", "pairs", "heads", "edges", "next")
        }
        whole = ("text", "answer", "other", "compared", "value", "lead", "total", "gap", "points", "sinks", "missed")
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
        } | ({"edits": [repr(edit) for edit in self.edits]} if self.edits else {})


def why(
    text: Any,
    model: "str | os.PathLike[str] | Model | HubModel | None" = None,
    *,
    answer: str | None = None,
    token: int | str | None = None,
    against: int | str | None = None,
    parts: str | Sequence[Any] = "words",
    hide: Any = None,
    points: int | None = None,
    verify: int = 6,
    effort: str | int = "quick",
    count: int = 8,
    edits: Any = None,
    each: Callable[[range], Iterable[int]] = iter,
) -> Why:
    """Say why a model gives an answer to a text: `clearhead explain` as an object.

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
              of the user, which is the question, where there is anything else. Never hidden are the last token, which
              answers, those of a chat's template, and the first one where most heads rest on it
    points    of the integral, 2 passes each, doubled up to 16 while the gap is above 5 % of the total; 0: no integral,
              parts are scored by runs of the rows after them alone, which is cheap where a question follows. None: 4,
              or 0 if 3 tokens follow the parts in a text of more than 1,024 and the model runs in NumPy
    verify    how many of the strongest parts to hide in a run of their own; 32 where the gap is above 25 % of the total
    effort    "quick": the integral; "careful": 48 more passes with random halves of the parts hidden, which correct the
              parts' effects; or how many such passes
    count     how many heads and edges to list at most
    edits     an edit or a list of edits that are in force in all runs: cut, boost, tempered, scaled or off
    each      iterates over points, and over the layers of what is run again, such as a progress bar

    Returns a Why: `parts` in the order of the text, `pairs` of parts of which either is enough, `heads`, `edges`,
    `layers`, `by_token`, `total`, `gap`, `sinks`, `trust()`; `save`, `to_html`, `to_json`. Heads are off, and edges are
    without their weight, in the rows that say the answer. An edge's weight goes to the first token where most heads
    rest on it, else to the row's other keys.
    Raises as `explain`; RuleError for a model without next tokens, for attention that is not causal, and for an edit
    without a derivative; UnknownNameError for another effort; SelectionError for a word that is not one token, for
    parts that overlap or are outside the text, and where both answers are the same; ShapeError for an empty answer.
    O(points) passes, O(tokens) memory.
    Source: integrated gradients (Sundararajan et al. 2017) over gates of attention; Aumann and Shapley 1974.

    >>> import clearhead as ch
    >>> cause = ch.why("mary had a little", against=" girl")
    >>> cause.answer, max(cause.parts, key=lambda part: part.effect).text
    (' lamb', 'mary')
    """
    check_each(each)
    from clearhead.models.finding import load_model

    loaded = load_model(model)
    counts, listed = part_runs.read_counts(points, verify, effort), whole_number("count", count, 1)
    acting = editing.checked(edits, loaded.config.layers, loaded.config.heads, loaded.name)
    check_edits(acting)
    reading = read(loaded, text)
    placed = editing.by_position(acting, reading.tokens, reading.text)
    run = forward_pass(loaded, reading.tokens, each, placed)
    editing.check_acts(acting, placed, run.layers)
    asked = read_answers(loaded, reading.tokens, run, answer, token, against)
    sinks = rerun.resting(run, len(reading.tokens) - 1)
    sink = 2 * sinks >= loaded.config.layers * loaded.config.heads
    cut = parts_of_text(parts, *reading, _hidden_where(reading, hide), first=int(sink))
    if not cut:
        raise SelectionError("the text has no part to hide: a sink at its start and its last token never are hidden.")
    runs = [run if one.ids == list(run.ids) else loaded.run(one.ids, each, placed) for one in asked.targets]
    pair = asked.answer[0], (asked.against or (runner_up(loaded, np.asarray(run.logits[-1]), asked.answer[0]),))[0]
    based = [rerun.based_on(*both, each, pair) for both in zip(asked.targets, runs, strict=True)]
    rest: Rest = "first" if sink else "renormalise"
    again = Again(loaded, based, placed, sum(one.value for one in based), rest, listed, pair)
    return _explained(again, asked, reading, cut, counts, each, sinks=sinks, sink=sink, edits=acting, prompt=text)


def _hidden_where(reading: Reading, hide: Any) -> list[tuple[int, int]]:
    """Where tokens can be hidden."""
    if hide is not None:
        return read_slices("hide", hide, reading.text)
    return reading.turns[:-1] or reading.turns or [(0, len(reading.text))]


def _explained(
    again: Again,
    asked: Answers,
    reading: Reading,
    cut: list[Part],
    counts: tuple[int | None, int, int],
    each: Each,
    **facts: Any,
) -> Why:
    """All of it; `facts` are what the text alone says."""
    model, base = again.model, np.asarray(again.based[0].run.logits[len(reading.tokens) - 1])
    asked_points = part_runs.points_for(model, counts[0], cut, len(reading.tokens))
    by_key, by_edge, total, points = part_runs.integrated(
        again, [place for part in cut for place in part.tokens], asked_points, each
    )
    by_token, by_head = by_key.sum(axis=(0, 1)), by_key.sum(axis=2)
    effects = [PartEffect(*part, float(by_token[list(part.tokens)].sum())) for part in cut]
    if not points:
        effects = part_runs.answering(again, effects, total)
        for part in effects:
            by_token[list(part.tokens)] = part.effect / len(part.tokens)
    if counts[2]:
        effects = part_runs.fitted(again, effects, counts[2])
    heads, heads_run, off = _heads(again, by_head)
    gap = total - sum(part.effect for part in effects)
    verify = max(counts[1], _ALL) if counts[1] and abs(gap) > _NOISY * abs(total) else counts[1]
    parts, ran = part_runs.hidden(again, effects, verify)
    candidates = [candidate(model, base, i) for i in again.pair]
    ways = _ways(model, again.based[0], candidates)
    named = [(head.layer, head.head) for head in heads[:_HEADS]] + heads_by_share(ways)[:_HEADS]
    looked = [(place, 0, _KEYS) for place in named] + of_later_tokens(again, off)
    estimates = [by_edge, cuts(model, again.based[0].target, again.based[0].run, again.edits, again.rest)]
    edges, missed, without = _edges(again, estimates, looked)
    return Why(
        model=model,
        text=reading.text,
        tokens=reading.tokens,
        answer="".join(map(model.text, asked.answer)),
        token=candidates[0],
        against=candidates[1],
        compared=bool(asked.against),
        other="".join(map(model.text, asked.against or again.pair[1:])),
        value=again.value,
        parts=parts,
        pairs=part_runs.pairs(again, parts, total) if counts[1] else [],
        by_token=by_token,
        by_head=by_head,
        heads=[head._replace(edge=next((one for one in edges if one[:2] == head[:2]), None)) for head in heads],
        heads_run=heads_run,
        edges=edges[: again.listed],
        total=total,
        gap=gap,
        points=points,
        missed=missed,
        ways=ways,
        next=[candidate(model, base, int(i)) for i in rerun.likely(base)],
        numbers=other_numbers(again, off, ran, without, (by_head.shape, len(parts))),
        based=again.based,
        **facts,
    )


def _heads(again: Again, by_head: Array) -> tuple[list[HeadEffect], Array, dict[tuple[int, int], Rerun]]:
    """The heads by what y changes by when each is off in the rows that answer, all these changes, and their runs."""
    off = rerun.each_off(again.model, again.based, by_head, 2 * again.listed, again.edits)
    truths = rerun.changes_of(off, again.value, by_head.shape)
    run = [(int(layer), int(head)) for layer, head in np.argwhere(~np.isnan(truths))]
    listed = sorted(run, key=lambda place: (-abs(truths[place]), -abs(by_head[place])))[: again.listed]
    return [HeadEffect(*place, float(by_head[place]), float(truths[place])) for place in listed], truths, off


def _edges(
    again: Again, estimates: Sequence[Array], looked: Sequence[tuple[tuple[int, int], int, int]]
) -> tuple[list[EdgeEffect], bool, dict[Edge, Rerun]]:
    """The edges of the rows that answer by what y changes by without each; do estimates miss the first? And all runs.

    estimates   (layers, heads, rows, keys): φ, and others; the strongest of each are run again
    looked      (head, row, how many): the largest weights of these are run again too
    """
    rows, weights = again.based[0].target.rows, again.based[0].weights
    chosen: dict[Edge, None] = {}
    for each in estimates:
        order = np.argsort(-np.abs(each), axis=None, kind="stable")[:_ESTIMATED]
        places = np.transpose(np.unravel_index(order, each.shape)).tolist()
        chosen |= {
            Edge(layer, head, rows[row], key): None for layer, head, row, key in places if each[layer, head, row, key]
        }
    effects, estimated = estimates[0], set(chosen)
    for (layer, head), place, count in looked:
        row = weights(layer, rows[place])[head]
        keys = [int(key) for key in np.argsort(-row)[: count + 1] if row[key] and (key or again.rest != "first")]
        chosen |= dict.fromkeys(Edge(layer, head, rows[place], key) for key in keys[:count])
    made = []
    runs = rerun.edges_without(again.model, again.based, list(chosen), again.edits, again.rest)
    for edge, one in zip(chosen, runs, strict=True):
        effect = float(effects[edge.layer, edge.head, edge.query - rows.start, edge.key])
        now = one.share(again.pair[0]), again.lead(one.logits)
        made.append(EdgeEffect(*edge, weight_of(again, edge), effect, one.value - again.value, *now))
    made.sort(key=lambda edge: -abs(edge.truth))
    missed = bool(made) and Edge(*made[0][:4]) not in estimated
    return made, missed, dict(zip(chosen, runs, strict=True))


def _ways(model: LanguageModel, based: Based, candidates: Sequence[Candidate]) -> list[Way]:
    """What each part of the model adds to both candidates' logits; none where its parts cannot be added up."""
    if not isinstance(model, Model):
        return []
    stream = of_decoder(model, list(based.run.ids), based.run, based.target.rows.start)
    return [way_to(stream, candidate.id, candidate.text) for candidate in candidates]
