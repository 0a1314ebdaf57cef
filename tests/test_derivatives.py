"""The shipped model and any GPT-2 against Transformers; its derivatives in NumPy against differences and PyTorch's."""

import json
import shutil
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clearhead.errors import FileError, ShapeError
from clearhead.explaining.answers import Target
from clearhead.models import decoder, mlp
from clearhead.models.decoder import Decoder
from clearhead.models.folder import config_of
from clearhead.models.mlp import ACTIVATIONS
from clearhead.models.model import Model, load
from clearhead.models.protocol import Variant
from clearhead.models.weights import Weights
from dense_gpt2 import gpt2_weights, with_gpt2_weights
from programs import peak_of
from seeds import fresh

STEP = 1e-5
KEYS = {  # of config.json
    "layers": "n_layer", "heads": "n_head", "d_model": "n_embd", "d_mlp": "n_inner", "positions": "n_positions",
    "vocabulary": "vocab_size", "activation": "activation_function", "tied": "tie_word_embeddings",
}  # fmt: skip
SMOOTH = sorted({*ACTIVATIONS} - {"relu"})  # which has a corner, where finite differences fail
shipped = cache(load)


def several(times):
    """Run a test so many times, each with fresh numbers."""
    return pytest.mark.parametrize("trial", range(times))


def drawn(rng, dtype=np.float64, activation=None, **sizes):
    """A random GPT-2 of random sizes, with weights large enough that attention is far from uniform."""
    heads, d_k = int(rng.integers(1, 4)), int(rng.integers(4, 9))
    data = {"model_type": "gpt2", "n_layer": int(rng.integers(1, 4)), "n_head": heads, "n_embd": heads * d_k}
    data |= {"n_inner": 11, "n_positions": 40, "vocab_size": 23}
    data["activation_function"] = activation or str(rng.choice(sorted(ACTIVATIONS)))
    data["tie_word_embeddings"] = bool(rng.integers(2))
    data |= {KEYS.get(name, name): value for name, value in sizes.items()}
    config = config_of(Path("config.json"), data)
    d, mlp, weights = config.d_model, config.d_mlp, {}
    shapes = {f"attn.w_{p}": (d, d) for p in "qkv"} | {"attn.c_proj.weight": (d, d)}
    shapes |= {"mlp.c_fc.weight": (d, mlp), "mlp.c_proj.weight": (mlp, d)}
    linear = {f"h.{layer}.{name}": shape for layer in range(config.layers) for name, shape in shapes.items()}
    norms = [f"h.{layer}.{norm}" for layer in range(config.layers) for norm in ("ln_1", "ln_2")]

    def add(name, *shape, size=1.0, mean=0.0):
        weights[name] = (mean + size * rng.standard_normal(shape)).astype(dtype)

    add("wte.weight", config.vocabulary, d)
    add("wpe.weight", config.positions, d)
    for name, (rows, columns) in linear.items():
        add(name, rows, columns, size=rows**-0.5)
        add(name.replace(".weight", ".bias").replace(".w_", ".b_"), columns, size=0.3)
    for name in (*norms, "ln_f"):
        add(f"{name}.weight", d, size=0.2, mean=1.0)
        add(f"{name}.bias", d, size=0.2)
    weights["lm_head.weight"] = weights["wte.weight"]
    if not config.tied:
        add("lm_head.weight", config.vocabulary, d)
    return with_gpt2_weights(Model("random", Decoder(config, Weights({})), None), weights)


def z_of(model, target):
    return target.value(model.run(target.ids).logits[target.rows.start :])[0]


def derivatives(model, target):
    """Of each layer, the first one first, the derivatives of the target's number."""
    back = model.differentiated(target.ids, [Variant()], target.rows, lambda rows: target.value(rows)[1])
    return [part for _, _, part in back][::-1]


@pytest.mark.parametrize(("room", "mlps"), [(0, 5), (4, 4), (8, 3), (16, 2)])
def test_kept_layers_change_no_bit(monkeypatch, room, mlps):
    """With room for nothing, for attention, for the MLP of one layer and of both: the rest is computed again."""
    rng, calls, inner = fresh(), [], mlp._inner
    model = drawn(rng, layers=2, d_mlp=96, heads=2, d_model=24)
    variants, rows = [Variant(rng.standard_normal(9) - 2) for _ in range(2)], range(6, 9)
    ids, by = rng.integers(model.config.vocabulary, size=9).tolist(), rng.standard_normal((3, model.config.vocabulary))

    def derived():
        back = model.differentiated(ids, variants, rows, lambda _: by)
        return [x for *_, part in back for x in (part.g, part.by_gates, part.residual)]

    whole = derived()
    monkeypatch.setattr(mlp, "_inner", lambda *given: calls.append(given) or inner(*given))
    monkeypatch.setattr(decoder, "LONG", room * len(variants) * 9 * model.config.d_model)
    for one, other in zip(whole, derived(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(calls) == mlps


def with_added(model, name, x):
    """The same model with x added to one of its weights."""
    weights = gpt2_weights(model)
    return with_gpt2_weights(model, weights | {name: weights[name] + x})


def slope_of(function):
    """The derivative at 0 of a function of one number, by differences of fourth order."""
    near, far = (function(step) - function(-step) for step in (STEP, 2 * STEP))
    return (8 * near - far) / (12 * STEP)


@several(3)
def test_variants_run_each_row_that_differs_once(monkeypatch, trial):
    """What is seen of the text before a row tells it apart; a token that no later one sees has no row but the last."""
    rng, asked, linear, n = fresh(), [], Weights.linear, 24
    model = drawn(rng)

    def counted(self, x, name):
        asked.extend([x.shape[0]] * (name == "blk.0.attn_q"))
        return linear(self, x, name)

    run = model.run(rng.integers(0, model.config.vocabulary, n).tolist())
    gates = np.where(np.repeat(rng.random((20, 6)) < 0.5, 4, axis=1) & (np.arange(n) < n - 1), -np.inf, 0.0)
    gates[:, 0], gates[0, 8:12] = 0.0, -np.inf
    firsts = [int(np.argmin(row)) * (trial == 0 or row[1] == 0) for row in gates]  # else the first token is replaced
    variants = [Variant(row, first, ids={} if first else {0: 3}) for row, first in zip(gates, firsts, strict=True)]
    monkeypatch.setattr(Weights, "linear", counted)
    together = list(model.again(run, variants, range(n - 1, n)))
    seen = {
        (row, one.gates[:row].tobytes(), *one.ids)
        for one in variants
        for row in range(one.first, n)
        if one.gates[row] == 0
    }
    assert asked == [len(seen)]
    for variant, rows in zip(variants, together, strict=True):
        (alone,) = model.again(run, [variant], range(n - 1, n))
        np.testing.assert_allclose(rows, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_each_activation_has_the_slope_of_its_finite_differences(name):
    x = fresh().normal(0, 3, 200)
    x = np.where(np.abs(x) < 1e-3, 1.0, x)  # relu has a corner at 0
    expected = slope_of(lambda step: ACTIVATIONS[name][0](x + step))
    np.testing.assert_allclose(ACTIVATIONS[name][1](x), expected, rtol=1e-7, atol=1e-8)


@several(12)
def test_derivatives_are_finite_differences(trial):
    """By the embeddings; by each b_V, which moves outputs by the sum of their weights; by each head's factor."""
    rng = fresh()
    model = drawn(rng, activation=str(rng.choice(SMOOTH)))
    n = int(rng.integers(2, 10))
    ids = rng.integers(0, model.config.vocabulary, n).tolist()
    run = model.run(ids)
    answer = tuple(rng.integers(0, model.config.vocabulary, rng.integers(1, n)).tolist())
    target = (
        Target(ids, answer[:1], (answer[0] + 1) % 23, odds=False)
        if rng.integers(2)
        else Target(ids, answer, None, odds=True)
    )
    layers = derivatives(model, target)
    largest = max(float(np.abs(x).max()) for x in (layers[0].residual, *(layer.g for layer in layers)))

    def check(derivative, moved):
        np.testing.assert_allclose(derivative, slope_of(moved), rtol=1e-6, atol=1e-7 * max(1.0, largest))

    def scaled(place, more):
        (rows,) = model.again(run, [Variant(added={place: more})], target.rows)
        return target.value(rows)[0]

    def moved_by(name, along):
        return lambda step: z_of(with_added(model, name, step * along), target)

    along = rng.standard_normal(gpt2_weights(model)["wpe.weight"].shape)
    check((layers[0].residual * along[:n]).sum(), moved_by("wpe.weight", along))
    for number, (layer, ran) in enumerate(zip(layers, run.layers, strict=True)):
        along = rng.standard_normal((model.config.heads, 1, layer.g.shape[-1]))
        check((layer.g * along).sum(), moved_by(f"h.{number}.attn.b_v", along.ravel()))
        head = int(rng.integers(model.config.heads))
        check(
            (layer.g * layer.output)[head].sum(),
            lambda step, place=(number, head), output=ran.heads[head]: scaled(place, step * output),
        )


def test_memory_grows_with_the_tokens_and_not_with_their_square():
    n = 2048
    model = drawn(fresh(), np.float32, layers=1, heads=1, d_model=4, d_mlp=4, positions=n)
    peak = peak_of(lambda: derivatives(model, Target([1] * n, (2,), 3, odds=False)))
    assert peak < 4 * n * n / 4  # a matrix of float32 is 4·n·n bytes, and an engine works on tiles


SHIPPED = Path(str(files("clearhead") / "models" / "rhymes"))
TEXTS = ["humpty dumpty sat on", "Hello, wörld! 你好 🙂\n\n  spaces", "x"]


@pytest.fixture(scope="module")
def rhymes():
    return load()


@pytest.fixture
def copied(tmp_path):
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


def test_the_shipped_model_has_the_documented_sizes_and_tokens(rhymes):
    assert repr(rhymes) == "Model(rhymes: 2 layers, 8 heads, d_model 512)"
    assert sum(f.stat().st_size for f in SHIPPED.iterdir()) <= 10e6
    assert [t.text for t in rhymes.tokenizer.tokens("humpty dumpty sat on a wall")] == [
        "humpty", " dumpty", " sat", " on", " a", " wall",
    ]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_gives_the_same_tokens_and_logits(rhymes, text):
    torch = pytest.importorskip("torch")
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

    peer = GPT2LMHeadModel.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    ids = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))(text)["input_ids"]
    assert ids == [t.id for t in rhymes.tokenizer.tokens(text)]
    assert rhymes.tokenizer.decoded(ids) == text.lower()
    with torch.no_grad():
        expected = peer(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(rhymes.run(ids).logits - expected).max() < 1e-4


def test_texts_that_do_not_fit_the_model_are_refused(rhymes):
    with pytest.raises(ShapeError, match="the text is empty"):
        rhymes.tokenizer.tokens("")
    with pytest.raises(ShapeError, match=r"the text has \d+ tokens, but the model has 256 positions"):
        rhymes.tokenizer.tokens("a " * 300)
    assert len(rhymes.tokenizer.tokens("a" + " a" * 255)) == 256


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
        (lambda d: rewrite(d, n_head=7), "the width 512 is not a multiple of the 7 heads"),
        (lambda d: rewrite(d, n_layer=3), "the weights lack `blk.2."),
        (lambda d: rewrite(d, n_inner=100), "has shape"),
        (lambda d: rewrite(d, activation_function="swish9"), "activation_function 'swish9' is unknown"),
        (lambda d: rewrite(d, add_cross_attention=True), "add_cross_attention"),
        (lambda d: rewrite(d, n_layer=10**9), "it has 1,000,000,000 layers: expected at most 4,096"),
        (lambda d: rewrite(d, n_embd=10**6, n_head=16), "its sizes ask for"),
        (lambda d: rewrite(d, n_embd=10**11, n_head=1), "heads are 100,000,000,000 wide: expected at most 65,536"),
        (lambda d: rewrite(d, vocab_size=10**12), "its sizes ask for (1000000000000, 512)"),
        (lambda d: rewrite(d, layer_norm_epsilon=float("nan")), "layer_norm_epsilon is nan"),
        (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "is a pickle, which can run code"),
        (lambda d: truncate(d / "model.safetensors", -1000), "is not a whole safetensors file"),
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "the tokenizer cannot be read"),
        (lambda d: (d / "tokenizer.json").rename(d / "tokenizer.model"), "tokenizer.model of a gpt2 tokenizer is not"),
        (lambda d: (d / "config.json").rename(d / "a.gguf"), "has GGUF files and no config.json"),
        (lambda d: shutil.copy(d / "config.json", d / "adapter_config.json"), "has an adapter (such as LoRA)"),
        (lambda d: weighed(d, "h.1.attn.c_proj.bias"), "lack `blk.1.attn_output.bias`"),
        (lambda d: weighed(d, **{"ln_f.weight": np.ones(())}), "`output_norm.weight` has shape ()"),
        (lambda d: weighed(d, more=np.ones(3), **{"ln_f.weight": np.ones(3)}), "more` (1 such tensors in all)"),
    ],
)
def test_invalid_checkpoints_are_refused(copied, spoil, words):
    spoil(copied)
    with pytest.raises(FileError) as caught:
        load(copied)
    assert words in str(caught.value)
    assert "\n" not in caught.value.one_line()


def weighed(place, *left, **others):
    weights = load_file(place / "model.safetensors")
    prefix = "transformer." if "transformer.wte.weight" in weights else ""
    weights |= {prefix + name: array.astype(np.float32) for name, array in others.items()}
    for name in left:
        del weights[prefix + name]
    save_file(weights, place / "model.safetensors")


def truncate(place, length):
    data = place.read_bytes()
    place.write_bytes(data[:length])


def test_a_tokenizer_stored_in_two_files_loads(copied):
    whole = json.loads((copied / "tokenizer.json").read_text())["model"]
    (copied / "vocab.json").write_text(json.dumps(whole["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in whole["merges"]]
    (copied / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (copied / "tokenizer.json").unlink()
    assert [t.text for t in load(copied).tokenizer.tokens("humpty dumpty sat")] == ["humpty", " dumpty", " sat"]
