"""The long view: every head as a small picture, chosen heads with q, k and log-sum-exp: every weight follows.

A picture has whole cells in each pixel, their largest weight and their mean, without the first key, whose column is
kept beside it: attention sinks would outshine everything else. See docs/page-format.md.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan
from typing import Any, Literal, NamedTuple

import numpy as np

from clearhead import __version__
from clearhead.arrays import FLOATS, beside, on_cpu, read
from clearhead.axes import WEIGHTS, Array, named
from clearhead.errors import DtypeError, RuleError, SelectionError, shown
from clearhead.glance import first_key, glance
from clearhead.problem import Problem
from clearhead.values import read_language
from clearhead.view.container import Document, compressed, stored
from clearhead.view.packing import packed
from clearhead.words import Language

LIMIT = 64 * 10**6  # bytes of a page
COMPUTED = 1024  # up to so many queries and keys the page computes the whole matrix, and needs no pictures
LEVELS = 80  # of a pixel
_SMALL, _LARGE = (128, 96, 64, 48, 32), (1024, 512, 256)  # sides of the pictures of all heads, and of exact ones
_SMALL_CELLS, _LARGE_CELLS = 3 * 2**20, 2**20  # in all pictures together
_TEXT = 1.25  # characters for a byte
_SAMPLE = 2**18  # bytes that are compressed to tell how the rest will


@dataclass(frozen=True, eq=False, slots=True)
class Sight:
    """One layer to look at."""

    name: str
    heads: Sequence[int]  # their numbers in the model
    matrix: Any  # an AttentionMatrix, (1, heads, queries, keys)
    padding: Array | None = None  # (1, queries)
    cross: bool = False
    note: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """One text through one model, or one matrix."""

    name: str
    sights: Sequence[Sight]
    tokens: Sequence[str] | None = None
    sources: Sequence[str] | None = None  # the keys of cross-attention


@dataclass(frozen=True, eq=False, slots=True)
class Wish:
    """How a page is to be.

    exact     (layer, head) pairs whose weights the page computes, by name and number; None is all
    dtype     in which q and k are stored; None is their own
    served    q and k stay here: a server is asked for weights, or, as "frame", the page around
    """

    title: str = "clearhead"
    language: Language = "en"
    exact: Iterable[tuple[Any, int]] | None = None
    dtype: Any = None
    served: bool | Literal["frame"] = False

    def __post_init__(self) -> None:
        read_language(self.language)
        if not isinstance(self.title, str):
            raise RuleError(f"title is {shown(self.title)}: expected a text.")


class Pictures(NamedTuple):
    """One layer's heads in pixels, (heads, rows, columns) and, for the first key alone, (heads, rows)."""

    most: Array
    mean: Array
    first_most: Array
    first_mean: Array
    received: Array  # (heads, keys), with the first key


@dataclass(frozen=True, eq=False, slots=True)
class _Chosen:
    """What a page is made of, checked."""

    sights: list[Sight]
    exact: list[list[int]]  # for each layer the places of its exact heads
    dtype: np.dtype[Any] | None
    served: bool
    small: int  # sides of pictures
    large: int
    arrays: dict[str, Array] = field(default_factory=dict)


def document(runs: Sequence[Run], wish: Wish, each: Callable[[Sequence[int]], Iterable[int]] = iter) -> Document:
    """The document of kind "heads". Raises SelectionError and DtypeError for a wish that cannot be, before any work.

    each      walks the layers; a progress bar goes there
    O(queries·keys) for every head.
    """
    chosen = _choose([sight for run in runs for sight in run.sights], wish)
    if not wish.served:
        _check_size(chosen)
    told = iter([_layer(chosen, place) for place in each(range(len(chosen.sights)))])
    header = {
        "kind": "heads",
        "maker": f"clearhead {__version__}",
        "title": wish.title,
        "language": wish.language,
        "served": wish.served,
        "runs": [
            {
                "name": run.name,
                "tokens": None if run.tokens is None else list(run.tokens),
                "sources": None if run.sources is None else list(run.sources),
                "layers": [next(told) for _ in run.sights],
            }
            for run in runs
        ],
    }
    return Document(header, chosen.arrays, packed=True)


def pictures(matrix: Any, side: int) -> Pictures:
    """Largest and mean weight of each pixel, over whole cells, in at most side × side pixels. O(queries·keys)."""
    problem: Problem = matrix._problem
    n, m, first = problem.queries, problem.keys, first_key(matrix, 0)
    rows, cols = (np.arange(min(side, size) + 1) * size // min(side, size) for size in (n, m))
    widths = np.diff(cols)
    parts = []
    received = np.zeros((problem.heads, m))
    for start, stop in pairwise(rows):
        seen = matrix.observe(peak=True, received=True, queries=slice(int(start), int(stop)))
        peak, mass = (read(x, "weights")[0][0].astype(np.float64) for x in (seen.peak, seen.received))
        received += mass
        alone = peak[:, first].copy(), mass[:, first] / (stop - start)
        peak[:, first] = mass[:, first] = 0.0
        mean = np.add.reduceat(mass, cols[:-1], 1) / (widths * (stop - start))
        parts.append((np.maximum.reduceat(peak, cols[:-1], 1), mean, *alone))
    most, mean, first_most, first_mean = (np.stack(part, 1) for part in zip(*parts, strict=True))
    return Pictures(most, mean, first_most, first_mean, received)


def _choose(sights: list[Sight], wish: Wish) -> _Chosen:
    if not sights:
        raise SelectionError("no attention was seen: there is nothing to show.")
    for sight in sights:
        if 0 in sight.matrix.shape:
            raise SelectionError(
                f"layer {sight.name} has no weights: its matrix is {named(sight.matrix.shape, WEIGHTS)}."
            )
    everything = [list(range(len(sight.heads))) for sight in sights]
    exact = everything if wish.exact is None else _places(sights, wish.exact)
    dtype = None
    if wish.dtype is not None:
        try:
            dtype = next(known for known in FLOATS if known.name == np.dtype(wish.dtype).name)
        except (TypeError, ValueError, StopIteration):
            raise DtypeError(
                f"dtype is {shown(wish.dtype)}: a page holds {', '.join(known.name for known in FLOATS)}."
            ) from None
    heads, all_exact = sum(len(sight.heads) for sight in sights), max(1, sum(map(len, exact)))
    small = next((side for side in _SMALL if heads * side**2 <= _SMALL_CELLS), _SMALL[-1])
    large = next((side for side in _LARGE if all_exact * side**2 <= _LARGE_CELLS), 0)
    return _Chosen(sights, exact, dtype, bool(wish.served), small, large)


def _places(sights: list[Sight], exact: Iterable[tuple[Any, int]]) -> list[list[int]]:
    found: list[set[int]] = [set() for _ in sights]
    listed = isinstance(exact, (list, tuple, set, frozenset))
    if not listed or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in exact):
        raise SelectionError(f"exact is {shown(exact)}: expected a list of (layer, head) pairs.", "exact=[(0, 3)]")
    for layer, head in exact:
        here = [place for place, sight in enumerate(sights) if sight.name == str(layer)]
        if not here:
            raise SelectionError(
                f"exact: there is no layer {layer!r}.", f"seen are: {', '.join(s.name for s in sights)}"
            )
        for place in here:
            if head not in sights[place].heads:
                kept = ", ".join(map(str, sights[place].heads))
                raise SelectionError(f"exact: layer {layer} has no head {head}: seen are {kept}.")
            found[place].add(list(sights[place].heads).index(head))
    return [sorted(places) for places in found]


def _layer(chosen: _Chosen, place: int) -> dict[str, Any]:
    sight, exact = chosen.sights[place], chosen.exact[place]
    matrix, problem = sight.matrix, sight.matrix._problem
    large = problem.queries * problem.keys > COMPUTED**2
    seen = matrix.observe(entropy=True, distance=True, logsumexp=True)
    told: dict[str, Any] = {"pixels": None, "largest": None, "wide": None, "key_of": []}
    arrays: dict[str, Array] = {}
    found = None
    if large or len(exact) < problem.heads or chosen.served:
        found = pictures(matrix, chosen.small)
        told["pixels"] = list(found.most.shape[1:])
        told["largest"] = _put(arrays, found, problem, "")
    plain, rule_arrays = packed(problem)
    if exact and not chosen.served:
        group = problem.heads // problem.kv_heads
        keys = sorted({head // group for head in exact})
        told["key_of"] = [keys.index(head // group) for head in exact]
        arrays |= _exact(chosen, sight, exact, keys, read(seen.logsumexp, "logsumexp")[0])
        arrays |= {name: _rule_of(name, array, exact) for name, array in rule_arrays.items()}
        if large and chosen.large:
            parts = [pictures(matrix.one(head), chosen.large) for head in exact]
            whole = Pictures(*(np.concatenate(x) for x in zip(*parts, strict=True)))
            told["wide"] = {"pixels": list(whole.most.shape[1:]), "largest": _put(arrays, whole, problem, "wide_")}
    shown = list(range(problem.heads)) if chosen.served else exact
    if found is not None and shown:
        arrays["received"] = found.received[shown].astype(np.float32)
    chosen.arrays.update({f"{place}.{name}": array for name, array in arrays.items()})
    means = glance(matrix, seen, sight.padding, cross=sight.cross)._asdict().items()
    return told | {
        "name": sight.name,
        "heads": list(sight.heads),
        "cross": sight.cross,
        "note": sight.note,
        "queries": problem.queries,
        "keys": problem.keys,
        "d_k": problem.d_k,
        "dtype": problem.dtype.name,
        "first": first_key(matrix, 0),
        "rules": plain,
        "statistics": {name: [None if isnan(x) else float(f"{x:.4g}") for x in values] for name, values in means},
        "exact": exact,
        "arrays": {name: f"{place}.{name}" for name in arrays},
    }


def _put(arrays: dict[str, Array], found: Pictures, problem: Problem, prefix: str) -> dict[str, list[float]]:
    """The pictures as bytes; returns what the highest byte means for each head. A pixel of one cell has one weight."""
    single = found.most.shape[1:] == (problem.queries, problem.keys)
    largest = {}
    for name in ("most",) if single else ("most", "mean"):
        pixels, first = getattr(found, name), getattr(found, f"first_{name}")
        arrays[prefix + name], arrays[f"{prefix}first_{name}"], largest[name] = _coded(pixels, first)
    return largest


def _exact(chosen: _Chosen, sight: Sight, exact: list[int], keys: list[int], logsumexp: Array) -> dict[str, Array]:
    """q, k and L of the exact heads; where rounding changed q and k, L is that of the rounded ones."""
    matrix = sight.matrix
    own, dtype = matrix._q.dtype, chosen.dtype
    q, k = on_cpu(matrix._q), on_cpu(matrix._k)
    if dtype is not None and dtype != own:
        q, k = (_rounded(x, dtype, sight.name) for x in (q, k))
        again = matrix._part(matrix._problem, *(beside(x.astype(own), matrix._q) for x in (q, k)))
        logsumexp = read(again.logsumexp(), "logsumexp")[0]
    return {"q": q[0, exact], "k": k[0, keys], "logsumexp": logsumexp[0, exact]}


def _rounded(x: Array, dtype: np.dtype[Any], layer: str) -> Array:
    with np.errstate(over="ignore"):
        rounded = x.astype(dtype)
    if not np.array_equal(np.isfinite(rounded), np.isfinite(x)):
        raise DtypeError(f"layer {layer} has numbers too large for {dtype.name}.", "dtype='bfloat16'")
    return rounded


def _rule_of(name: str, array: Array, exact: list[int]) -> Array:
    """A rule for the exact heads only, where it has a value for each head."""
    if name in ("bias", "mask"):
        return array[:, exact] if array.shape[1] > 1 else array
    return array[exact] if name in ("alibi_slopes", "sinks") and len(array) > 1 else array


def _coded(pixels: Array, first: Array) -> tuple[Array, Array, list[float]]:
    """Both as bytes, by the square root, in shares of each head's largest; and the largest."""
    largest = np.maximum(pixels.max((1, 2), initial=0.0), first.max(1, initial=0.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = [np.nan_to_num(x / largest.reshape(-1, *(1,) * (x.ndim - 1))) for x in (pixels, first)]
    bytes_ = [np.rint(np.sqrt(np.clip(x, 0.0, 1.0)) * LEVELS).astype(np.uint8) for x in shares]
    return bytes_[0], bytes_[1], [float(x) if np.isfinite(x) else 0.0 for x in largest]


def _check_size(chosen: _Chosen) -> None:
    """Refuse a page that would be too large, with what would fit."""
    sizes: list[float] = []
    large = False
    for sight, exact in zip(chosen.sights, chosen.exact, strict=True):
        matrix, problem = sight.matrix, sight.matrix._problem
        keys = {head // (problem.heads // problem.kv_heads) for head in exact}
        dtype = chosen.dtype or matrix._q.dtype
        if not exact:
            continue
        large = max(large, problem.queries * problem.keys > COMPUTED**2)
        share = _share(on_cpu(matrix._q[0, exact[0]]), dtype)
        numbers = (len(exact) * problem.queries + len(keys) * problem.keys) * problem.d_k
        rules = sum(_rule_of(name, array, exact).nbytes for name, array in packed(problem)[1].items())
        sizes.append(numbers * dtype.itemsize * share + 12.0 * len(exact) * problem.queries + rules / 4)
    count = max(1, sum(map(len, chosen.exact)))
    pictured = sum(len(sight.heads) for sight in chosen.sights) * chosen.small**2 + large * count * chosen.large**2
    whole = _TEXT * (sum(sizes) + pictured)
    if whole > LIMIT:
        fit = int(max(0.0, LIMIT / _TEXT - pictured) / max(1.0, sum(sizes)) * count)
        smaller = (
            "" if (chosen.dtype or chosen.sights[0].matrix._q.dtype).itemsize <= 2 else "dtype='bfloat16' halves it; "
        )
        first = chosen.sights[0]
        raise SelectionError(
            f"the page would have about {whole / 1e6:.0f} MB with {count} exact heads, and above {LIMIT / 1e6:.0f} MB "
            "browsers are slow to open it.",
            f"exact=[({first.name!r}, {first.heads[0]})] chooses (layer, head) pairs: about {fit} fit; {smaller}"
            "`clearhead view` serves any number.",
        )  # fmt: skip


def _share(x: Array, dtype: np.dtype[Any]) -> float:
    """How small the numbers become, told from some of them."""
    with np.errstate(over="ignore"):
        some = stored(x.reshape(-1)[: _SAMPLE // dtype.itemsize].astype(dtype))
    return len(compressed(some)) / max(1, some.nbytes)
