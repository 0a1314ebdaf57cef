"""attention() over shards, with its derivative."""

from typing import Any, Unpack

from torch import Tensor

from clearhead.distributed import methods
from clearhead.distributed.choice import Method, Plan, choose
from clearhead.distributed.graph import Call, Leaves, answers
from clearhead.distributed.layouts import Layout
from clearhead.distributed.ranks import Ranks
from clearhead.distributed.shards import read
from clearhead.problem import Rules


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    layout: Layout = "contiguous",
    method: Method = "auto",
    timeout: float | None = None,
    engine: str | None = None,
    **rules: Unpack[Rules],
) -> Tensor:
    """`clearhead.attention` over sequences that lie in shards on the ranks of a process group; differentiable.

    q, k, v   this rank's shards, (…, heads, own positions, d); shards may differ in length, also be empty
    layout    contiguous: rank after rank; zigzag: two chunks each, so that a causal rule gives all equal work
    method    gather: fetch the keys that own queries may see; ring: keys go around meanwhile, O(shard) memory;
              ulysses: heads change places with positions; merge: queries go to the keys, and partial answers come
              back, for decoding; auto: the one that moves the fewest bytes, see `plan`
    timeout   seconds after which a rank that does not call is given up and named; 300 when left out
    rules     as in `attention`, positions counted in the whole sequence; query_offset is 0 where queries = keys in all

    Returns (…, heads, own queries, d_v). Gradients by q, k and v are of the sum of all ranks' losses; those by sinks
    and bias are this rank's part. Raises on every rank: DistributedError when ranks were called differently or one is
    gone, and what `attention` raises.

    >>> import torch, torch.distributed as dist, clearhead as ch  # alone here; torchrun sets up the group of many
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ch.distributed.attention(torch.zeros(2, 4), torch.zeros(2, 4), torch.eye(2), causal=True).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    >>> dist.destroy_process_group()
    """
    leaves = Leaves.of(q, k, v, rules)
    ranks = Ranks.of(group, timeout)
    shards = read("attention", q, k, v, rules, ranks, layout=layout, method=method, engine=engine)
    how = choose(shards, method).method
    with ranks.together("attention"):
        found, logsumexp = methods.output(how, shards)
    return answers(Call("attention", shards, how, found, logsumexp), leaves)["output"]


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    group: Any = None,
    layout: Layout = "contiguous",
    method: Method = "auto",
    timeout: float | None = None,
    engine: str | None = None,
    **rules: Unpack[Rules],
) -> Plan:
    """Which method `attention` takes for these shards, the bytes of each, and why others can't; all ranks call it."""
    ranks = Ranks.of(group, timeout)
    return choose(read("plan", q, k, v, rules, ranks, layout=layout, method=method, engine=engine), method)
