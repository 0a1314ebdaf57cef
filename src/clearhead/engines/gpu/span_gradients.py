"""The gradient of the table of spans: dS, recomputed as in gradients.py, summed over the pairs of labels.

A program owns a tile of queries and sums dS over the keys of each label, a product with ones and zeros; `pool` in
columns.py then sums over the queries of each label. Each result has one writer and no atomics.
"""

import triton
import triton.language as tl

from clearhead.engines.gpu.gradients import slopes
from clearhead.engines.gpu.inputs import held, of_keys, of_queries
from clearhead.engines.gpu.rules import any_seen, key_range, mixed, placed


@triton.jit
def spans(q, q_strides, k, k_strides, v, v_strides, o_strides, d_k, d_v, rules, loss, change, along, steps, out, first,
          count, within, per_key, per_value, M: tl.constexpr, N: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
          D: tl.constexpr, FLOAT: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Σ_j dS_ij over the keys of each of `count` labels from `first` on, into out (batch, heads, queries, count).

    Program (tile of queries × batch · heads). `within` holds the first and the end of the keys that have such a label.
    """
    own_tile, head = placed(tl.cdiv(rules.queries, M))
    b, h = head // rules.heads, head % rules.heads
    i = own_tile * M + tl.arange(0, M)
    own = of_queries(q, q_strides, loss.output, o_strides, along, steps, b, h)
    mine = held(own, loss.output, along.q, along.output, i, rules.queries, d_k, d_v, DK, DV, CHUNK)
    keys = of_keys(k, k_strides, v, v_strides, along, steps, b, h, per_key, per_value)
    low, _, _, high = key_range(rules, b, own_tile * M, own_tile * M + M - 1, N, M)
    low, high = tl.maximum(low, within[0] // N * N), tl.minimum(high, within[1])
    e = tl.arange(0, D)
    total = tl.zeros((D, M), FLOAT)
    for start in range(low, high, N):
        j = start + tl.arange(0, N)
        if any_seen(rules, b, h, i[None, :], j[:, None], start, N):
            block = held(keys, loss.output, along.k, along.v, j, rules.keys, d_k, d_v, DK, DV, CHUNK)
            tile = slopes(block, mine, loss, change, along, rules, b, h, i, j, d_k, d_v, True, True,
                          FLOAT, CHUNK, PRECISION)  # fmt: skip
            labels = tl.load(rules.key_spans + b.to(tl.int64) * rules.keys + j, mask=j < rules.keys, other=-1)
            chosen = labels[None, :] == first + e[:, None]
            total = mixed(total, chosen.to(FLOAT), chosen, tile.by_logit, True, PRECISION)
    place = out + (head.to(tl.int64) * rules.queries + i)[None, :] * count + e[:, None]
    tl.store(place, total, mask=(i < rules.queries)[None, :] & (e < count)[:, None])
