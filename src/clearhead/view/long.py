"""The long view: every head as a small picture, and chosen heads with q, k and log-sum-exp, so with every weight.

Each pixel of a picture covers whole weights and holds their largest and their mean. The first key is left out and
stored as a column of its own, since an attention sink there would outshine all other weights. See docs/commands.md.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import isfinite
from typing import Any

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import FLOATS, as_host_array, on_cpu, to_device_of, unrepeated
from clearhead.core.axes import WEIGHTS, Array, blocks, named
from clearhead.core.call import Call
from clearhead.core.problem import Problem
from clearhead.core.rules import EVERYWHERE, FIELDS, check_supported, take
from clearhead.digits import rounded
from clearhead.errors import DtypeError, RuleError, SelectionError, expected, shown
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.observation import Observation
from clearhead.version import __version__
from clearhead.view.captions import captions
from clearhead.view.container import Document, compressed, stored
from clearhead.view.head_summary import even_heads, first_key, summarise_heads
from clearhead.view.images import reach
from clearhead.view.pooling import Pictures, coded, pictures
from clearhead.words import Language, read_language

OPENING = {"kind": "attention", "maker": f"clearhead {__version__}"}
LIMIT = 64 * 10**6  # bytes of a page
ROOM = 16 * 10**6  # bytes of a page up to which v is put in by itself
COMPUTED = 1024  # up to so many queries and keys the page computes the whole matrix and needs no pictures
_SMALL, _LARGE = (128, 96, 64, 48, 32), (1024, 512, 256)  # sides of the pictures of all heads, and of exact ones
_SMALL_CELLS, _LARGE_CELLS = 3 * 2**20, 2**20  # most pixels in all pictures together
_TEXT = 1.25  # characters per byte in base 85
_RULE_BLOCK = 1024  # queries and keys of which is asked at a time whether a rule forbids any
RULES = EVERYWHERE  # that page/src/attention.js supports
_SAMPLE = 2**18  # bytes compressed as a sample, to estimate the size of the rest


@dataclass(frozen=True, eq=False, slots=True)
class ShownLayer:
    """One layer to show."""

    name: str
    heads: Sequence[int]  # their numbers in the model
    matrix: AttentionMatrix  # (1, heads, queries, keys)
    padding: Array | None = None  # (1, queries)
    cross: bool = False
    note: str = ""
    v: Array | None = None  # (1, kv_heads, keys, d_v); None: not known, and the page's arithmetic ends at the weight
    g: Array | None = None  # (1, heads, queries, d_v), by A·v; with v the page shows contributions and cuts


@dataclass(frozen=True, eq=False, slots=True)
class ShownRun:
    """One run to show: one text through one model, or one matrix."""

    name: str
    layers: Sequence[ShownLayer]
    tokens: Sequence[str] | None = None
    sources: Sequence[str] | None = None  # the keys of cross-attention
    pads: Sequence[int] = ()  # which tokens are padding
    item: str = ""  # which text of a batch this is
    batch: int = 0  # the batch item of the page's steps
    header: Mapping[str, Any] = field(default_factory=dict)  # the page's `facts` and `words`, where it is the only run


@dataclass(frozen=True, eq=False, slots=True)
class PageOptions:
    """Options of a page.

    exact     (layer name, head number) pairs whose weights the page computes from q and k; None: all
    dtype     the dtype in which q, k and v are stored; None: their own
    room      bytes: v is left out of a page that would be larger with it; None: v is always put in
    served    True: q and k are not stored, the page requests weights from its server
    """

    title: str = "clearhead"
    language: Language = "en"
    exact: Iterable[tuple[Any, int]] | None = None
    dtype: Any = None
    room: int | None = ROOM
    served: bool = False

    def __post_init__(self) -> None:
        read_language(self.language)
        if not isinstance(self.title, str):
            raise RuleError(expected("title", self.title, "a text"))


@dataclass(frozen=True, eq=False, slots=True)
class _Chosen:
    """Validated choices for a page, and its arrays so far."""

    layers: list[ShownLayer]
    exact: list[list[int]]  # for each layer the indices of its exact heads
    dtype: np.dtype[Any] | None
    values: bool  # v is put in where it is known
    served: bool
    small: int  # side of the pictures of all heads; `large`: of exact heads
    large: int
    arrays: dict[str, Array] = field(default_factory=dict)
    prefix: str = ""  # of the arrays' names


def document(
    runs: Sequence[ShownRun], wish: PageOptions, each: Callable[[Sequence[int]], Iterable[int]] = iter
) -> Document:
    """The document of the page of these runs.

    each      wraps the loop over the layers, for a progress bar
    Raises, before any work, SelectionError for layers or heads that do not exist or a page that would be too large, and
    DtypeError for a dtype that a page cannot store. O(queries·keys·d_k) time for every head.
    """
    chosen = _choose([layer for run in runs for layer in run.layers], wish)
    if not wish.served:
        chosen = _fitting(chosen, wish.room)
    described_runs = _runs(runs, chosen, each)
    header = {"title": wish.title, "language": wish.language, "served": wish.served, "runs": described_runs}
    return Document({**OPENING, **header, **(runs[0].header if len(runs) == 1 else {})}, chosen.arrays, packed=True)


def described(runs: Sequence[ShownRun], wish: PageOptions) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """The entry `runs` of a header, and its arrays. O(queries·keys·d_k) time for every head."""
    if not runs:
        return [], {}
    chosen = replace(_choose([layer for run in runs for layer in run.layers], wish), prefix="runs.")
    return _runs(runs, chosen, iter), chosen.arrays


def _runs(
    runs: Sequence[ShownRun], chosen: _Chosen, each: Callable[[Sequence[int]], Iterable[int]]
) -> list[dict[str, Any]]:
    layers = iter([_layer(chosen, place) for place in each(range(len(chosen.layers)))])
    return [
        {
            "name": run.name,
            "tokens": None if run.tokens is None else list(run.tokens),
            "sources": None if run.sources is None else list(run.sources),
            "pads": list(run.pads),
            "batch": run.batch,
            "layers": [next(layers) for _ in run.layers],
        }
        for run in runs
    ]


def _choose(layers: list[ShownLayer], wish: PageOptions) -> _Chosen:
    if not layers:
        raise SelectionError("no attention was seen: there is nothing to show.")
    for layer in layers:
        if 0 in layer.matrix.shape:
            sizes = named(layer.matrix.shape, WEIGHTS)
            raise SelectionError(f"layer {layer.name} has no weights: its matrix is {sizes}.")
    everything = [list(range(len(layer.heads))) for layer in layers]
    exact = everything if wish.exact is None else _places(layers, wish.exact)
    dtype = None
    if wish.dtype is not None:
        try:
            dtype = next(known for known in FLOATS if known.name == np.dtype(wish.dtype).name)
        except (TypeError, ValueError, StopIteration):
            names = ", ".join(known.name for known in FLOATS)
            raise DtypeError(f"dtype is {shown(wish.dtype)}: a page holds {names}.") from None
    heads, all_exact = sum(len(layer.heads) for layer in layers), max(1, sum(map(len, exact)))
    small = next((side for side in _SMALL if heads * side**2 <= _SMALL_CELLS), _SMALL[-1])
    large = next((side for side in _LARGE if all_exact * side**2 <= _LARGE_CELLS), 0)
    return _Chosen(layers, exact, dtype, values=True, served=wish.served, small=small, large=large)


def _places(layers: list[ShownLayer], exact: Iterable[tuple[Any, int]]) -> list[list[int]]:
    places: list[set[int]] = [set() for _ in layers]
    listed = isinstance(exact, (list, tuple, set, frozenset))
    if not listed or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in exact):
        raise SelectionError(expected("exact", exact, "a list of (layer, head) pairs"), "exact=[(0, 3)]")
    for name, head in exact:
        here = [place for place, layer in enumerate(layers) if layer.name == str(name)]
        if not here:
            known = ", ".join(layer.name for layer in layers)
            raise SelectionError(f"exact: there is no layer {name!r}.", f"seen are: {known}")
        for place in here:
            if head not in layers[place].heads:
                kept = ", ".join(map(str, layers[place].heads))
                raise SelectionError(f"exact: layer {name} has no head {head}: seen are {kept}.")
            places[place].add(list(layers[place].heads).index(head))
    return [sorted(each) for each in places]


def _layer(chosen: _Chosen, place: int) -> dict[str, Any]:
    """The entry of one layer; its arrays go to `chosen.arrays`."""
    layer, exact = chosen.layers[place], chosen.exact[place]
    matrix, problem = layer.matrix, layer.matrix.call.problem
    large = problem.queries * problem.keys > COMPUTED**2
    v = None if layer.g is None else layer.v
    seen = matrix.observe(v, entropy=True, distance=True, logsumexp=True, top=min(2, problem.keys))
    first = first_key(matrix, 0)
    entry: dict[str, Any] = {"pixels": None, "largest": None, "wide": None, "key_of": []}
    arrays: dict[str, Array] = {}
    small = None
    if large or len(exact) < problem.heads or chosen.served:
        small = pictures(matrix, chosen.small)
        entry |= _put(arrays, small, problem, "")
    plain, rule_arrays = packed(problem, exact)
    if exact and not chosen.served:
        keys = sorted({problem.kv_head_of(head) for head in exact})
        entry["key_of"] = [keys.index(problem.kv_head_of(head)) for head in exact]
        arrays |= _exact(chosen, layer, exact, keys, as_host_array(seen.logsumexp, "logsumexp")[0] if large else None)
        arrays |= rule_arrays
        if large and chosen.large:
            parts = [pictures(matrix.part(0, head), chosen.large) for head in exact]
            entry["wide"] = _put(arrays, Pictures(*map(np.concatenate, zip(*parts, strict=True))), problem, "wide_")
    with_rows = list(range(problem.heads)) if chosen.served else exact
    if small is not None and with_rows:
        arrays["received"] = small.received[with_rows].astype(np.float32)
    names = {name: f"{chosen.prefix}{place}.{name}" for name in arrays}
    chosen.arrays.update({names[name]: array for name, array in arrays.items()})
    return {
        **entry,
        **_numbers(layer, seen, first),
        "name": layer.name,
        "heads": list(layer.heads),
        "cross": layer.cross,
        "note": layer.note,
        **{name: getattr(problem, name) for name in ("queries", "keys", "d_k")},
        "dtype": problem.dtype.name,
        "values": None if layer.v is None else layer.v.dtype.name if chosen.values else "",
        "first": first,
        "masked": forbids(problem),
        "sinks": problem.sinks is not None,
        "rules": plain,
        "exact": exact,
        "arrays": names,
    }


def _numbers(layer: ShownLayer, seen: Observation, first: int) -> dict[str, Any]:
    """The statistics of a layer's heads, their captions, and where their colour scales end."""
    means = summarise_heads(layer.matrix, seen, layer.padding, cross=layer.cross)
    each = captions(means, even_heads(layer.matrix, layer.padding, cross=layer.cross))
    numbers = dict(means)
    if layer.g is not None and seen.output is not None:  # what the heads did: all contributions, summed
        numbers["effect"] = (
            (np.float64(on_cpu(layer.g)) * as_host_array(seen.output, "output")[0]).sum((0, 2, 3)).tolist()
        )
    assert seen.top is not None
    weights, keys = (as_host_array(x, "weights")[0][0] for x in seen.top)
    strongest = weights[..., 0]
    others = weights[..., 1] if weights.shape[-1] > 1 else np.zeros_like(strongest)
    ends = {"whole": strongest, "aside": np.where(keys[..., 0] == first, others, strongest)}  # without the first key
    return {
        "reach": {name: rounded(map(reach, peaks), 6) for name, peaks in ends.items()},  # where colour scales end
        "statistics": {n: [rounded(x, 4) if isfinite(x) else None for x in each] for n, each in numbers.items()},
        "captions": [caption and caption.said for caption in each],
        "kinds": [caption and caption.kind for caption in each],
    }


def _put(arrays: dict[str, Array], drawn: Pictures, problem: Problem, prefix: str) -> dict[str, Any]:
    """Add the encoded pictures to `arrays`; returns their size, and the weight of the highest code for each head.

    If each pixel is a single weight, mean and largest are equal and only the largest is stored.
    """
    size = drawn.most.shape[1:]
    largest = {}
    for name in ("most",) if size == (problem.queries, problem.keys) else ("most", "mean"):
        pixels, first = getattr(drawn, name), getattr(drawn, f"first_{name}")
        arrays[prefix + name], arrays[f"{prefix}first_{name}"], largest[name] = coded(pixels, first)
    return {"pixels": list(size), "largest": largest}


def _exact(
    chosen: _Chosen, layer: ShownLayer, exact: list[int], keys: list[int], logsumexp: Array | None
) -> dict[str, Array]:
    """q, k, v, g and log-sum-exp of the exact heads, the latter of rounded q and k where these are rounded."""
    call, dtype = layer.matrix.call, chosen.dtype
    q, k = on_cpu(call.q), on_cpu(call.k)
    if dtype is not None and dtype != call.q.dtype:
        q, k = (_rounded(x, dtype, layer.name) for x in (q, k))
        if logsumexp is not None:
            near, far = (to_device_of(x.astype(call.q.dtype), call.q) for x in (q, k))
            logsumexp = on_cpu(layer.matrix.with_call(Call(call.problem, near, far)).state.logsumexp)
    arrays = {"q": q[0, exact], "k": k[0, keys]}
    if logsumexp is not None:
        arrays["logsumexp"] = logsumexp[0, exact]
    if layer.v is not None and chosen.values:
        v = on_cpu(layer.v)[0, keys]
        arrays["v"] = v if dtype is None or dtype == v.dtype else _rounded(v, dtype, layer.name)
        if layer.g is not None:
            g = on_cpu(layer.g)[0, exact]
            arrays["g"] = g if dtype is None or dtype.name == "float16" else g.astype(dtype)  # small ones would be lost
    return arrays


def _rounded(x: Array, dtype: np.dtype[Any], layer: str) -> Array:
    with np.errstate(over="ignore"):
        rounded = x.astype(dtype)
    if not np.array_equal(np.isfinite(rounded), np.isfinite(x)):
        raise DtypeError(f"layer {layer} has numbers too large for {dtype.name}.", "dtype='bfloat16'")
    return rounded


def _fitting(chosen: _Chosen, room: int | None) -> _Chosen:
    """The choice without v where the page would be larger than `room` with it.

    Raises SelectionError for a page that would be too large; the hint says what would fit.
    """
    count = max(1, sum(map(len, chosen.exact)))
    sizes, values, pictured, large = 0.0, 0.0, 0, False
    for layer, exact in zip(chosen.layers, chosen.exact, strict=True):
        problem = layer.matrix.call.problem
        computed = problem.queries * problem.keys <= COMPUTED**2
        pictured += 0 if computed and len(exact) == problem.heads else problem.heads * chosen.small**2
        if exact:
            large = large or not computed
            operands, more = _bytes_of(layer, exact, chosen.dtype, computed=computed)
            sizes, values = sizes + operands, values + more
    pictured += large * count * chosen.large**2
    if room is None or any(layer.g is not None for layer in chosen.layers):  # who asked for causes wants v
        sizes += values
    elif _TEXT * (sizes + pictured + values) > room:
        chosen = replace(chosen, values=False)
    whole = _TEXT * (sizes + pictured)
    if whole > LIMIT:
        fit = int(max(0.0, LIMIT / _TEXT - pictured) / max(1.0, sizes) * count)
        first = chosen.layers[0]
        halves = (chosen.dtype or first.matrix.call.q.dtype).itemsize > 2
        halved = "dtype='bfloat16' halves it; " if halves else ""
        raise SelectionError(
            f"the page would have about {whole / 1e6:.0f} MB with {count} exact heads, and above {LIMIT / 1e6:.0f} MB "
            "browsers are slow to open it.",
            f"exact=[({first.name!r}, {first.heads[0]})] chooses (layer, head) pairs: about {fit} fit; {halved}"
            "`clearhead view` serves any number.",
        )
    return chosen


def _bytes_of(
    layer: ShownLayer, exact: list[int], dtype: np.dtype[Any] | None, *, computed: bool
) -> tuple[float, float]:
    """About how many bytes q, k, the rules and the log-sum-exp of the exact heads take, and how many v and g."""
    call = layer.matrix.call
    problem = call.problem
    keys = {problem.kv_head_of(head) for head in exact}
    stored_as = dtype or call.q.dtype
    numbers = (len(exact) * problem.queries + len(keys) * problem.keys) * problem.d_k
    rules = sum(array.nbytes for array in packed(problem, exact)[1].values())
    rows = 0 if computed else 12 * len(exact) * problem.queries
    share = _share(on_cpu(call.q[0, exact[0]]), stored_as)
    size = numbers * stored_as.itemsize * share + rows + rules / 4
    if layer.v is None:
        return size, 0.0
    stored_as = dtype or layer.v.dtype
    part = on_cpu(layer.v[0, min(keys)])
    derived = 0 if layer.g is None else on_cpu(layer.g)[0, exact].nbytes
    return size, len(keys) * part.size * stored_as.itemsize * _share(part, stored_as) + derived


def _share(x: Array, dtype: np.dtype[Any]) -> float:
    """The compressed size as a share of the stored one, estimated from a sample."""
    with np.errstate(over="ignore"):
        some = stored(x.reshape(-1)[: _SAMPLE // dtype.itemsize].astype(dtype))
    return len(compressed(some)) / max(1, some.nbytes)


def packed(problem: Problem, heads: list[int] | None = None) -> tuple[dict[str, Any], dict[str, Array]]:
    """(rules as plain numbers, rules as arrays), for some heads or all; docs/commands.md names them.

    Raises RuleError for a rule that the page's program does not support.
    """
    check_supported("the page", RULES, problem.active_rules())
    plain: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name, axes in FIELDS.items():
        value = getattr(problem, name)
        if axes in ((), ("batch",)):
            plain[name] = value.tolist() if isinstance(value, np.ndarray) else value
        elif value is not None:
            arrays[name] = unrepeated(value)  # each element is stored once
    return plain, arrays if heads is None else take(arrays, {"heads": heads})


def forbids(problem: Problem) -> bool:
    """Whether the rules mask any weight of the first batch item. O(queries·keys) to read mask, bias and spans."""
    rules = (unrepeated(x) for x in (problem.mask, problem.bias, problem.span_table) if x is not None)
    each_head = any(rule.shape[1] > 1 for rule in rules)
    heads = problem.heads if each_head else 1
    parts = product(range(heads), blocks(problem.queries, _RULE_BLOCK), blocks(problem.keys, _RULE_BLOCK))
    return any(visibility.tile(problem, 0, head, rows, cols) is not True for head, rows, cols in parts)
