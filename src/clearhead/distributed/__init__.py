"""Attention, and the statistics of its weights, over a sequence that is sharded over the ranks of a process group.

Every rank calls the same function with its own shards of q, k and v, (…, heads, own positions, d), and gets the answers
for its own queries. Positions count in the whole sequence, so causal, windows, lengths and segments mean the same as on
one machine. All ranks pass the same rules, except for values that belong to positions: query_segments and kv_segments
are (batch, own positions), mask and bias (…, own queries, all keys).

The same call gives the same bits every time. Outputs by gather have the bits of one process, whatever the number of
ranks, if the fetched keys begin with the first key (with a window they may not). Outputs by ring and merge, gradients
and column statistics are summed in the order of the ranks, so their last bits depend on how many there are.

Shards are kept in the CPU's memory between computation and communication. For tensors on a GPU the Triton engine
computes there, and answers return there. Messages lie where the group's backend needs them: on the CPU for gloo, on the
current GPU for NCCL, which has not been tested.

    attention, plan            the output, differentiable; which method is chosen, and why
    ShardedAttentionMatrix     the attention matrix: statistics, products, weights by index
    ShardedCauseMatrix         what single edges did: made by its contributions and cuts
    shard, unshard, positions  cut a sequence into shards, and put it together again
"""

from clearhead.errors import needing

with needing("PyTorch", "clearhead.distributed", "torch"):
    import torch as torch
from clearhead.distributed.attention import attention as attention
from clearhead.distributed.attention import plan as plan
from clearhead.distributed.causes import ShardedCauseMatrix as ShardedCauseMatrix
from clearhead.distributed.layout import positions as positions
from clearhead.distributed.layout import shard as shard
from clearhead.distributed.layout import unshard as unshard
from clearhead.distributed.matrix import ShardedAttentionMatrix as ShardedAttentionMatrix
