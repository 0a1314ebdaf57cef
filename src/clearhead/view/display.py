"""Makes pages, notebook output and pictures of objects that hold attention matrices (ops/display.py)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from html import escape
from math import prod
from typing import Any

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.core.rule_values import layer_name, whole_number
from clearhead.errors import SelectionError, check_known
from clearhead.ops.display import Display, Page
from clearhead.tables import QUICK
from clearhead.view import images, page
from clearhead.view.container import Document
from clearhead.view.head_summary import first_key
from clearhead.view.long import ShownLayer, ShownRun, document
from clearhead.view.names import token_names

Names = Sequence[str] | None  # names of tokens
SVG_SIDE = 64  # larger matrices are pooled to this many pixels a side


def document_of(seen: Display, options: Page) -> Document:
    """Make the content of an object's page: a header and arrays. Raises as `Display.save`."""
    check_known("option", options, Page.__annotations__)
    run = seen.__shown__(whole_number("batch", options.get("batch", 0), 0), options.get("v"))
    run = _renamed(run, options.get("tokens"), options.get("source_tokens"))
    title = options.get("title")
    return document([run], run.name if title is None else title, options.get("language", "en"))


def svg_of(seen: Display, head: int, layer: int | str, batch: int, tokens: Names, sources: Names) -> str:
    """Draw one head's weights as SVG text. Raises as `Display.to_svg`."""
    weights, masked, name, high, rows, cols = _picture(seen, head, layer, batch, tokens, sources)
    return images.svg(weights, masked, rows, cols, name=name, cell=24 if len(weights) <= 24 else 14, high=high)


def plot_of(seen: Display, head: int, layer: int | str, batch: int, tokens: Names, sources: Names, ax: Any) -> Any:
    """Plot one head's weights on matplotlib's axes. Raises as `Display.plot`."""
    weights, masked, name, high, rows, cols = _picture(seen, head, layer, batch, tokens, sources)
    ax = images.axes() if ax is None else ax
    drawn = ax.imshow(np.ma.masked_array(weights, masked), cmap="Purples", vmin=0, vmax=high)
    if rows is not None and cols is not None:
        ax.set_yticks(range(len(rows)), [images.label(row) for row in rows])
        ax.set_xticks(range(len(cols)), [images.label(col) for col in cols], rotation=90)
    ax.set(title=name, xlabel="keys", ylabel="queries")
    ax.figure.colorbar(drawn, ax=ax, label="weight", fraction=0.046, pad=0.04)
    return ax


def bundle_of(seen: Display) -> dict[str, str]:
    """Return what a notebook shows of an object: text, and, if it is not too large, a picture and the page."""
    run = run_of(seen)
    weights = sum(prod(layer.matrix.shape) for layer in run.layers)
    if not weights:
        return {"text/plain": str(seen)}
    if weights > QUICK:
        hint = f"<p>{escape(str(seen))}: <code>.save(&quot;page.html&quot;)</code> makes the page.</p>"
        return {"text/plain": str(seen), "text/html": hint}
    first = run.layers[0]
    svg = partial(svg_of, seen, first.heads[0], first.name or 0, 0, None, None)
    written = page.html(document([run], run.name, room=page.MOST_BYTES / 2))
    return page.bundle(str(seen), written, svg, prod(first.matrix.shape[-2:]))


def _picture(
    seen: Display, head: int, layer: int | str, batch: int, tokens: Names, sources: Names
) -> tuple[Array, Array, str, float, Names, Names]:
    """Return one head's weights, mask, name, end of the colour scale, and the names of its rows and columns.

    Above SVG_SIDE, each pixel has its largest weight, and there are no names. O(queries·keys) time.
    """
    run = _renamed(run_of(seen, whole_number("batch", batch, 0)), tokens, sources)
    names = [each.name for each in run.layers]
    part = run.layers[names.index(layer_name(layer, names))]
    head = whole_number("head", head, 0)
    if head not in part.heads:
        raise SelectionError(f"there is no head {head}: the matrix has {', '.join(map(str, part.heads))}.")
    name = f"layer {part.name}, head {head}" if part.name else "A" if len(part.heads) == 1 else f"A, head {head}"
    name = f"{name}, {run.item}" if run.item else name
    place, problem = list(part.heads).index(head), part.matrix.call.problem
    n, m = problem.queries, problem.keys
    if max(n, m) <= SVG_SIDE:
        weights = as_host_array(part.matrix[0, place], "weights")[0]
        masked = ~visibility.dense(problem)[0, place]
        return weights, masked, name, images.reach(images.peaks_of(weights, masked)), *_names(run, part)
    alone = part.matrix.part(0, place)
    drawn = images.pictures(alone, SVG_SIDE)
    most = drawn["most"][0]
    edges = np.arange(most.shape[1] + 1) * m // most.shape[1]
    first = int(np.searchsorted(edges, first_key(alone, 0), side="right")) - 1
    most[:, first] = np.maximum(most[:, first], drawn["first_most"][0])
    strongest = alone.observe(top=1).top
    assert strongest is not None
    high = images.reach(as_host_array(strongest.weights, "weights")[0][0, 0, :, 0])
    name = f"{name}, the largest of {-(-n // most.shape[0])}×{-(-m // most.shape[1])} in a pixel"
    return most, np.zeros(most.shape, bool), name, high, None, None


def run_of(seen: Display, batch: int = 0) -> ShownRun:
    """Turn one batch item of a matrix or of a `ch.watch` result into a run to show."""
    run: ShownRun = seen.__shown__(batch)
    return run


def _renamed(run: ShownRun, tokens: Any, source_tokens: Any) -> ShownRun:
    """Give the run the caller's token names. Raises RuleError and ShapeError if they do not fit."""
    if tokens is None and source_tokens is None:
        return run
    layers = list(run.layers)
    if source_tokens is not None and not any(layer.cross for layer in layers):
        layers = [replace(layer, cross=True) for layer in layers]
    for layer in layers:
        texts = {"tokens": tokens, "sources": source_tokens}.get(layer.text)
        token_names(texts, source_tokens if layer.cross else None, layer.matrix.call.problem)
    return replace(run, layers=layers, tokens=tokens, sources=run.sources if source_tokens is None else source_tokens)


def _names(run: ShownRun, layer: ShownLayer) -> tuple[Names, Names]:
    """Return the names of a layer's rows and columns, or None if they are unknown."""
    texts = {"tokens": run.tokens, "sources": run.sources}.get(layer.text)
    cols = run.sources if layer.cross else texts
    if texts is None or cols is None:
        return None, None
    start = 0 if layer.cross else int(layer.matrix.call.problem.query_offset[0])
    n, m = layer.matrix.shape[-2:]
    rows = texts[start : start + n]
    return (rows, cols) if len(rows) == n and len(cols) == m else (None, None)
