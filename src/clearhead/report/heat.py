"""Matrices in a terminal: numbers on coloured cells up to a dozen columns, half-block pixels beyond.

Nothing needs colour to be understood: without it the numbers stay, and pixels become a ramp of characters.
"""

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.core.axes import Array
from clearhead.core.observations import areas
from clearhead.digits import fixed
from clearhead.report.streams import printable, shown

RAMP = " .:-=+*#%@"
MASK = "·"
MOST_NUMBERS = 12
_LEAD = 9  # the width of a row's token beside pixels
_LEAST_LEAD = 4  # and beside numbers
_STOPS = np.array([[26, 20, 40], [72, 44, 118], [128, 80, 182], [190, 140, 226], [248, 226, 255]], dtype=np.float64)
_MASKED = (58, 58, 62)
_NAN = (220, 60, 50)


def colourful(console: Console) -> bool:
    """Does this console show colour? It has taken NO_COLOR, FORCE_COLOR and pipes into account."""
    return console.color_system is not None and not console.no_color


def label(text: str, width: int) -> str:
    """A token's text cut or filled to `width` cells; spaces, newlines and control characters stay visible."""
    name = printable(text.strip(" ")) or shown("␣")
    if cell_len(name) > width:
        name = set_cell_size(name, max(0, width - 1)) + "…"
    return set_cell_size(name, width)


def cell_width(console: Console, columns: int) -> int:
    """The width of a cell in a table of numbers, its space included; 0 where so many columns do not fit."""
    widths = (7, 6) if columns <= MOST_NUMBERS else ()
    return next((width for width in widths if _LEAST_LEAD + 1 + width * columns <= console.width), 0)


def numbers(
    console: Console, cells: Array, masked: Array, rows: Sequence[str], cols: Sequence[str], high: float | None = None
) -> list[Text]:
    """A table with a number in every cell, coloured by the square root of the weight; masked cells marked.

    `high` is the weight of the last colour; None is the largest.
    """
    width = cell_width(console, len(cols))
    longest = max((cell_len(printable(row.strip())) for row in rows), default=_LEAST_LEAD)
    lead = max(_LEAST_LEAD, min(12, console.width - width * len(cols) - 1, longest))
    heads = [label(name, width - 2).strip() for name in cols]
    lines = [
        Text(" " * (lead + 1) + "".join(" " * (width - 1 - cell_len(name)) + name + " " for name in heads).rstrip())
    ]
    shades = shade(cells, high)
    for i, row in enumerate(rows):
        line = Text(label(row, lead) + " ")
        for j in range(len(cols)):
            if masked[i, j]:
                line.append(MASK.rjust(width - 1) + " ")
            else:
                text = fixed(float(cells[i, j]), 3, width - 1)
                line.append(f"{text:>{width - 1}} ", _ink(shades[i, j]) if colourful(console) else None)
        lines.append(line)
    return lines


def pixels(
    console: Console, cells: Array, masked: Array, rows: Sequence[str], cols: Sequence[str], high: float | None = None
) -> tuple[list[Text], Array]:
    """The matrix as pixels, and the cells they show.

    Two characters to a cell and every row named where there is room; else two rows to a line, pooled to the width.
    `high` is the weight of the last colour; None is the largest shown.
    """
    room = console.width - _LEAD - 1
    if 2 * len(cols) <= room and len(rows) <= room:
        shades = shade(cells, high)
        lines = [Text(" " * (_LEAD + 1) + _ticks(cols, len(cols), 2, room))]
        for i, row in enumerate(rows):
            line = Text(label(row, _LEAD) + " ")
            for j in range(len(cols)):
                line.append(*_cell(console, float(shades[i, j]), hidden=bool(masked[i, j])))
            lines.append(line)
        return lines, cells
    width = min(len(cols), room)
    height = min(len(rows), max(2, round(len(rows) * width / max(1, len(cols)))), 80)
    pooled, hidden = pool(cells, height, width), pool(masked.astype(np.float64), height, width) > 1 - 1e-9
    lines = [Text(" " * (_LEAD + 1) + _ticks(cols, width, 1, room))]
    shades = shade(pooled, high)
    step = 2 if colourful(console) else 1
    for top in range(0, height, step):
        line = Text(label(rows[int(top * len(rows) / height)], _LEAD) + " ")
        for column in range(width):
            if step == 1:
                line.append(MASK if hidden[top, column] else _ramp(float(shades[top, column])))
            else:
                line.append("▀", _half(shades, hidden, top, column))
        lines.append(line)
    return lines, pooled


def pool(cells: Array, height: int, width: int) -> Array:
    """The mean of the cells over each pixel's area; NaN only in pixels whose area has a NaN."""
    _, tall = areas(height, cells.shape[0], slice(0, cells.shape[0]))
    _, broad = areas(width, cells.shape[1], slice(0, cells.shape[1]))
    odd = np.isnan(cells)
    pooled = np.asarray(tall @ np.where(odd, 0.0, cells) @ broad.T)
    return np.where(tall @ odd.astype(np.float64) @ broad.T > 0, np.nan, pooled) if odd.any() else pooled


def shade(cells: Array, high: float | None = None) -> Array:
    """0 to 1 by the square root of the weight: attention is heavy-tailed, and a linear scale shows one cell."""
    high = float(cells.max(initial=0.0, where=np.isfinite(cells))) if high is None else high
    return np.sqrt(np.clip(cells, 0.0, None) / (high or 1.0))  # NaN stays NaN


def bar(share: float, width: int) -> str:
    """A bar of up to `width` cells, in eighths."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8])


def _rgb(value: float) -> tuple[int, int, int]:
    if value != value:
        return _NAN
    at = value * (len(_STOPS) - 1)
    low = min(int(at), len(_STOPS) - 2)
    red, green, blue = _STOPS[low] + (_STOPS[low + 1] - _STOPS[low]) * (at - low)
    return round(red), round(green), round(blue)


def _ink(value: float) -> Style:
    """A cell's background with text that can be read on it."""
    red, green, blue = _rgb(value)
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    return Style(
        color=Color.from_rgb(*((255, 255, 255) if dark else (0, 0, 0))), bgcolor=Color.from_rgb(red, green, blue)
    )


def _ramp(value: float) -> str:
    return "?" if value != value else RAMP[round(value * (len(RAMP) - 1))]


def _cell(console: Console, value: float, *, hidden: bool) -> tuple[str, Style | None]:
    """A weight as a square, two characters wide."""
    if not colourful(console):
        return (MASK + " " if hidden else 2 * _ramp(value)), None
    return "  ", Style(bgcolor=Color.from_rgb(*(_MASKED if hidden else _rgb(value))))


def _half(shades: Array, hidden: Array, top: int, column: int) -> Style:
    colours = [
        _MASKED if hidden[row, column] else _rgb(float(shades[row, column]))
        for row in (top, top + 1)
        if row < len(shades)
    ]
    lower = Color.from_rgb(*colours[1]) if len(colours) == 2 else None
    return Style(color=Color.from_rgb(*colours[0]), bgcolor=lower)


def _ticks(cols: Sequence[str], width: int, cell: int, room: int) -> str:
    """Column tokens where there is room for them, each starting above its own column."""
    line = ""
    for column in range(width):
        at = column * cell
        if cell_len(line) > at:
            continue
        name = printable(cols[int(column * len(cols) / width)].strip()) or "␣"
        text = "╷" + (name if cell_len(name) <= 10 else set_cell_size(name, 9) + "…")
        if at + cell_len(text) > room:
            break
        line += " " * (at - cell_len(line)) + text + " "
    return line.rstrip()
