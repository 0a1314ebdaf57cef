"""Makes the elements of a report's lines: headings, names of tokens, numbers, bars and shades, in columns."""

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
    """Make a heading, bold if the terminal can."""
    return Text(text, style="bold")


def note(text: str) -> Text:
    """Make a remark, dim if the terminal can."""
    return Text(text, style="dim")


def label(text: str, width: int) -> str:
    """Cut or pad a spelled token to `width` cells."""
    return set_cell_size(cut(shown(text), width), width)


def listed(token: str) -> str:
    """Spell a token of a list, padded to 12 cells and cut at 30, so that tokens that begin alike stay distinct."""
    name = spelled(token)
    return label(name, max(12, min(30, cell_len(name))))


def columns(widths: Sequence[int], cells: Iterable[str | Text], style: str = "") -> Text:
    """Align cells in a line with a style; a cell may have its own style."""
    line = Text(style=style)
    for width, cell in zip(widths, cells, strict=False):
        filled = aligned([width], [shown(str(cell))], measure=cell_len)
        line.append(filled, cell.style if isinstance(cell, Text) else None)
    line.rstrip()
    return line


def table(widths: Sequence[int], heads: Iterable[str], rows: Iterable[Any], style: str = "dim") -> Iterator[Text]:
    """Yield the lines of a table; `style` is that of its head."""
    yield columns(widths, heads, style)
    yield from (columns(widths, row) for row in rows)


def figure(number: float, decimals: int, width: int) -> str:
    """Print a number for a column of this width, which includes a space before it."""
    return fixed(float(number), decimals, width - 1)


def wrapped(console: Console, lead: str, words: Sequence[str]) -> Iterator[Text]:
    """Wrap words into lines; lines after the first are indented under its words."""
    line, indent = lead, " " * cell_len(lead)
    for word in words:
        if cell_len(line) + cell_len(word) > console.width and line.strip():
            yield Text(line.rstrip())
            line = indent
        line += word
    yield Text(line.rstrip())


def colourful(console: Console) -> bool:
    """Does this console show colour? It already respects NO_COLOR, FORCE_COLOR and pipes."""
    return console.color_system is not None and not console.no_color


def shade(cells: Array, high: float | None = None) -> Array:
    """Scale weights to 0…1 by their square root: attention is heavy-tailed, and a linear scale would show one cell."""
    high = float(cells.max(initial=0.0, where=np.isfinite(cells))) if high is None else high
    return np.sqrt(np.clip(cells, 0.0, None) / (high or 1.0))  # NaN stays NaN


def between(low: Sequence[float], high: Sequence[float], part: float) -> Colour:
    """Mix two colours; `part` is the share of the second."""
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def rgb(colour: Colour) -> Color:
    """Convert a colour to rich's."""
    return Color.from_rgb(*colour)


def background(colour: Colour) -> Style:
    """Make a background style, with a text colour that is readable on it."""
    red, green, blue = colour
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    return Style(color=rgb((255,) * 3 if dark else (0,) * 3), bgcolor=rgb(colour))
