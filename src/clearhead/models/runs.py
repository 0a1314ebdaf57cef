"""A run of the decoder: the logits by token, the attention of every layer, the residual stream.

Of a long text the attention and most of the stream would take more memory than the model. Its run has the keys and
values, from which the rows that are asked for are computed again; of the stream, what is before every sixth layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core.axes import Array
from clearhead.errors import RuleError
from clearhead.models.decoder import Decoder
from clearhead.models.protocol import Each, ForwardPass, LayerRun

T = TypeVar("T")
_LONG = 2**25  # numbers of the whole stream, above which a text is long
_STORED = 6  # of a long text, the stream before every so many layers is there


class RunBlock(Protocol):
    """What a block of `ch.watch` or `ch.change` does with the runs of a decoder; blocks.py has both."""

    @property
    def changes(self) -> bool: ...
    def edits(self, ids: Sequence[int]) -> tuple[Edit, ...]: ...
    def ran(self, run: ForwardPass) -> None: ...


blocks: dict[Decoder, list[RunBlock]] = {}  # that each decoder is in, outermost first


class OnDemand(Sequence[T]):
    """A sequence of which each item is computed when it is asked for."""

    def __init__(self, count: int, compute: Callable[[int], T]) -> None:
        self._count, self._compute = count, compute

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        numbers = range(self._count)[place]
        return self._compute(numbers) if isinstance(numbers, int) else list(map(self._compute, numbers))


def stream(step: Callable[[int, Array], Array], first: Array, layers: int, each: Each = iter) -> Sequence[Array]:
    """The residual stream before each layer and after the last; `each` iterates over the layers.

    step   the stream after a layer, from its number and what is before it
    Of a long text, what lies between two stored places is computed anew, and kept until other ones are.
    """
    stored, hidden, long = {0: first}, first, first.size * layers > _LONG
    for number in each(range(layers)):
        hidden = step(number, hidden)
        if not long or (number + 1) % _STORED == 0 or number + 1 == layers:
            stored[number + 1] = hidden
    if not long:
        return list(stored.values())

    @lru_cache(maxsize=1)
    def between(start: int) -> list[Array]:
        made = [stored[start]]
        for layer in range(start, min(start + _STORED, layers) - 1):
            made.append(step(layer, made[-1]))
        return made

    def before(number: int) -> Array:
        return stored[number] if number in stored else between(number - number % _STORED)[number % _STORED]

    return OnDemand(layers + 1, before)


def run(decoder: Decoder, ids: Sequence[int], each: Each = iter, edits: Sequence[Edit] = ()) -> ForwardPass:
    """The forward pass: logits by token, each layer's attention, and the residual stream.

    `each` iterates over the layers, such as a progress bar; `edits` of attention have positions, no words. The blocks
    of `ch.change` that the decoder is in add their edits; those of `ch.watch` keep the run.
    """
    inside = blocks.get(decoder, [])
    edits = (*edits, *(edit for block in inside for edit in block.edits(ids)))
    first, layers = decoder.embedded(ids), decoder.config.layers
    long, kept, past = first.size * layers > _LONG, list[LayerRun](), list[tuple[Array, Array]]()

    def step(number: int, hidden: Array) -> Array:
        layer = decoder.layer(number, hidden, edits)
        if number == len(past):  # the first time
            past.append((layer.k, layer.v))
            if not long:
                kept.append(layer)
        return decoder.after(number, hidden, layer.output)

    hidden = stream(step, first, layers, each)
    made = ForwardPass(kept, Logits(decoder, hidden[-1]), hidden, edits, tuple(ids), past)
    if long:
        made = _of_long_text(decoder, made)
    for block in inside:
        block.ran(made)
    return made


def check_unchanged(decoder: Decoder) -> None:
    """Raise RuleError inside a block of `ch.change`, which edits whole runs and nothing else of a decoder."""
    if any(block.changes for block in blocks.get(decoder, ())):
        raise RuleError(
            "ch.change edits what model.run(text) computes of this model, and nothing else.",
            "ch.explain(text, model, edits=[…]), or model.run(text) for each token.",
        )


def _of_long_text(decoder: Decoder, run: ForwardPass) -> ForwardPass:
    """The run with layers that are computed when they are asked for; the latest one is kept."""

    @lru_cache(maxsize=1)
    def from_row(number: int, row: int) -> LayerRun:
        return of_rows(number, (late(row) if row else run.hidden)[number], row)

    @lru_cache(maxsize=1)
    def late(row: int) -> list[Array]:
        made = [run.hidden[0][row:]]
        for number in range(len(run.past)):
            made.append(decoder.after(number, made[-1], of_rows(number, made[-1], row).output))
        return made

    def of_rows(number: int, hidden: Array, row: int) -> LayerRun:
        k, v = run.past[number]
        return decoder.layer(number, hidden, run.edits, (k[:, :row], v[:, :row]) if row else None)

    made = replace(run, layers=OnDemand(len(run.past), lambda number: from_row(number, 0)))
    if any(edit.to == "mean" for edit in run.edits):  # over rows, so that all are needed
        return made
    return replace(made, from_row=from_row, late=late)


@dataclass(frozen=True, eq=False, slots=True)
class Logits:
    """The logits of every token of a run, (tokens, vocabulary), computed where they are asked for.

    All of them at once would take more memory than the model where the text is long.
    """

    decoder: Decoder
    hidden: Array

    @property
    def shape(self) -> tuple[int, int]:
        """(tokens, vocabulary)."""
        return len(self.hidden), self.decoder.config.vocabulary

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, place: Any) -> Array:
        rows, *chosen = place if isinstance(place, tuple) else (place,)
        logits = self.decoder.logits(self.hidden[rows])
        return logits[..., *chosen] if chosen else logits

    def __iter__(self) -> Iterator[Array]:
        step = max(1, 2**24 // self.decoder.config.vocabulary)
        for start in range(0, len(self.hidden), step):
            yield from self[start : start + step]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.asarray(self[:], dtype)
