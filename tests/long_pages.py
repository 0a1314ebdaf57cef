"""Small long pages for the tests: a text in word pieces, matrices, and the page of two layers."""

import numpy as np

import clearhead as ch
from clearhead.view import long, page

TEXT = (
    *("the", "cat", "sat", "un|believ|ably", "still", "on", "the", "mat", "and", "looked", "at", "猫", "and", "then"),
    *("it", "rained", "all", "day", "out|side"),
)
TOKENS = [part if place else f" {part}" for word in TEXT for place, part in enumerate(word.split("|"))]
B, H, KV, D = 2, 4, 2, 6


def matrix(n, m=None, heads=H, kv=KV, d=D, dtype=np.float32, seed=1, **rules):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((1, heads, n, d)).astype(dtype), rng.standard_normal((1, kv, m or n, d)).astype(dtype)
    return ch.AttentionMatrix(q, k, **rules)


def document_of(part, tokens=None, **wish):
    run = long.ShownRun("run", [long.ShownLayer("0", range(part.shape[1]), part.part(0))], tokens)
    return long.document([run], **wish)


def two_layers():
    """Two layers of 4 heads on a text of 24 tokens."""
    return [matrix(len(TOKENS), seed=seed, causal=True) for seed in (1, 2)]


def long_page(document):
    return page.encoded(document)


def end_of(weights):
    """Where the colour scale ends: the second largest of ten rows' largest weights, without row 0."""
    peaks = sorted(float(row.max()) for row in weights[1:] if np.isfinite(row).all() and row.max() > 0)
    return peaks[len(peaks) - 1 - len(peaks) // 10]
