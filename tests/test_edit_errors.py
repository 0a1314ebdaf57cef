"""The exact error texts of A.cut, A.boost and A.tempered."""

import numpy as np
import pytest
import torch

import clearhead as ch
from calls import alone
from error_texts import Wrong, assert_words

A = ch.AttentionMatrix(np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)))
FLAT = ch.AttentionMatrix(np.ones((3, 4)), np.ones((3, 4)))
HINT = "\n\nhint: t=1.5 makes weights flatter, t=0.5 sharper."
FORMS = "expected a position, a list of positions, a slice, or True and False for each."
WORDS: dict[str, Wrong] = {
    "a cut of everything": (
        lambda: A.cut(),
        ValueError,
        "cut has neither queries nor keys: no weight would be left.\n\nhint: A.cut(keys=0)",
    ),
    "a position behind the end": (
        lambda: A.cut(keys=5),
        IndexError,
        "keys has position 5, and the matrix has 5 keys.\n\nhint: 0 is the first, -1 the last.",
    ),
    "a position before the beginning": (
        lambda: A.cut([0, -7], 0),
        IndexError,
        "queries has position -7, and the matrix has 6 queries.\n\nhint: 0 is the first, -1 the last.",
    ),
    "a slice of nothing": (
        lambda: A.boost(slice(5, 9), by=1.0),
        IndexError,
        "keys is slice(5, 9, None): it chooses none of 5 keys.\n\nhint: keys=None is all.",
    ),
    "no position": (
        lambda: A.cut([]),
        IndexError,
        "queries is []: it chooses none of 6 queries.\n\nhint: queries=None is all.",
    ),
    "more positions than there are": (
        lambda: A.cut([0, 0, 1, 1, 2, 2, 3]),
        IndexError,
        "queries has 7 positions, and the matrix has 6 queries.\n\nhint: give each once.",
    ),
    "False for each": (
        lambda: A.cut(keys=np.zeros((2, 5), bool)),
        IndexError,
        "keys is a ndarray of shape (2, 5): it chooses none of 5 keys.\n\nhint: keys=None is all.",
    ),
    "too few truths": (
        lambda: A.cut(keys=[True] * 4),
        IndexError,
        "keys is bool of shape (4,): expected (keys 5), or (batch 2, keys 5).\n\n"
        "hint: bool has True or False for each; positions are whole numbers.",
    ),
    "truths for batches that are not there": (
        lambda: FLAT.cut(np.ones((1, 3), bool)),
        IndexError,
        "queries is bool of shape (1, 3): expected (queries 3).\n\n"
        "hint: bool has True or False for each; positions are whole numbers.",
    ),
    "truths and positions": (
        lambda: A.cut([True, 3]),
        IndexError,
        f"queries is [True, 3]: {FORMS}\n\nhint: queries=[3, 4]",
    ),
    "one truth": (lambda: A.cut(True), IndexError, f"queries is True: {FORMS}\n\nhint: queries=[3, 4]"),
    "a word": (
        lambda: A.cut("sat"),
        IndexError,
        f"queries is 'sat': {FORMS}\n\nhint: ch.change finds the words of a text.",
    ),
    "parts": (
        lambda: A.cut(np.ones(3)),
        IndexError,
        f"queries is a ndarray of shape (3,), float64: {FORMS}\n\nhint: queries=[3, 4]",
    ),
    "positions for each batch": (
        lambda: A.cut(np.ones((2, 3), int)),
        IndexError,
        f"queries is a ndarray of shape (2, 3), int64: {FORMS}\n\nhint: queries=[3, 4]",
    ),
    "a slice of words": (
        lambda: A.cut(slice("a", None)),
        IndexError,
        "queries is slice('a', None, None): expected a slice of whole numbers.",
    ),
    "a boost of minus infinity": (
        lambda: A.boost(0, by=-np.inf),
        ValueError,
        "by is -inf: expected a finite number.\n\nhint: A.cut(queries, keys) takes keys away altogether.",
    ),
    "a boost of NaN": (
        lambda: A.boost(0, by=np.nan),
        ValueError,
        "by is nan: expected a finite number.\n\nhint: A.cut(queries, keys) takes keys away altogether.",
    ),
    "a boost that is no number": (
        lambda: A.boost(0, by=None),
        ValueError,
        "by is None: expected a number.\n\nhint: A.cut(queries, keys) takes keys away altogether.",
    ),
    "a boost larger than a float32": (
        lambda: A.boost(0, by=1e39),
        ValueError,
        "by is 1e+39: expected a number from -3.4e38 to 3.4e38.\n\n"
        "hint: A.cut(queries, keys) takes keys away altogether.",
    ),
    "t 0": (lambda: A.tempered(0), ValueError, f"t is 0.0: expected a number above 0, from 1e-30 to 1e30.{HINT}"),
    "t below 0 in one head": (
        lambda: A.tempered([1, 1, -2, 1]),
        ValueError,
        f"t is [1.0, 1.0, -2.0, 1.0]: expected a number above 0, from 1e-30 to 1e30.{HINT}",
    ),
    "t without end": (lambda: A.tempered(np.inf), ValueError, f"t is inf: expected a finite number.{HINT}"),
    "t for other heads": (
        lambda: A.tempered([1.0, 2.0]),
        ValueError,
        "t has shape (2,): expected one number per query head, (heads 4,).",
    ),
    "t per head with a softcap": (
        lambda: ch.AttentionMatrix(np.ones((2, 3, 4)), np.ones((2, 3, 4)), softcap=5.0).tempered([1.0, 2.0]),
        ValueError,
        "t is [1.0, 2.0], and a softcap is one number for all heads: c·tanh(s/c)/t has a softcap of c/t.\n\n"
        "hint: A.part(batch, head).tempered(t) is one head's matrix.",
    ),
    "t too small for the scale": (
        lambda: ch.AttentionMatrix(np.ones((3, 4)), np.ones((3, 4)), scale=1e300).tempered(1e-20),
        ValueError,
        f"t is [1e-20]: scale/t would be larger than any float64.{HINT}",
    ),
    "t too large for the softcap": (
        lambda: ch.AttentionMatrix(np.ones((3, 4)), np.ones((3, 4)), softcap=1e-310).tempered(1e20),
        ValueError,
        f"t is 1e+20: softcap/t would be 0.0.{HINT}",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_each_error_has_its_exact_text(name: str, monkeypatch: pytest.MonkeyPatch):
    assert_words(*WORDS[name], monkeypatch)


@pytest.mark.parametrize("name", ["cut", "boost", "tempered"])
def test_a_sharded_matrix_says_what_to_give_instead(name: str):
    matrix = alone(ch.distributed.ShardedAttentionMatrix, {"q": torch.ones(3, 4), "k": torch.ones(3, 4)})
    with pytest.raises(AttributeError, match=f"ShardedAttentionMatrix has no '{name}': give s"):
        getattr(matrix, name)
    with pytest.raises(AttributeError, match=r"has no 'rollout'\.$"):
        getattr(matrix, "rollout")  # noqa: B009
