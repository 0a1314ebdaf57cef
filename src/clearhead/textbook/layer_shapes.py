"""A whole layer's shapes from its sizes, n=12 d_model=512 h=8: in symbols, and in numbers where they are given."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from clearhead.errors import RuleError, check_known, expected
from clearhead.textbook.shapes import Steps, shapes
from clearhead.textbook.symbols import Size, plain, read_size

NAMES = ("B", "n", "m", "d_model", "h", "h_kv", "d_k", "d_v")


class LayerShapes(NamedTuple):
    """The same steps twice: with symbols alone, and with every number that is known."""

    symbols: Steps
    numbers: Steps | None  # None where no size is known
    parameters: dict[str, tuple[Size, ...]]  # of w_q, w_k, w_v and w_o: in symbols, and with numbers

    def to_json(self) -> dict[str, Any]:
        """Steps and parameters as plain numbers and text: a size is a number, or a symbol's text."""
        steps = []
        for step, counted in zip(self.symbols, self.numbers or self.symbols, strict=True):
            symbols, sizes = step.to_json(), counted.to_json()
            numbers = {f"{name}_in_numbers": sizes[name] for name in ("shape", "multiply_adds", "bytes")}
            steps.append({name: value for name, value in symbols.items() if name != "bytes"} | numbers)
        return {"steps": steps, "parameters": {name: plain(sizes) for name, sizes in self.parameters.items()}}


def read_sizes(words: Iterable[str]) -> dict[str, int | None]:
    """Read sizes such as "n=12", or "m" for a symbol without a number. Raises UnknownNameError or RuleError."""
    sizes: dict[str, int | None] = {}
    for word in words:
        name, equals, number = word.partition("=")
        check_known("size", [name], NAMES)
        if name in sizes:
            raise RuleError(f"{name} is given twice.", f"give one of them: {word}")
        digits = number.isdecimal() and number.isascii() and len(number) <= 15 and int(number) > 0
        if equals and not digits:
            raise RuleError(expected(name, number, "a whole number from 1 up"), f"{name}=8")
        sizes[name] = int(number) if equals else None
    return sizes


def layer_shapes(sizes: Mapping[str, int | None]) -> LayerShapes:
    """The steps of a layer from X to U, from its sizes by name; None is a size without a number.

    B        texts in a batch; n queries; m keys, for cross-attention, else n; d_model the width of X
    h, h_kv  query heads, and key heads where several query heads share one; d_k, d_v the widths of a head

    d_k is d_model/h and d_v is d_k where they are not given, and d_model is h·d_k. Raises UnknownNameError for another
    name, RuleError or ShapeError where numbers do not divide. O(1).

    >>> layer_shapes({"n": 12, "d_model": 512, "h": 8}).numbers[-1].shape
    (12, 512)
    """
    check_known("size", sizes, NAMES)
    known = _completed({name: size for name, size in sizes.items() if size is not None})
    more = {name for name in ("B", "m", "h_kv") if name in sizes}
    symbols = {name: name for name in NAMES if name not in ("B", "m", "h_kv") or name in more}
    values: dict[str, Size] = {name: known.get(name, name) for name in symbols}
    both = [_weights(each) for each in (symbols, values)]
    parameters = {name: tuple(prod(map(read_size, each[name])) for each in both) for name in both[0]}
    return LayerShapes(_steps(symbols), _steps(values) if known else None, parameters)


def _completed(known: dict[str, int]) -> dict[str, int]:
    """The sizes that follow from others, added."""
    sizes = dict(known)
    if "d_model" not in sizes and {"h", "d_k"} <= set(sizes):
        sizes["d_model"] = sizes["h"] * sizes["d_k"]
    if "d_k" not in sizes and {"h", "d_model"} <= set(sizes):
        if sizes["d_model"] % sizes["h"]:
            raise RuleError(f"d_model {sizes['d_model']} is not divisible by h {sizes['h']}.", "give d_k as well.")
        sizes["d_k"] = sizes["d_model"] // sizes["h"]
    if "d_v" not in sizes and "d_k" in sizes:
        sizes["d_v"] = sizes["d_k"]
    return sizes


def _weights(sizes: Mapping[str, Size]) -> dict[str, Any]:
    d_model, kv = sizes["d_model"], sizes.get("h_kv", sizes["h"])
    return {
        "w_q": (d_model, f"{sizes['h']}·{sizes['d_k']}"),
        "w_k": (d_model, f"{kv}·{sizes['d_k']}"),
        "w_v": (d_model, f"{kv}·{sizes['d_v']}"),
        "w_o": (f"{sizes['h']}·{sizes['d_v']}", d_model),
    }


def _steps(sizes: Mapping[str, Size]) -> Steps:
    lead = (sizes["B"],) if "B" in sizes else ()
    x = (*lead, sizes["n"], sizes["d_model"])
    context = (*lead, sizes["m"], sizes["d_model"]) if "m" in sizes else None
    return shapes(x=x, **_weights(sizes), num_heads=sizes["h"], context=context)
