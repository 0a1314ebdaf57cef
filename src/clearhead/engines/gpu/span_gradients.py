"""The gradient of the table of spans: dS, recomputed as in gradients.py, summed over the pairs of labels.

A program owns a tile of queries and sums dS over the keys of each label, a product with ones and zeros; `pool` in
columns.py then sums over the queries of each label. Each result has one writer and no atomics.
"""

import triton
import triton.language as tl

from clearhead.engines.gpu.gradients import load_queries, load_rows, slopes
from clearhead.engines.gpu.rules import any_seen, key_range, mixed, placed, product


@triton.jit
def spans(
    q,
    q_strides,
    k,
    k_strides,
    v,
    v_strides,
    o_strides,
    d_k,
    d_v,
    rules,
    loss,
    out,
    first,
    count,
    within,
    per_key,
    per_value,
    M: tl.constexpr,
    N: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    D: tl.constexpr,
    FLOAT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ_j dS_ij over the keys of each of `count` labels from `first` on, into out (batch, heads, queries, count).

    Program (tile of queries × batch · heads). `within` holds the first and the end of the keys that have such a label.
    """
    tile, head = placed(tl.cdiv(rules.queries, M))
    b, h = head // rules.heads, head % rules.heads
    i = tile * M + tl.arange(0, M)
    mine, given, keys, values = load_queries(q, q_strides, k, k_strides, v, v_strides, o_strides, d_k, d_v, rules, loss,
                                             b, h, i, per_key, per_value, DK, DV)  # fmt: skip
    low, _, _, high = key_range(rules, b, tile * M, tile * M + M - 1, N, M)
    low, high = tl.maximum(low, within[0] // N * N), tl.minimum(high, within[1])
    e = tl.arange(0, D)
    total = tl.zeros((D, M), FLOAT)
    for start in range(low, high, N):
        j = start + tl.arange(0, N)
        if any_seen(rules, b, h, i[None, :], j[:, None], start, N):
            block = load_rows(keys, k_strides[2], k_strides[3], d_k, j, rules.keys, DK)
            scores = product(block, tl.trans(mine), PRECISION)
            inner = tl.zeros_like(scores)
            if loss.output is not None:
                block = load_rows(values, v_strides[2], v_strides[3], d_v, j, rules.keys, DV)
                inner = product(block, tl.trans(given), PRECISION)
            by_logit = slopes(scores, inner, loss, rules, b, h, i[None, :], j[:, None], True)[1]
            labels = tl.load(rules.key_spans + b.to(tl.int64) * rules.keys + j, mask=j < rules.keys, other=-1)
            chosen = labels[None, :] == first + e[:, None]
            total = mixed(total, chosen.to(FLOAT), chosen, by_logit, True, PRECISION)
    place = out + (head.to(tl.int64) * rules.queries + i)[None, :] * count + e[:, None]
    tl.store(place, total, mask=(i < rules.queries)[None, :] & (e < count)[:, None])
