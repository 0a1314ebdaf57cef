"""Seconds and memory of the parts' effects over the length of a text, beside ContextCite's runs and leave one out.

    python -m benchmarks.faithful_scale [TOKENS …] [--save FILE.svg]

Each number is of a process of its own that has loaded SmolLM2-135M, which has 8,192 positions. `integral` is 4 points,
14 passes, for parts of 16 tokens; `run` is one run with a random half hidden, of which ContextCite needs 64, and leave
one out one for each part.
"""

import argparse
import sys
from typing import NamedTuple

from benchmarks.faithful_tasks import sentences
from benchmarks.memory import Single, apart, measured
from clearhead.digits import fixed

TOKENS, PART = (500, 1000, 2000, 4000, 8000), 16


class Length(NamedTuple):
    """One length of text."""

    tokens: int
    integral: Single
    run: Single


def lengths(tokens: list[int]) -> list[Length]:
    """Both calls at every length."""
    return [
        Length(n, *(apart("benchmarks.faithful_scale", "--one", way, n) for way in ("integral", "run"))) for n in tokens
    ]


def lines(result: list[Length]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("tokens", "integral, s", "GB", "64 runs, s", "GB", "leave one out, s")]
    for one in result:
        seconds = (one.integral.seconds, 64 * one.run.seconds, one.tokens // PART * one.run.seconds)
        times, sizes = [fixed(x, 1, 9) for x in seconds], [fixed(x.peak_bytes / 1e9, 2, 6) for x in one[1:]]
        rows.append((f"{one.tokens:,}", times[0], sizes[0], times[1], sizes[1], times[2]))
    return rows


def plot(result: list[Length], path: str) -> None:
    """Both pictures over the length, logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    times, sizes = figure.subplots(1, 2)
    tokens = [one.tokens for one in result]
    for name, count in (("ContextCite, 64 runs", lambda _: 64), ("leave one out", lambda n: n // PART)):
        times.plot(tokens, [count(one.tokens) * one.run.seconds for one in result], "o-", label=name)
    times.plot(tokens, [one.integral.seconds for one in result], "o-", label="integral, 4 points")
    sizes.plot(tokens, [one.integral.peak_bytes / 1e9 for one in result], "o-", label="integral, 4 points")
    sizes.plot(tokens, [one.run.peak_bytes / 1e9 for one in result], "o-", label="one run")
    for axes, label in ((times, "seconds"), (sizes, "GB above the loaded model")):
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        axes.legend()
    figure.savefig(path)


def _one(way: str, tokens: int) -> str:
    import clearhead as ch
    from benchmarks.faithful_scores import Asked, integrated
    from benchmarks.faithful_tasks import Item
    from clearhead.models.model import Model

    ch.set_num_threads(1)
    model = ch.load_model("smollm2")
    assert isinstance(model, Model)
    text = " ".join(sentences() * (1 + tokens // 1000))
    cut = model.tokens(text)[:tokens]
    parts = [(cut[place].start, cut[place + PART - 1].stop) for place in range(1, tokens - PART - 1, PART)]
    item = Item("length", 0, text[: cut[-1].stop], parts, [0], "")
    model.run([token.id for token in cut[:32]])  # every weight is unpacked

    def call() -> object:
        asked = Asked(model, item)
        return integrated(asked) if way == "integral" else asked.hidden([range(0, len(parts), 2)])

    return measured(call)


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
