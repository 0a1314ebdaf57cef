"""Mistakes with rules: masks, caches, biases, groups, rotary positions, layers; as unlisted.py, in plain NumPy."""

from typing import Any

import numpy as np

from benchmarks.unlisted import Array, Case, Code, put, scores, softmax, swapped


def offset(c: Case) -> int:
    return int(c.rules.get("query_offset", 0))


def rows(c: Case) -> Array:
    return np.arange(c.n)[:, None] + offset(c)


def keys(c: Case) -> Array:
    return np.arange(c.m)


def seen(c: Case, *, lengths: Any = None, mask: Any = None) -> Array:
    """What the rules allow, bool (batch, heads, queries, keys) or smaller; with other lengths or another mask."""
    allowed = np.ones((1, 1, c.n, c.m), bool)
    if c.rules.get("causal"):
        allowed = allowed & (keys(c) <= rows(c))
    if "window" in c.rules:
        left, right = c.rules["window"]
        allowed = allowed & (keys(c) >= rows(c) - left) & (keys(c) <= rows(c) + right)
    mask = c.rules.get("mask") if mask is None else mask
    allowed = allowed if mask is None else allowed & mask
    lengths = c.rules.get("kv_lengths") if lengths is None else lengths
    allowed = allowed if lengths is None else allowed & (keys(c) < np.asarray(lengths)[:, None, None, None])
    if "query_segments" in c.rules:
        of_queries, of_keys = c.rules["query_segments"], c.rules["kv_segments"]
        allowed = allowed & (of_queries[:, None, :, None] == of_keys[:, None, None, :])
    return allowed


def over(c: Case, allowed: Any = None, s: Any = None, v: Any = None) -> Array:
    """The output with other keys allowed, other scores or other values."""
    allowed = seen(c) if allowed is None else allowed
    return softmax(np.where(allowed, scores(c) if s is None else s, -np.inf)) @ (c.v if v is None else v)


def _again(c: Case, **changed: Any) -> Case:
    return Case(changed.get("q", c.q), changed.get("k", c.k), changed.get("v", c.v), c.rng, c.rules)


def _of(c: Case, **changed: Any) -> Array:
    return over(_again(c, **changed))


def _e(c: Case) -> Array:
    return np.exp(scores(c) - scores(c).max(-1, keepdims=True))


def _blocked(c: Case, size: int = 8) -> tuple[Array, Array]:
    return np.arange(c.n)[:, None] // size, keys(c) // size


CAUSAL: dict[str, Code] = {
    "one ahead": lambda c: over(c, keys(c) <= rows(c) + 1),
    "two ahead": lambda c: over(c, keys(c) <= rows(c) + 2),
    "two behind": lambda c: over(c, keys(c) <= np.maximum(rows(c) - 2, 0)),
    "missing in the last head": lambda c: over(
        c, seen(c) | (np.arange(c.q.shape[1]) == c.q.shape[1] - 1)[:, None, None]
    ),
    "missing in the first batch entry": lambda c: over(c, seen(c) | (np.arange(len(c.q)) == 0)[:, None, None, None]),
    "missing in the second half": lambda c: over(c, seen(c) | (rows(c) >= c.n // 2)),
    "diagonal block unmasked": lambda c: over(c, np.less_equal(*_blocked(c)[::-1])),
    "diagonal block skipped": lambda c: over(c, np.less(*_blocked(c)[::-1])),
    "indices local to the block": lambda c: over(c, (keys(c) % 8 <= rows(c) % 8) & (_blocked(c)[1] <= _blocked(c)[0])),
    "hidden keys in the sum": lambda c: (_e(c) * seen(c) / _e(c).sum(-1, keepdims=True)) @ c.v,
    "tril on the scores": lambda c: softmax(scores(c) * seen(c)) @ c.v,
    "tril on queries and heads": lambda c: over(
        c,
        (np.arange(c.q.shape[1])[:, None, None] >= np.zeros((c.n, 1)))
        & (keys(c) <= rows(c) + np.arange(c.q.shape[1])[:, None, None]),
    ),
    "plus infinity for minus": lambda c: softmax(np.where(seen(c), scores(c), 1e9)) @ c.v,
    "-5 before the scale": lambda c: softmax(scores(c) + np.where(seen(c), 0, -5 / c.d**0.5)) @ c.v,
    "a window as well": lambda c: over(c, seen(c) & (keys(c) > rows(c) - 10)),
    "a prefix of eight for all": lambda c: over(c, seen(c) | (keys(c) < 8)),
    "itself only": lambda c: over(c, keys(c) == rows(c)),
    "itself and the first": lambda c: over(c, (keys(c) == rows(c)) | (keys(c) == 0)),
    "the previous only": lambda c: over(c, keys(c) == np.maximum(rows(c) - 1, 0)),
    "rows reversed": lambda c: over(c, seen(c)[:, :, ::-1]),
    "keys reversed": lambda c: over(c, seen(c)[..., ::-1]),
    "checkerboard": lambda c: over(c, seen(c) & ((keys(c) + rows(c)) % 2 == 0)),
    "the first key dropped": lambda c: over(c, seen(c) & ((keys(c) > 0) | (rows(c) == 0))),
    "strict but for the first": lambda c: over(c, (keys(c) < rows(c)) | (keys(c) + rows(c) == 0)),
    "strict in one head": lambda c: over(
        c, seen(c) & ((np.arange(c.q.shape[1]) > 0)[:, None, None] | (keys(c) < rows(c)))
    ),
    "chunks": lambda c: over(c, seen(c) & np.equal(*_blocked(c, 8))),
    "lengths instead of positions": lambda c: over(c, keys(c) <= np.minimum(rows(c), c.n // 2)),
    "softmax1": lambda c: (lambda e: e / (1 + e.sum(-1, keepdims=True)))(np.exp(scores(c)) * seen(c)) @ c.v,
    "averaged over what came before": lambda c: (seen(c) / seen(c).sum(-1, keepdims=True)) @ c.v,
    "scores divided by the position": lambda c: over(c, s=scores(c) / np.sqrt(rows(c) + 1)),
    "softmax before, then divided by the count": lambda c: (
        (softmax(scores(c)) * seen(c) / seen(c).sum(-1, keepdims=True)) @ c.v
    ),
    "mask ahead and no scale for the last head": lambda c: over(
        c, s=scores(c) * np.where(np.arange(c.q.shape[1]) == 0, c.d**0.5, 1)[:, None, None]
    ),
    "last row wrong": lambda c: put(over(c), np.s_[:, :, -1], over(c)[:, :, -2]),
    "first row zero": lambda c: put(over(c), np.s_[:, :, 0], 0),
    "all NaN": lambda c: np.full(c.q.shape, np.nan),
    "all zero": lambda c: np.zeros(c.q.shape),
}

DECODE: dict[str, Code] = {
    "the cache ignored": lambda c: np.broadcast_to(c.v[:, :, -1:], c.q.shape) * 1,
    "newest key never written": lambda c: _of(c, k=put(c.k, np.s_[:, :, -1], 0)),
    "newest value never written": lambda c: _of(c, v=put(c.v, np.s_[:, :, -1], 0)),
    "newest slot never written": lambda c: _of(c, k=put(c.k, np.s_[:, :, -1], 0), v=put(c.v, np.s_[:, :, -1], 0)),
    "newest slot not read": lambda c: over(c, keys(c) < c.m - 1),
    "newest key twice": lambda c: (
        _of(c, k=np.concatenate([c.k, c.k[:, :, -1:]], 2), v=np.concatenate([c.v, c.v[:, :, -1:]], 2))
        if not c.rules
        else (lambda e: e / e.sum(-1, keepdims=True) @ c.v)(_e(c) * (1 + (keys(c) == c.m - 1)))
    ),
    "newest slot overwrites the one before": lambda c: over(c, keys(c) != c.m - 2),
    "another beam's cache": lambda c: _of(
        c,
        k=put(np.roll(c.k, 1, 0), np.s_[:, :, -1], c.k[:, :, -1]),
        v=put(np.roll(c.v, 1, 0), np.s_[:, :, -1], c.v[:, :, -1]),
    ),
    "another beam's values": lambda c: _of(c, v=np.roll(c.v, 1, 0)),
    "keys shifted by one": lambda c: _of(c, k=np.roll(c.k, 1, 2)),
    "first key dropped": lambda c: over(c, keys(c) > 0),
    "only the last sixteen": lambda c: over(c, keys(c) >= c.m - 16),
    "only the first half": lambda c: over(c, keys(c) < c.m // 2),
    "one key too few at both ends": lambda c: over(c, (keys(c) > 0) & (keys(c) < c.m - 1)),
    "half of the cache stale": lambda c: _of(
        c, k=put(c.k, np.s_[:, :, 20:30], c.rng.standard_normal(c.k[:, :, 20:30].shape))
    ),
    "a length of sixteen too many": lambda c: (
        lambda e: e / (e.sum(-1, keepdims=True) + 16 * np.exp(-scores(c).max(-1, keepdims=True))) @ c.v
    )(_e(c)),
    "no scale, newest not read": lambda c: over(c, keys(c) < c.m - 1, s=scores(c) * c.d**0.5),
    "values shifted": lambda c: _of(c, v=np.roll(c.v, 3, 2)),
    "the next head's cache": lambda c: _of(c, k=np.roll(c.k, 1, 1), v=np.roll(c.v, 1, 1)),
    "splits averaged": lambda c: (_of(_half(c, 0)) + _of(_half(c, 1))) / 2,
    "a split lost": lambda c: _of(_half(c, 1)),
    "softmax1": lambda c: (lambda e: e / (1 + e.sum(-1, keepdims=True)))(np.exp(scores(c))) @ c.v,
    "a sigmoid": lambda c: (1 / (1 + np.exp(-scores(c)))) @ c.v,
    "exp2": lambda c: over(c, s=scores(c) * np.log(2)),
    "queries of the last step": lambda c: _of(c, q=c.rng.standard_normal(c.q.shape)),
    "mean of the cache": lambda c: np.broadcast_to(c.v.mean(2, keepdims=True), c.q.shape) * 1,
    "noise of a hundredth": lambda c: over(c) + 0.01 * c.rng.standard_normal(c.q.shape),
    "residual": lambda c: over(c) + c.q,
    "all zero": lambda c: np.zeros(c.q.shape),
}


def _half(c: Case, which: int) -> Case:
    part = np.s_[:, :, c.m // 2 :] if which else np.s_[:, :, : c.m // 2]
    return Case(c.q, c.k[part], c.v[part], c.rng, {})


def _lengths(c: Case) -> Array:
    return np.asarray(c.rules["kv_lengths"])


PADDING: dict[str, Code] = {
    "one too long": lambda c: over(c, seen(c, lengths=_lengths(c) + 1)),
    "one too short": lambda c: over(c, seen(c, lengths=_lengths(c) - 1)),
    "the shortest for all": lambda c: over(c, keys(c) < _lengths(c).min()),
    "the longest for all": lambda c: over(c, keys(c) < _lengths(c).max()),
    "the other entry's": lambda c: over(c, seen(c, lengths=_lengths(c)[::-1])),
    "left for right": lambda c: over(c, keys(c) >= c.m - _lengths(c)[:, None, None, None]),
    "on values only": lambda c: softmax(scores(c)) @ (c.v * seen(c)[:, :, 0, :, None]),
    "on keys only": lambda c: _of(Case(c.q, c.k * seen(c)[:, :, 0, :, None], c.v, c.rng, {})),
    "on both axes": lambda c: over(c) * seen(c)[:, :, 0, : c.n, None],
    "joined by or": lambda c: over(c, seen(c) | seen(c)[:, :, 0, : c.n, None]),
    "first entry only": lambda c: over(c, seen(c) | (np.arange(len(c.q)) > 0)[:, None, None, None]),
    "on one head only": lambda c: over(c, seen(c) | (np.arange(c.q.shape[1]) > 0)[:, None, None]),
    "as a bonus of one": lambda c: softmax(scores(c) + 2 * seen(c)) @ c.v,
    "half as long": lambda c: over(c, seen(c, lengths=_lengths(c) // 2)),
    "rounded up to eight": lambda c: over(c, seen(c, lengths=-(-_lengths(c) // 8) * 8)),
}

MASK: dict[str, Code] = {
    "the first batch entry's for all": lambda c: over(c, c.rules["mask"][:1]),
    "the first row's for all": lambda c: over(c, c.rules["mask"][:, :, :1]),
    "the last row's for all": lambda c: over(c, c.rules["mask"][:, :, -1:]),
    "shifted by one": lambda c: over(c, np.roll(c.rules["mask"], 1, -1) | np.eye(c.n, c.m, dtype=bool)),
    "rows reversed": lambda c: over(c, c.rules["mask"][:, :, ::-1] | (keys(c) == 0)),
    "or with its transpose": lambda c: over(c, c.rules["mask"] | swapped(c.rules["mask"])),
    "and with causal": lambda c: over(c, c.rules["mask"] & (keys(c) <= rows(c)) | (keys(c) == 0)),
    "batch entries swapped": lambda c: over(c, c.rules["mask"][::-1]),
    "on the values": lambda c: softmax(scores(c)) @ (c.v * c.rules["mask"][:, :, -1, :, None]),
    "plus a million": lambda c: softmax(np.where(c.rules["mask"], scores(c), 1e6)) @ c.v,
    "as a bonus of five": lambda c: softmax(scores(c) + 5 * c.rules["mask"]) @ c.v,
    "only one key hidden": lambda c: over(c, c.rules["mask"] | (keys(c) != 3)),
    "multiplied, sum of all": lambda c: (_e(c) * c.rules["mask"] / _e(c).sum(-1, keepdims=True)) @ c.v,
    "every key beyond 20 seen": lambda c: over(c, c.rules["mask"] | (keys(c) >= 14)),
}

WINDOW: dict[str, Code] = {
    "twice as wide": lambda c: over(
        c, (keys(c) >= rows(c) - 2 * c.rules["window"][0]) & (keys(c) <= rows(c) + c.rules["window"][1])
    ),
    "left and right swapped": lambda c: over(
        c, (keys(c) >= rows(c) - c.rules["window"][1]) & (keys(c) <= rows(c) + c.rules["window"][0])
    ),
    "only left": lambda c: over(c, keys(c) >= rows(c) - c.rules["window"][0]),
    "only right": lambda c: over(c, keys(c) <= rows(c) + c.rules["window"][1]),
    "in chunks": lambda c: over(c, np.equal(*_blocked(c, c.rules["window"][0] + 1))),
    "its own chunk and the one before": lambda c: over(
        c, (np.subtract(*_blocked(c, 4)) <= 1) & (np.subtract(*_blocked(c, 4)) >= 0)
    ),
    "and the first key": lambda c: over(c, seen(c) | (keys(c) == 0)),
    "shifted": lambda c: over(c, np.roll(seen(c), 1, -1)),
    "everything outside": lambda c: over(c, ~seen(c)),
}


def _bias(c: Case) -> Array:
    return np.asarray(c.rules["bias"])


BIAS: dict[str, Code] = {
    "negated": lambda c: softmax(scores(c) - _bias(c)) @ c.v,
    "transposed": lambda c: softmax(scores(c) + swapped(_bias(c))) @ c.v,
    "twice": lambda c: softmax(scores(c) + 2 * _bias(c)) @ c.v,
    "of the next head": lambda c: softmax(scores(c) + np.roll(_bias(c), 1, 0)) @ c.v,
    "of the first head": lambda c: softmax(scores(c) + _bias(c)[:1]) @ c.v,
    "after the softmax": lambda c: (softmax(scores(c)) + _bias(c)) @ c.v,
    "multiplied": lambda c: softmax(scores(c) * _bias(c)) @ c.v,
    "shifted by one": lambda c: softmax(scores(c) + np.roll(_bias(c), 1, -1)) @ c.v,
    "mean over heads": lambda c: softmax(scores(c) + _bias(c).mean(0)) @ c.v,
    "half of it": lambda c: softmax(scores(c) + _bias(c) / 2) @ c.v,
    "its sign only": lambda c: softmax(scores(c) + np.sign(_bias(c))) @ c.v,
}


def _far(c: Case) -> Array:
    return np.abs(rows(c) - keys(c)).astype(np.float32)


def _slopes(c: Case) -> Array:
    return np.asarray(c.rules["alibi_slopes"], np.float32)[:, None, None]


ALIBI: dict[str, Code] = {
    "before the scale": lambda c: softmax(scores(c) - _slopes(c) * _far(c) / c.d**0.5) @ c.v,
    "other slopes": lambda c: (
        softmax(scores(c) - (2.0 ** -np.arange(1, len(_slopes(c)) + 1))[:, None, None] * _far(c)) @ c.v
    ),
    "reversed": lambda c: softmax(scores(c) - _slopes(c)[::-1] * _far(c)) @ c.v,
    "squared distance": lambda c: softmax(scores(c) - _slopes(c) * _far(c) ** 2) @ c.v,
    "signed": lambda c: softmax(scores(c) - _slopes(c) * (rows(c) - keys(c))) @ c.v,
    "one slope for all": lambda c: softmax(scores(c) - _slopes(c)[0] * _far(c)) @ c.v,
    "from the end": lambda c: softmax(scores(c) - _slopes(c) * np.abs(c.m - 1 - keys(c))) @ c.v,
    "of a power": lambda c: softmax(scores(c) - _slopes(c) ** 2 * _far(c)) @ c.v,
}


def _cap(c: Case) -> float:
    return float(c.rules["softcap"])


SOFTCAP: dict[str, Code] = {
    "before the scale": lambda c: softmax(_cap(c) * np.tanh(c.q @ swapped(c.k) / _cap(c)) / c.d**0.5) @ c.v,
    "tanh alone": lambda c: softmax(np.tanh(scores(c))) @ c.v,
    "not divided": lambda c: softmax(_cap(c) * np.tanh(scores(c))) @ c.v,
    "not multiplied": lambda c: softmax(np.tanh(scores(c) / _cap(c))) @ c.v,
    "twice": lambda c: softmax(_cap(c) * np.tanh(np.tanh(scores(c) / _cap(c)))) @ c.v,
    "a hard clip": lambda c: softmax(np.clip(scores(c), -_cap(c), _cap(c))) @ c.v,
    "half the cap": lambda c: softmax(_cap(c) / 2 * np.tanh(scores(c) * 2 / _cap(c))) @ c.v,
    "on the output": lambda c: _cap(c) * np.tanh(softmax(scores(c)) @ c.v / _cap(c)),
}


def _sunk(c: Case, extra: Array, values: Any = 0) -> Array:
    powers, one = np.exp(scores(c)), np.exp(extra)
    return (powers @ c.v + one * values) / (powers.sum(-1, keepdims=True) + one)


def _sinks(c: Case) -> Array:
    return np.asarray(c.rules["sinks"], np.float32)[:, None, None]


SINKS: dict[str, Code] = {
    "unshifted": lambda c: (
        lambda s, top: np.exp(s - top) / (np.exp(s - top).sum(-1, keepdims=True) + np.exp(_sinks(c))) @ c.v
    )(scores(c), scores(c).max(-1, keepdims=True)),
    "scaled": lambda c: _sunk(c, _sinks(c) / c.d**0.5),
    "of the next head": lambda c: _sunk(c, np.roll(_sinks(c), 1, 0)),
    "of the first head": lambda c: _sunk(c, _sinks(c)[:1]),
    "without exp": lambda c: _sunk(c, np.log(np.abs(_sinks(c)))),
    "with the mean value": lambda c: _sunk(c, _sinks(c), c.v.mean(2, keepdims=True)),
    "negative": lambda c: _sunk(c, -_sinks(c)),
    "twice": lambda c: _sunk(c, _sinks(c) + np.log(2)),
    "as zero": lambda c: _sunk(c, 0 * _sinks(c)),
}


def _groups(c: Case, keys: Any, values: Any) -> Array:
    """The output where query head h reads key head keys[h] and value head values[h]."""
    return softmax(c.q @ swapped(c.k[:, keys]) / np.float32(c.d**0.5)) @ c.v[:, values]


def _key_heads(c: Case) -> Array:
    """The key head of each query head."""
    many = c.q.shape[1]
    return np.arange(many) // (many // c.k.shape[1])


def _tiled(c: Case) -> Array:
    return np.arange(c.q.shape[1]) % c.k.shape[1]


def _last(c: Case) -> int:
    return int(c.k.shape[1]) - 1


GROUPED: dict[str, Code] = {
    "the first group's only": lambda c: _groups(c, 0 * _key_heads(c), 0 * _key_heads(c)),
    "the last group's only": lambda c: _groups(c, 0 * _key_heads(c) + _last(c), 0 * _key_heads(c) + _last(c)),
    "groups reversed": lambda c: _groups(c, _last(c) - _key_heads(c), _last(c) - _key_heads(c)),
    "off by one": lambda c: _groups(c, np.roll(_key_heads(c), 1), np.roll(_key_heads(c), 1)),
    "only values tiled": lambda c: _groups(c, _key_heads(c), _tiled(c)),
    "only keys tiled": lambda c: _groups(c, _tiled(c), _key_heads(c)),
    "mean of the groups": lambda c: (
        softmax(c.q @ swapped(c.k.mean(1, keepdims=True)) / np.float32(c.d**0.5)) @ c.v.mean(1, keepdims=True)
    ),
    "values of the first": lambda c: _groups(c, _key_heads(c), 0 * _key_heads(c)),
}


def turned(x: Array, places: Array, base: float, part: float = 1.0) -> Array:
    """Rotary positions: pairs (i, i + d/2) of the first `part` of the columns."""
    width = int(x.shape[-1] * part)
    half = width // 2
    angles = np.asarray(places, np.float64)[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:width]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., width:]], -1)


def _rotated(c: Case, of_q: Any = None, of_k: Any = None, base: float = 100.0, part: float = 1.0) -> Array:
    i, j = np.arange(c.n), np.arange(c.m)
    q = c.q if of_q == 0 else turned(c.q, i if of_q is None else of_q(i), base, part)
    k = c.k if of_k == 0 else turned(c.k, j if of_k is None else of_k(j), base, part)
    return softmax(q @ swapped(k) / np.float32(c.d**0.5)) @ c.v


ROTARY: dict[str, Code] = {
    "another base": lambda c: _rotated(c, base=500.0),
    "base 10000": lambda c: _rotated(c, base=10000.0),
    "backwards": lambda c: _rotated(c, np.negative, np.negative),
    "only queries": lambda c: _rotated(c, of_k=0),
    "only keys": lambda c: _rotated(c, of_q=0),
    "half of the columns": lambda c: _rotated(c, part=0.5),
    "positions halved": lambda c: _rotated(c, lambda i: i / 2, lambda j: j / 2),
    "queries backwards": lambda c: _rotated(c, np.negative),
    "queries at 0": lambda c: _rotated(c, lambda i: 0 * i),
    "two apart": lambda c: _rotated(c, lambda i: i + 2),
    "twice": lambda c: _rotated(c, lambda i: 2 * i, lambda j: 2 * j),
    "over heads": lambda c: (
        softmax(
            turned(c.q.swapaxes(1, 2), np.arange(c.q.shape[1]), 100.0).swapaxes(1, 2)
            @ swapped(turned(c.k.swapaxes(1, 2), np.arange(c.k.shape[1]), 100.0).swapaxes(1, 2))
            / np.float32(c.d**0.5)
        )
        @ c.v
    ),
}

SEGMENTS: dict[str, Code] = {
    "of the first batch entry": lambda c: over(c, seen(c)[:1]),
    "batch entries swapped": lambda c: over(c, seen(c)[::-1]),
    "boundary off by one": lambda c: over(
        c, np.roll(c.rules["query_segments"], 1, 1)[:, None, :, None] == c.rules["kv_segments"][:, None, None, :]
    ),
    "this and earlier ones": lambda c: over(
        c, c.rules["query_segments"][:, None, :, None] >= c.rules["kv_segments"][:, None, None, :]
    ),
    "other segments only": lambda c: over(c, ~seen(c)),
    "in one head only": lambda c: over(c, seen(c) | (np.arange(c.q.shape[1]) > 0)[:, None, None]),
}
