"""Models inside wrappers (adapters, training modules, sentence encoders, pipelines): in plain use, and watched."""

from typing import Any

import pytest
import tokenizers
import torch
import transformers as hf
from torch import Tensor, nn

import clearhead as ch
from clearhead.errors import DtypeError
from test_hf import same, set_to
from watched import build, greedy, inputs, seen_of


class Lowrank(nn.Module):
    """A linear layer with an adapter beside it, as PEFT puts in a layer's place."""

    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        wide, narrow = base_layer.weight.shape
        self.lora_a, self.lora_b = nn.Linear(narrow, 2, bias=False), nn.Linear(2, wide, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


class Adapted(nn.Module):
    """A model with adapters, whose other attributes are those of the model, as PEFT's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        for layer in model.requires_grad_(False).model.layers:
            layer.self_attn.q_proj = Lowrank(layer.self_attn.q_proj)
        self.base_model = nn.ModuleDict({"model": model})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model["model"], name)

    def forward(self, *args: Any, **more: Any) -> Any:
        return self.base_model["model"](*args, **more)


class Training(nn.Module):
    """A module of a training library: a configuration of its own, and batches as dictionaries."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = {"lr": 0.1}
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).logits


class Encoder(nn.Sequential):
    """A sentence encoder: each of its modules takes and returns a dictionary of features."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        for module in self:
            features = module(features)
        return features


class Words(nn.Module):
    def __init__(self, auto_model: Any) -> None:
        super().__init__()
        self.auto_model = auto_model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "tokens": self.auto_model.forward(**features).last_hidden_state}  # past the model's hooks


class Mean(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        real = features["attention_mask"][..., None]
        return {"sentence": (features["tokens"] * real).sum(1) / real.sum(1)}


def test_adapters_are_trained_with_eager_attentions_gradients_and_watched():
    results = {}
    passed = inputs("llama", "right")
    for name in ("clearhead", "eager"):
        adapted = Adapted(set_to(build("llama"), name))
        torch.manual_seed(2)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.2)
        (adapted(**passed, labels=passed["input_ids"]).loss).backward()
        results[name] = {name: x.grad for name, x in adapted.named_parameters() if x.requires_grad}
        with torch.no_grad(), ch.watch(adapted) as seen:
            watched = adapted(**passed).logits
        with torch.no_grad():
            same(watched, adapted(**passed).logits, passed["attention_mask"])
        assert seen.layers == ["0", "1"]
        assert seen.tokens == passed["input_ids"].tolist()
    assert len(results["eager"]) == 4
    for name, x in results["eager"].items():
        same(results["clearhead"][name], x, share=1e-4)


@pytest.mark.parametrize("implementation", ["clearhead", "sdpa"])
def test_a_training_module_that_takes_dictionaries(implementation: str):
    model, passed = set_to(build("llama"), implementation), inputs("llama", "left")
    module = Training(model)
    with torch.no_grad(), ch.watch(module) as seen:
        watched = module(passed)
    with torch.no_grad():
        same(watched, set_to(model, "eager")(**passed).logits, passed["attention_mask"])
    assert seen.layers == ["0", "1"]
    assert seen.tokens == passed["input_ids"].tolist()


@pytest.mark.parametrize("implementation", ["clearhead", "sdpa"])
def test_a_sentence_encoder(implementation: str):
    model, passed = set_to(build("bert"), implementation), inputs("bert", "right")
    encoder = Encoder(Words(model), Mean())
    with torch.no_grad():
        expected = Encoder(Words(set_to(model, "eager")), Mean())(passed)["sentence"]
        same(encoder(passed)["sentence"], expected)
        with ch.watch(encoder, received=True) as seen:
            same(encoder(passed)["sentence"], expected)
    assert seen.layers == ["0", "1"]
    assert seen.tokens == passed["input_ids"].tolist()
    assert seen_of(model, {"inputs_embeds": torch.randn(1, 5, 32)}).tokens == []


def written() -> Any:
    """A tokenizer of single letters."""
    letters = {
        letter: number for number, letter in enumerate(["<pad>", "<s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "])
    }
    local = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<unk>"))
    local.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return hf.PreTrainedTokenizerFast(tokenizer_object=local, pad_token="<pad>", bos_token="<s>", unk_token="<unk>")


def pipe(implementation: str) -> Any:
    model = set_to(build("gpt2"), implementation)
    return hf.pipeline("text-generation", model=model, tokenizer=written(), device="cpu", batch_size=2)


TEXTS = ["humpty dumpty", "sat"]
FOUR = greedy(4, return_tensors=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_pipeline():
    ours, theirs = (pipe(name)(TEXTS, **FOUR) for name in ("clearhead", "eager"))
    assert ours == theirs


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_pipelines_model_is_watched_and_the_pipeline_refused_with_what_to_pass():
    whole = pipe("sdpa")
    with pytest.raises(DtypeError, match=r"TextGenerationPipeline(.|\n)*ch\.watch\(….model\) watches its GPT2"):
        ch.watch(whole).__enter__()
    with ch.watch(whole.model) as seen:
        whole("humpty", **FOUR)
    assert [len(row) for row in seen.tokens] == [9]


def test_anything_else_that_holds_a_model_is_refused_with_what_to_pass():
    class Trainer:
        def __init__(self) -> None:
            self.rate, self.net = 0.1, Training(build("bert"))

    with pytest.raises(DtypeError, match=r"Trainer(.|\n)*ch\.watch\(….net\) watches its Training"):
        ch.watch(Trainer()).__enter__()
