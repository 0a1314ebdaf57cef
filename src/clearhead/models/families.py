"""The families of decoders, from families.toml: names of their numbers in config.json and GGUF files; what they do."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from clearhead.core.files import toml_of

Windows = Literal["none", "all", "every second", "five of six"]


class Family(NamedTuple):
    """One family.

    names        of tensors in safetensors, without .weight or .bias, and in GGUF
    centred      layer norms instead of root-mean-square norms
    gated        MLPs with a gate
    activation   where config.json names none, and in GGUF, which names none at all
    neighbours   in GGUF, the rows of W^Q and W^K are permuted so that rotated pairs are neighbours
    less_one     safetensors keep a norm's weight less 1
    by_width     embeddings are multiplied by √d_model
    transposed   safetensors keep linear weights as (d_in, d_out)
    windows      which layers have the window, where config.json does not list them by `layer_types`
    epsilon      the key of the norms' ε in config.json
    keys         of config.json where they are not Llama's
    defaults     of keys of config.json that may be missing
    """

    names: Mapping[str, str]
    centred: bool = False
    gated: bool = True
    activation: str = "silu"
    neighbours: bool = False
    less_one: bool = False
    by_width: bool = False
    transposed: bool = False
    windows: Windows = "none"
    epsilon: str = "rms_norm_eps"
    keys: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}


_TABLES = toml_of("clearhead.models", "families.toml")


def _family(names: tuple[str, ...] = ("llama",), **more: Any) -> Family:
    return Family({name: there for table in names for name, there in _TABLES["names"][table].items()}, **more)


FAMILIES = {kind: _family(**table) for kind, table in _TABLES["families"].items()}
OTHER_NAMES = {"gemma3_text": "gemma3"}  # of the same families in config.json


def windows_of(kind: Windows, window: int | None, layers: int) -> tuple[int | None, ...]:
    """Which layers have the window, where nothing lists them."""
    chosen = {
        "none": [False] * layers,
        "all": [True] * layers,
        "every second": [layer % 2 == 0 for layer in range(layers)],
        "five of six": [layer % 6 != 5 for layer in range(layers)],
    }
    return tuple(window if has else None for has in chosen[kind])
