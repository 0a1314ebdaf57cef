"""What edits of a model's attention did, in the terminal: next tokens, heads, a matrix and a row, before and after."""

from collections.abc import Iterator
from typing import Literal, cast

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from clearhead.core.axes import Array, named
from clearhead.digits import fixed, percent
from clearhead.explaining.explanation import Explanation
from clearhead.explaining.texts import parts_of
from clearhead.report.console import put, title
from clearhead.report.explained import fill, opening
from clearhead.report.heat import MOST_NUMBERS, RAMP, cell_width, colourful, label, numbers, pixels
from clearhead.report.streams import printable, spelled
from clearhead.words import Language, say

_SHOWN_TOKENS = 8
_SHOWN_HEADS = 5
_SHOWN_KEYS = 8
_GAP = 3  # between two matrices


def show(console: Console, seen: Explanation, language: Language) -> None:
    """Print all of it, for an explanation with edits."""
    before = seen.before
    assert before is not None
    for part in (_opening, _next, _heads, _matrices, _row):
        lines = list(part(console, before, seen, language))
        for line in lines:
            put(console, line)
        if lines and part is not _row:
            console.print()


def _opening(console: Console, _: Explanation, seen: Explanation, language: Language) -> Iterator[Text]:
    yield from opening(console, seen, language)
    lead = fill(say(language, "edits"), cell_len(say(language, "tokens"))) + "  "
    for place, edit in enumerate(seen.edits):
        yield Text((lead if place == 0 else " " * cell_len(lead)) + printable(repr(edit)))


def _next(_: Console, __: Explanation, seen: Explanation, language: Language) -> Iterator[Text]:
    assert seen.moved is not None
    if not seen.moved.next:
        return
    yield title(say(language, "moved next"))
    yield _heading(language, ("before", 11), ("after", 11), ("points", 17))
    for token in seen.moved.next[:_SHOWN_TOKENS]:
        figures = f"{percent(token.before):>11}{percent(token.after):>11}"
        yield Text(f"  {label(spelled(token.text), 12)}{figures}{_signed(100 * (token.after - token.before), 2, 17)}")


def _heads(_: Console, __: Explanation, seen: Explanation, language: Language) -> Iterator[Text]:
    assert seen.moved is not None
    token = f"{seen.token} {spelled(parts_of(seen.tokens, seen.text).names[seen.token])}"
    found = seen.moved.heads(_SHOWN_HEADS)
    yield title(say(language, "moved heads" if found else "no head moved", token=token))
    if found:
        columns = [fill(text, 11, right=True) for text in (say(language, "moved by"), "|o|")]
        yield Text(" " * 22 + "".join(columns), style="dim")
    for moved in found:
        name = say(language, "moved head", layer=moved.layer, head=moved.head)
        yield Text(f"  {fill(name, 20)}" + "".join(fixed(x, 4, 10).rjust(11) for x in (moved.distance, moved.length)))


def _matrices(console: Console, before: Explanation, seen: Explanation, language: Language) -> Iterator[Text]:
    shape = named(seen.trace.weights.shape, ("queries", "keys"))
    yield title(f"{say(language, 'matrices', head=seen.head, layer=seen.layer)}  {shape}")
    if seen.chosen[1]:
        yield Text(say(language, "moved furthest", token=seen.token), style="dim")
    names = parts_of(seen.tokens, seen.text).names
    sides = [(each.trace.weights, np.isneginf(each.trace.masked)) for each in (before, seen)]
    yield from _beside(console, sides, names, language)
    if seen.run.factors is not None and seen.run.factors[seen.head] != 1:
        yield Text(say(language, "times", factor=float(seen.run.factors[seen.head])), style="dim")
    if np.array_equal(before.trace.weights, seen.trace.weights):
        yield Text(say(language, "unchanged"), style="dim")


def _beside(console: Console, sides: list[tuple[Array, Array]], names: list[str], language: Language) -> Iterator[Text]:
    """Two matrices of the same tokens side by side, on one colour scale, and their legend."""
    colours = cast("Literal['256', 'truecolor'] | None", console.color_system)
    half = Console(width=(console.width - _GAP) // 2, color_system=colours, no_color=console.no_color)
    size = len(names)
    if cell_width(half, size) and size <= 2 * MOST_NUMBERS:
        high = max(float(cells.max(initial=0)) for cells, _ in sides)
        drawn = [numbers(half, *side, names, names, high) for side in sides]
        pooled, ramp = sides[0][0], ""
    else:
        parts = [pixels(half, *side, names, names)[1] for side in sides]
        high = max(float(part.max(initial=0)) for part in parts)
        drawn = [pixels(half, *side, names, names, high)[0] for side in sides]
        pooled, ramp = parts[0], "" if colourful(console) else RAMP
    headings = [Text(say(language, name), style="bold") for name in ("before", "after")]
    width = max(cell_len(line.plain) for line in (*drawn[0], headings[0])) + _GAP
    for left, right in zip(*([heading, *lines] for heading, lines in zip(headings, drawn, strict=True)), strict=True):
        line = left.copy()
        line.append(" " * (width - cell_len(left.plain)))
        line.append_text(right)
        yield line
    yield Text("  ".join(_legend(console, sides, high, ramp, language, drawn=pooled is not sides[0][0])), style="dim")
    if pooled.shape != (size, size):
        yield Text(say(language, "pooled", rows=size / pooled.shape[0], cols=size / pooled.shape[1]), style="dim")


def _legend(
    console: Console,
    sides: list[tuple[Array, Array]],
    high: float,
    ramp: str,
    language: Language,
    *,
    drawn: bool,
) -> Iterator[str]:
    low = min((float(cells[~masked].min()) for cells, masked in sides if not masked.all()), default=0.0)
    kind = "legend ramp" if ramp else "legend" if colourful(console) else "legend plain"
    yield say(language, kind, low=low, high=high, ramp=ramp)
    if any(masked.any() for _, masked in sides):
        yield say(language, "masked pixel" if drawn and colourful(console) else "masked cell")


def _row(_: Console, before: Explanation, seen: Explanation, language: Language) -> Iterator[Text]:
    names = parts_of(seen.tokens, seen.text).names
    yield title(say(language, "row", token=f"{seen.token} {spelled(names[seen.token])}"))
    yield _heading(language, ("before", 11), ("after", 11), ("change", 11))
    weights = np.stack([each.row.weights for each in (before, seen)]).astype(np.float64)
    masked = np.isneginf(np.stack([each.row.masked for each in (before, seen)]))
    change = weights[1] - weights[0]
    visible = np.flatnonzero(~masked.all(axis=0))
    order = visible[np.lexsort((visible, -weights[:, visible].max(axis=0), -np.abs(change[visible])))]
    for j in order[:_SHOWN_KEYS]:
        cells = [
            fill(say(language, "masked weight"), 11, right=True) if hidden else fixed(float(a), 4, 10).rjust(11)
            for a, hidden in zip(weights[:, j], masked[:, j], strict=True)
        ]
        yield Text(f"  {label(f'{j} {spelled(names[j])}', 12)}{''.join(cells)}{_signed(change[j])}")
    rest = order[_SHOWN_KEYS:]
    if len(rest):
        cells = [fixed(float(side[rest].sum()), 4, 10).rjust(11) for side in weights]
        yield Text(
            fill(f"  {say(language, 'more', count=len(rest))}", 14) + "".join(cells) + _signed(change[rest].sum())
        )
    sums = [fixed(float(side.sum()), 4, 10).rjust(11) for side in weights]
    yield Text(fill("  Σ", 14) + "".join(sums), style="bold")


def _signed(number: float, decimals: int = 4, width: int = 11) -> str:
    """A difference with its sign, as a column of this width."""
    return (("+" if number > 0 else "") + fixed(float(number), decimals, 9)).rjust(width)


def _heading(language: Language, *columns: tuple[str, int]) -> Text:
    return Text(" " * 14 + "".join(fill(say(language, key), width, right=True) for key, width in columns), style="dim")
