"""Names a watched layer by its number, stack and side, all read from the path of its module in the model.

transformer.h.3.attn                     3
model.decoder.layers.5.self_attn         decoder.5, or decoder.5.self where some layers attend to another sequence
model.decoder.layers.5.encoder_attn      decoder.5.cross
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

LAYERS = (int, np.integer, str), "a list of layers' numbers or names", "layers=[0, 1]"
STACKS = frozenset(
    ("encoder", "decoder", "text_model", "language_model", "vision_model", "vision_tower", "visual", "audio_tower")
)
CROSS = ("cross", "encoder_attn", "encoderattn", "encdec")  # in the name of a module of cross-attention, any case


class ModulePath(NamedTuple):
    """What the path of an attention module tells."""

    stack: str  # the first part that names a stack of layers; "" where none does
    numbers: tuple[str, ...]  # the parts that are numbers; the first is the layer's
    cross: bool  # do its queries attend to another sequence?

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(path: str) -> "ModulePath":
        parts = path.split(".")
        stack = next((part for part in parts if part in STACKS), "")
        numbers = tuple(part for part in parts if part.isdecimal())
        return ModulePath(stack, numbers, any(map(_is_cross, parts[-2:])))


def text_of(stack: str, *, has_source: bool) -> str:
    """Which text a stack reads: the model's "own", the encoder's "source", or "" for none (images, audio)."""
    if stack == "encoder" and has_source:
        return "source"
    return "own" if stack in ("", "encoder", "decoder", "text_model", "language_model") else ""


class LayerCall(NamedTuple):
    """One call of an attention module: its layer, and its number among the module's calls in this pass, from 1 up."""

    module: Any
    number: int
    path: str
    name: str
    choices: frozenset[str]  # every text by which a caller may choose this layer: its name, path, numbers

    @property
    def cross(self) -> bool:
        return ModulePath.of(self.path).cross


class LayerNames:
    """Names the layers of one model, from the paths of all its modules."""

    def __init__(self, paths: Iterable[str]) -> None:
        split = [path.split(".") for path in paths]
        inner = [parts for parts in split if any(part.isdecimal() for part in parts[1:-1])]
        self._several_stacks = len({ModulePath.of(".".join(parts)).stack for parts in inner}) > 1
        self._has_cross = any(_is_cross(parts[-1]) for parts in inner)
        self._counts = Counter(".".join(parts[:-1]) for parts in split if parts[-1].isdecimal())  # layers by stack
        self._names: dict[str, str] = {}  # by path

    def name(self, path: str) -> str:
        """Number, stack if there are several, and side; the path if that name is taken or there is no number."""
        if path not in self._names:
            name = self._usual(path)
            self._names[path] = path if name in self._names.values() else name
        return self._names[path]

    def choices(self, path: str) -> set[str]:
        """Every text that chooses this layer: name, path, number, and number from the stack's end ("-1": the last)."""
        return {self.name(path), *self._numbers(path)}

    def possible(self, path: str) -> set[str]:
        """Every text that may choose this module's layer once it runs, whatever name it gets."""
        return {self._usual(path), *self._numbers(path)}

    def _usual(self, path: str) -> str:
        """The name of a layer, unless another layer has it."""
        stack, numbers, cross = ModulePath.of(path)
        name = numbers[0] if numbers else path
        if numbers and self._several_stacks and stack:
            name = f"{stack}.{name}"
        if numbers and self._has_cross:
            name += ".cross" if cross else ".self"
        return name

    def _numbers(self, path: str) -> set[str]:
        numbers = ModulePath.of(path).numbers
        if not numbers:
            return {path}
        parts = path.split(".")
        stack = ".".join(parts[: parts.index(numbers[0])])
        return {path, numbers[0], str(int(numbers[0]) - self._counts[stack])}


def _is_cross(part: str) -> bool:
    return any(word in part.lower() for word in CROSS)
