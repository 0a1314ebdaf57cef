"""The attention layers of one run of a model, by name."""

import os
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np

from clearhead.core.rule_values import layer_name, read_path
from clearhead.errors import SelectionError
from clearhead.layers.layer import Layer
from clearhead.layers.saved import read

LAYERS = (int, np.integer, str), "a list of layers' numbers or names", "layers=[0, 1]"


@dataclass(eq=False)
class Run:
    """The layers as they ran; a layer is given by its name, its number, or the path of its module."""

    parts: dict[str, Any] = field(default_factory=dict)  # by name, as they ran; each has finished()
    tokens: list[list[Any]] = field(default_factory=list)  # (batch, length): texts with a tokenizer, ids without
    source_tokens: list[list[Any]] = field(default_factory=list)  # the encoder's, where there is one
    model: str = ""
    unseen: tuple[tuple[str, str], ...] = ()  # (path, class) of attention that ran without Transformers' interface

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `seen.save(path)` wrote. Raises FileError."""
        layers, words = read(read_path(path))
        return cls({layer.name: layer for layer in layers}, **words)

    @property
    def layers(self) -> list[str]:
        """The names of what was seen, in the order in which the layers ran; "0#2" is layer 0 run a second time."""
        return list(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def layer(self, layer: int | str) -> Layer:
        """One layer with its name, heads, q, k, v, rules and notes. Raises SelectionError for an unknown layer."""
        return cast("Layer", self.parts[self.layer_name(layer)].finished())

    def layer_name(self, layer: int | str) -> str:
        """The name of a layer given by number, name or path. Raises SelectionError for an unknown layer."""
        if not self.parts and isinstance(layer, (int, str)):
            hint = "run the model inside the `with` block; requests of generate_batch are in seen.requests."
            raise SelectionError("no attention was seen.", hint)
        if isinstance(layer, str) and layer not in self.parts:
            layer = next((name for name, part in self.parts.items() if part.path == layer), layer)
        return layer_name(layer, self.layers)
