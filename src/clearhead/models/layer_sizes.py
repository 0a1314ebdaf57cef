"""Reads the numbers of a config, and each layer's sizes: its heads, its widths, whose keys it reads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.core.rule_values import whole_number
from clearhead.errors import FileError, shown
from clearhead.models.families import LayerSizes, NotInNumPyError

_MOST_WIDE = 2**16  # the widest head
_OWN = {"head_dim", "num_key_value_heads"}  # the keys that per_layer_config may have
_LISTED = "num_key_value_heads", "intermediate_size"  # keys for which GGUF may list one number per layer


class Reader(NamedTuple):
    """Reads numbers of a config; its errors name the file and its key."""

    path: Path
    data: Mapping[str, Any]
    keys: Mapping[str, str]

    def whole(self, key: str, default: int | None = None) -> int:
        """Read a whole number from 1 on."""
        named = f"{self.path}: {self.keys.get(key, key)}"
        return whole_number(named, self.data.get(key, default), error=FileError)

    def number(self, key: str, default: float, low: float = 0.0, high: float = 1e12) -> float:
        """Read a number between two bounds."""
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            what = f"{self.path}: {self.keys.get(key, key)} is {value!r}"
            raise FileError(f"{what}: expected a number from {low:g} to {high:g}.")
        return float(value)

    def maybe(self, key: str) -> float | None:
        """Read a number above 0; None if the key is missing."""
        return None if self.data.get(key) is None else self.number(key, 1.0, 1e-9)


def layer_sizes(read: Reader, windows: Sequence[int | None]) -> tuple[LayerSizes, ...]:
    """Return each layer's sizes: GGUF lists them, config.json has them by layer, or for layers without a window.

    Each of the last `num_kv_shared_layers` reads the keys and values of the last earlier layer of its kind, with or
    without a window. Raises FileError for impossible sizes.
    """
    data, heads, d_model = read.data, read.whole("num_attention_heads"), read.whole("hidden_size")
    shared = len(windows) - int(read.number("num_kv_shared_layers", 0, 0, len(windows)))
    stated, same = data.get("per_layer_config"), bool(data.get("attention_k_eq_v"))
    far = {"head_dim": data.get("global_head_dim")}
    if same:
        far["num_key_value_heads"] = data.get("num_global_key_value_heads")
    own = {str(i): far for i, window in enumerate(windows) if window is None} if stated is None else stated
    if not isinstance(own, dict) or not all(isinstance(each, dict) and set(each) <= _OWN for each in own.values()):
        raise NotInNumPyError(f"{read.path}: per_layer_config is {shown(own)}, which is not supported.")
    lists = {key: x for key in _LISTED if isinstance(x := data.get(key), list) and len(x) == len(windows)}
    sources, result = dict[bool, int](), list[LayerSizes]()
    for layer, window in enumerate(windows):
        mine = {key: x for key, x in own.get(str(layer), {}).items() if x}
        here = Reader(read.path, {**data, **{key: x[layer] for key, x in lists.items()}, **mine}, read.keys)
        kv_heads, d_k = here.whole("num_key_value_heads", heads), here.whole("head_dim", d_model // heads)
        if heads % kv_heads:
            raise FileError(f"{read.path}: {heads} heads are not a multiple of {kv_heads} key heads.")
        if d_k > _MOST_WIDE:
            raise FileError(f"{read.path}: its heads are {d_k:,} wide: expected at most {_MOST_WIDE:,}.")
        if layer < shared:
            sources[window is None] = layer
        elif (source := sources.get(window is None)) is None or result[source][:2] != (kv_heads, d_k):
            what = f"{read.keys.get('num_kv_shared_layers', 'num_kv_shared_layers')} is {len(windows) - shared}"
            raise FileError(f"{read.path}: {what}, but no layer before layer {layer} has keys that it could read.")
        d_mlp = here.whole("intermediate_size", 4 * d_model)
        d_mlp *= 2 if layer >= shared and data.get("use_double_wide_mlp") else 1
        result.append(LayerSizes(kv_heads, d_k, d_mlp, not (same and window is None), sources[window is None]))
    return tuple(result)
