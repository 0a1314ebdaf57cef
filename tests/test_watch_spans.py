"""seen.spans: whole words, sentences and speakers cut in every layer and head; seen.verify: the model run without."""

import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError, UnknownNameError
from clearhead.watching.pieces import sentences, words
from seeds import fresh
from test_watch_causes import watched
from test_watch_merged import merged_model
from watched import build, inputs

TEXT = ["<s>", "Hum", "pty", " sat", ".", " He", "'s", " up", "!", "\n", "All"]  # as many as `inputs` has
WORDS, SENTENCES = [0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2]


class Tokenizer:
    """Knows the texts of some ids; like SentencePiece, it drops the space before the first where `drops`."""

    def __init__(self, ids: Any, texts: list[str], *, drops: bool) -> None:
        self.texts = dict(zip(ids.tolist(), texts, strict=True))
        self.drops = drops

    def decode(self, ids: list[int]) -> str:
        text = "".join(self.texts[one] for one in ids)
        return text.removeprefix(" ") if self.drops else text


def gpt2(ids: Any = None, **more: Any) -> Any:
    return watched(build("gpt2"), {"input_ids": torch.arange(11)[None] if ids is None else ids}, **more)


def reading(texts: list[str], *, drops: bool = False) -> Any:
    """A run over these texts, one for each token."""
    ids = torch.from_numpy(fresh().permutation(59)[:11])
    return gpt2(ids[None], tokenizer=Tokenizer(ids, texts, drops=drops))


def test_a_span_is_what_ch_change_does_without_it():
    """Every pair of spans, each cut at the output of a model's only attention layer, on which the number is linear."""
    model, rng = build("gpt2", n_layer=1).double(), fresh()
    passed = {"input_ids": torch.from_numpy(rng.integers(2, 59, (2, 8)))}
    outputs: list[torch.Tensor] = []
    model.transformer.h[0].attn.register_forward_hook(lambda _, __, out: outputs.append(out[0]))
    along = torch.from_numpy(rng.standard_normal((2, 8, 32)))
    with ch.watch(model, causes=True) as seen:
        model(**passed)
        (outputs[-1] * along).sum().backward()
    labels = rng.integers(-1, 3, 8)
    labels[:3] = 0, 1, 2
    result = seen.spans(labels)[0]
    assert result.shape == (2, 4, 3, 3)
    for query, key in np.ndindex(3, 3):
        places = [np.flatnonzero(labels == which).tolist() for which in (query, key)]
        if min(places[1]) <= max(places[0]):
            edit = ch.cut(queries=places[0], keys=places[1], heads=[2])
            with torch.no_grad(), ch.change(model, edit):
                model(**passed)
            effect = ((outputs[-1] - outputs[0]) * along).sum((1, 2)).detach()
            np.testing.assert_allclose(result[:, 2, query, key], effect, rtol=1e-6, atol=1e-9)
        else:
            assert not result[:, :, query, key].any()


@pytest.mark.parametrize("drops", [False, True])
def test_words_and_sentences_are_those_of_the_text(drops: bool):  # noqa: FBT001
    seen = reading(TEXT, drops=drops)
    for groups, labels in (("words", WORDS), ("sentences", SENTENCES)):
        spans = seen.spans(groups)
        for layer in (0, 1):
            torch.testing.assert_close(spans[layer], seen.cut_effects(layer).spans(labels, labels), rtol=0, atol=0)
    assert seen.spans("words").names(1) == (["<s>", "Humpty", "sat", ".", "He's", "up", "!", "\n", "All"],) * 2
    assert seen.spans("sentences", layers=[1]).names(1)[0] == ["<s>Humpty sat.", "He's up!", "All"]
    by_name = seen.spans({"who": ["Humpty", "He's"], "rest": range(7, 11)})
    assert by_name.names()[0] == ["who", "rest"]
    places = [-1, 0, 0, -1, -1, 0, 0, 1, 1, 1, 1]
    torch.testing.assert_close(by_name[0], seen.cut_effects(0).spans(places, places), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("divide", "pieces", "expected"),
    [
        (words, [" un", "believ", "ably", " still", ",", " it"], [0, 0, 0, 1, 2, 3]),
        (words, ["don", "'", "t", " ", "x", "2", "y"], [0, 0, 0, 1, 2, 2, 2]),
        (words, ["", "é", "t", "", "", "€", ""], [0, 0, 0, 1, 1, 1, 1]),
        (words, ["我们", "关", "注", " it"], [0, 1, 2, 3]),
        (words, ["한", "국", "어"], [0, 0, 0]),
        (words, [], []),
        (sentences, ["It", " is", " 3", ".", "1", "4", "!", '"', " So", "\n", "what", "?"], [0] * 8 + [1] * 4),
        (sentences, ["a", "\n\n", "b", "\n", " \n", "c"], [0, 0, 1, 1, 1, 2]),
        (sentences, ["他来", "了。", "我", "去。"], [0, 0, 1, 1]),
        (sentences, ["...", " so", " on", "…", "\n", "", "é"], [0, 1, 1, 1, 1, 2, 2]),
        (sentences, [], []),
    ],
)  # fmt: skip
def test_words_and_sentences(divide: Any, pieces: list[str], expected: list[int]):
    assert divide(pieces) == expected


def test_the_strongest_pairs_are_those_of_all_layers_and_heads():
    seen = reading(TEXT)
    spans = seen.spans("words")
    every = np.stack([spans[layer].numpy() for layer in range(2)])
    result = spans.strongest(12)
    order = np.argsort(-np.abs(every).reshape(-1), kind="stable")[:12]
    places = np.stack(np.unravel_index(order, every.shape), axis=1).tolist()
    assert [[int(one.layer), *one[1:5]] for one in result] == places
    assert [one.value for one in result] == every.reshape(-1)[order].tolist()
    for one, names in zip(result, result.tokens, strict=True):
        assert one.queries == tuple(np.flatnonzero(np.array(WORDS) == one.query))
        assert one.keys == tuple(np.flatnonzero(np.array(WORDS) == one.key))
        assert names == (spans.names()[0][one.query], spans.names()[1][one.key])
    causal = 9 * 10 // 2
    assert len(spans.strongest(10**6)) == 2 * 4 * causal
    for table in (str(spans), str(seen.spans("sentences")), str(seen.strongest(9))):
        assert max(map(len, table.splitlines())) <= 80
    assert len(str(spans).splitlines()) == 21
    assert "<s>Humpty sat. ← <s>Humpty sat." in str(seen.spans("sentences"))
    assert "⏎" in str(spans.strongest(10**6))
    assert repr(spans) == "Spans(2 layers; the first has 9 × 9 spans)"


def test_a_long_text_is_cut_to_the_table():
    seen = reading([text * 9 for text in TEXT])
    lines = str(seen.spans([0] * 5 + [1] * 6)).splitlines()[1:]
    assert all(len(line) == 80 and line.count("…") == 2 for line in lines)


def test_texts_of_a_batch_are_divided_each_for_itself():
    ids = torch.from_numpy(fresh().permutation(59)[:11])
    rows = torch.stack([ids, ids.flip(0)])
    seen = gpt2(rows, tokenizer=Tokenizer(ids, TEXT, drops=False))
    local = [WORDS, words(TEXT[::-1])]
    torch.testing.assert_close(seen.spans("words")[0], seen.cut_effects(0).spans(local, local), rtol=0, atol=0)
    assert seen.spans("words").names(0, 1)[0][:3] == ["All", "\n", "!"]
    both = seen.spans({"x": "up"})
    assert both[1].shape == (2, 4, 1, 1)
    alone = gpt2(rows).spans([[0] * 11, [-1] * 11])
    assert not alone[0][1].any()


def test_an_encoders_text_is_divided_apart_from_the_decoders(tmp_path: Path):
    ids = torch.from_numpy(fresh().permutation(59)[:11])
    passed = {"input_ids": ids[None], "decoder_input_ids": ids[None, :7]}
    tokenizer = Tokenizer(ids, TEXT, drops=False)
    seen = watched(build("t5"), passed, tokenizer=tokenizer)
    spans = seen.spans("sentences")
    shapes = {name.partition(".")[0] + name[-5:]: tuple(x.shape[2:]) for name, x in spans.items()}
    assert shapes == {"encoder.self": (3, 3), "decoder.self": (2, 2), "decodercross": (2, 3)}
    mixed = seen.spans("words", "sentences", layers=["decoder.1.cross"])
    assert mixed.names("decoder.1.cross")[1] == ["<s>Humpty sat.", "He's up!", "All"]
    with pytest.raises(RuleError, match=r"keys of layer decoder\.1\.cross are of the source"):
        seen.spans([0] * 7, layers=["decoder.1.cross"])
    seen.save(tmp_path / "seen")
    again = ch.load(tmp_path / "seen").spans("sentences")
    np.testing.assert_allclose(again["decoder.0.cross"], spans["decoder.0.cross"], rtol=1e-5, atol=1e-6)


def test_the_source_of_merged_attention_is_behind_the_text():
    passed = {"input_ids": torch.from_numpy(fresh().integers(2, 55, (2, 5)))}
    passed["decoder_input_ids"] = torch.from_numpy(fresh().integers(2, 55, (2, 4)))
    seen = watched(merged_model(), passed)
    spans = seen.spans({"first": 0, "rest": slice(1, None)}, [slice(0, 3), slice(3, 5)])
    expected = seen.cut_effects("decoder.1").spans([0, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2, 3, 3])
    torch.testing.assert_close(spans["decoder.1"], expected, rtol=0, atol=0)
    assert spans.names("decoder.1")[1] == ["first", "rest", "", ""]


@pytest.mark.parametrize(
    ("groups", "error", "match"),
    [
        ("word", UnknownNameError, "did you mean `words`"),
        ("words", RuleError, "the tokens have no texts"),
        ([0, 1], ShapeError, r"shape \(2,\), and there are 11 queries of layer 0"),
        (np.zeros((1, 1, 11), int), ShapeError, "expected one label for each"),
        ({}, SelectionError, "it has no spans"),
        ({"a": slice(0, 3), "b": [2, 5]}, RuleError, r"token 2 is in groups\['b'\] and in groups\['a'\]"),
        ([slice(0, 3), slice(20, 30)], SelectionError, r"groups\[1\] is slice\(20, 30, None\): none of the 11"),
        ({"a": "sat"}, SelectionError, r"groups\['a'\] is the word 'sat', and the tokens have no texts"),
        ({"a": 11}, SelectionError, "position 11"),
    ],
)  # fmt: skip
def test_groups_that_do_not_fit_are_refused(groups: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        print(gpt2().spans(groups))


def test_what_has_no_text_or_no_derivative_is_refused(tmp_path: Path):
    seen = reading(TEXT, drops=True)
    for again in (pickle.loads(pickle.dumps(seen)), seen.save(tmp_path / "seen") or ch.load(tmp_path / "seen")):
        with pytest.raises(RuleError, match="do not say where words begin"):
            again.spans("words")
        np.testing.assert_allclose(again.spans(WORDS)[1], seen.spans("words")[1], rtol=1e-5, atol=1e-6)
    with pytest.raises(SelectionError, match="seen are: 1"):
        seen.spans("words", layers=[1])["0"]
    with pytest.raises(SelectionError, match="no layer 7"):
        seen.spans("words", layers=[7])
    with pytest.raises(RuleError, match="k is 0"):
        seen.spans("words").strongest(0)
    model, passed = build("clip"), inputs("clip")
    clip = watched(model, passed, tokenizer=Tokenizer(torch.arange(60), ["a"] * 60, drops=False))
    with pytest.raises(RuleError, match=r"the 17 queries of layer vision_model\.0 are not the tokens of the text"):
        clip.spans("words")
    assert clip.spans("words", layers=["text_model.1"])[0].shape == (2, 4, 1, 1)
    with ch.watch(model) as without:
        model(**passed)
    with pytest.raises(RuleError, match="watched without derivatives"):
        without.spans([0] * 11)


@pytest.mark.parametrize("what", ["edges", "renormalise", "first"])
def test_what_is_verified_agrees_with_the_edit_by_hand(what: Any):
    """Single edges of both kinds, or spans of a kind, in several layers and heads."""
    model, ids = build("gpt2"), torch.from_numpy(fresh().integers(2, 59, (1, 9)))

    def number() -> torch.Tensor:
        return model(ids).logits[0, -1].logsumexp(0)

    with ch.watch(model, causes=True) as seen:
        number().backward()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    groups = {"a": slice(0, 2), "b": [2, 5, 6], "c": [slice(3, 5), slice(7, None)]}
    if what == "edges":
        some = seen.strongest(6) + seen.strongest(3, rest="first")
        places = [((edge.query,), (edge.key,), edge.rest) for edge in some]
    else:
        some = seen.spans(groups, rest=what).strongest(4)
        places = [(pair.queries, pair.keys, what) for pair in some]
    result = seen.verify(some, number)
    for one, (queries, keys, rest), line in zip(some, places, result, strict=True):
        cut = ch.cut(queries=queries, keys=keys, layers=[one.layer], heads=[one.head], rest=rest)
        with torch.no_grad(), ch.change(model, cut):
            after = number()
        with torch.no_grad():
            assert line.truth == pytest.approx(float(after - number()), abs=1e-6)
        rows, columns = (np.isin(np.arange(9), side) - 1 for side in (queries, keys))
        estimate = float(seen.cut_effects(one.layer, rest=rest).spans(rows, columns)[0, one.head, 0, 0])
        assert line.estimate == one.value == pytest.approx(estimate, rel=1e-4, abs=1e-6)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert ("rank correlation" if what == "edges" else "c ← ") in str(result)
    assert all(len(text) <= 80 for text in str(result).splitlines())


def test_what_cannot_be_verified_is_refused():
    model, ids = build("gpt2", n_layer=1), torch.tensor([[1, 2, 3], [4, 5, 6]])
    with ch.watch(model, causes=True) as both:
        model(ids).logits.sum().backward()
    with pytest.raises(RuleError, match="2 texts were watched together"):
        both.verify(both.strongest(2), lambda: 0.0)
    with ch.watch(model, causes=True) as seen:
        model(ids[:1]).logits.sum().backward()
    edges = seen.strongest(2)
    wrong: Any = [(0, 1)]
    with pytest.raises(DtypeError, match=r"expected what seen\.strongest gives"):
        seen.verify(wrong, lambda: 0.0)
    with pytest.raises(DtypeError, match="run is 3"):
        seen.verify(edges, 3)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="expected one number"):
        seen.verify(edges, lambda: torch.zeros(2))
    again = pickle.loads(pickle.dumps(seen))
    with pytest.raises(RuleError, match="model that was watched is gone"):
        again.verify(edges, lambda: 0.0)
    del model
    gc.collect()
    with pytest.raises(RuleError, match="model that was watched is gone"):
        seen.verify(edges, lambda: 0.0)
