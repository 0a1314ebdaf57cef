"""The residual stream before each layer and after the last; of a long text most of it is computed when asked for."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, overload

from clearhead.core.axes import Array
from clearhead.models.protocol import Each

T = TypeVar("T")
_LONG = 2**25  # numbers of the whole stream, above which a text is long
_STORED = 6  # of a long text, the stream before every so many layers is there


class Computed(Sequence[T]):
    """A sequence of which each item is computed when it is asked for."""

    __slots__ = ()

    @abstractmethod
    def computed(self, number: int) -> T:
        """The item at this place."""

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        numbers = range(len(self))[place]
        return self.computed(numbers) if isinstance(numbers, int) else [self.computed(number) for number in numbers]


@dataclass(eq=False, slots=True)
class Stream(Computed[Array]):
    """The residual stream of a long text; between two stored places it is computed anew, and kept until others are."""

    step: Callable[[int, Array], Array]
    stored: dict[int, Array]
    between: dict[int, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return max(self.stored) + 1

    def computed(self, number: int) -> Array:
        """The stream before this layer."""
        if number in self.stored:
            return self.stored[number]
        if number not in self.between:
            start, stop = number - number % _STORED, min(place for place in self.stored if place > number)
            hidden, self.between = self.stored[start], {}
            for layer in range(start, stop - 1):
                self.between[layer + 1] = hidden = self.step(layer, hidden)
        return self.between[number]


def is_long(first: Array, layers: int) -> bool:
    """Whether a text is long, from the stream before the first layer."""
    return first.size * layers > _LONG


def stream(step: Callable[[int, Array], Array], first: Array, layers: int, each: Each = iter) -> Sequence[Array]:
    """The stream through all layers, each a `step` from what is before it; `each` iterates over them."""
    stored, hidden, long = {0: first}, first, is_long(first, layers)
    for number in each(range(layers)):
        hidden = step(number, hidden)
        if not long or (number + 1) % _STORED == 0 or number + 1 == layers:
            stored[number + 1] = hidden
    return Stream(step, stored) if long else list(stored.values())
