"""Ragged batches over pages: every request has the bits it has alone, whatever its pages and its neighbours are."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import varlen

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.torch import varlen_attn
from clearhead.torch.varlen import _OBSERVED

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALL: dict[str, Any] = {name: 2 if name == "top" else True for name in _OBSERVED}


@dataclass
class Batch:
    """Requests with so many queries and keys, whose pages lie anywhere in a pool; what no request uses is NaN."""

    requests: list[tuple[int, int]]
    page: int = 16
    heads: tuple[int, int] = (4, 2)  # of queries, of keys
    widths: tuple[int, int] = (16, 16)  # of keys, of values
    dtype: torch.dtype = torch.float32
    heads_first: bool = False  # in memory, as in one of vLLM's layouts
    shared: int = 0  # so many first pages are those of the first request
    rules: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        needed = [-(-m // self.page) for _, m in self.requests]
        blocks = torch.randperm(sum(needed) + 3, dtype=torch.int32)
        table = torch.randint(-9, 10**6, (len(needed), max(needed) + 1), dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count], blocks = blocks[:count], blocks[count:]
            together = min(self.shared, count, needed[0])
            table[row, :together] = table[0, :together]
        heads, (d_k, d_v) = self.heads, self.widths
        self.query = torch.randn(sum(n for n, _ in self.requests), heads[0], d_k).to(self.dtype)
        self.key, self.value = (self.pool(sum(needed) + 3, table, needed, d) for d in (d_k, d_v))
        ends = torch.tensor([0, *np.cumsum([n for n, _ in self.requests])], dtype=torch.int32)
        lengths = torch.tensor([m for _, m in self.requests], dtype=torch.int32)
        self.where = {"cu_seq_q": ends, "seqused_k": lengths, "block_table": table, "enable_gqa": True}

    def pool(self, count: int, table: torch.Tensor, needed: list[int], d: int) -> torch.Tensor:
        pages = torch.full((count, self.page, self.heads[1], d), torch.nan).to(self.dtype)
        for row, (_, m) in enumerate(self.requests):
            for page in range(needed[row]):
                rows = pages[table[row, page], : m - page * self.page]
                rows[:] = torch.randn(rows.shape)
        return pages.swapaxes(1, 2).contiguous().swapaxes(1, 2) if self.heads_first else pages

    def attend(self, **more: Any) -> Any:
        return varlen_attn(self.query, self.key, self.value, **self.where, **self.rules, **more)

    def side_by_side(self, x: torch.Tensor, row: int) -> torch.Tensor:
        pages = self.where["block_table"][row, : -(-self.requests[row][1] // self.page)].long()
        return x[pages].flatten(0, 1)[: self.requests[row][1]].swapaxes(0, 1).contiguous()

    def alone(self, row: int, **more: Any) -> Any:
        """One request, its keys and values side by side."""
        n, m = self.requests[row]
        start = sum(n for n, _ in self.requests[:row])
        rules: dict[str, Any] = {name: x for name, x in self.rules.items() if name != "window_size"}
        left, right = self.rules.get("window_size", (-1, -1))
        rules |= {"window": (None if left < 0 else left, None if right < 0 else right), "query_offset": m - n}
        query = self.query[start : start + n].swapaxes(0, 1)
        A = ch.AttentionMatrix(query, self.side_by_side(self.key, row), **rules, **more)
        return A, A.observe(self.side_by_side(self.value, row), **ALL)


def check_each_alone(batch: Batch, **more: Any) -> None:
    seen = batch.attend(**ALL, **more)
    start = first = 0
    for row, (n, m) in enumerate(batch.requests):
        expected = batch.alone(row, **more)[1]
        for name in ("output", *ALL):
            whole, local = getattr(seen, name), getattr(expected, name)
            places = slice(first, first + m) if name == "received" else slice(start, start + n)
            for x, y in zip(whole, local, strict=True) if name == "top" else [(whole, local)]:
                assert torch.equal(x[places], y.swapaxes(0, 1)), (name, row)
        start, first = start + n, first + m
    assert torch.equal(batch.attend(**more), seen.output)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = st.sampled_from([1, 1, 2, 5, 15, 16, 17, 31, 32, 70, 130, 300])
    pairs = draw(st.lists(st.tuples(lengths | st.just(0), lengths | st.just(0)), min_size=1, max_size=5))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 3)]))
    width = st.sampled_from([1, 8, 16, 31, 32, 64])
    rules: dict[str, Any] = {"window_size": draw(st.sampled_from([(-1, 0), (-1, -1), (20, 0), (3, 5), (0, 0)]))}
    if draw(st.booleans()):
        heads = kv_heads * group
        numbers = {"softcap": 3.0, "scale": 0.3, "alibi_slopes": torch.rand(heads), "sinks": torch.randn(heads)}
        rules |= {name: numbers[name] for name in draw(st.sets(st.sampled_from(sorted(numbers))))}
    return Batch(
        pairs, draw(st.sampled_from([16, 32, 48, 64, 128])), (kv_heads * group, kv_heads),
        (draw(width), draw(width)), draw(st.sampled_from(DTYPES)), draw(st.booleans()), draw(st.integers(0, 2)), rules,
    )  # fmt: skip


@given(batch=batches())
def test_every_request_has_the_bits_it_has_alone(batch: Batch):
    check_each_alone(batch)


LARGE = {
    "row blocks, spans of keys, and a few of each": lambda: Batch(
        [(300, 2300), (1, 4500), (0, 16), (1, 64), (70, 70), (3, 0)]
    ),
    "more packed keys than run together": lambda: Batch([(30, 4096)] * 20, 128, (2, 2), (64, 64), shared=99),
    "more queries than keys": lambda: Batch([(40, 17), (9, 3)], rules={"window_size": (-1, 0)}),
}


@pytest.mark.parametrize("name", LARGE)
def test_so_have_requests_whose_tasks_are_cut_otherwise(name: str):
    check_each_alone(LARGE[name]())


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_engine_computes_the_same_of_gathered_pages(dtype: torch.dtype):
    rules = {"window_size": (40, 0), "sinks": torch.randn(4)}
    check_each_alone(Batch([(1, 70), (20, 20), (0, 3), (9, 40)], 32, dtype=dtype, rules=rules), engine="portable")


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_says_so_too(dtype: torch.dtype):
    batch = Batch([(1, 70), (5, 5), (0, 16), (33, 300)], 64, dtype=dtype, rules={"window_size": (-1, 0)})
    output, logsumexp = batch.attend(return_aux=varlen.AuxRequest(lse=True))
    assert output.dtype == dtype
    close = {"rtol": 0, "atol": {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)}
    start = 0
    for row, (n, m) in enumerate(batch.requests):
        q = batch.query[start : start + n].swapaxes(0, 1).double()
        k, v = (batch.side_by_side(x, row).double() for x in (batch.key, batch.value))
        visible = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
        scores = (q @ k.repeat_interleave(2, 0).mT / 4).masked_fill(~visible, -torch.inf)
        torch.testing.assert_close(output[start : start + n].swapaxes(0, 1).double(), expected, **close)
        torch.testing.assert_close(logsumexp[start : start + n].T.double(), scores.logsumexp(-1), **close)
        start += n


@pytest.mark.parametrize("used", [None, torch.tensor([5, 0, 3])])
def test_keys_may_lie_one_after_the_other(used: torch.Tensor | None):
    queries, ends, window = torch.tensor([0, 2, 3, 7]), torch.tensor([0, 9, 10, 14]), {"window_size": (4, 0)}
    q, k, v = torch.randn(7, 2, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 5)
    output = varlen_attn(q, k, v, queries, ends, seqused_k=used, **window)
    for row, m in enumerate(ends.diff() if used is None else used):
        part, keys = slice(*queries[row : row + 2]), slice(ends[row], ends[row] + m)
        near = (x.swapaxes(0, 1) for x in (q[part], k[keys], v[keys]))
        expected = ch.attention(
            *near, window=window["window_size"], query_offset=int(m) - (part.stop - part.start).item()
        )
        assert torch.equal(output[part], expected.swapaxes(0, 1))


def test_a_scale_for_each_head_may_change_in_place():
    batch = Batch([(1, 20), (3, 3)])
    batch.rules = {"scale": torch.rand(4)}
    first = batch.attend()
    batch.rules["scale"] *= 2
    assert not torch.equal(batch.attend(), first)
    check_each_alone(batch)


def test_the_signature_is_pytorchs_and_more():
    theirs, ours = (inspect.signature(each).parameters for each in (varlen.varlen_attn, varlen_attn))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].kind == one.kind for name, one in theirs.items())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a block beyond": ({"block_table": torch.tensor([[0, 9], [1, 0]], dtype=torch.int32)}, r"\[0, 1\] is 9: key has 6"),
    "a block below": ({"block_table": torch.tensor([[0, 1], [-1, 0]], dtype=torch.int32)}, r"\[1, 0\] is -1"),
    "wide block numbers": ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "expected int32"),
    "too few requests": ({"block_table": torch.zeros(1, 2, dtype=torch.int32)}, "2 requests but there are keys for 1"),
    "too long": ({"seqused_k": torch.tensor([49, 3])}, "room for"),
    "no lengths": ({"seqused_k": None}, "seqused_k"),
    "fractions": ({"seqused_k": torch.tensor([20.0, 3.0])}, "whole numbers"),
    "falling": ({"cu_seq_q": torch.tensor([0, 5, 4])}, "rise from 0 to the 4 tokens"),
    "shared heads": ({"enable_gqa": False}, "enable_gqa=True"),
    "pages of 8": ({"key": torch.zeros(6, 8, 2, 16), "value": torch.zeros(6, 8, 2, 16)}, "multiple of 16"),
    "no pages": ({"key": torch.zeros(96, 2, 16)}, "expected .blocks, page"),
    "other values": ({"value": torch.zeros(6, 16, 1, 16)}, "all but their widths"),
    "other dtypes": ({"value": torch.zeros(6, 16, 2, 16).half()}, "one dtype"),
    "a window": ({"window_size": (-2, 0)}, "window_size is"),
    "another statistic": ({"image": (2, 2)}, "unknown statistic `image`"),
    "too many": ({"top": 2**45}, "are free"),
    "gradients": ({"query": torch.zeros(4, 4, 16, requires_grad=True)}, "requires grad"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str):
    batch, (change, words) = Batch([(1, 20), (3, 3)]), WRONG[name]
    arguments = {"query": batch.query, "key": batch.key, "value": batch.value, **batch.where} | change
    with pytest.raises(ClearheadError, match=words):
        varlen_attn(**arguments)
