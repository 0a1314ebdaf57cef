"""Compiled models with attn_implementation="clearhead": one graph, eager attention's numbers, watching and changing."""

from typing import Any

import pytest
import torch

import clearhead as ch
from changed import ByHand, added, by_hand
from seeds import fresh
from test_hf import FAMILY, both, gradients, no_dropout, quick_or_slow, same, same_gradients, set_to
from watched import build, inputs, logits

WHOLE = ["gpt2", "llama", "bert"]
MORE = [
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "phi3",
    "roberta",
    "distilbert",
    "t5",
    "whisper",
    "vit",
    "clip",
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


QUICK = [("llama", "left"), ("bert", "")]
EVERY = [("gpt2", ""), *[("drawn", padding) for padding in ("", "left", "drawn")]]


@pytest.mark.parametrize(("name", "padding"), quick_or_slow(QUICK, EVERY))
def test_one_graph_and_the_numbers_of_eager_attention(name: str, padding: str):
    if name == "drawn":
        name = str(fresh().choice(MORE))
    family = FAMILY[name]
    ours, theirs = both(family)
    if padding == "drawn":
        padding = str(fresh().choice(["", "left"]))
    given = inputs(family, "right" if padding and family.kind == "encoder" else padding)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        same(logits(compiled(**given)), logits(theirs(**given)), given.get("attention_mask"))


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_gradients_of_compiled_models(name: str):
    family = FAMILY[name]
    ours, theirs = both(family, **no_dropout(family))
    given = inputs(family, "right")
    compiled = torch.compile(ours.train(), fullgraph=True, backend="aot_eager")
    same_gradients(
        {name.replace("_orig_mod.", ""): x for name, x in gradients(compiled, given).items()}, gradients(theirs, given)
    )


@pytest.mark.slow
def test_training_with_dropout_is_traced_too():
    model = set_to(build(FAMILY["gpt2"], attn_pdrop=0.3), "clearhead").train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    given = inputs(FAMILY["gpt2"])["input_ids"]
    first, second = compiled(given).logits, compiled(given).logits
    second.sum().backward()
    assert not torch.equal(first, second)
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters() if x.grad is not None)


@pytest.mark.slow
def test_another_length_and_batch():
    ours, theirs = both(FAMILY["llama"])
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for batch, length in ((1, 5), (2, 9), (3, 17)):
            tokens = torch.randint(2, 59, (batch, length))
            same(compiled(tokens).logits, theirs(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_compiled_one_by_one(name: str):
    """Their masks are made outside and carry rules: the graph breaks there, and the numbers are right."""
    ours, theirs = both(FAMILY[name])
    given = inputs(FAMILY[name], "left")
    for layer in ours.model.layers:
        layer.compile(backend="eager")
    with torch.no_grad():
        same(ours(**given).logits, theirs(**given).logits, given["attention_mask"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generation_with_a_static_cache_and_a_compiled_forward(name: str):
    ours, theirs = both(FAMILY[name])
    given = inputs(FAMILY[name], "left")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = theirs.generate(**given, **options)
    whole = name == "llama"  # the masks of sliding windows are made outside and carry rules
    ours.forward = torch.compile(ours.forward, fullgraph=whole, backend="eager")
    assert torch.equal(ours.generate(**given, **options), expected)


def test_a_compiled_model_can_be_watched_and_runs_compiled_again():
    ours, theirs = both(FAMILY["llama"])
    given = inputs(FAMILY["llama"], "left")
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = theirs(**given).logits
        before = compiled(**given).logits
        with ch.watch(compiled, entropy=True) as seen:
            same(compiled(**given).logits, expected, given["attention_mask"])
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(**given).logits, before)
    same(before, expected, given["attention_mask"])
    assert seen.layer(0).path == "model.layers.0.self_attn"
    assert seen[0].entropy.shape == (2, 4, 11)


def layers_in_place(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def in_place(model: Any) -> Any:
    model.compile(backend="eager", fullgraph=True)
    return model


def its_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    return model


def wrapped(model: Any) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


@pytest.mark.parametrize("implementation", ["clearhead", "sdpa"])
@pytest.mark.parametrize("compiled", [wrapped, in_place, its_forward, layers_in_place])
def test_a_compiled_model_can_be_changed_and_runs_compiled_again(compiled: Any, implementation: str):
    plain, given = build(FAMILY["llama"]), inputs(FAMILY["llama"], "left")
    run = compiled(set_to(plain, implementation))
    with torch.no_grad():
        with by_hand(plain, ByHand([added(-torch.inf, range(6, 11), [3, 4], [1])])):
            expected = plain(**given).logits
        before = run(**given).logits
        with ch.change(run, ch.cut(queries=slice(6, None), keys=[3, 4], heads=[1])):
            same(run(**given).logits, expected, given["attention_mask"])
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(run(**given).logits, before)
    assert not torch.allclose(before, expected, atol=1e-3)


@pytest.mark.slow
def test_an_exported_model_has_the_operator():
    ours, theirs = both(FAMILY["llama"])
    ours.config.use_cache = False
    tokens = torch.randint(2, 59, (2, 11))
    exported = torch.export.export(ours, (tokens,), strict=False)
    assert sum("clearhead.observe" in str(node.target) for node in exported.graph.nodes) == 2
    with torch.no_grad():
        same(exported.module()(tokens).logits, theirs(tokens).logits)


@pytest.mark.slow  # this runs a C++ compiler
def test_the_default_backend():
    family = FAMILY[str(fresh().choice(WHOLE))]
    ours, theirs = both(family, **no_dropout(family))
    given = inputs(family, "right")
    compiled = torch.compile(ours.train(), fullgraph=True)
    found = gradients(compiled, given)
    same_gradients({name.replace("_orig_mod.", ""): x for name, x in found.items()}, gradients(theirs, given))
