"""Repeated calls skip checks, and threads call at once: neither changes any result."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
import clearhead.torch
from clearhead.core import call
from clearhead.core.statistics import Wanted
from clearhead.engines import native
from clearhead.errors import ClearheadError, RuleError
from seeds import fresh

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
sdpa = clearhead.torch.scaled_dot_product_attention


def tensors(*shape: int, dtype: torch.dtype = torch.float32, keys: int | None = None) -> list[torch.Tensor]:
    """q, k and v (…, queries, d) and (…, keys, d)."""
    longer = (*shape[:-2], keys or shape[-2], shape[-1])
    return [torch.from_numpy(fresh().standard_normal(size)).to(dtype) for size in (shape, longer, longer)]


def long_way(*arrays: Any, **rules: Any) -> Any:
    """The same call with every check, by the pass that computes statistics too."""
    with patch.dict(call._problems, clear=True):
        read = call.describe(*arrays, rules)
    return read.give(native.rows(read, Wanted(output=True))["output"])


def same(a: Any, b: Any) -> bool:
    a, b = (x.float().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (a, b))
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


def fresh_spans(n: int, m: int) -> Any:
    """Labels and a table, some of it forbidden; the numbers of labels vary, too."""
    rng = fresh()
    rows, cols = rng.integers(1, 90, 2)
    table = rng.standard_normal((rows, cols)).astype(rng.choice([np.float32, np.float64]))
    table[rng.random(table.shape) < 0.3] = -np.inf
    return rng.integers(-1, rows, n), rng.integers(-1, cols, m), table


@given(data=st.data())
@settings(max_examples=60)
def test_a_repeated_call_gives_the_bits_of_a_checked_one(data: st.DataObject):
    lead = data.draw(st.sampled_from([(), (3,), (2, 4)]))
    n, m, d, d_v = (data.draw(st.integers(1, 40)) for _ in range(4))
    dtype = data.draw(st.sampled_from(DTYPES))
    rules = data.draw(
        st.sampled_from([
            {}, {"scale": 0.3}, {"softcap": 5.0}, {"causal": True, "query_offset": 0},
            {"window": (3, None), "query_offset": m - n}, {"causal": True, "query_offset": m - n, "softcap": 2.0},
        ])
    )  # fmt: skip
    as_arrays = data.draw(st.booleans()) and dtype != torch.bfloat16
    labelled = data.draw(st.booleans())
    for _ in range(3):
        if labelled:
            rules = {**rules, "spans": fresh_spans(n, m)}
        arrays = [
            torch.from_numpy(fresh().standard_normal((*lead, *size))).to(dtype) for size in ((n, d), (m, d), (m, d_v))
        ]
        if lead and data.draw(st.booleans()):
            arrays = [x.transpose(-2, -1).contiguous().transpose(-2, -1) for x in arrays]
        given = [x.numpy() for x in arrays] if as_arrays else arrays
        result = ch.attention(*given, **rules)
        assert type(result) is type(given[0])
        assert result.dtype == given[0].dtype
        assert same(result, long_way(*given, **rules))


def test_the_second_call_is_known():
    """Else the tests here would compare the long way with itself."""
    for arrays in (tensors(2, 3, 5, 8), [x.numpy() for x in tensors(2, 3, 5, 8)]):
        ch.attention(*arrays, scale=0.123)
        known = call.known(*arrays, {"scale": 0.123})
        assert known is not None
        assert same(native.output(known, *arrays), long_way(*arrays, scale=0.123))
        assert call.known(*arrays, {"scale": 0.123, "bias": np.zeros((5, 5))}) is None


def test_what_surrounds_a_call_counts_after_a_plain_one(monkeypatch: pytest.MonkeyPatch):
    q, k, v = tensors(1, 2, 6, 8)
    for attend in (ch.attention, sdpa):
        attend(q, k, v)
        for x in (q, k, v):
            x.requires_grad_()
            assert attend(q, k, v).requires_grad
            with torch.no_grad():
                assert not attend(q, k, v).requires_grad
            x.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16):
            assert attend(q, k, v).dtype == torch.bfloat16
        assert attend(q, k, v).dtype == torch.float32
        with monkeypatch.context() as changed:
            changed.setenv("CLEARHEAD_ENGINE", "nobody's")
            with pytest.raises(ClearheadError, match="nobody"):
                attend(q, k, v)


def _of_subclass(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(type("Own", (torch.Tensor,), {}))


WRAPPED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "vmap": lambda q, k, v: torch.func.vmap(ch.attention)(q, k, v),
    "grad": lambda q, k, v: torch.func.grad(lambda x: ch.attention(x, k, v).sum())(q).shape and ch.attention(q, k, v),
    "subclass": lambda q, k, v: ch.attention(_of_subclass(q), k, v).as_subclass(torch.Tensor),
    "inference": lambda q, k, v: torch.inference_mode()(ch.attention)(q, k, v).clone(),
    "expanded": lambda q, k, v: ch.attention(q, k[:1].expand_as(k), v)[:1],
    "broken alignment": lambda q, k, v: ch.attention(_unaligned(q), k, v),
    "negative strides": lambda q, k, v: ch.attention(q.numpy()[..., ::-1], k.numpy()[..., ::-1], v.numpy()),
}


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    moved = torch.frombuffer(bytearray(b"?" + x.numpy().tobytes()), dtype=torch.float32, offset=1).reshape(x.shape)
    assert moved.data_ptr() % 4
    return moved


@pytest.mark.parametrize("how", WRAPPED)
def test_what_is_wrapped_or_laid_out_otherwise_is_right(how: str):
    q, k, v = tensors(2, 3, 5, 8)
    for _ in range(2):
        ch.attention(q, k, v)
        ch.attention(q.numpy(), k.numpy(), v.numpy())
    result = WRAPPED[how](q, k, v)
    expected = long_way(q, k[:1].expand_as(k) if how == "expanded" else k, v)
    np.testing.assert_allclose(np.asarray(result), expected[: len(result)].numpy(), atol=1e-6)


def test_a_negated_view_keeps_its_sign():
    """torch.imag of a conjugate is a tensor whose numbers are stored with the other sign."""
    numbers = torch.view_as_complex(torch.from_numpy(fresh().standard_normal((1, 2, 6, 8, 2))).float())
    q, k, v = tensors(1, 2, 6, 8)
    ch.attention(q, k, v)
    negated = torch.imag(torch.conj(numbers))
    assert negated.is_neg()
    for arrays in ((negated, k, v), (negated, negated, negated)):
        assert same(ch.attention(*arrays), long_way(*(x.resolve_neg() for x in arrays)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_errors_are_raised_after_a_plain_call():
    q, k, v = tensors(1, 4, 6, 8)
    few = k[:, :2], v[:, :2]
    ch.attention(q, k, v)
    ch.attention(q, *few, scale=None)
    with pytest.raises(ch.errors.ShapeError, match="enable_gqa"):
        sdpa(q, *few)
    with pytest.raises(ch.errors.DtypeError, match="float64"):
        ch.attention(q, k.double(), v)
    with pytest.raises(ch.errors.ShapeError):
        ch.attention(q, k[..., :4], v)
    with pytest.raises(ch.errors.RuleError, match="causal"):
        ch.attention(q, k, v, causal=1)  # type: ignore[arg-type]
    with torch.autograd.forward_ad.dual_level():
        moving = ch.attention(torch.autograd.forward_ad.make_dual(q, q), k, v)
        assert torch.autograd.forward_ad.unpack_dual(moving).tangent is not None
    with pytest.raises(ch.errors.DtypeError, match=r"jit\.trace"):
        torch.jit.trace(ch.attention, (q, k, v))


def test_calls_in_many_threads_at_once():
    """Tensors of many shapes from eight threads: the table of calls, the team of threads and the pool are shared."""
    every = [tensors(1, 2, n, 16) for n in range(30, 110)]
    expected = [long_way(*(x.numpy() for x in arrays)) for arrays in every]
    wrong: list[int] = []

    def compute(start: int) -> None:
        for step in range(60):
            place = (start * 7 + step) % len(every)
            if not same(ch.attention(*every[place]), expected[place]):
                wrong.append(place)

    threads = [threading.Thread(target=compute, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_number_for_a_rule_with_axes_is_checked_in_each_call():
    """kv_lengths=5 fits eight keys and not four; kv_segments=1 stands for as many labels as there are keys."""
    q = tensors(1, 2, 3, 10)[0]
    for keys in (8, 4, 300):
        k, v = tensors(1, 2, 3, 10, keys=keys)[1:]
        if keys == 4:
            with pytest.raises(ClearheadError, match="kv_lengths"):
                ch.attention(q, k, v, kv_lengths=5)
        labels, length = {"query_segments": 1, "kv_segments": 1}, {"kv_lengths": min(keys, 5)}
        for rules in (length, labels, {"bias": 0.5}, {"mask": True}):
            for _ in range(2):
                assert same(ch.attention(q, k, v, **rules), long_way(q, k, v, **rules))


@pytest.mark.parametrize("count", [0, 1025, True, 2.0])
def test_a_wrong_number_of_threads_is_refused(count: Any):
    with pytest.raises(
        RuleError, match=f"the number of threads is {count!r}: expected a whole number from 1 to 1,024."
    ):
        ch.set_num_threads(count)
