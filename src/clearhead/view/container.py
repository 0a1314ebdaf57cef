"""One document in one HTML file: a JSON header and binary arrays. See docs/page-format.md."""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.arrays import FLOATS
from clearhead.axes import Array

FORMAT = 1
BLOCK = 12 * 2**20  # bytes of a block: 16 MiB of base64, far from any browser's longest string
_ALIGN = 8
_DTYPES = (*FLOATS, *map(np.dtype, (np.uint8, np.int32, np.uint32)))


@dataclass(frozen=True, eq=False, slots=True)
class Document:
    """What a page shows: a header of plain words and numbers, and arrays by name."""

    header: Mapping[str, Any]
    arrays: Mapping[str, Array]


def parts(document: Document, block: int = BLOCK) -> Iterator[tuple[str, str, str]]:
    """The page's data as (id, media type, text): the header, then the arrays' bytes in blocks of one size.

    Arrays stand one after the other, each at a multiple of eight; one may reach over several blocks. The same document
    gives the same text.
    """
    table, chunks, at = {}, [], 0
    for name, given in document.arrays.items():
        array = _stored(given)
        data = array.tobytes()
        table[name] = {"at": at, "shape": list(array.shape), "dtype": array.dtype.name}
        room = -len(data) % _ALIGN
        chunks.append(data + bytes(room))
        at += len(data) + room
    header = {**document.header, "format": FORMAT, "block": block, "arrays": table}
    yield "clearhead", "application/json", _inert(header)
    data = b"".join(chunks)
    for number, start in enumerate(range(0, len(data), block)):
        yield f"clearhead-{number}", "application/octet-stream", b64encode(data[start : start + block]).decode("ascii")


def narrowed(array: Array) -> Array:
    """The same numbers in half the room where float16 holds them all: weights that were stored so."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), array) else array


def _stored(given: Array) -> Array:
    """Row-major and little-endian; truth values as bytes, whole numbers as 32 bits."""
    array = np.ascontiguousarray(given).reshape(np.shape(given))
    if array.dtype == np.bool_:
        return array.astype(np.uint8)
    if array.dtype.kind in "iu" and array.dtype not in _DTYPES:
        return array.astype(np.int32)
    if array.dtype not in _DTYPES:
        raise TypeError(f"a page cannot hold {array.dtype}")
    return array if array.dtype.byteorder in "=|<" else array.astype(array.dtype.newbyteorder("<"))


def _inert(header: dict[str, Any]) -> str:
    """JSON in ASCII that no HTML parser reads as anything but text: `</script>` and `<!--` cannot occur in it."""
    text = json.dumps(header, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
