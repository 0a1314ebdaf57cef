"""The rule `spans`: the bits of a dense bias made by indexing, sums of its derivative, and blocks that it forbids."""

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead import nn
from clearhead.core import definition
from clearhead.errors import RuleError
from seeds import fresh

BATCH, HEADS, QUERIES, KEYS, ROWS, COLUMNS = 2, 4, 7, 9, 3, 5
F64 = torch.float64


def drawn(lead: tuple[int, ...] = ()) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """q, k, v and spans; some tokens have no label, some pairs are forbidden."""
    rng = fresh()
    sizes = ((HEADS, QUERIES), (2, KEYS), (2, KEYS))
    arrays = [torch.from_numpy(rng.standard_normal((BATCH, heads, length, 6))) for heads, length in sizes]
    ours, theirs = rng.integers(-1, ROWS, (BATCH, QUERIES)), rng.integers(-1, COLUMNS, KEYS)
    table = rng.standard_normal((*lead, ROWS, COLUMNS))
    table[..., 0, 1] = -np.inf
    return arrays, (torch.from_numpy(ours), torch.from_numpy(theirs), torch.from_numpy(table))


def test_derivatives_are_summed_in_float64():
    """One number for 40,000 pairs, of derivatives near 1 and their differences near 1e-4."""
    q, k = (torch.zeros(1, 1, n, 1) for n in (200, 200))
    v = torch.from_numpy(fresh().standard_normal((1, 1, 200, 1)).astype(np.float32))
    labels = torch.arange(200) % 2
    table = torch.zeros(2, 2, requires_grad=True)
    ch.attention(q, k, v, spans=(labels, labels, table)).sum().backward()
    shares = v.double().reshape(100, 2).sum(0) / 200
    by_key = 100 * (shares - v.double().mean() / 2)
    assert table.grad is not None
    torch.testing.assert_close(table.grad.double(), by_key.expand(2, 2), rtol=1e-5, atol=2e-6)


def test_forbidden_keys_cost_no_arithmetic(monkeypatch: pytest.MonkeyPatch):
    """Two documents of 512 tokens: each query is multiplied by the keys of its document alone."""
    weights, whole = [], definition.product
    monkeypatch.setattr(definition, "product", lambda a, b: weights.append(a.shape[-2] * b.shape[-1]) or whole(a, b))
    q = fresh().standard_normal((1024, 4))
    documents = np.repeat([0, 1], 512)
    table = np.where(np.eye(2, dtype=bool), 0.0, -np.inf)
    matrix = ch.AttentionMatrix(q, q, spans=(documents, documents, table), engine="portable")
    matrix.logsumexp()
    assert sum(weights) == 2 * 512 * 512
    matrix.received()
    assert sum(weights) == 4 * 512 * 512


def test_mapped_tables():
    arrays, (ours, theirs, table) = drawn((3, HEADS))
    one = lambda table: ch.attention(*arrays, spans=(ours, theirs, table))  # noqa: E731
    slopes = torch.func.grad(lambda table: one(table).sum())
    torch.testing.assert_close(torch.func.vmap(one)(table), torch.stack([one(part) for part in table]))
    torch.testing.assert_close(torch.func.vmap(slopes)(table), torch.stack([slopes(part) for part in table]))


@pytest.mark.parametrize("chunks", [(4, 1, 1, 1), (1,) * 7, (7,)])
def test_decoding_with_labels_of_cached_keys_is_the_full_pass(chunks: tuple[int, ...]):
    layer = nn.MultiHeadAttention(8, 4, num_kv_heads=2, dtype=F64, causal=True)
    x = torch.from_numpy(fresh().standard_normal((BATCH, QUERIES, 8)))
    labels = torch.from_numpy(fresh().integers(-1, ROWS, (BATCH, QUERIES)))
    table = torch.from_numpy(fresh().standard_normal((4, ROWS, ROWS)))
    table[:, 0, 1] = -torch.inf
    whole, weights = layer(x, spans=(labels, labels, table), need_weights=True, average_weights=False)
    cache, parts, start = nn.KVCache(BATCH, 2, 2, 2, dtype=F64), [], 0
    for count in chunks:
        stop = start + count
        here = labels[:, start:stop], labels[:, :stop], table
        output, local = layer(x[:, start:stop], cache=cache, spans=here, need_weights=True, average_weights=False)
        torch.testing.assert_close(local, weights[:, :, start:stop, :stop])
        parts.append(output)
        start = stop
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)


def test_a_scale_for_each_head_is_data_without_a_derivative():
    (q, k, v), _ = drawn()
    scale = torch.from_numpy(fresh().standard_normal(HEADS))
    expected = ch.attention(q * scale[:, None, None], k, v, scale=1.0)
    q.requires_grad_()
    result = ch.attention(q, k, v, scale=scale)
    torch.testing.assert_close(result.detach(), expected, rtol=1e-11, atol=1e-12)
    with pytest.raises(RuleError, match=r"^scale requires grad, and has no derivative here") as error:
        ch.attention(q, k, v, scale=scale.requires_grad_())
    assert "q * scale[:, None, None]" in str(error.value)
    with pytest.raises(RuleError, match=r"^scale requires grad"):
        torch.func.grad(lambda scale: ch.attention(q, k, v, scale=scale).sum())(scale.detach())
