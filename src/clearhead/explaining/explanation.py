"""`Explanation` is the result of `ch.explain`, as data; the terminal, the page and the JSON are views of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array, brief
from clearhead.core.effects import spearman
from clearhead.core.rule_values import whole_number
from clearhead.digits import significant
from clearhead.explaining import part_runs, why_page
from clearhead.explaining.answers import decides, probability
from clearhead.explaining.attribution import Way, ways
from clearhead.explaining.head_steps import HeadSteps
from clearhead.explaining.part_runs import Again
from clearhead.explaining.rerun import EdgeEffect, HeadEffect, PairEffect, PartEffect, Rerun, by_change, plain
from clearhead.explaining.steps import steps_of_text
from clearhead.explaining.why_words import (
    CARRIES,
    causes_table,
    conclusion,
    gap_of,
    leaks,
    most_likely,
    parts_table,
    question,
    shared_by,
)
from clearhead.loading import load
from clearhead.models.model import Model
from clearhead.models.protocol import Choice, LanguageModel, Token
from clearhead.models.tokenizer import Reading
from clearhead.tables import Table, Tabular
from clearhead.view import images
from clearhead.view.container import Document
from clearhead.view.page import Framing
from clearhead.words import Language, say

_SHOWN = 8  # parts and heads that a notebook shows


class Rivals(NamedTuple):
    """The answer that is explained, and the answer to compare it with.

    token, against   their first tokens
    other            the text of the other answer, or of the runner-up
    compared         is y the lead over the other answer?
    value            y, in natural logarithms
    """

    answer: str
    token: Choice
    other: str
    against: Choice
    compared: bool
    value: float

    @property
    def lead(self) -> float:
        """The logit of the answer's first token minus that of the other answer's."""
        return self.token.logit - self.against.logit


class Estimate(NamedTuple):
    """What the integral and all runs say about every token and head, in natural logarithms.

    by_token    (tokens,): how much y falls without the token's part or sentence, shared equally by its tokens
    by_head     (layers, heads): φ, from the integral
    heads_run   (layers, heads): how much y changes with each head off; NaN where it was not run
    total       y with all parts minus y with none of them
    gap         total minus the sum of the parts' effects
    points      how many points the integral has; 0 without an integral
    """

    by_token: Array
    by_head: Array
    heads_run: Array
    total: float
    gap: float
    points: int


class Trust(NamedTuple):
    """How well the parts' effects predict runs in which random halves of the text are hidden.

    score    the linear datamodeling score: Spearman's correlation between the sum of the visible parts' effects and y
    """

    score: float | None
    masks: int


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Explanation(Tabular, Framing):
    """Why an answer follows a text; made by `explain`. `print` shows what the terminal shows.

    y is ln P − ln(1 − P) of the answer's probability P, or, if two answers are compared, the lead of the first in
    natural logarithms. Each part, head and edge has the change of y in a run without it, which is below 0 if it spoke
    for the answer. `ranked` lists the parts by that change.

    >>> import clearhead as ch
    >>> found = ch.explain("humpty dumpty sat on")
    >>> found.answer, found.ranked[0].text, found.strongest[:2]
    (' a', 'dumpty', (0, 7))
    """

    model: LanguageModel
    prompt: Any  # the text or the messages, as given
    reading: Reading  # what the model read (messages in its template), and its tokens
    rivals: Rivals
    next: Sequence[Choice]  # the likeliest next tokens, the likeliest first
    parts: list[PartEffect]  # in the order of the text
    groups: list[PartEffect]  # sentences hidden as a whole, if there were too many parts to run each
    pairs: list[PairEffect]  # parts that stand in for each other, the strongest pair first
    heads: list[HeadEffect]  # those whose run changed most first
    edges: list[EdgeEffect]  # those whose run changed most first
    reruns: tuple[dict[Any, Rerun], ...] = field(repr=False)  # the runs by heads off, by parts hidden, by edges cut
    estimate: Estimate
    sinks: int  # heads with over half of their weight on the first token, in the row that answers
    leak: tuple[float, float] | None  # if hiding leaks: how much hidden, and visible, tokens move the logits
    again: Again = field(repr=False)  # what further runs need

    def __repr__(self) -> str:
        facts = {"": repr(self.text), "answer": repr(self.answer), "value": significant(self.value)}
        return brief("Explanation", facts | {"parts": len(self.parts)}).replace("( ", "(")

    def __str__(self) -> str:
        return str(load("report.answered").as_text(self))

    def _tables(self, language: Language) -> list[Table]:
        heads = self.heads[:_SHOWN]
        tables = parts_table(self, language, _SHOWN), causes_table(self, language, "carried", heads)
        opening = Table(question(self, language), notes=[*leaks(self, language), most_likely(self, language)])
        said, notes = conclusion(self, language), [gap_of(self, language)]
        return [opening, *tables, Table("", notes=[*said, *notes, say(language, "whole page")])]

    @property
    def text(self) -> str:
        """The text that the model read."""
        return self.reading.text

    @property
    def tokens(self) -> list[Token]:
        """The tokens of the text."""
        return self.reading.tokens

    @property
    def answer(self) -> str:
        """The answer's text."""
        return self.rivals.answer

    @property
    def value(self) -> float:
        """The number y, in natural logarithms."""
        return self.rivals.value

    @property
    def way(self) -> Way | None:
        """What each part of the model adds to the logit of the answer's first token; None if they do not add up."""
        return next(iter(self.ways), None)

    @property
    def ways(self) -> list[Way]:
        """The ways to the first tokens of both answers; empty for a model that runs in PyTorch."""
        run, row = self.again.based[0].run, self.again.based[0].target.rows.start
        both = self.rivals.token, self.rivals.against
        return ways(self.model, run, row, both) if isinstance(self.model, Model) else []

    @property
    def sink(self) -> bool:
        """Do at least half of all heads rest on the first token? If so, the weight of a cut edge moves there."""
        return 2 * self.sinks >= self.estimate.by_head.size

    @property
    def ranked(self) -> list[PartEffect]:
        """The parts, or sentences that were hidden as a whole, by how much hiding each changes the answer."""
        inside = {token for group in self.groups for token in group.tokens}
        return by_change([*self.groups, *(part for part in self.parts if part.tokens[0] not in inside)])

    @property
    def probability(self) -> float:
        """The answer's probability; if two answers are compared, that of its first token."""
        return self.rivals.token.probability if self.rivals.compared else probability(self.value)

    @property
    def strongest(self) -> HeadEffect:
        """The head without which y falls most."""
        return min(self.heads, key=lambda head: head.truth)

    @property
    def carrier(self) -> HeadEffect | None:
        """The strongest head among those that not every text needs, or None.

        It takes at least a tenth of the answer's probability, and a tenth of what hiding the strongest part takes.
        """

        def takes(change: float) -> Array:
            left = 0.0 if self.rivals.compared else probability(self.value + change) - probability(self.value)
            return -np.array([change, left])

        least = CARRIES * takes(min((part.hidden or 0.0 for part in self.ranked), default=0.0))
        found = [one for one in self.heads if one.truth < 0 and not one.needed and (takes(one.truth) >= least).all()]
        found = [one for one in found if self.rivals.compared or decides(self.value, one.truth)]
        return min(found, key=lambda head: head.truth, default=None)

    def steps(
        self, layer: int | None = None, head: int | None = None, token: int | str | None = None, *, count: int = 5
    ) -> HeadSteps:
        """Show one token's attention in one head, step by step.

        layer, head   from 0; None: for the last token the head that carries the answer, or else the strongest; for
                      another token the head without which its likeliest next token changes most
        token         a position (negative counts from the end) or a word of the text; None: the last
        count         how many next tokens to list

        Returns a HeadSteps: `trace` with every intermediate in float64, `row` (the token alone), `heads()`.
        Raises SelectionError for a layer, head or token that does not exist, RuleError for a model whose projections
        have unknown names. O(tokens²) memory for the head's numbers.

        >>> import clearhead as ch
        >>> ch.explain("humpty dumpty sat on").steps(0, 7).trace.weights.shape
        (4, 4)
        """
        where: dict[str, Any] = {"layer": layer, "head": head, "token": token}
        best, change = self.carrier or self.strongest, None
        if all(value is None for value in where.values()):
            where |= {"layer": best.layer, "head": best.head}
            own = self.answer == self.next[0].text and not self.rivals.compared
            change = best.truth if own else None
        made = steps_of_text(self.reading, self.model, **where, count=count)
        return made if change is None else replace(made, change=change, chosen=(True, True))

    def trust(self, masks: int = 16, *, seed: int = 0) -> Trust:
        """Measure how well the parts' effects predict `masks` runs that hide each part with probability ½.

        >>> import clearhead as ch
        >>> ch.explain("mary had a little").trust(8).score > 0
        True
        """
        seed = whole_number("seed", seed, 0)
        kept, ran = part_runs.halves(self.again, self.parts, whole_number("masks", masks, 1), seed)
        effects = np.array([part.effect for part in self.parts])
        return Trust(spearman((kept @ effects).tolist(), ran.tolist()), len(ran))

    def plot(self, *, count: int = 8, ax: Any = None) -> Any:
        """Plot what is left of the answer without each of the first `count` parts (extra `plot`); returns the axes.

        Bars show the answer's probability in percent, as on the screen, and a dashed line shows it for the whole text;
        if two answers are compared, they show y. `ax` are matplotlib axes to draw on; None makes new ones. Raises
        MissingExtraError without matplotlib.

        >>> import clearhead as ch
        >>> len(ch.explain("mary had a little").plot().patches)
        3
        """
        parts = [part for part in self.ranked if part.hidden is not None][: whole_number("count", count, 1)]
        numbers, label = [*(self.value + (part.hidden or 0.0) for part in parts), self.value], "y"
        if not self.rivals.compared:
            tokens, label = shared_by(self), "the answer's probability without the part, in %"
            numbers = [100 * probability(y, tokens) for y in numbers]
        ax = images.axes() if ax is None else ax
        ax.barh(range(len(parts)), numbers[:-1], color="#7a5fb5")
        ax.axvline(numbers[-1], color="0.2", linestyle="--", linewidth=1)
        ax.set_yticks(range(len(parts)), [images.label(part.text) for part in parts])
        ax.invert_yaxis()
        ax.set(title=question(self, "en"), xlabel=label, xlim=None if self.rivals.compared else (0, 100))
        return ax

    def _document(self, language: Language) -> Document:
        return why_page.document(self, language)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain numbers, lists and strings."""
        asked, told = self.rivals, self.estimate
        listed = ("groups", "pairs", "heads", "edges", "next")
        return {
            "model": {"name": self.model.name, **self.model.config.facts()},
            "text": self.text,
            "tokens": [token._asdict() for token in self.tokens],
            **{name: getattr(asked, name) for name in ("answer", "other", "compared", "value")},
            "token": asked.token._asdict(),
            "against": asked.against._asdict(),
            "lead": asked.lead,
            "parts": [plain(part) for part in by_change(self.parts)],
            **{name: [plain(each) for each in getattr(self, name)] for name in listed},
            "conclusion": conclusion(self, "en"),
            **{name: getattr(told, name) for name in ("total", "gap", "points")},
            "sinks": self.sinks,
            "leak": self.leak,
            "by_token": told.by_token.tolist(),
            "by_head": told.by_head.tolist(),
            "layers": told.by_head.sum(axis=1).tolist(),
            "ways": [each.to_json() for each in self.ways],
        }
