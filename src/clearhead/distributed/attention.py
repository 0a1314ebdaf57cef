"""attention() over shards, and plan(), which says by which method: the one that moves the fewest bytes."""

from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from clearhead.core.rules import Rules
from clearhead.distributed.layout import Layout
from clearhead.distributed.nodes import Call, Leaves, answers, output_of
from clearhead.distributed.ranks import Ranks
from clearhead.distributed.schedule import bytes_received
from clearhead.distributed.sharded_problem import METHODS, Shards, read

Method = Literal["gather", "ring", "merge", "auto"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which method is taken, and why.

    method    the one asked for or chosen
    bytes     by method: what the busiest rank receives in a forward pass
    """

    method: str
    bytes: dict[str, int]

    def __str__(self) -> str:
        counts = [f"{name}: {count:,} bytes to the busiest rank" for name, count in self.bytes.items()]
        return "\n".join([f"method: {self.method}", *counts])


def choose(shards: Shards, method: str) -> Plan:
    """The method asked for, or for "auto" the one that moves the fewest bytes; of equals the first in METHODS.

    The same on every rank, without communication.
    """
    counted = {name: max(bytes_received(name, shards)) for name in METHODS if name != "auto"}
    return Plan(min(counted, key=lambda name: counted[name]) if method == "auto" else method, counted)


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
    num_threads: int | None = None,
    **rules: Unpack[Rules],
) -> Tensor:
    """`clearhead.attention` over a sequence that is sharded over the ranks of a process group; differentiable.

    q         this rank's shard, (…, heads, own queries, d_k); float64, float32, bfloat16 or float16, on CPU or GPU
    k, v      (…, kv_heads, own keys, d_k) and (…, kv_heads, own keys, d_v); shards may differ in length or be empty
    group     a process group of PyTorch's; None is the default group
    layout    which positions a rank holds. contiguous: the ranks' shards one after another; zigzag: rank r holds the
              r-th chunk and the r-th from the end, so that all ranks have equal work under a causal rule
    method    gather: each rank fetches all keys that its queries may attend to
              ring: keys and values travel around the ranks while blocks are computed; memory for two shards of keys
              merge: queries travel to the keys and partial outputs travel back, which suits decoding
              auto: the method that moves the fewest bytes, see `plan`
    timeout   seconds to wait for the other ranks before an error names those that did not call; None is 300
    engine    as in `clearhead.attention`, and so is num_threads, of this rank; ranks may differ in it
    rules     as in `clearhead.attention`, the same on all ranks. Positions count in the whole sequence; query_offset
              may be left out where the whole has as many queries as keys. query_segments and kv_segments are (batch,
              own positions), and so are the labels of spans, whose table is the same on all ranks; mask and bias
              broadcast to (…, heads, own queries, all keys)

    Returns (…, heads, own queries, d_v) in q's dtype, on q's device; a row with nothing to attend to is 0. The
    gradients of q, k and v are those of the sum of all ranks' losses; the gradients of sinks, bias and the table of
    spans are this rank's part. The backward pass is called by all ranks, too. Second derivatives and forward mode are
    there as on one machine; a tangent is that of own shards, and all ranks give tangents of the same arguments. By
    gather, keys are fetched with their tangents; by all other methods, both travel around a ring.

    Raises on every rank: what `clearhead.attention` raises on the rank whose argument is wrong, and DistributedError on
    the others; DistributedError on all where ranks were called differently, or one did not call or failed;
    DerivativeError for a third derivative, and under torch.vmap.
    O(own queries·visible keys·(d_k + d_v)) time for each rank, but for merge, which shares the work by keys.
    Memory for own shards and for what the method fetches, never for the weights.
    Source: ring attention (Liu et al. 2023); merge: pass-Q, Yang et al. 2024.

    >>> import torch, torch.distributed as dist, clearhead as ch  # alone here; torchrun sets up the group of many
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ch.distributed.attention(torch.zeros(2, 4), torch.zeros(2, 4), torch.eye(2), causal=True).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    >>> dist.destroy_process_group()
    """
    ranks, recording = Ranks.of(group, timeout), torch.is_grad_enabled()
    how: Any = {"layout": layout, "method": method, "engine": engine, "num_threads": num_threads}

    def run(leaves: Leaves) -> Call:
        values = leaves.v if isinstance(v, Tensor) else v
        shards = read(
            "attention", leaves.q, leaves.k, values, leaves.into(rules), ranks, output=True, recording=recording, **how
        )
        return output_of("attention", shards, choose(shards, method).method)

    return answers(["output"], run, Leaves.of(q, k, v, rules))["output"]


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
    num_threads: int | None = None,
    **rules: Unpack[Rules],
) -> Plan:
    """Which method `attention` takes for these shards, and the bytes that each method moves.

    Parameters as `attention`; v may be left out. All ranks must call it. Only sizes and rules are compared between
    ranks; no shard travels, and nothing is computed.

    Returns a Plan: its method, and the bytes that the busiest rank receives in a forward pass by each method. It prints
    as such a list. Raises what `attention` raises.

    >>> import torch, torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ch.distributed.plan(torch.zeros(2, 4), torch.zeros(2, 4), causal=True).method
    'gather'
    >>> dist.destroy_process_group()
    """
    ranks = Ranks.of(group, timeout)
    return choose(
        read("plan", q, k, v, rules, ranks, layout=layout, method=method, engine=engine, num_threads=num_threads),
        method,
    )
