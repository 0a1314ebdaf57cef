"""One document in one HTML file: a JSON header and binary arrays. See docs/page-format.md."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.arrays import FLOATS
from clearhead.axes import Array

FORMAT = 1
BLOCK = 12 * 2**20  # bytes of a block: 15 MiB of text, far from any browser's longest string
DIGITS = "!#$%()*+,-./0123456789:;=?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{"  # none that HTML reads
_ALIGN = 8
_DTYPES = (*FLOATS, *map(np.dtype, (np.uint8, np.int32, np.uint32)))


@dataclass(frozen=True, eq=False, slots=True)
class Document:
    """What a page shows: a header of plain words and numbers, and arrays by name."""

    header: Mapping[str, Any]
    arrays: Mapping[str, Array]
    packed: bool = False  # arrays are compressed, and the page waits for those that it needs


def parts(document: Document, block: int = BLOCK) -> Iterator[tuple[str, str, str]]:
    """The page's data as (id, media type, text): the header, then the arrays' bytes in blocks of one size.

    Arrays stand one after the other, each at a multiple of eight; one may reach over several blocks. The same document
    gives the same text.
    """
    table, chunks, at = {}, [], 0
    for name, given in document.arrays.items():
        array = stored(given)
        data = compressed(array) if document.packed else array.tobytes()
        table[name] = {"at": at, "shape": list(array.shape), "dtype": array.dtype.name}
        if document.packed:
            table[name]["packed"] = len(data)
        room = -len(data) % _ALIGN
        chunks.append(data + bytes(room))
        at += len(data) + room
    header = {**document.header, "format": FORMAT, "block": block, "arrays": table}
    yield "clearhead", "application/json", _inert(header)
    data = b"".join(chunks)
    for number, start in enumerate(range(0, len(data), block)):
        yield f"clearhead-{number}", "application/octet-stream", base85(data[start : start + block])


def base85(data: bytes) -> str:
    """Four bytes, the first one the lowest, as five digits, the first one the lowest: 6 % shorter than base64."""
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4")
    digits = np.frombuffer(DIGITS.encode("ascii"), np.uint8)
    text = np.empty((len(words), 5), np.uint8)
    for place in range(5):
        words, rest = np.divmod(words, np.uint32(85))
        text[:, place] = digits[rest]
    return text.tobytes().decode("ascii")


def compressed(array: Array) -> bytes:
    """First bytes of all numbers, then second bytes, …, deflated: exponents repeat, the lowest bits do not.

    Floats of 2 and 4 bytes are turned by a bit first, so that the sign lies with the lowest bits.
    """
    bits = array.itemsize * 8
    turned = array.reshape(-1)
    floats = array.dtype in FLOATS and bits <= 32
    if floats:
        word = np.dtype(f"u{array.itemsize}").type
        turned = turned.view(word)
        turned = (turned << word(1)) | (turned >> word(bits - 1))
    planes = np.ascontiguousarray(turned.view(np.uint8).reshape(array.size, array.itemsize).T)
    packer = zlib.compressobj(6, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY if floats else zlib.Z_DEFAULT_STRATEGY)
    return packer.compress(planes.tobytes()) + packer.flush()


def narrowed(array: Array) -> Array:
    """The same numbers in half the room where float16 holds them all: weights that were stored so."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), array) else array


def stored(given: Array) -> Array:
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
