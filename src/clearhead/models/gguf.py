"""Reads GGUF files (version 2 and 3): what they say of a model, and where its tensors lie.

The header is read here and not by the package gguf, whose reader takes seconds for a vocabulary of 49,152 words and
believes every length; packed types are unpacked by it. Format: ggml's docs/gguf.md.
"""

import mmap
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.files import mapped
from clearhead.errors import FileError
from clearhead.models.families import FAMILIES, Config
from clearhead.models.folder import described, one_line
from clearhead.models.weights import Stored, packings

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {0: ("F32", "<f4"), 1: ("F16", "<f2"), 28: ("F64", "<f8"), 30: ("BF16", "<u2")}
# The keys of an architecture, by those of Llama's config.json that say the same; the first five are never missing.
_KEYS = {
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "num_experts": "expert_count",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "rope_theta": "rope.freq_base",
    "rotary_dim": "rope.dimension_count",
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
}
_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")  # where 0 says that it has none


class GGUF(NamedTuple):
    """A file's metadata by key, and its tensors by name, memory-mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def _number(data: mmap.mmap, kind: int) -> Any:
    """The next number, of a type of GGUF's; struct raises where the file ends before it."""
    code = "<" + _NUMBERS[kind]
    return struct.unpack(code, data.read(struct.calcsize(code)))[0]


def _text(data: mmap.mmap) -> str:
    return data.read(_number(data, 10)).decode("utf-8")


def _value(data: mmap.mmap, kind: int) -> Any:
    """The next number, string, or list of either; lists of lists are not read."""
    if kind != _ARRAY:
        return _text(data) if kind == _STRING else _number(data, kind)
    inner, count = _number(data, 4), _number(data, 10)
    if inner == _STRING:
        return [_text(data) for _ in range(count)]
    numbers = np.frombuffer(data, "<" + _NUMBERS[inner], count, data.tell())
    data.seek(numbers.nbytes, os.SEEK_CUR)
    return numbers.tolist()


def damaged(path: Path, why: str) -> FileError:
    """The error for a file that is no GGUF, or not a whole one."""
    return FileError(f"{path} is not a whole GGUF file: {why}", "was the download or copy cut off?")


def read(path: Path) -> GGUF:
    """A GGUF file's header, checked; tensors stay on the disk. Raises FileError, MissingExtraError.

    O(size of the header) time; no more memory than the header's texts take.
    """
    data = mapped(path)
    if data.read(4) != b"GGUF":
        raise damaged(path, "it does not begin with GGUF.")
    try:
        version = _number(data, 4)
        if version not in (2, 3):
            raise FileError(f"{path} is GGUF version {version}: 2 and 3 are read here.")
        tensors, keys = _number(data, 10), _number(data, 10)
        metadata = {_text(data): _value(data, _number(data, 4)) for _ in range(keys)}
        infos = [(_text(data), _shape(data), _number(data, 4), _number(data, 10)) for _ in range(tensors)]
        if len(metadata) < keys or len({name for name, *_ in infos}) < tensors:
            raise damaged(path, "it gives a key or a tensor twice.")
        alignment = metadata.get("general.alignment", 32)
        start = -(-data.tell() // alignment) * alignment
        return GGUF(path, metadata, {name: _tensor(data, start, *info) for name, *info in infos})
    except FileError:
        raise
    except (ArithmeticError, KeyError, MemoryError, TypeError, ValueError, struct.error) as error:
        raise damaged(path, f"its header cannot be read: {one_line(error)}.") from None


def _shape(data: mmap.mmap) -> tuple[int, ...]:
    """A tensor's shape, rows first, as NumPy has it."""
    axes = _number(data, 4)
    if not 1 <= axes <= 4:
        raise ValueError(f"a tensor has {axes} axes")
    return tuple(reversed([_number(data, 10) for _ in range(axes)]))


def _tensor(data: mmap.mmap, start: int, shape: tuple[int, ...], kind: int, offset: int) -> Stored:
    if kind in _PLAIN:
        label, code = _PLAIN[kind]
        stored_shape, dtype = shape, np.dtype(code)
    else:
        dtype, (quants, kinds) = np.dtype(np.uint8), packings()
        label, stored_shape = kinds(kind).name, tuple(quants.quant_shape_to_byte_shape(shape, kinds(kind)))
    size = prod(stored_shape) * dtype.itemsize
    numbers = np.frombuffer(data, np.uint8, size, start + offset).view(dtype).reshape(stored_shape)
    return Stored(label, shape, numbers)


def config_of(file: GGUF) -> Config:
    """The decoder that a file's metadata describe. Raises FileError for what is missing, senseless or not known."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise FileError(
            f"{file.path} is of architecture {architecture!r}, which does not run in NumPy.",
            f"these do: {', '.join(FAMILIES)}. Of others, Transformers runs the folder with safetensors.",
        )
    family = FAMILIES[architecture]
    epsilon = "attention.layer_norm_epsilon" if family.centred else "attention.layer_norm_rms_epsilon"
    keys = {key: f"{architecture}.{name}" for key, name in {family.epsilon: epsilon, **_KEYS}.items()}
    data: dict[str, Any] = {}
    for key, name in keys.items():
        value = file.metadata.get(name)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # the same for every layer
        if value is None and key in (family.epsilon, *list(_KEYS)[:5]):
            raise FileError(f"{file.path} does not say {name}.")
        if value is not None and (value or key not in _NONE):
            data[key] = value
    if data.get("num_experts"):
        raise FileError(f"{file.path} has experts, which are not computed here.", "Transformers runs it.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FileError(f"{file.path} has no `token_embd.weight`.")
    data |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in file.tensors}
    data["rope_parameters"] = _rope_parameters(file, data)
    windows = [True] if architecture == "llama" else family.windows  # Mistral's files say llama
    config = described(file.path, data, architecture, family._replace(windows=windows, keys=keys, defaults={}))
    if data.get("v_head_dim", config.d_k) != config.d_k:
        raise FileError(f"{file.path}: keys and values differ in width, which is not computed here.")
    large = {"gemma2": 46, "gemma3": 62}.get(architecture) == config.layers  # the 27B models
    if large and "attention_multiplier" not in data:
        return config._replace(scales=((config.d_model / config.heads) ** -0.5,) * config.layers)
    return config


def _rope_parameters(file: GGUF, data: Mapping[str, Any]) -> dict[str, Any]:
    """How rotary positions are stretched, as config.json says it."""
    names = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
    each, short, long = (None if (x := file.tensors.get(name)) is None else x.rows() for name in names)
    if each is not None:
        return {"rope_type": "factors", "factors": each}
    if short is not None and long is not None:
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long} | {
            key: data[key] for key in ("original_max_position_embeddings", "attention_factor") if key in data
        }
    kind = data.get("rope_type", "none")
    return {"rope_type": "default" if kind in ("none", "longrope") else kind, "factor": data.get("factor")}


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
