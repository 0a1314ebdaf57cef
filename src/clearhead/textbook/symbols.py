"""Sizes as symbols: n, 2·n·m, d_model/h. They multiply and divide like numbers, so that one computation serves both."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from clearhead.core.rule_values import is_whole
from clearhead.errors import RuleError, expected

Size = Any  # an int, or a Term where it has a symbol in it

_ORDER = ("B", "h", "h_kv", "n", "m", "d_model", "d_k", "d_v")  # how a product is written; other symbols follow
_PART = re.compile(r"[^\W\d]\w{0,30}|\d{1,15}")
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Term:
    """A number times symbols, each to a power: Term(Fraction(2), (("n", 2),)) is 2·n²."""

    number: Fraction
    powers: tuple[tuple[str, int], ...]  # sorted by symbol; no power is 0

    def __mul__(self, other: Size) -> Size:
        term = _term(other)
        if term is None:
            return NotImplemented
        together = Counter(dict(self.powers))
        together.update(dict(term.powers))  # which adds
        return _made(self.number * term.number, together)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        """The quotient, which is taken to be whole."""
        term = _term(other)
        return NotImplemented if term is None else self * _inverse(term)

    def __rfloordiv__(self, other: Size) -> Size:
        return other * _inverse(self)

    def __mod__(self, other: Size) -> int:
        """0: what symbols stand for is taken to be divisible."""
        return 0

    __rmod__ = __mod__

    def __str__(self) -> str:
        rank = {symbol: place for place, symbol in enumerate(_ORDER)}
        order = sorted(self.powers, key=lambda part: (rank.get(part[0], len(rank)), part[0]))
        above = [_power(symbol, power) for symbol, power in order if power > 0]
        below = [_power(symbol, -power) for symbol, power in order if power < 0]
        top, bottom = self.number.numerator, self.number.denominator
        above = [str(top), *above] if top != 1 or not above else above
        below = [str(bottom), *below] if bottom != 1 else below
        return "·".join(above) + (
            f"/{'·'.join(below)}" if len(below) == 1 else f"/({'·'.join(below)})" if below else ""
        )

    def __repr__(self) -> str:
        return str(self)

    def __format__(self, spec: str) -> str:
        return str(self)


def read_size(value: Any) -> Size:
    """Read a whole number from 0 up, or text such as "n", "h·d_k", "h*d_k" or "d_model/h"; None where it is neither."""
    if is_whole(value):
        return int(value) if value >= 0 else None
    if not isinstance(value, str):
        return None
    top, slash, bottom = value.partition("/")
    one = len(re.split(r"[·*]", bottom)) == 1  # n/2·h could mean either of two sizes
    above, below = _product(top), _product(bottom) if slash and one else None
    if not slash or above is None:
        return above
    return above // below if below else None


def read_count(name: str, value: Any) -> Size:
    """Read a whole number from 1 up, or a symbol. Raises RuleError."""
    size = read_size(value)
    if size is None or size == 0:
        raise RuleError(expected(name, value, "a whole number from 1 up, or a symbol"), '{name}="h"', name=name)
    return size


def is_symbolic(sizes: Iterable[Size]) -> bool:
    """Is one of these sizes more than a number?"""
    return any(isinstance(size, Term) for size in sizes)


def plain(size: Any) -> Any:
    """A size, or several, as JSON has them: a symbol is its text."""
    return [plain(each) for each in size] if isinstance(size, tuple) else size if isinstance(size, int) else str(size)


def total(sizes: Iterable[Size]) -> str:
    """The sum as text: a number with commas, or terms with those of the same symbols joined, such as 2·n·m + 3·n."""
    sums: dict[tuple[tuple[str, int], ...], Fraction] = {}
    for size in sizes:
        term = size if isinstance(size, Term) else Term(Fraction(size), ())
        sums[term.powers] = sums.get(term.powers, Fraction(0)) + term.number
    parts = [f"{_made(number, dict(powers)):,}" for powers, number in sums.items() if number]
    return " + ".join(parts) or "0"


def _product(text: str) -> Size:
    """The product of the symbols and numbers in a text; None where it is none."""
    product: Size = 1
    for part in re.split(r"[·*]", text):
        word = part.strip()
        if not _PART.fullmatch(word):
            return None
        product = product * (int(word) if word.isdecimal() else Term(Fraction(1), ((word, 1),)))
    return product


def _term(value: Any) -> Term | None:
    if isinstance(value, Term):
        return value
    return Term(Fraction(value), ()) if is_whole(value) else None


def _inverse(term: Term) -> Term:
    return Term(1 / term.number, tuple((symbol, -power) for symbol, power in term.powers))


def _made(number: Fraction, powers: dict[str, int]) -> Size:
    """A Term, or an int where nothing but a whole number is left."""
    left = tuple(sorted((symbol, power) for symbol, power in powers.items() if power))
    return int(number) if number == 0 or (not left and number.denominator == 1) else Term(number, left)


def _power(symbol: str, power: int) -> str:
    return symbol if power == 1 else symbol + str(power).translate(_RAISED)
