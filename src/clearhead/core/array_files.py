"""Reads arrays from .npz and .safetensors files, without pickle; headers are checked before they are believed.

A header's shape and dtype are compared with the bytes that are there, and with the memory that is free, before
anything is allocated.
"""

import os
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from clearhead.core.arrays import bfloat16
from clearhead.core.axes import Array
from clearhead.core.files import object_of, read_bytes
from clearhead.core.room import check_room_for_file
from clearhead.errors import FileError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": bfloat16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype(bool),
}  # fmt: skip
_MOST_HEADER = 100 * 2**20  # bytes of a safetensors header; the format's own limit
_BOMB = 100, 2**30  # a zip file is refused if it unpacks to more than 100 times its size and to more than 1 GiB
_MAGIC = b"\x93NUMPY"


def npz(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file, by name.

    Raises FileError where the file is damaged, holds pickled objects, gives a name twice, has a header that does not
    match its bytes, or would unpack to more than the free memory.
    """
    data = read_bytes(path)
    if data.startswith(_MAGIC):
        raise FileError(
            f"{path} is a .npy file: one array without a name.", f'np.savez("{path.stem}.npz", q=q, k=k, v=v)'
        )
    try:
        with ZipFile(BytesIO(data)) as stored:
            entries = stored.infolist()
            _check_claims(path, entries, len(data))
            arrays = {}
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if name in arrays:
                    raise FileError(f"{path} gives {name!r} twice.")
                with stored.open(entry) as file:
                    arrays[name] = _npy(f"{path}: {name!r}", file, entry.file_size)
            return arrays
    except FileError:
        raise
    except Exception as error:  # zip and NumPy's header have some twenty kinds of exceptions for what is malformed
        reason = " ".join(str(error).split()).removesuffix(".") or type(error).__name__
        raise FileError(f"{path} is not a readable .npz file: {reason}.") from None


def safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """A safetensors file's arrays and its metadata. Raises FileError where it is damaged.

    Returns ({name: array}, {key: text}). Arrays share one buffer with the file's bytes where these are aligned. Arrays
    of a dtype that NumPy lacks, such as 8-bit floats, are left out.
    """
    data = bytearray(read_bytes(path))
    header, length = _header(path, data)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _cut(path, "its metadata is not text.")
    parts = _parts(path, header, len(data) - 8 - length)
    whole = np.frombuffer(data, np.uint8, offset=8 + length) if len(data) > 8 + length else np.empty(0, np.uint8)
    arrays = {}
    for name, (start, stop, _, dtype, shape) in parts.items():
        if dtype is not None:
            array = whole[start:stop].view(dtype).reshape(shape)
            arrays[name] = _flags(array if array.flags.aligned else array.copy())
    return arrays, metadata


def entries(path: str | os.PathLike[str]) -> tuple[dict[str, "Entry"], int]:
    """Where a safetensors file's tensors lie, by name, counted from a byte that is returned too.

    Only the header is read. Raises FileError where it does not describe the file.
    """
    length = int.from_bytes(read_bytes(path, first=8), "little")
    header, _ = _header(path, read_bytes(path, first=8 + min(length, _MOST_HEADER)))
    header.pop("__metadata__", None)
    return _parts(path, header, os.path.getsize(path) - 8 - length), 8 + length


def tensor_names(path: str | os.PathLike[str]) -> list[str]:
    """The names of a safetensors file's tensors; only its header is read. Raises FileError."""
    length = int.from_bytes(read_bytes(path, first=8), "little")
    header, _ = _header(path, read_bytes(path, first=8 + min(length, _MOST_HEADER)))
    return [name for name in header if name != "__metadata__"]


def _header(path: object, data: bytes | bytearray) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and its length in bytes."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _MOST_HEADER):
        raise _cut(path, "its header is longer than the file.")
    try:
        return object_of(data[8 : 8 + length].decode("utf-8"), "its header"), length
    except UnicodeDecodeError:
        raise _cut(path, "its header is not UTF-8.") from None
    except FileError as error:
        raise _cut(path, error.what) from None


class Entry(NamedTuple):
    """Where a tensor is stored in the bytes after the header, and how; no dtype where NumPy has none."""

    start: int
    stop: int
    kind: str
    dtype: np.dtype[Any] | None
    shape: list[int]


def _parts(path: object, header: dict[str, Any], size: int) -> dict[str, Entry]:
    """The header's entries, which follow one another and fill `size` bytes."""
    parts = {name: _part(path, name, entry) for name, entry in header.items()}
    places = sorted((part.start, part.stop) for part in parts.values())
    if [start for start, _ in places] + [size] != [0, *(stop for _, stop in places)]:
        raise _cut(path, "its tensors overlap, or do not fill it.")
    return parts


def _part(path: object, name: str, entry: Any) -> Entry:
    """The header's entry for one tensor, checked."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]}:
            numbers = [*shape, start, stop]
            if all(type(number) is int and 0 <= number < 2**63 for number in numbers) and start <= stop:
                known = DTYPES.get(dtype)
                if known is not None and (len(shape) > 64 or prod(shape) * known.itemsize != stop - start):
                    raise _cut(path, f"`{name}` has {stop - start} bytes, which {dtype} of shape {shape} has not.")
                return Entry(start, stop, dtype, known, shape)
    raise _cut(path, f"`{name}` has no dtype, shape and data_offsets.")


def _cut(path: object, why: str) -> FileError:
    return FileError(f"{path} is not a whole safetensors file: {why}", "was the download or copy cut off?")


def _check_claims(path: Path, entries: list[ZipInfo], stored: int) -> None:
    """Refuse arrays that would not fit in memory, and a small file that unpacks to gigabytes."""
    claimed = sum(entry.file_size for entry in entries)
    times, large = _BOMB
    if claimed > large and claimed > times * stored:
        raise FileError(
            f"{path} has {stored / 1e6:.1f} MB and would become {claimed / 1e9:,.1f} GB: it is not read.",
            "np.savez, which does not compress, writes what is really that large.",
        )
    check_room_for_file(path, 2 * claimed, "its arrays")


def _npy(name: str, file: Any, size: int) -> Array:
    """One array; raises unless its header describes exactly the bytes that follow."""
    if not file.peek(6).startswith(_MAGIC):
        raise FileError(f"{name} is no array.", "np.savez writes arrays only.")
    version = read_magic(file)
    readers = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}
    if version not in readers:
        raise FileError(f"{name} has a header of version {version[0]}.{version[1]}: expected plain numbers.")
    shape, fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise FileError(f"{name} holds pickled Python objects, which can run code: expected numbers.")
    count, rest = prod(shape), size - file.tell()
    if min(shape, default=0) < 0 or len(shape) > 64 or not dtype.itemsize or count * dtype.itemsize != rest:
        raise FileError(f"{name} claims shape {shape} of {dtype}, but has {rest} bytes.")
    array = np.frombuffer(bytearray(file.read(rest)), dtype, count) if rest else np.empty(0, dtype)
    return _flags(array.reshape(shape, order="F" if fortran else "C"))


def _flags(array: Array) -> Array:
    """Booleans as NumPy stores them, 0 and 1: a file may store True as any nonzero byte."""
    return array.view(np.uint8) != 0 if array.dtype == bool else array
