"""What one logit is above another, differentiated by every head's output, in NumPy: reverse mode, layer by layer.

With z = logit(token) − logit(against) at one position, o_i = Σ_j a_ij·v_j a head's output at query i before W^O, and
g_i = ∂z/∂o_i, the matrices of causes of one layer are `A.contributions(v, g)` and `A.cut_effects(v, g)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core.axes import Array
from clearhead.core.rule_values import read_place
from clearhead.errors import FileError, RuleError, SelectionError
from clearhead.models.backward import of_logits, through
from clearhead.models.model import Model
from clearhead.models.protocol import ForwardPass, Variant


class Target(NamedTuple):
    """z = logit(token) − logit(against), of what follows the token at `position`."""

    position: int
    token: int
    against: int


class LayerDerivatives(NamedTuple):
    """Of one layer: the derivative of z by its heads' outputs, and what these outputs bring to z, to first order."""

    g: Array  # (heads, queries, d_v), by A·v: before edits of outputs, and before W^O
    whole: Array  # (heads, queries): g_i·o_i


@dataclass(frozen=True, eq=False, slots=True)
class Derivatives:
    """z and its derivatives. Of layer l, `run.layers[l]` has q, k, v and the rules, and `layers[l]` has g."""

    run: ForwardPass
    target: Target
    z: float
    layers: list[LayerDerivatives]
    embeddings: Array  # (tokens, d_model): the derivative of z by what the first layer is given

    def heads(self) -> Array:
        """Σ_i g_i·o_i, float64 (layers, heads): what each head brings to z, to first order.

        It is the derivative of z by a factor on the head's output. A head that an edit turned off has 0.
        """
        return np.stack([layer.whole.sum(axis=-1, dtype=np.float64) for layer in self.layers])


def target_of(run: ForwardPass, token: int | None = None, against: int | None = None, position: int = -1) -> Target:
    """The target that was asked for: the likeliest next token against the likeliest other one where they are None.

    run        with logits
    token      the id of the token whose logit is explained
    against    the id of the one that it is compared with
    position   of the token that they would follow; a negative one counts from the end

    Raises RuleError for a model that gives no next token, SelectionError for a position or token that there is not, and
    where both tokens are the same. O(vocabulary·log(vocabulary)) time.
    """
    if run.logits is None:
        raise RuleError("the model gives no next token, so there is no logit to explain.", "a decoder has one.")
    place = read_place("position", position, len(run.logits))
    logits = run.logits[place]
    if logits.size < 2:
        raise SelectionError("the vocabulary has one token: there is none to compare it with.")
    other = None if against is None else read_place("against", against, logits.size)
    chosen = _likeliest(logits, other) if token is None else read_place("token", token, logits.size)
    other = _likeliest(logits, chosen) if other is None else other
    if chosen == other:
        raise SelectionError(f"token and against are both {chosen}: their difference is always 0.")
    return Target(place, chosen, other)


def derivatives(model: Model, run: ForwardPass, target: Target) -> Derivatives:
    """Differentiate z by each head's output and by the embeddings, with the run's edits in force.

    run   as `model.run` gives it, in the dtype of the model's weights. Its edits may be cut, boost, tempered, scaled
          and off; a cut with rest="first" is refused: what it adds depends on the logits

    Raises RuleError for a run with another edit or without its residual stream, FileError where derivatives are NaN or
    infinite. Time in proportion to the forward pass, O(tokens) memory for each layer.

    >>> from clearhead.models.model import load
    >>> model = load()
    >>> run = model.run([token.id for token in model.tokenizer.tokens("humpty dumpty sat on a")])
    >>> d = derivatives(model, run, target_of(run))
    >>> model.tokenizer.text(d.target.token), model.tokenizer.text(d.target.against), round(d.z, 1), d.layers[1].g.shape
    (' wall', ' great', 6.8, (8, 5, 64))
    """
    check_run(run)
    layers: list[LayerDerivatives] = []
    with np.errstate(over="ignore", invalid="ignore"):
        by_logits = np.zeros(model.config.vocabulary, np.float32)
        by_logits[[target.token, target.against]] = 1, -1
        by_last = of_logits(model.decoder, run.hidden[-1], {target.position: by_logits})
        back = through(model.decoder, [x[None] for x in run.hidden], [Variant(run.edits)], by_last[None])
        for (layer,) in back:
            layers.append(LayerDerivatives(layer.g, np.einsum("hnd,hnd->hn", layer.g, layer.attended.output)))
            embeddings = layer.residual
    if not all(np.isfinite(array).all() for array in (embeddings, *(layer.g for layer in layers))):
        raise FileError(f"{model.name}: its derivatives are NaN or infinite: its weights are damaged, or too large.")
    z = difference(model, run.hidden[-1][target.position], target)
    return Derivatives(run, target, z, layers[::-1], embeddings)


def difference(model: Model, row: Array, target: Target) -> float:
    """Compute z, in float64, from the residual stream after the last layer at the target's position, (d_model,)."""
    decoder, pair = model.decoder, [target.token, target.against]
    rows = decoder.weights.rows(decoder.unembedding, pair).astype(np.float64)
    raw = rows @ decoder.final(row).astype(np.float64) * decoder.config.logit_scale
    bias = decoder.weights.get("output.bias")
    first, second = decoder.capped(raw if bias is None else raw + bias[pair])
    return float(first - second)


def check_run(run: ForwardPass) -> None:
    """Raise RuleError for a run without its residual stream, or with an edit that has no derivative here."""
    if not run.hidden:
        raise RuleError(
            "the run has no residual stream: only decoders that run in NumPy keep theirs.",
            "ch.watch(model, causes=True) finds causes in PyTorch's models.",
        )
    check_edits(run.edits)


def check_edits(edits: Sequence[Edit]) -> None:
    """Raise RuleError for an edit that no derivative is taken through."""
    for edit in edits:
        if edit.kind not in ("boost", "cut", "off", "scaled", "tempered") or edit.to == "mean" or edit.rest:
            raise RuleError(
                f"{edit}: no derivative is taken through this edit.",
                "cut, boost, tempered, scaled and off(to='zero') have one.",
            )


def _likeliest(logits: Array, besides: int | None) -> int:
    order: Sequence[int] = np.argsort(-logits, kind="stable")[:2].tolist()
    return next(token for token in order if token != besides)
