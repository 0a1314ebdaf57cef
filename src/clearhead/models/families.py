"""What a decoder is, as data: its sizes and choices, and the families of decoders, from families.toml.

Then what families choose from: norms, each with its derivative, and rotary positions. They compute in the dtype of what
they are given. Rotary positions (Su et al. 2021) turn pairs half the rotated width apart, (x_i, x_{i + dims/2}), as in
safetensors; GGUF's pairs of neighbours are put in this order when a file is read.
"""

from collections.abc import Container, Mapping, Sequence
from math import ceil, floor, log, pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array, blocks
from clearhead.core.files import toml_of
from clearhead.errors import FileError, shown

CACHED = 128  # tokens whose numbers stay in a core's cache from one operation to the next
Angles = tuple[Array, Array] | None  # cosine and sine of positions; None: nothing is rotated


class LayerSizes(NamedTuple):
    """What one layer has of its own.

    values   does it project values? else they are the projected keys, before norms and rotation
    source   the layer whose keys and values it reads
    """

    kv_heads: int
    d_k: int
    d_mlp: int
    values: bool
    source: int


class Config(NamedTuple):
    """The numbers and choices that the computation needs; which biases and norms there are, the weights say.

    sizes           of each layer; `kv_heads` and `d_mlp` are those of the first
    d_input         how many numbers of its token each layer is given beside the stream (Gemma 4)
    windows         of each layer how many keys a query sees, itself included; None: all before it
    scale           what q·k is multiplied by
    ropes           of each layer its rotary positions; None: it has none
    slopes          of each head what ALiBi subtracts from a logit for each position between query and key; (): nothing
    clip            the most that a number of a query, key or value may be, and its least the same below 0
    added_scale     what attention and MLP multiply by what they add to the residual stream
    parallel        does the MLP read what attention reads, the stream before the layer?
    normed_last     are queries and keys normed after they were turned, instead of before?
    experts         of an MLP; `chosen` of them compute each token, with shares that sum to 1 where `shares_sum`
    limit           where it is there, an MLP is down(act(min(gate, limit))·(1 + up cut to ±limit))
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    d_model: int
    vocabulary: int
    # of a model that runs through Transformers, the rest is as it stands here
    d_mlp: int = 0
    positions: int = 0
    epsilon: float = 0.0
    activation: str = ""
    centred: bool = False  # layer norms, which subtract the mean; else the root mean square alone
    gated: bool = False  # is the MLP down(act(gate(x))·up(x))? else down(act(up(x)))
    tied: bool = False
    sizes: tuple[LayerSizes, ...] = ()
    d_input: int = 0
    windows: tuple[int | None, ...] = ()
    scale: float = 0.0
    ropes: tuple["Rope | None", ...] = ()
    slopes: tuple[float, ...] = ()
    clip: float | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    added_scale: float = 1.0
    logit_scale: float = 1.0
    parallel: bool = False
    normed_last: bool = False
    experts: int = 0
    chosen: int = 0
    d_expert: int = 0
    shares_sum: bool = True
    limit: float | None = None
    shares_runs: bool = True  # does a variant of a run cost less than a run? it shares what comes before its change

    def sources(self) -> set[int]:
        """The layers whose keys and values others read."""
        return {size.source for layer, size in enumerate(self.sizes) if size.source != layer}

    def facts(self) -> dict[str, Any]:
        """What reports and --json say of it."""
        names = ["family", "layers", "heads", "kv_heads", "d_model", "vocabulary"]
        if self.shares_runs:
            names += ["d_mlp", "positions", "epsilon", "activation", "tied"]
        if self.experts:
            names += ["experts", "chosen"]
        return {name: getattr(self, name) for name in names}


class Family(NamedTuple):
    """One family: names of its numbers in config.json and GGUF files, and what it does.

    names        of tensors in safetensors, without .weight or .bias, and in GGUF
    architecture in GGUF, where it is not the model_type; "" where llama.cpp has none
    renamed      parts of layers that GGUF calls by another name of the table
    vectors      norms that each layer has, and sinks
    ones         those of the vectors that are all 1 and in no file
    centred      layer norms instead of root-mean-square norms
    gated        MLPs with a gate
    activation   where config.json names none, and in GGUF, which names none at all
    neighbours   the forms, "folder" and "gguf", in which the rows of W^Q and W^K that turn as a pair are neighbours
    by_head      the rows of safetensors' fused q, k and v: of each key head its queries, then k, then v
    parallel     the MLP reads what attention reads; `use_parallel_residual` of config.json counts more
    normed_last  queries and keys are normed after they were turned
    learned      the rows before the first position's in the table of positions; None: there is no such table
    unturned     which layers have no rotary positions, again and again; `no_rope_layers` of config.json counts more
    far_unturned only layers with windows have rotary positions, where there are any
    near_plain   layers with windows have plain rotary positions, however the others' are stretched
    less_one     safetensors keep a norm's weight less 1
    by_width     embeddings are multiplied by √d_model
    transposed   safetensors keep linear weights as (d_in, d_out)
    windows      which layers have the window, again and again, where config.json does not list them by `layer_types`
    far_last     the last layer has none, whatever that says
    epsilon      the key of the norms' ε in config.json
    keys         of config.json where they are not Llama's
    defaults     of keys of config.json that may be missing
    uses         other keys of config.json that may be missing
    fixed        what others' keys say of each model of this family
    only         values with which a key of config.json changes nothing
    """

    names: Mapping[str, str]
    architecture: str | None = None
    renamed: Mapping[str, str] = {}
    vectors: Sequence[str] = ("attn_norm", "ffn_norm")
    ones: Sequence[str] = ()
    centred: bool = False
    gated: bool = True
    activation: str = "silu"
    neighbours: Sequence[str] = ()
    by_head: bool = False
    parallel: bool = False
    normed_last: bool = False
    learned: int | None = None
    unturned: Sequence[bool] = (False,)
    far_unturned: bool = False
    near_plain: bool = False
    less_one: bool = False
    by_width: bool = False
    transposed: bool = False
    windows: Sequence[bool] = (False,)
    far_last: bool = False
    epsilon: str = "rms_norm_eps"
    keys: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}
    uses: Sequence[str] = ()
    fixed: Mapping[str, Any] = {}
    only: Mapping[str, Sequence[Any]] = {}


class NotInNumPyError(FileError):
    """A sound model that is not computed here; Transformers may run its folder."""

    def __init__(self, what: str, hint: str = "Transformers may run the folder with safetensors.") -> None:
        super().__init__(what, hint)


_TABLES = toml_of("clearhead.models", "families.toml")


def _family(kind: str) -> Family:
    """The family of a table; one that is `like` another has from that one all that it does not say itself."""
    own = dict(_TABLES["families"][kind])
    base = _family(own.pop("like")) if "like" in own else Family(_TABLES["names"]["llama"])
    if "names" in own:
        own["names"] = {name: there for table in own["names"] for name, there in _TABLES["names"][table].items()}
    return base._replace(**{**own, "defaults": {**base.defaults, **own.get("defaults", {})}})


FAMILIES = {kind: _family(kind) for kind in _TABLES["families"]}
# The families by general.architecture of GGUF files.
ARCHITECTURES = {
    kind if family.architecture is None else family.architecture: kind
    for kind, family in FAMILIES.items()
    if family.architecture != ""
}
OTHER_NAMES = {"gemma3_text": "gemma3"}  # of the same families in config.json
CONFIG, GGUF = _TABLES["config"], _TABLES["gguf"]  # what is known of the keys of both forms


def check_keys(where: str, stated: Mapping[str, Any], used: Container[str], known: Mapping[str, Any]) -> None:
    """Raise NotInNumPyError for a key that is not used, unless it is known that it changes nothing or says nothing.

    where   what stands before a key in the error
    known   tables of families.toml: names of harmless keys, how such names begin, and harmless values of others
    """
    for key, value in stated.items():
        harmless = key in known["harmless"] or key.startswith(tuple(known["begins"]))
        harmless = value in known["only"][key] if key in known["only"] else harmless
        if not (key in used or harmless or value is None):
            raise NotInNumPyError(f"{where}{key} is {shown(value)}, and what it changes is not known here.")


def normed(x: Array, weight: Array, bias: Array | None, config: Config) -> Array:
    """A norm over the last axis, weight·(x − mean)/σ + bias; weight and bias are (d,).

    It is layer norm (Ba et al. 2016), or by the root mean square alone (Zhang, Sennrich 2019), where the mean stays.
    """
    y = _standardised(x, config)[0]
    y *= weight
    if bias is not None:
        y += bias
    return y


def norm_back(x: Array, weight: Array, upstream: Array, config: Config) -> Array:
    """The derivative by x, (…, d), from that by `normed(x, …)`.

    With y = (x − mean)/σ and u = upstream·weight it is (u − mean(u) − y·mean(u·y))/σ; a norm that leaves the mean in
    has no mean(u).
    """
    y, deviation = _standardised(x, config)
    u = upstream * weight
    along = u - y * (u * y).mean(axis=-1, keepdims=True)
    return np.asarray((along - u.mean(axis=-1, keepdims=True) if config.centred else along) / deviation)


def _standardised(x: Array, config: Config) -> tuple[Array, Array]:
    """(x − mean)/σ and σ, (…, 1)."""
    rest = x - x.mean(axis=-1, keepdims=True) if config.centred else x
    deviation = np.sqrt(np.einsum("...d,...d->...", rest, rest)[..., None] / rest.shape[-1] + config.epsilon)
    deviation = deviation.astype(x.dtype, copy=False)
    return rest / deviation, deviation


class Rope(NamedTuple):
    """Pair i turns by position·rates[i]; the rotated part is multiplied by `magnitude`.

    long, original   the rates for texts of more than `original` tokens, where they are others (Phi-3)
    warming          queries are multiplied by 1 + warming·ln(1 + ⌊position/original⌋) (Llama 4, Ministral 3)
    """

    rates: Array  # (dims/2,), float32
    magnitude: float = 1.0
    long: Array | None = None
    original: int = 0
    warming: float = 0.0

    def of_queries(self, angles: tuple[Array, Array], places: Array) -> tuple[Array, Array]:
        """The angles with which the queries at these positions are turned."""
        if not self.warming:
            return angles
        warmth = (1 + self.warming * np.log1p(places // self.original)).astype(np.float32)[:, None]
        return angles[0] * warmth, angles[1] * warmth

    def angles(self, places: Array) -> tuple[Array, Array]:
        """Cosine and sine of these positions, each (tokens, dims/2), times the magnitude."""
        first, last = int(places.min()), int(places.max())  # variants repeat positions, so each is computed once
        rates = self.rates if self.long is None or last < self.original else self.long
        angles = np.arange(first, last + 1, dtype=np.float32)[:, None] * rates
        cos, sin = np.cos(angles) * self.magnitude, np.sin(angles) * self.magnitude
        return cos[places - first], sin[places - first]


def alibi_slopes(heads: int, largest: float) -> tuple[float, ...]:
    """ALiBi's slope of each head (Press et al. 2022): 2^(−largest·i/n) for i = 1 … n, n the power of 2 from heads on.

    Of another number of heads, those with an even i come first, and what is too much is left out.
    """
    count = 1 << (heads - 1).bit_length()
    slopes = (0.5 ** (largest * np.arange(1, count + 1) / count)).tolist()
    return tuple(slopes if count == heads else (slopes[1::2] + slopes[::2])[:heads])


def turned(x: Array, angles: Angles) -> Array:
    """X (…, tokens, d_k) with its pairs turned, where there are angles; what is beyond the rotated width stays."""
    if angles is None:
        return x
    half = angles[0].shape[-1]
    made = np.empty(x.shape, np.result_type(x, *angles))
    for block in blocks(x.shape[-2], CACHED):
        cos, sin = (angle[block] for angle in angles)
        first, second = x[..., block, :half], x[..., block, half : 2 * half]
        parts = first * cos - second * sin, second * cos + first * sin, x[..., block, 2 * half :]
        np.concatenate(parts, axis=-1, out=made[..., block, :])
    return made


def llama3_rates(rates: Array, factor: float, low: float, high: float, original: float) -> Array:
    """Llama 3's: slow pairs are `factor` times slower, fast ones stay, those between are mixed.

    Source: Llama 3.1's `apply_scaling` (Dubey et al. 2024); low and high are numbers of turns in `original` positions.
    """
    turns = original * rates / np.float32(2 * pi)
    share = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - share) * rates / np.float32(factor) + share * rates


def _yarn(rates: Array, base: float, parameters: Mapping[str, Any], positions: int) -> Rope:
    """YaRN's (Peng et al. 2023): pairs with many turns in the original positions stay, those with few are slower."""
    dims, original = 2 * len(rates), float(parameters["original_max_position_embeddings"])
    fast, slow = parameters.get("beta_fast") or 32, parameters.get("beta_slow") or 1
    low, high = (dims * log(original / (turns * 2 * pi)) / (2 * log(base)) for turns in (fast, slow))
    if parameters.get("truncate", True):
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    share = np.clip((np.arange(len(rates)) - low) / (high - low or 0.001), 0, 1).astype(np.float32)
    factor = float(parameters.get("factor") or positions / original)
    stated, scale, of_all = (parameters.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if stated is None:
        more = 0.1 * log(max(factor, 1))
        stated = (scale * more + 1) / (of_all * more + 1) if scale and of_all else more + 1
    warming = float(parameters.get("llama_4_scaling_beta") or 0)
    stretched = rates / np.float32(factor) * share + rates * (1 - share)
    return Rope(stretched, float(stated), original=int(original), warming=warming)


def of_parameters(parameters: Mapping[str, Any], base: float, dims: int, positions: int) -> Rope:
    """The rotary positions that config.json asks for: pair i turns by base^(−2i/dims), or another rate.

    parameters   rope_scaling or rope_parameters; numbers are checked by their use, KeyError and TypeError mean that one
                 is missing or is no number
    Raises ValueError for a kind that is not computed here.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind in ("dynamic", "ntk_alpha") and parameters.get("alpha"):  # Hunyuan
        kind, base = "default", base * float(parameters["alpha"]) ** (dims / (dims - 2))
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    rates = np.asarray(1 / np.power(np.float32(base), exponents), np.float32)  # in float32 as PyTorch computes them
    if kind == "default":
        return Rope(rates)
    if kind == "proportional":  # Gemma 4: the first pairs turn as if all did, the others stay
        turning = int(float(parameters.get("partial_rotary_factor", 1.0)) * dims // 2)
        return Rope(np.where(np.arange(len(rates)) < turning, rates, 0) / np.float32(parameters.get("factor", 1.0)))
    if kind == "linear":
        return Rope(rates / np.float32(parameters["factor"]))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return Rope(llama3_rates(rates, *(float(parameters[name]) for name in names)))
    if kind == "factors":  # one for each pair, in a GGUF file
        return Rope(rates / _factors(rates, parameters["factors"]))
    if kind == "yarn":
        return _yarn(rates, base, parameters, positions)
    if kind != "longrope":
        raise ValueError(f"kind {kind!r} is not computed here")
    short, long = (_factors(rates, parameters[f"{name}_factor"]) for name in ("short", "long"))
    original = int(parameters["original_max_position_embeddings"])
    stated, stretch = parameters.get("attention_factor"), positions / original
    if stated is None:  # LongRoPE (Ding et al. 2024)
        stated = sqrt(1 + log(stretch) / log(original)) if stretch > 1 else 1.0
    return Rope(rates / short, float(stated), rates / long, original)


def _factors(rates: Array, stated: Any) -> Array:
    """One factor for each rotated pair. Raises ValueError for another number of them, and where one is 0 or NaN."""
    factors = np.asarray(stated, np.float32).reshape(rates.shape)
    if not (np.isfinite(factors).all() and factors.all()):
        raise ValueError("a factor is 0, NaN or infinity")
    return factors
