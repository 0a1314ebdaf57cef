"""Reading the value of one score rule: what it may be, and what to say when it is something else."""

import os
from collections.abc import Iterable, Sequence
from math import inf, prod
from typing import Any, cast

import numpy as np

from clearhead.arrays import FLOATS, adopt, broadcast, plain
from clearhead.axes import WEIGHTS, Array, heads_first, named
from clearhead.errors import DtypeError, FileError, RuleError, SelectionError, ShapeError, shown
from clearhead.room import array_bytes, check_room
from clearhead.words import LANGUAGES, Language

Window = tuple[int | None, int | None]
_MANY = 2**20  # layers or heads: no model has so many, and a wrong list may have no end
FAR = 2**53  # positions beyond this are no use to anybody, and would overflow


def whole_number(name: str, value: Any, least: int = 1, most: int | None = None, hint: str = "") -> int:
    """Read a whole number from `least` to `most`; a bool is none. Raises RuleError."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        reach = f"from {least:,} up" if most is None else f"from {least:,} to {most:,}"
        raise RuleError(f"{name} is {shown(value)}: expected a whole number {reach}.", hint)
    return int(value)


def read_place(name: str, value: Any, size: int) -> int:
    """Read an index among `size`, a negative one counts from the end. Raises SelectionError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SelectionError(f"{name} is {shown(value)}: expected a whole number.")
    if not -size <= value < size:
        raise SelectionError(f"{name} {shown(value)} is outside 0..{size - 1}." if size else f"there is no {name}.")
    return int(value) % size


def read_path(value: Any) -> str | os.PathLike[str]:
    """Read the name of a file. Raises DtypeError for what is no text, FileError for one that no file can have."""
    if not isinstance(value, (str, os.PathLike)):
        raise DtypeError(f"path is {shown(value)}: expected the name of a file, as text.", 'path="page.html"')
    try:
        zero = b"\0" in os.fsencode(value)
    except UnicodeEncodeError:
        zero = True
    if zero:
        raise FileError(f"path is {shown(value)}: no file can be called so.")
    return value


def read_language(value: Any) -> Language:
    """Read "en" or "zh". Raises RuleError."""
    if not isinstance(value, str) or value not in LANGUAGES:
        raise RuleError(f"language is {shown(value)}: expected 'en' or 'zh'.", 'language="zh"')
    return cast("Language", str(value))


def read_slice(name: str, value: Any, size: int) -> range:
    """Read a slice of `size` places. Raises SelectionError."""
    try:
        return range(size)[value]
    except (TypeError, ValueError):
        raise SelectionError(f"{name} is {shown(value)}: expected a slice of whole numbers.") from None


def read_number(name: str, value: Any, default: float) -> float:
    """Read a finite number, or the default."""
    if value is None:
        return default
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        if not isinstance(value, (int, float)) and getattr(value, "requires_grad", False):
            raise TypeError
        number = float(value)
    except OverflowError:
        raise RuleError(f"{name} is too large for a float: the largest is 1.8e308.") from None
    except Exception:  # what a stranger's __float__ raises is its own
        raise RuleError(f"{name} is {shown(value)}: expected a number.") from None
    if not -inf < number < inf:
        raise RuleError(f"{name} is {number}: expected a finite number.", f"leave {name} out for its default.")
    return number


def read_numbers(name: str, value: Any) -> Array:
    """Read an array of real numbers of any dtype, to be computed with in float64. Raises DtypeError or SizeError."""
    array: Array = adopt(value, name)[0]
    if array.dtype.kind not in "iuf" and array.dtype not in FLOATS:
        raise DtypeError(f"{name} is {array.dtype}: expected numbers.", f"{name}.astype(np.float32)")
    check_room(f"{name} in float64", array_bytes(array.shape, 8), "give fewer tokens or columns.")
    return array


def check_probability(name: str, value: Any) -> None:
    """Raise unless value is a number between 0 and 1."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.integer, np.floating))
        or not 0.0 <= value <= 1.0
    ):
        raise RuleError(f"{name} is {shown(value)}: expected a probability, 0 to 1.")


def read_softcap(value: Any) -> float | None:
    """Read a positive number, or None."""
    if value is None:
        return None
    cap = read_number("softcap", value, 0.0)
    if cap <= 0:
        raise RuleError(
            f"softcap is {cap}: expected a positive number c, for c·tanh(s/c).", "softcap=None turns it off."
        )
    return cap


def read_members(name: str, value: Any, kinds: tuple[type, ...], wanted: str, hint: str) -> list[Any]:
    """Read a list, or whatever else can be walked, whose members are all of these kinds. Raises SelectionError.

    An array has one axis. It ends at the first member of another kind, and for more than a million members.
    """
    walked = isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and getattr(value, "ndim", 1) == 1
    if not walked:
        raise SelectionError(f"{name} is {shown(value)}: expected {wanted}.", hint)
    found: list[Any] = []
    for member in value:
        if isinstance(member, bool) or not isinstance(member, kinds):
            raise SelectionError(f"{name} holds {shown(member)}: expected {wanted}.", hint)
        if len(found) == _MANY:
            raise SelectionError(f"{name} holds more than {_MANY:,} members: expected {wanted}.", hint)
        found.append(member)
    return found


def read_flag(name: str, value: Any) -> bool:
    """Read True or False."""
    if value is None or isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise RuleError(f"{name} is {shown(value)}: expected True or False.")


def read_window(value: Any) -> Window:
    """Read (left, right), each a number of keys or None."""
    if value is None:
        return (None, None)
    sides = tuple(value) if isinstance(value, (tuple, list)) else ()
    whole = all(s is None or (isinstance(s, (int, np.integer)) and not isinstance(s, bool) and s >= 0) for s in sides)
    if len(sides) != 2 or not whole:
        raise RuleError(
            f"window is {shown(value)}: expected (left, right), each a whole number of keys from 0 up, or None.",
            "window=(255, 0) sees the last 256 keys, itself included.",
        )
    left, right = (None if side is None else min(int(side), 4 * FAR) for side in sides)
    return left, right


def read_matrix(name: str, value: Any, shape: tuple[int, ...], device: str = "cpu") -> Array | None:
    """Bias and mask: broadcast to the weights' shape, as a view where NumPy can; in the CPU's memory or on `device`."""
    if value is None:
        return None
    array = plain(value, name, device)
    if name == "mask" and array.dtype != np.bool_:
        raise DtypeError(
            f"mask is {array.dtype}: expected bool, True = may attend.",
            "numbers to add to the scores go in `bias`; mask.astype(bool) makes 1/0 a mask.",
        )
    if name == "bias" and array.dtype not in FLOATS:
        raise DtypeError(f"bias is {array.dtype}: expected a float dtype.", "True/False per position goes in `mask`.")
    try:
        broadcast(array, shape)
    except (ValueError, RuntimeError):
        raise ShapeError(
            f"{name} has shape {array.shape}, which does not broadcast to {named(shape, WEIGHTS)}.",
            f"one {name} per batch is {name}[:, None, None, :] for keys alone.",
        ) from None
    own = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    lead = shape[:-3]  # joining the batch axes may copy: before the other axes are broadcast, it copies little
    joined = heads_first(broadcast(own, lead + own.shape[len(lead) :]))
    return broadcast(joined, (prod(lead), *(1, *shape)[-3:]))


def one_per_head(name: str, value: Any, heads: int, ndim: int) -> Array | None:
    """Validate one number per query head, (heads,) in float64; for inputs of 2 axes a single number will do."""
    if value is None:
        return None
    array = plain(value, name)
    if array.shape != (heads,) and not (ndim == 2 and array.ndim == 0):
        raise ShapeError(f"{name} has shape {array.shape}: expected one number per query head, (heads {heads},).")
    if array.dtype.kind not in "iuf" and array.dtype not in FLOATS:
        raise DtypeError(f"{name} is {array.dtype}: expected a float dtype.")
    numbers = array.reshape(heads).astype(np.float64)
    none = np.isneginf(numbers) & (name == "sinks")  # a sink of -inf adds nothing
    if not (np.isfinite(numbers) | none).all():
        raise RuleError(f"{name} is {shown(numbers.tolist())}: expected finite numbers.")
    return numbers


def as_int64(name: str, array: Array) -> Array:
    """Whole numbers of any dtype as int64. Raises RuleError for one beyond 2^53, SizeError for more than memory."""
    if array.dtype == np.uint64 and (array > np.uint64(FAR)).any():
        raise RuleError(f"{name} goes up to {array.max()}: expected whole numbers up to 2^53.")
    check_room(name, array_bytes(array.shape, 8), "give fewer tokens.")
    return array.astype(np.int64)


def _whole(name: str, value: Any, shape: tuple[int, ...], axes: Sequence[str]) -> Array:
    array = plain(value, name)
    if array.dtype.kind not in "iu" and array.size:
        raise DtypeError(f"{name} is {array.dtype}: expected whole numbers.")
    try:
        spread = np.broadcast_to(array, shape)
    except ValueError:
        want = named(shape, axes) if shape else "a single number"
        raise ShapeError(f"{name} has shape {array.shape}: expected {want}.") from None
    return as_int64(name, spread)


def read_lengths(name: str, value: Any, lead: tuple[int, ...], most: int, of: str) -> Array | None:
    """Read one length per batch entry, (batch,) in int64."""
    if value is None:
        return None
    lengths = _whole(name, value, lead, ("batch",)).reshape(-1)
    if ((lengths < 0) | (lengths > most)).any():
        raise RuleError(f"{name} is {shown(lengths.tolist())}: each must lie between 0 and the number of {of}, {most}.")
    return lengths


def read_segments(name: str, value: Any, lead: tuple[int, ...], size: int, axis: str) -> Array | None:
    """Read one label per token, (batch, tokens) in int64."""
    if value is None:
        return None
    return _whole(name, value, (*lead, size), ("batch", axis)).reshape(prod(lead), size)


def read_offset(value: Any, lead: tuple[int, ...], n: int, m: int, *, positional: bool) -> Array:
    """Read one position per batch entry, (batch,) in int64."""
    if value is None:
        if positional and n != m:
            raise RuleError(
                f"causal and window need query_offset when queries ({n}) and keys ({m}) differ: "
                "peers disagree about it.",
                f"query_offset=0 aligns the first query with the first key (PyTorch, JAX); query_offset={m - n} aligns "
                "the last query with the last key (FlashAttention, a key-value cache).",
            )
        value = 0
    offset = _whole("query_offset", value, lead, ("batch",)).reshape(-1)
    if (offset > FAR).any() or (offset < -FAR).any():
        raise RuleError(f"query_offset is {shown(value)}: expected positions between -2^53 and 2^53.")
    return offset
