"""Decoding with a key-value cache equals the full pass, however the tokens are split into calls."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.engines import native
from clearhead.errors import ClearheadError, DtypeError, RuleError, ShapeError
from clearhead.nn import KVCache, MultiHeadAttention
from test_nn import F64, made, normal

close = torch.testing.assert_close
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "rotary": {"rotary": 1e4, "d_k": 4, "softcap": 2.0, "sinks": torch.arange(4.0)},
    "window": {"window": (3, 0)},
    "dropout": {"dropout": 0.5},
}
every_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)


def room(layer: MultiHeadAttention, batch: int = 2, **options: Any) -> KVCache:
    return KVCache(batch, layer.num_kv_heads, layer.d_k, layer.d_k, dtype=F64, **options)


@every_layer
@pytest.mark.parametrize("chunks", [(1,) * 9, (4, 1, 3, 1), (9,), (0, 5, 0, 4)])
def test_decoding_in_pieces_equals_one_full_pass(options: dict[str, Any], chunks: tuple[int, ...]):
    layer, x = made(causal=True, **options), normal(2, 9, 12)
    cache = room(layer, capacity=2)
    parts = [layer(part, cache=cache) for part in x.split(chunks, 1)]
    close(torch.cat(parts, 1), layer(x))
    assert (len(cache), cache.lengths.tolist()) == (9, [9, 9])


@every_layer
@pytest.mark.parametrize("first", [1, 4, 20])
def test_sequences_of_unequal_length(options: dict[str, Any], first: int):
    """Prompts of 3 and 7 tokens, then pieces of which each sequence takes a different number of tokens."""
    layer, x = made(causal=True, **options), normal(2, 12, 12)
    cache, taken = room(layer, capacity=first), torch.tensor([0, 0])
    outputs: list[list[Tensor]] = [[], []]
    for counts in ([3, 7], [2, 0], [1, 1], [0, 3], [4, 1]):
        new = [x[b, place : place + count] for b, (place, count) in enumerate(zip(taken.tolist(), counts, strict=True))]
        piece = torch.nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=7.0)
        output = layer(piece, cache=cache, counts=torch.tensor(counts))
        for b in range(2):
            outputs[b].append(output[b, : counts[b]])
        taken += torch.tensor(counts)
    full = layer(x)
    for b in range(2):
        close(torch.cat(outputs[b]), full[b, : int(taken[b])])
    assert cache.lengths.tolist() == taken.tolist() == [10, 12]


def test_cropping_the_cache():
    layer, x = made(causal=True, rotary=1e4, d_k=4), normal(3, 8, 12)
    cache = room(layer, batch=3)
    layer(x[:, :7], cache=cache)
    cache.crop(6)  # as in speculative decoding, where the last token was not accepted
    close(layer(x[:, 6:], cache=cache), layer(x)[:, 6:])
    cache.crop(torch.tensor([8, 4, 8]))
    assert cache.lengths.tolist() == [8, 4, 8]
    again = layer(x[:, :1], cache=cache)
    close(again[1], layer(torch.cat([x[1:2, :4], x[1:2, :1]], 1))[0, 4:])
    cache.crop(0)
    close(layer(x, cache=cache), layer(x))


def test_the_buffers_are_rarely_reallocated():
    cache, moves, place = KVCache(1, 1, 2, 2, capacity=1), 0, 0
    for step in range(1000):
        keys, _, _ = cache.append(torch.full((1, 1, 1, 2), float(step)), torch.ones(1, 1, 1, 2))
        moves, place = moves + (keys.data_ptr() != place), keys.data_ptr()
    assert moves <= 11
    assert keys.data_ptr() == cache.keys.data_ptr()
    assert torch.equal(keys[0, 0, :, 0], torch.arange(1000.0))


def test_the_cache_keeps_no_autograd_graph():
    layer = made(causal=True)
    cache = room(layer)
    output = layer(normal(2, 3, 12), cache=cache)
    assert not cache.keys.requires_grad
    output.sum().backward()
    assert layer.q_proj.weight.grad is not None


def filled() -> KVCache:
    cache = KVCache(2, 1, 4, 3, capacity=1)
    for _ in range(9):
        cache.append(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 3))
    return cache


ONE = torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 3)
WRONG: dict[str, tuple[Any, type[ClearheadError], str]] = {
    "k": (lambda c: c.append(torch.ones(2, 2, 1, 4), ONE[1]), ShapeError, "k has shape"),
    "v": (lambda c: c.append(ONE[0], torch.ones(2, 1, 2, 3)), ShapeError, r"v has shape .*, new 1 as in k, d 3\)"),
    "dtype": (lambda c: c.append(ONE[0].double(), ONE[1]), DtypeError, "k is torch.float64 but the cache holds"),
    "counts": (lambda c: c.append(*ONE, torch.tensor([2, 0])), RuleError, r"counts is \[2, 0\]"),
    "counts' dtype": (lambda c: c.append(*ONE, torch.tensor([0.5, 1])), RuleError, r"counts is \[0.5, 1.0\]"),
    "counts' shape": (lambda c: c.append(*ONE, torch.ones(3).int()), RuleError, "counts is"),
    "length": (lambda c: c.crop(-1), RuleError, "length is"),
}


@pytest.mark.parametrize(("call", "error", "words"), WRONG.values(), ids=WRONG)
def test_a_refused_call_leaves_the_cache_unchanged(call: Any, error: type[ClearheadError], words: str):
    cache = filled()
    before = cache.keys.clone(), cache.values.clone(), cache.lengths
    with pytest.raises(error, match=f"^{words}"):
        call(cache)
    after = cache.keys, cache.values, cache.lengths
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["batch", "kv_heads", "d_k", "d_v", "capacity"])
def test_invalid_sizes_are_refused(name: str):
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 2, "d_k": 3, "d_v": 4}
    for value in (0, 1.5, True, "a"):
        with pytest.raises(RuleError, match=f"^{name} is .*: expected a whole number from 1 up"):
            KVCache(**{**sizes, name: value})
    with pytest.raises(DtypeError, match=r"^dtype is torch.int32: expected"):
        KVCache(**sizes, dtype=torch.int32)
    assert KVCache(**{**sizes, name: np.int64(2)}).keys.ndim == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3])
def test_attention_over_a_cache_has_the_bits_of_the_full_pass(dtype: torch.dtype, count: int):
    q, k, v = (normal(2, 4, 40, 16, seed=seed).to(dtype) for seed in range(3))
    cache, full = KVCache(2, 4, 16, 16, dtype=dtype, capacity=1), ch.attention(q, k, v, causal=True)
    for new, more, also, truth in zip(*(x.split(count, 2) for x in (q, k, v, full)), strict=True):
        keys, values, rules = cache.append(more, also)
        assert torch.equal(ch.attention(new, keys, values, causal=True, **rules), truth)


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary": 1e4},
    "grouped": {"rotary": 500.0, "num_kv_heads": 2},
    "window, softcap": {"rotary": 1e4, "window": (5, 0), "softcap": 3.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.gate)])
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_a_step_in_one_call_has_the_bits_of_the_long_way(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """Long enough that the turns of several blocks of positions are used."""
    layer = MultiHeadAttention(24, 4, causal=True, dtype=dtype, **{"d_k": 6, **options}).eval()
    x, taken, step = normal(2, 150, 24).to(dtype), [], native.step
    monkeypatch.setattr(native, "step", lambda *inputs: taken.append(step(*inputs)) or taken[-1])
    outputs, caches = [], []
    for engine in ("", "native"):  # one that is named goes the long way
        monkeypatch.setenv("CLEARHEAD_ENGINE", engine) if engine else monkeypatch.delenv("CLEARHEAD_ENGINE", False)
        taken.clear()
        cache = KVCache(2, layer.num_kv_heads, layer.d_k, layer.d_k, dtype=dtype, capacity=3)
        with torch.no_grad():
            outputs.append(torch.cat([layer(part, cache=cache) for part in x.split((40, *(1,) * 110), 1)], 1))
        caches.append(cache)
        natively = sum(output is not None for output in taken)
        if engine or (dtype == torch.bfloat16 and layer.turns is not None):
            assert natively == 0
        elif "window" not in options:
            assert natively > 90
    assert torch.equal(*outputs)
    used = slice(0, len(caches[0]))
    assert torch.equal(caches[0].keys[:, :, used], caches[1].keys[:, :, used])
    assert torch.equal(caches[0].values[:, :, used], caches[1].values[:, :, used])


def test_a_step_tells_autograd_that_it_wrote_to_the_cache():
    layer, x = MultiHeadAttention(8, 2, causal=True, rotary=1e4), torch.randn(1, 6, 8)
    cache, weight = KVCache(1, 2, 4, 4), torch.ones(4, requires_grad=True)
    with torch.no_grad():
        for place in range(6):
            layer(x[:, place : place + 1], cache=cache)
    read = (cache.keys[:, :, :6] * weight).sum()
    cache.crop(3)
    with torch.no_grad():
        for _ in range(3):
            layer(x[:, :1], cache=cache)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        read.backward()


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    layer, x = MultiHeadAttention(8, 2, causal=True, rotary=1e4), torch.randn(1, 6, 8)
    cache = KVCache(1, 2, 4, 4)
    with torch.no_grad():
        for place in range(3):
            layer(x[:, place : place + 1], cache=cache)
        before = cache.keys.clone()
        for error, tokens, rules in (
            (ShapeError, x[:, :1].expand(2, 1, 8), {}),
            (RuleError, x[:, :1], {"query_offset": 7}),
            (RuleError, x[:, 3:], {"kv_lengths": 3}),
            (ShapeError, x[:, 3:], {"mask": torch.ones(5, 5, dtype=torch.bool)}),
        ):
            with pytest.raises(error):
                layer(tokens, cache=cache, **rules)
        assert cache.step(*(torch.randn(1, 2, 1, 4) for _ in range(3)), {"query_offset": 7}) is None
        assert (len(cache), torch.equal(cache.keys[:, :, :3], before[:, :, :3])) == (3, True)
        close(layer(x[:, 3:], cache=cache), layer(x)[:, 3:], rtol=1e-5, atol=1e-6)


@pytest.mark.gate
@pytest.mark.parametrize("rotary", [1e4, pytest.param(None, marks=pytest.mark.long)])
def test_decoding_compiles_twice_at_most_and_in_one_graph(rotary: float | None):
    """The lengths are numbers that the compiler leaves open: it does not compile each step anew."""
    layer, x = MultiHeadAttention(12, 3, causal=True, rotary=rotary).eval(), torch.randn(2, 12, 12)
    cache = KVCache(2, 3, 4, 4)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        result = torch.cat([compiled(part, cache=cache) for part in x.split(1, 1)], 1)
        close(result, layer(x), rtol=1e-5, atol=1e-6)
