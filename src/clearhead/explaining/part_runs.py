"""What `ch.why` runs for the parts of a text: the integral, parts hidden one by one and in pairs, random halves."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core.axes import Array
from clearhead.core.effects import Rest
from clearhead.core.rule_values import whole_number
from clearhead.errors import check_known
from clearhead.explaining import rerun
from clearhead.explaining.integral import integral
from clearhead.explaining.rerun import Based
from clearhead.explaining.text_parts import Part
from clearhead.explaining.why_lists import Candidate, PairEffect, PartEffect
from clearhead.models.protocol import Each, LanguageModel, probabilities

_POINTS, _MOST_POINTS = 4, 16
_LONG, _QUESTION = 1024, 3  # tokens: a longer text, with so many after its parts, has no integral
LOWS = 0.1, 0.03, 0.01, 1e-3, 1e-4  # the integral begins at the first of them where y is near y(nothing):
_NEAR = 0.05  # nearer than this share of the range that y has on the way
ANSWERING = 64  # runs of the rows after all parts alone, where there is no integral
_TRIED = 4  # parts of which every two are hidden together
_MUCH = 0.25  # of the total: what two parts together have to change
_TWO = 0.1  # what two parts do only together may do, as a share of what each of them may
_GAP = 0.05  # of the total: points double while the parts' sum misses more


class Again(NamedTuple):
    """What is run again, and what the results are compared with."""

    model: LanguageModel
    based: list[Based]
    edits: tuple[Edit, ...]
    value: float
    rest: Rest
    listed: int  # heads and edges to list
    pair: tuple[int, int]  # the answer's first token and the other one

    def lead(self, logits: dict[int, float]) -> float:
        """What the lead of the first of the pair changes by, in logits."""
        base, (one, other) = self.based[0].run.logits[self.based[0].target.rows.start], self.pair
        return logits[one] - logits[other] - (float(base[one]) - float(base[other]))

    def changed(self, one: rerun.Rerun) -> dict[str, Any]:
        """What a run without some of the text says of it."""
        token = one.likeliest
        likeliest = Candidate(token, self.model.text(token), one.share(token), one.logits[token])
        now = {"share": one.share(self.pair[0]), "likeliest": likeliest, "lead": self.lead(one.logits)}
        return {"hidden": one.value - self.value, **now}


EFFORTS = {"quick": 0, "careful": 48}


def read_effort(effort: Any) -> int:
    """How many runs with random halves hidden; UnknownNameError for another word, RuleError for no whole number."""
    if not isinstance(effort, str):
        return whole_number("effort", effort, 0)
    check_known("effort", [effort], EFFORTS)
    return EFFORTS[effort]


def candidate(model: LanguageModel, logits: Array, token: int) -> Candidate:
    """A token with its share of the next-token probabilities."""
    return Candidate(token, model.text(token), float(probabilities(logits)[token]), float(logits[token]))


def read_counts(points: Any, verify: Any, effort: Any) -> tuple[int | None, int, int]:
    """How many points, None where the text decides, how many parts to verify, and how many random halves."""
    asked = None if points is None else whole_number("points", points, 0)
    return asked, whole_number("verify", verify, 0), read_effort(effort)


def points_for(model: LanguageModel, asked: int | None, parts: Sequence[Part], tokens: int) -> int:
    """How many points. Of a long text with a question none, if the model runs the question's rows by themselves."""
    after = tokens - 1 - max(token for part in parts for token in part.tokens)
    cheap = model.exact_heads and tokens > _LONG and after >= _QUESTION
    return asked if asked is not None else 0 if cheap else _POINTS


def integrated(again: Again, gated: list[int], points: int, each: Each) -> tuple[Array, Array, float, int]:
    """φ by head and key of all targets together and by edge of the first, y(everything) − y(nothing), the points."""
    rows, sizes = again.based[0].target.rows, (again.model.config.layers, again.model.config.heads)
    last, (low, total) = rows.start + 1, begin(again, gated, LOWS if points else ())
    if not points:
        return np.zeros((*sizes, last)), np.zeros((*sizes, len(rows), rows.stop)), total, 0
    while True:
        targets = [one.target for one in again.based]
        made = [integral(again.model, target, gated, points, low, again.edits, each) for target in targets]
        by_key = np.sum([one.heads[:, :, :last] for one in made], axis=0)
        if abs(total - float(by_key.sum())) <= _GAP * abs(total) or points >= _MOST_POINTS:
            return by_key, made[0].edges, total, points
        points = min(2 * points, _MOST_POINTS)


def begin(again: Again, gated: list[int], lows: Sequence[float] = LOWS) -> tuple[float, float]:
    """Where the integral begins, and y(everything) − y(nothing)."""
    low, values = 0.0, [again.value]
    for low in (0.0, *lows):
        values.append(rerun.hidden(again.model, again.based, [gated], again.edits, [low])[0].value)
        if low and abs(values[-1] - values[1]) <= _NEAR * np.ptp(values):
            break
    return low, again.value - values[1]


def answering(again: Again, parts: list[PartEffect], total: float) -> list[PartEffect]:
    """Effects from runs of the rows after all parts: each part hidden from these alone, and random halves of them."""
    first = 1 + max(token for part in parts for token in part.tokens)
    runs = rerun.hidden(again.model, again.based, [part.tokens for part in parts], again.edits, first=first)
    alone = [part._replace(effect=again.value - one.value) for part, one in zip(parts, runs, strict=True)]
    return fitted(again, alone, ANSWERING, first, total)


def hidden(again: Again, parts: list[PartEffect], count: int) -> tuple[list[PartEffect], dict[int, rerun.Rerun]]:
    """The parts, the strongest of them hidden in a run of their own; and these runs, by the part's place."""
    strongest = sorted(range(len(parts)), key=lambda place: -abs(parts[place].effect))[:count]
    runs = rerun.hidden(again.model, again.based, [parts[place].tokens for place in strongest], again.edits)
    result = list(parts)
    for place, one in zip(strongest, runs, strict=True):
        result[place] = parts[place]._replace(**again.changed(one))
    return result, dict(zip(strongest, runs, strict=True))


def halves(
    again: Again, parts: Sequence[PartEffect], count: int, seed: Any, first: int | None = None
) -> tuple[Array, Array]:
    """Which parts are seen, each with probability ½, (count, parts), and y of these runs (from row `first` on)."""
    kept = np.random.default_rng(seed).random((count, len(parts))) < 0.5
    off = [[token for place in np.flatnonzero(~row).tolist() for token in parts[place].tokens] for row in kept]
    runs = iter(rerun.hidden(again.model, again.based, [keys for keys in off if keys], again.edits, first=first))
    return kept, np.array([next(runs).value if keys else again.value for keys in off])


def fitted(
    again: Again, parts: list[PartEffect], count: int, first: int | None = None, total: float | None = None
) -> list[PartEffect]:
    """The effects, corrected by so many runs with random halves hidden, from row `first` on; see `corrected`."""
    ran = halves(again, parts, count, (int(first is None), count), first)
    effects = corrected(np.array([part.effect for part in parts]), *ran, total)
    return [part._replace(effect=float(effect)) for part, effect in zip(parts, effects, strict=True)]


def corrected(effects: Array, kept: Array, values: Array, total: float | None = None) -> Array:
    """Effects and what they miss in runs, by ridge regression; their sum stays, or becomes `total`.

    They may miss a factor on all of them, and more of a part the larger its effect is. What two parts do only together
    is fitted as well, and belongs to neither. For the sum one factor is put on all, but none below ½ or above 2.
    """
    seen = 2.0 * kept - 1
    sizes = np.abs(effects) + np.abs(effects).mean()
    sizes /= np.linalg.norm(sizes) or 1.0
    along = effects / ((seen @ effects).std() or 1.0)
    single = seen * sizes
    missed = values - kept @ effects
    weights = ridge(np.column_stack([single, seen @ along]), missed, _TWO * (single @ single.T) ** 2)
    made = effects + 2 * (sizes * weights[:-1] + along * weights[-1])
    scale = (effects.sum() if total is None else total) / (made.sum() or np.inf)
    return np.asarray(made * (scale if 0.5 <= scale <= 2 else 1.0))


def ridge(x: Array, y: Array, other: Array) -> Array:
    """The weights w of the least |y − b − x·w − u|² + λ·|w|² + λ·uᵀ·other⁻¹·u, u what is no sum of x's columns.

    λ is the one that foretells best each row that is left out, which has a closed form (Allen 1974); `other` are inner
    products of rows. O(rows³ + rows²·columns).
    """
    x, rest, middle = x - x.mean(axis=0), y - y.mean(), np.eye(len(y)) - 1 / len(y)
    sizes, turned = np.linalg.eigh(x @ x.T + middle @ other @ middle)
    tried = []
    for strength in np.geomspace(0.03, 30, 10):
        shares = sizes / (sizes + strength)
        left = np.maximum(1 - (turned**2) @ shares - 1 / len(y), 1e-12)
        missed = (rest - turned @ (shares * (turned.T @ rest))) / left
        tried.append((float(missed @ missed), strength))
    return np.asarray(x.T @ (turned @ (turned.T @ rest / (sizes + min(tried)[1]))))


def pairs(again: Again, parts: Sequence[PartEffect], total: float) -> list[PairEffect]:
    """Pairs that stand in for each other: y changes more than twice as much without both as by both changes together.

    Tried are the strongest part and the next ones whose own run changes less than half of their effect.
    """
    ran = sorted((part for part in parts if part.hidden is not None), key=lambda part: -abs(part.effect))
    spare = [part for part in ran[1:] if abs(part.hidden or 0.0) < abs(part.effect) / 2]
    tried = list(combinations([*ran[:1], *spare][:_TRIED], 2))
    runs = rerun.hidden(again.model, again.based, [(*a.tokens, *b.tokens) for a, b in tried], again.edits)
    made = [PairEffect(*pair, **again.changed(one)) for pair, one in zip(tried, runs, strict=True)]
    alone = [sum(abs(part.hidden or 0.0) for part in pair) for pair in tried]
    least = _MUCH * abs(total)
    chosen = [pair for pair, each in zip(made, alone, strict=True) if abs(pair.hidden) > max(2 * each, least)]
    return sorted(chosen, key=lambda pair: -abs(pair.hidden))
