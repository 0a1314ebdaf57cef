"""The questions that every method answers, each for this rank's own queries and keys."""

from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.arrays import statistics_dtype
from clearhead.axes import Array
from clearhead.distributed import gather, merge, ring
from clearhead.distributed.perkeys import PerKey
from clearhead.distributed.shards import Shards
from clearhead.distributed.ulysses import ByHeads
from clearhead.observations import Wanted

BY_ROWS: dict[str, Any] = {"gather": gather, "ring": ring, "merge": merge}  # each rank has its queries, with all heads


def rows(method: str, shards: Shards, want: Wanted) -> dict[str, Array]:
    """The output and row statistics; `top` by position in the whole sequence."""
    if method in BY_ROWS:
        found: dict[str, Array] = BY_ROWS[method].attend(shards, want)
        return found
    by_heads = ByHeads.of(shards)
    return {name: by_heads.to_rows(x, shards.query_pieces) for name, x in by_heads.attend(want).items()}


def output(method: str, shards: Shards) -> tuple[dict[str, Array], Array | None]:
    """The output alone, and the log-sum-exp for its derivatives where the method does not keep it itself."""
    found = rows(method, shards, Wanted(output=True, logsumexp=method in BY_ROWS))
    logsumexp = found.pop("logsumexp", None)
    return found, logsumexp


def columns(method: str, shards: Shards, ask: PerKey) -> list[Array]:
    """Sums over all queries, in float64, in the order of ask.names."""
    if method in BY_ROWS:
        found: list[Array] = BY_ROWS[method].columns(shards, ask)
        return found
    return ByHeads.of(shards).columns(ask)


def gradients(
    method: str, shards: Shards, answers: dict[str, Array], by: dict[str, Array], *, bias: bool
) -> dict[str, Array]:
    """The loss's derivatives by q, k, v, sinks and, where asked, bias, from those by answers, as backward.gradients."""
    if method in BY_ROWS:
        found: dict[str, Array] = BY_ROWS[method].differentiate(shards, answers, by, bias=bias)
        return found
    return ByHeads.of(shards).differentiate(answers, by, bias=bias)


def mixed(method: str, shards: Shards, values: Array) -> tuple[Array, Array]:
    """A·values for own values (batch, 1 or heads, own keys, columns), in float64; and the log-sum-exp it came with."""
    found = rows(method, widened(shards, values), Wanted(output=True, logsumexp=True))
    return found["output"].astype(np.float64), found["logsumexp"]


def widened(shards: Shards, values: Array) -> Shards:
    """The same in the statistics' dtype, with other values."""
    dtype = statistics_dtype(shards.whole.dtype)
    q, k, v = (x.astype(dtype, copy=False) for x in (shards.q, shards.k, values))
    return replace(shards, whole=replace(shards.whole, dtype=dtype), q=q, k=k, v=v)
