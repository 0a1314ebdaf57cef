"""What every method computes for this rank's queries and keys: the output, statistics, products and gradients."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.statistics import PER_KEY, STATISTICS, Wanted, listed, separate_arrays
from clearhead.distributed.schedule import Meeting, Parts, Question, meet
from clearhead.distributed.sharded_problem import Names, Shards
from clearhead.engines.base import row_kinds
from clearhead.ops import backward
from clearhead.ops.observation import Observation, observation

_EMPTY = {"logsumexp": -np.inf, "max_logit": -np.inf, "top_indices": -1}  # of a row that sees no key; others are 0


def rows(method: str, shards: Shards, want: Wanted) -> dict[str, Array]:
    """The output (batch, heads, own queries, d_v) and row statistics, by name; `top` counts in the whole sequence.

    By gather a row meets all of its keys at once, so that its bits are those of one process if they begin with the
    first key. Otherwise its parts are merged by their log-sum-exp, without sinks and unrounded until all are there.
    """
    want = want.only(want.rows())
    at_once, sinks = method == "gather", shards.whole.sinks
    part = want if at_once else replace(want, logsumexp=True, keep_float32=True)
    kinds = row_kinds(shards.whole, shards.v, part, shards.engine.STATISTICS)

    def find(one: Meeting, _: Any) -> Parts:
        problem = one.problem if at_once else replace(one.problem, sinks=None)
        answers = dict(shards.engine.rows(one.inputs._replace(problem=problem), part))
        if "top_indices" in answers:
            indices = answers["top_indices"]
            answers["top_indices"] = np.where(indices < 0, -1, indices + problem.cols.start)
        return [answers[name] for name in kinds], []

    def seen(arrays: list[Array]) -> Observation:  # keys=0: indices count in the whole sequence already
        return observation(dict(zip(kinds, arrays, strict=True)), arrays[0].shape[2], 0, sinks=False)

    def merged(a: list[Array], b: list[Array]) -> list[Array]:
        both = separate_arrays(seen(a).merge_keys(seen(b)))
        return [both[name] for name in kinds]

    def nothing(length: int) -> list[Array]:
        return [
            np.full((*shape[:2], length, *shape[3:]), _EMPTY.get(name, 0), dtype)
            for name, (shape, dtype) in kinds.items()
        ]

    question = Question(find, per_query=nothing, merged=(lambda _, b: b) if at_once else merged)
    answers = meet(method, shards, question)[0]
    if sinks is not None and not at_once:
        whole = separate_arrays(seen(answers).with_sinks(sinks))
        answers = [whole[name] for name in kinds]
    wanted = row_kinds(shards.whole, shards.v, want, shards.engine.STATISTICS)
    named = zip(kinds, answers, strict=True)
    return {name: x.astype(wanted[name][1], copy=False) for name, x in named if name in wanted}


def columns(method: str, shards: Shards, logsumexp: Array, want: Wanted) -> dict[str, Array]:
    """The statistics per own key over all queries, by name, (batch, heads, own keys) in float64."""
    names = [name for name in listed(axes=PER_KEY) if name in want.names()]
    over: Any = {"larger": np.maximum, "added": np.add}
    merges = [over[STATISTICS[name].over_queries] for name in names]

    def find(one: Meeting, rows: Any) -> Parts:
        part = shards.engine.columns(one.inputs, rows[0], want.only(names))
        return [], [part[name] for name in names]

    question = Question(
        find,
        [logsumexp],
        per_key=lambda length: [shards.zeros(length) for _ in names],
        over=lambda a, b: [how(x, y) for how, x, y in zip(merges, a, b, strict=True)],
    )
    return dict(zip(names, meet(method, replace(shards, v=None), question)[1], strict=True))


def transposed(method: str, shards: Shards, logsumexp: Array, g: Array) -> Array:
    """Aᵀ·g in float64, (batch, heads, own keys, d), from the log-sum-exp and g, (batch, heads or 1, own queries, d)."""

    def find(one: Meeting, rows: Any) -> Parts:
        return [], [shards.engine.transposed(one.inputs, *rows)]

    g = np.broadcast_to(g, (*logsumexp.shape[:2], *g.shape[2:]))
    question = Question(find, [logsumexp, g], per_key=lambda length: [shards.zeros(length, g.shape[3])])
    return meet(method, replace(shards, v=None), question)[1][0]


def gradients(
    method: str, shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, asked: Names
) -> dict[str, Array]:
    """The gradients of own q, k, v, sinks and, where asked, bias and spans, by name, in the statistics' dtype.

    answers    what attention answered for own queries, (batch, heads, own queries, …), by name
    by         the upstream gradient: the derivatives by those answers, of the same shapes

    Those of sinks and spans are this rank's part. That of the bias stays with its rows, so that by merge keys travel.
    """

    def compute(one: Meeting, here: Any) -> Mapping[str, Array]:
        each = iter(here)
        sides = [{name: next(each) for name in side} for side in (answers, by)]
        shapes = shards.shapes(one.problem, asked)
        return backward.gradients(shards.engine, one.inputs, *sides, **shapes, keep_float32=True)

    def ask(question: Question) -> Parts:
        return meet("ring" if method == "merge" and "bias" in asked else method, shards, question)

    result = added_up(ask, shards, compute, [*answers.values(), *by.values()], asked, shards.dtype)
    return {**result, **_of_sinks(shards, answers, by)}


def added_up(
    ask: Callable[[Question], Parts],
    shards: Shards,
    compute: Callable[[Meeting, Any], Mapping[str, Array]],
    rows: list[Array],
    asked: Names,
    dtype: np.dtype[Any],
) -> dict[str, Array]:
    """The gradients of own q, k, v and, where asked, bias and spans, which `compute` gives for each meeting, added up.

    rows    what it needs of own queries, of which it gets those at the meeting
    """
    arrays = {name: x for name, x in (("k", shards.k), ("v", shards.v)) if x is not None}
    shapes = shards.shapes(replace(shards.whole, rows=range(shards.lengths[0])), asked)
    whole = {name: np.zeros(shape, np.float64 if name == "spans" else shards.dtype) for name, shape in shapes.items()}

    def find(one: Meeting, here: Any) -> Parts:
        part, cols = compute(one, here), one.problem.cols
        if "bias" in whole:
            whole["bias"][:, :, one.rows, cols.start : cols.stop] = part["bias"]
        if "spans" in whole:
            whole["spans"] += part["spans"]
        return [part["q"]], [part[name] for name in arrays]

    def zeros(like: Array, length: int) -> Array:
        return np.zeros((*like.shape[:2], length, like.shape[3]), dtype)

    question = Question(
        find,
        rows,
        per_query=lambda length: [zeros(shards.q, length)],
        per_key=lambda length: [zeros(x, length) for x in arrays.values()],
    )
    (by_q,), by_keys = ask(question)
    return {"q": by_q, **dict(zip(arrays, by_keys, strict=True)), **whole}


def _of_sinks(shards: Shards, answers: dict[str, Array], by: dict[str, Array]) -> dict[str, Array]:
    """The gradient of the sinks, (heads,): it depends on each row's final answers only, and on no key."""
    if shards.whole.sinks is None:
        return {}
    wide = [{name: x.astype(shards.dtype, copy=False) for name, x in side.items()} for side in (answers, by)]
    return {"sinks": backward.sink_gradients(replace(shards.whole, dtype=shards.dtype), *wide)}


def mixed(method: str, shards: Shards, values: Array) -> tuple[Array, Array]:
    """A·values in float64 for own values (batch, 1 or heads, own keys, columns), and the log-sum-exp of own queries."""
    seen = rows(method, widened(shards, values), Wanted(output=True, logsumexp=True))
    return seen["output"].astype(np.float64), seen["logsumexp"]


def widened(shards: Shards, values: Array) -> Shards:
    """The same shards in the statistics' dtype, with other values."""
    q, k, v = (x.astype(shards.dtype, copy=False) for x in (shards.q, shards.k, values))
    return replace(shards, whole=replace(shards.whole, dtype=shards.dtype), q=q, k=k, v=v)
