"""Reads arrays from .npz and .safetensors files, without pickle, if they fit in the free memory.

The headers of .npz files are checked by NumPy, those of .safetensors files by the library of that name.
"""

import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from clearhead.core.arrays import bfloat16
from clearhead.core.axes import Array
from clearhead.core.files import mapped, read_bytes
from clearhead.core.room import check_room_for_file
from clearhead.errors import FileError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": bfloat16,
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype(bool),
}  # fmt: skip

Tensors = dict[str, tuple[str, Array | None]]  # by name: the dtype as the file calls it, and the numbers


def npz(path: Path) -> dict[str, Array]:
    """The arrays of an .npz file, by name.

    Raises FileError where the file is damaged, holds pickled objects, or would unpack to more than the free memory.
    """
    data = read_bytes(path)
    if data.startswith(b"\x93NUMPY"):
        raise FileError(
            f"{path} is a .npy file: one array without a name.", f'np.savez("{path.stem}.npz", q=q, k=k, v=v)'
        )
    try:
        with ZipFile(BytesIO(data)) as entries:
            claimed = sum(entry.file_size for entry in entries.infolist())
        check_room_for_file(path, 2 * claimed, "its arrays")
        with np.load(BytesIO(data), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except FileError:
        raise
    except Exception as error:  # zip and NumPy have some twenty kinds of exceptions for what is malformed
        reason = " ".join(str(error).split()).removesuffix(".") or type(error).__name__
        hint = "leave out what is None; x.astype(float) makes numbers of objects." if "Object arrays" in reason else ""
        raise FileError(f"{path} is not a readable .npz file: {reason}.", hint) from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise FileError(f"{path}: {name!r} is no array.", "np.savez writes arrays only.")
    return {name: _flags(array) for name, array in arrays.items()}


def safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """A safetensors file's arrays and its metadata. Raises FileError where it is damaged.

    Returns ({name: array}, {key: text}). Arrays of a dtype that NumPy lacks, such as 8-bit floats, are left out.
    """
    tensors, metadata = mapped_tensors(path)
    arrays = {name: array for name, (_, array) in tensors.items() if array is not None}
    return {name: _flags(x if x.flags.aligned else x.copy()) for name, x in arrays.items()}, metadata


def mapped_tensors(path: str | os.PathLike[str]) -> tuple[Tensors, dict[str, str]]:
    """A safetensors file's tensors, memory-mapped, and its metadata. Raises FileError where it is damaged.

    The library safetensors checks the header. None stands for the numbers of a dtype that NumPy lacks.
    """
    from safetensors import SafetensorError, safe_open

    data = mapped(path)
    try:
        with safe_open(path, framework="numpy"):
            header = json.loads(data[8 : (first := 8 + int.from_bytes(data[:8], "little"))])
    except (SafetensorError, ValueError) as error:
        what = f"{path} is not a whole safetensors file: {' '.join(str(error).split()).removesuffix('.')}."
        raise FileError(what, "was the download or copy cut off?") from None
    metadata, tensors = header.pop("__metadata__", {}), Tensors()
    for name, entry in header.items():
        (start, stop), dtype = entry["data_offsets"], DTYPES.get(entry["dtype"])
        tensors[name] = entry["dtype"], None
        if dtype is not None:
            numbers = np.frombuffer(data, np.uint8, stop - start, first + start if stop > start else 0)
            tensors[name] = entry["dtype"], numbers.view(dtype).reshape(entry["shape"])
    return tensors, metadata


def _flags(array: Array) -> Array:
    """Booleans as NumPy stores them, 0 and 1: a file may store True as any nonzero byte."""
    return array.view(np.uint8) != 0 if array.dtype == bool else array
