"""The residual stream at one position: what was written to it, and how a logit is read from it.

A layer norm is x ↦ w·(x − mean(x))/σ + b; a root-mean-square norm leaves the mean in. With σ as it was in the run, both
are linear but for b, so that what each part wrote can be followed to a logit.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.models.decoder import Decoder, split
from clearhead.models.model import Model
from clearhead.models.protocol import ForwardPass

PartKind = Literal["token", "position", "attention", "mlp", "norm", "unembedding"]


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


def of_decoder(model: Model, ids: Sequence[int], run: ForwardPass, position: int) -> Stream:
    """The stream of a run in NumPy. O(layers·heads·d_model·d_k) time."""
    decoder, config = model.decoder, model.config
    rows = [x[0].astype(np.float64) for x in run.stream(position)]
    token = decoder.weights.rows("token_embd.weight", [ids[position]])[0].astype(np.float64) * config.embedding_scale
    written = [Written("token", None, token)]
    if "position_embd.weight" in decoder.weights:
        written.append(Written("position", None, rows[0] - token))
    for number, (before, after) in enumerate(pairwise(rows)):
        (layer, place), name = run.attended(number, position), f"blk.{number}"
        output = layer.output[place].astype(np.float64)
        out = split(decoder.weights[f"{name}.attn_output.weight"], config.d_k)  # (heads, d_model, d_v): W^O of each
        heads = (out.astype(np.float64) @ layer.heads[:, place, :, None])[..., 0]
        bias = output - heads.sum(axis=0)
        wrote = _norm(decoder, f"{name}.post_attention_norm", output)
        if wrote is not None:
            heads, bias = wrote.linear(heads), wrote.linear(bias)
            output = wrote.linear(output)
        heads, bias, output = (config.added_scale * x for x in (heads, bias, output))
        sizes = config.heads, config.d_k
        read = _norm(decoder, f"{name}.attn_norm", before)
        written.append(Written("attention", number, output, heads, bias, sizes, read, wrote))
        middle = before + output
        read = _norm(decoder, f"{name}.ffn_norm", middle)
        behind = None
        if f"{name}.post_ffw_norm.weight" in decoder.weights:
            behind = _norm(decoder, f"{name}.post_ffw_norm", decoder.mlp(number, middle[None].astype(np.float32))[0])
        written.append(Written("mlp", number, after - middle, sizes=(config.d_mlp,), read=read, wrote=behind))
    last = _norm(decoder, "output_norm", rows[-1])
    assert last is not None
    bias_of = decoder.weights.get("output.bias")

    def unembedding(token: int) -> tuple[Array, float]:
        row = decoder.weights.rows(decoder.unembedding, [token])[0].astype(np.float64)
        return row * config.logit_scale, 0.0 if bias_of is None else float(bias_of[token]) * config.logit_scale

    raw = decoder.raw_logits(decoder.final(run.hidden[-1][position]))
    return Stream(position, len(ids), written, last, unembedding, raw, config.logit_softcap)


def _norm(decoder: Decoder, name: str, x: Array) -> Norm | None:
    """A norm of the decoder as it acted on one vector; None where it has none of that name."""
    stated = decoder.norm(name)
    if stated is None:
        return None
    exact = x.astype(np.float64)
    centre = exact - exact.mean() if stated.centred else exact
    sigma = float(np.sqrt(np.mean(centre**2) + stated.epsilon))
    weight = stated.weight.astype(np.float64)
    bias = None if stated.bias is None else stated.bias.astype(np.float64)
    made = Norm(weight, bias, stated.centred, sigma, float(np.linalg.norm(exact)), 0.0)
    after = made.linear(exact) + (0 if bias is None else bias)
    return made._replace(after=float(np.linalg.norm(after)))
