"""One line for each head: where its weight goes, in five numbers."""

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.digits import fixed
from clearhead.layers.layer import Layer
from clearhead.view.head_summary import summarise_heads
from clearhead.watching.effects import Lines
from clearhead.words import Language, say


class Head(NamedTuple):
    """Means over the batch's queries that are not padding; nan where a number is not known."""

    layer: str
    head: int
    sink: float  # weight on the first key that is not padding
    previous: float  # weight on the key before the query's own; queries that have one
    diagonal: float  # weight on the query's own key
    distance: float  # Σ_j a_ij·|i - j|
    entropy: float  # in nats


class Summary(Lines[Head]):
    """Every head that was seen; `str` makes a table of at most 80 columns, and below it lists what was not seen."""

    about = "summary table"
    columns: ClassVar = {"head": 4, "sink": 6, "previous": 9, "diagonal": 8, "distance": 10, "entropy": 8}

    def __init__(self, heads: Iterable[Head] = (), unseen: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(heads)
        self.unseen = tuple(unseen)

    def _cells(self, one: Head) -> list[str]:
        digits = [(3, 6)] * 3 + [(2, 8)] * 2
        numbers = zip(one[2:], digits, strict=True)
        return [str(one.head), *("-" if np.isnan(x) else fixed(x, *each) for x, each in numbers)]

    def _notes(self, language: Language) -> list[str]:
        return [say(language, "not seen", path=path, kind=kind) for path, kind in self.unseen]


def heads_of(layer: Layer) -> list[Head]:
    """A line for each head of a layer."""
    padding = None if layer.padding is None else as_host_array(layer.padding, "padding")[0]
    means = summarise_heads(None if layer.q is None else layer.matrix(), layer.observation, padding, cross=layer.cross)
    if layer.other_keys:  # which are near to no query
        means = means._replace(distance=[np.nan] * len(layer.heads))
    return [Head(layer.name, head, *(mean[place] for mean in means)) for place, head in enumerate(layer.heads)]
