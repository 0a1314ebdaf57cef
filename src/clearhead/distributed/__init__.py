"""Attention over a sequence that lies in pieces on many ranks of a PyTorch process group, with its sight.

Every rank calls the same function with its own shards of q, k and v, (…, heads, its positions, d), and gets its own
queries' answers. Positions are those of the whole sequence, so causal, windows, lengths and segments mean what they do
on one machine. Rules are the same on all ranks, but for what belongs to positions: query_segments and kv_segments
(batch, own positions), mask and bias (…, own queries, all keys).

The same call gives the same bits every time. Outputs by gather and ulysses have the bits of one process, so those of
any number of ranks, where the fetched keys begin with the first (with a window they may not); by ring and merge, and
in gradients and column statistics, sums follow the order of the ranks, and their last bits the number of ranks.

Shards lie in the CPU's memory between computing and travelling. Tensors on a GPU are computed there, by the Triton
engine, and answers go back there. Messages lie where the group's backend wants them: gloo's on the CPU, NCCL's on the
current GPU, which has not been run.

    attention, plan            the output, differentiable; which method and why
    ShardedAttentionMatrix     every observation
    shard, unshard, positions  cutting a sequence, and putting it together
"""

from clearhead.errors import MissingExtraError

try:
    import torch as torch
except ImportError as error:
    raise MissingExtraError(
        f"clearhead.distributed needs PyTorch: {error}.", "pip install 'clearhead[torch]'"
    ) from None
from clearhead.distributed.call import attention as attention
from clearhead.distributed.call import plan as plan
from clearhead.distributed.matrix import ShardedAttentionMatrix as ShardedAttentionMatrix
from clearhead.distributed.sharding import positions as positions
from clearhead.distributed.sharding import shard as shard
from clearhead.distributed.sharding import unshard as unshard
