"""How well estimates of an edge's effect agree with the truth: the model run again with that edge cut.

Beginnings of the rhymes that the shipped model was trained on, 4 to 12 tokens, each with the lead of the likeliest next
token over the second likeliest. All edges on which that lead depends are cut one by one. Then longer beginnings, of
which some edges, drawn at random, are cut. Nothing is timed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.changing.edits import cut
from clearhead.core.effects import spearman
from clearhead.digits import fixed
from clearhead.explaining.derivatives import Derivatives, Target, derivatives, difference, target_of
from clearhead.explaining.rerun import Edge
from clearhead.models.model import Model, load
from clearhead.models.protocol import ForwardPass, Variant
from clearhead.models.variants import again
from clearhead.ops.matrix import AttentionMatrix

RHYMES = Path(__file__).parent.parent / "training" / "rhymes.txt"
TEXTS, FEW = 20, 3
LONG, LONG_TEXTS, DRAWN = (24, 48, 96), 3, 200  # tokens; texts of each length, and edges of each text
FIRST = 8  # of the edges that did most, how many an estimate has among as many
SIGNED = ("cut", "contribution", "by the logit")


class Agreement(NamedTuple):
    """One estimate beside the truth, over some of the edges, as means over the texts."""

    of: str  # which edges
    estimate: str
    texts: int
    edges: int
    pearson: float
    spearman: float
    slope: float  # Σ estimate·truth / Σ estimate²: below 1 where the truth is smaller than the estimate
    sizes: float  # Spearman's correlation of |estimate| and |truth|, for estimates without a sign
    shared: float  # the share of the FIRST edges that did most, by |truth|, among the FIRST by |estimate|


class Text(NamedTuple):
    """The edges of one text, and for each what it did and what it was estimated to do, (edges,)."""

    tokens: int
    edges: list[Edge]
    truth: Any
    estimates: dict[str, Any]


def agreements(threads: int, *, quick: bool) -> list[Agreement]:
    """Every estimate on the same edges: on all, and signed ones by layer and by length of text."""
    from clearhead.engines.threads import set_num_threads

    set_num_threads(threads)
    model = load()
    short = [_cut(model, ids) for ids in _texts(model, FEW if quick else TEXTS)]
    result = _means("all", short)
    for number in range(model.config.layers):
        result += _means(f"layer {number}", [_of_layer(text, number) for text in short], SIGNED)
    for first in range(4, 13, 3):
        some = [text for text in short if first <= text.tokens < first + 3]
        result += _means(f"{first}-{first + 2} tokens", some, SIGNED) if some else []
    for length in () if quick else LONG:
        long = [_cut(model, ids, DRAWN) for ids in _long_texts(model, length)]
        result += _means(f"{length} tokens", long, SIGNED)
    return result


def lines(result: list[Agreement]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [
        ("edges of", "estimate", "edges", "Pearson", "Spearman", "slope", "sizes", f"first {FIRST}")
    ]
    for one in result:
        signed = ("-" if one.estimate.startswith("weight") else fixed(x, 3, 6) for x in one[4:7])
        rows.append((one.of, one.estimate, f"{one.edges:,}", *signed, fixed(one.sizes, 3, 6), f"{one.shared:.0%}"))
    return rows


def _texts(model: Model, count: int) -> Iterator[list[int]]:
    """The ids of beginnings of lines, from all over the file, 4 to 12 tokens long."""
    every = [line for line in RHYMES.read_text(encoding="utf-8").splitlines() if line]
    cut = [[token.id for token in model.tokens(line)] for line in every]
    for place in range(count):
        length = 4 + place % 9
        start = place * len(cut) // count
        yield next(ids for ids in cut[start:] + cut if len(ids) >= length)[:length]


def _long_texts(model: Model, length: int) -> Iterator[list[int]]:
    """The ids of so many tokens from the beginnings of some rhymes, which may go on into the next one."""
    rhymes = RHYMES.read_text(encoding="utf-8").split("\n\n")
    for place in range(LONG_TEXTS):
        text = "\n\n".join(rhymes[place * len(rhymes) // LONG_TEXTS :])
        yield [token.id for token in model.tokens(text[: 6 * length])][:length]


def _cut(model: Model, ids: list[int], drawn: int | None = None) -> Text:
    """All edges of a text, or some, drawn at random."""
    run = model.run(ids)
    result = derivatives(model, run, target_of(run))
    edges, estimates = _estimates(result)
    if drawn is not None:
        chosen = np.random.default_rng(len(ids)).choice(len(edges), min(drawn, len(edges)), replace=False)
        edges, estimates = [edges[place] for place in chosen], {name: x[chosen] for name, x in estimates.items()}
    return Text(len(ids), edges, cut_again(model, run, result.target, edges), estimates)


def cut_again(model: Model, run: ForwardPass, target: Target, edges: Sequence[Edge]) -> Any:
    """What the lead changes by when each edge alone is cut and its row normalised anew, float64 (edges,)."""
    last = target.position
    cuts = [cut(queries=edge.query, keys=edge.key, layers=[edge.layer], heads=[edge.head]) for edge in edges]
    variants = [Variant((*run.edits, one), first=edge.query) for one, edge in zip(cuts, edges, strict=True)]
    made = again(model.decoder, run, [each for each in variants if each.first <= last], range(last, last + 1))
    leads = iter([difference(model, rows[0], target) for rows in made])
    before = difference(model, run.hidden[-1][last], target)
    return np.array([next(leads) - before if edge.query <= last else 0.0 for edge in edges])


def _of_layer(text: Text, number: int) -> Text:
    local = np.array([edge.layer == number for edge in text.edges])
    edges = [edge for edge in text.edges if edge.layer == number]
    return Text(text.tokens, edges, text.truth[local], {name: x[local] for name, x in text.estimates.items()})


def _means(of: str, texts: list[Text], names: tuple[str, ...] | None = None) -> list[Agreement]:
    edges = sum(len(text.edges) for text in texts)
    return [
        Agreement(of, name, len(texts), edges, *means.tolist())
        for name in names or texts[0].estimates
        for means in [np.mean([_compared(text.estimates[name], text.truth) for text in texts], axis=0)]
    ]


def _estimates(result: Derivatives) -> tuple[list[Edge], dict[str, Any]]:
    """The edges on which the lead depends, and each estimate of what it changes by without them, (edges,)."""
    last, position = len(result.layers) - 1, result.target.position
    places: list[Edge] = []
    parts: dict[str, list[float]] = {}
    for number, (ran, local) in enumerate(zip(result.run.layers, result.layers, strict=True)):
        matrix = AttentionMatrix(ran.q, ran.k, **ran.rules)
        cuts, contributions = matrix.cuts(ran.v, local.g)[...], matrix.contributions(ran.v, local.g)[...]
        weights = matrix[...]
        matrices = {
            "cut": cuts,
            "contribution": -contributions,
            "by the logit": weights * local.whole[..., None] - contributions,
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
    slope = float(estimate @ truth / (estimate @ estimate))
    return float(np.corrcoef(estimate, truth)[0, 1]), ranks[0], slope, ranks[1], len(first & second) / FIRST
