"""What edits of a model's attention did, in the terminal: next tokens, heads, a matrix and a row, before and after."""

from collections.abc import Iterator

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from clearhead.core.axes import named
from clearhead.digits import percent, signed
from clearhead.explaining.editing import SHOWN
from clearhead.explaining.head_steps import HeadSteps
from clearhead.explaining.texts import parts_of, token_name
from clearhead.report.cells import columns, figure, label, listed, note, title
from clearhead.report.console import sections
from clearhead.report.explained import opening
from clearhead.report.heat import matrix
from clearhead.report.streams import printable
from clearhead.words import Language, say

_SHOWN_HEADS = 5
_SHOWN_KEYS = 8


def show(console: Console, seen: HeadSteps, language: Language) -> None:
    """Print all of it, for an explanation with edits."""
    sections(console, (part(console, seen, language) for part in (_opening, _next, _heads, _matrices, _row)))


def _opening(console: Console, seen: HeadSteps, language: Language) -> Iterator[Text]:
    yield from opening(console, seen, language)
    width, name = cell_len(say(language, "tokens")) + 2, say(language, "edits")
    for place, edit in enumerate(seen.edits):
        yield columns((width, 0), ["" if place else name, printable(repr(edit))])


def _next(_: Console, seen: HeadSteps, language: Language) -> Iterator[Text]:
    assert seen.moved is not None
    if not seen.moved.next:
        return
    yield title(say(language, "moved next"))
    widths = (14, -11, -11, -17)
    yield columns(widths, ["", *(say(language, key) for key in ("before", "after", "points"))], "dim")
    for token in seen.moved.next[:SHOWN]:
        shares = percent(token.before), percent(token.after), signed(100 * (token.after - token.before))
        yield columns(widths, [f"  {listed(token.text)}", *shares])


def _heads(_: Console, seen: HeadSteps, language: Language) -> Iterator[Text]:
    assert seen.moved is not None
    heads = seen.moved.heads(_SHOWN_HEADS)
    yield title(say(language, "moved heads" if heads else "no head moved", token=token_name(seen, seen.token)))
    widths = (22, -11, -11)
    if heads:
        yield columns(widths, ["", say(language, "moved by"), "|o|"], "dim")
    for head in heads:
        name = say(language, "moved head", layer=head.layer, head=head.head)
        yield columns(widths, [f"  {name}", figure(head.distance, 4, 11), figure(head.length, 4, 11)])


def _matrices(console: Console, seen: HeadSteps, language: Language) -> Iterator[Text]:
    assert seen.before is not None
    runs = seen.before.trace, seen.trace
    shape = named(seen.trace.weights.shape, ("queries", "keys"))
    yield title(f"{say(language, 'matrices', head=seen.head, layer=seen.layer)}  {shape}")
    if seen.chosen[1]:
        yield note(say(language, "moved furthest", token=seen.token))
    names = parts_of(seen.tokens, seen.text).names
    high = float(max(run.weights.max() for run in runs))
    for key, run in zip(("before", "after"), runs, strict=True):
        yield title(say(language, key))
        yield from matrix(console, run.weights, np.isneginf(run.masked), names, names, language, high)
    if seen.run.factors is not None and seen.run.factors[seen.head] != 1:
        yield note(say(language, "times", factor=float(seen.run.factors[seen.head])))
    if np.array_equal(runs[0].weights, runs[1].weights):
        yield note(say(language, "unchanged"))


def _row(_: Console, seen: HeadSteps, language: Language) -> Iterator[Text]:
    assert seen.before is not None
    yield title(say(language, "row", token=token_name(seen, seen.token)))
    widths = (14, -11, -11, -11)
    yield columns(widths, ["", *(say(language, key) for key in ("before", "after", "change"))], "dim")
    rows = seen.before.row, seen.row
    weights = np.stack([row.weights for row in rows]).astype(np.float64)
    masked = np.isneginf(np.stack([row.masked for row in rows]))
    change = weights[1] - weights[0]
    visible = np.flatnonzero(~masked.all(axis=0))
    order = visible[np.lexsort((visible, -weights[:, visible].max(axis=0), -np.abs(change[visible])))]
    hidden = say(language, "masked weight")
    for j in order[:_SHOWN_KEYS]:
        cells = [hidden if masked[side, j] else figure(weights[side, j], 4, 11) for side in (0, 1)]
        yield columns(widths, [f"  {label(token_name(seen, j), 12)}", *cells, signed(change[j], 4)])
    rest = order[_SHOWN_KEYS:]
    if len(rest):
        sums = [*(figure(side[rest].sum(), 4, 11) for side in weights), signed(change[rest].sum(), 4)]
        yield columns(widths, [f"  {say(language, 'more', count=len(rest))}", *sums])
    yield columns(widths, ["  Σ", *(figure(side.sum(), 4, 11) for side in weights)], "bold")
