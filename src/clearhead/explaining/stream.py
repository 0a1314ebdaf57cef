"""The residual stream at one position: what was written to it, and how a logit is read from it.

A layer norm is x ↦ w·(x − mean(x))/σ + b; a root-mean-square norm leaves the mean in. With σ as it was in the run, both
are linear but for b, so that what each part wrote can be followed to a logit.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.explaining.gpt2 import Model, split
from clearhead.explaining.model import ForwardPass
from clearhead.words import Language, say

PartKind = Literal["token", "position", "embeddings", "attention", "mlp", "norm", "unembedding"]


class Norm(NamedTuple):
    """A layer norm of one vector, with the σ by which it divided it."""

    weight: Array  # (d_model,)
    bias: Array | None
    centred: bool  # does it subtract the mean?
    sigma: float
    before: float  # the vector's length, ‖x‖
    after: float

    def linear(self, x: Array) -> Array:
        """What it makes of (…, d_model) vectors, without its bias."""
        return self.weight * (x - x.mean(-1, keepdims=True) if self.centred else x) / self.sigma

    def transposed(self, row: Array) -> Array:
        """The vector whose product with x is row·linear(x)."""
        along = row * self.weight / self.sigma
        return np.asarray(along - along.mean() if self.centred else along)


class Written(NamedTuple):
    """One vector that was added to the residual stream.

    heads     (heads, d_model), what each head wrote, or None where that is not known; `bias` is then the rest
    sizes     heads and d_k of attention; d_mlp of an MLP, where known
    read      the norm that attention or the MLP read through; wrote: one that its output went through
    """

    kind: PartKind
    layer: int | None
    vector: Array  # (d_model,)
    heads: Array | None = None
    bias: Array | None = None
    sizes: tuple[int, ...] = ()
    read: Norm | None = None
    wrote: Norm | None = None


class Stream(NamedTuple):
    """All that was written at one position, which adds up to what the last norm reads."""

    position: int
    tokens: int
    written: Sequence[Written]
    norm: Norm  # the last
    unembedding: Callable[[int], tuple[Array, float]]  # a token's row, (d_model,), and bias
    logits: Array  # (vocabulary,), before `cap`
    cap: float | None = None  # c, where the model's logits are c·tanh(logit/c)


class NoWay(NamedTuple):
    """Why a model's parts cannot be added up: a sentence of `words`, and what to put in."""

    key: str
    values: dict[str, Any]

    def said(self, language: Language) -> str:
        """The sentence."""
        return say(language, self.key, **self.values)


def of_gpt2(model: Model, ids: Sequence[int], run: ForwardPass, position: int) -> Stream:
    """The stream of a run in NumPy. O(layers·heads·d_model·d_k) time."""
    assert run.logits is not None
    w, config = model.weights, model.config

    def norm(name: str, x: Array) -> Norm:
        exact = x.astype(np.float64)
        weight, bias = (w[f"{name}.{kind}"].astype(np.float64) for kind in ("weight", "bias"))
        made = Norm(weight, bias, True, float(np.sqrt(exact.var() + config.epsilon)), float(np.linalg.norm(exact)), 0.0)
        return made._replace(after=float(np.linalg.norm(made.linear(exact) + bias)))

    written = [
        Written("token", None, w["wte.weight"][ids[position]]),
        Written("position", None, w["wpe.weight"][position]),
    ]
    for number, (layer, before, after) in enumerate(zip(run.layers, run.hidden[:-1], run.hidden[1:], strict=True)):
        output, name = layer.output[position], f"h.{number}"
        out = split(w[f"{name}.attn.c_proj.weight"].T, config.heads)  # (heads, d_model, d_v): W^O of each, transposed
        heads = (out.astype(np.float64) @ layer.heads[:, position, :, None])[..., 0]
        bias = w[f"{name}.attn.c_proj.bias"]
        sizes, read = (config.heads, config.d_model // config.heads), norm(f"{name}.ln_1", before[position])
        written.append(Written("attention", number, output, heads, bias, sizes, read))
        middle = before[position] + output
        mlp = after[position] - before[position] - output
        written.append(Written("mlp", number, mlp, sizes=(config.d_mlp,), read=norm(f"{name}.ln_2", middle)))
    return Stream(
        position,
        len(ids),
        written,
        norm("ln_f", run.hidden[-1][position]),
        lambda token: (w["lm_head.weight"][token].astype(np.float64), 0.0),
        run.logits[position],
    )
