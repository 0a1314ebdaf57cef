"""`explain --model` with Transformers' models: small random ones of real classes, saved with a tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

import clearhead as ch
from clearhead import hub
from clearhead.cli import main
from clearhead.explain import explain
from watched import FAMILIES, Family, build

FAMILY = {family.name: family for family in FAMILIES}
WORDS = [
    "humpty",
    "dumpty",
    "sat",
    "on",
    "a",
    "wall",
    "had",
    "great",
    "fall",
    "all",
    "the",
    "kings",
    "horses",
    "and",
    "men",
]
TEXT = "humpty dumpty sat on the wall and had a great fall"


def saved(place: Path, family: Family, **changes: Any) -> tuple[str, Any]:
    """A model's directory as people have it, and the model."""
    model = build(family, **changes)
    model.save_pretrained(place)
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>").save_pretrained(place)
    return str(place), model


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "phi3", "bert", "distilbert"]
)
def test_the_head_explained_is_the_models_own(tmp_path: Path, name: str):
    place, model = saved(tmp_path, FAMILY[name])
    seen = explain(hub.find(place), TEXT, layer=1, head=2)
    ids = torch.tensor([[token.id for token in seen.tokens]])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(ids, output_attentions=True)
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


def test_what_goes_into_attention_and_comes_out_of_it(tmp_path: Path):
    place, model = saved(tmp_path, FAMILY["llama"])
    seen = explain(hub.find(place), TEXT, layer=0)
    run, attention = seen.run, model.model.layers[0].self_attn
    with torch.no_grad():
        x = torch.from_numpy(run.x)
        np.testing.assert_allclose(run.v, attention.v_proj(x).view(-1, 2, 8).transpose(0, 1), atol=1e-5)
        joined = torch.from_numpy(np.array(run.heads)).transpose(0, 1).reshape(len(x), -1)
        np.testing.assert_allclose(run.output, attention.o_proj(joined), atol=1e-5)
    formulas = {step.name: step.formula for step in seen.steps}
    assert formulas["q"] == "Q = RoPE(X·W^Q)"
    assert formulas["v"] == "V = X·W^V"


def test_w_o_beside_the_attention_module_is_found(tmp_path: Path):
    place, model = saved(tmp_path, FAMILY["bert"])
    seen = explain(hub.find(place), TEXT, layer=1)
    dense = model.encoder.layer[1].attention.output.dense
    joined = torch.from_numpy(np.array(seen.run.heads)).transpose(0, 1).reshape(len(seen.tokens), -1)
    with torch.no_grad():
        np.testing.assert_allclose(seen.run.output, dense(joined), atol=1e-5)
    assert next(step.formula for step in seen.steps if step.name == "k") == "K = X·W^K + b^K"


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    place, _ = saved(tmp_path / "model", FAMILY["gemma3"])
    page, numbers = tmp_path / "page.html", tmp_path / "numbers.json"
    assert main(["explain", TEXT, "--model", place, "--html", str(page), "--json", str(numbers)]) == 0
    said = capsys.readouterr().out
    assert "RoPE(norm(X·W^Q))" in said
    assert "step by step against the" in said
    assert page.stat().st_size > 10_000
    assert json.loads(numbers.read_text())["model"]["kv_heads"] == 2


@pytest.mark.parametrize(
    ("name", "what"),
    [("t5", "encoder with a decoder"), ("vit", "no vocab_size"), ("clip", "expected a model of text")],
)
def test_models_that_one_text_does_not_run(tmp_path: Path, name: str, what: str):
    place, _ = saved(tmp_path, FAMILY[name])
    with pytest.raises(ch.errors.FileError, match=what):
        hub.find(place)


def test_a_pickle_is_not_opened(tmp_path: Path):
    place, model = saved(tmp_path, FAMILY["llama"])
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ch.errors.FileError, match="Transformers cannot load it"):
        hub.find(place)


def test_what_is_no_model_directory(tmp_path: Path):
    with pytest.raises(ch.errors.FileError, match="not a directory"):
        hub.find(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(ch.errors.FileError, match="Transformers cannot load it"):
        hub.find(str(tmp_path))


def test_gpt2_needs_no_pytorch(tmp_path: Path):
    """A directory in GPT-2 layout runs in NumPy, and says what Transformers' own GPT-2 says."""
    place, model = saved(tmp_path, FAMILY["gpt2"])
    found = hub.find(place)
    assert isinstance(found, ch.model.Model)
    seen = explain(found, TEXT, layer=0, head=1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.tensor([[token.id for token in seen.tokens]]), output_attentions=True)
    np.testing.assert_allclose(seen.trace.weights, out.attentions[0][0, 1], atol=2e-5)
