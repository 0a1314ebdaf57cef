"""Why scores are divided by √d_k, in the terminal: a table by width, and one query's softmax as it saturates."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from clearhead.report.console import put, title
from clearhead.report.explained import figure, fill
from clearhead.report.heat import bar
from clearhead.report.streams import shown
from clearhead.textbook.why_scale import Saturation, WhyScale
from clearhead.words import Language, say

_WIDE = 11  # a column's width


def show(console: Console, found: WhyScale, drawn: dict[str, int], growing: Saturation, language: Language) -> None:
    """Print both tables with what they show; `drawn` has the numbers of queries and keys."""
    for line in (*_widths(found, drawn, language), Text(), *_growing(growing, language)):
        put(console, line)


def _widths(found: WhyScale, drawn: dict[str, int], language: Language) -> Iterator[Text]:
    yield title(say(language, "why scale"))
    yield Text(say(language, "variance grows"), style="dim")
    yield Text()
    above = (say(language, key) for key in ("variance of", "not divided", "divided"))
    yield Text(" " * _WIDE + "".join(fill(words, 2 * _WIDE, right=True) for words in above))
    yield title(_line(["d_k", "q·k", shown("/√d_k"), "max a", "a(1-a)", "max a", "a(1-a)"]))
    for d_k, *numbers in zip(*found[:7], strict=True):  # the others are pictures
        yield Text(_line([str(d_k), *(figure(x, 4, _WIDE).strip() for x in numbers)]))
    yield Text()
    yield Text(say(language, "slope vanishes", **drawn), style="dim")


def _line(cells: Sequence[str]) -> str:
    return "".join(fill(cell, _WIDE, right=True) for cell in cells)


def _growing(growing: Saturation, language: Language) -> Iterator[Text]:
    yield title(say(language, "saturation"))
    yield title(_line([say(language, "factor"), *(f"a_{j}" for j in range(growing.weights.shape[-1])), "a(1-a)"]))
    for factor, weights, slopes in zip(*growing, strict=True):
        numbers = (figure(x, 4, _WIDE).strip() for x in (*weights, slopes[0]))
        yield Text(f"{_line([f'{factor:g}', *numbers])}  {bar(4 * float(slopes[0]), 16)}".rstrip())
