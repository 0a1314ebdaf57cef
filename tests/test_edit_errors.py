"""The exact error texts of A.cut, A.boost and A.tempered."""

from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from calls import alone
from error_texts import Errors, assert_words, each_error

A = ch.AttentionMatrix(np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)))
FLAT = ch.AttentionMatrix(np.ones((3, 4)), np.ones((3, 4)))
HINT = "\n\nhint: t=1.5 makes weights flatter, t=0.5 sharper."
FORMS = "expected a position, a list of positions, a slice, or True and False for each."
WORDS: Errors = {
    ValueError: {
        "cut has neither queries nor keys: no weight would be left.\n\nhint: A.cut(keys=0)": lambda: A.cut(),
        "by is -inf: expected a finite number.\n\nhint: A.cut(queries, keys) takes keys away altogether.": lambda: (
            A.boost(0, by=-np.inf)
        ),
        "by is nan: expected a finite number.\n\nhint: A.cut(queries, keys) takes keys away altogether.": lambda: (
            A.boost(0, by=np.nan)
        ),
        "by is None: expected a number.\n\nhint: A.cut(queries, keys) takes keys away altogether.": lambda: A.boost(
            0, by=None
        ),
        "by is 1e+39: expected a number from -3.4e38 to 3.4e38.\n\n"
        "hint: A.cut(queries, keys) takes keys away altogether.": lambda: A.boost(0, by=1e39),
        f"t is 0.0: expected a number above 0, from 1e-30 to 1e30.{HINT}": lambda: A.tempered(0),
        f"t is [1.0, 1.0, -2.0, 1.0]: expected a number above 0, from 1e-30 to 1e30.{HINT}": lambda: A.tempered(
            [1, 1, -2, 1]
        ),
        f"t is inf: expected a finite number.{HINT}": lambda: A.tempered(np.inf),
        "t has shape (2,): expected one number per query head, (heads 4,).": lambda: A.tempered([1.0, 2.0]),
        "t is [1.0, 2.0], and a softcap is one number for all heads: c·tanh(s/c)/t has a softcap of c/t.\n\n"
        "hint: A.part(batch, head).tempered(t) is one head's matrix.": lambda: ch.AttentionMatrix(
            np.ones((2, 3, 4)), np.ones((2, 3, 4)), softcap=5.0
        ).tempered([1.0, 2.0]),
        f"t is [1e-20]: scale/t would lie outside 1e-30 to 1e18.{HINT}": lambda: ch.AttentionMatrix(
            np.ones((3, 4)), np.ones((3, 4)), scale=1e10
        ).tempered(1e-20),
        f"t is 1000000000000.0: softcap/t would lie outside 1e-30 to 1e18.{HINT}": lambda: ch.AttentionMatrix(
            np.ones((3, 4)), np.ones((3, 4)), softcap=1e-20
        ).tempered(1e12),
    },
    IndexError: {
        "keys has position 5, and the matrix has 5 keys.\n\nhint: 0 is the first, -1 the last.": lambda: A.cut(keys=5),
        "queries has position -7, and the matrix has 6 queries.\n\nhint: 0 is the first, -1 the last.": lambda: A.cut(
            [0, -7], 0
        ),
        "keys is slice(5, 9, None): it chooses none of 5 keys.\n\nhint: keys=None is all.": lambda: A.boost(
            slice(5, 9), by=1.0
        ),
        "queries is []: it chooses none of 6 queries.\n\nhint: queries=None is all.": lambda: A.cut([]),
        "queries has 7 positions, and the matrix has 6 queries.\n\nhint: give each once.": lambda: A.cut(
            [0, 0, 1, 1, 2, 2, 3]
        ),
        "keys is a ndarray of shape (2, 5): it chooses none of 5 keys.\n\nhint: keys=None is all.": lambda: A.cut(
            keys=np.zeros((2, 5), bool)
        ),
        "keys is bool of shape (4,): expected (keys 5), or (batch 2, keys 5).\n\n"
        "hint: bool has True or False for each; positions are whole numbers.": lambda: A.cut(keys=[True] * 4),
        "queries is bool of shape (1, 3): expected (queries 3).\n\n"
        "hint: bool has True or False for each; positions are whole numbers.": lambda: FLAT.cut(np.ones((1, 3), bool)),
        f"queries is [True, 3]: {FORMS}\n\nhint: queries=[3, 4]": lambda: A.cut([True, 3]),
        f"queries is True: {FORMS}\n\nhint: queries=[3, 4]": lambda: A.cut(True),
        f"queries is 'sat': {FORMS}\n\nhint: ch.change finds the words of a text.": lambda: A.cut("sat"),
        f"queries is a ndarray of shape (3,), float64: {FORMS}\n\nhint: queries=[3, 4]": lambda: A.cut(np.ones(3)),
        f"queries is a ndarray of shape (2, 3), int64: {FORMS}\n\nhint: queries=[3, 4]": lambda: A.cut(
            np.ones((2, 3), int)
        ),
        "queries is slice('a', None, None): expected a slice of whole numbers.": lambda: A.cut(slice("a", None)),
    },
}


@each_error(WORDS)
def test_each_error_has_its_exact_text(call: Any, kind: type[Exception], words: str, monkeypatch: Any):
    assert_words(call, kind, words, monkeypatch)


@pytest.mark.parametrize("name", ["cut", "boost", "tempered"])
def test_a_sharded_matrix_says_what_to_give_instead(name: str):
    matrix = alone(ch.distributed.ShardedAttentionMatrix, {"q": torch.ones(3, 4), "k": torch.ones(3, 4)})
    with pytest.raises(AttributeError, match=f"ShardedAttentionMatrix has no '{name}': give s"):
        getattr(matrix, name)
    with pytest.raises(AttributeError, match=r"has no 'rollout'\.$"):
        getattr(matrix, "rollout")  # noqa: B009
