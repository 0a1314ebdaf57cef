"""Makes pages, notebook output and pictures of the objects that hold attention matrices (ops/display.py)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from html import escape
from math import prod
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.core.rule_values import layer_name, whole_number
from clearhead.errors import DtypeError, SelectionError, check_known, shown
from clearhead.ops.display import Display, Page
from clearhead.ops.matrix import AttentionMatrix
from clearhead.tables import QUICK
from clearhead.view import images, notebook, page
from clearhead.view.container import Document
from clearhead.view.head_summary import first_key
from clearhead.view.long import PageOptions, ShownLayer, ShownRun, document
from clearhead.view.names import token_names
from clearhead.view.pooling import pictures

SVG_SIDE, PNG_SIDE = 64, 512  # larger matrices are pooled to so many pixels a side


class Cells(NamedTuple):
    """One head as a picture: weights and masked (rows, columns), and how many queries and keys a pixel covers."""

    weights: Array
    masked: Array
    pooled: tuple[int, int]
    name: str
    high: float  # the weight at which the colour scale ends


def document_of(seen: Display, options: Page) -> Document:
    """The content of the page of an object: a header and arrays. Raises as `Display.save`."""
    return document(*_wished(seen, options))


def svg_of(
    seen: Display, head: int, layer: int | str, batch: int, tokens: Sequence[str] | None, sources: Sequence[str] | None
) -> str:
    """One head's weights as SVG text. Raises as `Display.to_svg`."""
    drawn, run, part = _cells(seen, layer, head, batch, SVG_SIDE)
    run = _renamed(replace(run, layers=[part]), tokens, sources)
    names = _names(run, run.layers[0]) if drawn.pooled == (1, 1) else (None, None)
    size = 24 if len(drawn.weights) <= 24 else 14
    return images.svg(drawn.weights, drawn.masked, *names, name=drawn.name, cell=size, high=drawn.high)


def png_of(seen: Display, head: int, layer: int | str, batch: int, cell: int) -> bytes:
    """One head's weights as PNG bytes. Raises as `Display.to_png`."""
    whole_number("cell", cell, 1, hint="cell=8")
    drawn, _, _ = _cells(seen, layer, head, batch, PNG_SIDE)
    return images.png(drawn.weights, drawn.masked, cell, drawn.high)


def bundle_of(seen: Display) -> dict[str, str]:
    """What a notebook shows of an object: text, and where it is not too large a picture and the page."""
    run = run_of(seen)
    weights = sum(prod(layer.matrix.shape) for layer in run.layers)
    if not weights:
        return {"text/plain": str(seen)}
    if weights > QUICK:
        hint = f"<p>{escape(str(seen))}: <code>.save(&quot;page.html&quot;)</code> makes the page.</p>"
        return {"text/plain": str(seen), "text/html": hint}
    first = run.layers[0]
    runs, wish = _wished(seen, {})

    def written(exact: Any) -> str:
        return page.html(document(runs, replace(wish, room=notebook.MOST_BYTES, exact=exact)))

    pages = [partial(written, None), partial(written, [])]
    sides = first.matrix.shape[-2:]
    place = first.heads[0], first.name or 0, 0
    svg = partial(svg_of, seen, *place, None, None)
    png = partial(png_of, seen, *place, max(1, PNG_SIDE // max(sides)))
    return notebook.bundle(str(seen), pages, svg, png, prod(sides))


def _wished(seen: Display, options: Page) -> tuple[list[ShownRun], PageOptions]:
    check_known("option", options, Page.__annotations__)
    batch, beside = whole_number("batch", options.get("batch", 0), 0), options.get("beside")
    if beside is not None and not isinstance(beside, Display):
        raise DtypeError(f"beside is {shown(beside)}: expected what was seen in a second run.", "beside=other")
    both = [seen.__shown__(batch, options.get("v")), *([] if beside is None else [run_of(beside, batch)])]
    runs = [_renamed(run, options.get("tokens"), options.get("source_tokens")) for run in both]
    given = {name: value for name, value in options.items() if value is not None}
    wish: Any = {name: given[name] for name in ("exact", "dtype", "language", "title") if name in given}
    room = {} if options.get("v") is None else {"room": None}
    return runs, PageOptions(**{"title": runs[0].name, **wish, **room})


def _cells(seen: Display, layer: int | str, head: int, batch: int, side: int) -> tuple[Cells, ShownRun, ShownLayer]:
    run = run_of(seen, whole_number("batch", batch, 0))
    names = [each.name for each in run.layers]
    part = run.layers[names.index(layer_name(layer, names))]
    head = whole_number("head", head, 0)
    if head not in part.heads:
        raise SelectionError(f"there is no head {head}: the matrix has {', '.join(map(str, part.heads))}.")
    name = f"layer {part.name}, head {head}" if part.name else "A" if len(part.heads) == 1 else f"A, head {head}"
    name = f"{name}, {run.item}" if run.item else name
    return _pooled(part.matrix, list(part.heads).index(head), side, name), run, part


def _pooled(matrix: AttentionMatrix, head: int, side: int, name: str) -> Cells:
    """One head of an AttentionMatrix (1, heads, queries, keys); above `side`, pixels show their largest weight.

    O(queries·keys) time, O(side²) memory.
    """
    problem = matrix.call.problem
    n, m = problem.queries, problem.keys
    if max(n, m) <= side:
        weights, masked = as_host_array(matrix[0, head], "weights")[0], ~visibility.dense(problem)[0, head]
        return Cells(weights, masked, (1, 1), name, images.reach(images.peaks_of(weights, masked)))
    alone = matrix.part(0, head)
    drawn = pictures(alone, side)
    most = drawn.most[0]
    edges = np.arange(most.shape[1] + 1) * m // most.shape[1]
    first = int(np.searchsorted(edges, first_key(alone, 0), side="right")) - 1
    most[:, first] = np.maximum(most[:, first], drawn.first_most[0])
    pooled = -(-n // most.shape[0]), -(-m // most.shape[1])
    strongest = alone.observe(top=1).top
    assert strongest is not None
    high = images.reach(as_host_array(strongest.weights, "weights")[0][0, 0, :, 0])
    name = f"{name}, the largest of {pooled[0]}×{pooled[1]} in a pixel"
    return Cells(most, np.zeros(most.shape, bool), pooled, name, high)


def run_of(seen: Display, batch: int = 0) -> ShownRun:
    """One batch item of a matrix or of a `ch.watch` result, as a run to show."""
    run: ShownRun = seen.__shown__(batch)
    return run


def _renamed(run: ShownRun, tokens: Any, source_tokens: Any) -> ShownRun:
    """The run with the caller's token names. Raises RuleError and ShapeError if they do not fit."""
    if tokens is None and source_tokens is None:
        return run
    layers = list(run.layers)
    if source_tokens is not None and not any(layer.cross for layer in layers):
        layers = [replace(layer, cross=True) for layer in layers]
    for layer in layers:
        token_names(tokens, source_tokens if layer.cross else None, layer.matrix.call.problem)
    return replace(run, layers=layers, tokens=tokens, sources=run.sources if source_tokens is None else source_tokens)


def _names(run: ShownRun, layer: ShownLayer) -> tuple[Sequence[str] | None, Sequence[str] | None]:
    """The names of a layer's rows and columns, None where they are not known."""
    if run.tokens is None or (layer.cross and run.sources is None):
        return None, None
    start = 0 if layer.cross else int(layer.matrix.call.problem.query_offset[0])
    n, m = layer.matrix.shape[-2:]
    cols = run.sources if layer.cross else run.tokens
    rows = run.tokens[start : start + n]
    return (rows, cols) if cols is not None and len(rows) == n and len(cols) == m else (None, None)
