"""What parts of a text did to an answer: the derivative by gates on their keys, integrated from all shut to all open.

With α the factor on every gated key's weights, and y the number that is explained, φ_j = ∫ ∂y/∂α_j dα along the
straight way from 0 to 1, so that Σ φ_j = y(everything) − y(nothing of it): integrated gradients (Sundararajan et al.
2017), the value of Aumann and Shapley (1974) of this game. The derivative is a sum over edges, so that the same runs
give φ by head and by edge. y is smooth in ln α, and there the points of Gauss and Legendre lie; they begin where y is
nearly what it is with nothing of the text: what a model does with less than that is noise, and stays in the gap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core.axes import Array
from clearhead.core.effects import Rest
from clearhead.errors import FileError
from clearhead.explaining.answers import Target
from clearhead.models.protocol import Each, ForwardPass, LanguageModel, Variant
from clearhead.ops.matrix import AttentionMatrix

_TOGETHER = 1024  # tokens of all points that run at once


@dataclass(eq=False, slots=True)
class Integral:
    """φ of one target's run.

    heads   (layers, heads, tokens): by head and key, of all queries; 0 for a key that has no gate
    edges   (layers, heads, rows, tokens): of the edges from the rows that say the answer
    """

    heads: Array
    edges: Array


def integral(
    model: LanguageModel,
    target: Target,
    gated: Sequence[int],
    points: int,
    low: float,
    edits: tuple[Edit, ...],
    each: Each,
) -> Integral:
    """φ from α = `low` to 1 at so many points, each a forward and a backward pass; O(tokens) memory.

    Raises FileError where derivatives are NaN or infinite.
    """
    nodes, weights = np.polynomial.legendre.leggauss(points)
    logs, widths = np.log(low) * (1 - nodes) / 2, -np.log(low) * weights / 2
    tokens, sizes = len(target.ids), (model.config.layers, model.config.heads)
    inside = np.zeros(tokens)
    inside[list(gated)] = 1
    result = Integral(np.zeros((*sizes, tokens)), np.zeros((*sizes, len(target.rows), tokens)))
    step = max(1, _TOGETHER // tokens)
    for start in each(range(0, points, step)):
        variants = [Variant(edits, inside * log) for log in logs[start : start + step]]
        backward = model.differentiated(target.ids, variants, target.rows, lambda rows: target.value(rows)[1])
        for layer, place, part in backward:
            width = widths[start + place]
            result.heads[layer] += width * part.gates * inside
            result.edges[layer] += width * part.attended.edges(target.rows, part.g) * inside
    if not np.isfinite(result.heads).all():
        raise FileError(f"{model.name}: its derivatives are NaN or infinite: its weights are damaged, or too large.")
    return result


def cuts(model: LanguageModel, target: Target, run: ForwardPass, edits: tuple[Edit, ...], rest: Rest) -> Array:
    """What y changes by without each edge of the rows that answer, (layers, heads, rows, tokens), to first order.

    run   the target's, with these edits
    """
    result = np.zeros((model.config.layers, model.config.heads, len(target.rows), len(target.ids)))
    slope, asked = (lambda rows: target.value(rows)[1]), (target.ids, [Variant(edits)], target.rows)
    for layer, _, part in model.differentiated(*asked, slope, run):
        ran = part.attended
        first = target.rows.start - (len(target.ids) - ran.q.shape[-2])
        some = slice(first, first + len(target.rows))
        result[layer] = AttentionMatrix(ran.q, ran.k, **ran.rules).cut_effects(ran.v, part.g, rest=rest)[:, some]
    return result
