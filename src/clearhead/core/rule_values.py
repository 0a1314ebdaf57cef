"""Reads the value of each score rule, and of other arguments; an error says what was expected and what came."""

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from math import inf, prod
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead.core.arrays import FLOATS, as_array, as_rule_array, broadcast
from clearhead.core.axes import WEIGHTS, Array, heads_first, named
from clearhead.core.namespace import namespace
from clearhead.core.room import array_bytes, check_room
from clearhead.errors import ClearheadError, DtypeError, RuleError, SelectionError, ShapeError, expected, shown

Window = tuple[int | None, int | None]
_MANY = 2**20  # members of a list that is an argument: an iterable may be endless
MOST_THREADS = 1024  # more would only take memory: each thread has its own stack and working memory
FAR = 2**53  # the largest position that is allowed: sums of larger ones could overflow
MOST_FACTOR = 1e18  # the largest factor: its products with scores and positions must fit in float32, up to 3.4e38
LEAST_FACTOR = 1e-30  # the smallest factor that may also divide
_HINT = "computations in float32 end at 3.4e38, in which 1e18 times a score must fit."
MOST_ADDED = 2.0**127  # terms added to a score are clipped to this; twice as much would overflow float32


class Extent(NamedTuple):
    """The shapes that the values of rules must fit."""

    prefix: tuple[int, ...]  # the caller's axes before queries
    heads: int
    queries: int
    keys: int
    d_k: int
    device: str  # bias and mask may stay there; other rules are read into the CPU's memory

    @property
    def lead(self) -> tuple[int, ...]:
        """The caller's axes before heads."""
        return self.prefix[:-1]


Fields = Mapping[str, Any]  # of a Problem, those read so far


def is_whole(value: Any) -> bool:
    """Is this a Python or NumPy integer? True and False do not count."""
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
        wanted = f"a whole number from {least:,} up" if most is None else f"a whole number from {least:,} to {most:,}"
        raise error(expected(name, value, wanted), hint)
    return int(value)


def read_place(name: str, value: Any, size: int) -> int:
    """Read an index into `size` places; a negative one counts from the end. Raises SelectionError."""
    if not is_whole(value):
        raise SelectionError(expected(name, value, "a whole number"))
    if not -size <= value < size:
        raise SelectionError(f"{name} {shown(value)} is outside 0..{size - 1}." if size else f"there is no {name}.")
    return int(value) % size


def layer_name(layer: Any, names: Sequence[str]) -> str:
    """The name of a layer that is given by name or by its number in `names`. Raises SelectionError otherwise."""
    if not is_whole(layer) and not isinstance(layer, str):
        raise SelectionError(expected("layer", layer, "its number or its name"), "layer=0")
    if str(layer) in names:
        return str(layer)
    if isinstance(layer, str) or not -len(names) <= layer < len(names):
        raise SelectionError(f"there is no layer {shown(layer)}.", f"there are: {', '.join(names)}")
    return names[int(layer)]


def read_path(value: Any) -> str | os.PathLike[str]:
    """Read the name of a file. Raises DtypeError for anything but text."""
    if not isinstance(value, (str, os.PathLike)):
        raise DtypeError(expected("path", value, "the name of a file, as text"), 'path="page.html"')
    return value


def read_slice(name: str, value: Any, size: int) -> range:
    """Read a slice of `size` places. Raises SelectionError."""
    try:
        return range(size)[value]
    except (TypeError, ValueError):
        raise SelectionError(expected(name, value, "a slice of whole numbers")) from None


def read_number(name: str, value: Any, default: float | None, hint: str = "") -> float:
    """Read a finite number; None gives the default, if there is one. Raises RuleError."""
    if value is None and default is not None:
        return default
    try:
        tracked = not isinstance(value, (int, float)) and getattr(value, "requires_grad", False)
        if tracked or isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        number = float(value)
    except OverflowError:
        raise RuleError(f"{name} is too large for a float: the largest is 1.8e308.", hint) from None
    except Exception:  # another library's __float__ may raise anything
        raise RuleError(expected(name, value, "a number"), hint) from None
    if not -inf < number < inf:
        away = "" if default is None else f"leave {name} out for its default."
        raise RuleError(expected(name, number, "a finite number"), hint or away)
    return number


def check_size(name: str, numbers: Array | float, *, divides: bool = False) -> None:
    """Raise RuleError for a factor that is too large; with `divides`, also for one that is too small but not 0."""
    size = np.abs(numbers)
    if (size > MOST_FACTOR).any():
        raise RuleError(f"{name} goes up to {size.max():g}: expected at most 1e18 in size.", _HINT)
    if divides and ((size < LEAST_FACTOR) & (size > 0)).any():
        least = size[size > 0].min()
        raise RuleError(f"{name} goes down to {least:g}: expected 1e-30 or more in size.", _HINT)


def limited(x: Any) -> Any:
    """Clip finite numbers to ±2^127, so that two of them can be added in float32; infinities stay."""
    xp = namespace(x)
    return xp.where(xp.isinf(x), x, xp.clip(x, -MOST_ADDED, MOST_ADDED))


def read_numbers(name: str, value: Any) -> Array:
    """Read an array of real numbers of any dtype, for computations in float64. Raises DtypeError or SizeError."""
    array: Array = as_array(value, name)[0]
    check_numbers(name, array)
    return array


def check_numbers(name: str, array: Array) -> None:
    """Raise DtypeError unless these are real numbers, SizeError where they exceed free memory in float64."""
    if array.dtype.kind not in "iuf" and array.dtype not in FLOATS:
        raise DtypeError(f"{name} is {array.dtype}: expected numbers.", f"{name}.astype(np.float32)")
    check_room(f"{name} in float64", array_bytes(array.shape, 8), "give fewer tokens or columns.")


def check_probability(name: str, value: Any) -> None:
    """Raise RuleError unless value is a number from 0 to 1."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0.0 <= value <= 1.0:
        raise RuleError(expected(name, value, "a probability, 0 to 1"))


def read_softcap(value: Any) -> float | None:
    """Read a positive number, or None. Raises RuleError."""
    if value is None:
        return None
    cap = read_number("softcap", value, 0.0)
    if cap <= 0:
        raise RuleError(
            f"softcap is {cap}: expected a positive number c, for c·tanh(s/c).", "softcap=None turns it off."
        )
    check_size("softcap", np.float64(cap), divides=True)
    return cap


def listed(value: Any) -> list[Any]:
    """The members of an iterable, of an array those along its one axis.

    Raises TypeError for anything else, for a text, and for more than a million members: an iterable may be endless.
    """
    try:
        if isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) != 1:
            raise TypeError
        members = list(islice(value, _MANY + 1))
    except Exception as error:  # another library's iterator may raise anything
        raise TypeError from error
    if len(members) > _MANY:
        raise TypeError
    return members


def read_members(name: str, value: Any, kinds: tuple[type, ...], wanted: str, hint: str) -> list[Any]:
    """Read a list or another iterable whose members are all of these kinds. Raises SelectionError.

    An array must have one axis; a million members are the most that are read.
    """
    try:
        members = listed(value)
    except TypeError:
        raise SelectionError(expected(name, value, wanted), hint) from None
    for member in members:
        if isinstance(member, bool) or not isinstance(member, kinds):
            raise SelectionError(f"{name} holds {shown(member)}: expected {wanted}.", hint)
    return members


def read_flag(name: str, value: Any) -> bool:
    """Read True or False; None is False. Raises RuleError."""
    if value is None or isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise RuleError(expected(name, value, "True or False"))


def read_window(value: Any) -> Window:
    """Read (left, right), each a number of keys or None; None alone is (None, None). Raises RuleError."""
    if value is None:
        return (None, None)
    sides = tuple(value) if isinstance(value, (tuple, list)) else ()
    whole = all(side is None or (is_whole(side) and side >= 0) for side in sides)
    if len(sides) != 2 or not whole:
        raise RuleError(
            expected("window", value, "(left, right), each a whole number of keys from 0 up, or None"),
            "window=(255, 0) sees the last 256 keys, itself included.",
        )
    left, right = (None if side is None else min(int(side), 4 * FAR) for side in sides)
    return left, right


def read_matrix(name: str, value: Any, sizes: Extent, _: Fields) -> Array:
    """Read a bias or a mask, broadcast to (batch, heads, queries, keys), as a view where that is possible.

    A value on `sizes.device` stays there; any other is copied to the CPU's memory. Raises DtypeError unless a mask is
    bool and a bias is a float, ShapeError where it does not broadcast.
    """
    array, shape = as_rule_array(value, name, sizes.device), (*sizes.prefix, sizes.queries, sizes.keys)
    if name == "mask" and array.dtype != np.bool_:
        raise DtypeError(
            f"mask is {array.dtype}: expected bool, True = may attend.",
            "numbers to add to the scores go in `bias`; mask != 0 makes 1/0 a mask.",
        )
    if name == "bias" and array.dtype not in FLOATS:
        raise DtypeError(f"bias is {array.dtype}: expected a float dtype.", "True/False per position goes in `mask`.")
    try:
        return spread(array, shape)
    except (ValueError, RuntimeError):
        index = "[:, None]" if array.ndim == 3 else "[:, None, None, :] for keys alone"
        raise ShapeError(
            f"{name} has shape {array.shape}, which does not broadcast to {named(shape, WEIGHTS)}.",
            f"one {name} per batch is {name}{index}.",
        ) from None


def spread(array: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast to `shape`, with its batch axes joined: (batch, heads, …, …), a view where that is possible.

    Raises ValueError, or PyTorch's RuntimeError, where the array does not broadcast to `shape`.
    """
    if len(shape) == 4:
        return broadcast(array, shape)
    broadcast(array, shape)
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    lead = shape[:-3]  # joining the batch axes may copy, so it comes before the other axes are broadcast
    joined = heads_first(broadcast(array, lead + array.shape[len(lead) :]))
    return broadcast(joined, (prod(lead), *(1, *shape)[-3:]))


def read_heads(name: str, value: Any, sizes: Extent, _: Fields) -> Array:
    """Read one number per query head, (heads,), as float64; where q has 2 axes a single number will do.

    Raises ShapeError, DtypeError, or RuleError for a number that is not finite or too large; only a sink may be -inf.
    """
    array, heads = as_rule_array(value, name), sizes.heads
    if array.shape != (heads,) and (sizes.prefix or array.ndim):
        raise ShapeError(f"{name} has shape {array.shape}: expected one number per query head, (heads {heads},).")
    check_numbers(name, array)
    numbers = array.reshape(heads).astype(np.float64)
    none = np.isneginf(numbers) & (name == "sinks")  # a sink of -inf adds nothing
    if not (np.isfinite(numbers) | none).all():
        raise RuleError(expected(name, numbers.tolist(), "finite numbers"))
    if name == "sinks":
        return cast("Array", limited(numbers))
    if name in ("scale", "alibi_slopes"):
        check_size(name, numbers, divides=name == "scale")
    return numbers


def has_axes(value: Any) -> bool:
    """Is this a list or an array of at least one axis, rather than one number?"""
    if isinstance(value, (int, float)):  # also a compiler's symbolic size, which has no attributes
        return False
    return isinstance(value, (list, tuple)) or bool(getattr(value, "ndim", None))


def read_scale(name: str, value: Any, sizes: Extent, _: Fields) -> Array:
    """Read one finite number for all heads, or one per query head, as float64 (heads,); None gives 1/√d_k.

    Raises RuleError, ShapeError or DtypeError.
    """
    if has_axes(value):
        return read_heads(name, value, sizes, {})
    numbers = np.full(sizes.heads, read_number(name, value, 1 / sizes.d_k**0.5 if sizes.d_k else 1.0))
    check_size(name, numbers, divides=True)
    return numbers


def as_int64(name: str, array: Array) -> Array:
    """Whole numbers of any dtype as int64. Raises RuleError for one beyond 2^53, SizeError for more than memory."""
    if array.dtype == np.uint64 and (array > np.uint64(FAR)).any():
        raise RuleError(f"{name} goes up to {array.max()}: expected whole numbers up to 2^53.")
    check_room(name, array_bytes(array.shape, 8), "give fewer tokens.")
    return array.astype(np.int64)


def read_wholes(name: str, value: Any, shape: tuple[int, ...], axes: Sequence[str]) -> Array:
    """Read whole numbers that broadcast to `shape`, as int64. Raises DtypeError, ShapeError, RuleError or SizeError."""
    array = as_rule_array(value, name)
    if array.dtype.kind not in "iu" and array.size:
        raise DtypeError(f"{name} is {array.dtype}: expected whole numbers.")
    try:
        whole = np.broadcast_to(array, shape)
    except ValueError:
        wanted = named(shape, axes) if shape else "a single number"
        raise ShapeError(f"{name} has shape {array.shape}: expected {wanted}.") from None
    return as_int64(name, whole)


def read_lengths(name: str, value: Any, sizes: Extent, _: Fields) -> Array:
    """Read one length per batch entry, (batch,), as int64. Raises RuleError unless each lies within the sequence."""
    of, most = _side(name, sizes)
    lengths = read_wholes(name, value, sizes.lead, ("batch",)).reshape(-1)
    if ((lengths < 0) | (lengths > most)).any():
        raise RuleError(f"{name} is {shown(lengths.tolist())}: each must lie between 0 and the number of {of}, {most}.")
    return lengths


def read_segments(name: str, value: Any, sizes: Extent, _: Fields) -> Array:
    """Read one label per token, (batch, tokens), as int64. Raises DtypeError or ShapeError."""
    axis, size = _side(name, sizes)
    return read_wholes(name, value, (*sizes.lead, size), ("batch", axis)).reshape(prod(sizes.lead), size)


def _side(name: str, sizes: Extent) -> tuple[str, int]:
    """The axis of a rule such as kv_lengths, and its size."""
    return ("keys", sizes.keys) if name.startswith("kv") else ("queries", sizes.queries)


def read_offset(name: str, value: Any, sizes: Extent, before: Fields) -> Array:
    """Read the key position of the first query in each batch entry, (batch,), as int64; None is 0.

    With causal or window, which `before` has, None raises RuleError where the numbers of queries and keys differ.
    """
    n, m = sizes.queries, sizes.keys
    if value is None and n != m and (before["causal"] or before["window"] != (None, None)):
        raise RuleError(
            f"causal and window need query_offset when queries ({n}) and keys ({m}) differ: peers disagree about it.",
            f"query_offset=0 aligns the first query with the first key (PyTorch, JAX); query_offset={m - n} aligns the "
            "last query with the last key (FlashAttention, a key-value cache).",
        )
    offset = read_wholes(name, 0 if value is None else value, sizes.lead, ("batch",)).reshape(-1)
    if (offset > FAR).any() or (offset < -FAR).any():
        raise RuleError(expected(name, value, "positions between -2^53 and 2^53"))
    return offset
