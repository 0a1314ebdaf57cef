"""The float64 reference against numbers worked by hand, and plain loops that share no line with the package."""

import math
from typing import Any

import numpy as np
from hypothesis import given

from clearhead.core import definition
from clearhead.core.axes import Array
from clearhead.core.call import describe
from problems import Case, cases, examples


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


FLOAT64 = (np.dtype(np.float64),)
EXACT = {"rtol": 1e-12, "atol": 1e-13}  # a few thousand eps: sums of at most some hundred float64 numbers


def book_of(q: Array, k: Array, v: Array, **rules: Any) -> definition.Matrix:
    given = describe(q, k, v, rules)
    return definition.attend(given.problem, given.q, given.k, given.v)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def test_the_example_of_the_tutorial_worked_by_hand():
    q, k = np.array([[1.0, 3.0], [2.0, 0.5]]), np.array([[0.5, 2.0], [1.0, 3.0]])
    v = np.array([[0.0, 4.0], [1.0, 2.0]])
    book = book_of(q, k, v)
    strong = [1 / (1 + math.exp(-3.5 / math.sqrt(2))), 1 / (1 + math.exp(-1.5 / math.sqrt(2)))]
    np.testing.assert_array_equal(book.scores[0, 0], [[6.5, 10.0], [2.0, 3.5]])
    np.testing.assert_allclose(book.scaled[0, 0], [[4.596, 7.071], [1.414, 2.475]], atol=5e-4)
    np.testing.assert_allclose(book.weights[0, 0], [[1 - w, w] for w in strong], **EXACT)
    np.testing.assert_allclose(book.weights[0, 0], [[0.0777, 0.9223], [0.2572, 0.7428]], atol=1e-4)
    assert book.output is not None
    np.testing.assert_allclose(book.output[0, 0], [[w, 4 - 2 * w] for w in strong], **EXACT)
    np.testing.assert_allclose(book.output[0, 0], [[0.9223, 2.1554], [0.7428, 2.5144]], atol=2e-4)


def test_two_equal_keys_have_equal_weights_and_known_statistics():
    q, k, v = np.ones((2, 1)), np.zeros((4, 1)), np.array([[0.0], [2.0], [4.0], [6.0]])
    given = describe(q, k, v, {})
    book = definition.attend(given.problem, given.q, given.k, given.v)
    assert book.output is not None
    np.testing.assert_allclose(book.output, np.full((1, 1, 2, 1), 3.0), **EXACT)
    np.testing.assert_allclose(book.logsumexp, np.full((1, 1, 2), math.log(4)), **EXACT)
    np.testing.assert_array_equal(definition.max_logit(book), np.zeros((1, 1, 2)))
    np.testing.assert_allclose(definition.entropy(book), np.full((1, 1, 2), math.log(4)), **EXACT)
    np.testing.assert_allclose(definition.distance(book), [[[1.5, 1.0]]], **EXACT)
    np.testing.assert_allclose(definition.received(book), np.full((1, 1, 4), 0.5), **EXACT)
    np.testing.assert_allclose(definition.peak(book), np.full((1, 1, 4), 0.25), **EXACT)
    np.testing.assert_allclose(definition.image(book, 1, 3), np.full((1, 1, 1, 3), 0.25), **EXACT)
    weights, indices = definition.top(book, 3)
    np.testing.assert_array_equal(indices, np.broadcast_to([0, 1, 2], (1, 1, 2, 3)))
    np.testing.assert_allclose(weights, np.full((1, 1, 2, 3), 0.25), **EXACT)
    labels = np.array([[0, 1]]), np.array([[1, 1, -1, 0]])
    np.testing.assert_allclose(definition.groups(book, *labels), np.array([[[[0.25, 0.5], [0.25, 0.5]]]]), **EXACT)


def test_rules_apply_in_their_documented_order():
    q, k, v = np.array([[2.0]]), np.array([[3.0], [1.0]]), np.eye(2)
    rules = {"scale": 0.5, "softcap": 2.0, "bias": np.array([[1.0, -1.0]]), "alibi_slopes": 0.25, "query_offset": 2}
    book = book_of(q, k, v, sinks=0.5, **rules)
    capped = [2 * math.tanh(3 / 2), 2 * math.tanh(1 / 2)]
    logits = [capped[0] + 1 - 0.25 * 2, capped[1] - 1 - 0.25 * 1]
    total = math.exp(logits[0]) + math.exp(logits[1]) + math.exp(0.5)
    np.testing.assert_array_equal(book.scores.ravel(), [6.0, 2.0])
    np.testing.assert_array_equal(book.scaled.ravel(), [3.0, 1.0])
    np.testing.assert_allclose(book.capped.ravel(), capped, **EXACT)
    np.testing.assert_allclose(book.masked.ravel(), logits, **EXACT)
    np.testing.assert_allclose(book.logsumexp.ravel(), [math.log(total)], **EXACT)
    np.testing.assert_allclose(book.weights.ravel(), [math.exp(x) / total for x in logits], **EXACT)


def test_an_image_counts_a_cell_by_the_part_inside_the_pixel():
    book = book_of(np.zeros((1, 1)), np.array([[0.0], [0.0], [math.log(2)]]), np.zeros((3, 1)), bias=[0.0, 0.0, 1.0])
    a = book.weights[0, 0, 0]
    expected = [[(a[0] + a[1] / 2) / 1.5, (a[1] / 2 + a[2]) / 1.5]]
    np.testing.assert_allclose(definition.image(book, 1, 2)[0, 0], expected, **EXACT)
    np.testing.assert_allclose(definition.image(book, 1, 6)[0, 0], [np.repeat(a, 2)], **EXACT)


@examples(3)
@given(case=cases(dtypes=FLOAT64, most=150))
def test_plain_loops_give_the_same_numbers(case: Case):
    weights, lse = weights_by_loops(case)
    np.testing.assert_allclose(case.restore(case.book.weights), weights, **EXACT)
    np.testing.assert_allclose(case.restore(case.book.logsumexp), lse, **EXACT)
    assert case.book.output is not None
    np.testing.assert_allclose(case.restore(case.book.output), output_by_loops(case, weights), **EXACT)
