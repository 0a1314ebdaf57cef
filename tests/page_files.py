"""Reads a page's file as a browser does: its scripts, header and arrays; and texts that must not become its markup."""

import json
import zlib
from html.parser import HTMLParser

import numpy as np

from clearhead.core.arrays import FLOATS
from clearhead.view.container import DIGITS

HOSTILE = (
    "<script>window.bad=1</script>",
    "</script><img src=x onerror=window.bad=1>",
    "\"'`&lt;<!--",
    "\u202eright to left \u05e9\u05dc\u05d5\u05dd",
    "👩\u200d🚀🙂",
    "\x00\x07\x1b[31m\ud800",
    "x" * 10000,
)


def bytes_of(text):
    """Decode base-85 text: five digits, lowest first, are four bytes, lowest first."""
    words = (
        sum(DIGITS.index(c) * 85**place for place, c in enumerate(text[position : position + 5]))
        for position in range(0, len(text), 5)
    )
    return b"".join(word.to_bytes(5, "little")[:4] for word in words)[: len(text) * 4 // 5]


def header_in(text):
    """The header, from a page's part that holds it."""
    return json.loads(zlib.decompress(bytes_of(text.strip())))


def header_of(page):
    """The header of a page's HTML."""
    return header_in(scripts(page)["clearhead"])


def unpacked(data, dtype):
    """An array from its planes: the first bytes of all numbers, the second bytes, …; a float's sign is its last bit."""
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(dtype.itemsize, -1)
    turned = np.ascontiguousarray(planes.T)
    if dtype in FLOATS and dtype.itemsize < 8:
        word = turned.view(f"u{dtype.itemsize}")
        turned = word >> 1 | word << (8 * dtype.itemsize - 1)
    return turned.reshape(-1).view(dtype)


class _Scripts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.texts, self.inside = {}, None

    def handle_starttag(self, tag, attrs):
        self.inside = dict(attrs).get("id", "program") if tag == "script" else None

    def handle_data(self, data):
        if self.inside:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data


def scripts(text):
    reader = _Scripts()
    reader.feed(text)
    return reader.texts
