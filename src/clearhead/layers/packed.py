"""Continuous batching: requests packed into one row, each attending to its own keys.

Transformers (generation/continuous_batching) gives sdpa and eager attention a mask of all queries × all keys; only
implementations whose name contains "flash" get the requests' lengths instead. PAGED is such a name. Transformers' check
of the name wants a flash-attention package for it, so `serve_batching` sets it on the model's configuration itself, by
wrapping the one method with which a batching manager chooses the model's attention.
"""

from collections.abc import Mapping
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from clearhead.errors import RuleError
from clearhead.torch import varlen_attn

PAGED = "clearhead_flash"
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
) -> Tensor:
    """The output (1, heads, queries, d_v) for the queries of all requests, one request after the other.

    `cu_seq_lens_q` and `cu_seq_lens_k` (requests + 1,) say where each one's queries and keys begin; a request's last
    query is at its last key. With a cache, key and value are the new ones, which it stores, and it returns all of them.
    Queries behind the last request are padding and get 0. Time is that of the requests alone: Σ queries·keys·d_k.
    """
    if more.get("cache") is not None:
        key, value = more["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=more)
    window, ends = more.get("sliding_window"), (more["cu_seq_lens_q"], more["cu_seq_lens_k"])
    named = (query, ends[0]), (key, ends[1]), (value, ends[1])
    q, k, v = (x[0, :, : int(end[-1])].swapaxes(0, 1) for x, end in named)
    sides = -1 if window is None else window - 1, 0 if causal else -1
    output = varlen_attn(q, k, v, *ends, window_size=sides, enable_gqa=True, **scores)
    return functional.pad(output, (0, 0, 0, 0, 0, query.shape[2] - len(output)))[None].swapaxes(1, 2)


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
        model.config._attn_implementation = PAGED
        self._original_attn_impl = name

    manager.switch_to_cb_friendly_attn = switch
