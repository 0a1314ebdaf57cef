"""What `ch.explain` runs for the parts of a text: parts hidden one by one and in pairs, random halves, the integral.

The integral: with α the factor on every gated key's weights, and y the number that is explained, φ_j = ∫ ∂y/∂α_j dα
along the straight way from 0 to 1, so that Σ φ_j = y(everything) − y(nothing of it): integrated gradients (Sundararajan
et al. 2017), the value of Aumann and Shapley (1974) of this game. The derivative is a sum over edges, so that the same
runs give φ by head and by edge. y is smooth in ln α, and there the points of Gauss and Legendre lie; they begin where y
is nearly what it is with nothing of the text: what a model does with less than that is noise, and stays in the gap.
"""

from collections.abc import Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.effects import Rest
from clearhead.errors import FileError
from clearhead.explaining import rerun
from clearhead.explaining.answers import Target, goes_on, probability
from clearhead.explaining.rerun import Based, PairEffect, PartEffect, Rerun, by_change
from clearhead.explaining.texts import grouped
from clearhead.models.protocol import Choice, Each, LanguageModel, Variant
from clearhead.models.variants import edges

_POINTS = 4
_LONG, _QUESTION = 1024, 3  # tokens: a longer text, with so many after its parts, has no integral
LOWS = 0.1, 0.03, 0.01, 1e-3, 1e-4  # the integral begins at the first of them where y is near y(nothing):
_NEAR = 0.05  # nearer than this share of the range that y has on the way
_SHORT = 256  # tokens that run at once to find it
_TRIED = 4  # parts of which every two are hidden together
_MUCH = 0.25  # of the total: what two parts together have to change
_TWO = 0.1  # what two parts do only together may do, as a share of what each of them may
_PARTS = 48  # that are hidden one by one at most
_GROUP, _REFINED = 24, 3  # parts of a sentence that is hidden as a whole; such sentences whose parts are hidden too
_ROOM = 2**15  # tokens of all runs: where more sentences than parts may be hidden would take more, blocks come first
_SHOWN = 5  # parts on the screen
_LEAK = 1e-3  # of the range of the logits: a change by hidden tokens that is no rounding
HALVES, HALVED = 24, 2**13  # random halves at most, and the tokens of their runs


class Again(NamedTuple):
    """What is run again, and what the results are compared with."""

    model: LanguageModel
    based: list[Based]
    value: float
    rest: Rest
    listed: int  # heads and edges to list
    pair: tuple[int, int]  # the answer's first token and the other one

    def changed(self, one: Rerun) -> dict[str, Any]:
        """What a run without some of the text says of it."""
        token = one.likeliest
        most, share = (float(np.exp(one.logits[i] - one.logsumexp)) for i in (token, self.pair[0]))
        likeliest = Choice(token, self.model.tokenizer.text(token), most, one.logits[token])
        share = probability(one.value) if self.based[0].target.odds else share
        return {"hidden": one.value - self.value, "share": share, "likeliest": likeliest}


Integral = tuple[Array, Array, Array]  # φ by head and key, by edge, and by key through what is no attention


def integrated(again: Again, gated: list[int], each: Each) -> tuple[Integral, float, int]:
    """φ of all targets together, by edge of the first; y(everything) − y(nothing); the points.

    The first token is not hidden, so that it has no φ; in y(nothing) it is replaced as in any run. Of a long text with
    a question there are no points, if the model runs the question's rows by themselves.
    """
    rows, config = again.based[0].target.rows, again.model.config
    sizes, last = (config.layers, config.heads), rows.start + 1
    cheap = config.shares_runs and last > _LONG and rows.start - max(gated) >= _QUESTION
    first, gated = 0 in gated, [token for token in gated if token]
    points = _POINTS if gated and not cheap else 0
    low, total = begin(again, gated, LOWS if points else (), first=first)
    if not points:
        return (np.zeros((*sizes, last)), np.zeros((*sizes, len(rows), rows.stop)), np.zeros(last)), total, 0
    targets = [one.target for one in again.based]
    made = [integral(again.model, target, gated, points, low, each) for target in targets]
    by_key, beside = (np.sum([one[place][..., :last] for one in made], axis=0) for place in (0, 2))
    return (by_key, made[0][1], beside), total, points


def leak(again: Again, gated: Sequence[int]) -> tuple[float, float] | None:
    """What other tokens in places that are hidden, and in the same places seen, change the next token's logits by.

    None where hiding holds: where it is less than a thousandth of the range of the logits.
    """
    (target, run), places = again.based[0][:2], [token for token in gated if token]
    if again.model.config.shares_runs or not places:  # in NumPy nothing but attention mixes tokens
        return None
    ids, row, gates = target.ids, target.rows.start, np.zeros(len(target.ids))
    gates[places], others = -np.inf, {place: ids[(place + 1) % len(ids)] for place in places}
    variants = [Variant(gates), Variant(gates, ids=others), Variant(ids=others)]
    hidden, changed, seen = again.model.again(run, variants, range(row, row + 1))
    moved = float(np.abs(changed - hidden).max()), float(np.abs(seen - run.logits[row]).max())
    return moved if moved[0] > _LEAK * np.ptp(run.logits[row]) else None


def begin(again: Again, gated: list[int], lows: Sequence[float] = LOWS, *, first: bool = False) -> tuple[float, float]:
    """Where the integral begins, and y(everything) − y(nothing), in which also the `first` token is replaced.

    The last of `lows` is taken where none before it is near, without a run. Those of a short text run at once.
    """
    tried = [([0, *gated], 0.0)] * first + [(gated, low) for low in (0.0, *lows[:-1]) if lows or not first]
    step, values = max(1, _SHORT // len(again.based[0].target.ids)), list[float]()
    starts = [0, *range(1 + first if step < len(tried) else step, len(tried), step)]
    for some in (tried[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)):
        runs = rerun.hidden(again.model, again.based, *map(list, zip(*some, strict=True)))
        for (_, low), one in zip(some, runs, strict=True):
            values.append(one.value)
            if low and abs(one.value - values[first]) <= _NEAR * np.ptp([again.value, *values[first:]]):
                return low, again.value - values[0]
    return lows[-1] if lows else 0.0, again.value - values[0]


class Hidden(NamedTuple):
    """What hiding parts of a text did, each in a run of its own.

    groups   of several parts each, such as sentences, where not every part was run alone
    runs     by the places of the parts that were hidden together
    """

    parts: list[PartEffect]
    groups: list[PartEffect]
    runs: dict[tuple[int, ...], Rerun]


def hidden(again: Again, parts: Sequence[PartEffect], text: str) -> Hidden:
    """Hide each of at most 48 parts; of more, all sentences or lines, then the parts of the three that did most."""
    runs: dict[tuple[int, ...], Rerun] = {}
    most = _PARTS

    def strongest(groups: list[list[int]]) -> list[list[int]]:
        new = [tuple(group) for group in groups if tuple(group) not in runs]
        lists = [[token for place in group for token in parts[place].tokens] for group in new]
        runs.update(zip(new, rerun.hidden(again.model, again.based, lists), strict=True))
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
    shown = by_change([*groups, *made])[:_SHOWN]  # does the likeliest token without it only begin a word?
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
    """The parts and groups with their effects after all runs.

    They begin halfway between the integral and what hiding the part, or its share of a group, did; without an integral
    at the latter. They are fitted to up to 24 runs with random halves hidden, and to those of the groups, or where
    there are none of the parts: a few parts alone beside groups made the fit worse.
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


def halves(again: Again, parts: Sequence[PartEffect], count: int, seed: Any) -> tuple[Array, Array]:
    """Which parts are seen, each with probability ½, (count, parts), and y of these runs."""
    kept = np.random.default_rng(seed).random((count, len(parts))) < 0.5
    off = [tuple(token for place in np.flatnonzero(~row).tolist() for token in parts[place].tokens) for row in kept]
    new = list(dict.fromkeys(keys for keys in off if keys))  # of few parts the same halves come again
    runs = rerun.hidden(again.model, again.based, new)
    values = {keys: one.value for keys, one in zip(new, runs, strict=True)} | {(): again.value}
    return kept, np.array([values[keys] for keys in off])


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

    Tried are the strongest part and the next ones whose own run changes less than half of their effect, and parts that
    say the same.
    """
    ran = sorted((part for part in parts if part.hidden is not None), key=lambda part: -abs(part.effect))
    spare = [part for part in ran[1:] if abs(part.hidden or 0.0) < abs(part.effect) / 2]
    alike = [pair for pair in combinations(ran, 2) if pair[0].text.casefold() == pair[1].text.casefold()]
    tried = list(dict.fromkeys([*combinations([*ran[:1], *spare][:_TRIED], 2), *alike[:_TRIED]]))
    runs = rerun.hidden(again.model, again.based, [(*a.tokens, *b.tokens) for a, b in tried])
    made = [PairEffect(*pair, **again.changed(one)) for pair, one in zip(tried, runs, strict=True)]
    alone = [sum(abs(part.hidden or 0.0) for part in pair) for pair in tried]
    least = _MUCH * abs(total)
    chosen = [pair for pair, each in zip(made, alone, strict=True) if abs(pair.hidden) > max(2 * each, least)]
    return sorted(chosen, key=lambda pair: -abs(pair.hidden))


_LEAST = 1e-3  # of what a weight, or what it leaves, is taken for
_TOGETHER = 1024  # tokens of all points that run at once


def integral(
    model: LanguageModel,
    target: Target,
    gated: Sequence[int],
    points: int,
    low: float,
    each: Each,
) -> Integral:
    """φ from α = `low` to 1 at so many points, each a forward and a backward pass; O(tokens) memory.

    Returns φ by head and key, of all queries, (layers, heads, tokens), 0 for a key that has no gate; of the edges
    from the rows that say the answer, (layers, heads, rows, tokens); and by key through what mixes tokens beside
    attention, (tokens,). Raises FileError where derivatives are NaN or infinite.
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
    """What y changes by without each edge of the first target's rows that answer, to first order.

    The result is (layers, heads, rows, tokens). An edge's weight a goes to the first token, or to all others by theirs,
    which divides its derivative by 1 − a.
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
