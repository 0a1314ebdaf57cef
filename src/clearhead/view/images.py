"""Draws weight matrices as SVG, without a library, and makes the pictures of heads that a page stores as bytes."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import Any

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.core.axes import Array
from clearhead.digits import significant
from clearhead.errors import MissingExtraError
from clearhead.ops.matrix import AttentionMatrix
from clearhead.spelling import bare
from clearhead.view.head_summary import first_key

LEVELS = 80  # the highest code of a finite pixel
NONFINITE = 255  # the code of a pixel that covers NaN or infinity
_STOPS = np.array([[252, 250, 255], [214, 196, 240], [157, 115, 212], [97, 48, 161], [45, 10, 89]], dtype=np.float64)
_NONFINITE = np.array([208, 160, 0], dtype=np.float64)
ENDS_AT = "90th percentile of the rows' largest weights, row 0 left out"


def reach(peaks: Array) -> float:
    """Return the weight at which the colour scale ends: the 90th percentile of the rows' maxima, without row 0.

    Under a causal mask row 0 sees only one key, with weight 1: a scale up to 1 would leave every other row pale.
    peaks (queries,): rows without visible keys and nonfinite rows do not count. The percentile is taken by rank, so it
    is one of the maxima: of 9 rows the largest, of 10 the second largest. Returns 1 if no row counts.
    """
    rows = np.asarray(peaks, np.float64)
    for some in (rows[1:], rows[:1]):
        counted = np.sort(some[np.isfinite(some) & (some > 0)])
        if counted.size:
            return float(counted[-(-9 * counted.size // 10) - 1])
    return 1.0


def peaks_of(weights: Array, masked: Array | None = None) -> Array:
    """Return each row's largest weight, (queries,); 0 for a row without visible keys."""
    seen = weights if masked is None else np.where(masked, 0.0, weights)
    return np.asarray(seen.max(1, initial=0.0))


def svg(
    weights: Array,
    masked: Array | None = None,
    rows: Sequence[str] | None = None,
    cols: Sequence[str] | None = None,
    cell: int = 24,
    name: str = "attention weights",
    high: float | None = None,
) -> str:
    """Draw weights (queries, keys) as SVG squares; masked ones are hatched, tokens label rows and columns.

    high      the weight at which the colour scale ends; None: `reach` of these weights
    """
    n, m = weights.shape
    names = _names("q", rows, n), _names("k", cols, m)
    left, top = (8 + 7 * max((len(name) for name in part), default=0) for part in names)
    high = reach(peaks_of(weights, masked)) if high is None else high
    end = significant(high)
    caption = (name, f"0 to {end} by the square root;", f"{end}: {ENDS_AT}")
    width, height = max(left + m * cell, *(7 * len(line) for line in caption)) + 8, top + n * cell + 66
    painted = colours(weights, high)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(name)}, {n} queries by {m} keys" font-family="sans-serif" font-size="12">',
        '<defs><pattern id="masked" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<rect width="6" height="6" fill="#ececf0"/><path d="M0 6L6 0" stroke="#a9a9b4"/></pattern></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, token in enumerate(names[0]):
        out.append(f'<text x="{left - 6}" y="{top + i * cell + cell / 2 + 4:g}" text-anchor="end">{token}</text>')
    for j, token in enumerate(names[1]):
        x = left + j * cell + cell / 2 + 4
        out.append(f'<text transform="translate({x:g} {top - 6}) rotate(-90)">{token}</text>')
    for i, j in np.ndindex(n, m):
        hidden = masked is not None and bool(masked[i, j])
        fill = "url(#masked)" if hidden else "#" + bytes(painted[i, j]).hex()
        value = "masked" if hidden else f"{weights[i, j]:.4g}"
        place = f'x="{left + j * cell}" y="{top + i * cell}" width="{cell - 1}" height="{cell - 1}"'
        out.append(f'<rect {place} fill="{fill}"><title>{names[0][i]} → {names[1][j]}: {value}</title></rect>')
    for line, said in enumerate(caption):
        out.append(f'<text x="8" y="{height - 42 + 16 * line}" fill="#55555f">{escape(said)}</text>')
    return "\n".join([*out, "</svg>"])


def colours(weights: Array, high: float) -> Array:
    """Colour weights by the square root of weight / high, as RGB bytes (queries, keys, 3); nonfinite ones yellow."""
    shares = weights.astype(np.float64) / high
    place = np.sqrt(np.clip(np.nan_to_num(shares), 0.0, 1.0)) * (len(_STOPS) - 1)
    low = np.minimum(place.astype(int), len(_STOPS) - 2)
    mixed = _STOPS[low] + (_STOPS[low + 1] - _STOPS[low]) * (place - low)[..., None]
    return np.round(np.where(np.isfinite(shares)[..., None], mixed, _NONFINITE)).astype(np.uint8)


def _names(letter: str, names: Sequence[str] | None, size: int) -> list[str]:
    if names is None:
        return [f"{letter}_{i}" for i in range(size)]
    return [escape(name if len(name) <= 12 else name[:11] + "…") for name in map(bare, names)]


def pictures(matrix: AttentionMatrix, side: int) -> dict[str, Array]:
    """Return the largest weight of each pixel of one layer, in at most side × side pixels.

    The result has most (heads, rows, columns), without the first key, and first_most (heads, rows), of that key alone.
    O(queries·keys·d_k) per head.
    """
    problem = matrix.call.problem
    n, m, first = problem.queries, problem.keys, first_key(matrix, 0)
    rows, cols = (np.arange(min(side, size) + 1) * size // min(side, size) for size in (n, m))
    most, alone = [], []
    for start, stop in pairwise(rows):
        seen = matrix.observe(peak=True, queries=slice(int(start), int(stop)))
        peak = as_host_array(seen.peak, "weights")[0][0].astype(np.float64)
        alone.append(peak[:, first].copy())
        peak[:, first] = 0.0
        most.append(np.maximum.reduceat(peak, cols[:-1], 1))
    return {"most": np.stack(most, 1), "first_most": np.stack(alone, 1)}


def axes() -> Any:
    """Make new matplotlib axes. Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtraError("the plot needs matplotlib.", 'pip install "clearhead[plot]"') from None
    return pyplot.subplots(figsize=(6, 5), layout="constrained")[1]


def label(text: str) -> str:
    """Shorten a token or part for an axis, and escape dollars, which would begin a formula."""
    return bare(text)[:24].replace("$", r"\$")


def coded(pixels: Array, first: Array) -> tuple[Array, Array, list[float]]:
    """Encode both as bytes, by the square root of weight / the head's largest; return the largest weights too."""
    finite = [np.where(np.isfinite(x), x, 0.0) for x in (pixels, first)]
    largest = np.maximum(finite[0].max((1, 2), initial=0.0), finite[1].max(1, initial=0.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = [np.nan_to_num(x / largest.reshape(-1, *(1,) * (x.ndim - 1))) for x in finite]
    codes = [np.rint(np.sqrt(np.clip(x, 0.0, 1.0)) * LEVELS).astype(np.uint8) for x in shares]
    for code, x in zip(codes, (pixels, first), strict=True):
        code[~np.isfinite(x)] = NONFINITE
    return codes[0], codes[1], [float(x) for x in largest]
