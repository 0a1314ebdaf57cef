"""Shows results as small tables: sentences, named columns, rows, signed bars; aligned text, or HTML in a notebook.

The HTML has no script, so it also shows where scripts are off, and takes its colours from the notebook's theme.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from math import inf, isnan
from typing import TYPE_CHECKING, NamedTuple

from clearhead.words import Language, of_locale, say

QUICK = 2**26  # for at most so many weights, a notebook computes an object's tables unasked
_ROWS, _WIDE = 20, 40  # rows that are shown, and characters that stay on one line
_LEFT = '"text-align:left'  # in each cell: JupyterLab has a rule of its own, and no <style> until it trusts a notebook
_BAR_CELL = f'<td aria-hidden=true style={_LEFT};color:{{}}">{{}}'
_NUMBER = re.compile(r"[+-]?(?:[\d.,]+(?:e-?\d+)?%?|∞)|NaN|[-–]?")
_STYLE = (
    ".clearhead table{border-collapse:collapse;margin:.2em 0 .7em;font-variant-numeric:tabular-nums}"
    ".clearhead :is(th,td){padding:.12em .7em;text-align:right;border-bottom:1px solid #8886;white-space:nowrap}"
    ".clearhead th{font-weight:400;opacity:.75}"
    ".clearhead .wide{white-space:pre-wrap}.clearhead p{margin:.2em 0}.clearhead b{display:block;margin-top:.5em}"
)


class Table(NamedTuple):
    """A sentence, and rows under the names of their columns.

    bars    a number for each row, drawn as a bar: blue above 0, orange below
    notes   sentences below the table
    """

    heading: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    bars: Sequence[float] = ()
    notes: Sequence[str] = ()


class Tabular:
    """An object that a notebook shows as tables, in the language of the locale."""

    __slots__ = ()
    if TYPE_CHECKING:

        def _tables(self, language: Language) -> Iterable[Table]: ...

    def _repr_html_(self) -> str:
        language = of_locale()
        return html(language, self._tables(language))


def html(language: Language, tables: Iterable[Table]) -> str:
    """Write the tables as HTML, each with its first rows and how many more there are."""
    return f'<div class="clearhead"><style>{_STYLE}</style>{"".join(_one(language, each) for each in tables)}</div>'


def aligned(widths: Sequence[int], cells: Iterable[str], gap: str = "", measure: Callable[[str], int] = len) -> str:
    """Pad cells to the widths of their columns; a negative width right-aligns. `measure` counts a text's columns."""
    filled = []
    for width, cell in zip(widths, cells, strict=False):
        space = " " * (abs(width) - measure(cell))
        filled.append(space + cell if width < 0 else cell + space)
    return gap.join(filled)


def bars(numbers: Sequence[float], width: int) -> Iterator[str]:
    """Draw a bar for each number's magnitude, `width` cells for the largest; none for NaN.

    >>> list(bars([1.0, -2.5, float("nan")], 4))
    ['█▋', '████', '']
    """
    high = max((abs(x) for x in numbers if abs(x) < inf), default=0.0) or 1.0
    return (bar(0.0 if isnan(x) else abs(x) / high, width) for x in numbers)


def bar(share: float, width: int) -> str:
    """Draw a bar of up to `width` cells, in eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8])


def _one(language: Language, table: Table) -> str:
    heading, columns, rows, numbers, notes = table
    more = [say(language, "rows more", count=len(rows) - _ROWS)] if len(rows) > _ROWS else []
    above = f"<p><b>{escape(heading)}</b></p>" if heading else ""
    below = "".join(f"<p>{escape(each)}</p>" for each in (*more, *notes))
    if not rows:
        return above + below
    marks = [
        ""
        if all(map(_NUMBER.fullmatch, cells))
        else f' style={_LEFT}"' + " class=wide" * (max(map(len, cells)) > _WIDE)
        for cells in zip(*rows, strict=True)
    ]
    body = [_row(cells, marks) for cells in rows[:_ROWS]]
    if numbers:
        signs = ("#4a86e8" if x > 0 else "#d9730d" for x in numbers)  # on white and on black
        body = list(map(str.__add__, body, map(_BAR_CELL.format, signs, bars(numbers, 10))))
    head = _cells("th scope=col", map(escape, columns), marks)
    return f"{above}<table><tr>{head}<tr>{'<tr>'.join(body)}</table>{below}"


def _row(cells: Sequence[str], marks: Sequence[str]) -> str:
    ends = (escape(cell).split(" ← ") for cell in cells)  # each end of an edge keeps its own writing direction
    return _cells("td", (f"<bdi>{'</bdi> ← <bdi>'.join(each)}</bdi>" for each in ends), marks)


def _cells(tag: str, words: Iterable[str], marks: Sequence[str]) -> str:
    return "".join(f"<{tag}{mark}>{word}" for word, mark in zip(words, marks, strict=True))
