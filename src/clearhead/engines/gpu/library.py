"""Where only the output is asked for: PyTorch's own fused kernels, which a well-kept library makes faster than ours."""

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from clearhead.axes import Array
from clearhead.device import DeviceArray
from clearhead.problem import Problem

KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]  # fastest first
DEVICES = ["cuda"]
_RULES = ("softcap", "bias", "alibi_slopes", "mask", "kv_lengths", "query_lengths", "query_segments", "sinks")


def reasons_not(problem: Problem, q: Array, k: Array, v: Array) -> list[str]:
    """Why PyTorch's kernels cannot answer for the output; empty where they can."""
    given = [name for name in _RULES if getattr(problem, name) is not None]
    reasons = [f"they have no {', '.join(given)}."] if given else []
    if problem.window != (None, None):
        reasons.append("they have no window.")
    if problem.causal and (problem.queries != problem.keys or problem.query_offset.any()):
        reasons.append("their causal rule has no query_offset.")
    if (problem.rows.start, problem.rows.step, problem.cols.start, problem.cols.step) != (0, 1, 0, 1):
        reasons.append("a part of the queries stands where their causal rule does not look.")
    if not problem.keys or q.shape[-1] != v.shape[-1] or k.shape[1] != v.shape[1]:
        reasons.append("they want keys, as many value heads as key heads, and d_v like d_k.")
    if not isinstance(q, DeviceArray) or q.tensor.device.type not in DEVICES or problem.dtype.itemsize == 8:
        reasons.append("they are fast on a GPU and for narrower types than float64 only.")
    return reasons


def output(problem: Problem, q: Any, k: Any, v: Any) -> torch.Tensor | None:
    """The output (batch, heads, queries, d_v); None where no fused kernel takes this after all.

    Under a causal rule a NaN or an infinity among the values may reach rows that must not see it: `repair` mends them.
    """
    tensors = q.tensor, k.tensor, v.tensor
    grouped = q.shape[1] != k.shape[1]
    with torch.no_grad(), sdpa_kernel(KERNELS, set_priority=True):
        try:
            found: torch.Tensor = scaled_dot_product_attention(
                *tensors, is_causal=problem.causal, scale=problem.scale, enable_gqa=grouped
            )
        except RuntimeError:  # "No available kernel": the reasons are PyTorch's own and change with its versions
            return None
    return found.contiguous() if problem.causal else found  # as `repair` reads it
