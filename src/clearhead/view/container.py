"""Writes a page's content, a JSON header and binary arrays, as text that an HTML file can hold."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from clearhead.core.arrays import FLOATS
from clearhead.core.axes import Array

BLOCK = 12 * 2**20  # bytes of a block: 15 MiB as text, far below the longest string of any browser
DIGITS = "!#$%()*+,-./0123456789:;=?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{"  # none special in HTML
_ALIGN = 8
_DTYPES = (*FLOATS, *map(np.dtype, (np.uint8, np.int32, np.uint32)))


@dataclass(frozen=True, eq=False, slots=True)
class Document:
    """The content of a page: a header for JSON, and arrays by name."""

    header: Mapping[str, Any]
    arrays: Mapping[str, Array]


def parts(document: Document, block: int = BLOCK) -> Iterator[tuple[str, str]]:
    """Yield the page's data as (id, text): the header, then the arrays' bytes in blocks of `block` bytes.

    All is compressed; the page decompresses the arrays that it needs. Arrays are concatenated, each aligned to eight
    bytes; equal ones are stored once, and one may span several blocks. Deterministic: the same document gives the same
    text. Raises TypeError for an array of a dtype that a page cannot hold.
    """
    table: dict[str, dict[str, Any]] = {}
    starts: dict[bytes, int] = {}
    chunks, end = [], 0
    for name, array in ((name, stored(x)) for name, x in document.arrays.items()):
        data = compressed(array)
        start = starts.setdefault(sha256(data).digest(), end)
        table[name] = {"at": start, "shape": list(array.shape), "dtype": array.dtype.name, "packed": len(data)}
        if start == end:
            chunks.append(data + bytes(-len(data) % _ALIGN))
            end += len(chunks[-1])
    data = b"".join(chunks)
    header = {**document.header, "block": block, "arrays": table}
    text = json.dumps(header, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    yield "clearhead", base85(compressed(np.frombuffer(text.encode(), np.uint8)))
    for number, start in enumerate(range(0, len(data), block)):
        yield f"clearhead-{number}", base85(data[start : start + block])


def base85(data: bytes) -> str:
    """Encode every four bytes (little-endian) as five base-85 digits, lowest first: 6 % shorter than base64.

    Of one to three last bytes each becomes a digit, and there is one more.
    """
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4")
    digits = np.frombuffer(DIGITS.encode("ascii"), np.uint8)
    text = np.empty((len(words), 5), np.uint8)
    for place in range(5):
        words, rest = np.divmod(words, np.uint32(85))
        text[:, place] = digits[rest]
    return text.tobytes()[: -(-5 * len(data) // 4)].decode("ascii")


def compressed(array: Array) -> bytes:
    """Deflate the array by byte planes: the first bytes of all elements, then the second bytes, and so on.

    Exponents repeat and mantissas do not, so planes compress better. Floats of 2 and 4 bytes are rotated left by one
    bit first, which moves the sign out of the exponent's byte.
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
    """Return the array as float16 if that loses nothing, as for weights that were stored in float16; else unchanged."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), array) else array


def stored(values: Array) -> Array:
    """Return the array row-major and little-endian; bool as uint8, integers as int32. Raises TypeError for others."""
    array = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).reshape(values.shape)
    if array.dtype == np.bool_:
        return array.astype(np.uint8)
    if array.dtype.kind in "iu" and array.dtype not in _DTYPES:
        return array.astype(np.int32)
    if array.dtype not in _DTYPES:
        raise TypeError(f"a page cannot hold {array.dtype}")
    return array
