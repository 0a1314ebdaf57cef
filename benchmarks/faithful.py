"""Does `ch.why` name the parts of a text that made the answer? Eight tasks, and other ways.

    python -m benchmarks --only faithful --items 20 --parts 12,36,100 --log faithful.jsonl

An item counts where the model, SmolLM2-135M, gives the planted answer, and another one when its sources are hidden. The
log has one line for each item, so that a run can be stopped and goes on where it was; with --items 0 only its table is
printed. Truth is y, the logit of the answer's probability, in runs with parts hidden. LDS: Spearman's correlation of y
with the sum of the kept parts' scores over 32 random halves. Drop: what ln P falls by without the k best parts. RISE
and MAS: areas under the curve of deletion in 20 steps, low is good.
"""

import json
import time
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.faithful_measures import curves, deleted, lds, log_p
from benchmarks.faithful_scores import (
    ROWS,
    Asked,
    Score,
    answered,
    by_random,
    by_runs,
    by_words,
    default,
    doubled,
    integrated,
    masks,
    off,
    shuffled,
)
from benchmarks.faithful_tasks import TASKS, item
from clearhead.digits import fixed
from clearhead.errors import FileError

ITEMS, QUICK, PARTS, TRUTH, TRIES = 20, 1, (12, 36, 100), 32, 12
CURVES = ("4 points", "4 points, 48 runs", "ContextCite, 64")  # what is deleted step by step: many runs
DROPS = 1, 3, 5


class Faithful(NamedTuple):
    """One way at one number of parts, as means over the items."""

    parts: int
    way: str
    items: int
    lds: float
    first: float  # how often a source is first
    three: float  # how often the first three are the three without which the answer changes most, by a run of each
    both: float | None  # how often both copies of a fact are the first two
    drops: list[float]
    rise: float | None
    mas: float | None
    passes: float
    seconds: float


def costs(
    threads: int,
    *,
    quick: bool,
    items: int | None = None,
    parts: str | None = None,
    log: str | None = None,
    few: bool = False,
) -> list[Faithful]:
    """Run what the log does not have yet, the first item of every task first; then the means."""
    from clearhead.engines.threads import set_num_threads

    set_num_threads(threads)
    wanted = (QUICK if quick else ITEMS) if items is None else items
    sizes = (PARTS[:1] if quick else PARTS) if parts is None else _sizes(parts)
    records = read(log)
    if wanted:
        from clearhead.models.finding import load_model

        model: Any = load_model("smollm2")
        random = None if few else shuffled(model)
        for number in range(wanted):
            for size in sizes:
                for task in TASKS:
                    done = [one for one in records if one["task"] == task and one["parts"] == size]
                    if len(done) <= number and (new := _next(model, random, task, size, done, few)):
                        records.append(new)
                        write(log, new)
    return means([one for one in records if one["parts"] in sizes])


def lines(result: list[Faithful]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first; then what hiding the best parts does, with headings of its own."""
    rows: list[tuple[str, ...]] = [("parts", "way", "items", "LDS", "first", "three", "passes", "seconds")]
    for one in result:
        shares = [f"{one.first:.0%}", f"{one.three:.0%}"]
        figures = [f"{one.lds:.2f}", *shares, f"{one.passes:.0f}", fixed(one.seconds, 2, 7)]
        rows.append((str(one.parts), one.way, str(one.items), *figures))
    rows.append(("parts", "way", "both", *(f"drop {k}" for k in DROPS), "RISE", "MAS"))
    for one in result:
        areas = ["-" if x is None else f"{x:.3f}" for x in (one.rise, one.mas)]
        both = "-" if one.both is None else f"{one.both:.0%}"
        rows.append((str(one.parts), one.way, both, *(fixed(x, 2, 6) for x in one.drops), *areas))
    return rows


def read(log: str | None) -> list[dict[str, Any]]:
    """The items of a log; none where there is no such file."""
    if log is None or not Path(log).exists():
        return []
    return [json.loads(line) for line in Path(log).read_text(encoding="utf-8").splitlines()]


def write(log: str | None, record: dict[str, Any]) -> None:
    """Add a line to the log."""
    if log is not None:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def means(records: list[dict[str, Any]]) -> list[Faithful]:
    """Every way's means, at each number of parts."""
    keys = [(one["parts"], way) for one in records for way in one["ways"]]
    return [
        _mean(size, way, [one for one in records if one["parts"] == size and way in one["ways"]])
        for size, way in sorted(dict.fromkeys(keys), key=lambda key: key[0])
    ]


def _mean(size: int, way: str, records: list[dict[str, Any]]) -> Faithful:
    ours = [one["ways"][way] for one in records]
    twice = [each["both"] for one, each in zip(records, ours, strict=True) if one["task"] == "fact twice"]
    areas = [each["curves"] for each in ours if each["curves"]]
    rise, mas = ([mean(each[place] for each in areas) for place in range(2)]) if areas else (None, None)
    drops = [mean(each["drops"][place] for each in ours) for place in range(len(DROPS))]
    both = mean(twice) if twice else None
    score, first, three, passes, seconds = (
        mean(each[name] for each in ours) for name in ("lds", "first", "three", "passes", "seconds")
    )
    return Faithful(size, way, len(ours), score, first, three, both, drops, rise, mas, passes, seconds)


def _next(
    model: Any, random: Any, task: str, size: int, done: list[dict[str, Any]], few: bool
) -> dict[str, Any] | None:
    """The next item of a task that holds, scored in every way; None where many tries find none."""
    seed = max((one["seed"] for one in done), default=-1) + 1
    for tried in range(seed, seed + TRIES):
        asked = Asked(model, item(task, tried, size))
        if asked.hold():
            return record(asked, random, few)
    return None


def record(asked: Asked, random: Any, few: bool = False) -> dict[str, Any]:
    """Everything about one item, as plain numbers; `random` is the model with random weights, None to leave it out.

    few   only the default, the integral at 4 points and doubled, the question's rows, ContextCite and BM25
    """
    began = time.perf_counter()
    ways: dict[str, Score] = {f"{points} points": integrated(asked, points) for points in ((4,) if few else (4, 8))}
    ways |= {"default": default(asked), "before, doubled": doubled(asked), ROWS: answered(asked)}
    ways |= by_runs(asked, ways, few) | {"BM25": by_words(asked)}
    if random is not None:
        ways["random weights"] = by_random(asked, random)
    kept = masks(asked, TRUTH, 2)
    truth = asked.hidden(off(kept))
    fresh = masks(asked, 64, 1)
    return {
        "task": asked.item.task,
        "parts": len(asked.parts),
        "seed": asked.item.seed,
        "tokens": len(asked.ids),
        "sources": asked.item.sources,
        "value": asked.value,
        "forward": asked.seconds,
        "truth": truth,
        "runs": asked.hidden(off(fresh)),
        "ways": {name: _judged(asked, name, score, kept, truth, few) for name, score in ways.items()},
        "took": time.perf_counter() - began,
    }


def _judged(asked: Asked, name: str, score: Score, kept: Any, truth: list[float], few: bool) -> dict[str, Any]:
    steps = deleted(score.scores)
    order = score.order or sorted(range(len(score.scores)), key=lambda part: -abs(score.scores[part]))
    alone = [abs(asked.value - y) for y in asked.hidden([[part] for part in range(len(asked.parts))])]
    three = sorted(range(len(alone)), key=lambda part: -alone[part])[:3]
    sources = asked.item.sources
    drops = [log_p(asked.value) - log_p(y) for y in asked.hidden([order[:count] for count in DROPS])]
    return {
        "scores": score.scores,
        "lds": lds(score.scores, kept, truth),
        "first": float(order[0] in sources),
        "three": float(set(order[:3]) == set(three)),
        "both": float(set(order[:2]) == set(sources)),
        "drops": drops,
        "curves": curves(score.scores, steps, asked.hidden(steps)) if name in CURVES and not few else None,
        "passes": score.passes,
        "seconds": score.seconds,
    }


def _sizes(parts: str) -> tuple[int, ...]:
    words = parts.split(",")
    if not all(word.isdecimal() and int(word) >= 3 for word in words):
        raise FileError(f"--parts {parts}: expected numbers from 3 on, such as 12,36.")
    return tuple(map(int, words))
