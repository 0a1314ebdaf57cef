"""Matrices in a terminal: numbers on coloured cells up to a dozen columns, half-block pixels beyond.

Nothing needs colour to be understood: without it the numbers stay, and pixels become a ramp of characters.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.core.axes import Array
from clearhead.core.observations import areas
from clearhead.digits import fixed
from clearhead.report.cells import Colour, background, between, colourful, columns, label, note, rgb, shade
from clearhead.report.streams import bare
from clearhead.words import Language, say

_RAMP = " .:-=+*#%@"
_MASK = "·"
_MOST_NUMBERS = 12
_LEAD = 9  # the width of a row's token beside pixels
_LEAST_LEAD = 4  # and beside numbers
_GAP = 3  # between two matrices
_STOPS: tuple[Colour, ...] = ((26, 20, 40), (72, 44, 118), (128, 80, 182), (190, 140, 226), (248, 226, 255))
_MASKED: Colour = (58, 58, 62)
_NAN: Colour = (220, 60, 50)


def matrices(
    console: Console,
    sides: Sequence[tuple[Array, Array]],
    rows: Sequence[str],
    cols: Sequence[str],
    language: Language,
    headings: Sequence[Text] = (),
) -> Iterator[Text]:
    """A weight matrix, or two of the same tokens side by side on one colour scale, and their legend.

    sides      of each the weights (queries, keys) and which of them are masked
    headings   above them, where there are two
    """
    space = console.width if len(sides) == 1 else (console.width - _GAP) // 2
    pictured = not (_cell_width(space, len(cols)) and len(rows) <= 2 * _MOST_NUMBERS)
    size = _pixels_of(space, len(rows), len(cols)) if pictured else (len(rows), len(cols))
    cells = [pool(weights, *size) for weights, _ in sides]
    high = max(float(each.max(initial=0.0, where=np.isfinite(each))) for each in cells)
    draw = _pixels if pictured else _numbers
    drawn = [draw(console, space, x, masked, rows, cols, high) for x, (_, masked) in zip(cells, sides, strict=True)]
    yield from drawn[0] if len(drawn) == 1 else _side_by_side(headings, drawn)
    yield from _legend(console, sides, language, pictured=pictured)
    if size != (len(rows), len(cols)):
        yield note(say(language, "pooled", rows=len(rows) / size[0], cols=len(cols) / size[1]))


def _side_by_side(headings: Sequence[Text], drawn: Sequence[Sequence[Text]]) -> Iterator[Text]:
    width = max(cell_len(line.plain) for line in (*drawn[0], headings[0])) + _GAP
    for left, right in zip(*([heading, *lines] for heading, lines in zip(headings, drawn, strict=True)), strict=True):
        line = left.copy()
        line.append(" " * (width - cell_len(left.plain)))
        yield line.append_text(right)


def _legend(
    console: Console, sides: Sequence[tuple[Array, Array]], language: Language, *, pictured: bool
) -> Iterator[Text]:
    """The least and the largest weight, and what is drawn for a masked weight and for NaN."""
    visible = np.concatenate([cells[~masked] for cells, masked in sides])
    finite = visible[np.isfinite(visible)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    colour, ramp = colourful(console), pictured and not colourful(console)
    kind = "legend ramp" if ramp else "legend" if colour else "legend plain"
    legend = [say(language, kind, low=low, high=high, ramp=_RAMP)]
    if any(masked.any() for _, masked in sides):
        legend.append(say(language, "masked pixel" if pictured and colour else "masked cell"))
    if pictured and np.isnan(visible).any():
        legend.append(say(language, "nan pixel" if colour else "nan cell"))
    yield note("  ".join(legend))


def _cell_width(space: int, count: int) -> int:
    """The width of a cell in a table of numbers, its space included; 0 where so many columns do not fit."""
    widths = (7, 6) if count <= _MOST_NUMBERS else ()
    return next((width for width in widths if _LEAST_LEAD + 1 + width * count <= space), 0)


def _numbers(
    console: Console, space: int, cells: Array, masked: Array, rows: Sequence[str], cols: Sequence[str], high: float
) -> list[Text]:
    """A table with a number in every cell, coloured by the square root of the weight; masked cells marked."""
    width = _cell_width(space, len(cols))
    longest = max((cell_len(bare(row)) for row in rows), default=_LEAST_LEAD)
    lead = max(_LEAST_LEAD, min(12, space - width * len(cols) - 1, longest))
    heads = [label(bare(name), width - 2).strip() for name in cols]
    lines = [columns((lead + 1, 1 - width, *[-width] * (len(heads) - 1)), ["", *heads])]
    shades = shade(cells, high)
    for i, row in enumerate(rows):
        line = Text(label(bare(row), lead) + " ")
        for j in range(len(cols)):
            if masked[i, j]:
                line.append(_MASK.rjust(width - 1) + " ")
            else:
                style = background(_colour(float(shades[i, j]))) if colourful(console) else None
                line.append(f"{fixed(float(cells[i, j]), 3, width - 1):>{width - 1}} ", style)
        lines.append(line)
    return lines


def _pixels_of(space: int, rows: int, cols: int) -> tuple[int, int]:
    """How many rows and columns of pixels there is room for: all of them, or as many as keep the matrix's shape."""
    room = space - _LEAD - 1
    if 2 * cols <= room and rows <= room:
        return rows, cols
    width = min(cols, room)
    return min(rows, max(2, round(rows * width / max(1, cols))), 80), width


def _pixels(
    console: Console, space: int, cells: Array, masked: Array, rows: Sequence[str], cols: Sequence[str], high: float
) -> list[Text]:
    """The cells (height, width) as pixels; rows and cols name the whole matrix.

    Two characters to a cell and every row named where there is room; else two rows to a line.
    """
    (height, width), room = cells.shape, space - _LEAD - 1
    wide = 2 if 2 * len(cols) <= room and len(rows) <= room else 1
    step = 2 if wide == 1 and colourful(console) else 1
    shades, hidden = shade(cells, high), pool(masked.astype(np.float64), height, width) > 1 - 1e-9
    lines = [Text(" " * (_LEAD + 1) + _ticks(cols, width, wide, room))]
    for top in range(0, height, step):
        line = Text(label(bare(rows[int(top * len(rows) / height)]), _LEAD) + " ")
        for column in range(width):
            pixel = list(zip(shades[top : top + step, column], hidden[top : top + step, column], strict=True))
            line.append(*_pixel(console, [(float(value), bool(dark)) for value, dark in pixel], wide, step))
        lines.append(line)
    return lines


def _pixel(console: Console, values: Sequence[tuple[float, bool]], wide: int, step: int) -> tuple[str, Style | None]:
    """A weight as a square, or two as the halves of a character, each with whether it is masked."""
    if not colourful(console):
        value, dark = values[0]
        mark = _MASK if dark else "?" if value != value else _RAMP[round(value * (len(_RAMP) - 1))]
        return (mark + " " if dark and wide == 2 else mark * wide), None
    colours = [rgb(_MASKED if dark else _colour(value)) for value, dark in values]
    if step == 1:
        return " " * wide, Style(bgcolor=colours[0])
    return "▀", Style(color=colours[0], bgcolor=colours[1] if len(colours) == 2 else None)


def pool(cells: Array, height: int, width: int) -> Array:
    """The mean of the cells over each pixel's area; NaN only in pixels whose area has a NaN."""
    if cells.shape == (height, width):
        return cells
    _, tall = areas(height, cells.shape[0], slice(0, cells.shape[0]))
    _, broad = areas(width, cells.shape[1], slice(0, cells.shape[1]))
    odd = np.isnan(cells)
    pooled = np.asarray(tall @ np.where(odd, 0.0, cells) @ broad.T)
    return np.where(tall @ odd.astype(np.float64) @ broad.T > 0, np.nan, pooled) if odd.any() else pooled


def _colour(value: float) -> Colour:
    if value != value:
        return _NAN
    place = value * (len(_STOPS) - 1)
    low = min(int(place), len(_STOPS) - 2)
    return between(_STOPS[low], _STOPS[low + 1], place - low)


def _ticks(cols: Sequence[str], width: int, cell: int, room: int) -> str:
    """Column tokens where there is room for them, each starting above its own column."""
    line = ""
    for column in range(width):
        start = column * cell
        if cell_len(line) > start:
            continue
        name = bare(cols[int(column * len(cols) / width)])
        text = "╷" + (name if cell_len(name) <= 10 else set_cell_size(name, 9) + "…")
        if start + cell_len(text) > room:
            break
        line += " " * (start - cell_len(line)) + text + " "
    return line.rstrip()
