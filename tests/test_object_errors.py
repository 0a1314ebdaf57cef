"""The exact error texts for wrong indices, products, options and merges."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.errors import ClearheadError, RuleError
from clearhead.ops.observation import among
from error_texts import Errors, assert_words, each_error

Q, K, FLAT = np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)), np.ones((3, 4))


def observe(**wanted: Any) -> Callable[[], Any]:
    return lambda: ch.AttentionMatrix(Q, K).observe(**wanted)


def part(keys: int = 3, queries: int = 3, **wanted: Any) -> ch.Observation:
    return ch.AttentionMatrix(np.ones((queries, 4)), np.ones((keys, 4))).observe(**wanted)


MATRIX = "the matrix is (batch 2, heads 4, queries 6, keys 5)."
OBJECT: Errors = {
    IndexError: {
        "an index can have only one Ellipsis (`...`).": lambda: ch.AttentionMatrix(Q, K)[..., 0, ...],
        f"5 indices for 4 axes: {MATRIX}": lambda: ch.AttentionMatrix(Q, K)[0, 0, 0, 0, 0],
        f"index 4 is outside axis 1: {MATRIX}": lambda: ch.AttentionMatrix(Q, K)[0, 4],
        "index -7 is outside axis 3: the matrix is (batch 2, heads 4, keys 5, queries 6).": lambda: ch.AttentionMatrix(
            Q, K
        ).T[..., -7],
        "axis 0 is indexed by list: expected integers, slices and `...`.\n\n"
        "hint: A[...][that] indexes a stored copy.": lambda: ch.AttentionMatrix(Q, K)[[0, 1]],
        "axis 1 is indexed by bool: expected integers, slices and `...`.\n\n"
        "hint: A[...][that] indexes a stored copy.": lambda: ch.AttentionMatrix(Q, K)[:, True],
        "queries is 3: expected a slice.\n\nhint: queries=slice(-64, None)": observe(entropy=True, queries=3),
    },
    TypeError: {
        "v is int64: expected float64, float32, bfloat16 or float16.": lambda: (
            ch.AttentionMatrix(Q, K) @ np.ones(5, int)
        ),
        "query_groups is float64: expected whole numbers, one label per token, below 0 for none.": observe(
            groups=(np.zeros(6), np.zeros(5, int))
        ),
    },
    ValueError: {
        f"v has shape (6,): expected (2, 2, 5, d), or one for all heads, (5,) or (5, d).\n\nhint: {MATRIX}": lambda: (
            ch.AttentionMatrix(Q, K) @ np.ones(6)
        ),
        "g has shape (2, 2, 6, 3): expected (2, 4, 6, d), or one for all heads, (6,) or (6, d).\n\n"
        f"hint: {MATRIX}": lambda: ch.AttentionMatrix(Q, K).T @ np.ones((2, 2, 6, 3)),
        "v has shape (1, 3, 2): expected (3, d), or one for all heads, (3,) or (3, d).\n\n"
        "hint: the matrix is (queries 3, keys 3).": lambda: ch.AttentionMatrix(FLAT, FLAT) @ np.ones((1, 3, 2)),
        "entropy is 1: expected True or False.": observe(entropy=1),
        "top is 0: expected a whole number from 1 up.\n\nhint: top=8": observe(top=0),
        "top is True: expected a whole number from 1 up.\n\nhint: top=8": observe(top=True),
        "image is 64: expected (height, width) in pixels.\n\nhint: image=(256, 256)": observe(image=64),
        "groups is dict: expected (query_groups, key_groups).": observe(groups={}),
        "key_groups has shape (6,): expected (5,), one label per token.": observe(
            groups=(np.zeros(6, int), np.zeros(6, int))
        ),
        "query_groups goes up to 2097152: labels are 0, 1, 2, …, one per group.": observe(
            groups=([2**21] * 6, [0] * 5)
        ),
    },
}


@each_error(OBJECT)
def test_each_error_of_the_matrix_has_its_exact_text(call: Any, kind: type[Exception], words: str, monkeypatch: Any):
    assert_words(call, kind, words, monkeypatch)


def test_converting_the_matrix_to_an_array_always_copies():
    with pytest.raises(ValueError, match="an array of them is always a copy"):
        np.asarray(ch.AttentionMatrix(FLAT, FLAT), copy=False)


def test_an_image_without_pixels_is_refused():
    with pytest.raises(RuleError) as error:
        ch.AttentionMatrix(FLAT, FLAT).image(0, 5)
    assert str(error.value) == "image's height is 0: expected a whole number from 1 up.\n\nhint: image=(256, 256)"


def sunk(**wanted: Any) -> ch.Observation:
    return ch.AttentionMatrix(np.ones((3, 4)), np.ones((3, 4)), sinks=0.5).observe(**wanted)


TWICE = (
    "a part has sinks in its denominators already: they would count twice.\n\n"
    "hint: observe every part without sinks, merge the parts, and add them once: merged.with_sinks(sinks)."
)
MERGES: Errors = {
    ValueError: {
        TWICE: [
            lambda: sunk(logsumexp=True).merge_keys(part(logsumexp=True)),
            lambda: part(logsumexp=True).merge_keys(sunk(logsumexp=True)),
            lambda: sunk(logsumexp=True).with_sinks(0.5),
            lambda: part(logsumexp=True).with_sinks(0.5).merge_keys(part(logsumexp=True)),
        ],
        "the first part has sinks in its denominators, the other has not: they are not rows of the same matrix.\n\n"
        "hint: observe both with the same sinks.": lambda: sunk(entropy=True).merge_queries(part(entropy=True)),
        "the first part has peak, the second has not: it cannot be joined.\n\n"
        "hint: observe both parts with peak, or neither.": lambda: part(entropy=True, peak=True).merge_queries(
            part(entropy=True)
        ),
        "the second part has top, the first has not: it cannot be joined.\n\n"
        "hint: observe both parts with top, or neither.": lambda: part(logsumexp=True).merge_keys(
            part(logsumexp=True, top=2)
        ),
        "the first part has output, the second has not: it cannot be joined.\n\n"
        "hint: observe both parts with v, or neither.": lambda: part(logsumexp=True, v=FLAT).merge_keys(
            part(logsumexp=True)
        ),
        "the parts have output (3, 4) and (3, 2): only the queries may differ between them.": lambda: part(
            v=FLAT
        ).merge_queries(part(v=FLAT[:, :2])),
        "keys is 2: expected a whole number from 3 up.": lambda: among(part(peak=True), 2),
        "a part has no logsumexp: parts over keys are weighed by it.\n\nhint: observe(logsumexp=True)": [
            lambda: part(entropy=True).merge_keys(part(logsumexp=True)),
            lambda: part(entropy=True).with_sinks(0.5),
        ],
        "peak over some keys only cannot be merged: a column statistic needs the final log-sum-exp.\n\n"
        "hint: observe it from the whole matrix, or over disjoint queries and merge_queries.": lambda: part(
            logsumexp=True
        ).merge_keys(part(logsumexp=True, peak=True)),
        "received over some keys only cannot be merged: a column statistic needs the final log-sum-exp.\n\n"
        "hint: observe it from the whole matrix, or over disjoint queries and merge_queries.": lambda: part(
            logsumexp=True, received=True
        ).with_sinks(0.5),
        "sinks has shape (2,): expected one number per query head, (heads 1,).": lambda: part(
            logsumexp=True
        ).with_sinks([0.5, 0.5]),
        "the parts have log-sum-exp (3,) and (2,): they must be the same queries.": lambda: part(
            logsumexp=True
        ).merge_keys(part(queries=2, logsumexp=True)),
        "one part has 3 keys, the other 4: parts over queries share all keys.": lambda: part(
            received=True
        ).merge_queries(part(keys=4, received=True)),
        "the images' pixels differ: 3 queries on 3 rows and 3 on 1.\n\n"
        "hint: choose heights so that each pixel covers equally many queries, and one width.": lambda: part(
            image=(3, 2)
        ).merge_queries(part(image=(1, 2))),
        "one part has 1 key groups, the other 2: they share all keys.": lambda: part(
            groups=([0] * 3, [0] * 3)
        ).merge_queries(part(groups=([0] * 3, [0, 1, 1]))),
    },
    TypeError: {
        "the other part is a NoneType: expected an Observation.\n\nhint: A.observe(…)": lambda: part(
            logsumexp=True
        ).merge_keys(None),
    },
    IndexError: {
        "entropy has shape (3,): a matrix of two axes is one head, with no axis to choose from.": lambda: part(
            entropy=True
        ).heads(0),
        "head 99 is outside 0..3.": lambda: ch.AttentionMatrix(Q, K).observe(entropy=True).heads(99),
        "head is 2.5: expected a whole number.": lambda: ch.AttentionMatrix(Q, K).observe(entropy=True).heads([1, 2.5]),
    },
}


@each_error(MERGES)
def test_each_error_about_parts_has_its_exact_text(call: Any, kind: type[Exception], words: str):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == words


def matrix() -> ch.AttentionMatrix:
    return ch.AttentionMatrix(FLAT, FLAT)


def trace() -> Any:
    return ch.trace(FLAT, FLAT, FLAT)


REST: Errors = {
    IndexError: {
        "query is 1.5: expected a whole number.": lambda: ch.rollout([matrix()], query=1.5),
        "query is 'a': expected a whole number.": lambda: trace().token("a"),
        "exact is 5: expected a list of (layer, head) pairs.\n\nhint: exact=[(0, 3)]": lambda: matrix().save(
            "page.html", exact=5
        ),
    },
    TypeError: {
        "matrices is an AttentionMatrix of shape (3, 3): expected a list of AttentionMatrix, one per layer.\n\n"
        "hint: ch.rollout([A0, A1], query=-1)": lambda: ch.rollout(matrix(), query=0),
        "unknown option `exakt`.\n\n"
        "hint: did you mean `exact`? "
        "Known: batch, beside, dtype, each, exact, language, source_tokens, title, tokens, v.": lambda: matrix().save(
            "page.html", exakt=[]
        ),
        'path is 3: expected the name of a file, as text.\n\nhint: path="page.html"': lambda: matrix().save(3),
    },
    ValueError: {
        "residual is 'x': expected a number.": lambda: ch.rollout([matrix()], query=0, residual="x"),
        "q is ('n m', 3): expected an array, or its shape in whole numbers or symbols.\n\n"
        'hint: q=(3, 4), or q=("n", "d_k")': lambda: ch.shapes(("n m", 3), (3, 2), (3, 2)),
        "k is (-2, 2): expected an array, or its shape in whole numbers or symbols.\n\n"
        'hint: k=(3, 4), or k=("n", "d_k")': lambda: ch.shapes((3, 2), (-2, 2), (3, 2)),
        "v is (True, 2): expected an array, or its shape in whole numbers or symbols.\n\n"
        'hint: v=(3, 4), or v=("n", "d_k")': lambda: ch.shapes((3, 2), (3, 2), (True, 2)),
        "cell is 0: expected a whole number from 1 up.\n\nhint: cell=8": lambda: trace().to_png(cell=0),
        "language is 'fr': expected 'en' or 'zh'.\n\nhint: language=\"zh\"": [
            lambda: matrix().to_html(language="fr"),
            lambda: ch.diagnose(FLAT, FLAT, FLAT, FLAT).told("fr"),
        ],
    },
}


@each_error(REST)
def test_each_other_error_has_its_exact_text(call: Any, kind: type[Exception], words: str):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == words
    assert isinstance(error.value, ClearheadError)
