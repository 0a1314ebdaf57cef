"""Continuous batching: requests packed into one row, each attending to its own keys.

Transformers (generation/continuous_batching) gives sdpa and eager attention a mask of all queries × all keys; only
implementations whose name contains "flash" get the requests' lengths instead. PAGED is such a name. Transformers' check
of the name wants a flash-attention package for it, so `serve_batching` sets it on the model's configuration itself, by
wrapping the one method with which a batching manager chooses the model's attention.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from clearhead.errors import RuleError
from clearhead.torch import varlen_attn

PAGED = "clearhead_flash"
OfRequest = Callable[[int, Tensor, Tensor, Tensor], Tensor]
beginning: list[Callable[[Any, PreTrainedModel], None]] = []  # called with a batching manager and its model
PACKING = frozenset(("cache", "read_index", "write_index", "logits_indices", "logits_processor_args"))  # not for scores


def is_packed(module: nn.Module, more: Mapping[str, Any]) -> bool:
    """Does this call have the requests' lengths in place of a mask?"""
    if more.get("cache") is not None:
        return True
    config = getattr(module, "config", None)
    return more.get("cu_seq_lens_q") is not None and getattr(config, "_attn_implementation", None) == PAGED


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: dict[str, Any],
    more: dict[str, Any],
    *,
    causal: bool,
    each: OfRequest | None = None,
) -> Tensor:
    """The output (1, heads, queries, d_v) for the queries of all requests, one request after the other.

    `cu_seq_lens_q` and `cu_seq_lens_k` (requests + 1,) say where each one's queries and keys begin; a request's last
    query is at its last key. With a cache, key and value are the new ones, which it stores, and its pages are read
    where they lie. Queries behind the last request are padding and get 0. Time is that of the requests alone:
    Σ queries·keys·d_k. `each` attends for one request: it is given its number, and its q, k and v as a batch of one.
    """
    window, starts, cache = more.get("sliding_window"), more["cu_seq_lens_q"], more.get("cache")
    keys: Any = None
    if cache is not None and each is None:
        keys = _in_pages(cache, cast("int", module.layer_idx), key, value, more)
    if keys is None:
        if cache is not None:
            key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=more)
        ends = more["cu_seq_lens_k"]
        if each is not None:
            places = zip(pairwise(starts.tolist()), pairwise(ends.tolist()), strict=True)
            parts = [(query[:, :, i:j], *(x[:, :, m:n] for x in (key, value))) for (i, j), (m, n) in places if i < j]
            whole = torch.cat([each(i, *part) for i, part in enumerate(parts)], 2)
            return functional.pad(whole, (0, 0, 0, query.shape[2] - whole.shape[2]))
        k, v = (x[0, :, : int(ends[-1])].swapaxes(0, 1) for x in (key, value))
        keys = {"key": k, "value": v, "cu_seq_k": ends}
    sides = -1 if window is None else window - 1, 0 if causal else -1
    q = query[0, :, : int(starts[-1])].swapaxes(0, 1)
    output = varlen_attn(q, cu_seq_q=starts, window_size=sides, enable_gqa=True, **keys, **scores)
    return functional.pad(output, (0, 0, 0, 0, 0, query.shape[2] - len(output)))[None].swapaxes(1, 2)


def _in_pages(cache: Any, layer: int, key: Tensor, value: Tensor, more: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Store the new keys and values, (1, kv_heads, tokens, d), and say in which pages all of them lie.

    None, with nothing stored, where no request has older keys, or where the cache of this layer has no pages: that of a
    sliding window begins anew where it is full.
    """
    pool: Any = getattr(cache, "layer_to_allocator", {}).get(layer)
    if not getattr(pool, "supports_block_table", False) or pool.tokens_per_page % 16:
        return None
    read, write = (more[name][pool.index] for name in ("read_index", "write_index"))  # places of tokens in the cache
    if not len(read):
        return None
    pool.update(key[0].swapaxes(0, 1), value[0].swapaxes(0, 1), layer, read[:0], write)  # it reads nothing back
    ends = more["cu_seq_lens_k"][pool.layer_type]
    lengths = ends.diff()
    starts = ends[:-1, None] + torch.arange(0, int(lengths.max()), pool.tokens_per_page)
    table = read[starts.clamp(max=len(read) - 1)] // pool.tokens_per_page  # nobody looks beyond a request's keys
    keys, values = pool.get_cache_for_block_table(layer)
    return {"key": keys, "value": values, "seqused_k": lengths.int(), "block_table": table.int()}


def serve_batching(name: str) -> None:
    """Let `generate_batch` run models whose attention is `name`, which is back when the batching manager stops."""
    from transformers.generation import continuous_batching

    manager: Any = continuous_batching.ContinuousBatchingManager
    theirs = getattr(manager, "switch_to_cb_friendly_attn", None)
    if theirs is None or hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def switch(self: Any, model: PreTrainedModel, *more: Any, **named: Any) -> None:
        if model.config._attn_implementation != name:
            theirs(self, model, *more, **named)
            return
        if model.device.type != "cpu":
            raise RuleError(
                f"the model is on device {model.device}: continuous batching with {name} runs on the CPU.",
                "model.set_attn_implementation('sdpa'), or model.to('cpu')",
            )
        for begins in beginning:
            begins(self, model)
        model.config._attn_implementation = PAGED
        self._original_attn_impl = name

    manager.switch_to_cb_friendly_attn = switch
