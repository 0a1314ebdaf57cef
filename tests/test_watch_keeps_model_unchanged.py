"""Watching never changes a model: also where only some of its classes go through the interface, where layers run
several times, and where a mask is written into; attention that was not seen is named."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils as theirs

import clearhead as ch
from clearhead.errors import ClearheadError, DtypeError, RuleError, SelectionError, ShapeError, UnknownNameError
from clearhead.hf.attending import attend
from clearhead.hf.masks import RuledMask, keep_rules
from clearhead.watching.seen import Seen
from small_models import small, taken
from test_hf import same
from watched import (
    GROUPED,
    SMALL,
    assert_same_runs,
    build,
    choosing_keys,
    eager,
    greedy,
    in_pieces,
    inputs,
    joined,
    run_watched,
    seen_of,
    shaken,
)


def unchanged(model: Any, run: Callable[[], torch.Tensor]) -> Seen:
    """What is seen of a run whose result is the same when nobody watches."""
    with torch.no_grad():
        before = run()
        with ch.watch(model) as seen:
            watched = run()
    same(watched, before)
    return seen


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GitModel", "GitSelfAttention"),
        ("BigBirdPegasusModel", "BigBirdPegasusSelfAttention"),
        ("SiglipVisionModel", "MultiheadAttention"),
        ("Aimv2VisionModel", "Aimv2AttentionPoolingHead"),
        ("Qwen3NextModel", "Qwen3NextGatedDeltaNet"),
    ],
)
def test_attention_outside_the_interface_is_as_before_and_named(name: str, kind: str):
    model = small(getattr(hf, name))
    with pytest.warns(UserWarning, match=f"was not seen: .*{kind}"):
        seen = unchanged(model, lambda: model(**taken(model)).last_hidden_state)
    modules = dict(model.named_modules())
    assert [type(modules[path]).__name__ for path, _ in seen.unseen] == [kind] * len(seen.unseen) != []
    path, _ = seen.unseen[0]
    assert f"not seen  {path} ({kind})" in repr(seen)
    assert f"not seen: {path} ({kind})" in str(seen.summary())


def test_a_model_of_which_nothing_is_seen_is_refused():
    model = small(hf.SamVisionModel)
    with pytest.raises(RuleError, match=r"SamVision\w*Attention.*AttentionInterface"), ch.watch(model):
        model(**taken(model))


def mask_of(kind: int, padding: str, dtype: torch.dtype) -> tuple[RuledMask, torch.Tensor]:
    """Our mask, and the one that eager attention receives in its place."""
    functions = [
        theirs.causal_mask_function,
        theirs.bidirectional_mask_function,
        theirs.sliding_window_causal_mask_function(3),
        theirs.and_masks(theirs.causal_mask_function, lambda _b, _h, q, k: (q + k) % 3 != 1),
    ]
    real = None
    if padding:
        real = torch.ones(2, 6, dtype=torch.bool)
        real[0, slice(0, 2) if padding == "left" else slice(4, None)] = False
    arguments: dict[str, Any] = {"mask_function": functions[kind], "attention_mask": real, "dtype": dtype}
    return keep_rules(2, 5, 6, 1, 0, **arguments), theirs.eager_mask(2, 5, 6, 1, 0, **arguments)


OPERATIONS: list[Any] = [
    lambda m: m + torch.ones(2, 4, 5, 6, dtype=m.dtype),
    lambda m: torch.ones(2, 4, 5, 6, dtype=m.dtype).add(m),
    lambda m: torch.ones(2, 4, 5, 6, dtype=m.dtype).add_(m),
    lambda m: torch.cat([m, torch.zeros(2, 1, 5, 2, dtype=m.dtype)], -1),
    lambda m: m[:, :, 1:, :4],
    lambda m: m.expand(2, 4, 5, 6).reshape(8, 5, 6),
    lambda m: torch.nn.functional.softmax(m.float(), -1),
    lambda m: m.masked_fill(torch.eye(5, 6, dtype=torch.bool), -1.0),
    lambda m: m.to(torch.float64),
    lambda m: m.bool(),
    lambda m: m == 0,
    lambda m: 1.0 - m,
    lambda m: torch.where(m < 0, 1.0, 2.0),
    lambda m: torch.from_numpy(m.float().numpy().copy()),
    lambda m: torch.nn.functional.scaled_dot_product_attention(
        *(torch.linspace(-1, 1, 8 * n).view(2, 1, n, 4).to(m.dtype) for n in (5, 6, 6)), attn_mask=m
    ),
]


@given(
    st.sampled_from(range(4)), st.sampled_from(["", "left", "right"]), st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from(range(len(OPERATIONS))),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_our_mask_acts_as_the_additive_mask_in_every_operation(kind: int, padding: str, dtype: torch.dtype, which: int):
    ours, truth = mask_of(kind, padding, dtype)
    assert (ours.shape, ours.dtype, ours.ndim, ours.device) == (truth.shape, truth.dtype, 4, truth.device)
    torch.testing.assert_close(OPERATIONS[which](ours), OPERATIONS[which](truth), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("writing", ["item", "in place", "through a view", "read only"])
def test_changes_written_into_a_mask_take_effect(writing: str, inference: bool):  # noqa: FBT001
    with torch.inference_mode(inference):
        ours, truth = mask_of(0, "left", torch.float32)
        for mask in (ours, truth):
            if writing == "item":
                mask[:, :, 2:, 1] = torch.finfo(mask.dtype).min
            elif writing == "in place":
                mask.masked_fill_(torch.eye(5, 6, dtype=torch.bool), -1.0)
            elif writing == "through a view":
                mask[1].mul_(0.0)
            else:
                float(mask.sum())
        q, k, v = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4)
        module = torch.nn.Module()
        result = attend(module, q, k, v, ours, scaling=0.5)[0]
        weights = torch.softmax(0.5 * q @ k.mT + truth, -1)
        rows = (truth == 0).any(-1, keepdim=True) | (truth.abs() < 9).any(-1, keepdim=True)  # an empty row is 0 here
        torch.testing.assert_close(result, torch.where(rows, weights @ v, 0.0).transpose(1, 2))


def test_a_mask_of_the_wrong_length_or_dtype_is_refused():
    model, passed = build("t5"), inputs("t5")
    encoded = model.encoder(passed["input_ids"])
    mask = torch.tensor([[1, 1, 1, 0]] * 2)
    call = {"encoder_outputs": encoded, "attention_mask": mask, "decoder_input_ids": passed["decoder_input_ids"]}
    with pytest.raises(RuntimeError, match="size"):
        model(**call)
    with pytest.raises(ShapeError, match=r"decoder\.0\.cross: the attention mask.*keys 4.*keys 11"), ch.watch(model):
        model(**call)
    llama, ids = build("llama"), inputs("llama")["input_ids"]
    long, whole = torch.ones(2, 1, 11, 13, dtype=torch.bool), torch.ones(2, 1, 11, 11, dtype=torch.int64)
    for mask, error, said in ((long, ShapeError, "keys 13"), (whole, DtypeError, r"mask is torch\.int64")):
        with pytest.raises(error, match=said), ch.watch(llama):
            llama(ids, attention_mask=mask)


class Unmasked(hf.LlamaModel):
    """A model whose attention gets no mask: eager attention then sees every key, sdpa those that is_causal allows."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, named: (args, {**named, "attention_mask": None}), with_kwargs=True
            )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_without_a_mask_computes_as_before(implementation: str):
    model = shaken(Unmasked(hf.LlamaConfig(**GROUPED)))
    model.set_attn_implementation(implementation)
    ids = inputs("llama")["input_ids"]
    seen = unchanged(model, lambda: model(ids).last_hidden_state)
    assert bool(seen.matrix(0)[0, 0, 0, 10] > 0) == (implementation == "eager")


def albert(**more: Any) -> Any:
    return shaken(hf.AlbertModel(hf.AlbertConfig(embedding_size=16, **{**SMALL, "num_hidden_layers": 3}, **more)))


def test_a_layer_that_runs_several_times_is_recorded_each_time():
    model, passed = albert(), inputs("bert", "right")
    out, truth = eager(model, passed)
    watched, seen = run_watched(model, passed, received=True)
    real = passed["attention_mask"].bool()
    same(watched.last_hidden_state[real], out.last_hidden_state[real])
    assert seen.layers == ["0", "0#2", "0#3"]
    assert [seen.layer(name).call for name in seen.layers] == [1, 2, 3]
    for name, weights in zip(seen.layers, truth.values(), strict=True):
        rows = real[:, None, :, None].numpy()
        np.testing.assert_allclose(np.where(rows, seen.matrix(name)[...], 0), np.where(rows, weights, 0), atol=2e-5)
    assert "0#2" in str(seen.summary())
    assert seen_of(model, passed, layers=["0#2"]).layers == ["0#2"]
    with torch.no_grad(), pytest.raises(RuleError, match="second sequence"), ch.watch(model):
        [model(**passed) for _ in range(2)]


def test_several_attentions_in_a_layer_are_joined_over_steps():
    model = shaken(hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**{**GROUPED, "head_dim": 8})))
    passed = inputs("llama")
    truth = model.generate(**passed, **greedy(4))
    with ch.watch(model, received=True) as seen:
        tokens = model.generate(**passed, **greedy(4))
    assert tokens.tolist() == truth.tolist()
    assert seen.layers == ["0", "0#2", "1", "1#2"]
    once = seen_of(model, {"input_ids": tokens[:, :-1], "use_cache": False}, received=True)
    assert_same_runs(seen, once, "received")
    with pytest.raises(RuleError, match="beam"), ch.watch(model):
        model.generate(**passed, max_new_tokens=8, num_beams=3, do_sample=False)


@pytest.mark.parametrize(
    ("kind", "sizes", "masked"),
    [("boolean", [8, 1, 1, 1], 4), ("added", [8, 1, 1, 1], 4), ("boolean", [8, 3], 2), ("boolean", [8, 3], 1)],
)
def test_masks_given_by_the_user_in_steps_are_joined(kind: str, sizes: list[int], masked: int):
    """They say nothing about positions: queries follow the earlier ones. Where a step has none, all before are seen."""
    model, ids, below = build("llama"), inputs("llama")["input_ids"], torch.ones(11, 11, dtype=torch.bool).tril()
    mask = torch.randn(2, 1, 11, 11, generator=torch.manual_seed(4)).masked_fill(~below, torch.finfo(torch.float32).min)
    if kind == "boolean":
        mask = ((mask > -0.5) | torch.eye(11, dtype=torch.bool)) & below
        mask[:, :, sum(sizes[:masked]) :] = below[sum(sizes[:masked]) :]
    once = seen_of(model, {"input_ids": ids, "attention_mask": mask, "use_cache": False}, received=True, distance=True)
    with torch.no_grad(), ch.watch(model, received=True, distance=True) as seen:
        in_pieces(model, ids, sizes, mask, masked)
    assert_same_runs(seen, once, "received", "distance")


def test_later_steps_do_not_see_keys_that_the_cache_dropped():
    """A cache with a window under a model whose mask has none: later queries see only the keys still in the cache."""
    model = build("llama")
    ids = inputs("llama")["input_ids"]
    pieces = ids[:, :6], ids[:, 6:7], ids[:, 7:8]
    windowed = hf.Gemma3TextConfig(**{**GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2})
    cache = hf.DynamicCache(config=windowed)
    with torch.no_grad(), ch.watch(model) as seen:
        for piece in pieces:
            model(piece, past_key_values=cache)
    model.set_attn_implementation("eager")
    cache = hf.DynamicCache(config=windowed)
    with torch.no_grad():
        steps = [model(piece, past_key_values=cache, output_attentions=True).attentions for piece in pieces]
    for layer in (0, 1):
        truth = joined([step[layer].numpy() for step in steps])
        assert truth[0, 0, 7, 0] == 0
        np.testing.assert_allclose(seen.matrix(layer)[...], truth, atol=2e-5)
        assert "dropped" in seen.layer(layer).note


def test_a_static_cache_with_a_dense_mask_is_refused():
    """A static cache is filled over time, and a dense mask does not say how much of it is in use."""
    model = build("llama")
    ids = inputs("llama")["input_ids"]
    cache = hf.StaticCache(config=model.config, max_cache_len=12)
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    mask[:, :, 5, 2] = False
    pieces = slice(0, 8), slice(8, 9)
    with torch.no_grad(), pytest.raises(RuleError, match=r"unused room|second sequence"), ch.watch(model):
        [model(ids[:, part], attention_mask=mask[:, :, part], past_key_values=cache) for part in pieces]


def test_each_image_of_a_vision_tower_is_a_layer():
    vision = {"depth": 2, "hidden_size": 32, "embed_dim": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4,
              "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2, "mlp_ratio": 2}  # fmt: skip
    config = hf.Qwen2VLConfig(vision_config=vision, text_config={**GROUPED})
    tower = shaken(hf.Qwen2VLModel(config)).visual
    grid = torch.tensor([[1, 4, 4], [1, 4, 6]])
    pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4)
    seen = unchanged(tower, lambda: tower(pixels, grid_thw=grid)[0])
    parts = zip(pixels.split([16, 24]), grid, strict=True)
    alone = [seen_of(tower, {"hidden_states": rows, "grid_thw": one[None]}) for rows, one in parts]
    assert [seen[name].queries for name in seen.layers] == [16, 24] * 2
    for number, single in itertools.product((0, 1), (0, 1)):
        name = seen.layers[2 * number + single]
        np.testing.assert_allclose(seen.matrix(name)[...], alone[single].matrix(number)[...], atol=2e-5)


def test_negative_layers_count_from_the_end():
    model, passed = build("t5"), inputs("t5")
    seen = seen_of(model, passed, layers=[-1])
    assert seen.layers == ["encoder.1.self", "decoder.1.self", "decoder.1.cross"]
    with torch.no_grad(), pytest.raises(SelectionError, match="no -3"), ch.watch(model, layers=[-3]):
        model(**passed)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"layers": [1.5]}, SelectionError, "layers holds 1.5"),
        *(({"top": top}, ClearheadError, "top") for top in (0, "x")),
        ({"tokenizer": "x"}, DtypeError, "tokenizer is a str"),
        ({"entropy": "x"}, RuleError, "entropy is 'x'"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(wrong: dict[str, Any], error: Any, said: str):
    with pytest.raises(error, match=said), ch.watch(build("llama"), **wrong):
        raise AssertionError("the block was entered")


def test_reprs_are_short_and_list_what_was_recorded():
    seen = seen_of(build("llama"), inputs("llama"), received=True, top=2)
    with pytest.raises(UnknownNameError, match="unknown option `foo`"):
        seen.save("seen.html", foo=1)
    said = repr(seen)
    for part in ("2 layers of LlamaForCausalLM", "8 heads", "2 × 11 tokens", "logsumexp, received, top", "keys 11"):
        assert part in said, said
    assert len(said.splitlines()) <= 5
    one = repr(seen[0])
    assert one.startswith("Observation(queries 11, keys 11")
    assert "received (2, 4, 11)" in one
    assert "top Top(weights (2, 4, 11, 2)" in one
    assert "\n" not in one
    assert len(repr(seen.layer(0))) < 500


def test_attention_that_chooses_its_keys_is_refused():
    model = shaken(hf.DeepseekV32ForCausalLM(choosing_keys()))
    with pytest.raises(RuleError, match="itself chooses which keys"), torch.no_grad(), ch.watch(model):
        model(torch.arange(2, 13)[None])
