"""ch.change: each edit equals the same edit made by hand on stored logits, and the model is unchanged afterwards."""

from itertools import product
from typing import Any

import pytest
import torch

import changed
import clearhead as ch
from changed import CUT, ByHand, Letters, added, assert_edited, by_hand, mean, rested, zeroed
from clearhead.changing.edits import Edit
from clearhead.errors import RuleError
from test_hf import same_gradients
from watched import build, greedy, inputs, logits, run_watched, seen_of


def close(result: torch.Tensor, expected: torch.Tensor, rows: Any = slice(None)) -> None:
    """Within 1e-5 of the largest number."""
    size = float(expected[rows].abs().max())
    torch.testing.assert_close(result[rows], expected[rows], rtol=0, atol=1e-5 * size)


def edited(family: str, edits: Any, hand: ByHand, padding: str = "") -> None:
    passed = inputs(family, padding)
    assert_edited(build(family), passed, edits, hand, passed["attention_mask"].bool() if padding else slice(None))


ROWS, KEYS = [6, 7, 8, 9, 10], [1, 2, 4]
CASES: list[tuple[list[Edit], ByHand]] = [
    ([ch.cut(queries=slice(6, None), keys=KEYS)], ByHand([added(CUT, ROWS, KEYS)])),
    ([ch.cut(queries=[9, -1], heads=[1])], ByHand([added(CUT, [9, 10], None, [1])])),
    ([ch.boost(keys=-2, by=-3, heads=[2])], ByHand([added(-3.0, None, [9], [2])])),
    ([ch.off(to="mean", heads=[0]), ch.off(heads=[1])], ByHand(outputs=[mean([0]), zeroed([1])])),
]


@pytest.mark.parametrize(("edits", "hand"), CASES, ids=lambda case: str(case) if isinstance(case, list) else "")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_edit_equals_the_same_edit_by_hand(family: str, edits: list[Edit], hand: ByHand):
    edited(family, edits, hand)


EVERYTHING = [*changed.OF_LOGITS, ch.off(heads=[3])]
BY_HAND = ByHand(changed.LOGITS_BY_HAND, [zeroed([3])])


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("padding", ["", "left", "right"])
def test_edits_act_in_the_order_given(family: str, padding: str):
    edited(family, EVERYTHING, BY_HAND, padding)


QUICK = {("gpt2", "left", "dynamic"), ("llama", "", "static"), ("gpt-oss", "left", "static")}
GENERATING = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.gate])
    for case in product(("gpt2", "llama", "mistral", "gemma2", "gpt-oss"), ("", "left"), ("dynamic", "static"))
]


@pytest.mark.parametrize(("family", "padding", "cache"), GENERATING)
def test_generated_tokens_are_those_of_full_passes_by_hand(family: str, padding: str, cache: str):
    model, passed, options = build(family), inputs(family, padding), greedy(6)
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    with ch.change(model, EVERYTHING):
        result = model.generate(**passed, **options)
    with by_hand(model, BY_HAND), torch.no_grad():
        expected = generated(model, passed, 6)
    torch.testing.assert_close(result, expected)


def generated(model: Any, passed: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """Greedy tokens, each from a full pass without a cache."""
    ids = passed["input_ids"]
    mask = passed.get("attention_mask", torch.ones_like(ids))
    for _ in range(steps):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
        ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, mask[:, -1:]], 1)
    return ids


RESTED = [ch.boost(keys=[2, 4], by=2), ch.cut(queries=slice(5, None), keys=slice(0, 5), heads=[0, 1, 3], rest="first")]
RESTED_BY_HAND = ByHand([added(2.0, None, [2, 4]), rested(range(5, 99), range(5), [0, 1, 3])])


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt-oss"])
@pytest.mark.parametrize("padding", ["", "right"])
def test_weights_move_to_the_first_token_or_to_a_learned_sink(family: str, padding: str):
    RESTED_BY_HAND.kept.clear()
    edited(family, RESTED, RESTED_BY_HAND, padding)
    model, passed = build(family), inputs(family)
    with ch.change(model, RESTED), ch.watch(model) as seen:
        result = model.generate(**passed, **greedy(4))
    with by_hand(model, RESTED_BY_HAND) as hand, torch.no_grad():
        torch.testing.assert_close(result, generated(model, passed, 4))
    for layer, weights in enumerate(hand.kept.values()):
        close(torch.as_tensor(seen.matrix(layer)[...])[:, :, -1], weights[:, :, -1])


@pytest.mark.parametrize(("family", "padding"), [("mistral", ""), ("llama", "left")])
def test_weights_move_to_no_first_token_that_is_not_seen(family: str, padding: str):
    model, passed, edit = build(family), inputs(family, padding), ch.cut(queries=10, keys=8, rest="first")
    with pytest.raises(RuleError, match="does not see the first token"), ch.change(model, edit):
        model(**passed)
    with ch.watch(model, causes=True) as seen:
        logits(model(**passed)).sum().backward()
    if padding:
        with pytest.raises(RuleError, match="begins with padding"):
            seen.cut_effects(0, rest="first")


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_watch_sees_the_changed_attention(order: str):
    model, passed = build("llama"), inputs("llama", "left")
    blocks: list[Any] = [ch.change(model, EVERYTHING), ch.watch(model, entropy=True, received=True)]
    with torch.no_grad():
        with by_hand(model, BY_HAND) as hand:
            model(**passed)
        with blocks[order == "outside"] as one, blocks[order == "inside"] as other:
            model(**passed)
    seen, rows = one or other, passed["attention_mask"].bool()[:, None, :, None]
    for layer in range(2):
        weights = torch.as_tensor(seen.matrix(layer)[...])
        expected = hand.kept[f"model.layers.{layer}.self_attn"]
        torch.testing.assert_close(weights * rows, expected * rows, rtol=0, atol=1e-5)
        torch.testing.assert_close(seen[layer].received, weights.sum(-2), rtol=0, atol=1e-4)


def test_generate_under_watch_joins_the_steps():
    model, passed = build("gpt2"), inputs("gpt2", "left")
    with ch.change(model, EVERYTHING), ch.watch(model, received=True, image=(3, 4)) as seen:
        tokens = model.generate(**passed, **greedy(6))
    mask = torch.cat([passed["attention_mask"], torch.ones(2, 5, dtype=torch.long)], 1)
    with by_hand(model, BY_HAND) as hand, torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(input_ids=tokens[:, :-1], attention_mask=mask, position_ids=positions, use_cache=False)
    rows = mask.bool()[:, None, :, None]
    for layer in range(2):
        weights = torch.as_tensor(seen.matrix(layer)[...])
        torch.testing.assert_close(weights * rows, hand.kept[f"transformer.h.{layer}.attn"] * rows, rtol=0, atol=1e-5)
        torch.testing.assert_close(seen[layer].received, weights.sum(-2), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("heads", [None, [1], [0, 2]])
def test_another_runs_weights_on_this_runs_values(family: str, heads: list[int] | None):
    model, passed = build(family), inputs(family)
    other = {**passed, "input_ids": passed["input_ids"].flip(1)}
    clean = seen_of(model, other)
    with torch.no_grad():
        with by_hand(model, ByHand()) as run:
            model(**other)
        weights = {path: x for path, x in run.kept.items() if ".1." in path}
        with by_hand(model, ByHand(heads=heads, weights=weights)):
            expected = model(**passed).logits
        with ch.change(model, ch.like(clean, layers=[1], heads=heads)):
            close(run_watched(model, passed, layers=[0])[0].logits, expected)


def test_words_are_found_in_each_sequence_of_the_batch():
    model, passed = build("llama"), inputs("llama")
    ids = passed["input_ids"]
    ids[0], ids[1] = torch.arange(20, 31), torch.arange(22, 33)
    with (
        torch.no_grad(),
        ch.change(model, ch.cut(queries="w30", keys=["w22 w23", 1]), tokenizer=Letters()),
        ch.watch(model) as seen,
    ):
        model(**passed)
    zeros = seen.matrix(0)[...] == 0
    expected = torch.ones(11, 11).tril()[None].repeat(2, 1, 1) == 0
    expected[0, 10, [1, 2, 3]] = True
    expected[1, 8, [0, 1]] = True
    assert torch.equal(zeros, expected[:, None].expand_as(zeros))
    with ch.change(model, ch.boost(keys="w25", by=1), tokenizer=Letters()):
        model.generate(**passed, max_new_tokens=2)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.gate) for name in ("gemma2", "gpt-oss", "t5", "bert"))]
)
def test_gradients_go_through_the_edited_attention(family: str):
    model, passed = build(family), inputs(family)

    def gradients(context: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with context:
            logits(model(**passed)).square().mean().backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    expected = gradients(by_hand(model, BY_HAND))
    same_gradients(gradients(ch.change(model, EVERYTHING)), expected, share=2e-6)
    if family == "llama":
        model.activation_checkpointing_enable()
        model.train()
        same_gradients(gradients(ch.change(model, EVERYTHING)), expected, share=2e-6)


def test_each_pass_without_a_cache_is_a_text_of_its_own():
    model = build("gpt2")
    edits = [ch.cut(keys="w30", queries=-1), ch.off(to="mean", heads=[0])]
    with torch.no_grad(), ch.change(model, edits, tokenizer=Letters()):
        for ids, place in ((torch.arange(25, 36), 5), (torch.arange(29, 36), 1), (torch.arange(28, 35), 2)):
            cut = seen_of(model, {"input_ids": ids[None]}).matrix(0)[0, 1] == 0
            expected = ~torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            expected[-1, place] = True
            assert torch.equal(cut, expected)


def test_a_query_that_may_not_see_itself_is_padding():
    model, passed = build("gpt2"), inputs("gpt2", "left")
    real = passed["attention_mask"].bool()
    mask = real[:, None, None] & torch.ones(11, 11, dtype=torch.bool).tril()
    positions = (passed["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), ch.change(model, ch.off(to="mean", heads=[1])):
        expected = model(**passed, position_ids=positions).logits
        result = model(input_ids=passed["input_ids"], attention_mask=mask, position_ids=positions).logits
    close(result, expected, real)


def test_a_mean_is_that_of_the_real_queries_of_a_whole_text():
    model, passed = build("gpt2"), inputs("gpt2", "left")
    real = passed["attention_mask"].bool()
    with torch.no_grad():
        with by_hand(model, ByHand(outputs=[mean([1], real)])):
            expected = model(**passed).logits
        with ch.change(model, ch.off(to="mean", heads=[1])):
            close(model(**passed).logits, expected, real)
    goes_on = pytest.raises(RuleError, match=r"this run continues a cache.\n\nhint: use_cache=False")
    with goes_on, ch.change(model, ch.off(to="mean", heads=[1])):
        model.generate(**passed, **greedy(4))


def test_a_mask_in_full_and_beams_and_a_cache_from_before():
    model, passed = build("llama"), inputs("llama")
    rng = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))
    mask = torch.randn(2, 1, 11, 11, generator=rng).masked_fill(
        ~torch.ones(11, 11, dtype=torch.bool).tril(), -torch.inf
    )
    with torch.no_grad():
        with by_hand(model, BY_HAND):
            expected = model(input_ids=passed["input_ids"], attention_mask=mask).logits
        with ch.change(model, EVERYTHING):
            close(model(input_ids=passed["input_ids"], attention_mask=mask).logits, expected)
        first = model(input_ids=passed["input_ids"][:, :6], use_cache=True)
        with ch.change(model, [ch.cut(keys=[1, -1], queries=slice(6, 10))]), ch.watch(model) as seen:
            model(input_ids=passed["input_ids"][:, 6:], past_key_values=first.past_key_values)
        zeros = seen.matrix(0)[0, 0] == 0
        assert zeros[:4, 1].all()
        assert not zeros[4, [1, 10]].any()
    options = greedy(5, num_beams=3)
    with ch.change(model, EVERYTHING):
        result = model.generate(**passed, **options)
    with by_hand(model, BY_HAND):
        torch.testing.assert_close(result, model.generate(**passed, **options, use_cache=False))
