"""Pictures of a matrix or of statistics: SVG and PNG without a library, and plots with matplotlib."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.digits import significant
from clearhead.errors import DtypeError, MissingExtraError
from clearhead.ops.matrix import AttentionMatrix
from clearhead.spelling import bare
from clearhead.view import images
from clearhead.view.head_summary import first_key
from clearhead.view.pooling import pictures

SVG_SIDE, PNG_SIDE, PLOT_SIDE = 64, 512, 1024  # larger matrices are pooled to so many pixels a side

_YELLOW = np.array([0.82, 0.63, 0.0, 1.0])  # the colour of nonfinite weights, as in images.py


class Cells(NamedTuple):
    """One head as a picture: weights and masked (rows, columns), and how many queries and keys a pixel covers."""

    weights: Array
    masked: Array
    pooled: tuple[int, int]
    name: str
    high: float  # the weight at which the colour scale ends


def cells(matrix: AttentionMatrix, head: int, side: int, name: str) -> Cells:
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


def svg(shown: Cells, rows: Sequence[str] | None, cols: Sequence[str] | None) -> str:
    """The picture as SVG, with tokens as labels if each pixel is one weight."""
    names = (rows, cols) if shown.pooled == (1, 1) else (None, None)
    size = 24 if len(shown.weights) <= 24 else 14
    return images.svg(shown.weights, shown.masked, *names, name=shown.name, cell=size, high=shown.high)


def plot(shown: Cells, shape: tuple[int, int], rows: Sequence[str] | None, cols: Sequence[str] | None, ax: Any) -> Any:
    """Draw on matplotlib axes and return them: colour by the square root of the weight, axes labelled by tokens.

    Raises MissingExtraError without matplotlib, DtypeError when `ax` is no axes.
    """
    ax = _axes(ax)
    from matplotlib.colors import PowerNorm

    weights = np.ma.masked_array(shown.weights, shown.masked)
    norm = PowerNorm(0.5, vmin=0.0, vmax=shown.high)
    extent = (-0.5, shape[1] - 0.5, shape[0] - 0.5, -0.5)
    image = ax.imshow(weights, cmap="Purples", norm=norm, extent=extent, interpolation="nearest")
    wrong = ~np.isfinite(shown.weights) & ~shown.masked
    if wrong.any():
        ax.imshow(np.where(wrong[..., None], _YELLOW, 0.0), extent=extent, interpolation="nearest")
    ax.set_facecolor("0.9")
    ax.set(title=shown.name, xlabel="key", ylabel="query")
    for axis, names, size in ((ax.xaxis, cols, shape[1]), (ax.yaxis, rows, shape[0])):
        if names is not None and size <= 40:  # a dollar would begin a formula
            labels = [bare(name)[:16].replace("$", r"\$") for name in names[:size]]
            axis.set_ticks(range(size), labels, rotation=90 if axis is ax.xaxis else 0)
    label = f"weight; the colours end at {significant(shown.high)}:\n{images.ENDS_AT}"
    ax.figure.colorbar(image, ax=ax, label=label, extend="max")
    return ax


def plot_bars(names: Sequence[str], values: Sequence[float], whole: float, words: tuple[str, str], ax: Any) -> Any:
    """Draw values as bars, the first on top, and a line at what they are beside, and return the axes. Raises as `plot`.

    words   the title, and what the values are; values of percent have an axis from 0 to 100
    """
    ax = _axes(ax)
    ax.barh(range(len(values)), values, color="#7a5fb5")
    ax.axvline(whole, color="0.2", linestyle="--", linewidth=1)
    labels = [bare(name)[:24].replace("$", r"\$") for name in names]
    ax.yaxis.set_ticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set(title=words[0], xlabel=words[1], xlim=(0, 100) if "%" in words[1] else None)
    return ax


def _axes(ax: Any) -> Any:
    try:
        from matplotlib import pyplot
        from matplotlib.axes import Axes
    except ImportError:
        raise MissingExtraError("the plot needs matplotlib.", 'pip install "clearhead[plot]"') from None

    if isinstance(ax, Axes):
        return ax
    if ax is not None:
        raise DtypeError(f"ax is a {type(ax).__name__}: expected matplotlib axes.", "pyplot.subplots()[1] makes them.")
    return pyplot.subplots(figsize=(6, 5), layout="constrained")[1]
