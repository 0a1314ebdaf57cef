"""What every method computes, for this rank's own queries and keys; each function dispatches on the method's name."""

from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.statistics import Wanted
from clearhead.distributed import gather, merge, ring
from clearhead.distributed.column_sums import ColumnSums
from clearhead.distributed.edges import EdgeQuestion
from clearhead.distributed.shards import Names, Shards
from clearhead.distributed.ulysses import ByHeads

BY_ROWS: dict[str, Any] = {"gather": gather, "ring": ring, "merge": merge}  # each rank computes its queries, all heads


def rows(method: str, shards: Shards, want: Wanted) -> dict[str, Array]:
    """The output (batch, heads, own queries, d_v) and row statistics, by name; `top` counts in the whole sequence."""
    if method in BY_ROWS:
        found: dict[str, Array] = BY_ROWS[method].attend(shards, want)
        return found
    by_heads = ByHeads.of(shards)
    return {name: by_heads.to_rows(x, shards.query_pieces) for name, x in by_heads.attend(want).items()}


def output(method: str, shards: Shards) -> tuple[dict[str, Array], Array | None]:
    """The output, and the log-sum-exp that the backward pass needs; None by ulysses, which keeps it itself."""
    found = rows(method, shards, Wanted(output=True, logsumexp=method in BY_ROWS))
    logsumexp = found.pop("logsumexp", None)
    return found, logsumexp


def columns(method: str, shards: Shards, ask: ColumnSums) -> list[Array]:
    """Answers about own keys over all queries, (batch, heads, own keys, …) in float64, in the order of ask.names."""
    if method in BY_ROWS:
        found: list[Array] = BY_ROWS[method].columns(shards, ask)
        return found
    return ByHeads.of(shards).columns(ask)


def meet(method: str, shards: Shards, ask: EdgeQuestion) -> tuple[list[Array], list[Array]]:
    """Answers per own query and per own key: by merge queries travel to the keys; by all others, keys around a ring."""
    return merge.meet(shards, ask) if method == "merge" else ring.meet(shards, ask)


def meet_at_queries(method: str, shards: Shards, ask: EdgeQuestion) -> tuple[list[Array], list[Array]]:
    """As `meet`, where queries stay on their rank: by gather keys are fetched, by all others they go around a ring."""
    return gather.meet(shards, ask) if method == "gather" else ring.meet(shards, ask)


def gradients(
    method: str, shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, asked: Names
) -> dict[str, Array]:
    """The gradients of own q, k, v, sinks and, where asked, bias, by name, in the statistics' dtype.

    answers    what attention answered for own queries, (batch, heads, own queries, …), by name
    by         the upstream gradient: the derivatives by those answers, of the same shapes
    """
    if method in BY_ROWS:
        found: dict[str, Array] = BY_ROWS[method].differentiate(shards, answers, by, asked=asked)
        return found
    return ByHeads.of(shards).differentiate(answers, by, asked=asked)


def mixed(method: str, shards: Shards, values: Array) -> tuple[Array, Array]:
    """A·values in float64 for own values (batch, 1 or heads, own keys, columns), and the log-sum-exp of own queries."""
    found = rows(method, widened(shards, values), Wanted(output=True, logsumexp=True))
    return found["output"].astype(np.float64), found["logsumexp"]


def widened(shards: Shards, values: Array) -> Shards:
    """The same shards in the statistics' dtype, with other values."""
    dtype = statistics_dtype(shards.whole.dtype)
    q, k, v = (x.astype(dtype, copy=False) for x in (shards.q, shards.k, values))
    return replace(shards, whole=replace(shards.whole, dtype=dtype), q=q, k=k, v=v)
