"""PyTorch's fused kernels, which are faster than ours; used where only the output is requested."""

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from clearhead.core.axes import Array
from clearhead.core.device_array import DeviceArray
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted, lacking
from clearhead.engines.base import one_scale, scales_differ, unsupported

KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]  # fastest first
DEVICES = ["cuda"]
RULES = frozenset({"scale", "causal", "query_offset"})
STATISTICS = frozenset(("output",))


def reasons_not(problem: Problem, q: Array, k: Array, v: Array, want: Wanted) -> list[str]:
    """Why PyTorch's kernels cannot be used, a sentence each; empty if they can."""
    who = "PyTorch's library of kernels"
    reasons = unsupported(who, RULES, problem)
    if scales_differ(problem):
        reasons.append(f"{who} takes one `scale` for all heads.")
    more = lacking(want, STATISTICS)
    if more or not want.output:
        reasons.append(f"they answer for the output alone, not for {', '.join(more) or 'nothing'}.")
    if want.keep_float32:
        reasons.append("they round the output.")
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
    """The output (batch, heads, queries, d_v); None if no fused kernel accepts this problem after all.

    Under a causal mask, a NaN or infinity in v may reach rows that must not see it; the row pass recomputes these rows.
    """
    tensors = q.tensor, k.tensor, v.tensor
    grouped = q.shape[1] != k.shape[1]
    with torch.no_grad(), sdpa_kernel(KERNELS, set_priority=True):
        try:
            result: torch.Tensor = scaled_dot_product_attention(
                *tensors, is_causal=problem.causal, scale=one_scale(problem), enable_gqa=grouped
            )
        except RuntimeError:  # "No available kernel": the conditions change with PyTorch's versions
            return None
    return result.contiguous() if problem.causal else result  # the row pass repairs it in place
