"""Pictures of a matrix or of statistics: SVG and PNG without a library, axes of matplotlib for papers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead import picture, visibility
from clearhead.arrays import read
from clearhead.axes import Array
from clearhead.errors import DtypeError, MissingExtraError, SelectionError
from clearhead.glance import first_key
from clearhead.view.long import pictures

SVG_SIDE, PNG_SIDE, PLOT_SIDE = 64, 512, 1024  # more queries or keys are pooled


class Cells(NamedTuple):
    """One head as a picture: weights and masked (rows, columns), and how many weights are behind a pixel."""

    weights: Array
    masked: Array
    pooled: tuple[int, int]
    name: str


def cells(matrix: Any, head: int, side: int, name: str) -> Cells:
    """One head of an AttentionMatrix (1, heads, queries, keys); above `side` each pixel has the largest of its weights.

    Raises SelectionError when there is no such head. O(queries·keys) time, O(side²) memory.
    """
    problem = matrix._problem
    if not 0 <= head < problem.heads:
        raise SelectionError(f"head {head} is outside 0..{problem.heads - 1}.")
    n, m = problem.queries, problem.keys
    if max(n, m) <= side:
        weights = read(matrix[0, head], "weights")[0]
        return Cells(weights, ~visibility.dense(problem)[0, head], (1, 1), name)
    alone = matrix.one(head)
    found = pictures(alone, side)
    most = found.most[0]
    edges = np.arange(most.shape[1] + 1) * m // most.shape[1]
    first = int(np.searchsorted(edges, first_key(alone, 0), side="right")) - 1
    most[:, first] = np.maximum(most[:, first], found.first_most[0])
    pooled = -(-n // most.shape[0]), -(-m // most.shape[1])
    return Cells(most, np.zeros(most.shape, bool), pooled, f"{name}, the largest of {pooled[0]}×{pooled[1]} in a pixel")


def svg(shown: Cells, rows: Sequence[str] | None, cols: Sequence[str] | None) -> str:
    """As SVG; tokens name rows and columns where each pixel is one weight."""
    names = (rows, cols) if shown.pooled == (1, 1) else (None, None)
    size = 24 if len(shown.weights) <= 24 else 14
    return picture.svg(shown.weights, shown.masked, *names, name=shown.name, cell=size)


def png(shown: Cells, cell: int) -> bytes:
    """As PNG, cell × cell pixels for each weight."""
    return picture.png(shown.weights, shown.masked, cell)


def plot(shown: Cells, shape: tuple[int, int], rows: Sequence[str] | None, cols: Sequence[str] | None, ax: Any) -> Any:
    """On matplotlib axes: colour by the square root, axes in tokens. Raises MissingExtraError."""
    colors = _matplotlib()
    ax = _axes(ax)
    high = float(shown.weights.max(initial=0.0)) or 1.0
    weights = np.ma.masked_array(shown.weights, shown.masked)
    norm = colors.PowerNorm(0.5, vmin=0.0, vmax=high)
    extent = (-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5)
    image = ax.imshow(weights, cmap="Purples", norm=norm, extent=extent, interpolation="nearest")
    ax.set_facecolor("0.9")
    ax.set(title=shown.name, xlabel="key", ylabel="query")
    for axis, names, size in ((ax.xaxis, cols, shape[1]), (ax.yaxis, rows, shape[0])):
        if names is not None and size <= 40:
            axis.set_ticks(range(size), [_plain(name) for name in names[:size]], rotation=90 if axis is ax.xaxis else 0)
    ax.figure.colorbar(image, ax=ax, label="weight")
    return ax


def plot_grid(values: Array, layers: Sequence[str], name: str, ax: Any) -> Any:
    """Layers × heads, coloured by one number; nan stays white."""
    _matplotlib()
    ax = _axes(ax)
    image = ax.imshow(values, cmap="Purples", interpolation="nearest", aspect="auto")
    ax.set(title=name, xlabel="head", ylabel="layer")
    ax.yaxis.set_ticks(range(len(layers)), layers)
    ax.figure.colorbar(image, ax=ax, label=name)
    return ax


def _plain(name: str) -> str:
    """A token as matplotlib takes it: no formula, nothing invisible."""
    return "".join(c if c.isprintable() else "·" for c in name.strip() or "␣").replace("$", r"\$")[:16]


def _matplotlib() -> Any:
    try:
        from matplotlib import colors
    except ImportError:
        raise MissingExtraError("the plot needs matplotlib.", 'pip install "clearhead[plot]"') from None
    return colors


def _axes(given: Any) -> Any:
    from matplotlib import pyplot
    from matplotlib.axes import Axes

    if isinstance(given, Axes):
        return given
    if given is not None:
        raise DtypeError(
            f"ax is a {type(given).__name__}: expected matplotlib axes.", "pyplot.subplots()[1] makes them."
        )
    return pyplot.subplots(figsize=(6, 5), layout="constrained")[1]
