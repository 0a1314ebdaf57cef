"""Promise 1: an error of at most 1.25 times that of PyTorch's fused kernel, on the same inputs, against float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch
from clearhead import reference
from clearhead.axes import Array
from clearhead.problem import describe

MOST = 1.25
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = [(1, 2, 64, 64, 64), (2, 3, 130, 700, 32), (16, 4, 1, 2000, 128), (1, 4, 300, 300, 16), (1, 2, 33, 33, 80)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("rules", [{}, {"causal": True, "query_offset": 0}])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_less_exact_than_pytorchs_fused_kernel(
    shape: tuple[int, ...], rules: dict[str, Any], size: float, dtype: str
):
    batch, heads, n, m, d = shape
    torch.manual_seed(n + m)
    sizes = ((batch, heads, n, d), (batch, heads, m, d), (batch, heads, m, d))
    q, k, v = ((torch.randn(s, dtype=torch.float64) * size).to(DTYPES[dtype]) for s in sizes)
    given = describe(q, k, v, rules)
    truth = reference.attend(given.problem, given.q, given.k, given.v).output
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal="causal" in rules)
    ours = ch.attention(q, k, v, **rules)
    assert truth is not None
    assert ours.dtype == theirs.dtype
    for measure in (largest, root_mean_square):
        assert measure(ours, truth) <= MOST * measure(theirs, truth), measure.__name__


def largest(output: torch.Tensor, truth: Array) -> float:
    return float(np.abs(output.double().numpy() - truth).max())


def root_mean_square(output: torch.Tensor, truth: Array) -> float:
    return float(np.sqrt(np.mean((output.double().numpy() - truth) ** 2)))
