"""What the runs of `ch.why` say of each token of an answer, or of the answer rather than other likely tokens."""

import numpy as np

from clearhead.core.axes import Array
from clearhead.explaining.part_runs import Again, candidate
from clearhead.explaining.rerun import Edge, Rerun, kept, likely
from clearhead.explaining.why_lists import EdgeEffect, OtherNumber


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
