"""Reads worked examples from .json, .npz and .safetensors files, without pickle; names become lower case."""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core.array_files import npz, safetensors
from clearhead.core.arrays import FLOATS
from clearhead.core.axes import Array
from clearhead.core.files import json_of, read_bytes
from clearhead.core.rules import joined
from clearhead.errors import FileError, check_known

INPUTS = ("q", "k", "v")
NAMES = ("tokens", "source_tokens")
LAYER = ("x", "w_q", "w_k", "w_v", "w_o", "context", "b_q", "b_k", "b_v", "b_o")


def read(place: Path, known: Collection[str]) -> dict[str, Any]:
    """Read a file's names and values as written; JSON's decimals as Decimal.

    The parts of `spans` are a list of three in JSON, and three arrays spans[0], spans[1], spans[2] in the other files.
    NaN and Infinity in JSON, as Python's json.dumps writes them, become floats. Raises FileError when the file is
    missing, malformed, larger than the memory, or has a false header, UnknownNameError for a name that is not known.
    """
    kind = place.suffix.lower()
    if kind in (".pkl", ".pickle", ".pt", ".pth"):
        raise FileError(f"{place.name} is a pickle, which could run code, so it is not opened.", _TENSORS)
    data = _READERS.get(kind, _read_json)(place)
    lowered = {name.lower(): value for name, value in data.items()}
    if len(lowered) < len(data):
        raise FileError(f"{place} gives a name twice, in upper case and in lower case.")
    values = dict(joined(lowered))
    check_known(f"key in {place.name}:", values, known)
    return values


def inputs_of(place: Path, names: Collection[str]) -> tuple[str, ...]:
    """Say which names hold the inputs: q, k, v, or a layer's x, w_q, w_k, w_v (with which q, k and v are claims)."""
    layer = [name for name in LAYER if name in names]
    plain = [name for name in INPUTS if name in names]
    needed: tuple[str, ...] = ("x", "w_q", "w_k", "w_v") if layer else INPUTS
    missing = [name for name in needed if name not in names]
    if layer and plain and missing:
        raise FileError(
            f"{place.name} holds both {plain[0]} and {layer[0]}: give q, k, v, or a layer's x, w_q, w_k, w_v."
        )
    if missing:
        raise FileError(f"{place.name} lacks {', '.join(missing)}.", "it needs q, k, v, or a layer's x, w_q, w_k, w_v.")
    return needed


def names_of(data: dict[str, Any]) -> dict[str, Any]:
    """Pop the names of tokens from a file's values: {"tokens": […], "source_tokens": […]}, None for missing ones.

    An array of texts, as .npz files hold them, becomes a list.
    """
    names = {name: data.pop(name, None) for name in NAMES}
    texts = {n: x.tolist() for n, x in names.items() if isinstance(x, np.ndarray) and x.dtype.kind == "U"}
    return names | texts


def numbers(name: str, value: Any) -> Array:
    """Read nested lists of numbers, or of true and false; null is -∞ in bias, masked and spans[2], NaN in theirs."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf" and value.dtype not in FLOATS:
            raise FileError(f"{name} holds {value.dtype}: expected numbers.")
        return value
    try:
        cells = np.array(value, dtype=object)
    except ValueError:
        cells = np.array(None)
    flat = cells.reshape(-1).tolist()
    if not isinstance(value, list) or any(isinstance(cell, list) for cell in flat):
        raise FileError(f"{name} is not a list of equally long rows of numbers.", f'"{name}": [[1, 0], [0, 1]]')
    if flat and all(isinstance(cell, bool) for cell in flat):
        return cells.astype(bool)
    if name in ("bias", "masked", "spans[2]"):
        flat = [-np.inf if cell is None else cell for cell in flat]
    if name == "theirs":
        flat = [np.nan if cell is None else cell for cell in flat]
    for cell in flat:
        if isinstance(cell, bool) or not isinstance(cell, (int, float, Decimal)):
            raise FileError(f"{name} holds {cell!r}: expected numbers.")
    if all(isinstance(cell, int) and abs(cell) < 2**63 for cell in flat):
        return np.array(flat, dtype=np.int64 if flat else None).reshape(cells.shape)
    with suppress(OverflowError):  # of a whole number of hundreds of digits
        result = np.array([float(cell) for cell in flat])
        if not any(np.isinf(x) and not isinstance(cell, float) for x, cell in zip(result, flat, strict=True)):
            return result.reshape(cells.shape)
    raise FileError(f"{name} holds a number that is too large for float64: the largest is 1.8e308.")


def half_a_decimal(value: Any) -> float:
    """Half of the last decimal in a list: how far the written numbers may lie from the numbers that were meant."""
    decimals = max((-int(d.as_tuple().exponent) for d in _decimals(value)), default=0)
    return 0.5 * 10.0 ** -max(decimals, -308)


def precision(value: Any, array: Array) -> Array:
    """Guess the dtype that a list was printed from: float32 if its numbers have at most nine digits or are exact."""
    short = all(len(d.as_tuple().digits) <= 9 for d in _decimals(value))
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    exact = bool((narrow.astype(np.float64) == array)[np.isfinite(array)].all())
    fits = np.array_equal(np.isfinite(narrow), np.isfinite(array))
    return narrow if (short and fits) or exact else array


def value_of(name: str, value: Any) -> Any:
    """Convert a value by its name: an array of floats, or for rules a number, a flag, a pair or whole numbers."""
    if name in (*INPUTS, *LAYER, "weights", "bias"):
        array = numbers(name, value)
        return array if array.dtype in FLOATS else array.astype(np.float64)
    if name == "spans" and isinstance(value, (list, tuple)):
        return tuple(numbers(f"spans[{place}]", part) for place, part in enumerate(value))
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, Decimal):
        return float(value)
    if name == "window" and isinstance(value, (list, np.ndarray)):
        return tuple(float(side) if isinstance(side, Decimal) else side for side in list(value))
    if isinstance(value, list):
        return numbers(name, value)
    return value


def _decimals(value: Any) -> Iterator[Decimal]:
    if isinstance(value, Decimal) and value.is_finite():
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _decimals(part)


def _read_json(place: Path) -> dict[str, Any]:
    try:
        return json_of(place, number=Decimal)
    except FileError as error:
        hint = error.hint or (_JSON if os.path.isfile(place) else "")
        with suppress(FileError):
            if not error.hint and read_bytes(place)[:4] in (b"PK\x03\x04", b"\x93NUM"):
                hint = "it is a NumPy file: write it by np.savez, with the ending .npz."
        raise FileError(error.what, hint) from None


def _read_safetensors(place: Path) -> dict[str, Any]:
    """The tensors, and other rules from the file's metadata: {"causal": "true", "stage": "weights"}."""
    arrays, metadata = safetensors(place)
    rules: dict[str, Any] = {**metadata}
    for name, text in metadata.items():
        with suppress(ValueError, RecursionError):  # then it is a text
            rules[name] = json.loads(text)
    return rules | arrays


_JSON = 'a .json file holds {"q": [[…]], "k": [[…]], "v": [[…]]}; .npz and .safetensors files need their endings.'
_TENSORS = 'safetensors.torch.save_file({"q": q, "k": k, "v": v, "theirs": out}, "case.safetensors") writes tensors.'
_READERS = {".npz": npz, ".npy": npz, ".safetensors": _read_safetensors}
