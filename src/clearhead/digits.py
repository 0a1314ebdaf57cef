"""Prints numbers in significant digits, so that nothing but zero reads as 0.

The printed number is off by at most half a unit of its last digit.
"""

from collections.abc import Iterable
from decimal import Decimal
from math import isfinite, isnan
from typing import Any


def significant(number: float, digits: int = 3) -> str:
    """Print at most `digits` significant digits, without trailing zeros.

    >>> [significant(x) for x in (0.5, 0.0024321, 1.23e-9, 0.0, float("-inf"))]
    ['0.5', '0.00243', '1.23e-9', '0', '-∞']
    """
    return _plain(number) or _short(f"{number:.{digits}g}")


def fixed(number: float, decimals: int, width: int) -> str:
    """Print `decimals` decimals in `width` characters; more, or an exponent, if fewer than two digits would show.

    >>> [fixed(x, 3, 6) for x in (0.5, 0.0024321, 0.00024321, 123456.7, 0.0)]
    ['0.500', '0.0024', '2.4e-4', '123457', '0']
    """
    if plain := _plain(number):
        return plain
    least = max(0, 1 - Decimal(number).adjusted())  # so many decimals show two digits
    more = range(decimals, max(decimals, min(least, 40)) + 1)  # longer ones fit no column
    forms = [f"{number:.{places}f}" for places in (*more, *range(decimals - 1, least - 1, -1))]
    forms = [form for form in forms if len(Decimal(form).as_tuple().digits) > 1]
    forms += [_short(f"{number:.{places}e}") for places in (3, 2, 1, 0)]
    return next((form for form in forms if len(form) <= width), forms[-1])


def signed(number: float) -> str:
    """Print a difference or an effect with its sign and two decimals; zero has no sign.

    >>> [signed(x) for x in (2.5, -0.25, 0.0)]
    ['+2.50', '-0.25', '0']
    """
    return f"{'+' if number > 0 else ''}{fixed(number, 2, 9)}"


def percent(share: float) -> str:
    """Print a share as a percentage in about seven characters: 99.99%, 0.0042%.

    >>> [percent(x) for x in (0.5, 0.0000421, 0.0)]
    ['50.00%', '0.0042%', '0%']
    """
    return f"{fixed(100 * share, 2, 6)}%"


def rounded(x: Any, digits: int) -> Any:
    """Round a number, or every number in lists, to so many significant digits, for JSON."""
    return [rounded(each, digits) for each in x] if isinstance(x, Iterable) else float(f"{x:.{digits}g}")


def _plain(number: float) -> str:
    """Print zero and nonfinite numbers; return "" for all others."""
    if isfinite(number):
        return "" if number else "0"
    return "NaN" if isnan(number) else "∞" if number > 0 else "-∞"


def _short(text: str) -> str:
    """Drop the plus and the leading zeros of an exponent."""
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text
