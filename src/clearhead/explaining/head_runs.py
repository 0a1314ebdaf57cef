"""What `ch.why` runs for heads and edges: each head off, the strongest edges taken away, in the rows that answer."""

from collections.abc import Sequence

import numpy as np

from clearhead.core.axes import Array
from clearhead.explaining import rerun
from clearhead.explaining.other_numbers import weight_of
from clearhead.explaining.part_runs import Again
from clearhead.explaining.rerun import Edge, Rerun
from clearhead.explaining.why_lists import EdgeEffect, HeadEffect

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
