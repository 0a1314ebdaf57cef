"""What `ch.explain` runs for heads and edges, in the rows that answer, and what the runs say of each token or rival."""

from collections.abc import Sequence

import numpy as np

from clearhead.core.axes import Array
from clearhead.explaining import rerun
from clearhead.explaining.part_runs import Again, candidate
from clearhead.explaining.rerun import Edge, Rerun, kept, likely
from clearhead.explaining.why_lists import EdgeEffect, HeadEffect, OtherNumber

_ESTIMATED = 20  # edges that each estimate names for a run


def heads(again: Again, by_head: Array) -> tuple[list[HeadEffect], Array, dict[tuple[int, int], Rerun]]:
    """The heads by what y changes by when each is off in the rows that answer, all these changes, and their runs."""
    off = rerun.each_off(again.model, again.based, by_head, 2 * again.listed, again.edits)
    truths = rerun.changes_of(off, again.value, by_head.shape)
    run = [(int(layer), int(head)) for layer, head in np.argwhere(~np.isnan(truths))]
    listed = sorted(run, key=lambda place: (-abs(truths[place]), -abs(by_head[place])))[: again.listed]
    tokens = len(again.based[0].target.answer)
    others = [tokens * change for change in rerun.anywhere(again.model, listed)]
    made = zip(listed, others, strict=True)
    return [HeadEffect(*place, float(by_head[place]), float(truths[place]), x) for place, x in made], truths, off


def edges(
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
        now = again.changed(one)
        made.append(EdgeEffect(*edge, weight_of(again, edge), effect, now["hidden"], now["share"], now["lead"]))
    made.sort(key=lambda edge: -abs(edge.truth))
    missed = bool(made) and Edge(*made[0][:4]) not in estimated
    return made, missed, dict(zip(chosen, runs, strict=True))


def other_numbers(
    again: Again,
    off: dict[tuple[int, int], Rerun],
    hidden: dict[tuple[int, ...], Rerun],
    without: dict[Edge, Rerun],
    shape: tuple[tuple[int, ...], int],
) -> list[OtherNumber]:
    """What the runs say of each token of the answer, or, of a single token, of it rather than other likely ones."""
    target = again.based[0].target
    logits, answer, several = _logits(again), target.answer, len(target.answer) > 1
    if not several and (target.against is not None or len(again.based) > 1):
        return []  # it is about two answers already
    ahead = [[i for i in row if i != token] for row, token in zip(likely(logits).tolist(), answer, strict=True)]
    asked = [(row, others[0]) for row, others in enumerate(ahead)] if several else [(0, other) for other in ahead[0]]

    def said(now: Rerun) -> Array:
        return now.odds if several else np.array([now.logits[answer[0]] - now.logits[other] for _, other in asked])

    base = said(kept(again.based[0], 0.0, logits))
    by_head, by_part = np.full((len(asked), *shape[0]), np.nan), np.full((len(asked), shape[1]), np.nan)
    for (layer, head), now in off.items():
        by_head[:, layer, head] = said(now) - base
    for places, now in hidden.items():
        if len(places) == 1:  # sentences are not told apart here
            by_part[:, places[0]] = said(now) - base
    edges: list[list[EdgeEffect]] = [[] for _ in asked]
    for edge, now in without.items():
        for listed, (row, _), change in zip(edges, asked, said(now) - base, strict=True):
            if edge.query == target.rows[row]:
                share = float(1 / (1 + np.exp(-now.odds[row])))
                listed.append(EdgeEffect(*edge, weight_of(again, edge), np.nan, float(change), share, np.nan))
    ones, others = (
        [candidate(again.model, logits[row], i) for row, i in some]
        for some in ([(row, answer[row]) for row, _ in asked], asked)
    )
    ranked = [sorted(some, key=lambda edge: -abs(edge.truth)) for some in edges]
    return list(map(OtherNumber, ones, others, by_head, by_part, ranked))


def _logits(again: Again) -> Array:
    """What the rows that answer say, (tokens of the answer, vocabulary)."""
    target, run = again.based[0][:2]
    return np.stack([np.asarray(run.logits[row]) for row in target.rows])


def of_later_tokens(again: Again, off: dict[tuple[int, int], Rerun]) -> list[tuple[tuple[int, int], int, int]]:
    """Of each token of the answer but the first the heads that did most: (head, row, how many keys)."""
    target, places = again.based[0].target, list(off)
    changes = np.abs(np.stack([off[place].odds for place in places]) - target.odds_of_each(_logits(again)))
    order = np.argsort(-changes, axis=0, kind="stable")[: again.listed]
    return [(places[place], row, 1) for row in range(1, len(target.answer)) for place in order[:, row].tolist()]


def weight_of(again: Again, edge: Edge) -> float:
    """Its weight in the run without changes."""
    return float(again.based[0].weights(edge.layer, edge.query)[edge.head, edge.key])
