"""Display: pages, notebook output, pictures and plots for every object that holds attention matrices."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from math import prod
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from clearhead.core.rule_values import layer_name, whole_number
from clearhead.errors import DtypeError, RuleError, SelectionError, check_known, shown
from clearhead.tables import QUICK
from clearhead.view import images, notebook, page, plots
from clearhead.view.container import Document
from clearhead.view.long import PageOptions, ShownLayer, ShownRun, document
from clearhead.view.names import token_names
from clearhead.words import Language


class Page(TypedDict, total=False):
    """Options of a page; `Display.save` says what each is."""

    exact: Iterable[tuple[Any, int]] | None
    dtype: Any
    v: Any
    batch: int
    beside: Any
    language: Language
    title: str
    tokens: Sequence[str] | None
    source_tokens: Sequence[str] | None
    each: Callable[[Sequence[int]], Iterable[int]]


class Display(notebook.Framing):
    """The display methods that AttentionMatrix shares with the result of `ch.watch`."""

    if TYPE_CHECKING:

        def _run(self, batch: int, v: Any = None) -> ShownRun:
            """The layers of one batch item to show, with the caller's v; each subclass defines it."""

    def document(self, **options: Unpack[Page]) -> Document:
        """The content of the page that `save` writes: a header and arrays. Options and errors as `save`."""
        return document(*self._wished(options))

    def to_html(self, **options: Unpack[Page]) -> str:
        """The page that `save` writes, as one self-contained HTML text. Options and errors as `save`."""
        return page.html(self.document(**options))

    def save(self, path: str | os.PathLike[str], **options: Unpack[Page]) -> None:
        """Write one self-contained page: every head as a square, any head as a map down to single weights.

        exact     (layer, head) pairs whose weights the page computes from q and k; None: all, []: pictures only
        dtype     "float16" or "bfloat16" store q, k and v in less room; None: their own
        v         (…, kv_heads, keys, d_v), for the page of a matrix: a weight's arithmetic goes on to the output. A
                  run has its own (`ch.watch(model, values=True)`), put in where the page stays below 16 MB with it
        batch, beside (a second run to compare with), language ("en", "zh"), title, each (wraps the loop over layers)
        tokens    (keys,) strings, the names of the tokens; with source_tokens (keys,), tokens is (queries,)
        Raises SelectionError above 64 MB (the hint says what would fit) and for a batch item or head that does not
        exist; FileError when the file cannot be written or its name is no HTML file's; UnknownNameError for an unknown
        option; ShapeError for tokens of another length or v of another shape; RuleError for v where a run was watched.
        O(queries·keys·d_k) time for every head.
        """
        page.write(path, lambda: self.document(**options))

    def to_svg(
        self,
        head: int = 0,
        *,
        layer: int | str = 0,
        batch: int = 0,
        tokens: Sequence[str] | None = None,
        source_tokens: Sequence[str] | None = None,
    ) -> str:
        """One head's weights (queries, keys) as SVG text, for papers; above 64, pixels show their largest weight.

        Raises SelectionError when there is no such layer, head or batch item, ShapeError for tokens of another length.
        """
        shown, run, part = self._cells(layer, head, batch, plots.SVG_SIDE)
        run = _renamed(replace(run, layers=[part]), tokens, source_tokens)
        return plots.svg(shown, *_names(run, run.layers[0]))

    def to_png(self, head: int = 0, *, layer: int | str = 0, batch: int = 0, cell: int = 1) -> bytes:
        """One head's weights (queries, keys) as PNG bytes, cell × cell pixels for each weight.

        Above 512 queries or keys, pixels show their largest weight. Raises SelectionError when there is no such layer,
        head or batch item.
        """
        whole_number("cell", cell, 1, hint="cell=8")
        shown, _, _ = self._cells(layer, head, batch, plots.PNG_SIDE)
        return images.png(shown.weights, shown.masked, cell, shown.high)

    def widget(self, **options: Unpack[Page]) -> Any:
        """The page in a notebook, whose kernel computes weights when the page requests them (extra `notebook`).

        For matrices too large for a saved page. Options as for `save`; returns an anywidget. Raises MissingExtraError
        without anywidget.
        """
        from clearhead.view.widget import widget

        runs, wish, each = self._wished(options)
        return widget(document(runs, replace(wish, served="frame"), each), runs)

    def _wished(self, options: Page) -> tuple[list[ShownRun], PageOptions, Callable[[Sequence[int]], Iterable[int]]]:
        check_known("option", options, Page.__annotations__)
        batch, each, beside = options.get("batch", 0), options.get("each", iter), options.get("beside")
        batch = whole_number("batch", batch, 0)
        if beside is not None and not isinstance(beside, Display):
            raise DtypeError(f"beside is {shown(beside)}: expected what was seen in a second run.", "beside=other")
        if not callable(each):
            raise RuleError(f"each is {shown(each)}: expected what walks the layers.", "each=tqdm")
        seen = [self._run(batch, options.get("v")), *([] if beside is None else [beside._run(batch)])]
        runs = [_renamed(run, options.get("tokens"), options.get("source_tokens")) for run in seen]
        wish: Any = {name: options[name] for name in ("exact", "dtype", "language", "title") if name in options}
        room = {} if options.get("v") is None else {"room": None}
        return runs, PageOptions(**{"title": runs[0].name, **wish, **room}), each

    def _cells(self, layer: int | str, head: int, batch: int, side: int) -> tuple[plots.Cells, ShownRun, ShownLayer]:
        run = self._run(whole_number("batch", batch, 0))
        names = [each.name for each in run.layers]
        part = run.layers[names.index(layer_name(layer, names))]
        head = whole_number("head", head, 0)
        if head not in part.heads:
            raise SelectionError(f"there is no head {head}: the matrix has {', '.join(map(str, part.heads))}.")
        name = f"layer {part.name}, head {head}" if part.name else "A" if len(part.heads) == 1 else f"A, head {head}"
        return plots.cells(part.matrix, list(part.heads).index(head), side, name), run, part

    def _plot(self, head: int, layer: int | str, batch: int, ax: Any) -> Any:
        shown, run, part = self._cells(layer, head, batch, plots.PLOT_SIDE)
        *_, queries, keys = part.matrix.shape
        return plots.plot(shown, (queries, keys), *_names(run, part), ax)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        run = self._run(0)
        weights = sum(prod(layer.matrix.shape) for layer in run.layers)
        if not weights:
            return {"text/plain": str(self)}
        if weights > QUICK:
            hint = f"<p>{escape(str(self))}: <code>.save(&quot;page.html&quot;)</code> makes the page.</p>"
            return {"text/plain": str(self), "text/html": hint}
        first = run.layers[0]
        runs, wish = self._wished({})[:2]

        def written(exact: Any) -> str:
            return page.html(document(runs, replace(wish, room=notebook.MOST_BYTES, exact=exact)))

        pages = [partial(written, None), partial(written, [])]
        sides = first.matrix.shape[-2:]
        place: Any = {"head": first.heads[0], "layer": first.name or 0}
        svg = partial(self.to_svg, **place)
        png = partial(self.to_png, **place, cell=max(1, plots.PNG_SIDE // max(sides)))
        return notebook.bundle(str(self), pages, svg, png, prod(sides))


def run_of(seen: Display, batch: int = 0) -> ShownRun:
    """One batch item of a matrix or of a `ch.watch` result, as a run to show."""
    return seen._run(batch)


def _renamed(run: ShownRun, tokens: Any, source_tokens: Any) -> ShownRun:
    """The run with the caller's token names. Raises RuleError and ShapeError if they do not fit."""
    if tokens is None and source_tokens is None:
        return run
    layers = list(run.layers)
    if source_tokens is not None and not any(layer.cross for layer in layers):
        layers = [replace(layer, cross=True) for layer in layers]
    for layer in layers:
        token_names(tokens, source_tokens if layer.cross else None, layer.matrix.factors.problem)
    return replace(run, layers=layers, tokens=tokens, sources=run.sources if source_tokens is None else source_tokens)


def _names(run: ShownRun, layer: ShownLayer) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """The names of a layer's rows and columns, None where they are not known."""
    if run.tokens is None or (layer.cross and run.sources is None):
        return None, None
    start = 0 if layer.cross else int(layer.matrix.factors.problem.query_offset[0])
    n, m = layer.matrix.shape[-2:]
    cols = run.sources if layer.cross else run.tokens
    rows = run.tokens[start : start + n]
    return (rows, cols) if cols is not None and len(rows) == n and len(cols) == m else (None, None)
