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
from clearhead.explaining import editing, head_runs, part_runs, rerun, why_page
from clearhead.explaining.answers import Question, decides, probability, read_answers, rival
from clearhead.explaining.attribution import Way, heads_by_share
from clearhead.explaining.attribution import way as way_to
from clearhead.explaining.derivatives import check_edits
from clearhead.explaining.forward import check_each, forward_pass
from clearhead.explaining.integral import cuts
from clearhead.explaining.part_runs import Again, candidate
from clearhead.explaining.rerun import Based
from clearhead.explaining.stream import of_decoder
from clearhead.explaining.text_parts import Part, parts_of_text, read_slices
from clearhead.explaining.texts import Reading, read
from clearhead.explaining.why_lists import (
    Candidate,
    EdgeEffect,
    HeadEffect,
    OtherNumber,
    PairEffect,
    PartEffect,
    Trust,
    by_change,
    plain,
)
from clearhead.explaining.why_words import causes_table, conclusion, gap_of, most_likely, parts_table, question
from clearhead.models.model import Model
from clearhead.models.protocol import Each, LanguageModel, Token
from clearhead.tables import Table, Tabular
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.view.notebook import Framing
from clearhead.words import Language, say

if TYPE_CHECKING:
    from clearhead.models.hub import HubModel

_CARRIES = 0.1  # of what hiding the best part takes: what a head has to take that carries an answer
_SHOWN = 8  # parts and heads in a notebook
_HEADS, _KEYS = 6, 4  # the first heads, run again and directly, and of each so many of its largest weights


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Why(Tabular, Framing):
    """Why an answer follows a text; made by `why`.

    `value` is y: ln P − ln(1 − P) of the answer's probability P, or with `compared` how far the answer is ahead of the
    other, in natural logarithms. What was run again says what y changes by without a part, a head or an edge: below 0
    where it spoke for the answer. `ranked` lists the parts by that.

    >>> import clearhead as ch
    >>> found = ch.why("humpty dumpty sat on")
    >>> found.answer, found.ranked[0].text, found.strongest[:2]
    (' a', 'dumpty', (0, 7))
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
    groups: list[PartEffect]  # sentences that were hidden as a whole, where there were too many parts for one run each
    pairs: list[PairEffect]  # of parts that stand in for each other, the strongest first
    by_token: Array  # (tokens,): what y falls by without the token's part or sentence, in equal shares
    by_head: Array  # (layers, heads): φ, of the integral
    heads: list[HeadEffect]  # the strongest in a run first
    heads_run: Array  # (layers, heads): what y changes by when each is off; NaN where it was not run
    edges: list[EdgeEffect]  # the strongest in a run first
    total: float  # y with everything less y with nothing of the parts
    gap: float  # total less the sum of the parts' effects
    points: int  # of the integral; 0 without one
    missed: bool  # is the strongest edge in neither estimate's first 20?
    sinks: int = 0  # heads that give the first token over half of their weight in the row that answers
    sink: bool = False  # are these half of all heads or more? Then weights of edges are moved there
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
        heads = self.heads[:_SHOWN]
        tables = parts_table(self, language, _SHOWN), causes_table(self, language, "carried", heads)
        opening = Table(question(self, language), notes=[most_likely(self, language)])
        said, notes = conclusion(self, language), [gap_of(self, language)]
        return [opening, *tables, Table("", notes=[*said, *notes, say(language, "whole page")])]

    @property
    def ranked(self) -> list[PartEffect]:
        """The parts, and sentences in place of their parts, by how much hiding each changes the answer."""
        inside = {token for group in self.groups for token in group.tokens}
        return by_change([*self.groups, *(part for part in self.parts if part.tokens[0] not in inside)])

    @property
    def layers(self) -> Array:
        """φ by layer, (layers,)."""
        return np.asarray(self.by_head.sum(axis=1))

    @property
    def probability(self) -> float:
        """The answer's; where two answers are compared, that of its first token."""
        return self.token.probability if self.compared else probability(self.value)

    @property
    def lead(self) -> float:
        """How far the answer's first token is ahead of the other one, in logits."""
        return self.token.logit - self.against.logit

    @property
    def strongest(self) -> HeadEffect:
        """The head without which y falls most."""
        return min(self.heads, key=lambda head: head.truth)

    @property
    def carrier(self) -> HeadEffect | None:
        """The strongest head that not any text needs, or None.

        It takes a tenth of the answer's probability, and of what hiding the best part takes: of y and of probability.
        """

        def takes(change: float) -> Array:
            left = 0.0 if self.compared else probability(self.value + change) - probability(self.value)
            return -np.array([change, left])

        least = _CARRIES * takes(min((part.hidden or 0.0 for part in self.ranked), default=0.0))
        found = [one for one in self.heads if one.truth < 0 and not one.needed and (takes(one.truth) >= least).all()]
        found = [one for one in found if self.compared or decides(self.value, one.truth)]
        return min(found, key=lambda head: head.truth, default=None)

    def trust(self, masks: int = 16, *, seed: int = 0) -> Trust:
        """How far to believe the list of parts: `masks` runs in which each part is hidden with probability ½.

        >>> import clearhead as ch
        >>> ch.why("mary had a little").trust(8).score > 0
        True
        """
        placed = editing.by_position(self.edits, self.tokens, self.text)
        pair = self.token.id, self.against.id
        again = Again(self.model, list(self.based), placed, self.value, "first", 0, pair)
        seed = whole_number("seed", seed, 0)
        kept, ran = part_runs.halves(again, self.parts, whole_number("masks", masks, 1), seed)
        effects = np.array([part.effect for part in self.parts])
        return Trust(spearman((kept @ effects).tolist(), ran.tolist()), len(ran))

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
        listed = {
            name: [plain(each) for each in getattr(self, name)]
            for name in ("groups", "pairs", "heads", "edges", "next")
        }
        listed["parts"] = [plain(part) for part in by_change(self.parts)]
        whole = ("text", "answer", "other", "compared", "value", "lead", "total", "gap", "points", "sinks", "missed")
        return {
            "model": {"name": self.model.name, **self.model.config.facts()},
            "tokens": [token._asdict() for token in self.tokens],
            "token": self.token._asdict(),
            "against": self.against._asdict(),
            **{name: getattr(self, name) for name in whole},
            **listed,
            "conclusion": conclusion(self, "en"),
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
    verify: int = 48,
    effort: str | int = "quick",
    count: int = 8,
    edits: Any = None,
    each: Callable[[range], Iterable[int]] = iter,
) -> Why:
    """Say why a model gives an answer to a text: `clearhead explain` as an object.

    The model is run again with each part of the text hidden from all later tokens, and with heads and edges off: what y
    changes by then is the truth about each of them alone. y is ln P − ln(1 − P) of the answer's probability, or, with
    `against`, how far it is ahead of the other answer. An integral over gates on all keys chooses the edges to run.

    text      a text, or a list of messages: {"role": "system", "user" or "assistant", "content": a text}
    model     a path or a name, as `load_model` takes them, or a loaded one; None is the small one that is shipped
    answer    a text of one or more tokens; without a leading space it stands for the likelier of both spellings
    token     one token instead: a word of the vocabulary, or an id. The likeliest next token where neither is given
    against   another answer, as `answer` or as `token`; None explains the answer alone
    parts     "tokens", "words", "sentences", "paragraphs", "turns" (of a chat), or (start, stop) pairs of characters
    hide      (start, stop) pairs: what of the text may be hidden. None: all of it; of a chat all but the last message
              of the user, which is the question, where there is anything else. Never the last token, which answers,
              nor a chat's template. In place of the text's first token, where heads rest, stands a neutral one
    points    of the integral, 2 passes each; 0: none, but runs of the rows after the parts alone. None: 4, or 0 if 3
              tokens follow the parts in a text of more than 1,024 and the model runs in NumPy
    verify    up to how many parts are hidden one by one; of more, all sentences, then the parts of three. 0: none
    effort    how many more runs hide random halves of the parts, for their effects: "quick" (24, fewer in texts of over
              341 tokens), "careful" (48), or a number
    count     how many heads and edges to list at most
    edits     an edit or a list of edits that are in force in all runs: cut, boost, tempered, scaled or off
    each      iterates over points, and over the layers of what is run again, such as a progress bar

    Returns a Why, with `ranked` parts, `pairs` of which either is enough, `heads`, `edges`, `trust()`, `save`,
    `to_json` and more. Heads and edges are off in the rows that say the answer.
    Raises as `explain`; RuleError for a model without next tokens, for attention that is not causal, and for an edit
    without a derivative; UnknownNameError for another effort; SelectionError for a word that is not one token, for
    parts that overlap or are outside the text, and where both answers are the same; ShapeError for an empty answer.
    O(points + parts) passes, O(tokens) memory.
    Source: integrated gradients (Sundararajan et al. 2017) over gates of attention; Aumann and Shapley 1974.

    >>> import clearhead as ch
    >>> cause = ch.why("mary had a little", against=" girl")
    >>> cause.answer, cause.ranked[0].text
    (' lamb', 'mary')
    """
    check_each(each)
    from clearhead.models.finding import load_model

    loaded = load_model(model)
    asked_points = None if points is None else whole_number("points", points, 0)
    most, listed = whole_number("verify", verify, 0), whole_number("count", count, 1)
    acting = editing.checked(edits, loaded.config.layers, loaded.config.heads, loaded.name)
    check_edits(acting)
    reading = read(loaded, text)
    halves = part_runs.read_effort(effort, len(reading.tokens))
    placed = editing.by_position(acting, reading.tokens, reading.text)
    run = forward_pass(loaded, reading.tokens, each, placed)
    editing.check_acts(acting, placed, run.layers)
    asked = read_answers(loaded, reading.tokens, run, answer, token, against)
    sinks = rerun.resting(run, len(reading.tokens) - 1)
    sink = 2 * sinks >= loaded.config.layers * loaded.config.heads
    cut = parts_of_text(parts, *reading, _hidden_where(reading, hide))
    if not cut:
        raise SelectionError("the text has no part to hide: its last token, which answers, never is hidden.")
    runs = [run if one.ids == list(run.ids) else loaded.run(one.ids, each, placed) for one in asked.targets]
    other = asked.against or (rival(loaded, reading, np.asarray(run.logits[len(reading.tokens) - 1]), asked.answer[0]),)
    pair = asked.answer[0], other[0]
    based = [rerun.based_on(*both, each, pair) for both in zip(asked.targets, runs, strict=True)]
    rest: Rest = "first" if sink else "renormalise"
    again = Again(loaded, based, placed, sum(one.value for one in based), rest, listed, pair)
    counts = part_runs.points_for(loaded, asked_points, cut, len(reading.tokens)), most, halves
    return _explained(again, asked, reading, cut, counts, each, sinks=sinks, sink=sink, edits=acting, prompt=text)


def _hidden_where(reading: Reading, hide: Any) -> list[tuple[int, int]]:
    """Where tokens can be hidden."""
    if hide is not None:
        return read_slices("hide", hide, reading.text)
    return reading.turns[:-1] or reading.turns or [(0, len(reading.text))]


def _explained(
    again: Again,
    asked: Question,
    reading: Reading,
    cut: list[Part],
    counts: tuple[int, int, int],
    each: Each,
    **facts: Any,
) -> Why:
    """All of it; `facts` are what the text alone says."""
    model, base = again.model, np.asarray(again.based[0].run.logits[len(reading.tokens) - 1])
    by_key, by_edge, total, points = part_runs.integrated(
        again, [place for part in cut for place in part.tokens], counts[0], each
    )
    by_head, of_token = by_key.sum(axis=2), by_key.sum(axis=(0, 1))
    neutral = model.text(model.neutral)
    effects = [
        PartEffect(*part, float(of_token[list(part.tokens)].sum()), neutral if 0 in part.tokens else "") for part in cut
    ]
    if not points:
        effects = part_runs.answering(again, effects, total)
    ran = part_runs.hidden(again, effects, reading.text, counts[1])
    parts, groups = part_runs.weighed(again, ran, counts[2], total)
    by_token = np.zeros(len(reading.tokens))
    for part in [*groups, *(part for part in parts if part.hidden is not None or not ran.runs)]:
        by_token[list(part.tokens)] = (part.effect if part.hidden is None else -part.hidden) / len(part.tokens)
    heads, heads_run, off = head_runs.heads(again, by_head)
    candidates = [candidate(model, base, i) for i in again.pair]
    ways: list[Way] = []
    if isinstance(model, Model):  # whose parts add up
        run, rows = again.based[0].run, again.based[0].target.rows
        stream = of_decoder(model, list(run.ids), run, rows.start)
        ways = [way_to(stream, one.id, one.text) for one in candidates]
    named = [(head.layer, head.head) for head in heads[:_HEADS]] + heads_by_share(ways)[:_HEADS]
    looked = [(place, 0, _KEYS) for place in named] + head_runs.of_later_tokens(again, off)
    estimates = [by_edge, cuts(model, again.based[0].target, again.based[0].run, again.edits, again.rest)]
    edges, missed, without = head_runs.edges(again, estimates, looked)
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
        groups=groups,
        pairs=part_runs.pairs(again, parts, total),
        by_token=by_token,
        by_head=by_head,
        heads=[head._replace(edge=next((one for one in edges if one[:2] == head[:2]), None)) for head in heads],
        heads_run=heads_run,
        edges=edges[: again.listed],
        total=total,
        gap=total - sum(part.effect for part in parts),
        points=points,
        missed=missed,
        ways=ways,
        next=[candidate(model, base, int(i)) for i in rerun.likely(base)],
        numbers=head_runs.other_numbers(again, off, ran.runs, without, (by_head.shape, len(parts))),
        based=again.based,
        **facts,
    )
