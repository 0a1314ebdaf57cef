"""Draws matrices in a terminal: numbers on coloured cells for up to a dozen columns, pixels for more.

Without colour the numbers stay, and pixels become a ramp of characters.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import cell_len
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
_LEAST_LEAD = 4  # its least width beside numbers
_STOPS: tuple[Colour, ...] = ((26, 20, 40), (72, 44, 118), (128, 80, 182), (190, 140, 226), (248, 226, 255))
_MASKED: Colour = (58, 58, 62)
_NAN: Colour = (220, 60, 50)


def matrix(
    console: Console,
    weights: Array,
    masked: Array,
    rows: Sequence[str],
    cols: Sequence[str],
    language: Language,
    high: float | None = None,
) -> Iterator[Text]:
    """Draw a weight matrix (queries, keys) with its masked cells marked, and its legend.

    rows, cols   the tokens
    high         the weight with the last colour, to give two matrices the same scale; None: the largest
    """
    pictured = not (_cell_width(console, len(cols)) and len(rows) <= 2 * _MOST_NUMBERS)
    size = _pixels_of(console, len(rows), len(cols)) if pictured else weights.shape
    shades = shade(pool(weights, *size), high)
    if pictured:
        yield from _pixels(console, shades, masked, rows)
    else:
        yield from _numbers(console, weights, shades, masked, rows, cols)
    visible = weights[~masked]
    finite, colour = visible[np.isfinite(visible)], colourful(console)
    kind = "legend" if colour else "legend ramp" if pictured else "legend plain"
    low, most = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    legend = [say(language, kind, low=low, high=most, ramp=_RAMP)]
    if masked.any():
        legend.append(say(language, "masked pixel" if pictured and colour else "masked cell"))
    if pictured and np.isnan(visible).any():
        legend.append(say(language, "nan pixel" if colour else "nan cell"))
    yield note("  ".join(legend))
    if size != weights.shape:
        yield note(say(language, "pooled", rows=len(rows) / size[0], cols=len(cols) / size[1]))


def _cell_width(console: Console, count: int) -> int:
    """Return the width of a number's cell, its space included; 0 if so many columns do not fit."""
    widths = (7, 6) if count <= _MOST_NUMBERS else ()
    return next((width for width in widths if _LEAST_LEAD + 1 + width * count <= console.width), 0)


def _numbers(
    console: Console, weights: Array, shades: Array, masked: Array, rows: Sequence[str], cols: Sequence[str]
) -> Iterator[Text]:
    """Draw a table with a number in every cell, on the colour of its weight."""
    width = _cell_width(console, len(cols))
    longest = max((cell_len(bare(row)) for row in rows), default=_LEAST_LEAD)
    lead = max(_LEAST_LEAD, min(12, console.width - width * len(cols) - 1, longest))
    heads = [label(bare(name), width - 2).strip() for name in cols]
    yield columns((lead + 1, 1 - width, *[-width] * (len(heads) - 1)), ["", *heads])
    for i, row in enumerate(rows):
        line = Text(label(bare(row), lead) + " ")
        for j in range(len(cols)):
            if masked[i, j]:
                line.append(_MASK.rjust(width - 1) + " ")
            else:
                style = background(_colour(float(shades[i, j]))) if colourful(console) else None
                line.append(f"{fixed(float(weights[i, j]), 3, width - 1):>{width - 1}} ", style)
        yield line


def _pixels_of(console: Console, rows: int, cols: int) -> tuple[int, int]:
    """Return how many rows and columns of pixels fit: all, or as many as keep the matrix's shape."""
    room = console.width - _LEAD - 1
    if 2 * cols <= room and rows <= room:
        return rows, cols
    width = min(cols, room)
    return min(rows, max(2, round(rows * width / max(1, cols) / 2)), 40), width


def _pixels(console: Console, shades: Array, masked: Array, rows: Sequence[str]) -> Iterator[Text]:
    """Draw shades (height, width) as pixels, two characters each if they fit; rows name all queries."""
    height, width = shades.shape
    wide = 2 if 2 * width <= console.width - _LEAD - 1 and height == len(rows) else 1
    hidden = pool(masked.astype(np.float64), height, width) > 1 - 1e-9
    for row in range(height):
        line = Text(label(bare(rows[int(row * len(rows) / height)]), _LEAD) + " ")
        for value, dark in zip(shades[row].tolist(), hidden[row], strict=True):
            if colourful(console):
                line.append(" " * wide, Style(bgcolor=rgb(_MASKED if dark else _colour(value))))
                continue
            ramp = "?" if value != value else _RAMP[round(min(1.0, value) * (len(_RAMP) - 1))]
            line.append(_MASK.ljust(wide) if dark else ramp * wide)
        yield line


def pool(cells: Array, height: int, width: int) -> Array:
    """Average the cells of each pixel's area; a pixel is NaN only if its area has a NaN."""
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
