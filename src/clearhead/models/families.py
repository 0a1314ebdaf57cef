"""What a decoder is, as data: its sizes and choices, and the families of decoders, from families.toml."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from clearhead.core.files import toml_of
from clearhead.models.functions import Rope

Windows = Literal["none", "all", "every second", "five of six"]


class Config(NamedTuple):
    """The numbers and choices that the computation needs; which biases and norms there are, the weights say.

    windows         of each layer how many keys a query sees, itself included; None: all before it
    scales          of each layer what q·k is multiplied by
    ropes           of each layer its rotary positions; None: it has none
    added_scale     what attention and MLP multiply by what they add to the residual stream
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    d_model: int
    d_k: int
    d_mlp: int
    positions: int
    vocabulary: int
    epsilon: float
    activation: str
    centred: bool  # layer norms, which subtract the mean; else the root mean square alone
    gated: bool  # is the MLP down(act(gate(x))·up(x))? else down(act(up(x)))
    tied: bool
    windows: tuple[int | None, ...]
    scales: tuple[float, ...]
    ropes: tuple[Rope | None, ...]
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    added_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def shares_runs(self) -> bool:
        """A variant of a run costs less than a run: it shares what comes before its first change."""
        return True

    def facts(self) -> dict[str, Any]:
        """What reports and --json say of it."""
        names = ("family", "layers", "heads", "kv_heads", "d_model", "d_mlp", "positions", "vocabulary", "epsilon")
        usual = self.d_k**-0.5
        scaled = {"scaled": abs(self.scales[0] - usual) < 1e-9, "scaled_by_layer": len(set(self.scales)) > 1}
        return {name: getattr(self, name) for name in (*names, "activation", "tied")} | scaled


class Family(NamedTuple):
    """One family: names of its numbers in config.json and GGUF files, and what it does.

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
