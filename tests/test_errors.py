"""The exact error texts for bad arrays and rules: the argument, its shape in named axes, what was expected."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import engines
from clearhead.core import call as core_call
from clearhead.errors import DtypeError, EngineError, RuleError, shown, unknown
from clearhead.torch import scaled_dot_product_attention
from error_texts import Errors, exact_texts

Q, K, V = np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)), np.ones((2, 2, 5, 3))
FLAT = np.ones((3, 4))
SEGMENT = np.zeros((2, 6), int)


def attention(q: Any = Q, k: Any = K, v: Any = V, **rules: Any) -> Callable[[], Any]:
    return lambda: ch.attention(q, k, v, **rules)


def flat(**rules: Any) -> Callable[[], Any]:
    return lambda: ch.attention(FLAT, FLAT, FLAT, **rules)


HEADS = "q is (batch 2, heads 4, queries 6, d_k 8). If yours is (batch, length, heads, d), swap axes 1 and 2."
ARRAYS: Errors = {
    TypeError: {
        "q is a list: expected a NumPy array, a PyTorch tensor or an array that speaks DLPack.\n\n"
        "hint: np.asarray(q, dtype=np.float64) makes one from numbers in a list.": attention(q=[[1.0]]),
        "v is on device meta: no engine here runs there.\n\nhint: v.cpu() moves it.": attention(
            v=torch.ones(2, 2, device="meta")
        ),
        "v requires grad, and this call has no derivative.\n\n"
        "hint: v.detach(), or `with torch.no_grad():` around the call.": attention(
            v=torch.ones(2, 2, 5, 3, requires_grad=True)
        ),
        "k is of layout torch.sparse_coo: expected a dense tensor of numbers.\n\n"
        "hint: to_dense(), dequantize(), get_data() and full_tensor() make one; "
        "pad a nested one, and give kv_lengths.": attention(k=torch.ones(2, 2).to_sparse()),
        "q is int64: expected float64, float32, bfloat16 or float16.\n\n"
        "hint: q.astype(np.float32), or q.float() for a tensor.": attention(q=Q.astype(int)),
        "v is float32 but q is float64: q, k and v must have one dtype.\n\n"
        "hint: v.astype(q.dtype), or v.to(q.dtype) for a tensor.": attention(v=V.astype(np.float32)),
    },
    ValueError: {
        "q has shape (8,): expected at least two axes, (queries, d_k).\n\n"
        "hint: q[None, :] makes one row of a vector.": attention(q=np.ones(8)),
        "k is (keys 3, d_k 4) but q is (batch 2, heads 4, queries 6, d_k 8): "
        "all need the same number of axes.": attention(k=FLAT),
        "q has d_k 8 but k has d_k 5: the last axes must agree for q·kᵀ.\n\nhint: "
        "q is (batch 2, heads 4, queries 6, d_k 8) and k is (batch 2, kv_heads 2, keys 5, d_k 5).": attention(
            k=K[..., :5]
        ),
        "v has 4 keys but k has 5: each key needs its value.\n\nhint: "
        "k is (batch 2, kv_heads 2, keys 5, d_k 8) and v is (batch 2, kv_heads 2, keys 4, d_v 3).": attention(
            v=V[:, :, :4]
        ),
        f"k has 3 heads but q has 4: query heads must be a multiple of key heads.\n\nhint: {HEADS}": attention(
            k=np.ones((2, 3, 5, 8)), v=np.ones((2, 3, 5, 3))
        ),
        f"v has 1 heads but k has 2: each key head needs its value head.\n\nhint: {HEADS}": attention(v=V[:, :1]),
    },
}
TABLE = np.zeros((3, 2))
SPANS = "hint: spans=(query_spans, key_spans, table): a label per query, a label per key, "
SPANS += "and what each pair of labels adds."
WINDOW = ": expected (left, right), each a whole number of keys from 0 up, or None.\n\n"
WINDOW += "hint: window=(255, 0) sees the last 256 keys, itself included."
LEAVE_SCALE = "hint: leave scale out for its default."
RULES: Errors = {
    TypeError: {
        "unknown rule `casual`.\n\nhint: did you mean `causal`? Known: alibi_slopes, bias, causal, kv_lengths, "
        "kv_segments, mask, query_lengths, query_offset, query_segments, "
        "scale, sinks, softcap, spans, window.": attention(casual=True),
        "mask is float64: expected bool, True = may attend.\n\n"
        "hint: numbers to add to the scores go in `bias`; mask != 0 makes 1/0 a mask.": attention(mask=np.ones((6, 5))),
        "bias is bool: expected a float dtype.\n\nhint: True/False per position goes in `mask`.": attention(
            bias=np.ones((6, 5), bool)
        ),
        "spans[2] is bool: expected numbers.\n\nhint: spans[2].astype(np.float32)": attention(
            spans=([0] * 6, [0] * 5, TABLE > 0)
        ),
        f"unknown engine `warp`.\n\nhint: Known: {', '.join(sorted(engines.NAMES))}.": attention(engine="warp"),
    },
    ValueError: {
        "scale is 'big': expected a number.": attention(scale="big"),
        f"scale is inf: expected a finite number.\n\n{LEAVE_SCALE}": attention(scale=np.inf),
        "softcap is 0.0: expected a positive number c, for c·tanh(s/c).\n\nhint: softcap=None turns it off.": attention(
            softcap=0
        ),
        "causal is 1: expected True or False.": attention(causal=1),
        f"window is 3{WINDOW}": flat(window=3),
        "causal and window need query_offset when queries (6) and keys (5) differ: peers disagree about it.\n\n"
        "hint: query_offset=0 aligns the first query with the first key (PyTorch, JAX); query_offset=-1 aligns "
        "the last query with the last key (FlashAttention, a key-value cache).": attention(causal=True),
        "query_offset is 1152921504606846976: expected positions between -2^53 and 2^53.": flat(query_offset=2**60),
        "mask has shape (2, 5), which does not broadcast to (batch 2, heads 4, queries 6, keys 5).\n\n"
        "hint: one mask per batch is mask[:, None, None, :] for keys alone.": attention(mask=np.ones((2, 5), bool)),
        "mask has shape (2, 6, 5), which does not broadcast to (batch 2, heads 4, queries 6, keys 5).\n\n"
        "hint: one mask per batch is mask[:, None].": attention(mask=np.ones((2, 6, 5), bool)),
        "alibi_slopes has shape (2,): expected one number per query head, (heads 4,).": attention(
            alibi_slopes=[0.5, 0.5]
        ),
        "kv_lengths is [5, 6]: each must lie between 0 and the number of keys, 5.": attention(kv_lengths=[5, 6]),
        "kv_lengths has shape (3,): expected (batch 2).": attention(kv_lengths=[1, 2, 3]),
        "query_segments is given but kv_segments is not: a segment needs both sides.\n\n"
        "hint: kv_segments=query_segments?": attention(query_segments=SEGMENT),
        "spans[1] has shape (6,): expected (batch 2, keys 5).": attention(spans=([0] * 6, [0] * 6, TABLE)),
        "spans[0] goes up to 3: the table has query_spans 3, so each must be below 3.\n\n"
        "hint: a label below 0 adds nothing.": attention(spans=([0, 1, 2, 3, 2, 1], [0] * 5, TABLE)),
        f"spans[2] has shape (2,): expected (query_spans, key_spans), or one per head.\n\n{SPANS}": attention(
            spans=([0] * 6, [0] * 5, TABLE[0])
        ),
        "spans[2] holds NaN or +inf: expected finite numbers, or -inf, which forbids.": attention(
            spans=([0] * 6, [0] * 5, TABLE * np.nan)
        ),
    },
}


test_each_error_has_its_exact_text = exact_texts(ARRAYS, RULES)


def test_the_environment_names_an_engine_or_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLEARHEAD_ENGINE", "warp")
    for call in (flat(), lambda: ch.plan(FLAT, FLAT), lambda: ch.AttentionMatrix(FLAT, FLAT)):
        with pytest.raises(TypeError, match=r"^unknown engine `warp`\."):
            call()
    monkeypatch.setenv("CLEARHEAD_ENGINE", "portable")
    assert ch.plan(FLAT, FLAT).engine == "portable"


def test_an_engine_that_refuses_gives_all_its_reasons(monkeypatch: pytest.MonkeyPatch):
    for engine in engines.NAMES:
        monkeypatch.setattr(engines.get(engine), "reasons_not", lambda problem: ["No bias.", "No sinks."])
    monkeypatch.setattr(core_call, "_problems", {})  # another test may have made such a call
    for name in (None, *engines.NAMES):
        with pytest.raises(EngineError) as error:
            ch.attention(FLAT, FLAT, FLAT, engine=name)
        for engine in engines.NAMES if name is None else (name,):
            assert f"{engine}: No bias. No sinks." in str(error.value)


def test_values_left_out_of_a_known_problem_are_refused():
    q = np.ones((3, 7))
    assert ch.AttentionMatrix(q, q).shape == (3, 3)  # its problem, without values, is kept
    with pytest.raises(DtypeError, match=r"^v is a NoneType"):
        ch.attention(q, q, None)
    x = torch.ones(3, 7)
    assert ch.AttentionMatrix(x, x).shape == (3, 3)
    with pytest.raises(DtypeError, match=r"^value is a NoneType"):
        scaled_dot_product_attention(x, x, None)


def test_a_plan_prints_its_reasons():
    plan = engines.Plan("slow", {"fast": ["No bias.", "No sinks."]})
    assert str(plan) == "engine: slow\nnot fast: No bias.\nnot fast: No sinks."
    chosen = ch.plan(FLAT, FLAT, FLAT)
    assert list(chosen.reasons) == list(engines.NAMES[: engines.NAMES.index(chosen.engine)])


def test_the_one_line_form_keeps_every_word():
    error = unknown("rule", "masc", ["mask", "bias"])
    assert error.one_line() == "unknown rule `masc`. hint: did you mean `mask`? Known: bias, mask."
    assert RuleError("scale is\n  nan.").one_line() == "scale is nan."


def test_anything_can_be_shown():
    endless: list[Any] = []
    enormous = np.broadcast_to(np.float32(1), (2, 4, 2**40, 8))
    endless.append(endless)
    lazy = torch.nn.LazyLinear(3).weight
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    meta = torch.ones(3, device="meta")
    for value in (lazy, nested, meta, endless, itertools.repeat(1), [0] * 10**7, "x" * 10**7, enormous):
        assert 0 < len(shown(value)) <= 160
    with pytest.raises(DtypeError, match="has no shape yet"):
        ch.attention(lazy, np.eye(3), np.eye(3))
