"""Captions: a head built to do something is called that, its number is the mean weight, and even weights are exact."""

import re

import numpy as np
import pytest

import clearhead as ch
from clearhead.core import visibility
from clearhead.view.captions import KINDS, captions
from clearhead.view.head_summary import even_heads, summarise_heads
from seeds import fresh

HEADS, KV_HEADS, N, D_K = 4, 2, 23, 8


def captioned(logits, **rules):
    """The caption of the head with these logits, (n, n), and its weights in float64."""
    n = len(logits)
    matrix = ch.AttentionMatrix(logits[None, None], np.eye(n)[None, None], scale=1.0, **rules)
    seen = summarise_heads(matrix, matrix.observe(logsumexp=True))
    return captions(seen, even_heads(matrix))[0], np.asarray(matrix[0, 0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kind", "offset", "en", "zh"),
    [
        ("previous", -1, r"previous-token head, ([\d.]+)% on the token before",
         r"前一词元头，([\d.]+)% 的权重在前一个词元上"),
        ("diagonal", 0, r"self head, ([\d.]+)% on the token itself", r"关注自身的头，([\d.]+)% 的权重在词元自身上"),
        ("sink", None, r"sink head, ([\d.]+)% on the first token", r"汇聚头（sink），([\d.]+)% 的权重在第一个词元上"),
    ],
)  # fmt: skip
def test_a_head_that_looks_at_one_place_is_called_after_it(causal, kind, offset, en, zh):
    rng = fresh()
    n = int(rng.integers(12, 60))
    rows = np.arange(n)
    target = np.zeros(n, int) if offset is None else np.maximum(rows + offset, 0)
    logits = rng.standard_normal((n, n)) * 0.3
    logits[rows, target] += rng.uniform(np.log(5 * n), 8)  # 5n against some n others: most of the weight
    caption, weights = captioned(logits, causal=causal)
    first = 1 if offset == -1 else 0
    share = 100 * weights[rows, target][first:].mean()
    assert caption.kind == kind
    assert 0.25 < caption.clearness <= 1
    for language, pattern in (("en", en), ("zh", zh)):
        said = re.fullmatch(pattern, caption.said[language])
        assert said, caption.said
        assert abs(float(said[1]) - share) <= 0.5001


@pytest.mark.parametrize("causal", [True, False])
def test_a_head_that_looks_nearby_is_local_another_broad(causal):
    rng = fresh()
    n = int(rng.integers(80, 120))
    distance = abs(np.subtract.outer(np.arange(n), np.arange(n)))
    near, weights = captioned(-1.0 * distance - 9.0 * (distance < 2) + 0.1 * rng.standard_normal((n, n)), causal=causal)
    assert near.kind == "local"
    said = re.fullmatch(r"local head, mean distance ([\d.]+) tokens", near.said["en"])
    assert abs(float(said[1]) - (weights * distance).sum(1).mean()) <= 0.0501
    broad, weights = captioned(0.3 * rng.standard_normal((n, n)), causal=causal)
    assert (broad.kind, broad.clearness) == ("broad", 0.0)
    visible = weights[weights > 0]
    entropy = -(visible * np.log(visible)).sum() / n
    said = re.search(r"entropy ([\d.]+) of ([\d.]+) nats", broad.said["en"])
    assert abs(float(said[1]) - entropy) <= 0.0501
    assert float(said[2]) >= float(said[1])
    far = np.where(rng.permuted(np.eye(n, dtype=bool)[::-1], axis=1), 9.0, 0.0)  # one key anywhere: none of these
    mixed, weights = captioned(far, causal=False)
    assert (mixed.kind, mixed.clearness) == ("mixed", 0.0)
    assert "mixed, " in mixed.said["en"]


def test_in_a_short_text_even_weights_are_no_pattern():
    for n in (2, 3, 4, 8):
        caption, weights = captioned(np.zeros((n, n)), causal=True)
        assert weights[:, 0].mean() >= 0.25  # which in a long text would be a sink
        assert caption.kind == "broad"
    assert captioned(np.zeros((1, 1)))[0] is None


@pytest.mark.parametrize(
    ("kind", "even", "edge"),
    [("previous", 0.1, 0.5), ("previous", 0.4, 0.55), ("diagonal", 0.1, 0.5), ("diagonal", 0.4, 0.55),
     ("sink", 0.01, 0.25), ("sink", 0.1, 0.28), ("local", 10.0, 2.5), ("broad", 10.0, 9.0)],
)  # fmt: skip
def test_a_kinds_condition_is_where_the_docstring_says(kind, even, edge):
    assert [KINDS[kind][1](edge + by, even) for by in (-1e-9, 1e-9)] == [kind == "local", kind != "local"]


def test_unknown_statistics_have_no_caption_cross_attention_has():
    names = ("sink", "previous", "diagonal", "distance", "entropy")
    unknown = {name: [np.nan, np.nan] for name in names}
    even = dict(zip(names, ([0.1], [0.1], [0.1], [5.0], [2.5]), strict=True))
    assert captions(unknown, even) == [None, None]
    q, k = (fresh().standard_normal((1, 2, n, D_K)) for n in (9, 14))
    matrix = ch.AttentionMatrix(4 * q, k)
    seen = summarise_heads(matrix, matrix.observe(logsumexp=True), cross=True)
    for caption in captions(seen, even_heads(matrix, cross=True)):
        assert caption.kind in ("sink", "broad", "mixed")
        assert "nan" not in caption.said["en"].lower()


def spans(rng):
    table = np.where(rng.random((3, 2)) < 0.3, -np.inf, rng.standard_normal((3, 2)))
    return {"spans": (rng.integers(-1, 3, N), rng.integers(-1, 2, N), table)}


RULES = {
    "none": lambda rng: {},
    "causal, alibi, softcap": lambda rng: {"causal": True, "alibi_slopes": rng.random(HEADS), "softcap": 2.0},
    "window": lambda rng: {"window": (int(rng.integers(0, 9)), int(rng.integers(0, 5)))},
    "mask": lambda rng: {"mask": rng.random((2, 1, N, N)) < 0.6},
    "bias": lambda rng: {"bias": np.where(rng.random((1, 1, N, N)) < 0.3, -np.inf, rng.standard_normal((1, 1, N, N)))},
    "lengths, sinks": lambda rng: {"kv_lengths": rng.integers(1, N, 2), "sinks": rng.standard_normal(HEADS)},
    "segments": lambda rng: {"query_segments": rng.integers(0, 3, (2, N)), "kv_segments": rng.integers(0, 3, (2, N))},
    "spans": spans,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("padded", [False, True])
def test_even_weights_are_those_over_the_visible_keys(name, padded):
    rng = fresh()
    rules = RULES[name](rng)
    q, k = (9 * rng.standard_normal((2, heads, N, D_K)) for heads in (HEADS, KV_HEADS))
    matrix = ch.AttentionMatrix(q, k, **rules)
    padding = np.arange(N) >= rng.integers(2, N, (2, 1)) if padded else None
    result = even_heads(matrix, padding)
    visible = visibility.dense(matrix.call.problem)[:, 0].astype(float)
    weights = visible / np.maximum(visible.sum(-1, keepdims=True), 1)
    mask = rules.get("mask")
    first = np.zeros(2, int) if mask is None else mask[:, 0].any(1).argmax(-1)
    i, j = np.indices((N, N))
    real = np.ones((2, N), bool) if padding is None else ~padding
    behind = real & (np.cumsum(real, -1) > 1)
    expected = {
        "sink": (weights[np.arange(2), :, first], real),
        "previous": (np.pad(np.diagonal(weights, -1, 1, 2), ((0, 0), (1, 0))), behind),
        "diagonal": (np.diagonal(weights, 0, 1, 2), real),
        "distance": ((weights * abs(i - j)).sum(-1), real),
        "entropy": (np.log(np.maximum(visible.sum(-1), 1)), real),
    }
    for statistic, (values, which) in expected.items():
        assert result[statistic] == pytest.approx([values[which].mean()], abs=1e-9), statistic
