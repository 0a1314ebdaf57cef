"""The whole truth about 20 short prompts of SmolLM2-135M, beside what each estimate says; nothing is timed.

Truth: what y, the logit of the likeliest token's probability, changes by when a head is off in the row that answers,
for every head; and when the weight of an edge of that row is moved to the first token, for every edge to another key.
"""

from typing import Any, NamedTuple

import numpy as np

import clearhead as ch
from clearhead.explaining import rerun
from clearhead.explaining.answers import Target
from clearhead.explaining.part_runs import Again, integrated
from clearhead.explaining.rerun import Edge, based_on
from clearhead.models.protocol import Variant

PROMPTS = (
    "The capital of France is",
    "The opposite of hot is",
    "Mary had a little lamb, its fleece was white as",
    "One, two, three, four,",
    "The colour of grass is",
    "Romeo and",
    "The Eiffel Tower is in",
    "Water freezes at zero degrees",
    "Monday, Tuesday, Wednesday,",
    "Two plus two is",
    "The sun rises in the",
    "She opened the door and walked into the",
    "Bread is baked in an",
    "The largest ocean is the",
    "A dog barks and a cat",
    "import numpy as",
    "Shakespeare wrote Romeo and",
    "The cow jumped over the",
    "Tom gave Anna a book. Anna thanked",
    "In winter it is cold, and in summer it is",
)
FEW = 2


class Whole(NamedTuple):
    """One estimate of all edges, or of all heads, over the prompts: mean and worst."""

    of: str
    estimate: str
    prompts: int
    pearson: float
    least: float  # the lowest Pearson correlation of a prompt
    rank: float  # the place of what did most among the estimates, by size; 1 is first
    last: int  # the worst of these places
    first: float  # how often it is 1


def agreements(threads: int, *, quick: bool) -> list[Whole]:
    """Every estimate's agreement with the truth."""
    ch.set_num_threads(threads)
    model: Any = ch.load_model("smollm2")
    made = [compared(model, prompt) for prompt in PROMPTS[: FEW if quick else None]]
    return [
        _whole(of, name, [one[of][name] for one in made], [one[of]["truth"] for one in made])
        for of in ("edges", "heads")
        for name in made[0][of]
        if name != "truth"
    ]


def lines(result: list[Whole]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("of", "estimate", "prompts", "Pearson", "worst", "rank", "worst rank", "first")]
    for one in result:
        figures = (f"{one.pearson:.2f}", f"{one.least:.2f}", f"{one.rank:.1f}", f"{one.last:,}", f"{one.first:.0%}")
        rows.append((one.of, one.estimate, str(one.prompts), *figures))
    return rows


def compared(model: Any, prompt: str) -> dict[str, dict[str, Any]]:
    """For edges and heads, what y changes by without each, and every estimate of that."""
    ids = [token.id for token in model.tokens(prompt)]
    run, row = model.run(ids), len(ids) - 1
    logits = np.asarray(run.logits[row])
    target = Target(ids, (int(logits.argmax()),), None, odds=True)
    based = [based_on(target, run)]
    again = Again(model, based, (), based[0].value, "first", 1, (target.answer[0],) * 2)
    by_key, by_edge, _, _ = integrated(again, list(range(1, row)), 4, iter)
    keys = slice(1, row)  # those that have a gate
    shape = (model.config.layers, model.config.heads)
    slopes, cuts, moved = (np.zeros((*shape, len(ids))) for _ in range(3))
    by_head = np.zeros(shape)
    variant = Variant((), np.zeros(len(ids)))
    for layer, _, part in model.differentiated(ids, [variant], target.rows, lambda rows: target.value(rows)[1]):
        ran = run.layers[layer]
        slopes[layer] = part.attended.edges(target.rows, part.g)[:, 0]
        matrix = ch.AttentionMatrix(ran.q, ran.k, **ran.rules)
        cuts[layer], moved[layer] = (matrix.cuts(ran.v, part.g, rest=rest)[:, row] for rest in ("renormalise", "first"))
        by_head[layer] = np.einsum("hd,hd->h", part.g[:, row], part.attended.output[:, row])
    places = list(np.ndindex(shape))
    edges = [Edge(layer, head, row, key) for layer, head in places for key in range(1, row)]
    without = rerun.edges_without(model, based, edges, ())
    off = rerun.heads_off(model, based, places, ())
    value = based[0].value
    return {
        "edges": {
            "truth": np.array([one.value - value for one in without]),
            "integral": -by_edge[:, :, 0, keys].ravel(),
            "cuts": cuts[:, :, keys].ravel(),
            "cuts, moved": moved[:, :, keys].ravel(),
            "derivative at α = 1": -slopes[:, :, keys].ravel(),
        },
        "heads": {
            "truth": np.array([one.value - value for one in off]),
            "integral": -by_key.sum(axis=2).ravel(),
            "integral, this row": -by_edge[:, :, 0].sum(axis=2).ravel(),
            "derivative at α = 1": -by_head.ravel(),
        },
    }


def _whole(of: str, name: str, estimates: list[Any], truths: list[Any]) -> Whole:
    pearson, ranks = [], []
    for estimate, truth in zip(estimates, truths, strict=True):
        pearson.append(float(np.corrcoef(estimate, truth)[0, 1]))
        strongest = int(np.abs(truth).argmax())
        ranks.append(int((np.abs(estimate) > np.abs(estimate[strongest])).sum()) + 1)
    first = float(np.mean([rank == 1 for rank in ranks]))
    return Whole(of, name, len(ranks), float(np.mean(pearson)), min(pearson), float(np.mean(ranks)), max(ranks), first)
