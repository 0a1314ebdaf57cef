"""The lessons in docs: their code runs and every exercise is checked; and how a model learns, as one of them tells."""

import doctest
import json
import re
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import clearhead
from clearhead.cli import main
from clearhead.core.array_files import safetensors
from clearhead.errors import FileError
from clearhead.explaining.learning import learning, read
from dense_gpt2 import dense, softmax
from seeds import fresh
from terminal import call

ROOT = Path(__file__).parent.parent
LESSONS = ROOT / "docs/lessons"
CHINESE = ROOT / "docs/zh/lessons"
NAMES = [path.name for path in sorted(LESSONS.glob("[1-9]*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@cache
def lesson(name):
    """A lesson's code, run: what was wrong with it, and the names that it leaves."""
    text, said = (LESSONS / name).read_text(encoding="utf-8"), []
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False)
    return "".join(said), test.globs


def text_of(folder, name):
    return (folder / name).read_text(encoding="utf-8")


def prose(text):
    return FENCE.sub("", re.sub(r"<!--.*?-->|\]\([^)]*\)", "", text))


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_lesson_prints_what_the_lesson_says(name):
    assert lesson(name)[0] == ""


def held(number, printed):
    """Is a number of the prose, rounded as it is, one that the code printed?"""
    half = 0.5 * 10.0 ** -len(number.partition(".")[2])
    return any(abs(abs(each) - float(number)) <= half * (1 + 1e-9) for each in printed)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_the_prose_is_printed_by_the_code(name):
    """Constants of arithmetic done in words are listed here, with what they are."""
    known = {np.e, np.e**2, 1 / np.e, 1 + 2 * np.e, *ARITHMETIC.get(name, ())}
    text = text_of(LESSONS, name)
    sheets = [path.read_text(encoding="utf-8") for path in (LESSONS / "exercises").glob(f"{name[:2]}*.json")]
    blocks = " ".join([*sheets, *(block for _, block in FENCE.findall(text))])
    printed = known | {float(each.replace(",", "")) for each in re.findall(r"\d[\d,]*\.?\d*", blocks)}
    claimed = re.findall(r"(?<![\w.])\d+\.\d+(?!\.?\w)", prose(text))
    assert [each for each in claimed if not held(each, printed)] == []
    shares = re.findall(r"(\d+) %", prose(text))
    assert [each for each in shares if not held(each, {100 * each for each in printed})] == []


ARITHMETIC = {
    "1-one-head.md": (3.5, 11, 1.5, 5.5, 0.006, 0.994, 0.047, 0.953, 6.5),  # a wrong page's claims, and 1·0.5 + 3·2
    "3-self-attention.md": (0.2, 0.3, 0.6, 1.1),  # weights that cannot be, and their sum
    "5-decoding.md": (np.exp(2),),
    "6-causes.md": (1 - 0.468,),
}


def test_the_contents_list_every_lesson_in_both_languages():
    for folder in (LESSONS, CHINESE):
        listed = re.findall(r"^\d\. \[.*?\]\(lessons/(.*?)\)", text_of(folder.parent, "textbook.md"), re.MULTILINE)
        assert listed == NAMES == [path.name for path in sorted(folder.glob("[1-9]*.md"))]
    assert len(NAMES) == 6


def test_the_model_has_learned_as_many_rhymes_as_the_lesson_says():
    rhymes = (ROOT / "training/rhymes.txt").read_text(encoding="utf-8").strip().split("\n\n")
    assert f"learned {len(rhymes)} nursery rhymes" in text_of(LESSONS, NAMES[2])


# exercises


class Exercise(NamedTuple):
    """Which lesson, the inputs from its sheet or its names, and the right answer, in a reader's decimals."""

    lesson: int
    inputs: object  # a sheet's name, or a function of the lesson's names
    right: object  # a function of the inputs
    decimals: int | None = None


def scores(inputs):
    return inputs["q"] @ inputs["k"].swapaxes(-1, -2)


def causal(inputs):
    n, m = inputs["q"].shape[-2], inputs["k"].shape[-2]
    return np.tril(np.ones((n, m), dtype=bool), m - n)


def masked(inputs):
    return inputs["mask"]


def weights(scale=0.5, axis=-1, see=None, after=None):
    """Weights of the scaled scores; `see` is which may be seen, `after` hides others only after the softmax."""

    def answer(inputs):
        logits = scores(inputs) * scale
        a = softmax(logits if see is None else np.where(see(inputs), logits, -np.inf), axis)
        return a if after is None else a * after(inputs)

    return answer


def output(*scale, **wrong):
    return lambda inputs: weights(*scale, **wrong)(inputs) @ inputs["v"]


def layer(inputs, *, flat=False, mixed=True):
    x, (w_q, w_k, w_v, w_o) = inputs["x"], (inputs[f"w_{part}"] for part in "qkvo")

    def split(y):
        return y.reshape(3, len(x), -1) if flat else y.reshape(len(x), 3, -1).swapaxes(0, 1)

    q, k, v = (split(x @ w) for w in (w_q, w_k, w_v))
    joined = (softmax(q @ k.swapaxes(1, 2) / 2) @ v).swapaxes(0, 1).reshape(len(x), -1)
    return joined @ w_o if mixed else joined


def of_lesson(*names, **rules):
    """The inputs of an exercise that a lesson's code has made."""
    return lambda made: {name: made[name] for name in names} | rules


EXERCISES = {
    "weights by hand": Exercise(1, "1-weights.json", weights(), 3),
    "output by hand": Exercise(1, "1-output.json", output(), 2),
    "two texts": Exercise(2, "2-cross.json", output(), 2),
    "six words": Exercise(3, of_lesson("q", "k", "v", causal=True, stage="weights"), weights(1 / 8, see=causal)),
    "a layer": Exercise(4, of_lesson("x", "w_q", "w_k", "w_v", "w_o", num_heads=3), layer),
    "a mask by hand": Exercise(5, "5-causal.json", weights(see=causal), 3),
    "a step of decoding": Exercise(5, of_lesson("q", "k", "v", causal=True, query_offset=5), output(1 / 8)),
    "two cuts by hand": Exercise(6, "6-cut.json", output(see=masked), 2),
    "eight heads": Exercise(6, of_lesson("q", "k", "v", "mask"), output(1 / 8, see=masked)),
}
WRONG = {  # wrong answers, by exercise and by the mistake that has to be named; test_mistakes.py has all that are known
    "weights by hand": {
        "no scale": weights(1),
        "softmax over queries": weights(axis=0),
        "softmax over the whole matrix": lambda inputs: softmax(scores(inputs).reshape(-1) / 2).reshape(3, 3),
        "no softmax": lambda inputs: scores(inputs) / 2,
    },
    "output by hand": {"weights transposed": lambda inputs: weights()(inputs).T @ inputs["v"]},
    "two texts": {"scale of d_v": output(5**-0.5), "scale of the length": output(3**-0.5)},
    "six words": {"causal mask missing": weights(1 / 8), "mask after softmax": weights(1 / 8, after=causal)},
    "a layer": {
        "heads split without the transpose": partial(layer, flat=True),
        "output projection left out": partial(layer, mixed=False),
    },
    "a mask by hand": {"mask after softmax": weights(after=causal), "no scale": weights(1, see=causal)},
    "a step of decoding": {
        "causal mask in the other corner": lambda inputs: inputs["v"][:, :1],
        "causal mask strict": lambda inputs: softmax(scores(inputs)[..., :-1] / 8) @ inputs["v"][:, :-1],
    },
    "two cuts by hand": {"mask ignored": output(), "mask transposed": output(see=lambda inputs: inputs["mask"].T)},
    "eight heads": {"mask after softmax": output(1 / 8, after=masked)},
}
ANSWERS = [(name, mistake) for name in EXERCISES for mistake in (None, *WRONG[name])]


def inputs_of(exercise):
    if isinstance(exercise.inputs, str):
        return json.loads((LESSONS / "exercises" / exercise.inputs).read_text(encoding="utf-8"))
    return exercise.inputs(lesson(NAMES[exercise.lesson - 1])[1])


@pytest.mark.parametrize(("name", "mistake"), ANSWERS)
def test_the_checker_names_what_learners_do(tmp_path, name, mistake):
    exercise = EXERCISES[name]
    inputs = inputs_of(exercise)
    arrays = {key: np.asarray(value) if isinstance(value, list) else value for key, value in inputs.items()}
    answer = (exercise.right if mistake is None else WRONG[name][mistake])(arrays)
    if exercise.decimals is None:
        path = tmp_path / "answer.npz"
        np.savez(path, **inputs, theirs=answer)
    else:
        path = tmp_path / "answer.json"
        path.write_text(json.dumps(inputs | {"theirs": answer.round(exercise.decimals).tolist()}), encoding="utf-8")
    code = main(["diagnose", str(path), "--json", str(tmp_path / "said.json")])
    said = json.loads((tmp_path / "said.json").read_text(encoding="utf-8"))
    if mistake is None:
        assert (code, said["verdict"]) == (0, "right")
    else:
        assert code == 1
        assert [mistake] in [each["mistakes"] for each in said["explanations"]]


def test_the_sheets_in_the_pages_are_the_files():
    shown = next(block for kind, block in FENCE.findall(text_of(LESSONS, NAMES[0])) if kind == "json")
    assert json.loads(shown) == inputs_of(EXERCISES["weights by hand"])


def test_an_empty_sheet_is_refused_with_what_to_add(capsys):
    assert main(["diagnose", str(LESSONS / "exercises/1-weights.json")]) == 2
    assert "lacks theirs" in capsys.readouterr().err


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
