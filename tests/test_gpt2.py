"""The shipped model and any GPT-2 checkpoint against Transformers; and invalid checkpoints."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from clearhead.errors import FileError, ShapeError
from clearhead.models.model import load
from dense_gpt2 import random_peer
from seeds import fresh

SHIPPED = Path(str(files("clearhead") / "models" / "rhymes"))
TEXTS = ["humpty dumpty sat on", "Hello, wörld! 你好 🙂\n\n  spaces", "x"]


@pytest.fixture(scope="module")
def shipped():
    return load()


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


def test_the_shipped_model_has_the_documented_sizes_and_tokens(shipped):
    assert repr(shipped) == "Model(rhymes: 2 layers, 8 heads, d_model 512)"
    assert sum(f.stat().st_size for f in SHIPPED.iterdir()) <= 10e6
    assert [t.text for t in shipped.tokens("humpty dumpty sat on a wall")] == [
        "humpty", " dumpty", " sat", " on", " a", " wall",
    ]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_gives_the_same_tokens_and_logits(shipped, text):
    torch = pytest.importorskip("torch")
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

    peer = GPT2LMHeadModel.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    ids = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))(text)["input_ids"]
    assert ids == [t.id for t in shipped.tokens(text)]
    assert shipped.tokenizer.decode(ids) == text.lower()
    with torch.no_grad():
        expected = peer(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(shipped.run(ids).logits - expected).max() < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_function": "gelu", "n_inner": 24, "dtype": "bfloat16"},
        {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False, "tie_word_embeddings": False},
        {"activation_function": "silu", "shards": True},
    ],
)
def test_a_random_gpt2_of_transformers_gives_the_same_logits(tmp_path, options):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    dtype, shards = (options.get(name, default) for name, default in (("dtype", "float32"), ("shards", False)))
    changes = {name: value for name, value in options.items() if name not in ("dtype", "shards")}
    peer = random_peer(tmp_path, fresh(), n_embd=32, vocab_size=3000, **changes).to(getattr(torch, dtype))
    (tmp_path / "model.safetensors").unlink()
    peer.save_pretrained(tmp_path, max_shard_size="100KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    model = load(tmp_path)
    ids = fresh().integers(0, 3000, 40).tolist()
    with torch.no_grad():
        expected = peer.float()(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(model.run(ids).logits - expected).max() < 1e-4


def test_texts_that_do_not_fit_the_model_are_refused(shipped):
    with pytest.raises(ShapeError, match="the text is empty"):
        shipped.tokens("")
    with pytest.raises(ShapeError, match=r"the text has \d+ tokens but the model has 256 positions"):
        shipped.tokens("a " * 300)
    assert len(shipped.tokens("a" + " a" * 255)) == 256


def rewrite(place, **changes):
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not ...}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: shutil.rmtree(d), "is not a directory"),
        (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
        (lambda d: (d / "config.json").write_text("{"), "is not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda d: rewrite(d, model_type="mamba"), "is for model_type 'mamba', which does not run in NumPy"),
        (lambda d: rewrite(d, n_head=...), "n_head is None"),
        (lambda d: rewrite(d, n_head=7), "n_embd 512 is not a multiple of n_head 7"),
        (lambda d: rewrite(d, n_layer=3), "the weights lack `h.2."),
        (lambda d: rewrite(d, n_inner=100), "has shape"),
        (lambda d: rewrite(d, activation_function="swish9"), "activation_function 'swish9' is unknown"),
        (lambda d: rewrite(d, add_cross_attention=True), "add_cross_attention"),
        (lambda d: rewrite(d, n_layer=10**9), "n_layer is 1,000,000,000: expected at most 4,096"),
        (lambda d: rewrite(d, n_embd=10**6, n_head=1), "the sizes make it"),
        (lambda d: rewrite(d, vocab_size=10**12), "the sizes make it (1000000000000, 512)"),
        (lambda d: rewrite(d, n_inner=-1), "n_inner is -1"),
        (lambda d: rewrite(d, layer_norm_epsilon=float("nan")), "layer_norm_epsilon is nan"),
        (lambda d: rewrite(d, layer_norm_epsilon=10**400), "layer_norm_epsilon is 1000"),
        (lambda d: rewrite(d, activation_function=["gelu"]), "activation_function ['gelu'] is unknown"),
        (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "is a pickle, which can run code"),
        (lambda d: truncate(d / "model.safetensors", 1000), "is not a whole safetensors file"),
        (lambda d: truncate(d / "model.safetensors", -1000), "is not a whole safetensors file"),
        (lambda d: (d / "model.safetensors").write_bytes(b"garbage" * 99), "is not a whole safetensors file"),
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "the tokenizer cannot be read"),
    ],
)
def test_invalid_checkpoints_are_refused(copied, spoil, words):
    spoil(copied)
    with pytest.raises(FileError) as caught:
        load(copied)
    assert words in str(caught.value)
    assert "\n" not in caught.value.one_line()


def truncate(place, length):
    data = place.read_bytes()
    place.write_bytes(data[:length])


def test_a_tokenizer_stored_in_two_files_loads(copied):
    whole = json.loads((copied / "tokenizer.json").read_text())["model"]
    (copied / "vocab.json").write_text(json.dumps(whole["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in whole["merges"]]
    (copied / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (copied / "tokenizer.json").unlink()
    assert [t.text for t in load(copied).tokens("humpty dumpty sat on")] == ["humpty", " dumpty", " sat", " on"]
