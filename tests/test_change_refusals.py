"""What ch.change refuses, and when: before the block, before the first layer, or when the block ends."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import clearhead as ch
from changed import Letters
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError
from clearhead.watching.seen import Seen
from small_models import small, taken
from watched import build, inputs, seen_of


def test_after_an_exception_the_model_is_as_it_was():
    model, passed = build("llama"), inputs("llama")
    config, hooks = model.config.to_dict(), [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with torch.no_grad():
        before = model(**passed).logits
        with pytest.raises(ZeroDivisionError), ch.change(model, ch.cut(keys=1)):
            raise ZeroDivisionError(model(**passed))
        with pytest.raises(SelectionError), ch.change(model, ch.cut(keys=99)):
            model(**passed)
        with pytest.raises(SelectionError), ch.change(model, ch.cut(keys=1, layers=[9])):
            raise AssertionError("the block was entered")
        assert torch.equal(before, model(**passed).logits)
    assert model.config.to_dict() == config
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (ch.cut(keys=1, layers=[2]), SelectionError, r"cut\(keys=1, layers=\[2\]\): there is no layer 2 in Llama"),
    (ch.cut(keys=1, layers=[-3]), SelectionError, "there is no layer -3"),
    (ch.cut(keys=1, layers=["decoder.0"]), SelectionError, "there is no layer 'decoder.0'"),
    ([ch.cut(keys=1), 3], DtypeError, "edits is .*: expected an edit, or a list of edits"),
    ([], RuleError, "edits is empty"),
    (ch.like(Seen()), RuleError, "the other run saw no attention"),
]

RUNNING: list[tuple[Any, type[Exception], str]] = [  # what the text has not, before the first layer
    (ch.cut(keys=11), SelectionError, r"layer 0: cut\(keys=11\): keys has position 11, but the text has 11 tokens"),
    (ch.off(heads=[4]), SelectionError, r"layer 0: off\(.*\): there is no head 4 in layer 0, which has 4"),
    (ch.cut(queries=-12, layers=[1]), SelectionError, "layer 0: .*queries has position -12"),
    (ch.cut(keys="w2"), SelectionError, "keys is the word 'w2', but there is no tokenizer"),
]


@pytest.mark.parametrize(("edits", "kind", "words"), REFUSED + RUNNING, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_act_is_refused_before_the_first_layer(edits: Any, kind: type[Exception], words: str):
    model, passed = build("llama"), inputs("llama")
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: pytest.fail("a layer ran"))
    entered = (edits, kind, words) in RUNNING
    with pytest.raises(kind, match=words), ch.change(model, edits):
        model(**passed) if entered else pytest.fail("the block was entered")


def test_words_not_there_or_several_times_are_refused():
    model, passed = build("llama"), inputs("llama")
    passed["input_ids"] = torch.tensor([[20, 21, 22, 21], [20, 21, 22, 23]])
    for word, words in (
        ("w23", "of sequence 0 has no such word"),
        ("w21", r"(?s)of sequence 0 has it 2 times.*'w21#1' is the first, 'w21#all' means all of them"),
        ("w21#2", "of sequence 1 has 'w21' once"),
    ):
        with pytest.raises(SelectionError, match=words), ch.change(model, ch.cut(keys=word), tokenizer=Letters()):
            model(**passed)
    with ch.change(model, [ch.cut(keys="w22"), ch.cut(keys="w21#all")], tokenizer=Letters()):
        model(**passed)


def test_an_edit_that_never_acted_is_named_when_the_block_ends():
    model, passed = build("llama"), inputs("llama")
    edits = [ch.cut(keys=1), ch.boost(keys=2, queries=slice(11, None), by=1)]
    with (
        pytest.raises(RuleError, match=r"^boost\(keys=2, by=1.0, queries=slice\(11, None\)\) never acted: none of its"),
        ch.change(model, edits),
    ):
        model(**passed)
    with pytest.raises(RuleError, match="never acted: LlamaForCausalLM did not run inside"), ch.change(model, edits):
        pass
    with pytest.raises(RuleError, match="never acted"), ch.change(model, ch.off(layers=["0#2"])):
        model(**passed)
    with ch.change(model, edits):
        model.generate(**passed, max_new_tokens=2)
    with pytest.raises(RuleError, match="never acted"), ch.change(model, ch.cut(queries=4, keys=1)):
        model(**(inputs("llama", "left") | {"attention_mask": torch.tensor([[0, 0] + [1] * 9] * 2)}))  # of padding


def test_a_model_is_changed_once_at_a_time():
    model = build("llama")
    with (
        pytest.raises(RuleError, match="being changed already"),
        ch.change(model, ch.off()),
        ch.change(model, ch.off()),
    ):
        pass
    with pytest.raises(DtypeError, match="model is a int: expected a Transformers model"), ch.change(3, ch.off()):
        pass
    with pytest.raises(DtypeError, match="tokenizer is a int"), ch.change(model, ch.off(), tokenizer=3):
        pass


def test_what_another_run_cannot_bring_is_refused():
    model, passed = build("llama"), inputs("llama", "left")
    run = partial(seen_of, model)
    short, one = ({name: x[part] for name, x in passed.items()} for part in (np.s_[:, :9], np.s_[:1]))
    clean = run(passed)
    for edits, kind, words in (
        (ch.like(run(short)), ShapeError, "queries 11, keys 11.* in this run and .*queries 9, keys 9.* in the other"),
        (ch.like(run(one)), ShapeError, r"layer 0 has \(batch 2"),
        (ch.like(run(passed, layers=[1]), layers=[0]), SelectionError, "the other run has no layer 0"),
        ([ch.like(clean, heads=[0, 1]), ch.cut(keys=3, heads=[1])], RuleError, "another edit acts on the weights"),
        ([ch.like(clean), ch.like(clean, heads=[1])], RuleError, "another edit acts on the weights"),
    ):
        with pytest.raises(kind, match=words), torch.no_grad(), ch.change(model, edits):
            model(**passed)
    with torch.no_grad(), ch.change(model, [ch.like(clean, layers=[1], heads=[2]), ch.cut(keys=5, heads=[0])]):
        run(passed, layers=[0])
        with pytest.raises(RuleError, match="layer 1: its weights come from another run"):
            run(passed)


def test_attention_outside_the_interface_is_named():
    model = small(hf.BloomModel)
    with pytest.raises(RuleError, match=r"BloomAttention.* does not go through"), ch.change(model, ch.cut(keys=1)):
        raise AssertionError("the block was entered")
    model = small(hf.Qwen3NextModel)
    passed = {"input_ids": taken(model)["input_ids"]}
    words = "never acted: none of its layers used Transformers' AttentionInterface, Qwen3NextGatedDeltaNet did not"
    with pytest.raises(RuleError, match=words), torch.no_grad(), ch.change(model, ch.off(layers=[0])):
        model(**passed)
    warned = pytest.warns(UserWarning, match="was not changed: Qwen3NextGatedDeltaNet")
    with warned, torch.no_grad(), ch.change(model, ch.off()):
        model(**passed)


def test_a_watched_sequence_is_changed_as_a_whole():
    model, passed = build("llama"), inputs("llama")
    words = "layer 0: a block of ch.change began or ended within a sequence"
    with torch.no_grad(), ch.watch(model):
        first = model(**passed, use_cache=True)
        with pytest.raises(RuleError, match=words), ch.change(model, ch.cut(keys=1)):
            model(passed["input_ids"][:, :1], past_key_values=first.past_key_values)
