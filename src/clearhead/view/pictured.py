"""What can be looked at: pages, notebooks, pictures and plots of attention matrices, whoever holds them."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from clearhead import notebook
from clearhead.errors import DtypeError, RuleError, SelectionError, shown, unknown
from clearhead.files import write_whole
from clearhead.values import read_path, whole_number
from clearhead.view import figure, page
from clearhead.view.container import Document
from clearhead.view.long import Run, Sight, Wish, document
from clearhead.words import Language

_QUICK = 2**26  # weights of a page that a notebook makes unasked


class Page(TypedDict, total=False):
    """How a page is to be.

    exact     (layer, head) pairs whose weights the page computes from q and k; None is all, [] is pictures only
    dtype     in which q and k are stored, "float16" or "bfloat16" for half the room; None is their own
    batch     which sequence of a batch
    beside    something of the same shape to compare with: a second run
    language  "en" or "zh": where the page begins
    title     its heading
    each      walks the layers; a progress bar goes there
    """

    exact: Iterable[tuple[Any, int]] | None
    dtype: Any
    batch: int
    beside: Any
    language: Language
    title: str
    each: Callable[[Sequence[int]], Iterable[int]]


class Pictured:
    """The ways to look that an AttentionMatrix and what `ch.watch` saw have in common."""

    if TYPE_CHECKING:

        def _run(self, batch: int) -> Run:
            """What is looked at, of one sequence of a batch: theirs to say."""

    def document(self, **options: Unpack[Page]) -> Document:
        """What the page holds. Raises SelectionError where it would be too large, with what would fit."""
        return document(*self._wished(options))

    def to_html(self, **options: Unpack[Page]) -> str:
        """The page as one self-contained text; see `save`."""
        return page.html(self.document(**options))

    def save(self, path: str | os.PathLike[str], **options: Unpack[Page]) -> None:
        """Write one self-contained page: every head as a square, any head as a map down to single weights.

        exact     (layer, head) pairs whose weights the page computes from q and k; None is all, [] is pictures only
        dtype     "float16" or "bfloat16" store q and k in less room; None is their own
        batch, beside (a second run to compare with), language ("en", "zh"), title
        Raises SelectionError above 64 MB, with what would fit, FileError when it cannot be written. O(queries·keys).
        """
        place = read_path(path)
        write_whole(place, page.encoded(self.document(**options)))

    def to_svg(self, head: int = 0, *, layer: int | str = 0, batch: int = 0) -> str:
        """One head's weights for papers, (queries, keys); above 64 a pixel has the largest of its weights."""
        shown, run, sight = self._cells(layer, head, batch, figure.SVG_SIDE)
        return figure.svg(shown, *_names(run, sight))

    def to_png(self, head: int = 0, *, layer: int | str = 0, batch: int = 0, cell: int = 1) -> bytes:
        """One head's weights as PNG, cell × cell pixels for each; above 512 a pixel has the largest of its weights."""
        shown, _, _ = self._cells(layer, head, batch, figure.PNG_SIDE)
        return figure.png(shown, cell)

    def widget(self, **options: Unpack[Page]) -> Any:
        """The page in a notebook with every weight computed by its kernel when looked at (extra `notebook`).

        For what is too large for a page; options as for `save`. Raises MissingExtraError.
        """
        from clearhead.view.widget import widget

        runs, wish, each = self._wished(options)
        return widget(document(runs, replace(wish, served="frame"), each), runs)

    def _wished(self, options: Page) -> tuple[list[Run], Wish, Callable[[Sequence[int]], Iterable[int]]]:
        for name in options:
            if name not in Page.__annotations__:
                raise unknown("option", name, Page.__annotations__)
        given: Page = {**options}
        batch, beside, each = given.pop("batch", 0), given.pop("beside", None), given.pop("each", iter)
        batch = whole_number("batch", batch, 0)
        if beside is not None and not isinstance(beside, Pictured):
            raise DtypeError(f"beside is {shown(beside)}: expected what was seen in a second run.", "beside=other")
        if not callable(each):
            raise RuleError(f"each is {shown(each)}: expected what walks the layers.", "each=tqdm")
        runs = [part._run(batch) for part in (self, beside) if part is not None]
        return runs, Wish(**{"title": runs[0].name, **given}), each  # type: ignore[arg-type]

    def _cells(self, layer: int | str, head: int, batch: int, side: int) -> tuple[figure.Cells, Run, Sight]:
        run = self._run(whole_number("batch", batch, 0))
        sight = _sight(run, layer)
        head = whole_number("head", head, 0)
        if head not in sight.heads:
            raise SelectionError(f"there is no head {head}: the matrix has {', '.join(map(str, sight.heads))}.")
        name = f"layer {sight.name}, head {head}" if sight.name else "A" if len(sight.heads) == 1 else f"A, head {head}"
        return figure.cells(sight.matrix, list(sight.heads).index(head), side, name), run, sight

    def _plot(self, head: int, layer: int | str, batch: int, ax: Any) -> Any:
        shown, run, sight = self._cells(layer, head, batch, figure.PLOT_SIDE)
        return figure.plot(shown, sight.matrix.shape[-2:], *_names(run, sight), ax)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        run = self._run(0)
        weights = sum(_size(sight) for sight in run.sights)
        if not weights:
            return {"text/plain": str(self)}
        if weights > _QUICK:
            said = f"<p>{escape(str(self))}: <code>.save(&quot;page.html&quot;)</code> makes the page.</p>"
            return {"text/plain": str(self), "text/html": said}
        first = run.sights[0]
        cells = first.matrix.shape[-2] * first.matrix.shape[-1]
        head = first.heads[0]
        return notebook.bundle(
            str(self), lambda: self.to_html(), lambda: self.to_svg(head, layer=first.name or 0), cells
        )


def _size(sight: Sight) -> int:
    size = 1
    for side in sight.matrix.shape:
        size *= side
    return size


def _sight(run: Run, layer: int | str) -> Sight:
    if isinstance(layer, bool) or not isinstance(layer, (int, np.integer, str)):
        raise SelectionError(f"layer is {shown(layer)}: expected its number or its name.", "layer=0")
    for sight in run.sights:
        if sight.name == str(layer):
            return sight
    if isinstance(layer, int) and -len(run.sights) <= layer < len(run.sights):
        return run.sights[layer]
    raise SelectionError(f"there is no layer {layer!r}.", f"seen are: {', '.join(sight.name for sight in run.sights)}")


def _names(run: Run, sight: Sight) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """What rows and columns are called."""
    if run.tokens is None or (sight.cross and run.sources is None):
        return None, None
    start = 0 if sight.cross else int(sight.matrix._problem.query_offset[0])
    n, m = sight.matrix.shape[-2:]
    cols = run.sources if sight.cross else run.tokens
    rows = run.tokens[start : start + n]
    return (rows, cols) if cols is not None and len(rows) == n and len(cols) == m else (None, None)
