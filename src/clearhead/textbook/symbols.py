"""Sizes as symbols: n, 2·n·m, d_model/h. They multiply and divide like numbers, so that one computation serves both."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from clearhead.core.rule_values import is_whole

Size = Any  # an int, or a Term where it has a symbol in it

_ORDER = ("B", "h", "h_kv", "n", "m", "d_model", "d_k", "d_v")  # how a product is written; other symbols follow
_PART = re.compile(r"[^\W\d]\w{0,30}|\d{1,15}")
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Term:
    """A number times symbols, each to a power: Term(Fraction(2), (("n", 2),)) is 2·n²."""

    number: Fraction
    powers: tuple[tuple[str, int], ...]  # sorted by symbol; no power is 0

    def __mul__(self, other: Size, sign: int = 1) -> Size:
        """The product, or the quotient where the sign is -1; an int where nothing but a whole number is left."""
        number, factors = _parts(other)
        powers = Counter(dict(self.powers))
        for symbol, power in factors:
            powers[symbol] += sign * power
        return _made(self.number * number**sign, tuple(sorted(part for part in powers.items() if part[1])))

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        """The quotient, which is taken to be whole."""
        return self.__mul__(other, -1)

    def __rfloordiv__(self, other: int) -> Size:
        return Term(Fraction(other), ()) // self

    def __mod__(self, other: Size) -> int:
        """0: what symbols stand for is taken to be divisible."""
        return 0

    __rmod__ = __mod__

    def __str__(self) -> str:
        rank = {symbol: place for place, symbol in enumerate(_ORDER)}
        order = sorted(self.powers, key=lambda part: (rank.get(part[0], len(rank)), part[0]))
        sides = []
        for number, sign in ((self.number.numerator, 1), (self.number.denominator, -1)):
            powers = [(symbol, sign * power) for symbol, power in order if sign * power > 0]
            symbols = [s if power == 1 else s + str(power).translate(_RAISED) for s, power in powers]
            sides.append([str(number)] * (number != 1) + symbols)
        above, below = ("·".join(side) for side in sides)
        return (above or "1") + (f"/({below})" if len(sides[1]) > 1 else f"/{below}" if below else "")

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self)


def read_size(value: Any) -> Size:
    """Read a whole number from 0 up, or text such as "n", "h·d_k", "h*d_k" or "d_model/h"; None where it is neither."""
    if is_whole(value):
        return int(value) if value >= 0 else None
    if not isinstance(value, str):
        return None
    above, slash, below = value.partition("/")
    words = [word.strip() for word in re.split(r"[·*]", above)]
    words += [below.strip()] if slash else []  # n/2·h could mean either of two sizes
    if not all(map(_PART.fullmatch, words)):
        return None
    *parts, last = (int(word) if word.isdecimal() else Term(Fraction(1), ((word, 1),)) for word in words)
    size: Size = 1
    for part in parts if slash else (*parts, last):
        size = size * part
    return size if not slash else size // last if last else None


def is_symbolic(sizes: Iterable[Size]) -> bool:
    """Is one of these sizes more than a number?"""
    return any(isinstance(size, Term) for size in sizes)


def plain(size: Any) -> Any:
    """A size, or several, as JSON has them: a symbol is its text."""
    return [plain(each) for each in size] if isinstance(size, tuple) else size if isinstance(size, int) else str(size)


def total(sizes: Iterable[Size]) -> str:
    """The sum as text: a number with commas, or terms with those of the same symbols joined, such as 2·n·m + 3·n."""
    sums: dict[tuple[tuple[str, int], ...], Fraction] = {}
    for number, powers in map(_parts, sizes):
        sums[powers] = sums.get(powers, Fraction(0)) + number
    parts = [f"{_made(number, powers):,}" for powers, number in sums.items() if number]
    return " + ".join(parts) or "0"


def _parts(size: Size) -> tuple[Fraction, tuple[tuple[str, int], ...]]:
    return (size.number, size.powers) if isinstance(size, Term) else (Fraction(size), ())


def _made(number: Fraction, powers: tuple[tuple[str, int], ...]) -> Size:
    """A Term, or an int where nothing but a whole number is left."""
    return int(number) if not number or (not powers and number.denominator == 1) else Term(number, powers)
