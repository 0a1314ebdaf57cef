"""Describes decoders as data: the sizes and choices of one, and the families, which families.toml lists.

It also has what families choose from: norms, each with its derivative, and rotary positions. They compute in the dtype
of their input. Rotary positions (Su et al. 2021) turn pairs half the rotated width apart, (x_i, x_{i + dims/2}), as in
safetensors; GGUF's pairs of neighbours are put in this order when a file is read.
"""

from collections.abc import Container, Mapping, Sequence
from math import ceil, floor, log, pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array, blocks
from clearhead.core.files import toml_of
from clearhead.engines import native
from clearhead.errors import FileError, shown

CACHED = 128  # tokens whose numbers stay in a core's cache from one operation to the next
Angles = Array | None  # cos and ±sin of positions, as `Rope.angles` makes them; None: nothing is rotated


class LayerSizes(NamedTuple):
    """The sizes of one layer, which may differ between layers.

    values   does it project values? If not, its values are the projected keys, before norms and rotation
    source   the layer whose keys and values it reads
    """

    kv_heads: int
    d_k: int
    d_mlp: int
    values: bool
    source: int


class Config(NamedTuple):
    """The numbers and choices that the computation needs; the weights say which biases and norms there are.

    sizes           one entry for each layer; `kv_heads` and `d_mlp` are those of the first
    d_input         the width of the token's embedding that each layer reads beside the stream (Gemma 4)
    windows         for each layer, how many keys a query sees, its own included; None: all up to its own
    scale           the factor on q·k
    ropes           for each layer, its rotary positions; None: it has none
    slopes          for each head, what ALiBi subtracts from a logit per position between query and key; (): nothing
    clip            queries, keys and values are cut to ±clip
    added_scale     the factor on what attention and MLP add to the residual stream
    parallel        does the MLP read what attention reads, the stream before the layer?
    normed_last     are queries and keys normed after they are rotated, not before?
    experts         in an MLP; `chosen` of them compute each token, with shares that sum to 1 if `shares_sum`
    limit           if given, an MLP is down(act(min(gate, limit))·(1 + up cut to ±limit))
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    d_model: int
    vocabulary: int
    # a model that runs in Transformers keeps the defaults below
    d_mlp: int = 0
    positions: int = 0
    epsilon: float = 0.0
    activation: str = ""
    centred: bool = False  # layer norms, which subtract the mean; else root-mean-square norms
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
    shares_runs: bool = True  # does a variant cost less than a run, because it shares what comes before its change?

    def sources(self) -> set[int]:
        """The layers whose keys and values other layers read."""
        return {size.source for layer, size in enumerate(self.sizes) if size.source != layer}

    def facts(self) -> dict[str, Any]:
        """The entries that reports and --json show."""
        names = ["family", "layers", "heads", "kv_heads", "d_model", "vocabulary"]
        if self.shares_runs:
            names += ["d_mlp", "positions", "epsilon", "activation", "tied"]
        if self.experts:
            names += ["experts", "chosen"]
        return {name: getattr(self, name) for name in names}


class Family(NamedTuple):
    """One family: the names of its numbers and tensors in config.json and GGUF files, and how it computes.

    names        tensor names in safetensors, without .weight or .bias, and their names in GGUF
    architecture its name in GGUF if that is not the model_type; "" if llama.cpp does not have the family
    renamed      parts of layers that GGUF calls by another name of the table
    vectors      the norms of each layer, and sinks
    ones         vectors that are all 1 and in no file
    centred      it has layer norms, not root-mean-square norms
    gated        its MLPs have a gate
    activation   used if config.json names none; GGUF names none at all
    neighbours   the forms, "folder" and "gguf", in which the rows of W^Q and W^K that turn as a pair are neighbours
    by_head      fused q, k and v in safetensors have for each key head its queries' rows, then k's, then v's
    parallel     the MLP reads what attention reads; `use_parallel_residual` in config.json overrides this
    normed_last  queries and keys are normed after they are rotated
    learned      how many rows the table of positions has before the first position; None: there is no table
    unturned     which layers have no rotary positions, as a repeating pattern; `no_rope_layers` overrides it
    far_unturned if some layers have windows, only these have rotary positions
    near_plain   layers with windows have plain rotary positions, even if those of other layers are stretched
    less_one     safetensors store norm weights minus 1
    by_width     embeddings are multiplied by √d_model
    transposed   safetensors store linear weights as (d_in, d_out)
    windows      which layers have the window, as a repeating pattern, if `layer_types` does not list them
    far_last     the last layer never has a window
    epsilon      the key of the norms' ε in config.json
    keys         the keys of config.json that are not named as Llama's
    defaults     values for keys that config.json may lack
    uses         other keys that config.json may lack
    fixed        values of other families' keys that hold for every model of this family
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
    """The file is sound, but NumPy does not run such a model; Transformers may run its folder."""

    def __init__(self, what: str, hint: str = "Transformers may run the folder with safetensors.") -> None:
        super().__init__(what, hint)


_TABLES = toml_of("clearhead.models", "families.toml")


def _family(kind: str) -> Family:
    """Read a family from families.toml; one that is `like` another takes over whatever it does not set itself."""
    own = dict(_TABLES["families"][kind])
    base = _family(own.pop("like")) if "like" in own else Family(_TABLES["names"]["llama"])
    if "names" in own:
        own["names"] = {name: there for table in own["names"] for name, there in _TABLES["names"][table].items()}
    return base._replace(**{**own, "defaults": {**base.defaults, **own.get("defaults", {})}})


FAMILIES = {kind: _family(kind) for kind in _TABLES["families"]}
# Families by the general.architecture of GGUF files.
ARCHITECTURES = {
    kind if family.architecture is None else family.architecture: kind
    for kind, family in FAMILIES.items()
    if family.architecture != ""
}
OTHER_NAMES = {"gemma3_text": "gemma3"}  # a second model_type of the same family
CONFIG, GGUF = _TABLES["config"], _TABLES["gguf"]  # the known keys of both formats


def check_keys(where: str, stated: Mapping[str, Any], used: Container[str], known: Mapping[str, Any]) -> None:
    """Raise NotInNumPyError for a key that is not used and is not known to be harmless.

    where   the words before the key in the error
    known   tables of families.toml: harmless keys, beginnings of harmless keys, and harmless values of other keys
    """
    for key, value in stated.items():
        harmless = key in known["harmless"] or key.startswith(tuple(known["begins"]))
        harmless = value in known["only"][key] if key in known["only"] else harmless
        if not (key in used or harmless or value is None):
            raise NotInNumPyError(f"{where}{key} is {shown(value)}, and this decoder does not know what that changes.")


def normed(x: Array, weight: Array, bias: Array | None, config: Config) -> Array:
    """Norm the last axis, weight·(x − mean)/σ + bias; weight and bias are (d,).

    It is layer norm (Ba et al. 2016), or root-mean-square norm (Zhang, Sennrich 2019), which subtracts no mean.
    """
    if bias is None and not config.centred and native.PACKINGS and x.dtype == np.float32:
        return native.rms_norm(x, weight, config.epsilon)
    y = _standardised(x, config)[0]
    y *= weight
    if bias is not None:
        y += bias
    return y


def norm_back(x: Array, weight: Array, upstream: Array, config: Config) -> Array:
    """Return the derivative by x, (…, d), from the derivative by `normed(x, …)`.

    With y = (x − mean)/σ and u = upstream·weight it is (u − mean(u) − y·mean(u·y))/σ; if the norm subtracts no mean,
    mean(u) drops out.
    """
    y, deviation = _standardised(x, config)
    u = upstream * weight
    along = u - y * (u * y).mean(axis=-1, keepdims=True)
    return np.asarray((along - u.mean(axis=-1, keepdims=True) if config.centred else along) / deviation)


def _standardised(x: Array, config: Config) -> tuple[Array, Array]:
    """Return (x − mean)/σ and σ, (…, 1)."""
    rest = x - x.mean(axis=-1, keepdims=True) if config.centred else x
    deviation = np.sqrt(np.einsum("...d,...d->...", rest, rest)[..., None] / rest.shape[-1] + config.epsilon)
    deviation = deviation.astype(x.dtype, copy=False)
    return rest / deviation, deviation


class Rope(NamedTuple):
    """Rotary positions: pair i turns by position·rates[i]; the rotated part is multiplied by `magnitude`.

    long, original   other rates, for texts of more than `original` tokens (Phi-3)
    warming          queries are multiplied by 1 + warming·ln(1 + ⌊position/original⌋) (Llama 4, Ministral 3)
    """

    rates: Array  # (dims/2,), float32
    magnitude: float = 1.0
    long: Array | None = None
    original: int = 0
    warming: float = 0.0

    def angles(self, places: Array) -> dict[str, Angles]:
        """Return (cos, cos) and (−sin, sin), (2, tokens, dims), times the magnitude, of "q", "k" and "v" there."""
        first, last = int(places.min()), int(places.max())  # variants repeat positions, so each is computed once
        rates = self.rates if self.long is None or last < self.original else self.long
        angles = np.arange(first, last + 1, dtype=np.float32)[:, None] * rates
        cos, sin = np.cos(angles) * self.magnitude, np.sin(angles) * self.magnitude
        both = np.concatenate([cos, cos, -sin, sin], axis=1).reshape(len(angles), 2, -1)
        k = q = both.swapaxes(0, 1)[:, places - first]
        if self.warming:
            q = k * (1 + self.warming * np.log1p(places // self.original)).astype(np.float32)[:, None]
        return {"q": q, "k": k, "v": None}


def alibi_slopes(heads: int, largest: float) -> tuple[float, ...]:
    """Return each head's ALiBi slope (Press et al. 2022): 2^(−largest·i/n), i = 1 … n, n the next power of 2 ≥ heads.

    If heads < n, the slopes with an even i come first, and the surplus ones are dropped.
    """
    count = 1 << (heads - 1).bit_length()
    slopes = (0.5 ** (largest * np.arange(1, count + 1) / count)).tolist()
    return tuple(slopes if count == heads else (slopes[1::2] + slopes[::2])[:heads])


def turned(x: Array, angles: Angles) -> Array:
    """Rotate the pairs of x (…, tokens, d_k); angles None, and the part beyond the rotated width, change nothing."""
    if angles is None:
        return x
    width, made = angles.shape[-1], np.empty(x.shape, np.result_type(x, angles))
    for block in blocks(x.shape[-2], CACHED):
        (cos, sin), some = angles[:, block], x[..., block, :]
        new, turning = made[..., block, :width], some[..., :width]
        new[..., : width // 2], new[..., width // 2 :] = turning[..., width // 2 :], turning[..., : width // 2]
        new *= sin
        new += turning * cos
        made[..., block, width:] = some[..., width:]
    return made


def llama3_rates(rates: Array, factor: float, low: float, high: float, original: float) -> Array:
    """Stretch rates as Llama 3 does: slow pairs turn `factor` times slower, fast ones as before, others in between.

    Source: Llama 3.1's `apply_scaling` (Dubey et al. 2024); low and high are numbers of turns in `original` positions.
    """
    turns = original * rates / np.float32(2 * pi)
    share = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - share) * rates / np.float32(factor) + share * rates


def _yarn(rates: Array, base: float, parameters: Mapping[str, Any], positions: int) -> Rope:
    """Stretch rates by YaRN (Peng et al. 2023): pairs with few turns in the original positions become slower."""
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
    """Read the rotary positions of config.json: pair i turns by base^(−2i/dims), or by a stretched rate.

    parameters   rope_scaling or rope_parameters
    Raises ValueError for a kind that is not supported, KeyError for a missing number, TypeError for one that is none.
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
        raise ValueError(f"kind {kind!r} is not supported")
    short, long = (_factors(rates, parameters[f"{name}_factor"]) for name in ("short", "long"))
    original = int(parameters["original_max_position_embeddings"])
    stated, stretch = parameters.get("attention_factor"), positions / original
    if stated is None:  # LongRoPE (Ding et al. 2024)
        stated = sqrt(1 + log(stretch) / log(original)) if stretch > 1 else 1.0
    return Rope(rates / short, float(stated), rates / long, original)


def _factors(rates: Array, stated: Any) -> Array:
    """Return one factor per rotated pair. Raises ValueError for a wrong number of factors, and for 0, NaN, infinity."""
    factors = np.asarray(stated, np.float32).reshape(rates.shape)
    if not (np.isfinite(factors).all() and factors.all()):
        raise ValueError("a factor is 0, NaN or infinity")
    return factors
