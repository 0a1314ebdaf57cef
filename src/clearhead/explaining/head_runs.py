"""What `ch.explain` runs for heads and edges, in the rows that answer, and what the runs say of each word or rival."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from clearhead.core.axes import Array
from clearhead.explaining import rerun
from clearhead.explaining.part_runs import Again
from clearhead.explaining.rerun import EdgePlace, Rerun, kept, likely
from clearhead.explaining.why_lists import EdgeEffect, HeadEffect, OtherNumber
from clearhead.models.protocol import choices
from clearhead.watching.pieces import words

# runs with heads off, with parts hidden (by their places), and without edges
Reruns = tuple[dict[tuple[int, int], Rerun], dict[tuple[int, ...], Rerun], dict[EdgePlace, Rerun]]
_ESTIMATED, _LATER = 20, 96  # edges that each estimate names for a run; of all tokens after the answer's first


def heads(again: Again, by_head: Array) -> tuple[list[HeadEffect], Array, dict[tuple[int, int], Rerun]]:
    """The heads by what y changes by when each is off in the rows that answer, all these changes, and their runs."""
    off = rerun.each_off(again.model, again.based, by_head, 2 * again.listed)
    truths = rerun.changes_of(off, again.value, by_head.shape)
    run = [(int(layer), int(head)) for layer, head in np.argwhere(~np.isnan(truths))]
    listed = sorted(run, key=lambda place: (-abs(truths[place]), -abs(by_head[place])))[: again.listed]
    tokens = len(again.based[0].target.answer)
    others = [tokens * change for change in rerun.anywhere(again.model, listed)]
    made = zip(listed, others, strict=True)
    return [HeadEffect(*place, float(by_head[place]), float(truths[place]), x) for place, x in made], truths, off


def edges(
    again: Again, estimates: Sequence[Array], looked: Sequence[tuple[tuple[int, int], int, int]]
) -> tuple[list[EdgeEffect], bool, dict[EdgePlace, Rerun]]:
    """The edges of the rows that answer by what y changes by without each; do estimates miss the first? And all runs.

    estimates   (layers, heads, rows, keys): φ, and others; the strongest of each are run again
    looked      (head, row, how many): the largest weights of these are run again too
    """
    rows, weights = again.based[0].target.rows, again.based[0].weights
    chosen: dict[EdgePlace, None] = {}
    for each in estimates:
        order = np.argsort(-np.abs(each), axis=None, kind="stable")[:_ESTIMATED]
        places = np.transpose(np.unravel_index(order, each.shape)).tolist()
        chosen |= {
            EdgePlace(layer, head, rows[row], key): None
            for layer, head, row, key in places
            if each[layer, head, row, key]
        }
    effects, estimated = estimates[0], set(chosen)
    for (layer, head), place, count in looked:
        row = weights(layer, rows[place])[head]
        keys = [int(key) for key in np.argsort(-row)[: count + 1] if row[key] and (key or again.rest != "first")]
        chosen |= dict.fromkeys(EdgePlace(layer, head, rows[place], key) for key in keys[:count])
    made = []
    runs = rerun.edges_without(again.model, again.based, list(chosen), again.rest)
    for edge, one in zip(chosen, runs, strict=True):
        effect = float(effects[edge.layer, edge.head, edge.query - rows.start, edge.key])
        now = again.changed(one)
        made.append(EdgeEffect(*edge, weight_of(again, edge), effect, now["hidden"], now["share"], now["lead"]))
    made.sort(key=lambda edge: -abs(edge.truth))
    missed = bool(made) and EdgePlace(*made[0][:4]) not in estimated
    return made, missed, dict(zip(chosen, runs, strict=True))


def other_numbers(again: Again, reruns: Reruns, sizes: tuple[tuple[int, ...], int]) -> list[OtherNumber]:
    """What the runs say of each word of the answer, or, of a single token, of it rather than other likely ones.

    sizes   layers and heads, and how many parts there are
    """
    (off, hidden, without), target = reruns, again.based[0].target
    logits, answer, several = _logits(again), target.answer, len(target.answer) > 1
    texts = list(map(again.model.tokenizer.text, answer))
    spans = [[row for row, _ in word] for _, word in groupby(enumerate(words(texts)), lambda pair: pair[1])]
    if (several and len(spans) == 1) or (not several and (target.against is not None or len(again.based) > 1)):
        return []  # it is one word, or about two answers already
    ahead = [[i for i in row if i != token] for row, token in zip(likely(logits).tolist(), answer, strict=True)]
    asked = [(rows[0], ahead[rows[0]][0]) for rows in spans] if several else [(0, other) for other in ahead[0]]

    def said(now: Rerun) -> Array:
        if not several:
            return np.array([now.logits[answer[0]] - now.logits[other] for _, other in asked])
        sums = np.array([log_p(now, rows) for rows in spans])
        return np.asarray(sums - np.log(np.maximum(-np.expm1(sums), np.finfo(np.float64).tiny)))

    def log_p(now: Rerun, rows: list[int]) -> float:
        return float(-np.logaddexp(0.0, -now.odds[rows]).sum())

    run = kept(again.based[0], 0.0, logits, target.odds_of_each(logits))
    base = said(run)
    by_head, by_part = np.full((len(asked), *sizes[0]), np.nan), np.full((len(asked), sizes[1]), np.nan)
    for (layer, head), now in off.items():
        by_head[:, layer, head] = said(now) - base
    for places, now in hidden.items():
        if len(places) == 1:  # sentences are not told apart here
            by_part[:, places[0]] = said(now) - base
    edges: list[list[EdgeEffect]] = [[] for _ in asked]
    for edge, now in without.items():
        place = edge.query - target.rows.start
        for listed, rows, change in zip(edges, spans if several else spans * len(asked), said(now) - base, strict=True):
            if place in rows:
                share = float(np.exp(log_p(now, rows)))
                listed.append(EdgeEffect(*edge, weight_of(again, edge), np.nan, float(change), share, np.nan))
    pairs = [choices(again.model, logits[row], (answer[row], other)) for row, other in asked]
    ones, others = map(list, zip(*pairs, strict=True))
    for place, rows in enumerate(spans if several else ()):
        share = float(np.exp(log_p(run, rows)))
        ones[place] = ones[place]._replace(text="".join(texts[row] for row in rows), probability=share)
    ranked = [sorted(some, key=lambda edge: -abs(edge.truth)) for some in edges]
    return list(map(OtherNumber, ones, others, by_head, by_part, ranked))


def _logits(again: Again) -> Array:
    """What the rows that answer say, (tokens of the answer, vocabulary)."""
    target, run = again.based[0][:2]
    return np.stack([np.asarray(run.logits[row]) for row in target.rows])


def of_later_tokens(again: Again, off: dict[tuple[int, int], Rerun]) -> list[tuple[tuple[int, int], int, int]]:
    """Of each token of the answer but the first the heads that did most: (head, row, how many keys); of many, none."""
    target, places = again.based[0].target, list(off)
    changes = np.abs(np.stack([off[place].odds for place in places]) - target.odds_of_each(_logits(again)))
    order = np.argsort(-changes, axis=0, kind="stable")[: min(again.listed, _LATER // len(target.answer))]
    return [(places[place], row, 1) for row in range(1, len(target.answer)) for place in order[:, row].tolist()]


def weight_of(again: Again, edge: EdgePlace) -> float:
    """Its weight in the run without changes."""
    return float(again.based[0].weights(edge.layer, edge.query)[edge.head, edge.key])
