"""How numbers are printed: in significant digits, so that nothing but zero reads as 0.

The printed text lies within half a unit of its last digit of the number.
"""

from collections.abc import Iterable
from decimal import Decimal
from math import isfinite, isnan
from typing import Any


def significant(number: float, digits: int = 3) -> str:
    """At most `digits` significant digits, without trailing zeros.

    >>> [significant(x) for x in (0.5, 0.0024321, 1.23e-9, 0.0, float("-inf"))]
    ['0.5', '0.00243', '1.23e-9', '0', '-∞']
    """
    return _plain(number) or _short(f"{number:.{digits}g}")


def fixed(number: float, decimals: int, width: int) -> str:
    """`decimals` decimals for a column of `width` characters; more digits, or an exponent, where two would not show.

    >>> [fixed(x, 3, 6) for x in (0.5, 0.0024321, 0.00024321, 123456.7, 0.0)]
    ['0.500', '0.0024', '2.4e-4', '123457', '0']
    """
    if plain := _plain(number):
        return plain
    least = max(0, 1 - Decimal(number).adjusted())  # decimals that surely show two digits
    more = range(decimals, max(decimals, min(least, 40)) + 1)  # longer ones fit no column
    forms = [f"{number:.{places}f}" for places in (*more, *range(decimals - 1, least - 1, -1))]
    forms = [form for form in forms if len(Decimal(form).as_tuple().digits) > 1]
    forms += [_short(f"{number:.{places}e}") for places in (3, 2, 1, 0)]
    return next((form for form in forms if len(form) <= width), forms[-1])


def signed(number: float, decimals: int = 2) -> str:
    """The same with its sign, as differences and effects are printed; zero has none.

    >>> [signed(x) for x in (2.5, -0.25, 0.0)]
    ['+2.50', '-0.25', '0']
    """
    return f"{'+' if number > 0 else ''}{fixed(number, decimals, 9)}"


def percent(share: float) -> str:
    """A share as a percentage in seven characters or a few more: 99.99%, 0.0042%.

    >>> [percent(x) for x in (0.5, 0.0000421, 0.0)]
    ['50.00%', '0.0042%', '0%']
    """
    return f"{fixed(100 * share, 2, 6)}%"


def rounded(x: Any, digits: int) -> Any:
    """A number with at most so many significant digits, as JSON has it; of lists each of their numbers."""
    return [rounded(each, digits) for each in x] if isinstance(x, Iterable) else float(f"{x:.{digits}g}")


def _plain(number: float) -> str:
    """Zero and what is no finite number; empty for all others."""
    if isfinite(number):
        return "" if number else "0"
    return "NaN" if isnan(number) else "∞" if number > 0 else "-∞"


def _short(text: str) -> str:
    """An exponent without its plus and leading zeros."""
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text
