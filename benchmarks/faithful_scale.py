"""Seconds and memory of `ch.why` over the length of a text, by sentences, beside one run with half of them hidden.

    python -m benchmarks.faithful_scale [TOKENS …] [--ways rows,point,why,run] [--log FILE.jsonl] [--save FILE.svg]

Each number is of a process of its own that has loaded SmolLM2-135M, which has 8,192 positions; a longer text is given
to its first four layers, with more positions. `rows` is `ch.why(…, points=0, verify=0)`, `point` a run and one point
of the integral, `why` the integral at 4 points or more and what is run again, `run` one run with half of the sentences
hidden, of which ContextCite needs 64 and leave one out one for each sentence. Seconds are the process's own, which
other programs hardly lengthen. What the log has is not measured again.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.memory import apart, measured
from clearhead.digits import fixed

if TYPE_CHECKING:
    from clearhead.models.model import Model

TOKENS = 500, 1000, 2000, 4000, 8000
FACT, QUESTION = "The password of the attic is apple.", "\nThe password of the attic is"


WAYS = {
    "rows": "ch.why, points=0",
    "point": "a run and one point",
    "why": "ch.why, 4 points",
    "run": "one run with half hidden",
}


class Length(NamedTuple):
    """One way at one length of text."""

    tokens: int
    way: str
    seconds: float
    peak_bytes: int  # above the loaded model


def lengths(tokens: Sequence[int], ways: Sequence[str], log: Path | None) -> list[Length]:
    """Every way at every length, and what the log has of others."""
    have = [] if log is None or not log.exists() else [Length(*json.loads(line)) for line in log.open()]
    for way in ways:
        for count in tokens:
            if not any(one[:2] == (count, way) for one in have):
                have.append(Length(count, way, *apart("benchmarks.faithful_scale", count, "--one", way)))
                if log is not None:
                    with log.open("a") as file:
                        file.write(json.dumps(have[-1]) + "\n")
    return sorted(have, key=lambda one: (list(WAYS).index(one.way), one.tokens))


def lines(result: list[Length]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    return [
        ("way", "tokens", "seconds", "GB"),
        *(
            (WAYS[one.way], f"{one.tokens:,}", fixed(one.seconds, 1, 9), fixed(one.peak_bytes / 1e9, 2, 6))
            for one in result
        ),
    ]


def plot(result: list[Length], path: str) -> None:
    """Both pictures over the length, which is logarithmic, as seconds are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained", facecolor="white")
    places = figure.subplots(1, 2)
    for way, name in WAYS.items():
        ours = [one for one in result if one.way == way]
        tokens = [one.tokens for one in ours]
        if ours:
            places[0].plot(tokens, [one.seconds for one in ours], "o-", label=name)
            if way == "run":  # its memory comes on top of the run that it starts from, which is held already
                places[0].plot(tokens, [64 * one.seconds for one in ours], "o--", label="64 such runs")
            else:
                places[1].plot(tokens, [one.peak_bytes / 1e9 for one in ours], "o-", label=name)
    ticks = sorted({one.tokens for one in result})
    places[0].set(yscale="log", ylabel="seconds of the processor")
    places[1].set(ylim=(0, None), ylabel="GB above the loaded model")
    for axes in places:
        axes.set(xscale="log", xlabel="tokens")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    places[0].legend()
    figure.savefig(path)


def _one(way: str, tokens: int) -> str:
    import numpy as np

    import clearhead as ch
    from benchmarks.faithful_scores import Asked
    from benchmarks.faithful_tasks import Item, sentences
    from clearhead.explaining.answers import Target
    from clearhead.explaining.integral import integral
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
        if way == "point":
            ids = [token.id for token in model.tokens(text + QUESTION)]
            run = model.run(ids)
            target = Target(ids, (int(np.argmax(run.logits[-1])),), None, odds=True)
            return run, integral(model, target, range(1, len(ids) - 1), 1, 0.1, (), iter)
        points, verify = (0, 0) if way == "rows" else (4, 6)
        whole = [(0, len(text))]
        return ch.why(text + QUESTION, model, parts="sentences", hide=whole, points=points, verify=verify)

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
    parser.add_argument("--ways", default=",".join(WAYS), metavar="A,B")
    parser.add_argument("--log", type=Path, metavar="FILE")
    parser.add_argument("--save", metavar="FILE")
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(_one(asked.one, asked.tokens[0]))
        sys.exit()
    result = lengths(asked.tokens or list(TOKENS), [way for way in asked.ways.split(",") if way], asked.log)
    for words in lines(result):
        print("  ".join(f"{word:>24}" for word in words))
    if asked.save:
        plot(result, asked.save)
