"""Calls on tensors with an autograd graph are refused with the same texts as calls without one."""

from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.errors import ClearheadError, DtypeError, RuleError, SelectionError
from test_torch_op import normal, qkv


def refusals() -> list[Any]:
    q, k, v = qkv()
    meta, slopes, matrix = k.to("meta"), normal(4, grad=True), ch.AttentionMatrix(*qkv()[:2])
    return [
        pytest.param(lambda: ch.attention(q, meta, v), DtypeError, "k is on device meta but q is on device cpu"),
        pytest.param(lambda: matrix @ v.to("meta"), DtypeError, "v is on device meta but q is on device cpu"),
        pytest.param(lambda: matrix.T @ q.to("meta"), DtypeError, "g is on device meta but q is on device cpu"),
        pytest.param(lambda: ch.attention(q, k, v, sinks=slopes.to("meta")), DtypeError, "sinks is on device meta"),
        pytest.param(lambda: ch.attention(q, k.float(), v), DtypeError, "k is float32 but q is float64"),
        pytest.param(lambda: ch.attention(q, k, v.float()), DtypeError, "v is torch.float32 but q is torch.float64"),
        pytest.param(lambda: ch.attention(q, k, v, scale=normal(grad=True)), RuleError, "scale requires grad"),
        pytest.param(lambda: ch.attention(q, k, v, scale="a"), RuleError, "scale is 'a': expected a number"),
        pytest.param(lambda: ch.attention(q, k, v, causal=1), RuleError, "causal is 1: expected True or False"),
        pytest.param(lambda: ch.attention(q, k, v, window=3), RuleError, "window is 3: expected"),
        pytest.param(lambda: ch.attention(q, k, "v"), DtypeError, "v is a str: expected"),
        pytest.param(lambda: ch.attention(q, k, v, alibi_slopes=slopes).sum().backward(), RuleError, "alibi_slopes"),
        pytest.param(lambda: matrix.observe(entropy=1), RuleError, "entropy is 1: expected True or False"),
        pytest.param(lambda: matrix.observe(top=0), RuleError, "top is 0: expected a whole number from 1 up"),
        pytest.param(lambda: matrix.observe(image=3), RuleError, "image is 3: expected"),
        pytest.param(lambda: matrix.observe(groups=3), RuleError, "groups is int: expected"),
        pytest.param(lambda: matrix.observe(queries=3), SelectionError, "queries is 3: expected a slice"),
        pytest.param(lambda: matrix[0], RuleError, "weights read by index have no derivative"),
        pytest.param(lambda: np.asarray(matrix.T[0]), RuleError, "weights read by index have no derivative"),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), refusals())
def test_calls_with_a_graph_are_refused_with_the_same_texts(call: Any, error: type[ClearheadError], words: str):
    with pytest.raises(error, match=f"^({words})"):
        call()
