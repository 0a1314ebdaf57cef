"""The exact error texts for wrong indices, products, options and merges."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.errors import ClearheadError, RuleError
from clearhead.ops.observation import among
from error_texts import Wrong, assert_words

Q, K, FLAT = np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)), np.ones((3, 4))


def observe(**wanted: Any) -> Callable[[], Any]:
    return lambda: ch.AttentionMatrix(Q, K).observe(**wanted)


def part(keys: int = 3, queries: int = 3, **wanted: Any) -> ch.Observation:
    return ch.AttentionMatrix(np.ones((queries, 4)), np.ones((keys, 4))).observe(**wanted)


MATRIX = "the matrix is (batch 2, heads 4, queries 6, keys 5)."
OBJECT: dict[str, Wrong] = {
    "two ellipses": (
        lambda: ch.AttentionMatrix(Q, K)[..., 0, ...],
        IndexError,
        "an index can have only one Ellipsis (`...`).",
    ),
    "too many indices": (
        lambda: ch.AttentionMatrix(Q, K)[0, 0, 0, 0, 0],
        IndexError,
        f"5 indices for 4 axes: {MATRIX}",
    ),
    "outside": (
        lambda: ch.AttentionMatrix(Q, K)[0, 4],
        IndexError,
        f"index 4 is outside axis 1: {MATRIX}",
    ),
    "outside from the end": (
        lambda: ch.AttentionMatrix(Q, K).T[..., -7],
        IndexError,
        "index -7 is outside axis 3: the matrix is (batch 2, heads 4, keys 5, queries 6).",
    ),
    "an index array": (
        lambda: ch.AttentionMatrix(Q, K)[[0, 1]],
        IndexError,
        "axis 0 is indexed by list: expected integers, slices and `...`.\n\nhint: A[...][that] indexes a stored copy.",
    ),
    "a truth": (
        lambda: ch.AttentionMatrix(Q, K)[:, True],
        IndexError,
        "axis 1 is indexed by bool: expected integers, slices and `...`.\n\nhint: A[...][that] indexes a stored copy.",
    ),
    "queries that are no slice": (
        observe(entropy=True, queries=3),
        IndexError,
        "queries is 3: expected a slice.\n\nhint: queries=slice(-64, None)",
    ),
    "a product of whole numbers": (
        lambda: ch.AttentionMatrix(Q, K) @ np.ones(5, int),
        TypeError,
        "v is int64: expected float64, float32, bfloat16 or float16.",
    ),
    "a product of another length": (
        lambda: ch.AttentionMatrix(Q, K) @ np.ones(6),
        ValueError,
        f"v has shape (6,): expected (2, 2, 5, d), or one for all heads, (5,) or (5, d).\n\nhint: {MATRIX}",
    ),
    "a product of other heads": (
        lambda: ch.AttentionMatrix(Q, K).T @ np.ones((2, 2, 6, 3)),
        ValueError,
        f"g has shape (2, 2, 6, 3): expected (2, 4, 6, d), or one for all heads, (6,) or (6, d).\n\nhint: {MATRIX}",
    ),
    "a product of more axes": (
        lambda: ch.AttentionMatrix(FLAT, FLAT) @ np.ones((1, 3, 2)),
        ValueError,
        "v has shape (1, 3, 2): expected (3, d), or one for all heads, (3,) or (3, d).\n\n"
        "hint: the matrix is (queries 3, keys 3).",
    ),
    "a statistic of 1": (observe(entropy=1), ValueError, "entropy is 1: expected True or False."),
    "top 0": (observe(top=0), ValueError, "top is 0: expected a whole number from 1 up.\n\nhint: top=8"),
    "top True": (observe(top=True), ValueError, "top is True: expected a whole number from 1 up.\n\nhint: top=8"),
    "an image of one side": (
        observe(image=64),
        ValueError,
        "image is 64: expected (height, width) in pixels.\n\nhint: image=(256, 256)",
    ),
    "groups of one side": (observe(groups={}), ValueError, "groups is dict: expected (query_groups, key_groups)."),
    "labels in parts": (
        observe(groups=(np.zeros(6), np.zeros(5, int))),
        TypeError,
        "query_groups is float64: expected whole numbers, one label per token, below 0 for none.",
    ),
    "labels of another length": (
        observe(groups=(np.zeros(6, int), np.zeros(6, int))),
        ValueError,
        "key_groups has shape (6,): expected (5,), one label per token.",
    ),
    "labels that are no count": (
        observe(groups=([2**21] * 6, [0] * 5)),
        ValueError,
        "query_groups goes up to 2097152: labels are 0, 1, 2, …, one per group.",
    ),
}


@pytest.mark.parametrize("name", OBJECT)
def test_each_error_of_the_matrix_has_its_exact_text(name: str, monkeypatch: pytest.MonkeyPatch):
    assert_words(*OBJECT[name], monkeypatch)


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
MERGES: dict[str, Wrong] = {
    "sinks in the first part": (lambda: sunk(logsumexp=True).merge_keys(part(logsumexp=True)), ValueError, TWICE),
    "sinks in the second part": (lambda: part(logsumexp=True).merge_keys(sunk(logsumexp=True)), ValueError, TWICE),
    "sinks twice": (lambda: sunk(logsumexp=True).with_sinks(0.5), ValueError, TWICE),
    "sinks added, then merged": (
        lambda: part(logsumexp=True).with_sinks(0.5).merge_keys(part(logsumexp=True)),
        ValueError,
        TWICE,
    ),
    "rows with and without sinks": (
        lambda: sunk(entropy=True).merge_queries(part(entropy=True)),
        ValueError,
        "the first part has sinks in its denominators, the other has not: they are not rows of the same matrix.\n\n"
        "hint: observe both with the same sinks.",
    ),
    "what the second part lacks": (
        lambda: part(entropy=True, peak=True).merge_queries(part(entropy=True)),
        ValueError,
        "the first part has peak, the second has not: it cannot be joined.\n\n"
        "hint: observe both parts with peak, or neither.",
    ),
    "what the first part lacks": (
        lambda: part(logsumexp=True).merge_keys(part(logsumexp=True, top=2)),
        ValueError,
        "the second part has top, the first has not: it cannot be joined.\n\n"
        "hint: observe both parts with top, or neither.",
    ),
    "an output that one part lacks": (
        lambda: part(logsumexp=True, v=FLAT).merge_keys(part(logsumexp=True)),
        ValueError,
        "the first part has output, the second has not: it cannot be joined.\n\n"
        "hint: observe both parts with v, or neither.",
    ),
    "outputs of other widths": (
        lambda: part(v=FLAT).merge_queries(part(v=FLAT[:, :2])),
        ValueError,
        "the parts have output (3, 4) and (3, 2): only the queries may differ between them.",
    ),
    "no part": (
        lambda: part(logsumexp=True).merge_keys(None),  # type: ignore[arg-type]
        TypeError,
        "the other part is a NoneType: expected an Observation.\n\nhint: A.observe(…)",
    ),
    "a head of two axes": (
        lambda: part(entropy=True).heads(0),
        IndexError,
        "entropy has shape (3,): a matrix of two axes is one head, with no axis to choose from.",
    ),
    "a head that is not there": (
        lambda: ch.AttentionMatrix(Q, K).observe(entropy=True).heads(99),
        IndexError,
        "head 99 is outside 0..3.",
    ),
    "half a head": (
        lambda: ch.AttentionMatrix(Q, K).observe(entropy=True).heads([1, 2.5]),  # type: ignore[list-item]
        IndexError,
        "head is 2.5: expected a whole number.",
    ),
    "fewer keys than there are": (
        lambda: among(part(peak=True), 2),
        ValueError,
        "keys is 2: expected a whole number from 3 up.",
    ),
    "no weight": (
        lambda: part(entropy=True).merge_keys(part(logsumexp=True)),
        ValueError,
        "a part has no logsumexp: parts over keys are weighed by it.\n\nhint: observe(logsumexp=True)",
    ),
    "no weight for a sink": (
        lambda: part(entropy=True).with_sinks(0.5),
        ValueError,
        "a part has no logsumexp: parts over keys are weighed by it.\n\nhint: observe(logsumexp=True)",
    ),
    "columns over keys": (
        lambda: part(logsumexp=True).merge_keys(part(logsumexp=True, peak=True)),
        ValueError,
        "peak over some keys only cannot be merged: a column statistic needs the final log-sum-exp.\n\n"
        "hint: observe it from the whole matrix, or over disjoint queries and merge_queries.",
    ),
    "columns before the sink": (
        lambda: part(logsumexp=True, received=True).with_sinks(0.5),
        ValueError,
        "received over some keys only cannot be merged: a column statistic needs the final log-sum-exp.\n\n"
        "hint: observe it from the whole matrix, or over disjoint queries and merge_queries.",
    ),
    "a sink too many": (
        lambda: part(logsumexp=True).with_sinks([0.5, 0.5]),
        ValueError,
        "sinks has shape (2,): expected one number per query head, (heads 1,).",
    ),
    "other queries": (
        lambda: part(logsumexp=True).merge_keys(part(queries=2, logsumexp=True)),
        ValueError,
        "the parts have log-sum-exp (3,) and (2,): they must be the same queries.",
    ),
    "other keys": (
        lambda: part(received=True).merge_queries(part(keys=4, received=True)),
        ValueError,
        "one part has 3 keys, the other 4: parts over queries share all keys.",
    ),
    "other pixels": (
        lambda: part(image=(3, 2)).merge_queries(part(image=(1, 2))),
        ValueError,
        "the images' pixels differ: 3 queries on 3 rows and 3 on 1.\n\n"
        "hint: choose heights so that each pixel covers equally many queries, and one width.",
    ),
    "other key groups": (
        lambda: part(groups=([0] * 3, [0] * 3)).merge_queries(part(groups=([0] * 3, [0, 1, 1]))),
        ValueError,
        "one part has 1 key groups, the other 2: they share all keys.",
    ),
}


@pytest.mark.parametrize("name", MERGES)
def test_each_error_about_parts_has_its_exact_text(name: str):
    call, kind, words = MERGES[name]
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == words


def matrix() -> ch.AttentionMatrix:
    return ch.AttentionMatrix(FLAT, FLAT)


def trace() -> Any:
    return ch.trace(FLAT, FLAT, FLAT)


REST: dict[str, Wrong] = {
    "half a query": (
        lambda: ch.rollout([matrix()], query=1.5),  # type: ignore[arg-type]
        IndexError,
        "query is 1.5: expected a whole number.",
    ),
    "a matrix alone": (
        lambda: ch.rollout(matrix(), query=0),  # type: ignore[arg-type]
        TypeError,
        "matrices is an AttentionMatrix of shape (3, 3): expected a list of AttentionMatrix, one per layer.\n\n"
        "hint: ch.rollout([A0, A1], query=-1)",
    ),
    "a share in words": (
        lambda: ch.rollout([matrix()], query=0, residual="x"),  # type: ignore[arg-type]
        ValueError,
        "residual is 'x': expected a number.",
    ),
    "a size in letters": (
        lambda: ch.shapes(("n m", 3), (3, 2), (3, 2)),
        ValueError,
        "q is ('n m', 3): expected an array, or its shape in whole numbers or symbols.\n\n"
        'hint: q=(3, 4), or q=("n", "d_k")',
    ),
    "a size below 0": (
        lambda: ch.shapes((3, 2), (-2, 2), (3, 2)),
        ValueError,
        "k is (-2, 2): expected an array, or its shape in whole numbers or symbols.\n\n"
        'hint: k=(3, 4), or k=("n", "d_k")',
    ),
    "a size that is a truth": (
        lambda: ch.shapes((3, 2), (3, 2), (True, 2)),
        ValueError,
        "v is (True, 2): expected an array, or its shape in whole numbers or symbols.\n\n"
        'hint: v=(3, 4), or v=("n", "d_k")',
    ),
    "a token in words": (lambda: trace().token("a"), IndexError, "query is 'a': expected a whole number."),
    "cells of no pixels": (
        lambda: trace().to_png(cell=0),
        ValueError,
        "cell is 0: expected a whole number from 1 up.\n\nhint: cell=8",
    ),
    "a language that is not spoken": (
        lambda: matrix().to_html(language="fr"),  # type: ignore[arg-type]
        ValueError,
        "language is 'fr': expected 'en' or 'zh'.\n\nhint: language=\"zh\"",
    ),
    "a diagnosis in it": (
        lambda: ch.diagnose(FLAT, FLAT, FLAT, FLAT).told("fr"),  # type: ignore[arg-type]
        ValueError,
        "language is 'fr': expected 'en' or 'zh'.\n\nhint: language=\"zh\"",
    ),
    "an option of no page": (
        lambda: matrix().save("page.html", exakt=[]),  # type: ignore[call-arg]
        TypeError,
        "unknown option `exakt`.\n\n"
        "hint: did you mean `exact`? "
        "Known: batch, beside, dtype, each, exact, language, source_tokens, title, tokens, v.",
    ),
    "pairs that are none": (
        lambda: matrix().save("page.html", exact=5),  # type: ignore[arg-type]
        IndexError,
        "exact is 5: expected a list of (layer, head) pairs.\n\nhint: exact=[(0, 3)]",
    ),
    "no name of a file": (
        lambda: matrix().save(3),  # type: ignore[arg-type]
        TypeError,
        'path is 3: expected the name of a file, as text.\n\nhint: path="page.html"',
    ),
}


@pytest.mark.parametrize("name", REST)
def test_each_other_error_has_its_exact_text(name: str):
    call, kind, words = REST[name]
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == words
    assert isinstance(error.value, ClearheadError)
