"""What `ch.explain` lists: parts of the text, heads and edges, each with its effect and what a run without it gives."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from clearhead.core.axes import Array
from clearhead.models.protocol import Choice


class PartEffect(NamedTuple):
    """A part of the text, its characters, and what it did to the number y.

    effect   what it did together with the rest, from all runs: above 0 where it speaks for the answer; all parts' add
             up to total − gap
    replaced the token that stands in place of the text's first one in a run; "" of all parts but the first
    hidden   what y changes by when no later token may see the part, in a run; None where it was not run
    share    the answer's probability then; where two answers are compared, that of its first token
    likeliest   the likeliest next token then
    begins   does it only begin a word, as " Mont" does? Known of the parts that the screen shows
    lead     what the lead of the answer's first token over the other one changes by, in logits
    """

    text: str
    start: int
    stop: int
    tokens: tuple[int, ...]
    effect: float
    replaced: str = ""
    hidden: float | None = None
    share: float | None = None
    likeliest: Choice | None = None
    lead: float | None = None
    begins: bool = False


class PairEffect(NamedTuple):
    """Two parts that stand in for each other: y changes much more without both than by their own changes together.

    hidden, share, likeliest   as those of a part, in a run without both
    """

    first: PartEffect
    second: PartEffect
    hidden: float
    share: float
    likeliest: Choice
    lead: float


class OtherNumber(NamedTuple):
    """Another question, answered by the same runs: one word of the answer, or the answer rather than another token.

    token, against   the word after what stands before it, and the token that it is compared with, or its runner-up
    by_head   what its number changes by when each head is off, (layers, heads)
    by_part   what it changes by when each part is hidden, (parts,); NaN where it was not run
    edges     of the rows that say the word, the strongest first; `truth` and `share` are the word's, others NaN
    """

    token: Choice
    against: Choice
    by_head: Array
    by_part: Array
    edges: "list[EdgeEffect]"


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
    lead: float  # what its lead over the other one changes by, in logits


class HeadEffect(NamedTuple):
    """One head: its share of the effect φ, and what y changes by when it is off in the rows that answer.

    anywhere   what the logarithm of the probability of as many tokens of a neutral text changes by when it is off there
    edge       its strongest of those that were run again; None for none
    """

    layer: int
    head: int
    effect: float
    truth: float
    anywhere: float = 0.0
    edge: EdgeEffect | None = None

    @property
    def needed(self) -> bool:
        """Does a neutral text lose at least half as much without it? Then any text needs it."""
        return 2 * self.anywhere <= self.truth < 0


class Trust(NamedTuple):
    """How far a list of parts says what happens when random halves of the text are hidden.

    score    the linear datamodeling score: Spearman's correlation between the sum of the kept parts' effects and y
    """

    score: float | None
    masks: int


def by_change(parts: Sequence[PartEffect]) -> list[PartEffect]:
    """Parts by how much hiding each changes the answer; then those that were not run, by their effects."""
    return sorted(parts, key=lambda one: (one.hidden is None, -abs(one.effect if one.hidden is None else one.hidden)))


def plain(value: Any) -> Any:
    """One of these, and what it holds, as a dictionary."""
    return {key: plain(x) for key, x in value._asdict().items()} if hasattr(value, "_asdict") else value
