"""Reads the value of each score rule, and of other arguments; an error says what was expected and what came."""

import os
from collections.abc import Iterable, Sequence
from math import inf, prod
from typing import Any, cast

import numpy as np

from clearhead.core.arrays import FLOATS, as_array, as_rule_array, broadcast
from clearhead.core.axes import WEIGHTS, Array, heads_first, named
from clearhead.core.room import array_bytes, check_room
from clearhead.errors import ClearheadError, DtypeError, FileError, RuleError, SelectionError, ShapeError, shown
from clearhead.words import LANGUAGES, Language

Window = tuple[int | None, int | None]
_MANY = 2**20  # layers or heads: no model has so many, and an iterable may be endless
MOST_THREADS = 1024  # more would only take memory: each thread has a stack and a scratch of its own
FAR = 2**53  # the largest position that is allowed: sums of larger ones could overflow


def is_whole(value: Any) -> bool:
    """Is this an integer of Python's or NumPy's? True and False are not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def whole_number(
    name: str,
    value: Any,
    least: int = 1,
    most: int | None = None,
    hint: str = "",
    error: type[ClearheadError] = RuleError,
) -> int:
    """Read a whole number from `least` to `most`. Raises `error`."""
    if not is_whole(value) or value < least or (most is not None and value > most):
        reach = f"from {least:,} up" if most is None else f"from {least:,} to {most:,}"
        raise error(f"{name} is {shown(value)}: expected a whole number {reach}.", hint)
    return int(value)


def read_threads(value: Any) -> int | None:
    """Read a number of threads for one call; None leaves it to set_num_threads. Raises RuleError."""
    return None if value is None else whole_number("num_threads", value, 1, MOST_THREADS, "num_threads=2")


def read_place(name: str, value: Any, size: int) -> int:
    """Read an index into `size` places; a negative one counts from the end. Raises SelectionError."""
    if not is_whole(value):
        raise SelectionError(f"{name} is {shown(value)}: expected a whole number.")
    if not -size <= value < size:
        raise SelectionError(f"{name} {shown(value)} is outside 0..{size - 1}." if size else f"there is no {name}.")
    return int(value) % size


def read_path(value: Any) -> str | os.PathLike[str]:
    """Read the name of a file. Raises DtypeError for anything but text, FileError for a name that no file can have."""
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
    """Read a finite number; None gives the default. Raises RuleError."""
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
    except Exception:  # another library's __float__ may raise anything
        raise RuleError(f"{name} is {shown(value)}: expected a number.") from None
    if not -inf < number < inf:
        raise RuleError(f"{name} is {number}: expected a finite number.", f"leave {name} out for its default.")
    return number


def read_numbers(name: str, value: Any) -> Array:
    """Read an array of real numbers of any dtype, for computations in float64. Raises DtypeError or SizeError."""
    array: Array = as_array(value, name)[0]
    if array.dtype.kind not in "iuf" and array.dtype not in FLOATS:
        raise DtypeError(f"{name} is {array.dtype}: expected numbers.", f"{name}.astype(np.float32)")
    check_room(f"{name} in float64", array_bytes(array.shape, 8), "give fewer tokens or columns.")
    return array


def check_probability(name: str, value: Any) -> None:
    """Raise RuleError unless value is a number from 0 to 1."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.integer, np.floating))
        or not 0.0 <= value <= 1.0
    ):
        raise RuleError(f"{name} is {shown(value)}: expected a probability, 0 to 1.")


def read_softcap(value: Any) -> float | None:
    """Read a positive number, or None. Raises RuleError."""
    if value is None:
        return None
    cap = read_number("softcap", value, 0.0)
    if cap <= 0:
        raise RuleError(
            f"softcap is {cap}: expected a positive number c, for c·tanh(s/c).", "softcap=None turns it off."
        )
    return cap


def read_members(name: str, value: Any, kinds: tuple[type, ...], wanted: str, hint: str) -> list[Any]:
    """Read a list or another iterable whose members are all of these kinds. Raises SelectionError.

    An array must have one axis. Reading stops at the first member of another kind, and after a million members.
    """
    walked = isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and getattr(value, "ndim", 1) == 1
    if not walked:
        raise SelectionError(f"{name} is {shown(value)}: expected {wanted}.", hint)
    members: list[Any] = []
    for member in value:
        if isinstance(member, bool) or not isinstance(member, kinds):
            raise SelectionError(f"{name} holds {shown(member)}: expected {wanted}.", hint)
        if len(members) == _MANY:
            raise SelectionError(f"{name} holds more than {_MANY:,} members: expected {wanted}.", hint)
        members.append(member)
    return members


def read_flag(name: str, value: Any) -> bool:
    """Read True or False; None is False. Raises RuleError."""
    if value is None or isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise RuleError(f"{name} is {shown(value)}: expected True or False.")


def read_window(value: Any) -> Window:
    """Read (left, right), each a number of keys or None; None alone is (None, None). Raises RuleError."""
    if value is None:
        return (None, None)
    sides = tuple(value) if isinstance(value, (tuple, list)) else ()
    whole = all(side is None or (is_whole(side) and side >= 0) for side in sides)
    if len(sides) != 2 or not whole:
        raise RuleError(
            f"window is {shown(value)}: expected (left, right), each a whole number of keys from 0 up, or None.",
            "window=(255, 0) sees the last 256 keys, itself included.",
        )
    left, right = (None if side is None else min(int(side), 4 * FAR) for side in sides)
    return left, right


def read_matrix(name: str, value: Any, shape: tuple[int, ...], device: str = "cpu") -> Array | None:
    """Read a bias or a mask, broadcast to (batch, heads, queries, keys), as a view where that is possible.

    shape     the weights' shape with the caller's leading axes, (…, heads, queries, keys)
    device    a value that lies there stays there; any other is copied to the CPU's memory

    Raises DtypeError unless a mask is bool and a bias is a float, ShapeError where it does not broadcast.
    """
    if value is None:
        return None
    array = as_rule_array(value, name, device)
    if name == "mask" and array.dtype != np.bool_:
        raise DtypeError(
            f"mask is {array.dtype}: expected bool, True = may attend.",
            "numbers to add to the scores go in `bias`; mask.astype(bool) makes 1/0 a mask.",
        )
    if name == "bias" and array.dtype not in FLOATS:
        raise DtypeError(f"bias is {array.dtype}: expected a float dtype.", "True/False per position goes in `mask`.")
    try:
        return spread(array, shape)
    except (ValueError, RuntimeError):
        raise ShapeError(
            f"{name} has shape {array.shape}, which does not broadcast to {named(shape, WEIGHTS)}.",
            f"one {name} per batch is {name}[:, None, None, :] for keys alone.",
        ) from None


def spread(array: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast to `shape`, with its batch axes joined: (batch, heads, …, …), a view where that is possible.

    Raises ValueError, or PyTorch's RuntimeError, where the array does not broadcast to `shape`.
    """
    if len(shape) == 4:
        return broadcast(array, shape)
    broadcast(array, shape)
    own = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    lead = shape[:-3]  # joining the batch axes may copy, so it comes before the other axes are broadcast
    joined = heads_first(broadcast(own, lead + own.shape[len(lead) :]))
    return broadcast(joined, (prod(lead), *(1, *shape)[-3:]))


def one_per_head(name: str, value: Any, heads: int, ndim: int) -> Array | None:
    """Read one number per query head, (heads,), as float64; where q has 2 axes a single number will do.

    Raises ShapeError, DtypeError, or RuleError for a number that is not finite; only a sink may be -inf.
    """
    if value is None:
        return None
    array = as_rule_array(value, name)
    if array.shape != (heads,) and not (ndim == 2 and array.ndim == 0):
        raise ShapeError(f"{name} has shape {array.shape}: expected one number per query head, (heads {heads},).")
    if array.dtype.kind not in "iuf" and array.dtype not in FLOATS:
        raise DtypeError(f"{name} is {array.dtype}: expected a float dtype.")
    numbers = array.reshape(heads).astype(np.float64)
    none = np.isneginf(numbers) & (name == "sinks")  # a sink of -inf adds nothing
    if not (np.isfinite(numbers) | none).all():
        raise RuleError(f"{name} is {shown(numbers.tolist())}: expected finite numbers.")
    return numbers


def has_axes(value: Any) -> bool:
    """Is this a list or an array of at least one axis, rather than one number?"""
    if isinstance(value, (int, float)):  # also a size that a compiler leaves open, which has no attributes
        return False
    return isinstance(value, (list, tuple)) or bool(getattr(value, "ndim", None))


def read_scale(value: Any, heads: int, ndim: int, default: float) -> Array:
    """Read one finite number for all heads, or one per query head, as float64 (heads,); None gives the default.

    Raises RuleError, ShapeError or DtypeError.
    """
    if has_axes(value):
        numbers = one_per_head("scale", value, heads, ndim)
        assert numbers is not None
        return numbers
    return np.full(heads, read_number("scale", value, default))


def as_int64(name: str, array: Array) -> Array:
    """Whole numbers of any dtype as int64. Raises RuleError for one beyond 2^53, SizeError for more than memory."""
    if array.dtype == np.uint64 and (array > np.uint64(FAR)).any():
        raise RuleError(f"{name} goes up to {array.max()}: expected whole numbers up to 2^53.")
    check_room(name, array_bytes(array.shape, 8), "give fewer tokens.")
    return array.astype(np.int64)


def _whole(name: str, value: Any, shape: tuple[int, ...], axes: Sequence[str]) -> Array:
    array = as_rule_array(value, name)
    if array.dtype.kind not in "iu" and array.size:
        raise DtypeError(f"{name} is {array.dtype}: expected whole numbers.")
    try:
        spread = np.broadcast_to(array, shape)
    except ValueError:
        want = named(shape, axes) if shape else "a single number"
        raise ShapeError(f"{name} has shape {array.shape}: expected {want}.") from None
    return as_int64(name, spread)


def read_lengths(name: str, value: Any, lead: tuple[int, ...], most: int, of: str) -> Array | None:
    """Read one length per batch entry, (batch,), as int64. Raises RuleError unless each is 0 to `most`."""
    if value is None:
        return None
    lengths = _whole(name, value, lead, ("batch",)).reshape(-1)
    if ((lengths < 0) | (lengths > most)).any():
        raise RuleError(f"{name} is {shown(lengths.tolist())}: each must lie between 0 and the number of {of}, {most}.")
    return lengths


def read_segments(name: str, value: Any, lead: tuple[int, ...], size: int, axis: str) -> Array | None:
    """Read one label per token, (batch, tokens), as int64. Raises DtypeError or ShapeError."""
    if value is None:
        return None
    return _whole(name, value, (*lead, size), ("batch", axis)).reshape(prod(lead), size)


def read_offset(value: Any, lead: tuple[int, ...], n: int, m: int, *, positional: bool) -> Array:
    """Read the key position of the first query in each batch entry, (batch,), as int64; None is 0.

    n, m          how many queries and keys there are
    positional    is causal or window in use? Then None raises RuleError where n and m differ
    """
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
