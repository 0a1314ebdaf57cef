"""seen.verify: the model run without single edges; words and sentences of a text."""

import gc
import pickle
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.errors import RuleError
from clearhead.watching.pieces import sentences, words
from seeds import fresh
from watched import build


@pytest.mark.parametrize(
    ("divide", "pieces", "expected"),
    [
        (words, [" un", "believ", "ably", " still", ",", " it"], [0, 0, 0, 1, 2, 3]),
        (words, ["", "é", "t", "", "", "€", ""], [0, 0, 0, 1, 1, 1, 1]),
        (words, ["我们", "关", "注", " it"], [0, 1, 2, 3]),
        (words, ["한", "국", "어"], [0, 0, 0]),
        (sentences, ["It", " is", " 3", ".", "1", "4", "!", '"', " So", "\n", "what", "?"], [0] * 8 + [1] * 4),
        (sentences, ["他来", "了。", "我", "去。"], [0, 0, 1, 1]),
        (sentences, ["...", " so", " on", "…", "\n", "", "é"], [0, 1, 1, 1, 1, 2, 2]),
    ],
)  # fmt: skip
def test_words_and_sentences(divide: Any, pieces: list[str], expected: list[int]):
    assert divide(pieces) == expected


def test_what_is_verified_agrees_with_the_edit_by_hand():
    """Edges of both kinds, in several layers and heads."""
    model, ids = build("gpt2"), torch.from_numpy(fresh().integers(2, 59, (1, 9)))

    def number() -> torch.Tensor:
        return model(ids).logits[0, -1].logsumexp(0)

    with ch.watch(model, causes=True) as seen:
        number().backward()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    some = seen.strongest(6) + seen.strongest(3, rest="first")
    result = seen.verify(some, number)
    for one, line in zip(some, result, strict=True):
        cut = ch.cut(queries=one.query, keys=one.key, layers=[one.layer], heads=[one.head], rest=one.rest)
        with torch.no_grad(), ch.change(model, cut):
            after = number()
        with torch.no_grad():
            assert line.truth == pytest.approx(float(after - number()), abs=1e-6)
        estimate = float(seen.cut_effects(one.layer, rest=one.rest)[0, one.head, one.query, one.key])
        assert line.value == one.value == pytest.approx(estimate, rel=1e-4, abs=1e-6)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert "rank correlation" in str(result)
    assert all(len(text) <= 80 for text in str(result).splitlines())


def test_what_cannot_be_verified_is_refused():
    model, ids = build("gpt2", n_layer=1), torch.tensor([[1, 2, 3], [4, 5, 6]])
    with ch.watch(model, causes=True) as both:
        model(ids).logits.sum().backward()
    with pytest.raises(RuleError, match="2 texts were watched together"):
        both.verify(both.strongest(2), lambda: 0.0)
    with ch.watch(model, causes=True) as seen:
        model(ids[:1]).logits.sum().backward()
    again = pickle.loads(pickle.dumps(seen))
    del model
    gc.collect()
    for one in (seen, again):
        with pytest.raises(RuleError, match="model that was watched no longer exists"):
            one.verify(seen.strongest(2), lambda: 0.0)
