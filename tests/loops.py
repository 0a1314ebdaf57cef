"""Attention written a second time, as plain loops over numbers, sharing no line with the package."""

import math
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from problems import Case


def weights_by_loops(case: Case) -> tuple[Array, Array]:
    """The weights and the log-sum-exp in the caller's axes, one number at a time."""
    q, k = case.q.astype(np.float64), case.k.astype(np.float64)
    lead, n, m = q.shape[:-2], q.shape[-2], k.shape[-2]
    weights, lse = np.zeros((*lead, n, m)), np.full((*lead, n), -np.inf)
    for place in np.ndindex(lead):
        queries, keys = q[place], k[_key_head(place, q, k)]
        for i in range(n):
            logits = [_logit(case.rules, place, i, j, queries[i], keys[j], (*lead, n, m)) for j in range(m)]
            shares, lse[(*place, i)] = _softmax(logits, _sink(case.rules, place))
            weights[(*place, i)] = shares
    return weights, lse


def output_by_loops(case: Case, weights: Array) -> Array:
    v = case.v.astype(np.float64)
    output = np.zeros((*weights.shape[:-1], v.shape[-1]))
    for place in np.ndindex(weights.shape[:-2]):
        values = v[_key_head(place, weights, v)]
        for i, j in np.ndindex(weights.shape[-2:]):
            for c in range(v.shape[-1]):
                output[(*place, i, c)] += weights[(*place, i, j)] * values[j, c]
    return output


def _key_head(place: tuple[int, ...], q: Array, k: Array) -> tuple[int, ...]:
    return place if not place else (*place[:-1], place[-1] // (q.shape[-3] // k.shape[-3]))


def _softmax(logits: list[float | None], sink: float | None) -> tuple[list[float], float]:
    seen = [x for x in logits if x is not None]
    if not seen:
        return [0.0] * len(logits), -math.inf
    shift = max([*seen, -math.inf if sink is None else sink])
    total = math.fsum(math.exp(x - shift) for x in seen) + (0.0 if sink is None else math.exp(sink - shift))
    return [0.0 if x is None else math.exp(x - shift) / total for x in logits], shift + math.log(total)


def _sink(rules: dict[str, Any], place: tuple[int, ...]) -> float | None:
    return None if rules.get("sinks") is None else float(np.ravel(rules["sinks"])[place[-1] if place else 0])


def _logit(
    rules: dict[str, Any], place: tuple[int, ...], i: int, j: int, q: Array, k: Array, full: tuple[int, ...]
) -> float | None:
    """One score under every rule; None where the query may not see the key."""
    batch = place[:-1]
    position = i + _of_batch(rules.get("query_offset", 0), batch)
    if not _allowed(rules, batch, i, j, position):
        return None
    if rules.get("mask") is not None and not np.broadcast_to(rules["mask"], full)[(*place, i, j)]:
        return None
    logit = _scale(rules.get("scale"), place, len(q)) * math.fsum(a * b for a, b in zip(q, k, strict=True))
    if rules.get("softcap") is not None:
        logit = rules["softcap"] * math.tanh(logit / rules["softcap"])
    if rules.get("bias") is not None:
        logit += float(np.broadcast_to(rules["bias"], full)[(*place, i, j)])
    if rules.get("alibi_slopes") is not None:
        logit -= float(np.ravel(rules["alibi_slopes"])[place[-1] if place else 0]) * abs(position - j)
    if rules.get("spans") is not None:
        logit += _span(*rules["spans"], place, i, j, full[:-2])
    return None if logit == -math.inf else logit


def _scale(scale: Any, place: tuple[int, ...], d_k: int) -> float:
    if scale is None:
        return 1 / math.sqrt(d_k)
    return float(scale[place[-1] if place else 0]) if np.ndim(scale) else float(scale)


def _span(
    query_spans: Array, key_spans: Array, table: Array, place: tuple[int, ...], i: int, j: int, lead: tuple[int, ...]
) -> float:
    ours, theirs = (int(x[place[:-1]][y] if x.ndim > 1 else x[y]) for x, y in ((query_spans, i), (key_spans, j)))
    if ours < 0 or theirs < 0:
        return 0.0
    return float(np.broadcast_to(table, (*lead, *table.shape[-2:]))[(*place, ours, theirs)])


def _allowed(rules: dict[str, Any], batch: tuple[int, ...], i: int, j: int, position: int) -> bool:
    if rules.get("causal") and j > position:
        return False
    left, right = rules.get("window") or (None, None)
    if (left is not None and j < position - left) or (right is not None and j > position + right):
        return False
    if "kv_lengths" in rules and j >= _of_batch(rules["kv_lengths"], batch):
        return False
    if "query_lengths" in rules and i >= _of_batch(rules["query_lengths"], batch):
        return False
    if "query_segments" in rules:
        ours, theirs = rules["query_segments"], rules["kv_segments"]
        return bool(ours[batch][i] == theirs[batch][j] if ours.ndim > 1 else ours[i] == theirs[j])
    return True


def _of_batch(value: Any, batch: tuple[int, ...]) -> int:
    return int(value[batch]) if isinstance(value, np.ndarray) and value.ndim else int(value)


def areas(pixels: int, size: int) -> Array:
    """(pixels, size): row r averages r·size/pixels … (r+1)·size/pixels; one that a border cuts counts in part."""
    edges = np.arange(pixels + 1) * (size / pixels)
    low, high = edges[:-1, None], edges[1:, None]
    cells = np.arange(size)
    overlap = np.minimum(high, cells + 1) - np.maximum(low, cells)
    return np.maximum(overlap, 0.0) / max(size / pixels, 1e-300)
