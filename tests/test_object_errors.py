"""The exact error texts for wrong indices, products, options and edits of a matrix and of its effects."""

from collections.abc import Callable
from typing import Any

import numpy as np

import clearhead as ch
from error_texts import Errors, exact_texts

Q, K, V, G = np.ones((2, 4, 6, 8)), np.ones((2, 2, 5, 8)), np.ones((2, 2, 5, 3)), np.ones((2, 4, 6, 3))
FLAT = np.ones((3, 4))
A = ch.AttentionMatrix(Q, K)


def matrix(**rules: Any) -> ch.AttentionMatrix:
    return ch.AttentionMatrix(FLAT, FLAT, **rules)


def cuts(v: Any = V, g: Any = G) -> ch.EffectMatrix:
    return A.cut_effects(v, g)


def observe(**wanted: Any) -> Callable[[], Any]:
    return lambda: A.observe(**wanted)


MATRIX = "the matrix is (batch 2, heads 4, queries 6, keys 5)."
SHAPE = "or one for all heads,"
COPY = "expected integers, slices and `...`.\n\nhint: A[...][that] indexes a stored copy."
WHOLE = "expected a whole number from 1 up.\n\nhint: "
FLOAT = "expected float64, float32, bfloat16 or float16."
LABELS = np.zeros(6, int), np.zeros(5, int)
STORED = f"hint: {ch.EffectMatrix.instead}; np.asarray of the matrix stores all 240 numbers."
EFFECTS = "EffectMatrix(cut, batch 2, heads 4, queries 6, keys 5) float64"
OBJECT: Errors = {  # of a matrix, and of one of its effects
    IndexError: {
        f"5 indices for 4 axes: {MATRIX}": lambda: A[0, 0, 0, 0, 0],
        f"index 4 is outside axis 1: {MATRIX}": lambda: A[0, 4],
        "the transpose has no index, only A.T @ g.\n\nhint: A[..., 3] is a column of the matrix.": lambda: A.T[..., 7],
        f"axis 0 is indexed by list: {COPY}": lambda: A[[0, 1]],
        f"axis 1 is indexed by slice(None, None, 0): {COPY}": lambda: A[:, ::0],
        "queries is 3: expected a slice.\n\nhint: queries=slice(-64, None)": observe(entropy=True, queries=3),
    },
    TypeError: {
        f"v is int64: {FLOAT}": lambda: A @ np.ones(5, int),
        "query_groups is float64: expected whole numbers.": observe(groups=(np.zeros(6), LABELS[1])),
        "unknown effect `peak`.\n\nhint: Known: by_key, by_query, groups, image, strongest, top.": lambda: (
            cuts().observe(peak=True)
        ),
        f"numpy.add would need every number of {EFFECTS}.\n\n{STORED}": lambda: cuts() + 1,
    },
    ValueError: {
        f"v has shape (6,): expected (2, 2, 5, d), {SHAPE} (5,) or (5, d).\n\nhint: {MATRIX}": lambda: A @ np.ones(6),
        f"g has shape (2, 2, 6, 3): expected (2, 4, 6, d), {SHAPE} (6,) or (6, d).\n\nhint: {MATRIX}": [
            lambda: A.T @ np.ones((2, 2, 6, 3)),
            lambda: cuts(g=np.ones((2, 2, 6, 3))),
        ],
        "g has 12 columns but v has d_v 3: g is the gradient at the head's output, which has v's columns.\n\n"
        "hint: o = A @ v; g, = torch.autograd.grad(number, o)": lambda: cuts(g=np.ones((2, 4, 6, 12))),
        "entropy is 1: expected True or False.": observe(entropy=1),
        f"top is 0: {WHOLE}top=8": observe(top=0),
        "image is 64: expected (height, width) in pixels.\n\nhint: image=(256, 256)": observe(image=64),
        "key_groups has shape (6,): expected (batch 2, keys 5).": [
            observe(groups=(LABELS[0], LABELS[0])),
            lambda: cuts().groups(LABELS[0], LABELS[0]),
        ],
    },
}
test_each_error_of_a_matrix_and_effects_has_its_exact_text = exact_texts(OBJECT)


FLATTER = "\n\nhint: t=1.5 makes weights flatter, t=0.5 sharper."
AWAY = "\n\nhint: by=2.0, for example; A.cut(queries, keys) removes keys altogether."
FORMS = (
    "expected a position, a list of positions, a slice, or True and False for each of 5.\n\n"
    "hint: keys=[0, 3] or keys=slice(0, 4); ch.cut and ch.boost also take words, for a model's run."
)
EDITS: Errors = {
    ValueError: {
        "cut has neither queries nor keys: no weight would be left.\n\nhint: A.cut(keys=0)": lambda: A.cut(),
        f"by is -inf: expected a finite number.{AWAY}": lambda: A.boost(0, by=-np.inf),
        f"t is 0.0: expected a number above 0, from 1e-30 to 1e30.{FLATTER}": lambda: A.tempered(0),
    },
    IndexError: {
        f"keys is 5: {FORMS}": lambda: A.cut(keys=5),
        f"keys is 'sat': {FORMS}": lambda: A.cut(keys="sat"),
        "keys is slice(5, 9, None): it chooses none of 5 keys.\n\nhint: keys=None is all.": lambda: A.boost(
            slice(5, 9), by=1.0
        ),
    },
}
test_each_error_of_an_edit_has_its_exact_text = exact_texts(EDITS)


REST: Errors = {
    IndexError: {"query is 1.5: expected a whole number.": lambda: ch.rollout([matrix()], query=1.5)},
    TypeError: {
        "matrices is an AttentionMatrix of shape (3, 3): expected a list of AttentionMatrix, one per layer.\n\n"
        "hint: ch.rollout([A0, A1], query=-1)": lambda: ch.rollout(matrix(), query=0),
        "unknown option `batsh`.\n\nhint: did you mean `batch`? "
        "Known: batch, language, source_tokens, title, tokens, v.": lambda: matrix().save("page.html", batsh=A),
    },
    ValueError: {
        "q is ('n', 3): expected an array, or its shape in whole numbers.\n\nhint: q=(3, 4)": lambda: ch.shapes(
            ("n", 3), (3, 2), (3, 2)
        ),
        "language is 'fr': expected 'en' or 'zh'.\n\nhint: language=\"zh\"": [
            lambda: matrix().to_html(language="fr"),
            lambda: ch.diagnose(FLAT, FLAT, FLAT, FLAT).told("fr"),
        ],
    },
}


test_each_other_error_has_its_exact_text = exact_texts(REST, works=True)
