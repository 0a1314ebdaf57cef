"""Shows how W^Q, W^K and W^V are learned, from the recording of a small training run.

training/record.py makes the recording: the model's weight matrices at each recorded step, rounded to float16. This
module computes scores, attention weights and next tokens from them, and compares these with PyTorch's.
"""

import json
import os
from importlib.resources import as_file, files
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.array_files import safetensors
from clearhead.core.axes import Array
from clearhead.core.rule_values import read_path
from clearhead.digits import significant
from clearhead.errors import FileError
from clearhead.models.families import Config
from clearhead.models.model import of_arrays
from clearhead.models.protocol import probabilities
from clearhead.ops.matrix import AttentionMatrix
from clearhead.textbook.computed import listed
from clearhead.textbook.page import capitalised, opening
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.words import LANGUAGES, Language, read_language, say

_SHOWN = 6  # next tokens whose probabilities are shown
_PAGE = ("says", "next", "gradient", "check")  # sentences of the page
_WIDE, _HIGH, _EDGE = 576, 200, 28  # sizes of the page's curve


class Learning(NamedTuple):
    """A recorded training run. The first axis of every array is the recorded step, (steps, …)."""

    config: Config
    rhymes: int
    tokens: tuple[str, ...]  # of the example text
    vocabulary: tuple[str, ...]
    step: Array  # (steps,): the number of training steps before it
    loss: Array  # (steps,): mean cross-entropy over the rhymes, in nats
    gradient: Array  # (steps, 3): ‖∂loss/∂W‖ of W^Q, W^K and W^V
    w_q: Array  # (steps, d_model, h·d_k)
    w_k: Array
    w_v: Array
    scaled: Array  # (steps, heads, queries, keys): q·k/√d_k in the text
    weights: Array  # (steps, heads, queries, keys)
    following: Array  # (steps, vocabulary): the probability of each token after the text
    difference: float  # the largest difference of weights and probabilities from PyTorch's

    @property
    def text(self) -> str:
        """The example text."""
        return "".join(self.tokens)

    @property
    def reach(self) -> float:
        """The largest absolute entry of W^Q, W^K and W^V at any step."""
        return float(max(np.abs(w).max() for w in (self.w_q, self.w_k, self.w_v)))

    def likeliest(self) -> list[int]:
        """The next tokens that reach the highest probabilities at any step, the likeliest at the end first."""
        most = np.argsort(-self.following.max(axis=0), kind="stable")[:_SHOWN]
        return sorted(map(int, most), key=lambda token: -self.following[-1, token])

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain numbers, lists and strings; −∞ becomes None."""
        arrays = {name: listed(value) for name, value in self._asdict().items() if isinstance(value, np.ndarray)}
        facts = {"model": self.config.facts(), "text": self.text, "tokens": self.tokens}
        return facts | {"vocabulary": self.vocabulary} | arrays | {"largest_difference": self.difference}

    def to_html(self, language: Language = "en") -> str:
        """Return the page with a slider over the steps, as HTML. Raises RuleError for an unknown language."""
        return page.html(_document(self, read_language(language)))

    def save(self, path: str | os.PathLike[str], language: Language = "en") -> None:
        """Write the page to an .html file, whole or not at all. Raises FileError, RuleError for an unknown language."""
        page.write(path, lambda: _document(self, read_language(language)))

    def words(self, key: str, language: Language) -> str:
        """Return a sentence about this run."""
        config = self.config
        values: dict[str, Any] = {"rhymes": self.rhymes, "steps": int(self.step[-1]), "text": self.text}
        values |= {"layers": config.layers, "heads": config.heads, "d_model": config.d_model}
        values |= {"d_k": config.d_model // config.heads, "most": self.reach, "difference": self.difference}
        right = self.vocabulary[int(self.following[-1].argmax())]
        return say(language, key, **values, right=right.strip(), token=self.tokens[-1].strip())


def learning() -> Learning:
    """Read the recording that ships with the package, and compute each step's attention and next tokens.

    Raises FileError if the file is damaged. O(steps) runs of a model with some 3,000 parameters.

    >>> run = learning()
    >>> run.w_q.shape, [run.vocabulary[place] for place in run.following.argmax(axis=1)[[20, -1]]]
    ((42, 16, 16), [' a', ' wall'])
    """
    with as_file(files("clearhead") / "models" / "learning" / "recording.safetensors") as path:
        return read(path)


def read(path: str | os.PathLike[str]) -> Learning:
    """Read a recording that training/record.py wrote. Raises FileError for a damaged file, or one of another kind."""
    arrays, metadata = safetensors(read_path(path))
    try:
        about = {name: json.loads(metadata[name]) for name in ("config", "vocabulary", "texts", "shown")}
        prefix = "weights.transformer."
        stored = {n.removeprefix(prefix): a.astype(np.float32) for n, a in arrays.items() if n.startswith(prefix)}
        about["config"]["model_type"] = "gpt2"
        steps = range(len(arrays["step"]))
        models = [
            of_arrays("learning", about["config"], {name: array[step] for name, array in stored.items()})
            for step in steps
        ]
        seen = []  # for each step: scaled scores and weights, (heads, queries, keys), and next probabilities
        for run in (model.run(about["shown"]) for model in models):
            layer = run.layers[0]
            assert run.logits is not None
            weights = np.asarray(AttentionMatrix(layer.q, layer.k, causal=True)[:])
            scaled = layer.q @ layer.k.swapaxes(-1, -2) / np.sqrt(layer.q.shape[-1])
            seen.append((scaled, weights, probabilities(run.logits[-1])))
        recorded = {name: arrays[name].astype(np.float64) for name in ("loss", "gradient", "attention", "next")}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise FileError(
            f"{path} is not a recording of a training run: {error!s}.", "training/record.py writes one."
        ) from None
    scaled, weights, following = (np.stack(part) for part in zip(*seen, strict=True))
    off = np.abs(weights[:, :, -1] - recorded["attention"]).max(), np.abs(following - recorded["next"]).max()
    vocabulary = tuple(about["vocabulary"])
    return Learning(
        config=models[0].config,
        rhymes=len(about["texts"]),
        tokens=tuple(vocabulary[token] for token in about["shown"]),
        vocabulary=vocabulary,
        step=arrays["step"],
        loss=recorded["loss"],
        gradient=recorded["gradient"],
        **{f"w_{p}": np.stack([model.projections(0)[f"w_{p}"] for model in models]) for p in "qkv"},
        scaled=scaled,
        weights=weights,
        following=following,
        difference=float(max(off)),
    )


def _document(run: Learning, language: Language) -> Document:
    """Make the page's document, whose only entry is `learning`."""
    shown = run.likeliest()
    across = np.linspace(_EDGE, _WIDE - _EDGE, len(run.step))  # the loss curve's points
    points = np.stack([across, _HIGH - _EDGE - (_HIGH - 2 * _EDGE) * run.loss / run.loss.max()], axis=1).round(1)
    ends = np.linspace(0, len(points) - 1, 5, dtype=int)
    below = [(points[place][0], _HIGH - 4, str(run.step[place])) for place in ends]
    beside = [(points[place][0], points[place][1] - 8, significant(float(run.loss[place]))) for place in (0, -1)]
    data = {
        "tokens": run.tokens,
        "gradient": run.gradient.tolist(),
        "steepest": float(run.gradient.max()),
        "curve": points.tolist(),
        "ticks": below + beside,
        "names": [run.vocabulary[token] for token in shown],
        "next": run.following[:, shown].tolist(),
        "matrices": ["W^Q", "W^K", "W^V"],
        "groups": _figures(run),
        "words": {each: _words(run, each) for each in LANGUAGES},
    }
    arrays = {f"learning.{name}": getattr(run, name).astype(np.float32) for name in ("scaled", "weights")}
    arrays |= {f"learning.w_{p}": getattr(run, f"w_{p}").astype(np.float16) for p in "qkv"}  # as they were recorded
    return Document(opening([], data["words"][language]["title"], language) | {"learning": data}, arrays)


def _words(run: Learning, language: Language) -> dict[str, Any]:
    words: dict[str, Any] = {name: capitalised(run.words(f"learn {name}", language)) for name in _PAGE}
    words |= {"title": capitalised(run.words("learn page", language)), "loss": run.words("learn loss title", language)}
    heads = [say(language, "learn head", head=head, text=run.text) for head in range(run.config.heads)]
    words["groups"] = [capitalised(each) for each in (run.words("learn matrices page", language), *heads)]
    losses = zip(run.step.tolist(), run.loss.tolist(), strict=True)
    words["now"] = [say(language, "learn now", step=step, loss=loss) for step, loss in losses]
    return words | {"slider": say(language, "learn step")}


def _figures(run: Learning) -> list[list[dict[str, Any]]]:
    """Group the page's figures: the three matrices, and for each head its scores and weights."""

    def figure(symbol: str, role: str, name: str, part: int, dims: list[str], most: float | None) -> dict[str, Any]:
        return {"symbol": symbol, "role": role, "name": f"learning.{name}", "part": part, "dims": dims, "most": most}

    most = float(np.abs(run.scaled[..., np.tri(len(run.tokens), dtype=bool)]).max())
    split = {"split": run.config.d_model // run.config.heads}
    wide, square = ["d_model", "h·d_k"], ["n", "m"]
    roles = zip("qkv", ("query", "key", "value"), strict=True)
    matrices = [figure(f"W^{p.upper()}", role, f"w_{p}", 0, wide, run.reach) | split for p, role in roles]
    heads = [
        [figure("S′", "weights", "scaled", head, square, most), figure("A", "weights", "weights", head, square, None)]
        for head in range(run.config.heads)
    ]
    groups = [{"unit": 36, "between": "softmax", "list": pair} for pair in heads]
    return [[{"unit": 14, "between": "", "list": [matrix]} for matrix in matrices], *([group] for group in groups)]
