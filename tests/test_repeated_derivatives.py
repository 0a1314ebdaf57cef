"""Derivatives whose call was seen before skip the checks: their bits and their refusals stay the same."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.ops import torch_fast_calls
from composed import by_math
from seeds import fresh
from test_repeated import DTYPES, long_way, same, sdpa, tensors

Tensors = list[torch.Tensor]


RULES: list[dict[str, Any]] = [
    {},
    {"scale": 0.3, "softcap": 2.0},
    {"causal": True, "query_offset": 0},
    {"window": (3, 1), "query_offset": 1},
]


@given(data=st.data())
@settings(max_examples=40)
def test_repeated_gradients_have_the_bits_of_checked_ones(data: st.DataObject):
    b, h, n, m, d, d_v = (data.draw(st.integers(1, most)) for most in (3, 3, 20, 20, 9, 9))
    dtype, rules = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(RULES))
    needed = data.draw(st.lists(st.booleans(), min_size=3, max_size=3).filter(any))
    for _ in range(3):
        arrays = [
            torch.from_numpy(fresh().standard_normal((b, length, h, width))).to(dtype).transpose(1, 2)
            for length, width in ((n, d), (m, d), (m, d_v))
        ]
        result, checked = ([x.detach().requires_grad_(on) for x, on in zip(arrays, needed, strict=True)] for _ in "ab")
        output, expected = ch.attention(*result, **rules), long_way(*checked, **rules)
        grad = torch.from_numpy(fresh().standard_normal(output.shape)).to(dtype)
        output.backward(grad)
        expected.backward(grad)
        assert same(output.detach(), expected.detach())
        for x, y in zip(result, checked, strict=True):
            assert (x.grad is None) == (y.grad is None)
            assert x.grad is None or same(x.grad, y.grad)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outputs that torch_fast_calls.repeat returns, with nothing remembered before; None: the long way."""
    monkeypatch.setattr(torch_fast_calls, "_calls", {})
    result: list[Any] = []
    repeat = torch_fast_calls.repeat
    monkeypatch.setattr(torch_fast_calls, "repeat", lambda *given: result.append(repeat(*given)) or result[-1])
    return result


def trained(*shape: int) -> list[torch.Tensor]:
    return [x.requires_grad_() for x in tensors(*shape)]


def test_what_a_repeated_call_with_a_graph_leaves_to_the_long_way(outputs: list[Any], monkeypatch: pytest.MonkeyPatch):
    q, k, v = trained(2, 3, 7, 5)
    for _ in range(2):
        sdpa(q, k, v)
    assert [output is not None for output in outputs] == [False, True]
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(q, k, v).dtype == torch.bfloat16
    monkeypatch.setenv("CLEARHEAD_ENGINE", "portable")
    sdpa(q, k, v)
    monkeypatch.delenv("CLEARHEAD_ENGINE")
    torch.func.grad(lambda x: sdpa(x, k, v).sum())(q)
    q_meta, k_meta, v_meta = (x.detach().to("meta").requires_grad_() for x in (q, k, v))
    assert sdpa(q_meta, k_meta, v_meta).is_meta
    assert not any(output is not None for output in outputs[2:])
    with pytest.raises(ClearheadError):
        sdpa(q, k.double(), v)
    with pytest.raises(ClearheadError):
        sdpa(q, k, v.to_sparse())


def test_a_repeated_call_has_second_derivatives_and_sees_changed_inputs(outputs: list[Any]):
    q, k, v = trained(1, 2, 6, 4)
    second = []
    for _ in range(2):
        output = sdpa(q, k, v)
        (first,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
        second.append(torch.autograd.grad(first.sum(), (q, k, v)))
    assert all(torch.equal(x, y) for x, y in zip(*second, strict=True))
    output = sdpa(q, k, v)
    with torch.no_grad():
        k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    assert all(output is not None for output in outputs[1:])


@pytest.mark.parametrize("rules", [{"is_causal": False}, {"is_causal": True}], ids=str)
def test_a_checkpoint_may_repeat_a_first_call_as_a_repeated_one(rules: Any, outputs: list[Any]):
    inputs = trained(1, 2, 13, 4 + rules["is_causal"])
    checkpointed = torch.utils.checkpoint.checkpoint(sdpa, *inputs, **rules, use_reentrant=False)
    result = [torch.autograd.grad(checkpointed.square().sum(), inputs)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        result.append(torch.autograd.grad(sdpa(*inputs, **rules).square().sum(), inputs))
    checked = long_way(*inputs, causal=rules["is_causal"])
    known = torch.autograd.grad(checked.square().sum(), inputs)
    assert all(torch.equal(a, b) for one in result for a, b in zip(one, known, strict=True))
    assert [output is not None for output in outputs] == [False, True]  # the checkpoint's own ends before it returns


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_values_that_all_heads_share_and_nested_tensors_go_the_long_way_again():
    """The second call had failed in the kernel, and with an error of PyTorch's own."""
    q, k, v = tensors(1, 2, 7, 5)
    q.requires_grad_()
    shared, known = v[0, 0], by_math(q, k, v[:1, :1].expand(1, 2, 7, 5))
    for _ in range(2):
        torch.testing.assert_close(ch.attention(q, k, shared), known)
    with pytest.raises(ClearheadError, match="nested"):
        ch.attention(q, k, torch.nested.nested_tensor([*v]))
