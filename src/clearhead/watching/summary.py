"""One line for each head: where its weight goes, in five numbers."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.digits import fixed
from clearhead.layers.layer import Layer
from clearhead.view.head_summary import summarise_heads


class Head(NamedTuple):
    """Means over the batch's queries that are not padding; nan where a number is not known."""

    layer: str
    head: int
    sink: float  # weight on the first key that is not padding
    previous: float  # weight on the key before the query's own; queries that have one
    diagonal: float  # weight on the query's own key
    distance: float  # Σ_j a_ij·|i - j|
    entropy: float  # in nats


class Summary(list[Head]):
    """Every head that was seen; `str` makes a table of at most 80 columns, and below it lists what was not seen."""

    def __init__(self, heads: Iterable[Head] = (), unseen: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(heads)
        self.unseen = tuple(unseen)

    def __str__(self) -> str:
        width = min(max((len(line.layer) for line in self), default=5), 24)
        table = [f"{'layer':<{width}} head   sink  previous diagonal   distance  entropy"]
        for line in self:
            name = line.layer if len(line.layer) <= width else "…" + line.layer[1 - width :]
            shares = f"{_share(line.sink):>6} {_share(line.previous):>9} {_share(line.diagonal):>8}"
            table.append(
                f"{name:<{width}} {line.head:>4} {shares} {_number(line.distance):>10} {_number(line.entropy):>8}"
            )
        table += [f"not seen: {path} ({kind})" for path, kind in self.unseen]
        return "\n".join(table)


def heads_of(layer: Layer) -> list[Head]:
    """A line for each head of a layer."""
    padding = None if layer.padding is None else as_host_array(layer.padding, "padding")[0]
    means = summarise_heads(None if layer.q is None else layer.matrix(), layer.observation, padding, cross=layer.cross)
    if layer.other_keys:  # which are near to no query
        means = means._replace(distance=[np.nan] * len(layer.heads))
    return [Head(layer.name, head, *(mean[place] for mean in means)) for place, head in enumerate(layer.heads)]


def _share(x: float) -> str:
    return "-" if np.isnan(x) else fixed(x, 3, 6)


def _number(x: float) -> str:
    return "-" if np.isnan(x) else fixed(x, 2, 8)
