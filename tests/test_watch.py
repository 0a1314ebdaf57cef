"""ch.watch keeps what a model's attention did; the names of its layers come from their modules' paths."""

import re
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import clearhead as ch
from clearhead.core import definition
from clearhead.errors import SelectionError
from clearhead.watching.naming import LayerNames
from clearhead.watching.seen import Seen
from problems import of_tiers
from small_models import small
from watched import FAMILIES, FAMILY, Family, build, eager, eager_steps, greedy, inputs, logits, run_watched, seen_of

ALL = {"entropy": True, "received": True, "max_logit": True, "peak": True, "distance": True, "top": 3}
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
generating = pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.kind in ("decoder", "both")], ids=lambda family: family.name
)


def numbers(x: Any) -> np.ndarray:
    return x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)


def close(result: Any, expected: Any, what: str, times: float = 1.0) -> None:
    np.testing.assert_allclose(numbers(result), numbers(expected), rtol=2e-4 * times, atol=2e-5 * times, err_msg=what)


def seen_rows(weights: np.ndarray, layer: Any) -> np.ndarray:
    """Eager weights with 0 where a query sees only padding: eager attention takes the mean of everything there.

    Later layers then differ at padding queries too: there the recorded weights are taken, so nothing is compared.
    """
    matrix = layer.matrix()
    empty = np.isneginf(numbers(matrix.logsumexp()))
    result = np.where(empty[..., None], 0.0, weights.astype(np.float64))
    if layer.padding is None:
        return result
    return np.where(numbers(layer.padding)[:, None, :, None] > 0, numbers(matrix[...]), result)


def assert_seen(seen: Seen, truth: dict[str, np.ndarray]) -> None:
    """Every observation of every layer against eager weights, (batch, heads, queries, keys)."""
    assert sorted(seen.layers) == sorted(truth)
    for name, eager_weights in truth.items():
        matrix, result = seen.matrix(name), seen[name]
        weights = seen_rows(eager_weights, seen.layer(name))
        close(matrix[...], weights, f"{name} weights")
        close(result.received, weights.sum(-2), f"{name} received", 4)
        close(result.peak, weights.max(-2), f"{name} peak")
        logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
        if seen.layer(name).rules.get("sinks") is None:  # with sinks, the entropy is over the keys only
            close(result.entropy, -(weights * logs).sum(-1), f"{name} entropy", 4)
        largest, places = result.top
        held = np.take_along_axis(weights, np.maximum(numbers(places).astype(int), 0), -1)
        close(np.where(numbers(places) < 0, 0.0, held), largest, f"{name} top")
        close(largest, -np.sort(-weights, -1)[..., : largest.shape[-1]], f"{name} top")
        logsumexp, highest = numbers(result.logsumexp), numbers(result.max_logit)
        sees = ~np.isneginf(logsumexp)
        close(np.exp(highest[sees] - logsumexp[sees]), weights.max(-1)[sees], f"{name} max_logit")


def real_rows(passed: dict[str, Any]) -> Any:
    """Which tokens are not padding; a query that sees only padding has weights 0 here and a mean in eager attention."""
    mask = passed.get("attention_mask")
    return slice(None) if mask is None else mask.bool()


@every_family
@pytest.mark.parametrize("padding", ["", "left", "right"])
def test_the_weights_of_a_forward_pass_equal_eagers(family: Family, padding: str):
    if padding and (family.kind == "image" or family.name == "whisper"):
        return  # takes no attention mask
    model, passed = build(family), inputs(family, padding)
    out, truth = eager(model, passed)
    watched, seen = run_watched(model, passed, image=(3, 4), **ALL)
    rows = slice(None) if family.kind in ("both", "pair") else real_rows(passed)
    close(logits(watched)[rows], logits(out)[rows], "logits", 4)
    assert_seen(seen, truth)
    for name, weights in truth.items():
        book = type("Weights", (), {"weights": seen_rows(weights, seen.layer(name))})
        close(seen[name].image, definition.image(book, 3, 4), f"{name} image", 4)
    assert all(not seen.layer(name).note for name in seen.layers), "a mask was kept in full"


@generating
@pytest.mark.parametrize("padding", ["", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_weights_of_generate_equal_eagers(family: Family, padding: str, cache: str):
    if padding and family.kind == "both":
        return  # the encoder's padding is tested in a forward pass
    model, passed = build(family), inputs(family, padding)
    if family.kind == "both":
        passed.pop("decoder_input_ids")
    options = greedy(6, num_beams=1)
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    out, truth = eager_steps(model, passed, **options)
    with ch.watch(model, image=(3, 4), **ALL) as seen:
        tokens = model.generate(**passed, **options)
    np.testing.assert_array_equal(tokens, out.sequences[:, -tokens.shape[1] :])  # Whisper leaves out the first token
    assert_seen(seen, truth)
    if family.kind == "decoder":
        assert seen.tokens == tokens[:, :-1].tolist()


def test_masks_of_models_are_recorded_as_rules():
    model = build("mistral")
    seen = seen_of(model, inputs("mistral", "right"))
    rules = seen.layer(0).rules
    assert rules["causal"] is True
    assert rules["window"] == (3, None)
    np.testing.assert_array_equal(rules["kv_lengths"], [5, 11])
    assert not any(getattr(value, "ndim", 0) > 1 for value in rules.values())


@pytest.mark.parametrize("mask", ["boolean", "added", "custom"])
def test_a_mask_given_by_the_user(mask: str):
    model, passed = build("llama"), inputs("llama")
    may = torch.rand(2, 1, 11, 11, generator=torch.manual_seed(3)).lt(0.5) | torch.eye(11, dtype=torch.bool)
    added = torch.where(may, 0.0, torch.finfo(torch.float32).min)
    passed["attention_mask"] = added
    out, truth = eager(model, passed)
    if mask == "boolean":
        passed["attention_mask"] = may
    elif mask == "custom":
        soft = torch.where(may, torch.randn(may.shape), torch.finfo(torch.float32).min)
        passed["attention_mask"] = soft
        out, truth = eager(model, passed)
    watched, seen = run_watched(model, passed, **ALL)
    close(logits(watched), logits(out), "logits", 4)
    assert_seen(seen, truth)
    assert "in full" in seen.layer(0).note


@pytest.mark.parametrize("where", ["inside", "after"])
def test_the_model_is_unchanged_afterwards(where: str):
    model, passed = build("gemma3"), inputs("gemma3")
    model.set_attn_implementation("eager")
    before, hooks = model.config._attn_implementation, len(model._forward_pre_hooks)
    with suppress(KeyError), ch.watch(model) as seen:
        model(**passed)
        if where == "inside":
            raise KeyError("mine")
    assert model.config._attn_implementation == before
    assert len(model._forward_pre_hooks) == hooks
    assert len(seen) == 2
    again = model(**passed, output_attentions=True)
    close(seen.matrix(0)[...], again.attentions[0], "weights")


def test_submodels_get_back_their_own_attention_implementations():
    model = build("clip")
    model.vision_model.set_attn_implementation("eager")
    results = [model.config._attn_implementation, model.config.vision_config._attn_implementation]
    with torch.no_grad(), ch.watch(model):
        model(**inputs("clip"))
    assert [model.config._attn_implementation, model.config.vision_config._attn_implementation] == results


def test_chosen_layers_only():
    model, passed = build("llama"), inputs("llama")
    seen = seen_of(model, passed, layers=[1], top=2)
    assert seen.layers == ["1"]
    with pytest.raises(ch.errors.SelectionError, match="no layer '0'"):
        seen["0"]
    with torch.no_grad(), ch.watch(model) as running:
        model(**passed)
        assert running.layer("model.layers.1.self_attn").name == "1"
    with pytest.raises(ch.errors.SelectionError, match="no 7"), torch.no_grad(), ch.watch(model, layers=[7]):
        model(**passed)


def test_weights_are_recorded_before_dropout():
    model, passed = build("bert", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0), inputs("bert")
    _, truth = eager(model, passed)
    calm, seen = run_watched(model, passed)
    shaken, noisy = run_watched(model.train(), passed)
    close(seen.matrix(0)[...], truth["0"], "weights")
    close(noisy.matrix(0)[...], truth["0"], "weights before dropout")
    assert not torch.allclose(logits(calm), logits(shaken), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_in_bfloat16_float16_and_float64(dtype: torch.dtype):
    model, passed = build("gemma2").to(dtype), inputs("gemma2")
    out, truth = eager(model, passed)
    watched, seen = run_watched(model, passed, received=True)
    limit = max(1e-6, 60 * float(torch.finfo(dtype).eps))  # eager attention computes its softmax in float32 at best
    np.testing.assert_allclose(numbers(seen.matrix(0)[...]), truth["0"].astype(np.float64), atol=limit)
    reach = float(logits(out).abs().max())
    np.testing.assert_allclose(numbers(logits(watched)), numbers(logits(out)), atol=limit * reach)


def test_the_summary_is_that_of_dense_weights():
    model, passed = build("gpt2"), inputs("gpt2", "left")
    seen = seen_of(model, passed)
    real = passed["attention_mask"].bool().numpy()
    lines = {(line.layer, line.head): line for line in seen.summary()}
    for layer, head in lines:
        weights = numbers(seen.matrix(layer)[...])[:, head]
        first = real.argmax(-1)
        rows = [weights[b, i] for b in range(2) for i in range(11) if real[b, i]]
        sink = [weights[b, i, first[b]] for b in range(2) for i in range(11) if real[b, i]]
        local = [weights[b, i, i] for b in range(2) for i in range(11) if real[b, i]]
        before = [weights[b, i, i - 1] for b in range(2) for i in range(1, 11) if real[b, i - 1]]
        apart = [
            sum(w * abs(i - j) for j, w in enumerate(weights[b, i])) for b in range(2) for i in range(11) if real[b, i]
        ]
        line = lines[layer, head]
        expected = [np.mean(x) for x in (sink, before, local, apart)]
        np.testing.assert_allclose([line.sink, line.previous, line.diagonal, line.distance], expected, atol=1e-5)
        entropy = np.mean([-(row[row > 0] * np.log(row[row > 0])).sum() for row in rows])
        assert line.entropy == pytest.approx(entropy, abs=1e-5)
    assert max(map(len, str(seen.summary()).splitlines())) <= 80


def test_models_that_cannot_be_watched_are_refused_early():
    llama = build("llama")
    with pytest.raises(ch.errors.DtypeError, match=r"is a Linear: expected a Transformers model.*\n\nhint: ch.Att"), \
            ch.watch(torch.nn.Linear(2, 2)):  # fmt: skip
        pass
    with pytest.raises(ch.errors.RuleError, match="watched already"), ch.watch(llama), ch.watch(llama):
        pass
    assert llama.config._attn_implementation != "clearhead"
    with pytest.raises(ch.errors.RuleError, match="output_attentions"), torch.no_grad(), ch.watch(llama):
        llama(**inputs("llama"), output_attentions=True)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (("model.layers.0.self_attn", "model.layers.1.self_attn"), ("0", "1")),
        (("encoder.layers.0.attn", "decoder.layers.0.attn"), ("encoder.0", "decoder.0")),
        (("decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"), ("0.self", "0.cross")),
        (("encoder.layers.0.a", "decoder.layers.0.a", "decoder.layers.0.crossattn"),
         ("encoder.0.self", "decoder.0.self", "decoder.0.cross")),
        (("layers.0.first", "layers.0.second"), ("0", "layers.0.second")),
        (("m.attention", "m.layers.0.attention"), ("m.attention", "0")),
    ],
)  # fmt: skip
def test_names_say_no_more_than_the_model_needs(paths, expected):
    names = LayerNames(paths)
    assert tuple(names.name(path) for path in paths) == expected


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(
    "name",
    of_tiers(
        ["gpt2", "llama", "roberta", "OPTModel", "BioGptModel"],
        ["bert", "gemma2", "GPTNeoXModel", "XLMRobertaModel", "ElectraModel"],
    ),
)
def test_padding_that_moves_positions_warns(name: str, padding: str, positions: bool):  # noqa: FBT001
    """It warns where the weights of the padded text are not those of the text alone."""
    model = build(name) if name in FAMILY else small(getattr(hf, name))
    passed = inputs("gpt2", padding)
    real = passed["attention_mask"][0].bool()
    passed["input_ids"] = passed["input_ids"].masked_fill(passed["attention_mask"] == 0, model.config.pad_token_id or 0)
    alone = seen_of(model, {"input_ids": passed["input_ids"][:1, real]}).matrix(0)[...]
    if positions:
        passed["position_ids"] = (passed["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with warnings.catch_warnings(record=True, action="always") as said:
        weights = seen_of(model, passed).matrix(0)[:1][:, :, real][..., real]
    moved = not torch.allclose(weights, alone, rtol=0, atol=1e-4)
    expected = "1 of 2 texts begin with padding, and .* is given no position_ids"
    assert [bool(re.match(expected, str(one.message))) for one in said] == [True] * (moved and not positions)


@pytest.mark.parametrize(("padding", "pads"), [("right", [5, 6, 7, 8, 9, 10]), ("left", [0, 1, 2])])
@pytest.mark.filterwarnings("ignore:.*begin with padding:UserWarning")
def test_a_page_of_a_batch_says_which_text_and_what_of_it_is_padding(padding: str, pads: list[int]):
    seen = seen_of(build("gpt2"), inputs("gpt2", padding))
    first, second = (seen.document(batch=batch).header for batch in (0, 1))
    assert [each["title"] for each in (first, second)] == [f"GPT2LMHeadModel, batch={one} of 2" for one in (0, 1)]
    assert (first["runs"][0]["pads"], second["runs"][0]["pads"]) == (pads, [])
    assert "layer 0, head 0, batch=1 of 2" in seen.to_svg(batch=1)
    with pytest.raises(SelectionError, match=r"^batch 9 is outside 0\.\.1"):
        seen.to_svg(batch=9)


def test_an_encoders_layers_have_its_own_tokens_and_padding():
    seen = seen_of(build("t5"), inputs("t5", "right"))
    assert seen.layer(seen.layers[0]).padding.any()
    run = seen.document().header["runs"][0]
    assert run["pads"] == []
    for layer in run["layers"]:
        assert layer["text"] == ("sources" if layer["name"].startswith("encoder") else "tokens")
        assert len(run[layer["text"]]) == layer["queries"]
    assert f">{run['sources'][1]}</text>" in seen.to_svg(layer="encoder.0.self")
