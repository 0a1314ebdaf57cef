"""The float64 reference against numbers worked by hand, other libraries, and plain loops."""

import math
from typing import Any

import numpy as np
from hypothesis import given

from clearhead.core import definition
from clearhead.core.axes import Array
from clearhead.core.call import describe
from loops import output_by_loops, weights_by_loops
from problems import Case, cases, examples

FLOAT64 = (np.dtype(np.float64),)
EXACT = {"rtol": 1e-12, "atol": 1e-13}  # a few thousand eps: sums of at most some hundred float64 numbers


def book_of(q: Array, k: Array, v: Array, **rules: Any) -> definition.Textbook:
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
