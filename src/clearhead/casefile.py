"""Files that hold somebody's numbers: .json, .npz and .safetensors, read without pickle, names in small letters."""

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from clearhead.arrays import FLOATS
from clearhead.axes import Array
from clearhead.errors import FileError

INPUTS = ("q", "k", "v")
LAYER = ("x", "w_q", "w_k", "w_v", "w_o", "context", "b_q", "b_k", "b_v", "b_o")


def read(place: Path) -> dict[str, Any]:
    """A file's names and values as they are written there.

    Raises FileError when the file is missing or malformed.
    """
    reader = {".npz": _read_npz, ".safetensors": _read_safetensors}.get(place.suffix, _read_json)
    data = reader(place)
    lowered = {name.lower(): value for name, value in data.items()}
    if len(lowered) < len(data):
        raise FileError(f"{place} gives a name twice, in capitals and in small letters.")
    return lowered


def inputs_of(place: Path, values: dict[str, Any]) -> tuple[str, ...]:
    """Which names hold the inputs: q, k, v or a layer's x, w_q, w_k, w_v."""
    layer = [name for name in LAYER if name in values]
    plain = [name for name in INPUTS if name in values]
    if layer and plain:
        raise FileError(
            f"{place.name} holds both {plain[0]} and {layer[0]}: give q, k, v, or a layer's x, w_q, w_k, w_v."
        )
    needed = ("x", "w_q", "w_k", "w_v") if layer else INPUTS
    missing = [name for name in needed if name not in values]
    if missing:
        raise FileError(f"{place.name} lacks {', '.join(missing)}.", "it needs q, k, v, or a layer's x, w_q, w_k, w_v.")
    return needed


def numbers(name: str, value: Any) -> Array:
    """A list of numbers, true/false, or of lists of them, all equally long; null is -∞ in bias and masked."""
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
        raise FileError(f"{name} is no list of equally long rows of numbers.", f'"{name}": [[1, 0], [0, 1]]')
    if flat and all(isinstance(cell, bool) for cell in flat):
        return cells.astype(bool)
    if name in ("bias", "masked"):
        flat = [-np.inf if cell is None else cell for cell in flat]
    if name == "theirs":
        flat = [np.nan if cell is None else cell for cell in flat]
    if any(isinstance(cell, bool) or not isinstance(cell, (int, float, Decimal)) for cell in flat):
        odd = next(c for c in flat if isinstance(c, bool) or not isinstance(c, (int, float, Decimal)))
        raise FileError(f"{name} holds {odd!r}: expected numbers.")
    whole = all(isinstance(cell, int) for cell in flat)
    return np.array([cell if whole else float(cell) for cell in flat]).reshape(cells.shape)


def half_a_decimal(value: Any) -> float:
    """Half of the last decimal that a list prints: how far what is meant may lie from what is written."""
    return 0.5 * 10.0 ** -max((-int(d.as_tuple().exponent) for d in _decimals(value)), default=0)


def precision(value: Any, array: Array) -> Array:
    """A list's numbers in the dtype that they were printed from: float32 where nine digits hold them, or it does."""
    short = all(len(d.as_tuple().digits) <= 9 for d in _decimals(value))
    narrow = array.astype(np.float32)
    exact = bool((narrow.astype(np.float64) == array)[np.isfinite(array)].all())
    return narrow if short or exact else array


def value_of(name: str, value: Any) -> Any:
    """What a name's value is: an array of floats, or for rules a number, a flag, a pair or whole numbers."""
    if name in (*INPUTS, *LAYER, "bias"):
        array = numbers(name, value)
        return array if array.dtype in FLOATS else array.astype(np.float64)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, Decimal):
        return float(value)
    if name == "window" and isinstance(value, (list, np.ndarray)):
        return tuple(None if side is None else int(side) for side in value)
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
        data = json.loads(place.read_text(encoding="utf-8"), parse_float=Decimal)
    except FileNotFoundError:
        raise FileError(f"{place} does not exist.") from None
    except OSError as error:
        raise FileError(f"{place} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise FileError(
            f"{place} is not valid JSON: {error}.", "a .npz or .safetensors file needs that ending."
        ) from None
    if not isinstance(data, dict):
        raise FileError(
            f"{place} holds a {type(data).__name__}: expected an object.", '{"q": [[…]], "k": [[…]], "v": [[…]]}'
        )
    return data


def _read_npz(place: Path) -> dict[str, Any]:
    try:
        with np.load(place, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise FileError(f"{place} does not exist.") from None
    except (OSError, ValueError, BadZipFile, EOFError, KeyError, AttributeError) as error:
        raise FileError(f"{place} is not a readable .npz file: {str(error).splitlines()[0]}.") from None


def _read_safetensors(place: Path) -> dict[str, Any]:
    """The tensors, and rules that are no tensors from the file's metadata: {"causal": "true", "stage": "weights"}."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(place, framework="np") as stored:
            values: dict[str, Any] = {name: _said(text) for name, text in (stored.metadata() or {}).items()}
            return values | {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FileError(f"{place} does not exist.") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"{place} is not a readable .safetensors file: {str(error).splitlines()[0]}.") from None


def _said(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
