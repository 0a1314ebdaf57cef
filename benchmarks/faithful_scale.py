"""Seconds and memory of `ch.why` over the length of a text, by sentences, beside one run with half of them hidden.

    python -m benchmarks.faithful_scale [TOKENS …] [--save FILE.svg]

Each number is of a process of its own that has loaded SmolLM2-135M, which has 8,192 positions; a longer text is given
to its first four layers, with more positions. `run` is one run with a random half hidden, of which ContextCite needs 64
and leave one out one for each sentence. Seconds are the process's own, which other programs hardly lengthen.
"""

import argparse
import json
import re
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.memory import Single, apart, measured
from clearhead.digits import fixed

if TYPE_CHECKING:
    from clearhead.models.model import Model

TOKENS = 500, 1000, 2000, 4000, 8000
FACT, QUESTION = "The password of the attic is apple.", "\nThe password of the attic is"


class Length(NamedTuple):
    """One length of text."""

    tokens: int
    why: Single
    run: Single


def lengths(tokens: list[int]) -> list[Length]:
    """Both calls at every length."""
    return [Length(n, *(apart("benchmarks.faithful_scale", "--one", way, n) for way in ("why", "run"))) for n in tokens]


def lines(result: list[Length]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("tokens", "ch.why, s", "GB", "one run, s", "GB")]
    for one in result:
        pairs = [(fixed(each.seconds, 1, 9), fixed(each.peak_bytes / 1e9, 2, 6)) for each in (one.why, one.run)]
        rows.append((f"{one.tokens:,}", *pairs[0], *pairs[1]))
    return rows


def plot(result: list[Length], path: str) -> None:
    """Both pictures over the length, logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    times, sizes = figure.subplots(1, 2)
    tokens = [one.tokens for one in result]
    times.plot(tokens, [64 * one.run.seconds for one in result], "o-", label="64 runs, ContextCite")
    for axes, name in ((times, "seconds"), (sizes, "peak_bytes")):
        scale = 1e9 if axes is sizes else 1
        axes.plot(tokens, [getattr(one.why, name) / scale for one in result], "o-", label="ch.why")
    sizes.plot(tokens, [one.run.peak_bytes / 1e9 for one in result], "o-", label="one run")
    for axes, label in ((times, "seconds"), (sizes, "GB above the loaded model")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.legend()
    figure.savefig(path)


def _one(way: str, tokens: int) -> str:
    import clearhead as ch
    from benchmarks.faithful_scores import Asked
    from benchmarks.faithful_tasks import Item, sentences
    from clearhead.models.model import Model

    ch.set_num_threads(1)
    model = ch.load_model("smollm2")
    assert isinstance(model, Model)
    if tokens > model.config.positions:
        model = longer(model, tokens)
    text = " ".join([FACT, *sentences() * (1 + tokens // 1000)])
    room = tokens - len(model.continuation(QUESTION))
    text = text[: model.tokenizer.encode(text).offsets[room - 1][1]]
    ch.why(text[:100], model)  # every weight is unpacked
    ends = [match.end() for match in re.finditer(r"\. ", text)]
    parts = list(zip([0, *ends], [*ends, len(text)], strict=True))
    asked = Asked(model, Item("length", 0, text + QUESTION, parts, [0], "")) if way == "run" else None

    def call() -> object:
        if asked is not None:
            return asked.hidden([range(0, len(parts), 2)])
        return ch.why(text + QUESTION, model, parts="sentences", hide=[(0, len(text))])

    start = time.process_time()
    _, peak = json.loads(measured(call))
    return json.dumps([time.process_time() - start, peak])


def longer(model: "Model", tokens: int) -> "Model":
    """The first four layers of a model, with so many positions."""
    config = model.decoder.config._replace(layers=4, positions=tokens)
    return replace(model, decoder=replace(model.decoder, config=config))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faithful_scale")
    parser.add_argument("tokens", nargs="*", type=int)
    parser.add_argument("--save", metavar="FILE")
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(_one(asked.one, asked.tokens[0]))
        sys.exit()
    result = lengths(asked.tokens or list(TOKENS))
    for words in lines(result):
        print("  ".join(f"{word:>16}" for word in words))
    if asked.save:
        plot(result, asked.save)
