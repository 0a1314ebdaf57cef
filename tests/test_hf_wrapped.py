"""Models inside wrappers, and compiled ones, with attn_implementation="clearhead": eager attention's numbers."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import clearhead as ch
from changed import ByHand, added, by_hand
from clearhead.errors import DtypeError
from problems import of_tiers
from seeds import fresh
from small_models import tokenizer
from test_hf import FAMILY, both, gradients, no_dropout, quick_or_slow, same, same_gradients, set_to
from watched import build, greedy, inputs, logits, seen_of


class Training(nn.Module):
    """A module of a training library: a configuration of its own, and batches as dictionaries."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = {"lr": 0.1}
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).logits


@pytest.mark.parametrize("implementation", ["clearhead", "sdpa"])
def test_a_module_that_holds_a_model(implementation: str):
    model, passed = set_to(build("llama"), implementation), inputs("llama", "left")
    module, real = Training(model), passed["attention_mask"].bool()
    with torch.no_grad():
        expected = Training(set_to(model, "eager"))(passed)[real]
        same(module(passed)[real], expected)
        with ch.watch(module, received=True) as seen:
            same(module(passed)[real], expected)
    assert seen.layers == ["0", "1"]
    assert seen.tokens == passed["input_ids"].tolist()
    assert seen_of(model, {"inputs_embeds": torch.randn(1, 5, 32)}).tokens == []


def pipe(implementation: str) -> Any:
    model = set_to(build("gpt2"), implementation)
    return hf.pipeline(
        "text-generation", model=model, tokenizer=tokenizer(["humpty", "dumpty", "sat"]), device="cpu", batch_size=2
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_pipelines_model_is_watched_not_the_pipeline():
    class Trainer:
        def __init__(self) -> None:
            self.rate, self.net = 0.1, Training(build("bert"))

    whole = pipe("sdpa")
    for outer, said in (
        (whole, r"TextGenerationPipeline(.|\n)*ch\.watch\(….model\) watches its GPT2"),
        (Trainer(), r"Trainer(.|\n)*ch\.watch\(….net\) watches its Training"),
    ):
        with pytest.raises(DtypeError, match=said):
            ch.watch(outer).__enter__()
    with ch.watch(whole.model) as seen:
        whole("humpty", **greedy(4, return_tensors=True))
    assert [len(row) for row in seen.tokens] == [4]


WHOLE = ["gpt2", "llama", "bert"]
MORE = ["qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "phi3", "roberta", "distilbert", "t5", "whisper"]
MORE += ["vit", "clip"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


QUICK = [("llama", "left"), ("bert", "")]
EVERY = [("gpt2", ""), *[("drawn", padding) for padding in ("", "left")]]


@pytest.mark.gate
@pytest.mark.parametrize(("name", "padding"), quick_or_slow(QUICK, EVERY))
def test_one_graph_and_the_numbers_of_eager_attention(name: str, padding: str):
    if name == "drawn":
        name = str(fresh().choice(MORE))
    ours, theirs = both(name)
    passed = inputs(name, "right" if padding and FAMILY[name].kind == "encoder" else padding)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        same(logits(compiled(**passed)), logits(theirs(**passed)), passed.get("attention_mask"))


def check_compiled_gradients(name: str, backend: str) -> None:
    one_layer = {"n_layer" if name == "gpt2" else "num_hidden_layers": 1}
    ours, theirs = both(name, **no_dropout(name), **one_layer)
    passed = inputs(name, "right")
    result = gradients(torch.compile(ours.train(), fullgraph=True, backend=backend), passed)
    same_gradients({name.replace("_orig_mod.", ""): x for name, x in result.items()}, gradients(theirs, passed))


@pytest.mark.parametrize("name", of_tiers([], WHOLE, every=2))
def test_gradients_of_compiled_models(name: str):
    check_compiled_gradients(name, "aot_eager")


@pytest.mark.long
def test_training_with_dropout_is_traced_too():
    model = set_to(build("gpt2", attn_pdrop=0.3), "clearhead").train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    passed = inputs("gpt2")["input_ids"]
    first, second = compiled(passed).logits, compiled(passed).logits
    second.sum().backward()
    assert not torch.equal(first, second)
    assert all(bool(x.grad.isfinite().all()) for x in model.parameters() if x.grad is not None)


@pytest.mark.gate
def test_another_length_and_batch():
    ours, theirs = both("llama", num_hidden_layers=1)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for batch, length in ((1, 5), (2, 9), (3, 17)):
            tokens, least = torch.randint(2, 59, (batch, length)), torch.finfo(torch.float32).min
            for mask in (None, torch.full((batch, 1, length, length), least).triu(1)):
                same(compiled(tokens, mask).logits, theirs(tokens, mask).logits)


@pytest.mark.parametrize("name", of_tiers([], ["llama", "gemma3"]))
def test_generation_with_a_static_cache_and_a_compiled_forward(name: str):
    whole = name == "llama"  # the masks of sliding windows are made outside and carry rules
    ours, theirs = both(name, **({"num_hidden_layers": 1} if whole else {}))
    passed, options = inputs(name, str(fresh().choice(["", "left"]))), greedy(6, cache_implementation="static")
    expected = theirs.generate(**passed, **options)
    ours.forward = torch.compile(ours.forward, fullgraph=whole, backend="eager")
    assert torch.equal(ours.generate(**passed, **options), expected)


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


@pytest.mark.parametrize("implementation", of_tiers([], ["clearhead", "sdpa"]))
@pytest.mark.parametrize("compiled", of_tiers([], [wrapped, in_place, its_forward, layers_in_place]))
def test_a_compiled_model_is_watched_changed_and_runs_compiled_again(compiled: Any, implementation: str):
    plain, passed = build("llama"), inputs("llama", "left")
    run = compiled(set_to(plain, implementation))
    with torch.no_grad():
        expected, before = set_to(plain, "eager")(**passed).logits, run(**passed).logits
        with by_hand(plain, ByHand([added(-torch.inf, range(6, 11), [3, 4], [1])])):
            cut = plain(**passed).logits
        with ch.watch(run, entropy=True) as seen:
            same(run(**passed).logits, expected, passed["attention_mask"])
        with ch.change(run, ch.cut(queries=slice(6, None), keys=[3, 4], heads=[1])):
            same(run(**passed).logits, cut, passed["attention_mask"])
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(run(**passed).logits, before)
    same(before, expected, passed["attention_mask"])
    assert not torch.allclose(before, cut, atol=1e-3)
    assert seen.layer(0).path == "model.layers.0.self_attn"
    assert (seen.tokens, seen[0].entropy.shape) == (passed["input_ids"].tolist(), (2, 4, 11))


@pytest.mark.gate
def test_an_exported_model_has_the_operator():
    ours, theirs = both("llama")
    ours.config.use_cache = False
    tokens = torch.randint(2, 59, (2, 11))
    exported = torch.export.export(ours, (tokens,), strict=False)
    assert sum("clearhead.observe" in str(node.target) for node in exported.graph.nodes) == 2
    with torch.no_grad():
        same(exported.module()(tokens).logits, theirs(tokens).logits)


@pytest.mark.long  # this runs a C++ compiler
def test_the_default_backend():
    check_compiled_gradients(str(fresh().choice(WHOLE)), "inductor")
