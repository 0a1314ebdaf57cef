"""Reads GGUF files (version 2 and 3): what they say of a model, and where its tensors lie.

The header is read here and not by the package gguf, whose reader takes seconds for a vocabulary of 49,152 words and
believes every length; packed types are unpacked by it. Format: ggml's docs/gguf.md.
"""

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.errors import FileError
from clearhead.models.families import FAMILIES, Config, windows_of
from clearhead.models.folder import check_layers, check_number, heads_error, rope_error
from clearhead.models.rope import Rope, longrope, longrope_magnitude, plain_rates
from clearhead.models.weights import Stored, packings

_MAGIC = b"GGUF"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {0: ("F32", "<f4"), 1: ("F16", "<f2"), 28: ("F64", "<f8"), 30: ("BF16", "<u2")}
_MOST_ENTRIES = 2**20  # keys or tensors; the largest models have a few thousand


class GGUF(NamedTuple):
    """A file's metadata by key, and its tensors by name, memory-mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


class _Bytes:
    """The file's bytes, read from front to back; what lies beyond its end is an error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.place = path, data, 0

    def take(self, size: int) -> int:
        """Go on by so many bytes; returns where they begin."""
        start = self.place
        if size > len(self.data) - start:
            raise damaged(self.path, "it ends in the middle of its header.")
        self.place += size
        return start

    def number(self, kind: int) -> Any:
        """One number of a type of GGUF's."""
        code = "<" + _NUMBERS[kind]
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        """A string."""
        size = self.number(10)
        start = self.take(size)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise damaged(self.path, "a text in it is not UTF-8.") from None

    def value(self, kind: int) -> Any:
        """A number, a string, or a list of either; lists of lists are not read."""
        if kind == _STRING:
            return self.text()
        if kind in _NUMBERS:
            return self.number(kind)
        if kind != _ARRAY:
            raise damaged(self.path, f"it has a value of type {kind}, which there is not.")
        inner, count = self.number(4), self.number(10)
        if inner == _STRING:
            if count > (len(self.data) - self.place) // 8:
                raise damaged(self.path, "it ends in the middle of its header.")
            return [self.text() for _ in range(count)]
        if inner not in _NUMBERS:
            raise damaged(self.path, f"it has a list of type {inner}, which is not read.")
        code = np.dtype("<" + _NUMBERS[inner])
        start = self.take(count * code.itemsize)
        return np.frombuffer(self.data, code, count, start).tolist()


def damaged(path: Path, why: str) -> FileError:
    """The error for a file that is no GGUF, or not a whole one."""
    return FileError(f"{path} is not a whole GGUF file: {why}", "was the download or copy cut off?")


def read(path: Path) -> GGUF:
    """A GGUF file's header, checked; tensors stay on the disk. Raises FileError, MissingExtraError.

    O(size of the header) time; no more memory than the header's texts take.
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        reason = getattr(error, "strerror", None) or "it is empty"
        raise FileError(f"{path} cannot be read: {reason}.") from None
    source = _Bytes(path, data)
    if data[:4] != _MAGIC:
        raise damaged(path, "it does not begin with GGUF.")
    source.take(4)
    version = source.number(4)
    if version not in (2, 3):
        raise FileError(f"{path} is GGUF version {version}: 2 and 3 are read here.")
    tensors, keys = source.number(10), source.number(10)
    if max(tensors, keys) > _MOST_ENTRIES:
        raise damaged(path, f"it claims {max(tensors, keys)} entries.")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key, kind = source.text(), source.number(4)
        if key in metadata:
            raise damaged(path, f"it gives {key[:80]!r} twice.")
        metadata[key] = source.value(kind)
    infos = [_info(source) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
        raise damaged(path, f"its tensors are aligned to {alignment!r}.")
    start = -(-source.place // alignment) * alignment
    return GGUF(path, metadata, dict(_tensor(source, start, *info) for info in infos))


def _info(source: _Bytes) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's name, shape (rows first, as NumPy has it), type and offset."""
    name, axes = source.text(), source.number(4)
    if not 1 <= axes <= 4:
        raise damaged(source.path, f"`{name[:80]}` has {axes} axes.")
    shape = tuple(reversed([source.number(10) for _ in range(axes)]))
    return name, shape, source.number(4), source.number(10)


def _tensor(
    source: _Bytes, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> tuple[str, Stored]:
    if kind in _PLAIN:
        label, code = _PLAIN[kind]
        stored_shape, dtype = shape, np.dtype(code)
    else:
        label, stored_shape = _packed(source.path, name, shape, kind)
        dtype = np.dtype(np.uint8)
    size = prod(stored_shape) * dtype.itemsize
    if size > len(source.data) - start or offset > len(source.data) - start - size:
        raise damaged(source.path, f"`{name[:80]}` lies beyond its end.")
    data = np.frombuffer(source.data, np.uint8, size, start + offset).view(dtype).reshape(stored_shape)
    return name, Stored(label, shape, data)


def _packed(path: Path, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, tuple[int, ...]]:
    """The name of a packed type, and the shape of its bytes."""
    quants, kinds = packings()
    try:
        label = kinds(kind)
        return label.name, tuple(quants.quant_shape_to_byte_shape(shape, label))
    except (ValueError, KeyError):
        raise damaged(path, f"`{name[:80]}` has shape {shape} and type {kind}, which do not fit.") from None


def config_of(file: GGUF) -> Config:
    """The decoder that a file's metadata describe. Raises FileError for what is missing, senseless or not known."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise FileError(
            f"{file.path} is of architecture {architecture!r}, which does not run in NumPy.",
            f"these do: {', '.join(FAMILIES)}. Of others, Transformers runs the folder with safetensors.",
        )
    read = _Keys(file, architecture)
    family, layers = FAMILIES[architecture], check_layers(file.path, "block_count", read.whole("block_count"))
    if read.has("expert_count") and read.number("expert_count") > 0:
        raise FileError(f"{file.path} has experts, which are not computed here.", "Transformers runs it.")
    heads, d_model = read.whole("attention.head_count"), read.whole("embedding_length")
    kv_heads = read.whole("attention.head_count_kv", heads)
    d_k = read.whole("attention.key_length", max(1, d_model // heads))
    if heads % kv_heads:
        raise heads_error(file.path, heads, kv_heads)
    if read.whole("attention.value_length", d_k) != d_k:
        raise FileError(f"{file.path}: keys and values differ in width, which is not computed here.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FileError(f"{file.path} has no `token_embd.weight`.")
    epsilon = "attention.layer_norm_epsilon" if family.centred else "attention.layer_norm_rms_epsilon"
    kind = "all" if architecture == "llama" else family.windows  # Mistral's files say llama
    window = read.whole("attention.sliding_window") if read.maybe("attention.sliding_window") else None
    windows = windows_of(kind, window, layers)
    large = {"gemma2": 46, "gemma3": 62}.get(architecture) == layers  # the 27B models' query_pre_attn_scalar
    scale = float((d_model / heads if large else d_k) ** -0.5)
    if read.has("attention.scale"):
        scale = read.number("attention.scale", low=1e-9)
    return Config(
        family=architecture,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        d_model=d_model,
        d_k=d_k,
        d_mlp=read.whole("feed_forward_length"),
        positions=read.whole("context_length"),
        vocabulary=embedding.shape[0],
        epsilon=read.number(epsilon, high=1.0),
        activation=family.activation,
        centred=family.centred,
        gated=family.gated,
        tied="output.weight" not in file.tensors,
        windows=windows,
        scales=(scale,) * layers,
        ropes=_ropes(read, architecture, d_k, windows),
        softcap=read.maybe("attn_logit_softcapping"),
        logit_softcap=read.maybe("final_logit_softcapping"),
        embedding_scale=d_model**0.5 if family.by_width else read.number("embedding_scale", 1.0),
        added_scale=read.number("residual_scale", 1.0),
        logit_scale=1 / read.number("logit_scale", 1.0, 1e-9),
    )


class _Keys:
    """The metadata of one architecture; each error names the file and the key."""

    def __init__(self, file: GGUF, architecture: str) -> None:
        self.file, self.prefix = file, architecture

    def has(self, key: str) -> bool:
        """Is the key there?"""
        return f"{self.prefix}.{key}" in self.file.metadata

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        """A number between two bounds; a list of the same number for every layer counts as one."""
        name = f"{self.prefix}.{key}"
        value = self.file.metadata.get(name, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is None:
            raise FileError(f"{self.file.path} does not say {name}.")
        return check_number(self.file.path, name, value, low, high)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 on."""
        return int(self.number(key, default, 1, 2**31))

    def maybe(self, key: str) -> float | None:
        """A number above 0, or None where there is none."""
        return (self.number(key) or None) if self.has(key) else None

    def factors(self, name: str, pairs: int) -> Array | None:
        """One number for each rotated pair, from a tensor."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.shape != (pairs,):
            raise FileError(f"{self.file.path}: `{name}` has shape {tensor.shape} for {pairs} rotated pairs.")
        factors = tensor.rows()
        if not (np.isfinite(factors).all() and factors.all()):
            raise FileError(f"{self.file.path}: `{name}` holds 0, NaN or infinity.")
        return factors


def _ropes(read: _Keys, architecture: str, d_k: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
    if architecture == "gpt2":
        return (None,) * len(windows)
    dims = read.whole("rope.dimension_count", d_k)
    if dims % 2 or dims > d_k:
        raise FileError(f"{read.file.path}: {dims} of {d_k} dimensions are rotated.")
    rates = plain_rates(read.number("rope.freq_base", 10_000.0, 1.0), dims)
    kind = read.file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    factors = read.factors("rope_freqs.weight", dims // 2)
    short, long = (read.factors(f"rope_factors_{name}.weight", dims // 2) for name in ("short", "long"))
    if factors is not None:
        whole = Rope(rates / factors)
    elif short is not None and long is not None:
        original = read.whole("rope.scaling.original_context_length")
        stretched = longrope_magnitude(read.whole("context_length"), original)
        whole = longrope(rates, short, long, read.number("rope.scaling.attn_factor", stretched), original)
    elif kind == "linear":
        whole = Rope(rates / np.float32(read.number("rope.scaling.factor", low=1e-9)))
    elif kind in ("none", "longrope"):
        whole = Rope(rates)
    else:
        raise rope_error(read.file.path, kind)
    if architecture != "gemma3":
        return (whole,) * len(windows)
    near = Rope(plain_rates(10_000.0, dims))  # of the layers with a window; no file says it
    return tuple(near if window else whole for window in windows)


def stored(file: GGUF, config: Config) -> dict[str, Stored]:
    """The weights by name, with rows of W^Q and W^K in the order of safetensors."""
    result = {name: tensor for name, tensor in file.tensors.items() if not name.startswith("rope_")}
    if not FAMILIES[config.family].neighbours:
        return result
    for name, tensor in result.items():
        heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(name.rpartition(".")[0].rpartition(".")[2])
        if heads and tensor.shape[0] % (2 * heads) == 0:
            order = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
            result[name] = Stored(tensor.kind, tensor.shape, tensor.data, order=order)
    return result
