"""Makes the long view: every head as a small picture; chosen heads also with q, k and log-sum-exp, so every weight.

Each pixel of a picture covers whole weights and holds the largest of them. The first key is stored as a separate
column, since an attention sink there would outshine all other weights.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import isfinite, prod
from typing import Any, Literal

import numpy as np

from clearhead.core import visibility
from clearhead.core.arrays import FLOATS, as_host_array, on_cpu, to_device_of, unrepeated
from clearhead.core.axes import WEIGHTS, Array, blocks, named
from clearhead.core.call import Call
from clearhead.core.problem import Problem
from clearhead.core.rules import EVERYWHERE, FIELDS, check_supported, take
from clearhead.digits import rounded
from clearhead.errors import RuleError, SelectionError, expected
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.observation import Observation
from clearhead.version import __version__
from clearhead.view.captions import captions
from clearhead.view.container import Document
from clearhead.view.head_summary import even_heads, first_key, summarise_heads
from clearhead.view.images import coded, pictures, reach
from clearhead.words import Language, read_language

OPENING = {"kind": "attention", "maker": f"clearhead {__version__}"}
ROOM = 55 * 10**5  # characters for a page's arrays, so that the page has at most 6 MB
_ONE = 60 * 10**6  # characters for a single head of a long text: browsers are slow to open more
COMPUTED = 1024  # up to so many queries and keys the page computes the whole matrix and needs no pictures
_SMALL, _LARGE = (128, 96, 64, 48, 32), (1024, 512, 256)  # sides of the pictures of all heads, and of exact heads
_SMALL_CELLS, _LARGE_CELLS = 3 * 2**20, 2**20  # the most pixels of all pictures together
_PIXEL = 0.6  # characters per pixel, compressed, in base 85
_NUMBER = {8: 8.8, 4: 4.2, 2: 1.9}  # characters per number of so many bytes
NARROW = next(known for known in FLOATS if known.name == "bfloat16")
_RULE_BLOCK = 1024  # queries and keys that are searched at a time for forbidden pairs
RULES = EVERYWHERE  # the rules that page/src/attention.js supports


@dataclass(frozen=True, eq=False, slots=True)
class ShownLayer:
    """One layer to show."""

    name: str
    heads: Sequence[int]  # their numbers in the model
    matrix: AttentionMatrix  # (1, heads, queries, keys)
    padding: Array | None = None  # (1, queries)
    cross: bool = False
    note: str = ""
    v: Array | None = None  # (1, kv_heads, keys, d_v); None: unknown, so the page's arithmetic ends at the weight
    g: Array | None = None  # (1, heads, queries, d_v), derivatives by A·v: what each head did
    text: Literal["tokens", "sources", ""] = "tokens"  # the run's names for its queries, and keys unless cross


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
    header: Mapping[str, Any] = field(default_factory=dict)  # the page's `facts` and `words`, if it is the only run


def document(
    runs: Sequence[ShownRun],
    title: str = "clearhead",
    language: Language = "en",
    *,
    served: bool = False,
    room: float = ROOM,
    each: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Document:
    """Make the document of a page of these runs, with the numbers of all heads or of as many as fit.

    served    True: store no numbers; the page requests weights from its server
    room      characters for the arrays
    each      wraps the loop over the layers, for a progress bar
    Raises, before any work, SelectionError for runs without weights, RuleError for a title that is no string or an
    unknown language. O(queries·keys·d_k) time for every head.
    """
    read_language(language)
    if not isinstance(title, str):
        raise RuleError(expected("title", title, "a text"))
    layers = [layer for run in runs for layer in run.layers]
    if not layers:
        raise SelectionError("no attention was recorded: there is nothing to show.", "run the model inside ch.watch.")
    for layer in layers:
        if 0 in layer.matrix.shape:
            sizes = named(layer.matrix.shape, WEIGHTS)
            raise SelectionError(f"layer {layer.name} has no weights: its matrix is {sizes}.")
    exact, narrow = ([list(range(len(layer.heads))) for layer in layers], False) if served else _exact(layers, room)
    entries, arrays = _described(layers, exact, each, narrow=narrow, served=served)
    header = {"title": title, "language": language, "served": served, "runs": _runs(runs, entries)}
    return Document({**OPENING, **header, **(runs[0].header if len(runs) == 1 else {})}, arrays)


def described(
    runs: Sequence[ShownRun], kept: Collection[int] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """Make the entry `runs` of a header, and its arrays. O(queries·keys·d_k) time for every head.

    kept      the layers of each run whose numbers are stored, in bfloat16; None: all layers, as they are
    """
    places = [(number, layer) for run in runs for number, layer in enumerate(run.layers)]
    exact = [list(range(len(layer.heads) if kept is None or number in kept else 0)) for number, layer in places]
    entries, arrays = _described([layer for _, layer in places], exact, narrow=kept is not None, prefix="runs.")
    return _runs(runs, entries), arrays


def fitting(parts: Sequence[tuple[float, float]], room: float = ROOM, pixels: int = 0) -> tuple[int, bool]:
    """Return how many of a page's parts, from the first, are stored with numbers, and whether as bfloat16.

    parts     the characters of each part as it is, and in bfloat16
    pixels    the pixels of the pictures that the page also has unless all numbers fit
    All parts as they are, if they fit; else as many in bfloat16 as fit, at least one. A part that browsers would be
    slow to open is left out.

    >>> fitting([(4e6, 2e6), (1e6, 5e5)]), fitting([(4e6, 2e6)] * 9), fitting([(2e7, 1e7)] * 9), fitting([(3e8, 1e8)])
    ((2, False), (2, True), (1, True), (0, True))
    """
    whole, narrow = (np.cumsum(sizes) for sizes in zip(*parts, strict=True))
    if whole[-1] <= room:
        return len(parts), False
    if narrow[-1] > room:
        room -= _PIXEL * pixels
    return int((narrow <= max(room, min(narrow[0], _ONE))).sum()), True


def characters(count: float, itemsize: int) -> tuple[float, float]:
    """Estimate how many characters numbers of so many bytes take in a page, as they are and in bfloat16."""
    return count * _NUMBER[itemsize], count * _NUMBER[2]


def _exact(layers: Sequence[ShownLayer], room: float) -> tuple[list[list[int]], bool]:
    """Return for each layer the indices of the heads whose numbers fit, and whether they are rounded."""
    sizes: list[tuple[float, float]] = []
    pixels, side = 0, _side(sum(len(layer.heads) for layer in layers))
    for layer in layers:
        problem, numbers = layer.matrix.call.problem, (layer.matrix.call.k, layer.v)
        of_keys = sum(0 if x is None else prod(x.shape[2:]) for x in numbers)
        of_queries = problem.queries * problem.d_k
        computed = problem.queries * problem.keys <= COMPUTED**2
        pixels += 0 if computed else problem.heads * side**2
        rules, known = sum(array.nbytes for array in packed(problem)[1].values()) / 4, set[int]()
        for head in range(problem.heads):
            keys = 0 if (place := problem.kv_head_of(head)) in known else of_keys
            known.add(place)
            as_it_is, narrow = characters(of_queries + keys, problem.dtype.itemsize)
            more = (0 if computed else 4.2 * problem.queries) + (0 if head else rules)
            sizes.append((as_it_is + more, narrow + more))
    count, rounded = fitting(sizes, room - _PIXEL * pixels, len(sizes) * side**2 - pixels)
    places = [(number, head) for number, layer in enumerate(layers) for head in range(len(layer.heads))][:count]
    return [[head for at, head in places if at == number] for number in range(len(layers))], rounded


def pixels_of(heads: int) -> int:
    """Return how many pixels the pictures of so many heads have at most."""
    return heads * _side(heads) ** 2


def _side(heads: int) -> int:
    """Choose the side of the pictures of so many heads."""
    return next((side for side in _SMALL if heads * side**2 <= _SMALL_CELLS), _SMALL[-1])


def _described(
    layers: Sequence[ShownLayer],
    exact: Sequence[list[int]],
    each: Callable[[Sequence[int]], Iterable[int]] = iter,
    *,
    narrow: bool,
    served: bool = False,
    prefix: str = "",
) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """Make each layer's entry, and all arrays."""
    count, heads = max(1, sum(map(len, exact))), sum(len(layer.heads) for layer in layers)
    large = next((side for side in _LARGE if count * side**2 <= _LARGE_CELLS), 0)
    entries, arrays = [], dict[str, Array]()
    for place in each(range(len(layers))):
        numbers = {} if served or not exact[place] else _operands(layers[place], exact[place], narrow=narrow)
        entry, more = _layer(layers[place], exact[place], numbers, (_side(heads), large), served=served)
        names = {name: f"{prefix}{place}.{name}" for name in more}
        arrays |= {names[name]: array for name, array in more.items()}
        entries.append({**entry, "arrays": names})
    return entries, arrays


def _runs(runs: Sequence[ShownRun], entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    layers = iter(entries)
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


def _layer(
    layer: ShownLayer, exact: list[int], numbers: dict[str, Array], sides: tuple[int, int], *, served: bool
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Make the entry of one layer, and its arrays.

    numbers   the arrays of the exact heads
    sides     the sides of the pictures of all heads, and of exact heads
    """
    matrix, problem = layer.matrix, layer.matrix.call.problem
    large = problem.queries * problem.keys > COMPUTED**2
    v = None if layer.g is None else layer.v
    seen = matrix.observe(v, entropy=True, distance=True, logsumexp=True, top=1)
    first = first_key(matrix, 0)
    entry: dict[str, Any] = {"pixels": None, "largest": None, "wide": None, "key_of": []}
    arrays = dict(numbers)
    plain, rule_arrays = packed(problem, exact)
    if large or len(exact) < problem.heads or served:
        small = pictures(matrix, sides[0])
        entry |= _put(arrays, small, "")
    if numbers:
        keys = sorted({problem.kv_head_of(head) for head in exact})
        entry["key_of"] = [keys.index(problem.kv_head_of(head)) for head in exact]
        arrays |= rule_arrays
        if large and sides[1]:
            parts = [pictures(matrix.part(0, head), sides[1]) for head in exact]
            drawn = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            entry["wide"] = _put(arrays, drawn, "wide_")
    return {
        **entry,
        **_numbers(layer, seen),
        "name": layer.name,
        "heads": list(layer.heads),
        "cross": layer.cross,
        "text": layer.text,
        "note": layer.note,
        **{name: getattr(problem, name) for name in ("queries", "keys", "d_k")},
        "dtype": problem.dtype.name,
        "values": None if layer.v is None else layer.v.dtype.name,
        "first": first,
        "masked": forbids(problem),
        "sinks": problem.sinks is not None,
        "rules": plain,
        "exact": exact,
    }, arrays


def _numbers(layer: ShownLayer, seen: Observation) -> dict[str, Any]:
    """Return the statistics of a layer's heads, their captions, and where their colour scales end."""
    means = summarise_heads(layer.matrix, seen, layer.padding, cross=layer.cross)
    each = captions(means, even_heads(layer.matrix, layer.padding, cross=layer.cross))
    numbers = dict(means)
    if layer.g is not None and seen.output is not None:  # each head's contributions, summed
        numbers["effect"] = (
            (np.float64(on_cpu(layer.g)) * as_host_array(seen.output, "output")[0]).sum((0, 2, 3)).tolist()
        )
    assert seen.top is not None
    strongest = as_host_array(seen.top[0], "weights")[0][0][..., 0]
    return {
        "reach": rounded(map(reach, strongest), 6),  # where colour scales end
        "statistics": {n: [rounded(x, 4) if isfinite(x) else None for x in each] for n, each in numbers.items()},
        "captions": [caption and caption.said for caption in each],
        "kinds": [caption and caption.kind for caption in each],
    }


def _put(arrays: dict[str, Array], drawn: Mapping[str, Array], prefix: str) -> dict[str, Any]:
    """Add the encoded pictures to `arrays`; return their size, and each head's weight at the highest code."""
    codes, first, largest = coded(drawn["most"], drawn["first_most"])
    arrays |= {f"{prefix}most": codes, f"{prefix}first_most": first}
    return {"pixels": list(codes.shape[1:]), "largest": largest}


def _operands(layer: ShownLayer, exact: list[int], *, narrow: bool) -> dict[str, Array]:
    """Return q, k, v and log-sum-exp of the exact heads; if q and k are rounded, the log-sum-exp is theirs."""
    call = layer.matrix.call
    problem = call.problem
    q, k = (_stored(on_cpu(x), narrow=narrow) for x in (call.q, call.k))
    keys = sorted({problem.kv_head_of(head) for head in exact})
    arrays = {"q": q[0, exact], "k": k[0, keys]}
    if problem.queries * problem.keys > COMPUTED**2:
        near, far = (to_device_of(x.astype(call.q.dtype), call.q) for x in (q, k))
        state = (layer.matrix.with_call(Call(problem, near, far)) if narrow else layer.matrix).state
        arrays["logsumexp"] = on_cpu(state.logsumexp)[0, exact]
    if layer.v is not None:
        arrays["v"] = _stored(on_cpu(layer.v)[0, keys], narrow=narrow)
    return arrays


def _stored(x: Array, *, narrow: bool) -> Array:
    """Return the array as it is, or in bfloat16, which cannot hold float64's largest numbers."""
    if not narrow or x.itemsize <= 2:
        return x
    with np.errstate(over="ignore"):
        rounded = x.astype(NARROW)
    return rounded if np.array_equal(np.isfinite(rounded), np.isfinite(x)) else x


def packed(problem: Problem, heads: list[int] | None = None) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return (rules as plain numbers, rules as arrays), for some heads or all.

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
    """Do the rules mask any weight of the first batch item? O(queries·keys) to read mask, bias and spans."""
    rules = (unrepeated(x) for x in (problem.mask, problem.bias, problem.span_table) if x is not None)
    each_head = any(rule.shape[1] > 1 for rule in rules)
    heads = problem.heads if each_head else 1
    parts = product(range(heads), blocks(problem.queries, _RULE_BLOCK), blocks(problem.keys, _RULE_BLOCK))
    return any(visibility.tile(problem, 0, head, rows, cols) is not True for head, rows, cols in parts)
