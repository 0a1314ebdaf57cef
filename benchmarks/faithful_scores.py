"""What is asked about one prompt, and how every way to score its parts is run, for the group `faithful`.

All runs with parts hidden are the library's, in batches, for us and for the peers alike.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import clearhead as ch
from benchmarks.faithful_measures import bm25, context_cite
from benchmarks.faithful_tasks import Item
from clearhead.explaining import part_runs, rerun
from clearhead.explaining.answers import Target
from clearhead.explaining.integral import integral
from clearhead.explaining.part_runs import Again, corrected
from clearhead.explaining.rerun import based_on
from clearhead.explaining.text_parts import parts_of_text
from clearhead.explaining.why_lists import PartEffect
from clearhead.models.model import Model
from clearhead.models.protocol import ForwardPass
from clearhead.models.weights import Weights

MASKS = 64  # ContextCite's
STEP = 8  # masks in one batch
CITED = 16, 32, MASKS
ROWS = "question's rows"
OURS = ("4 points", 16), ("4 points", 48), (ROWS, 16), (ROWS, 48)  # with 48 it is "careful"


class Score(NamedTuple):
    """One way's scores, (parts,), what it took: forward passes and backward passes, and seconds of
    the process's own time, which other programs on a busy machine do not lengthen.

    order   the parts as they are shown; None: by their scores
    """

    scores: list[float]
    passes: int
    seconds: float
    order: list[int] | None = None


class Asked:
    """One prompt with its run, and y with parts hidden; what was run once is kept."""

    def __init__(self, model: Model, item: Item) -> None:
        self.model, self.item = model, item
        tokens = model.tokens(item.text)
        self.ids = [token.id for token in tokens]
        start = time.process_time()
        self.run: ForwardPass = model.run(self.ids)
        last = np.asarray(self.run.logits[len(self.ids) - 1])
        self.seconds = time.process_time() - start  # of one forward pass
        self.likeliest = int(last.argmax())
        target = Target(self.ids, (self.likeliest,), None, odds=True)
        self.based = based_on(target, self.run)
        self.value = self.based.value
        cut = parts_of_text(item.parts, item.text, tokens, (), [(0, len(item.text))])
        self.parts = [part.tokens for part in cut]
        self.question = self.ids[max(map(max, self.parts)) + 1 :]
        self.kept: dict[frozenset[int], float] = {frozenset(): self.value}
        self.likely: dict[frozenset[int], int] = {frozenset(): self.likeliest}

    def hidden(self, lists: Sequence[Sequence[int]]) -> list[float]:
        """y with each list of parts hidden."""
        new = list(dict.fromkeys(each for each in map(frozenset, lists) if each not in self.kept))
        new.sort(key=min)
        for start in range(0, len(new), STEP):
            some = new[start : start + STEP]
            keys = [[token for part in each for token in self.parts[part]] for each in some]
            for each, one in zip(some, rerun.hidden(self.model, [self.based], keys, ()), strict=True):
                self.kept[each], self.likely[each] = one.value, one.likeliest
        return [self.kept[frozenset(each)] for each in lists]

    def again(self) -> Again:
        """What `ch.why` runs again."""
        return Again(self.model, [self.based], (), self.value, "first", 0, (0, 0))

    def hold(self) -> bool:
        """Is the likeliest answer the planted one, and another one without its sources?"""
        if len(self.parts) != len(self.item.parts):
            return False
        said = self.model.text(self.likeliest)
        self.hidden([self.item.sources])
        other = self.likely[frozenset(self.item.sources)]
        return bool(said.strip()) and self.item.answer.startswith(said) and other != self.likeliest

    def summed(self, by_token: Any) -> list[float]:
        """A number for each part, from one for each token."""
        return [float(sum(by_token[token] for token in part)) for part in self.parts]


def masks(asked: Asked, count: int, seed: int) -> Any:
    """Random halves: (count, parts), true where a part is seen."""
    return np.random.default_rng([seed, asked.item.seed]).random((count, len(asked.parts))) < 0.5


def off(kept: Any) -> list[list[int]]:
    """The parts that each mask hides."""
    return [np.flatnonzero(~row).tolist() for row in kept]


def timed(call: Callable[[], tuple[Any, int]]) -> Score:
    """Scores and passes, with the seconds that they took."""
    start = time.process_time()
    scores, passes = call()
    return Score([float(score) for score in scores], passes, time.process_time() - start)


def by_runs(asked: Asked, quick: dict[str, Score], few: bool = False) -> dict[str, Score]:
    """Leave one out; ContextCite with 16, 32 and 64 runs, and ours corrected by the first of them."""
    count, seconds, last = len(asked.parts), {0: 0.0}, 0
    result = {}
    if not few:
        left = timed(lambda: ([asked.value - y for y in asked.hidden([[n] for n in range(count)])], count))
        result["leave one out"] = left
    kept = masks(asked, MASKS, 1)
    for more in sorted({*CITED, *(runs for _, runs in OURS)}):
        start = time.process_time()
        asked.hidden(off(kept[last:more]))
        seconds[more], last = seconds[last] + time.process_time() - start, more
    values = np.array(asked.hidden(off(kept)))
    for more in CITED:
        start = time.process_time()
        scores = context_cite(kept[:more], values[:more]).tolist()
        result[f"ContextCite, {more}"] = Score(scores, more, seconds[more] + time.process_time() - start)
    for way, more in OURS:
        before = quick[way]
        scores = corrected(np.array(before.scores), kept[:more], values[:more])
        result[f"{way}, {more} runs"] = Score(scores.tolist(), before.passes + more, before.seconds + seconds[more])
    return result


def by_words(asked: Asked) -> Score:
    """BM25, which runs no model."""
    return timed(lambda: (bm25(asked.question, [[asked.ids[token] for token in part] for part in asked.parts]), 0))


def integrated(asked: Asked, points: int = 4) -> Score:
    """Ours: the integral at so many points, and the runs that say where it begins."""

    def call() -> tuple[Any, int]:
        gated = [token for part in asked.parts for token in part]
        low, _ = part_runs.begin(asked.again(), gated)
        made = integral(asked.model, asked.based.target, gated, points, low, (), iter)
        return asked.summed(made.heads.sum(axis=(0, 1))), 2 + part_runs.LOWS.index(low) + 2 * points

    return timed(call)


def default(asked: Asked) -> Score:
    """What `ch.why` shows: parts by what hiding each did, and effects from all runs; its other runs are counted too."""
    start = time.process_time()
    seen = ch.why(asked.item.text, asked.model, parts=asked.item.parts)
    seconds = time.process_time() - start
    order = [seen.parts.index(part) for part in seen.ranked if part in seen.parts]
    passes = 2 * seen.points + len(seen.parts) + part_runs.read_effort("quick", len(asked.ids))
    return Score([part.effect for part in seen.parts], passes, seconds, order)


def doubled(asked: Asked) -> Score:
    """The integral alone, at 4, 8 and 16 points until 5 % of what the text did is missing: the default before runs."""
    made, seconds = Score([], 0, 0.0), 0.0
    total = asked.value - asked.hidden([range(len(asked.parts))])[0]
    for points in (4, 8, 16):
        made = integrated(asked, points)
        seconds += made.seconds
        if abs(total - sum(made.scores)) <= 0.05 * abs(total):
            break
    return made._replace(seconds=seconds)


def answered(asked: Asked) -> Score:
    """Ours without the integral: runs of the question's rows alone; passes are counted as if each were a whole one."""

    def call() -> tuple[Any, int]:
        parts = [PartEffect("", 0, 0, tuple(part), 0.0) for part in asked.parts]
        made = part_runs.answering(asked.again(), parts, asked.value)
        return [part.effect for part in made], len(parts) + part_runs.ANSWERING

    return timed(call)


def shuffled(model: Model, seed: int = 0) -> Model:
    """The same model, the numbers of each matrix of its layers in a random order: no estimate from it can be right."""
    rng, stored = np.random.default_rng(seed), model.decoder.weights.stored
    mixed = {
        name: rng.permuted(model.decoder.weights[name].ravel()).reshape(model.decoder.weights[name].shape)
        for name, tensor in stored.items()
        if name.startswith("blk.") and len(tensor.shape) == 2
    }
    weights = Weights(stored, model.decoder.weights.budget, kept=mixed, used=sum(x.nbytes for x in mixed.values()))
    return replace(model, decoder=replace(model.decoder, weights=weights))


def by_random(asked: Asked, random: Model) -> Score:
    """Ours, in the model with random weights, of the answer that the real one gives."""
    other = Asked(random, asked.item)
    target = asked.based.target
    other.based = based_on(target, other.run)
    other.value = other.based.value
    return integrated(other)
