"""Another kernel's log-sum-exp: taken if right, else refused with the first row that differs."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
import seeds
from clearhead.core.axes import Array
from clearhead.engines import native
from clearhead.errors import DtypeError, RuleError, ShapeError
from clearhead.ops.given_logsumexp import ROWS
from problems import Case, examples, on_every_engine

normal = partial(seeds.normal, dtype=np.float32)
LOG2 = math.log(2)
BFLOAT16 = ml_dtypes.bfloat16
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensors(*lengths: int, dtype: torch.dtype = torch.float32, lead: tuple[int, ...] = (2, 3)) -> list[torch.Tensor]:
    return [torch.from_numpy(normal(*lead, length, 16)).to(dtype) for length in lengths]


def torchs(q: torch.Tensor, k: torch.Tensor, **rules: Any) -> torch.Tensor:
    """The log-sum-exp of PyTorch's own kernel for the CPU."""
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, **rules)[1]
    return result


@on_every_engine(
    ("native", "portable", "triton"),
    times=0.5,
    dtype=st.sampled_from((np.float64, np.float32, BFLOAT16)),
    empty=st.sampled_from((-np.inf, np.inf)),
)
def test_the_definition_is_taken_under_every_rule(engine: str, case: Case, dtype: Any, empty: float):
    truth = case.restore(case.book.logsumexp)
    rows = np.where(np.isneginf(truth), empty, truth).astype(dtype)
    matrix = case.matrix(engine=engine, logsumexp=rows)
    usual = matrix.dtype
    seen = np.isfinite(truth)
    taken = np.where(np.isneginf(truth), -np.inf, truth).astype(dtype).astype(usual)
    rounding = np.abs(np.where(seen, taken, 0.0)).max(initial=0.0) * float(np.finfo(usual).eps)
    fine = rounding <= 2.0**-16
    bounds = {"rtol": 0.0} if fine else {"rtol": 1e-2 if dtype == BFLOAT16 else 1e-5, "atol": rounding}
    np.testing.assert_allclose(matrix.logsumexp(), taken, **bounds)
    off = np.where(seen, rows.astype(np.float64), 0.0) - np.where(seen, truth, 0.0) if fine else np.zeros(truth.shape)
    expected = case.restore(case.book.weights) * np.exp(-off)[..., None]
    np.testing.assert_allclose(np.asarray(matrix), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_own_kernel_is_taken(dtype: torch.dtype, causal: bool):  # noqa: FBT001
    q, k = tensors(70, 70, dtype=dtype)
    given = torchs(q, k, is_causal=causal)
    matrix = ch.AttentionMatrix(q, k, causal=causal, logsumexp=given)
    assert torch.equal(matrix.logsumexp(), given.to(matrix.logsumexp().dtype))
    scores = q.double() @ k.double().mT / 4
    if causal:
        scores.masked_fill_(torch.ones(70, 70, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(matrix[...].double(), scores.softmax(-1), rtol=2e-3, atol=1e-6)
    assert torch.equal(ch.attention(q, k, k, causal=causal), matrix @ k)


RIGHT: dict[str, Any] = {"causal": True, "query_offset": 7, "scale": 0.3}


def lse(q: Array, k: Array, **rules: Any) -> Array:
    return np.asarray(ch.AttentionMatrix(q, k, engine="portable", **rules).logsumexp())


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {  # this matrix's rules, the kernel's, a factor
    "base 2": (RIGHT, RIGHT, LOG2),
    "no scale": ({}, {"scale": 1.0}, 1.0),
    "one scale for all heads": ({"scale": [0.3, 0.5, 1.0]}, {"scale": 0.3}, 1.0),
    "the upper left corner": (RIGHT, {**RIGHT, "query_offset": 0}, 1.0),
    "no spans": ({"spans": ([0, 1] * 10, [0, 1, -1] * 9, [[0.5, -np.inf], [2.0, 1.0]])}, {}, 1.0),
    "an inverted mask": ({"mask": np.arange(27) % 2 == 0}, {"mask": np.arange(27) % 2 == 1}, 1.0),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_its_row_and_usual_causes(name: str):
    right, theirs, factor = MISTAKES[name]
    q, k = normal(2, 3, 20, 16), normal(2, 3, 27, 16)
    rows = lse(q, k, **theirs) / factor
    with pytest.raises(RuleError) as error:
        ch.AttentionMatrix(q, k, logsumexp=rows, **right)
    named = re.search(
        r"logsumexp\[(\d+), (\d+), (\d+)\] is (\S+), computed (\S+) here\.\n\nhint: the usual", str(error.value)
    )
    assert named, error.value
    place = tuple(map(int, named.groups()[:3]))
    assert float(named[4]) == pytest.approx(rows[place], rel=1e-6)
    assert float(named[5]) == pytest.approx(lse(q, k, **right)[place], rel=1e-5)
    ch.AttentionMatrix(q, k, logsumexp=lse(q, k, **right), **right)


@pytest.mark.parametrize(
    "change", [lambda x: x.swapaxes(1, 2), lambda x: x[..., None], lambda x: x[0], lambda x: x[0, 0, 0]]
)
def test_another_layout_is_refused(change: Callable[[Array], Any]):
    q, k = normal(1, 3, 20, 16), normal(1, 3, 27, 16)
    with pytest.raises(ShapeError) as error:
        ch.AttentionMatrix(q, k, logsumexp=np.asarray(change(lse(q, k))))
    assert "expected one number per query, (batch 1, heads 3, queries 20)." in str(error.value)
    assert str(error.value).endswith("logsumexp[..., :20] where the kernel pads the queries.")


@pytest.mark.parametrize("filled", [0.0, np.finfo(np.float32).min])
def test_rows_without_keys_must_be_infinite(filled: float):
    q, k = normal(2, 3, 20, 16), normal(2, 3, 27, 16)
    rules: dict[str, Any] = {"query_lengths": [20, 11]}
    right = np.asarray(ch.AttentionMatrix(q, k, **rules).logsumexp())
    for empty in (-np.inf, np.inf):
        taken = ch.AttentionMatrix(q, k, logsumexp=np.where(np.isneginf(right), empty, right), **rules)
        np.testing.assert_array_equal(taken.logsumexp(), right)
        assert not np.asarray(taken)[1, :, 11:].any()
    with pytest.raises(RuleError, match=r"logsumexp\[1, 0, 1\d\] is .*, computed -inf here\."):
        ch.AttentionMatrix(q, k, logsumexp=np.where(np.isneginf(right), filled, right), **rules)


@pytest.mark.parametrize("strange", [np.inf, -np.inf, np.nan])
def test_a_row_that_sees_keys_is_never_taken_as_empty(strange: float):
    q, k = normal(2, 3, 600, 16), normal(2, 3, 27, 16)
    right = lse(q, k)
    right[1, 2, 1 + int(seeds.fresh().integers(598))] = strange
    with pytest.raises(RuleError, match=r"logsumexp\[1, 2, \d+\] is "):
        ch.AttentionMatrix(q, k, logsumexp=right)


@pytest.mark.parametrize("padding", [1e30, np.nan, np.inf])
def test_what_padding_holds_does_not_blunt_the_check(padding: float):
    q, k = normal(2, 3, 20, 16), normal(2, 3, 27, 16)
    k[:, :, 25:] = padding
    right = lse(q, k, kv_lengths=25)
    ch.AttentionMatrix(q, k, kv_lengths=25, logsumexp=right)
    with pytest.raises(RuleError, match="logsumexp does not fit"):
        ch.AttentionMatrix(q, k, kv_lengths=25, logsumexp=right + np.float32(1e-4))


@examples(0.5)
@given(queries=st.integers(1, 100), lead=st.sampled_from(((), (3,), (2, 3), (2, 1, 3))), seed=st.integers(0, 2**32 - 1))
def test_the_first_and_the_last_row_are_always_checked(queries: int, lead: tuple[int, ...], seed: int):
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((*lead, length, 8)) for length in (queries, 5))
    right = np.asarray(ch.AttentionMatrix(q, k).logsumexp())
    index = tuple(int(rng.integers(size)) for size in lead)
    for row in (0, queries - 1):
        wrong = right.copy()
        wrong[(*index, row)] += 1e-9
        place = ", ".join(map(str, (*index, row)))
        with pytest.raises(RuleError) as error:
            ch.AttentionMatrix(q, k, logsumexp=wrong)
        assert f"logsumexp[{place}] is " in str(error.value)


def test_only_looking_is_paid_for(monkeypatch: pytest.MonkeyPatch):
    q, k = normal(2, 3, 1000, 16), normal(2, 3, 500, 16)
    right = lse(q, k)
    passes, rows = [], native.rows

    def counted(inputs: Any, want: Any) -> Any:
        passes.append(inputs.problem.queries)
        return rows(inputs, want)

    monkeypatch.setattr(native, "rows", counted)
    matrix = ch.AttentionMatrix(q, k, logsumexp=right, engine="native")
    assert sum(passes) <= ROWS + 1
    passes.clear()
    matrix[0, 1, :50], matrix.received(), matrix.image(4, 4), matrix.T @ q, matrix.logsumexp(), matrix.part(0, 1)[...]
    assert passes == []
    seen = matrix.observe(entropy=True, top=2, logsumexp=True)
    plain = ch.AttentionMatrix(q, k, engine="native").observe(entropy=True, top=2)
    np.testing.assert_array_equal(seen.entropy, plain.entropy)
    np.testing.assert_array_equal(seen.top.weights, plain.top.weights)
    np.testing.assert_array_equal(seen.logsumexp, right)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_a_number_without_digits_for_weights_is_computed_here(size: float):
    q, k = normal(2, 3, 20, 16) * np.float32(size), normal(2, 3, 27, 16)
    matrix = ch.AttentionMatrix(q, k, logsumexp=lse(q, k))
    np.testing.assert_array_equal(matrix[...], ch.AttentionMatrix(q, k)[...])
    np.testing.assert_allclose(matrix[...].sum(-1), 1, 1e-5)


def test_it_is_refused_where_pytorch_records_a_graph():
    q, k = tensors(5, 7)
    right = torchs(q, k)
    for one in (
        (q.clone().requires_grad_(), k, right),
        (q, k.clone().requires_grad_(), right),
        (q, k, right.clone().requires_grad_()),
    ):
        with pytest.raises(RuleError, match=r"^matrices with another kernel's logsumexp have no derivative"):
            ch.AttentionMatrix(one[0], one[1], logsumexp=one[2])
        with torch.no_grad():
            ch.AttentionMatrix(one[0], one[1], logsumexp=one[2])
    with pytest.raises(DtypeError, match="logsumexp requires grad"):
        ch.AttentionMatrix(q.numpy(), k.numpy(), logsumexp=right.clone().requires_grad_())


def test_no_derivative_is_missing_where_a_graph_begins_later():
    q, k, v = tensors(5, 7, 7, dtype=torch.float64)
    right = torchs(q, k)
    q.requires_grad_()
    v.requires_grad_()
    with torch.no_grad():
        matrix = ch.AttentionMatrix(q, k, logsumexp=right)
        assert not matrix.logsumexp().requires_grad
    for one, other in zip(
        *(torch.autograd.grad((A @ v).sin().sum(), (q, v)) for A in (matrix, ch.AttentionMatrix(q, k))), strict=True
    ):
        torch.testing.assert_close(one, other)
