"""Reads GGUF files (version 2 and 3): a model's metadata, and where its tensors lie.

This module reads the header itself: the package gguf takes seconds for a vocabulary of 49,152 words and trusts every
length. That package unpacks the packed types. Format: ggml's docs/gguf.md.
"""

import mmap
import os
import re
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.files import mapped
from clearhead.errors import FileError, shown
from clearhead.models.families import ARCHITECTURES, FAMILIES, Config, NotInNumPyError, check_keys
from clearhead.models.families import GGUF as KEYS
from clearhead.models.folder import described, one_line
from clearhead.models.tensors import in_order
from clearhead.models.weights import Stored, packings, unpacks

_NUMBERS = {  # GGUF's number types
    kind: struct.Struct(f"<{code}") for kind, code in enumerate("BbHhIif?--Qqd") if code != "-"
}
_STRING, _ARRAY, _LENGTH = 8, 9, _NUMBERS[10]  # a string's length is read without a look-up: there are 100,000
_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"  # of rotary positions
_PLAIN = {0: ("F32", "<f4"), 1: ("F16", "<f2"), 28: ("F64", "<f8"), 30: ("BF16", "<u2")}


class GGUF(NamedTuple):
    """A file's metadata by key, and its tensors by name, memory-mapped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def _number(data: mmap.mmap, kind: int) -> Any:
    """Read the next number, of one of GGUF's types; struct raises if the file ends first."""
    return _NUMBERS[kind].unpack(data.read(_NUMBERS[kind].size))[0]


def _text(data: mmap.mmap) -> str:
    size = _LENGTH.unpack(data.read(8))[0]
    if size > len(data) - data.tell():  # a damaged length would have the weights read as letters
        raise ValueError("a text is longer than the file")
    return data.read(size).decode("utf-8", "backslashreplace")  # a name or licence may be in any encoding


def _value(data: mmap.mmap, kind: int) -> Any:
    """Read the next number, string, or list of either; a list of lists raises KeyError."""
    if kind != _ARRAY:
        return _text(data) if kind == _STRING else _number(data, kind)
    inner, count = _number(data, 4), _number(data, 10)
    if inner == _STRING:
        return [_text(data) for _ in range(count)]
    numbers = np.frombuffer(data, _NUMBERS[inner].format, count, data.tell())
    data.seek(numbers.nbytes, os.SEEK_CUR)
    return numbers.tolist()


def damaged(path: Path, why: str) -> FileError:
    """Make the error for a file that is not GGUF, or is damaged."""
    return FileError(f"{path} is not a whole GGUF file: {why}", "download or copy it again.")


def read(path: Path) -> GGUF:
    """Read and check the header of a GGUF file, and of its other parts; tensors stay on the disk.

    O(size of the headers) time and memory. Raises FileError, MissingExtraError.
    """
    first, *others = map(_read, parts_of(path))
    count, tensors = first.metadata.get("split.count", 1), dict(first.tensors)
    if isinstance(count, int) and count > 1 + len(others):
        raise FileError(f"{path} is one of {count} parts, and its name does not say where the others are.")
    for other in others:
        if twice := other.tensors.keys() & tensors.keys():
            raise damaged(other.path, f"another part has its `{min(twice)}` as well.")
        tensors |= other.tensors
    return first._replace(path=path, tensors=tensors)


def parts_of(path: Path) -> list[Path]:
    """List the files of a model that is split as X-00001-of-00003.gguf, else this file alone. Raises FileError."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", path.name)
    if match is None:
        return [path]
    parts = [path.with_name(f"{match[1]}-{i + 1:05}-of-{match[3]}{match[4]}") for i in range(min(int(match[3]), 999))]
    if missing := next((part for part in parts if not part.is_file()), None):
        what = f"{path} is one of {int(match[3])} parts, and {missing.name} is not beside it."
        raise FileError(what, "put all parts into one folder.")
    return parts


def _read(path: Path) -> GGUF:
    data = mapped(path)
    if data.read(4) != b"GGUF":
        if path.suffix in (".safetensors", ".json", ".bin", ".pt", ".pth"):
            raise FileError(f"{path} is no GGUF file.", "give the folder that has this file and config.json.")
        raise damaged(path, "it does not begin with the letters GGUF.")
    try:
        version = _number(data, 4)
        if version not in (2, 3):
            what = f"GGUF version {version}; versions 2 and 3 are supported."
            what = "a big-endian GGUF file; only little-endian ones are supported." if version % 2**16 == 0 else what
            raise FileError(f"{path} is {what}", "download the usual file of this model.")
        tensors, keys = _number(data, 10), _number(data, 10)
        metadata = {_text(data): _value(data, _number(data, 4)) for _ in range(keys)}
        infos = [(_text(data), _shape(data), _number(data, 4), _number(data, 10)) for _ in range(tensors)]
        if len(metadata) < keys or len({name for name, *_ in infos}) < tensors:
            raise damaged(path, "it has a key or a tensor twice.")
        alignment = metadata.get("general.alignment", 32)
        start = -(-data.tell() // alignment) * alignment
        made = {info[0]: _tensor(path, data, start, *info) for info in infos}
        end = 0
        for name, *_, offset in infos:  # each tensor begins where the one before it ends
            if offset != end:
                raise damaged(path, f"`{name}` begins at byte {offset:,} of the tensors: expected {end:,}.")
            end += -(-made[name].data.nbytes // alignment) * alignment
        return GGUF(path, metadata, made)
    except FileError:
        raise
    except (ArithmeticError, KeyError, MemoryError, TypeError, ValueError, struct.error) as error:
        raise damaged(path, f"its header cannot be read: {one_line(error)}.") from None


def _shape(data: mmap.mmap) -> tuple[int, ...]:
    """Read a tensor's shape, rows first as in NumPy."""
    axes = _number(data, 4)
    if not 1 <= axes <= 4:
        raise ValueError(f"a tensor has {axes} axes")
    return tuple(reversed([_number(data, 10) for _ in range(axes)]))


def _tensor(
    path: Path, data: mmap.mmap, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> Stored:
    if kind in _PLAIN:
        label, code = _PLAIN[kind]
        stored_shape, dtype = shape, np.dtype(code)
    else:
        dtype, (quants, kinds) = np.dtype(np.uint8), packings()
        if not unpacks(kind):
            label = kinds(kind).name if kind in {each.value for each in kinds} else f"number {kind}"
            raise FileError(
                f"{path}: `{name}` has the type {label}, which the package gguf does not unpack.",
                "pip install --upgrade gguf, or use a file with another quantization.",
            )
        label, stored_shape = kinds(kind).name, tuple(quants.quant_shape_to_byte_shape(shape, kinds(kind)))
    size = prod(stored_shape) * dtype.itemsize
    if start + offset + size > len(data):
        raise damaged(path, f"`{name}` would end at byte {start + offset + size:,}, but the file has {len(data):,}.")
    numbers = np.frombuffer(data, np.uint8, size, start + offset).view(dtype).reshape(stored_shape)
    return Stored(label, shape, numbers)


def config_of(file: GGUF) -> Config:
    """Read the decoder that a file's metadata describe. Raises FileError for missing, senseless or unknown entries."""
    architecture, use = (file.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    if architecture == "clip" or use in ("mmproj", "adapter"):
        what = "an adapter" if use == "adapter" else "an image projector"
        raise FileError(f"{file.path} is {what}, and no model by itself.", "give the file of its model.")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise NotInNumPyError(
            f"{file.path} is of architecture {architecture!r}, which does not run in NumPy.",
            f"these do: {', '.join(ARCHITECTURES)}. For others, give the model's folder with safetensors.",
        )
    kind, more = ARCHITECTURES[architecture], KEYS["architectures"].get(architecture, {})
    family = FAMILIES[kind]
    epsilon = "attention.layer_norm_epsilon" if family.centred else "attention.layer_norm_rms_epsilon"
    names = {family.epsilon: epsilon, **KEYS["keys"], **more.get("keys", {})}
    names |= KEYS["experts"] if "experts" in more else {}
    prefix = f"{architecture}."
    stated = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for key, value in stated.items():
        if isinstance(value, list) and value and value.count(value[0]) == len(value) and type(value[0]) is not bool:
            stated[key] = value[0]  # the same for every layer
    for other, key in KEYS["also"].items():
        if other in stated:
            stated.setdefault(key, stated.pop(other))
    if missing := [key for key in (epsilon, *KEYS["needed"], *more.get("needed", ())) if key not in stated]:
        raise FileError(f"{file.path} has no {architecture}.{missing[0]}.")
    known = {**KEYS, "only": {**KEYS["only"], **more.get("only", {})}}
    check_keys(f"{file.path}: {architecture}.", stated, set(names.values()), known)
    keys = {key: f"{architecture}.{name}" for key, name in names.items()}
    data = more.get("defaults", {}) | {key: stated[name] for key, name in names.items() if name in stated}
    data = {key: x for key, x in data.items() if x or key not in KEYS["zero_is_none"]} | dict(family.fixed)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FileError(f"{file.path} has no `token_embd.weight`.")
    if "attention_k_eq_v" in family.defaults:  # no key says it: some layers have W^K and no W^V
        parts = [name.split(".")[-2] for name in file.tensors if ".attn_" in name]
        data["attention_k_eq_v"] = parts.count("attn_v") < parts.count("attn_k")
    data |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in file.tensors}
    data["rope_parameters"] = {"full_attention": _rope_parameters(file, data)}
    windows = [True] if architecture == "llama" else family.windows  # Mistral's files say llama
    config = described(file.path, data, kind, family._replace(windows=windows, keys=keys, defaults={}))
    differ = data.get("v_head_dim", config.sizes[0].d_k) != config.sizes[0].d_k
    if differ or data.get("v_global_head_dim") != data.get("global_head_dim"):
        raise NotInNumPyError(f"{file.path}: keys and values differ in width, which is not supported.")
    short = data.get("sliding_window", config.positions) < config.positions
    if short and not any(config.windows) and "sliding_window_pattern" not in data:
        what = f"{keys['sliding_window']} is {data['sliding_window']}, but nothing says which layers have this window."
        raise NotInNumPyError(f"{file.path}: {what}")
    large = {"gemma2": 46, "gemma3": 62}.get(architecture) == config.layers  # the 27B models
    if large and "attention_multiplier" not in data:
        return config._replace(scale=(config.d_model / config.heads) ** -0.5)
    return config


def _rope_parameters(file: GGUF, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters as config.json has them; a factor without a type is linear, as in llama.cpp."""
    each, short, long = (None if (x := file.tensors.get(name)) is None else x.rows() for name in _FACTORS)
    kind, factor = data.get("rope_type", "linear"), data.get("factor", 1.0)
    if not isinstance(factor, (int, float)) or not factor > 0:
        raise FileError(f"{file.path}: its rotary positions have the factor {shown(factor)}: expected more than 0.")
    factor, known = (1.0 if kind == "none" else factor), kind in ("none", "linear", "longrope")
    if (short is None) != (long is None) or (each is not None and not (known and short is None)):
        raise NotInNumPyError(f"{file.path}: the way its rotary positions are stretched is not supported.")
    if short is not None and long is not None and known:
        kept = ("original_max_position_embeddings", "attention_factor")
        made = {"original_max_position_embeddings": data["max_position_embeddings"], "rope_type": "longrope"}
        made |= {key: data[key] for key in kept if key in data}
        return made | {"short_factor": short * factor, "long_factor": long * factor}
    if data.get("attention_factor", 1.0) != 1:
        raise NotInNumPyError(f"{file.path}: rope.scaling.attn_factor is {data['attention_factor']}.")
    if kind == "yarn" and each is None:
        more = ("beta_fast", "beta_slow", "mscale_all_dim", "truncate", "llama_4_scaling_beta")
        made = {"original_max_position_embeddings": data["max_position_embeddings"], "rope_type": "yarn"}
        made |= {"mscale": 1.0, "factor": factor, "attention_factor": None}
        return made | {key: data[key] for key in ("original_max_position_embeddings", *more) if key in data}
    if each is not None:
        return {"rope_type": "factors", "factors": each * factor}
    return {"rope_type": "linear" if known else kind, "factor": factor}


def stored(file: GGUF, config: Config) -> dict[str, Stored]:
    """Return the weights by name, with the rows of W^Q and W^K in the order of safetensors."""
    pictures = tuple(KEYS["begins"])
    names = [name for name in file.tensors if name not in _FACTORS and not name.startswith(("v.", *pictures))]
    renamed, result = FAMILIES[config.family].renamed, {}
    if "attn_norm_2" in renamed and not any(".attn_norm_2." in name for name in names):
        renamed = {}
    for name in names:
        layer, _, part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")
        end = name.rpartition(".")[2]
        result[f"{layer}.{renamed[part]}.{end}" if part in renamed else name] = file.tensors[name]
    return in_order(result, config, "gguf")
