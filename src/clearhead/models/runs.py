"""A run of the decoder: the logits by token, the attention of every layer, the residual stream.

Of a long text the attention and most of the stream would take more memory than the model. Its run has the keys and
values, from which the rows that are asked for are computed again; of the stream, what is before every sixth layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


def is_long(first: Array, layers: int) -> bool:
    """Whether a text is long, from the stream before the first layer."""
    return first.size * layers > _LONG


def stream(step: Callable[[int, Array], Array], first: Array, layers: int, each: Each = iter) -> Sequence[Array]:
    """The residual stream before each layer and after the last; `each` iterates over the layers.

    step   the stream after a layer, from its number and what is before it
    Of a long text, what lies between two stored places is computed anew, and kept until other ones are.
    """
    stored, hidden, long = {0: first}, first, is_long(first, layers)
    for number in each(range(layers)):
        hidden = step(number, hidden)
        if not long or (number + 1) % _STORED == 0 or number + 1 == layers:
            stored[number + 1] = hidden
    if not long:
        return list(stored.values())
    between: dict[int, Array] = {}

    def before(number: int) -> Array:
        if number not in stored and number not in between:
            between.clear()
            start = number - number % _STORED
            hidden = stored[start]
            for layer in range(start, min(place for place in stored if place > number) - 1):
                between[layer + 1] = hidden = step(layer, hidden)
        return stored[number] if number in stored else between[number]

    return OnDemand(layers + 1, before)


def run(decoder: Decoder, ids: Sequence[int], each: Each = iter, edits: Sequence[Edit] = ()) -> ForwardPass:
    """The forward pass: logits by token, each layer's attention, and the residual stream.

    `each` iterates over the layers, such as a progress bar; `edits` of attention have positions, no words. The blocks
    of `ch.change` that the decoder is in add their edits; those of `ch.watch` keep the run.
    """
    inside = blocks.get(decoder, [])
    edits = [*edits, *(edit for block in inside for edit in block.edits(ids))]
    made = _run(decoder, ids, each, edits)
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


def _run(decoder: Decoder, ids: Sequence[int], each: Each, edits: Sequence[Edit]) -> ForwardPass:
    first, layers = decoder.embedded(ids), decoder.config.layers
    kept, past, long = list[LayerRun](), list[tuple[Array, Array]](), is_long(first, layers)

    def step(number: int, hidden: Array) -> Array:
        layer, after = decoder.layer(number, hidden, edits)
        if number == len(past):  # the first time
            past.append((layer.k, layer.v))
            if not long:
                kept.append(layer)
        return after

    hidden = stream(step, first, layers, each)
    facts: Any = {"hidden": hidden, "edits": tuple(edits), "ids": tuple(ids), "past": past}
    logits = Logits(decoder, hidden[-1])
    if long:
        return LongRun(Layers(decoder, hidden, edits, past), logits, **facts)
    return ForwardPass(kept, logits, **facts)


class Layers(OnDemand[LayerRun]):
    """The attention of every layer of a long text; the last one that was asked for is kept."""

    def __init__(
        self,
        decoder: Decoder,
        hidden: Sequence[Array],
        edits: Sequence[Edit],
        past: Sequence[tuple[Array, Array]],
    ) -> None:
        super().__init__(len(past), lambda number: self.from_row(number, 0))
        self.decoder, self.hidden, self.edits, self.past = decoder, hidden, edits, past
        self.last: dict[tuple[int, int], LayerRun] = {}  # by layer and first row
        self.late: dict[int, list[Array]] = {}  # the stream from a row on

    def from_row(self, number: int, row: int) -> LayerRun:
        """A layer from some row on."""
        if (number, row) not in self.last:
            self.last.clear()
            past = self._before(number, row) if row else None
            self.last[number, row] = self.decoder.attended(number, self.stream(row)[number], self.edits, past)
        return self.last[number, row]

    def stream(self, row: int) -> Sequence[Array]:
        """The residual stream from some row on."""
        if not row:
            return self.hidden
        if row not in self.late:
            made = [self.hidden[0][row:]]
            for number in range(len(self)):
                made.append(self.decoder.layer(number, made[-1], self.edits, self._before(number, row))[1])
            self.late = {row: made}
        return self.late[row]

    def _before(self, number: int, row: int) -> tuple[Array, Array]:
        k, v = self.past[number]
        return k[:, :row], v[:, :row]


@dataclass(frozen=True, eq=False, slots=True)
class LongRun(ForwardPass):
    """The run of a long text; an edit that takes a mean over rows needs all of them."""

    layers: Layers

    def attended(self, layer: int, row: int) -> tuple[LayerRun, int]:
        first = 0 if any(edit.to == "mean" for edit in self.edits) else row
        return self.layers.from_row(layer, first), row - first

    def stream(self, row: int) -> Sequence[Array]:
        if any(edit.to == "mean" for edit in self.edits):
            return [x[row:] for x in self.hidden]
        return self.layers.stream(row)


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
