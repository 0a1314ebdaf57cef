"""What cutting one edge or turning off one head changes: the model is run again from the first row that this moves."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from clearhead.changing.edits import Edit, cut, off
from clearhead.core.axes import Array
from clearhead.core.rule_values import read_place
from clearhead.explaining.derivatives import Target, check_run, difference
from clearhead.models.model import Model
from clearhead.models.protocol import ForwardPass


class Edge(NamedTuple):
    """One weight of one head: query `query` attends to key `key`."""

    layer: int
    head: int
    query: int
    key: int


def cut_again(model: Model, run: ForwardPass, target: Target, edges: Iterable[Edge]) -> Array:
    """What z changes by when each edge alone is cut and its row normalised anew, float64 (edges,).

    edges   places in the run: layer, head, query and key; negative ones count from the end

    The run's own edits stay in force. Layers before the edge's and rows before its query are not computed again, since
    attention is causal; an edge that z does not depend on gives 0. Raises SelectionError for an edge outside the run,
    RuleError for a run that `derivatives` refuses. Time of at most a forward pass for each edge.

    >>> from clearhead.explaining import derivatives
    >>> from clearhead.models.model import load
    >>> model = load()
    >>> run = model.run([token.id for token in model.tokens("mary had a little")])
    >>> cut_again(model, run, derivatives.target_of(run), [Edge(0, 2, query=3, key=0)]).round(1)
    array([-3.3])
    """
    check_run(run)
    sizes = model.config.layers, model.config.heads, len(run.hidden[0]), len(run.hidden[0])
    chosen = [Edge(*map(read_place, Edge._fields, edge, sizes)) for edge in edges]
    changes = []
    for layer, head, query, key in chosen:
        edit = cut(queries=query, keys=key, layers=[layer], heads=[head])
        changes.append(_change(model, run, target, edit, layer, query) if key <= query <= target.position else 0.0)
    return np.array(changes, np.float64)


def off_again(model: Model, run: ForwardPass, target: Target, layer: int, head: int) -> float:
    """What z changes by when a head's output is 0, with the run's edits in force. Time of at most a forward pass."""
    return _change(model, run, target, off(layers=[layer], heads=[head]), layer)


def _change(model: Model, run: ForwardPass, target: Target, edit: Edit, layer: int, first: int = 0) -> float:
    """What one more edit adds to z, when it moves nothing before this layer and this row."""
    hidden = run.hidden[layer][first:]
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(layer, model.config.layers):
            past = run.layers[number].k[:, :first], run.layers[number].v[:, :first]
            hidden = model.layer(number, hidden, (*run.edits, edit), past if first else None)[1]
        before = difference(model, run.hidden[-1][target.position], target)
        return difference(model, hidden[target.position - first], target) - before
