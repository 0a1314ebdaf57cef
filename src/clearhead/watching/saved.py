"""The attention layers of one run of a model, by name, and the file of `seen.save`.

That is safetensors: arrays named by layer, everything else as JSON in the header.
"""

import json
import os
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np

from clearhead.core.array_files import safetensors
from clearhead.core.arrays import as_rule_array as near
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.files import object_of, write_whole
from clearhead.core.rule_values import layer_name, read_members, read_path
from clearhead.core.rules import flat, joined
from clearhead.core.state import State
from clearhead.core.statistics import STATISTICS, Top, arrays_of, joined_arrays, listed
from clearhead.errors import ClearheadError, FileError, SelectionError
from clearhead.ops.observation import Observation, separate_arrays
from clearhead.version import __version__
from clearhead.watching.layer import Layer

LAYERS = (int, np.integer, str), "a list of layers' numbers or names", "layers=[0, 1]"
HEADS = (int, np.integer), "a list of whole numbers from 0 up", "heads=[0, 1]"
FORMAT = 2
_WORDS: dict[str, Any] = {"name": str, "path": str, "call": int, "cross": bool, "note": str, "other_keys": int}
_ARRAYS = ("q", "k", "v", "padding")  # fields of a Layer, as those above
_TABLE = dict.fromkeys(State._fields, "logsumexp")  # the entry that these arrays belong to
_SAVED = [name for name in listed() if name not in ("output", "groups")]


@dataclass(eq=False)
class Run:
    """The layers as they ran; a layer is given by its name, its number, or the path of its module."""

    parts: dict[str, Any] = field(default_factory=dict)  # by name, as they ran: layers, and recordings of them
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
        part = self.parts[self.layer_name(layer)]
        return part if isinstance(part, Layer) else cast("Layer", part.finished())

    def layer_name(self, layer: int | str) -> str:
        """The name of a layer given by number, name or path. Raises SelectionError for an unknown layer."""
        if not self.parts and isinstance(layer, (int, str)):
            raise SelectionError("no attention was seen.", "run the model inside the `with` block.")
        if isinstance(layer, str) and layer not in self.parts:
            layer = next((name for name, part in self.parts.items() if part.path == layer), layer)
        return layer_name(layer, self.layers)


def read_heads(name: str, value: Any, wanted: str = HEADS[1]) -> list[int]:
    """Heads, sorted. Raises SelectionError for anything but whole numbers from 0 up."""
    heads = read_members(name, value, HEADS[0], wanted, HEADS[2])
    if heads and min(heads) < 0:
        raise SelectionError(f"{name} holds {min(heads)}: expected {wanted}.", HEADS[2])
    return sorted({int(head) for head in heads})


def read(path: str | os.PathLike[str]) -> tuple[list[Layer], dict[str, Any]]:
    """Read the layers, and the model's name and tokens. Raises FileError."""
    arrays, metadata = safetensors(path)
    if "watch" not in metadata:
        raise FileError(f"{path} was not written by seen.save.")
    words = object_of(metadata["watch"], f"{path}: what is said of its layers")
    if words.get("format") != FORMAT:
        raise FileError(
            f"{path} has format {words.get('format')!r}, and this version reads {FORMAT}: it was written by clearhead "
            f"{words.get('clearhead')!r}."
        )
    try:
        return _record(arrays, words)
    except ClearheadError as error:
        raise FileError(f"{path} is not a whole record of ch.watch: {error.what}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FileError(f"{path} is not a whole record of ch.watch: {type(error).__name__} {error!s}.") from None


def write(path: str | os.PathLike[str], layers: list[Layer], words: dict[str, Any]) -> None:
    """Write the whole file or nothing. Raises FileError."""
    from safetensors.numpy import save

    arrays: dict[str, Array] = {}
    parts = [_put(arrays, str(number), layer) for number, layer in enumerate(layers)]
    header = {"format": FORMAT, "clearhead": __version__, "layers": parts, **words}
    write_whole(path, save(arrays, metadata={"watch": json.dumps(header)}))


def _put(arrays: dict[str, Array], number: str, layer: Layer) -> dict[str, Any]:
    """Add one layer's arrays under their names; returns the layer's part of the header."""
    seen = layer.observation
    kept: dict[str, Any] = {name: getattr(layer, name) for name in _ARRAYS}
    kept["g"] = None if layer.derivative is None else layer.g
    kept |= {name: x for name, x in separate_arrays(seen).items() if name != "output"}
    plain: dict[str, Any] = {}
    for name, value in flat(layer.rules).items():
        if hasattr(value, "shape"):
            kept[f"rule {name}"] = value
        else:
            plain[name] = value
    for name, value in kept.items():
        if value is not None:
            arrays[f"{number} {name}"] = np.ascontiguousarray(near(value, name))
    words = {name: getattr(layer, name) for name in _WORDS}
    return words | {"heads": list(layer.heads), "queries": seen.queries, "keys": seen.keys, "rules": plain}


def _record(arrays: dict[str, Array], words: dict[str, Any]) -> tuple[list[Layer], dict[str, Any]]:
    layers = []
    for number, layer in enumerate(words["layers"]):
        stored = {name.partition(" ")[2]: x for name, x in arrays.items() if name.partition(" ")[0] == str(number)}
        layers.append(_layer(stored, layer))
    if len({layer.name for layer in layers}) != len(layers):
        raise ValueError("two layers have one name")
    rows = {name: [list(row) for row in words[name]] for name in ("tokens", "source_tokens")}
    unseen = tuple((str(path), str(kind)) for path, kind in words.get("unseen", ()))
    return layers, {**rows, "model": str(words["model"]), "unseen": unseen}


def _layer(stored: dict[str, Array], words: dict[str, Any]) -> Layer:
    rules: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in words["rules"].items()}
    rules |= {name.removeprefix("rule "): x for name, x in stored.items() if name.startswith("rule ")}
    rules = dict(joined(rules))
    q, k = stored.get("q"), stored.get("k")
    if (q is None) != (k is None):
        raise ValueError("a layer has only one of q and k")
    heads = tuple(int(head) for head in words["heads"])
    queries, keys = int(words["queries"]), int(words["keys"])
    if q is not None:
        problem = describe(q, k, stored.get("v"), rules).problem  # type: ignore[arg-type]
        if problem.shape[1:] != (len(heads), queries, keys):
            raise ValueError(f"layer {words['name']} has a matrix of shape {problem.shape}")
    sizes = {"heads": len(heads), "queries": queries, "keys": keys}
    observed = joined_arrays({array: stored[array] for name in _SAVED for array in arrays_of(name) if array in stored})
    for name, value in observed.items():
        for part in value if isinstance(value, Top) else (value,):
            expected = [sizes.get(axis) for axis in STATISTICS[_TABLE.get(name, name)].axes]
            batch, *rest = part.shape
            fits = batch == stored["largest"].shape[0] and len(rest) == len(expected)
            if not fits or any(size not in (None, real) for size, real in zip(expected, rest, strict=True)):
                raise ValueError(f"layer {words['name']} has {name} of shape {part.shape}")
    g, v = stored.get("g"), stored.get("v")
    if g is not None and (v is None or g.shape != (v.shape[0], *list(sizes.values())[:2], v.shape[-1])):
        raise ValueError(f"layer {words['name']} has a derivative of shape {g.shape}")
    sinks = rules.get("sinks") is not None
    seen = Observation(**observed, queries=queries, keys=keys, sinks=sinks)
    said = {name: kind(words[name]) for name, kind in _WORDS.items()}
    arrays: Any = {name: stored.get(name) for name in _ARRAYS}
    return Layer(**said, **arrays, heads=heads, observation=seen, rules=rules, derivative=g)
