"""Measures the parts of a text for `ch.explain`: hides them one by one, in pairs and in random halves, and integrates.

The integral: with α the factor on every gated key's weights, and y the number that is explained, φ_j = ∫ ∂y/∂α_j dα
along the straight line from 0 to 1, so that Σ φ_j = y(all parts) − y(no part): integrated gradients (Sundararajan et
al. 2017), the Aumann-Shapley value (1974) of this game. The derivative is a sum over edges, so the same runs give φ by
head and by edge. y is smooth in ln α, so the Gauss-Legendre points lie in ln α. They begin where y is nearly what it is
with no part: below that the model's output is noise, which stays in the gap.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.effects import Rest
from clearhead.core.state import State, share, taken
from clearhead.errors import FileError
from clearhead.explaining import rerun
from clearhead.explaining.answers import Target, goes_on, probability
from clearhead.explaining.rerun import Based, PairEffect, PartEffect, Rerun, by_change
from clearhead.explaining.texts import grouped
from clearhead.models.protocol import Attended, Choice, Each, LanguageModel, Variant
from clearhead.ops.matrix import AttentionMatrix

_POINTS = 4
_LONG, _QUESTION = 1024, 3  # tokens: a longer text with so many tokens after its parts has no integral
LOWS = 0.1, 0.03, 0.01, 1e-3, 1e-4  # the integral begins at the first α where y is near y(no part):
_NEAR = 0.05  # nearer than this share of the range of y in these runs
_SHORT = 256  # tokens that run at once in that search
_TRIED = 4  # the parts whose pairs are hidden
_MUCH = 0.25  # the least change by a pair, as a share of the total
_TWO = 0.1  # the prior strength of effects of pairs, relative to those of single parts
_PARTS = 48  # the most parts that are hidden one by one
_GROUP, _REFINED = 24, 3  # the most parts of a sentence hidden as a whole; the sentences whose parts are hidden too
_ROOM = 2**15  # tokens of all runs: if too many sentences would need more, blocks of them come first
_SHOWN = 5  # parts on the screen
_NEUTRAL = (
    "It was a quiet morning, and the people of the town went about their work as they did on every day of the week."
)
_LEAK = 1e-3  # share of the logits' range above which a change by hidden tokens is not rounding
HALVES, HALVED = 24, 2**13  # the most random halves, and the most tokens in their runs


class Again(NamedTuple):
    """What further runs need: the model, the base runs to compare with, and what to list."""

    model: LanguageModel
    based: list[Based]
    value: float
    rest: Rest
    listed: int  # heads and edges to list
    pair: tuple[int, int]  # the answer's first token and the other one
    ran: dict[tuple[tuple[int, ...], float], Rerun]  # what `hidden` ran

    def hidden(self, parts: Sequence[Sequence[int]], also: Sequence[tuple[Sequence[int], float]] = ()) -> list[Rerun]:
        """Run with each part's tokens hidden, then `also` with tokens' weights times a factor; a run is made once."""
        asked = [(tuple(sorted(part)), factor) for part, factor in (*((part, 0.0) for part in parts), *also)]
        new = [one for one in dict.fromkeys(asked) if one not in self.ran]
        self.ran.update(zip(new, rerun.hidden(self.model, self.based, new), strict=True))
        return [self.ran[one] for one in asked]

    def changed(self, one: Rerun) -> dict[str, Any]:
        """Return how a run without some of the text differs from the base run."""
        token = one.likeliest
        most, share = (float(np.exp(one.logits[i] - one.logsumexp)) for i in (token, self.pair[0]))
        likeliest = Choice(token, self.model.tokenizer.text(token), most, one.logits[token])
        share = probability(one.value) if self.based[0].target.odds else share
        return {"hidden": one.value - self.value, "share": share, "likeliest": likeliest}


Integral = tuple[Array, Array, Array]  # φ by head and key, by edge, and by key through what is no attention


def integrated(again: Again, gated: list[int], each: Each) -> tuple[Integral, float, int]:
    """Return φ summed over all targets (by edge for the first), y(all parts) − y(no part), and the number of points.

    The first token is not hidden and has no φ; in y(no part) it is replaced as in any run. A long text with a question
    gets no points, if the model can run the question's rows by themselves.
    """
    rows, config = again.based[0].target.rows, again.model.config
    sizes, last = (config.layers, config.heads), rows.start + 1
    cheap = config.shares_runs and last > _LONG and rows.start - max(gated) >= _QUESTION
    first, gated = 0 in gated, [token for token in gated if token]
    points = _POINTS if gated and not cheap else 0
    low, total, _ = begin(again, gated, LOWS if points else (), first=first)
    if not points:
        return (np.zeros((*sizes, last)), np.zeros((*sizes, len(rows), rows.stop)), np.zeros(last)), total, 0
    targets = [one.target for one in again.based]
    made = [integral(again.model, target, gated, points, low, each) for target in targets]
    by_key, beside = (np.sum([one[place][..., :last] for one in made], axis=0) for place in (0, 2))
    return (by_key, made[0][1], beside), total, points


def leak(again: Again, gated: Sequence[int]) -> tuple[float, float] | None:
    """Return how much the next token's logits change with other tokens in the hidden places, hidden and visible.

    None if hiding holds: if hidden tokens change the logits by less than a thousandth of their range.
    """
    (target, run), places = again.based[0][:2], [token for token in gated if token]
    if again.model.config.shares_runs or not places:  # in NumPy only attention mixes tokens
        return None
    ids, row, gates = target.ids, target.rows.start, np.zeros(len(target.ids))
    gates[places], others = -np.inf, {place: ids[(place + 1) % len(ids)] for place in places}
    variants = [Variant(gates), Variant(gates, ids=others), Variant(ids=others)]
    hidden, changed, seen = again.model.again(run, variants, range(row, row + 1))
    moved = float(np.abs(changed - hidden).max()), float(np.abs(seen - run.logits[row]).max())
    return moved if moved[0] > _LEAK * np.ptp(run.logits[row]) else None


def anywhere(again: Again, heads: Sequence[tuple[int, int]]) -> list[float]:
    """What ln P of as many tokens of a neutral text as the answer has changes by when each head is off there."""
    model, tokens = again.model, len(again.based[0].target.answer)
    ids = model.tokenizer.encoder.encode(_NEUTRAL).ids[: model.tokenizer.positions]
    target = Target(ids[:-1], tuple(ids[-(len(ids) // 2) :]), None, odds=False)  # of its second half
    each = again.based[0].each
    neutral = rerun.based_on(target, model.run(target.ids, each), each)
    runs = rerun.without(model, [neutral], heads)
    return [tokens * (one.value - neutral.value) / len(target.answer) for one in runs]


def begin(
    again: Again, gated: list[int], lows: Sequence[float] = LOWS, *, first: bool = False
) -> tuple[float, float, int]:
    """Return where the integral begins, y(all parts) − y(no part), and the runs; `first` replaces the first token.

    The last of `lows` is taken, without a run, if no earlier one is near. A short text runs all at once. A longer one
    bisects them, since y comes nearer to y(no part) the smaller α is.
    """
    tried = lows[:-1] if len(again.based[0].target.ids) * len(lows) <= _SHORT else ()
    nothing = [([0, *gated], 0.0)] * first + [(gated, 0.0)] * bool(lows or not first)
    runs = [*nothing, *((gated, low) for low in tried)]
    found = [one.value for one in again.hidden([], runs)]
    values = dict(zip(tried, found[len(nothing) :], strict=True))

    def near(low: float) -> bool:
        if low not in values:
            values[low] = again.hidden([], [(gated, low)])[0].value
        empty = found[len(nothing) - 1]
        return bool(abs(values[low] - empty) <= _NEAR * np.ptp([again.value, empty, *values.values()]))

    place = bisect_left(lows[:-1], True, key=near)
    return lows[place] if lows else 0.0, again.value - found[0], len(nothing) + len(values)


class Hidden(NamedTuple):
    """The effects of hiding parts of a text, each in one run.

    groups   groups of parts, such as sentences, if not every part was run alone
    runs     the runs by the places of the parts that were hidden together
    """

    parts: list[PartEffect]
    groups: list[PartEffect]
    runs: dict[tuple[int, ...], Rerun]


def hidden(again: Again, parts: Sequence[PartEffect], text: str) -> Hidden:
    """Hide each of at most 48 parts; of more, all sentences or lines, then the parts of the strongest three."""
    runs, most = dict[tuple[int, ...], Rerun](), _PARTS
    if len(again.based[0].target.ids) ** 2 <= _SHORT:  # `begin` and `weighed` too: each batch reads all weights
        gated = [token for part in parts for token in part.tokens if token]
        whole = [([0, *gated], 0.0), *((gated, low) for low in (0.0, *LOWS[:-1]))]
        halves(again, parts, HALVES, (1, HALVES), [*((part.tokens, 0.0) for part in parts), *whole])

    def strongest(groups: list[list[int]]) -> list[list[int]]:
        lists = [[token for place in group for token in parts[place].tokens] for group in groups]
        runs.update(zip(map(tuple, groups), again.hidden(lists), strict=True))
        return sorted(groups, key=lambda group: -abs(runs[tuple(group)].value - again.value))[:_REFINED]

    chosen = [[place] for place in range(len(parts))]
    if len(parts) > most:
        sentences = chosen = grouped(parts, text, _GROUP)
        size = len(again.based[0].target.ids)
        if len(sentences) > most and sum(size - parts[group[0]].tokens[0] for group in sentences) > _ROOM:
            count = len(sentences)
            blocks = [sentences[count * i // most : count * (i + 1) // most] for i in range(most)]
            best = strongest([[*chain(*block)] for block in blocks])
            chosen = [group for group in sentences if any(group[0] in block for block in best)]
            for block in best:
                if block not in chosen:
                    del runs[tuple(block)]
        chosen = [[place] for group in strongest(chosen) for place in group]
    strongest(chosen)
    made, groups = list(parts), []
    for places, one in runs.items():
        changed = again.changed(one)
        if len(places) == 1:
            made[places[0]] = parts[places[0]]._replace(**changed)
            continue
        start, stop = parts[places[0]].start, parts[places[-1]].stop
        tokens = tuple(token for place in places for token in parts[place].tokens)
        groups.append(PartEffect(text[start:stop], start, stop, tokens, 0.0, parts[places[0]].replaced, **changed))
    shown = by_change([*groups, *made])[:_SHOWN]  # find out: does the likeliest token then only begin a word?
    then = list(dict.fromkeys(one.likeliest.id for one in shown if one.likeliest))
    if tried := [token for token in then if token != again.pair[0]]:
        target, run = again.based[0][:2]
        on = dict(zip(tried, goes_on(again.model, target.rows.start + 1, run, tried), strict=True))
        for listed in (groups, made):
            for place, part in enumerate(listed):
                if part in shown and part.likeliest is not None and part.likeliest.id in on:
                    listed[place] = part._replace(begins=on[part.likeliest.id])
    return Hidden(made, sorted(groups, key=lambda group: group.start), runs)


def weighed(again: Again, ran: Hidden, total: float, *, integrated: bool) -> tuple[list[PartEffect], list[PartEffect]]:
    """Return the parts and groups with their final effects.

    An effect starts halfway between the integral and the change by hiding the part (or its share of a group's change);
    without an integral, at the latter. All are fitted to up to 24 runs with random halves hidden, and to the runs of
    the groups, or of the parts if there are no groups: a few single parts beside groups made the fit worse.
    """
    parts, places = ran.parts, range(len(ran.parts))
    shares = {token: -(group.hidden or 0.0) / len(group.tokens) for group in ran.groups for token in group.tokens}
    effects = []
    for part in parts:
        moved = sum(shares[token] for token in part.tokens) if part.hidden is None else -part.hidden
        effects.append((part.effect + moved) / 2 if integrated else moved)
    count = min(HALVES, HALVED // (again.based[0].target.rows.start + 1))
    kept, values = halves(again, parts, count, (1, count))
    chosen = {group: one for group, one in ran.runs.items() if len(group) > 1 or not ran.groups}
    alone = np.array([[place not in group for place in places] for group in chosen]).reshape(-1, len(parts))
    runs = np.append(values, [one.value for one in chosen.values()])
    fit = corrected(np.array(effects), np.vstack([kept, alone]), runs, total)
    parts = [part._replace(effect=float(effect)) for part, effect in zip(parts, fit, strict=True)]
    by_first = {part.tokens[0]: part.effect for part in parts}
    groups = [group._replace(effect=sum(by_first.get(token, 0.0) for token in group.tokens)) for group in ran.groups]
    return parts, groups


def halves(again: Again, parts: Sequence[PartEffect], count: int, seed: Any, also: Any = ()) -> tuple[Array, Array]:
    """Run random halves: return which parts are visible, each with probability ½, (count, parts), and y."""
    kept = np.random.default_rng(seed).random((count, len(parts))) < 0.5
    off = [[token for place in np.flatnonzero(~row).tolist() for token in parts[place].tokens] for row in kept]
    runs = iter(again.hidden([keys for keys in off if keys], also))
    return kept, np.array([next(runs).value if keys else again.value for keys in off])


def corrected(effects: Array, kept: Array, values: Array, total: float | None = None) -> Array:
    """Correct effects by what they miss in runs, with ridge regression; their sum stays, or becomes `total`.

    The correction may scale all effects, and may change a large effect more than a small one. What two parts do only
    together is fitted too, but counts for neither. For the sum, all are scaled by one factor, if it is within ½ and 2.
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
    """Return the weights w that minimise |y − b − x·w − u|² + λ·|w|² + λ·uᵀ·other⁻¹·u over w, b and u.

    λ is the one that best predicts rows left out one at a time, which has a closed form (Allen 1974); u models what is
    no sum of x's columns, and `other` holds its inner products of rows. O(rows³ + rows²·columns).
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
    """Find pairs that stand in for each other: hiding both changes y more than twice as much as the two single changes.

    It tries pairs of the strongest part and of parts whose single run shows less than half of their effect, if both
    effects are together more than both single changes, and large enough; and pairs with the same text.
    """
    least = _MUCH * abs(total)

    def alone(pair: tuple[PartEffect, PartEffect]) -> float:
        return sum(abs(part.hidden or 0.0) for part in pair)

    ran = sorted((part for part in parts if part.hidden is not None), key=lambda part: -abs(part.effect))
    spare = [part for part in ran[1:] if abs(part.hidden or 0.0) < abs(part.effect) / 2]
    some = combinations([*ran[:1], *spare][:_TRIED], 2)
    tried = [pair for pair in some if abs(pair[0].effect + pair[1].effect) > max(alone(pair), least / 2)]
    alike = [pair for pair in combinations(ran, 2) if pair[0].text.casefold() == pair[1].text.casefold()]
    tried = list(dict.fromkeys([*tried, *alike[:_TRIED]]))
    runs = again.hidden([(*a.tokens, *b.tokens) for a, b in tried])
    made = [PairEffect(*pair, **again.changed(one)) for pair, one in zip(tried, runs, strict=True)]
    chosen = [each for pair, each in zip(tried, made, strict=True) if abs(each.hidden) > max(2 * alone(pair), least)]
    return sorted(chosen, key=lambda pair: -abs(pair.hidden))


_LEAST = 1e-3  # the least divisor: a weight, or 1 minus a weight
_TOGETHER = 512  # the most tokens of points that run at once


def integral(
    model: LanguageModel,
    target: Target,
    gated: Sequence[int],
    points: int,
    low: float,
    each: Each,
) -> Integral:
    """Integrate φ from α = `low` to 1 at `points` points, each a forward and a backward pass; O(tokens) memory.

    Returns φ by head and key over all queries, (layers, heads, tokens), 0 for a key without a gate; φ of the edges from
    the rows that predict the answer, (layers, heads, rows, tokens); and φ by key through modules other than attention
    that mix tokens, (tokens,). Raises FileError if derivatives are NaN or infinite.
    """
    nodes, weights = np.polynomial.legendre.leggauss(points)
    logs, widths = np.log(low) * (1 - nodes) / 2, -np.log(low) * weights / 2
    tokens, sizes = len(target.ids), (model.config.layers, model.config.heads)
    inside = np.zeros(tokens)
    inside[list(gated)] = 1
    shapes = (*sizes, tokens), (*sizes, len(target.rows), tokens), (tokens,)
    by_key, by_edge, beside = map(np.zeros, shapes)
    step = max(1, _TOGETHER // tokens)
    for start in range(0, points, step):
        variants = [Variant(inside * log) for log in logs[start : start + step]]
        asked = (target.ids, variants, target.rows, lambda rows: target.value(rows)[1])
        for layer, place, part in model.differentiated(*asked, each=each):
            width = widths[start + place]
            heads = len(part.q)
            by_key[layer, :heads] += width * part.by_gates * inside
            by_edge[layer, :heads] += width * edges(part, target.rows) * inside
            if part.beside.size:
                beside += width * part.beside * inside
    if not np.isfinite(by_key).all():
        raise FileError(f"{model.name}: its derivatives are NaN or infinite: its weights are damaged, or too large.")
    return by_key, by_edge, beside


def cuts(again: Again) -> Array:
    """Estimate, to first order, the change of y without each edge of the rows that answer, for the first target.

    The result is (layers, heads, rows, tokens). An edge's weight a moves to the first token, or to all other keys in
    proportion to their weights, which divides its derivative by 1 − a.
    """
    target, run, _, _, weights = again.based[0][:5]
    result = np.zeros((again.model.config.layers, again.model.config.heads, len(target.rows), len(target.ids)))
    slope, asked = (lambda rows: target.value(rows)[1]), (target.ids, [Variant()], target.rows)
    for layer, _, part in again.model.differentiated(*asked, slope, run):
        slopes = edges(part, target.rows)
        a = np.stack([weights(layer, row) for row in target.rows], axis=1)
        if again.rest == "first" and part.rules.get("sinks") is None:
            result[layer, : len(a)] = a * slopes[..., :1] / np.maximum(a[..., :1], _LEAST) - slopes
        else:
            result[layer, : len(a)] = -slopes / np.maximum(1 - a, _LEAST)
    return result


def edges(part: Attended, rows: range) -> Array:
    """Return a_ij·(g_i·v_j − g_i·o_i), the derivative by each edge's logit, for some rows, (heads, rows, keys).

    With gates, the edges on the rows' own keys, which have no gate, are 0.
    """
    before = part.k.shape[1] - part.q.shape[1]
    some = slice(rows.start - before, rows.stop - before)
    rules = part.rules | {"query_offset": part.rules.get("query_offset", 0) + some.start}
    if "query_segments" in rules:
        rules["query_segments"] = rules["query_segments"][some]
    matrix = AttentionMatrix(part.q[:, some], part.k, **rules)
    earlier = State(*(x.astype(np.float64) for x in cast("State", matrix.observe(logsumexp=True).state)))
    left = share(np, earlier, taken(part.state, slice(None), some))  # the earlier keys' share of the whole row
    weights = np.asarray(matrix[:], np.float64) * left[..., None]
    by, values = part.g[:, some].astype(np.float64), np.repeat(part.v, len(part.q) // len(part.v), axis=0)
    along = np.einsum("hnd,hnd->hn", by, part.output[:, some])
    return np.asarray(weights * (np.einsum("hnd,hmd->hnm", by, values) - along[..., None]))
