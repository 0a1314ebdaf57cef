"""The portable engine: the definition over blocks of rows, in NumPy or, on any device, in PyTorch's operators.

A block has as many rows and heads as fit in a cache, and the keys that their positions reach; keys that the rules
forbid at its ends are cut off. Column statistics are added up over blocks. Memory is O(queries + keys) beyond inputs
and answers. NumPy sums in float64; tensors are summed over a row in the statistics' dtype, over blocks in float64 where
the device has it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from clearhead.core import definition
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.call import Call
from clearhead.core.definition import Matrix, Values
from clearhead.core.effects import Others, Terms, no_keys
from clearhead.core.namespace import astype, dtype_name, full, namespace, on_host, raw, wrapped
from clearhead.core.problem import Problem
from clearhead.core.rules import EVERYWHERE
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines.base import Kind, Upstream, kinds, row_kinds, unsupported
from clearhead.engines.portable_blocks import PlacedBlock, first, matrices

STATISTICS = frozenset((
    "output", "logsumexp", "max_logit", "entropy", "distance", "diagonal", "top", "received", "peak", "image", "groups",
    "by_key", "by_query", "strongest",
))  # fmt: skip
RULES = EVERYWHERE
GRADIENTS = frozenset(("q", "k", "v", "sinks", "bias", "span_table"))
_quiet = np.errstate(all="ignore")  # NaN and infinity are legal values, and need no warning


def reasons_not(problem: Problem) -> list[str]:
    """Reasons against this engine: a rule it does not support."""
    return unsupported("the portable engine", RULES, problem)


@_quiet
def rows(call: Call, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, of each block of rows with all its keys."""
    problem = call.problem
    nothing = {"largest": -np.inf, "max_logit": -np.inf, "top_indices": -1}
    each = row_kinds(problem, call.v, want, STATISTICS)
    result = {name: full(raw(call.q), shape, nothing.get(name, 0), dtype) for name, (shape, dtype) in each.items()}
    for part, a in matrices(call, v=call.v if "output" in each else None):
        found = definition.per_query(a, each)
        if "output" in each:
            found["output"] = definition.mix(a.weights, part.values("v"), a.hidden)
        if want.top is not None:
            found["top_weights"], places = definition.top(a, want.top)
            found["top_indices"] = part.among_all(places)
        for name, x in found.items():
            result[name][part.rows] = x
    return _answers(result, each, call.q)


@_quiet
def columns(call: Call, state: State | Terms, want: Wanted) -> dict[str, Array]:
    """The column statistics, or all requested statistics of effects, from weights recomputed with the rows' states.

    Top and strongest compare effects rounded to the dtype of `weights`; sums add unrounded effects.
    """
    usual = statistics_dtype(call.problem.dtype)
    each = kinds(call.problem, want, want.columns(), STATISTICS)
    result = {
        name: full(raw(call.q), shape, -1 if dtype == np.int64 else 0, dtype if dtype == np.int64 else None)
        for name, (shape, dtype) in each.items()
    }
    for part, a, tile in _tiles(call, state):
        for name in ("received", "by_key"):
            if name in result:
                result[name][part.cols] += tile.sum(axis=-2)
        if want.by_query:
            result["by_query"][part.rows] = tile.sum(axis=-1)
        if want.peak:
            peaks = result["peak"][part.cols]
            peaks[...] = namespace(peaks).maximum(peaks, astype(definition.peak(a), dtype_name(peaks)))
        if want.image is not None:
            part.add_image(result["image"], tile, want.image)
        if want.groups is not None:
            part.add_groups(result["groups"], tile, *want.groups[:2])
        if want.of == "effects":
            _add_lists(part, a, astype(astype(tile, usual), dtype_name(tile)), want, result)
    return _answers(result, each, call.q)


def _add_lists(part: PlacedBlock, a: Matrix, tile: Any, want: Wanted, result: dict[str, Any]) -> None:
    """Merge a block's strongest effects into `top` and `strongest`."""
    if want.top is not None:
        places = namespace(tile).where(a.hidden(), -1, part.keys_among_all(tile))
        chosen = first(tile, places, want.top)
        result["top_values"][part.rows], result["top_indices"][part.rows] = chosen
    if want.strongest is not None:
        part.add_strongest(result["strongest_values"], result["strongest_indices"], tile, a.hidden())


@_quiet
def weights(call: Call, state: State | Terms) -> Array:
    """Every weight of this (small) problem, exp((s - m) - l), or every effect."""
    problem = call.problem
    shape = problem.batch, problem.heads, problem.queries, problem.keys
    result = full(raw(call.q), shape, 0, statistics_dtype(problem.dtype))
    for part, _, tile in _tiles(call, state):
        result[part.place] = tile
    return wrapped(result, call.q)


@_quiet
def transposed(call: Call, state: State | Terms, g: Array) -> Array:
    """Aᵀ·g, or of effects Eᵀ·g, (batch, heads, keys, d), for g (batch, heads or 1, queries, d).

    Of weights, blocks of zero rows are skipped.
    """
    result = full(raw(call.q), (*call.q.shape[:2], call.problem.keys, g.shape[-1]), 0)
    for part, a, tile in _tiles(call, state, busy="by" if isinstance(state, State) else "", by=g):
        result[part.cols] += _turned_mix(a, tile, part.values("by"))
    return wrapped(astype(result, statistics_dtype(call.problem.dtype)), call.q)


@_quiet
def gradients(call: Call, state: State, upstream: Upstream) -> dict[str, Array]:
    """The gradients of q, k, v, the bias and the table of spans, in one pass over the recomputed weights."""
    problem = call.problem
    values = None if upstream.output is None else call.v
    shapes = {name: x.shape for name, x in (("q", call.q), ("k", call.k), ("v", values)) if x is not None}
    shapes |= {name: shape for name in ("bias", "spans") if (shape := getattr(upstream, name)) is not None}
    result = {name: full(raw(call.q), shape, 0) for name, shape in shapes.items()}
    for part, a in matrices(call, state, v=values, output=upstream.output):
        slopes = part.of_rows(upstream.rows)[..., None]
        if upstream.keys is not None:
            slopes = slopes + part.of_keys(upstream.keys)[..., None, :]
        if upstream.entropy is not None:
            slopes = slopes - part.of_rows(upstream.entropy)[..., None] * definition.log_weights(a.masked, a.state)
        if upstream.distance is not None:
            slopes = slopes + part.of_rows(upstream.distance)[..., None] * abs(a.block.ahead)
        if values is not None:
            slopes = slopes + definition.product(part.get("output"), part.get("v").swapaxes(-1, -2))
            part.add_to_keys(result["v"], _turned_mix(a, a.weights, part.values("output")))
        by_logits = definition.by_logits(a, slopes)
        if upstream.bias is not None:
            part.add_shared(result["bias"], by_logits)
        if upstream.spans is not None:
            assert problem.query_spans is not None
            assert problem.key_spans is not None
            part.add_groups(result["spans"], by_logits, problem.query_spans, problem.key_spans)
        by_scores = definition.by_scores(a.block, part.capped, by_logits)
        result["q"][part.rows] += definition.mix(by_scores, part.values("k"), a.hidden)
        part.add_to_keys(result["k"], _turned_mix(a, by_scores, part.values("q")))
    usual = statistics_dtype(problem.dtype)
    dtypes = {"bias": usual, "spans": usual}
    return {name: wrapped(astype(x, dtypes.get(name, problem.dtype)), call.q) for name, x in result.items()}


@_quiet
def others(call: Call, g: Array) -> Others:
    """Each row's strongest key and the softmax of its other keys, in NumPy arrays."""
    result = no_keys((*call.q.shape[:2], call.problem.queries))
    for part, a in matrices(call, v=call.v, g=g):
        found = definition.others_of(a.masked, part.along())
        for name, x in {**found, "strongest": part.among_all(found["strongest"])}.items():
            result[name][part.rows] = on_host(x)
    return result


@_quiet
def product(call: Call, terms: Terms, x: Array) -> Array:
    """E·x, (batch, heads, queries, d)."""
    result = full(raw(call.q), (*call.q.shape[:2], call.problem.queries, x.shape[-1]), 0)
    for part, a, tile in _tiles(call, terms, **{"x of keys": x}):
        result[part.rows] += definition.mix(tile, part.values("x of keys"), a.hidden)
    return wrapped(astype(result, statistics_dtype(call.problem.dtype)), call.q)


def _tiles(call: Call, known: State | Terms, **more: Any) -> Iterator[tuple[PlacedBlock, Matrix, Any]]:
    """Yield (block, matrix, weights or effects) of every block in which some query sees a key."""
    if isinstance(known, State):
        yield from ((part, a, a.weights) for part, a in matrices(call, known, **more))
        return
    for part, a in matrices(call, known.state, v=call.v, g=known.g, **more):
        if known.whole is None or known.others is None or known.strongest is None:
            yield part, a, definition.contributions(a, part.along())
        else:
            strongest = part.of_rows(known.strongest) - part.place.keys.start
            rows = part.of_rows(known.whole), part.of_rows(known.others), strongest
            yield part, a, definition.cut_effects(a, part.along(), *rows)


def _turned_mix(a: Matrix, x: Any, values: Values) -> Any:
    """xᵀ·values, (batch, heads, keys, d), for numbers x of the block's pairs and values of its rows."""
    return definition.mix(x.swapaxes(-1, -2), values, lambda: a.hidden().swapaxes(-1, -2))


def _answers(result: Mapping[str, Any], each: Mapping[str, Kind], like: Array) -> dict[str, Array]:
    """Convert sums to the dtypes of answers and to the kind of array that `like` is."""
    return {name: wrapped(astype(x, each[name][1]), like) for name, x in result.items()}
