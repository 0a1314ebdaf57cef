"""How W_Q, W_K and W_V are learned: the recording, what is computed from it, and the command."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import clearhead
from clearhead.core.array_files import safetensors
from clearhead.errors import FileError
from clearhead.explaining.learning import learning, read
from dense_gpt2 import dense, softmax
from seeds import fresh
from terminal import call

ROOT = Path(__file__).parents[1]
CONFIG = learning().config
FILE = Path(clearhead.__file__).parent / "models/learning/recording.safetensors"


@pytest.fixture(scope="module")
def recorded():
    return safetensors(FILE)


@pytest.fixture(scope="module")
def run():
    return learning()


def forward(weights, ids):
    """Logits (tokens, vocabulary) and attention (heads, tokens, tokens) of the recorded model, in float64."""
    separate = dict(weights)
    for kind in ("weight", "bias"):
        parts = np.split(separate.pop(f"h.0.attn.c_attn.{kind}"), 3, axis=-1)
        separate |= {f"h.0.attn.{kind[0]}_{p}": part for p, part in zip("qkv", parts, strict=True)}
    model = SimpleNamespace(weights=separate | {"lm_head.weight": separate["wte.weight"]}, config=CONFIG)
    logits, attention, _ = dense(model, ids)
    return logits, attention[0]


def at_step(arrays, place):
    prefix = "weights.transformer."
    return {
        name.removeprefix(prefix): array[place].astype(np.float64)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def loss_of(weights, texts):
    shares = [softmax(forward(weights, ids[:-1])[0])[np.arange(len(ids) - 1), ids[1:]] for ids in texts]
    return -np.log(np.concatenate(shares)).mean()


def test_recorded_weights_give_what_was_recorded_of_them(recorded, run):
    arrays, metadata = recorded
    texts, shown = json.loads(metadata["texts"]), json.loads(metadata["shown"])
    assert 40 <= len(arrays["step"]) <= 80
    assert FILE.stat().st_size < 300_000
    for place in range(len(arrays["step"])):
        weights = at_step(arrays, place)
        logits, attention = forward(weights, shown)
        assert loss_of(weights, texts) == pytest.approx(float(arrays["loss"][place]), rel=1e-4, abs=1e-5)
        np.testing.assert_allclose(attention[:, -1], arrays["attention"][place], atol=2e-5)
        np.testing.assert_allclose(softmax(logits[-1]), arrays["next"][place], atol=2e-5)
        np.testing.assert_allclose(run.weights[place], attention, atol=2e-5)
        np.testing.assert_allclose(run.following[place], softmax(logits[-1]), atol=2e-5)
    assert run.difference < 2e-5


@pytest.mark.gate
def test_recorded_gradients_are_the_derivative_by_each_matrix(recorded):
    arrays, metadata = recorded
    texts, place = json.loads(metadata["texts"]), int(fresh().integers(len(arrays["step"])))
    weights, name = at_step(arrays, place), "h.0.attn.c_attn.weight"
    whole, step = weights[name], 1e-5
    slopes = np.zeros_like(whole)
    for cell in np.ndindex(whole.shape):
        ends = []
        for sign in (1, -1):
            moved = whole.copy()
            moved[cell] += sign * step
            ends.append(loss_of(weights | {name: moved}, texts))
        slopes[cell] = (ends[0] - ends[1]) / (2 * step)
    lengths = [np.linalg.norm(part) for part in np.split(slopes, 3, axis=1)]
    np.testing.assert_allclose(lengths, arrays["gradient"][place], rtol=2e-3, atol=1e-6)


def test_the_model_learns_what_its_text_asks_for(run):
    assert run.loss[0] > 4 > 0.1 > run.loss[-1]
    np.testing.assert_allclose(run.weights[0, :, -1], 0.2, atol=0.01)  # at first every token gets the same weight
    assert run.vocabulary[run.following[-1].argmax()] == " wall"
    first_two = run.weights[-1, :, -1, :2].sum(axis=-1)
    assert first_two.max() > 0.8  # a head that looks back at humpty dumpty
    assert run.step.tolist() == sorted(set(run.step.tolist()))


def test_another_file_is_refused(tmp_path):
    place = tmp_path / "damaged.safetensors"
    place.write_bytes(FILE.read_bytes()[:-10])
    with pytest.raises(FileError):
        read(place)
    with pytest.raises(FileError, match="is not a recording of a training run"):
        read(FILE.parents[1] / "rhymes/model.safetensors")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_command_prints_one_step(language, run):
    from rich.cells import cell_len

    done = call("learn", "--step", "50", "--lang", language)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(cell_len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    assert re.search(r"→ 47 +0\.991", done.stdout)  # the last recorded step up to 50
    place = run.step.tolist().index(47)
    assert f"{100 * run.following[place].max():.2f}%" in done.stdout
    for head in range(2):
        assert f"{100 * run.weights[place, head, -1, 1]:.2f}%" in done.stdout
    if language == "zh":
        left = re.sub(r"humpty|dumpty|sat|on|clearhead|PyTorch|[WQKVNd]_?\w*|ln|--\w+|FILE|␣\w+|wall", "", done.stdout)
        assert not re.search("[A-Za-z]{3,}", left), left


def test_the_command_writes_numbers_and_the_page(tmp_path, run):
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    assert call("learn", "--json", out, "--html", page).returncode == 0
    data = json.loads(out.read_text())
    assert data["text"] == "humpty dumpty sat on a"
    np.testing.assert_allclose(data["w_k"], run.w_k)
    np.testing.assert_allclose(data["weights"], run.weights, atol=1e-6)
    assert page.read_text(encoding="utf-8") == run.to_html()


@pytest.mark.gate
def test_the_script_records_a_run(tmp_path, monkeypatch):
    for name in ("torch", "tokenizers", "safetensors", "tqdm"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(ROOT / "training")
    import record

    place = tmp_path / "short.safetensors"
    monkeypatch.setattr("sys.argv", ["record.py", str(place), "--steps", "4"])
    assert record.main() == 0
    run_again = read(place)
    assert run_again.step.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(run_again.w_q[0], learning().w_q[0])  # the same seed
    assert run_again.difference < 2e-5
