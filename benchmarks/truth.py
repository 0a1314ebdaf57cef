"""How well estimates of an edge's effect agree with the truth: the model run again with that edge cut.

Beginnings of the rhymes that the shipped model was trained on, 4 to 12 tokens, each with the lead of the likeliest next
token over the second likeliest. All edges on which that lead depends are cut one by one. Nothing is timed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.agreement import spearman
from clearhead.digits import fixed
from clearhead.explaining.cutting import Edge, cut_again
from clearhead.explaining.derivatives import Derivatives, derivatives, target_of
from clearhead.explaining.gpt2 import Model, load
from clearhead.ops.matrix import AttentionMatrix

RHYMES = Path(__file__).parent.parent / "training" / "rhymes.txt"
TEXTS, FEW = 20, 3
FIRST = 8  # of the edges that did most, how many an estimate has among as many


class Agreement(NamedTuple):
    """One estimate beside the truth, as means over the texts; the first two are None for one without a sign."""

    estimate: str
    texts: int
    edges: int
    pearson: float | None
    spearman: float | None
    magnitudes: float  # Spearman's correlation of |estimate| and |truth|
    found: float  # the share of the FIRST edges that did most, by |truth|, among the FIRST by |estimate|


def agreements(threads: int, *, quick: bool) -> list[Agreement]:
    """Every estimate on the same edges."""
    from clearhead.engines.threads import set_num_threads

    set_num_threads(threads)
    model = load()
    rows: dict[str, list[tuple[float, ...]]] = {}
    edges = 0
    texts = list(_texts(model, FEW if quick else TEXTS))
    for ids in texts:
        run = model.run(ids)
        found = derivatives(model, run, target_of(run))
        places, estimates = _estimates(found)
        truth = cut_again(model, run, found.target, places)
        edges += len(places)
        for name, numbers in estimates.items():
            rows.setdefault(name, []).append(_compared(numbers, truth))
    means = {name: [float(x) for x in np.mean(figures, axis=0)] for name, figures in rows.items()}
    return [
        Agreement(name, len(texts), edges, *((None, None) if name.startswith("weight") else own[:2]), *own[2:])
        for name, own in means.items()
    ]


def lines(found: list[Agreement]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [
        ("estimate", "texts", "edges", "Pearson", "Spearman", "Spearman of sizes", f"of the {FIRST} strongest")
    ]
    for one in found:
        signed = ("-" if x is None else fixed(x, 3, 6) for x in (one.pearson, one.spearman))
        rows.append(
            (one.estimate, str(one.texts), f"{one.edges:,}", *signed, fixed(one.magnitudes, 3, 6), f"{one.found:.0%}")
        )
    return rows


def _texts(model: Model, count: int) -> Iterator[list[int]]:
    """The ids of beginnings of lines, from all over the file, 4 to 12 tokens long."""
    every = [line for line in RHYMES.read_text(encoding="utf-8").splitlines() if line]
    cut = [[token.id for token in model.tokens(line)] for line in every]
    for place in range(count):
        length = 4 + place % 9
        start = place * len(cut) // count
        yield next(ids for ids in cut[start:] + cut if len(ids) >= length)[:length]


def _estimates(found: Derivatives) -> tuple[list[Edge], dict[str, Any]]:
    """The edges on which the lead depends, and each estimate of what it changes by without them, (edges,)."""
    last, position = len(found.layers) - 1, found.target.position
    places: list[Edge] = []
    parts: dict[str, list[float]] = {}
    for number, (ran, own) in enumerate(zip(found.run.layers, found.layers, strict=True)):
        matrix = AttentionMatrix(ran.q, ran.k, **ran.rules)
        cuts, contributions = matrix.cuts(ran.v, own.g)[...], matrix.contributions(ran.v, own.g)[...]
        weights = matrix[...]
        matrices = {
            "cut": cuts,
            "contribution": -contributions,
            "derivative by the logit": weights * own.whole[..., None] - contributions,
            "weight": weights,
            "weight, last row": weights * (np.arange(weights.shape[1]) == position)[:, None],
        }
        for head, query, key in np.ndindex(weights.shape):
            if key <= query and (number < last or query == position):
                places.append(Edge(number, head, query, key))
                for name, x in matrices.items():
                    parts.setdefault(name, []).append(float(x[head, query, key]))
    return places, {name: np.array(numbers) for name, numbers in parts.items()}


def _compared(estimate: Any, truth: Any) -> tuple[float, ...]:
    sizes = np.abs(estimate), np.abs(truth)
    first, second = (set(np.argsort(-x, kind="stable")[:FIRST].tolist()) for x in sizes)
    ranks = [spearman(*pair) or 0.0 for pair in ((estimate, truth), sizes)]
    return float(np.corrcoef(estimate, truth)[0, 1]), ranks[0], ranks[1], len(first & second) / FIRST
