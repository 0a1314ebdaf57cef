"""A layer's costs from sizes such as n=12 d_model=512 h=8, in symbols and numbers; and the costs of sparse patterns."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.room import check_room
from clearhead.core.rule_values import whole_number
from clearhead.core.rules import Rules
from clearhead.core.visibility import dense
from clearhead.errors import RuleError, check_known, expected
from clearhead.textbook.shapes import Steps, shapes

NAMES = ("B", "n", "m", "d_model", "h", "h_kv", "d_k", "d_v")
_SYMBOLS = {"batch": "B", "heads": "h", "kv_heads": "h_kv", "queries": "n", "keys": "m", "heads·d_v": "h·d_v"}
_WEIGHTS = {"w_q": "h·d_model·d_k", "w_k": "h_kv·d_model·d_k", "w_v": "h_kv·d_model·d_v", "w_o": "h·d_model·d_v"}
_WORK = {  # multiply-adds of each step that has any
    "q": "h·n·d_model·d_k",
    "k": "h_kv·m·d_model·d_k",
    "v": "h_kv·m·d_model·d_v",
    "scores": "h·n·m·d_k",
    "scaled": "h·n·m",
    "weights": "h·n·m",
    "heads": "h·n·m·d_v",
    "output": "h·n·d_model·d_v",
}
Product = tuple[str, int | None]  # in symbols, and as a number if it is known


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


def layer_costs(sizes: Mapping[str, int | None]) -> dict[str, Any]:
    """List the steps of a layer from X to U with their costs, from its sizes by name; None is a size without a number.

    B        texts in a batch; n: queries; m: keys of cross-attention, default n; d_model: the width of X
    h, h_kv  query heads; key heads, default h; d_k, d_v: the widths of a head

    By default, d_k is d_model/h, d_v is d_k, and d_model is h·d_k.
    Returns plain values: "steps", each with its shape in symbols and in numbers and its "multiply_adds"; the
    "parameters" of each matrix; and their sums. Costs are pairs of symbols and number, None if a size has no number.
    Raises UnknownNameError for another name, RuleError or ShapeError if numbers do not divide. O(1).

    >>> costs = layer_costs({"n": 12, "d_model": 512, "h": 8})
    >>> costs["steps"][4]["multiply_adds"], costs["bytes_of_weights"]
    (('h·n²·d_k', 73728), ('4·h·n²', 4608))
    """
    check_known("size", sizes, NAMES)
    known = _completed({name: size for name, size in sizes.items() if size is not None})
    same = {name: other for name, other in (("m", "n"), ("h_kv", "h")) if name not in sizes}

    def product(text: str) -> Product:
        factors = [same.get(factor, factor) for factor in text.split("·")]
        number = prod(known[factor] for factor in factors) if set(factors) <= set(known) else None
        return "·".join(factors).replace("n·n", "n²"), number

    steps: list[dict[str, Any]] = []
    for step in _steps(sizes, known):
        shape = [product(_SYMBOLS.get(axis, axis)) for axis in step.axes]
        work = product("B·" * ("B" in sizes) + _WORK[step.name]) if step.name in _WORK else ("0", 0)
        formula = "H = concat(O_0 … O_{h-1})" if step.name == "concat" else step.formula
        told = {"name": step.name, "symbol": step.symbol, "formula": formula, "axes": step.axes}
        sizes_of = {"shape": [symbols for symbols, _ in shape], "shape_in_numbers": [b or a for a, b in shape]}
        steps.append(told | sizes_of | {"multiply_adds": work})
    parameters = {name: product(text) for name, text in _WEIGHTS.items()}
    symbols, number = product("B·" * ("B" in sizes) + _WORK["weights"])
    return {
        "steps": steps,
        "parameters": parameters,
        "parameters_in_all": _sum(parameters.values()),
        "multiply_adds_in_all": _sum([step["multiply_adds"] for step in steps if step["name"] in _WORK]),
        "bytes_of_weights": (f"4·{symbols}", number and 4 * number),
    }


def _completed(known: dict[str, int]) -> dict[str, int]:
    """Add the sizes that follow from the given ones."""
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


def _steps(named: Collection[str], known: dict[str, int]) -> Steps:
    """The steps of a layer; unknown sizes are 1 here, and unknown heads as many as the key heads."""
    s = dict.fromkeys(NAMES, 1) | {"h": known.get("h_kv", 1)} | known
    kv_heads = s["h_kv"] if "h_kv" in named else s["h"]
    lead = (s["B"],) if "B" in named else ()
    weights: Any = {
        "w_q": (s["d_model"], s["h"] * s["d_k"]),
        "w_k": (s["d_model"], kv_heads * s["d_k"]),
        "w_v": (s["d_model"], kv_heads * s["d_v"]),
        "w_o": (s["h"] * s["d_v"], s["d_model"]),
    }
    context = (*lead, s["m"], s["d_model"]) if "m" in named else None
    return shapes(x=(*lead, s["n"], s["d_model"]), **weights, num_heads=s["h"], context=context)


def _sum(products: Collection[Product]) -> Product:
    """Add products, counting equal symbols: 2·h·n²·d_k + h·n²."""
    counts = Counter(symbols for symbols, _ in products)
    numbers = [number for _, number in products if number is not None]
    text = " + ".join(symbols if count == 1 else f"{count}·{symbols}" for symbols, count in counts.items())
    return text, sum(numbers) if len(numbers) == len(products) else None


def sparse_patterns(n: int, width: int) -> dict[str, tuple[Rules, Array]]:
    """Compare full attention over n tokens with three patterns whose cost grows with n·width instead of n².

    window     a token attends to itself and to `width` tokens on each side
    blocks     the text is cut into blocks of `width`; a token attends to its own block, the one before, and the first
    segments   several texts of `width` tokens packed in one row; tokens attend within their text

    Returns, by name, the pattern's rules for `attention` and its pairs of query and key, bool (n, n): each pair costs
    d_k multiply-adds for S and d_v for A·V.
    Raises RuleError unless both are whole numbers from 1 up, SizeError if the pairs do not fit in memory. O(n²).
    Source: Child et al. 2019; Beltagy et al. 2020 (window); Zaheer et al. 2020 (blocks).

    >>> {name: int(seen.sum()) for name, (rules, seen) in sparse_patterns(12, 2).items()}
    {'full': 144, 'window': 54, 'blocks': 60, 'segments': 24}
    """
    n = whole_number("n", n, 1)
    width = min(whole_number("width", width, 1), n)
    check_room(f"{n} × {n} pairs", 24 * n * n, "give a smaller n.")
    labels = np.arange(n) // width
    count = int(labels[-1]) + 1
    behind = np.subtract.outer(np.arange(count), np.arange(count))
    table = np.where((behind == 0) | (behind == 1) | (np.arange(count) == 0), 0.0, -np.inf)
    patterns: dict[str, Rules] = {
        "full": {},
        "window": {"window": (width, width)},
        "blocks": {"spans": (labels, labels, table)},
        "segments": {"query_segments": labels, "kv_segments": labels},
    }
    token = np.zeros((n, 1))
    return {name: (rules, dense(describe(token, token, None, rules).problem)[0, 0]) for name, rules in patterns.items()}
