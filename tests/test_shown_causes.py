"""What `ch.explain` shows of 20 texts is what a dense GPT-2 in float64 does, whose weights are changed by hand."""

import numpy as np
import pytest

import clearhead as ch
from clearhead.models import model as gpt2
from dense_gpt2 import dense, in_float64
from shown_causes import check

TEXTS = [
    "mary had a little",
    "humpty dumpty sat on",
    "humpty dumpty sat on a wall humpty dumpty had a great",
    "jack and jill went up the hill to fetch a pail of",
    "little miss muffet sat on a",
    "hey diddle diddle the cat and the",
    "twinkle twinkle little star how i wonder what you",
    "baa baa black sheep have you any",
    "three blind mice see how they",
    "old king cole was a merry old",
    "the itsy bitsy spider went up the water",
    "rain rain go away come again another",
    "hickory dickory dock the mouse ran up the",
    "row row row your boat gently down the",
    "one two buckle my",
    "london bridge is falling",
    "little bo peep has lost her",
    "pat a cake pat a cake baker's",
    "the queen of hearts she made some",
    "ring around the rosie a pocket full of",
]


@pytest.mark.parametrize("texts", [
    pytest.param(TEXTS[::2], marks=pytest.mark.gate, id="half"), pytest.param(TEXTS, marks=pytest.mark.long, id="all"),
])  # fmt: skip
def test_the_first_three_parts_and_every_sentence_are_true(texts):
    model = in_float64(gpt2.load())

    def logits_of(ids, hidden=(), weigh=None, off=None):
        def changed(layer, weights):
            if hidden:
                seen = np.ones((len(ids), len(ids)), bool)
                seen[:, hidden] = np.eye(len(ids), dtype=bool)[:, hidden]
                weights = weights * seen
                weights /= weights.sum(-1, keepdims=True)
            if off is not None and layer == off[0]:
                weights[off[1], off[2] :] = 0
            return weights if weigh is None else weigh(layer, weights)

        return dense(model, ids, weigh=changed)[0]

    check(ch.explain, texts, logits_of)
