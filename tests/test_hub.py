"""`explain --model` with small random models of Transformers' classes, saved with a tokenizer."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, processors

import clearhead as ch
from clearhead.cli import main
from clearhead.explaining.steps import steps_of_text
from clearhead.models import hub
from clearhead.models import model as gpt2
from problems import in_the_gate
from small_models import save, small
from watched import FAMILY, SMALL, Family, build

TEXT = "humpty dumpty sat on the wall and had a great fall"
WORDS = sorted({*TEXT.split(), "all", "kings", "horses", "men"})


def saved(place: Path, family: Family, **changes: Any) -> tuple[str, Any]:
    """A model's directory as users have it, and the model."""
    model = build(family, **changes)
    return save(place, model, WORDS), model


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "phi3", "bert", "distilbert", "albert", "gpt2"]
)
def test_the_explained_head_is_that_of_the_model(tmp_path: Path, name: str):
    place, model = saved(tmp_path, FAMILY[name])
    other, seen = (steps_of_text(TEXT, hub.load(place), layer=layer, head=2) for layer in (0, 1))
    ids = torch.tensor([[token.id for token in seen.tokens]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids, output_attentions=True)
    np.testing.assert_allclose(other.trace.weights, out.attentions[0][0, 2], atol=2e-5)
    np.testing.assert_allclose(seen.trace.weights, out.attentions[1][0, 2], atol=2e-5)
    entropies = [-(w * w.clamp(min=1e-30).log()).sum(-1)[0, :, -1] for w in out.attentions]
    if name != "gpt-oss":  # with sinks, entropy is that of the keys alone
        np.testing.assert_allclose(seen.entropy, torch.stack(entropies), atol=1e-4)
    if hasattr(out, "logits"):
        best = out.logits[0, -1].softmax(-1).topk(5)
        assert [choice.id for choice in seen.next] == best.indices.tolist()
        np.testing.assert_allclose([choice.probability for choice in seen.next], best.values, atol=1e-5)
    else:
        assert seen.next == []
    assert [token.text for token in seen.tokens] == TEXT.split()


GROUP = "encoder.albert_layer_groups.0.albert_layers.0"
FAMILY["albert"] = Family("albert", hf.AlbertModel, hf.AlbertConfig, "encoder", {**SMALL, "embedding_size": 16})
PROJECTIONS = {  # where a layer's W_V and W_O are
    "llama": ("layers.{}.self_attn.v_proj", "layers.{}.self_attn.o_proj"),
    "bert": ("encoder.layer.{}.attention.self.value", "encoder.layer.{}.attention.output.dense"),
    "albert": (f"{GROUP}.attention.value", f"{GROUP}.attention.dense"),  # one layer that runs several times
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_the_values_and_outputs_shown_are_those_of_the_model(tmp_path: Path, name: str, layer: int):
    place, model = saved(tmp_path, FAMILY[name])
    seen = steps_of_text(TEXT, hub.load(place), layer=layer)
    to_values, to_output = (model.base_model.get_submodule(path.format(layer)) for path in PROJECTIONS[name])
    joined = torch.from_numpy(np.array(seen.run.heads)).transpose(0, 1).reshape(len(seen.tokens), -1)
    with torch.no_grad():
        values = to_values(torch.from_numpy(seen.run.x)).view(len(joined), -1, 8).transpose(0, 1)
        np.testing.assert_allclose(seen.run.v, values, atol=1e-5)
        np.testing.assert_allclose(seen.run.output, to_output(joined), atol=1e-5)
    assert {"q": "Q = q(X)", "output": "U = o(H)"}.items() <= {step.name: step.formula for step in seen.steps}.items()


def test_explain_model_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place, _ = saved(tmp_path / "model", FAMILY["gemma3"])
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    assert main(["explain", TEXT, "--model", place, "--steps", "--html", str(page), "--json", str(numbers)]) == 0
    said = capsys.readouterr().out
    assert "RoPE(norm(X·W^Q))" in said
    assert "step by step against the" in said
    assert page.stat().st_size > 10_000
    assert json.loads(numbers.read_text())["model"]["kv_heads"] == 2


def pickled(place: Path) -> None:
    (place / "model.safetensors").rename(place / "pytorch_model.bin")


def other_config(place: Path) -> None:
    """Transformers would build the default LLaMA of 27 GB and fill it with random numbers."""
    (place / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')


def lacking(place: Path) -> None:
    weights = load_file(place / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})


def without_tokens(place: Path) -> None:
    for path in place.glob("*token*"):
        path.unlink()


def configured(**changes: Any) -> Callable[[Path], Any]:
    def change(place: Path) -> None:
        config = place / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))

    return change


HALF = {  # which Transformers turns at its full width where the kind is Llama 3's
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5,
}  # fmt: skip
UNREAD = "(?s)Transformers cannot load it(?!.*one of:(?!.*sentencepiece or tiktoken installed))"


@pytest.mark.parametrize(
    ("words", "name", "damage"),
    [
        ("is an encoder-decoder", "t5", configured()),
        ("no vocab_size", "vit", configured()),
        ("expected a language model", "clip", configured()),
        (r"no model.safetensors\.\n\nhint: pytorch_model.bin is a pickle", "llama", pickled),
        ("describes more than", "gpt2", other_config),
        (r"the weights lack model\.layers\.1\.self_attn\.o_proj\.weight\.", "llama", lacking),
        ("describes more than", "llama", configured(num_hidden_layers=4000)),
        ("it has 1,000,000,000 layers", "llama", configured(num_hidden_layers=10**9)),
        (r"lack model\.layers\.2\.input_layernorm\.weight and \d+ more", "llama", configured(num_hidden_layers=3)),
        ("needs Python code from its folder", "llama", configured(model_type="x", auto_map={"AutoConfig": "y.Z"})),
        (r"LlamaForCausalLM does not use `model\.layers\.1\.", "llama", configured(num_hidden_layers=1)),
        ("cannot load it: The size of tensor", "llama", configured(rope_parameters=HALF)),
        (UNREAD, "llama", without_tokens),
        (UNREAD, "llama", configured(hidden_size=48)),
    ],
)
def test_what_cannot_run_and_what_is_damaged_is_refused(
    tmp_path: Path, words: str, name: str, damage: Callable[[Path], Any]
):
    place, _ = saved(tmp_path, FAMILY[name])
    damage(tmp_path)
    with pytest.raises(ch.errors.FileError, match=words):
        hub.load(place)


@pytest.mark.parametrize("kind", in_the_gate(["Gemma3", "Llava", "Qwen3VL"], "Gemma3", "Qwen3VL"))
def test_a_model_of_pictures_explains_a_text(tmp_path: Path, kind: str):
    model = small(getattr(hf, f"{kind}ForConditionalGeneration"))
    loaded: Any = ch.load_model(save(tmp_path, model, WORDS))
    ids = [token.id for token in loaded.tokenizer.tokens(TEXT)]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(loaded.run(ids).logits, logits, atol=1e-4)
    assert ch.explain(TEXT, loaded).answer


def test_generation_is_greedy_whatever_the_model_says(tmp_path: Path):
    place, inner = saved(tmp_path, FAMILY["llama"])
    model: Any = hub.load(place)
    punished = model.inner.generation_config
    punished.repetition_penalty, punished.no_repeat_ngram_size, punished.min_new_tokens = 9.0, 1, 3
    punished.suppress_tokens, punished.do_sample = [*range(20)], True
    ids = [token.id for token in model.tokenizer.tokens(TEXT)]
    made = model.generate(ids, 8)
    for _ in made:
        with torch.no_grad():
            ids.append(int(inner(torch.tensor([ids])).logits[0, -1].argmax()))
    assert ids[-8:] == made
    assert model.inner.generation_config is punished


def test_directories_without_a_model_are_refused(tmp_path: Path):
    with pytest.raises(ch.errors.FileError, match="is no folder here"):
        hub.load(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(ch.errors.FileError, match=r"has no model\.safetensors"):
        hub.load(str(tmp_path))
    save_file({"x": np.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ch.errors.FileError, match="Transformers cannot load it"):
        hub.load(str(tmp_path))


def test_positions_reserved_for_padding_hold_no_token(tmp_path: Path):
    """RoBERTa's 514 positions hold 512 tokens: one more was an IndexError inside PyTorch."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = hf.RobertaConfig(vocab_size=50, max_position_embeddings=22, pad_token_id=1, **sizes)
    place, _ = saved(tmp_path, FAMILY["bert"])
    hf.RobertaModel(config).eval().save_pretrained(place)
    model = hub.load(place)
    assert len(steps_of_text(" ".join(["humpty"] * 20), model).tokens) == 20
    with pytest.raises(ch.errors.ShapeError, match="the text has 21 tokens, but the model has 20 positions"):
        steps_of_text(" ".join(["humpty"] * 21), model)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and an address at which no hub answers."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "https://192.0.2.1")  # a reserved address: nothing answers there
    for name in ("HTTPS_PROXY", "https_proxy", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def test_an_unknown_model_name_is_refused_quickly(cache: Path):
    start = time.monotonic()
    tried = f"it is not in the cache {cache} with config.json and safetensors, and it cannot be downloaded"
    with pytest.raises(ch.errors.FileError, match=f"no-such-model is no folder here, {tried}"):
        hub.load("no-such-model")
    assert time.monotonic() - start < 60
    with pytest.raises(ch.errors.FileError, match="Repo id must use"):
        hub.load("two words")
    with pytest.raises(ch.errors.FileError, match="the model's name is empty"):
        ch.load_model("")


def test_a_cached_model_needs_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    kept = cache / "models--owner--small"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    saved(kept / "snapshots" / ("0" * 40), FAMILY["bert"])

    def forbidden(*_: Any, **__: Any) -> None:
        raise OSError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    model: Any = ch.load_model("owner/small")
    assert (model.name, model.config.layers) == ("owner/small", 2)
    assert [token.text for token in model.tokenizer.tokens(TEXT)] == TEXT.split()
    (kept / "snapshots" / ("0" * 40) / "model.safetensors").unlink()  # a download that was cut off
    with pytest.raises(ch.errors.FileError, match=r"has no model\.safetensors"):
        ch.load_model("owner/small")


def test_a_model_of_transformers_is_taken_alone_and_with_its_tokenizer(tmp_path: Path):
    place, inner = saved(tmp_path, FAMILY["llama"])
    loaded = type(inner).from_pretrained(place).eval()
    words = hf.AutoTokenizer.from_pretrained(place)
    answers = [ch.explain(TEXT, given).to_json() for given in (loaded, (loaded, words), hub.load(place))]
    assert answers[0] == answers[1] == answers[2]
    loaded.name_or_path = str(tmp_path / "nowhere")
    with pytest.raises(ch.errors.FileError, match="nowhere: its tokenizer cannot be loaded"):
        ch.load_model(loaded)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_tokenizer_neither_pads_nor_truncates(tmp_path: Path, family: str):
    place, _ = saved(tmp_path, FAMILY[family])
    inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    model = ch.load_model(place) if family == "gpt2" else hub.load(place)
    assert isinstance(model, gpt2.Model) == (family == "gpt2")
    for text in (TEXT, "humpty dumpty"):
        assert [token.text for token in model.tokenizer.tokens(text)] == text.split()


def test_a_text_beyond_the_models_positions_is_refused(tmp_path: Path):
    place, _ = saved(tmp_path, FAMILY["bert"])
    inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    special = [("<pad>", 0), ("<unk>", 1)]  # which the text has besides its words
    inner.post_processor = processors.TemplateProcessing("<pad> $A <unk>", special_tokens=special)
    inner.save(str(tmp_path / "tokenizer.json"))
    model = hub.load(place)
    positions = model.inner.config.max_position_embeddings
    with pytest.raises(
        ch.errors.ShapeError, match=f"the text has {positions + 1} tokens, but the model has {positions} positio"
    ):
        steps_of_text(" ".join((WORDS * positions)[: positions - 1]), model)
