"""AttentionMatrix where PyTorch records, transforms or traces a graph; torch_sharded.py has the same functions.

All other tensors are read like NumPy arrays (core/arrays.py), without this module.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.call import Given
from clearhead.core.torch_state import traced
from clearhead.derivatives import function, operator
from clearhead.derivatives.arguments import Task, read, tensor_of
from clearhead.derivatives.recomputed import Tensors
from clearhead.errors import RuleError
from clearhead.ops.observation import Observation, observation


def check(given: Given) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Validate the call and return the matrix's shape and dtype. Raises as `read`."""
    x = read(given)[1]
    dtype = np.dtype(np.float64 if x["q"].dtype == torch.float64 else np.float32)
    return (*x["q"].shape[:-1], x["k"].shape[-2]), dtype


def observe(given: Given, v: Any, asked: Mapping[str, Any], queries: slice = slice(None)) -> Observation:
    """Answer the requested statistics; parameters and errors as `AttentionMatrix.observe`."""
    task, x = read(given, v, asked, queries)
    answers = _compute(task, x)
    if not asked.get("logsumexp"):
        del answers["largest"], answers["log_sum"]
    length = x["q"].shape[-2]  # computing with it would fix a size that the compiler leaves open
    count = length if queries == slice(None) else len(range(length)[queries])
    return observation(answers, count, x["k"].shape[-2])


def mix(given: Given, v: Any) -> Tensor:
    """Compute A·v."""
    output = _compute(*read(given, v))["output"]
    return output[..., 0] if getattr(v, "ndim", 0) == 1 else output


def transposed(given: Given, g: Any) -> Tensor:
    """Compute Aᵀ·g."""
    task, x = read(given)
    q, columns = x["q"], tensor_of(g, "g", x["q"])
    vector = columns.ndim == 1
    columns = columns[:, None] if vector else columns
    x["g"] = columns.expand(*q.shape[:-2], *columns.shape) if columns.ndim < q.ndim else columns
    result = _compute(task._replace(answers="product"), x)["product"]
    return result[..., 0] if vector else result


def _compute(task: Task, x: Tensors) -> Tensors:
    return (operator.observe if traced(x["q"]) else function.compute)(task, x)


def refused(given: Given, what: str, call: str) -> RuleError:
    """Make the error for something that has no derivative; `call` is what to type without a graph."""
    if given.q.device.type == "meta":
        return RuleError(f"{what} need numbers, and tensors on the meta device have none.")
    return RuleError(
        f"{what} have no derivative, and PyTorch keeps or traces a graph for them.", f"with torch.no_grad(): {call}"
    )
