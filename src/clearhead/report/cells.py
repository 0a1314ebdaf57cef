"""What the lines of a report are made of: headings, names of tokens, numbers, bars and shades, in columns."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.core.axes import Array
from clearhead.digits import fixed
from clearhead.report.streams import shown, spelled
from clearhead.spelling import cut
from clearhead.tables import aligned

Colour = tuple[int, int, int]


def title(text: str) -> Text:
    """A heading; bold where the terminal can."""
    return Text(text, style="bold")


def note(text: str) -> Text:
    """A remark; dim where the terminal can."""
    return Text(text, style="dim")


def label(text: str, width: int) -> str:
    """What `spelled` or `bare` gives, cut or filled to `width` cells."""
    return set_cell_size(cut(shown(text), width), width)


def listed(token: str) -> str:
    """A token in a list: filled to 12 cells, and cut at 30, so that two that begin alike are told apart."""
    name = spelled(token)
    return label(name, max(12, min(30, cell_len(name))))


def columns(widths: Sequence[int], cells: Iterable[str | Text], style: str = "") -> Text:
    """A line of cells as `aligned` has it, in a style; a cell may have a style too."""
    line = Text(style=style)
    for width, cell in zip(widths, cells, strict=False):
        filled = aligned([width], [shown(str(cell))], measure=cell_len)
        line.append(filled, cell.style if isinstance(cell, Text) else None)
    line.rstrip()
    return line


def table(widths: Sequence[int], heads: Iterable[str], rows: Iterable[Any], style: str = "dim") -> Iterator[Text]:
    """Rows under the names of their columns, which have this style."""
    yield columns(widths, heads, style)
    yield from (columns(widths, row) for row in rows)


def figure(number: float, decimals: int, width: int) -> str:
    """A number for a column of this width, in which a space stands before it."""
    return fixed(float(number), decimals, width - 1)


def wrapped(console: Console, lead: str, words: Sequence[str]) -> Iterator[Text]:
    """Words in as many lines as they need, the following ones indented under the first."""
    line, indent = lead, " " * cell_len(lead)
    for word in words:
        if cell_len(line) + cell_len(word) > console.width and line.strip():
            yield Text(line.rstrip())
            line = indent
        line += word
    yield Text(line.rstrip())


def colourful(console: Console) -> bool:
    """Does this console show colour? It has taken NO_COLOR, FORCE_COLOR and pipes into account."""
    return console.color_system is not None and not console.no_color


def shade(cells: Array, high: float | None = None) -> Array:
    """0 to 1 by the square root of the weight: attention is heavy-tailed, and a linear scale shows one cell."""
    high = float(cells.max(initial=0.0, where=np.isfinite(cells))) if high is None else high
    return np.sqrt(np.clip(cells, 0.0, None) / (high or 1.0))  # NaN stays NaN


def between(low: Sequence[float], high: Sequence[float], part: float) -> Colour:
    """The colour at this part of the way from one to another."""
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def rgb(colour: Colour) -> Color:
    """A colour as rich has it."""
    return Color.from_rgb(*colour)


def background(colour: Colour) -> Style:
    """A background with text that can be read on it."""
    red, green, blue = colour
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    return Style(color=rgb((255,) * 3 if dark else (0,) * 3), bgcolor=rgb(colour))
