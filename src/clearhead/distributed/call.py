"""attention() over shards, with its derivative."""

from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from clearhead.arrays import adopt, on_cpu
from clearhead.axes import Array
from clearhead.distributed.choice import BY_ROWS, Method, Plan, choose
from clearhead.distributed.layouts import Layout
from clearhead.distributed.ranks import Ranks
from clearhead.distributed.shards import Shards, read
from clearhead.distributed.ulysses import ByHeads
from clearhead.observations import Wanted
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
    tensors = {name: x for name, x in rules.items() if isinstance(x, Tensor) and name in ("bias", "sinks")}
    ranks = Ranks.of(group, timeout)
    shards = read("attention", q, k, v, rules, ranks, layout=layout, method=method, engine=engine)
    how = choose(shards, method).method
    output: Tensor = _Attend.apply(q, k, v, tensors.get("bias"), tensors.get("sinks"), shards, how)  # type: ignore[no-untyped-call]
    return output


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


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any, shards: Shards, how: str) -> Tensor:
        want = Wanted(output=True, logsumexp=True)
        ctx.shards, ctx.how, ctx.like = shards, how, (q, k, v, bias, sinks)
        with shards.ranks.together("attention"):
            if how == "ulysses":
                ctx.by_heads = ByHeads(shards)
                ctx.answers = ctx.by_heads.attend(want)
                output = ctx.by_heads.to_rows(ctx.answers["output"], shards.query_pieces)
            else:
                ctx.answers = BY_ROWS[how].attend(shards, want)
                output = ctx.answers["output"]
        return shards.give(restored(shards, output))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        shards: Shards = ctx.shards
        shards.ranks.agree("attention, backward", {})
        given = on_cpu(adopt(grads[0].detach(), "gradient")[0])
        by = {"output": given.reshape(shards.q.shape[:3] + given.shape[-1:])}
        bias = bool(ctx.needs_input_grad[3])
        with shards.ranks.together("attention, backward"):
            if ctx.how == "ulysses":
                by["output"] = ctx.by_heads.to_heads(by["output"], shards.query_pieces)
                found = ctx.by_heads.differentiate(ctx.answers, by, bias=bias)
            else:
                found = BY_ROWS[ctx.how].differentiate(shards, ctx.answers, by, bias=bias)
        result: list[Tensor | None] = []
        for name, x, needed in zip(("q", "k", "v", "bias", "sinks"), ctx.like, ctx.needs_input_grad, strict=False):
            result.append(_shaped(shards, found[name], x, name) if needed else None)
        return (*result, None, None)


def _shaped(shards: Shards, found: Array, like: Tensor, name: str) -> Tensor:
    tensor = torch.as_tensor(np.ascontiguousarray(found)).to(like.device, like.dtype)
    if name == "bias":
        batch = shards.prefix[:-1] if found.shape[0] > 1 else (1,) * (len(shards.prefix) - 1)
        return tensor.reshape(*batch, *found.shape[1:]).sum_to_size(like.shape)
    return tensor.reshape(like.shape)


def restored(shards: Shards, array: Array) -> Array:
    """(batch, heads, …) with the caller's own leading axes."""
    return array.reshape(shards.prefix + array.shape[2:])
