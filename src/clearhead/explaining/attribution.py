"""Direct logit attribution, the way from a text to one logit: what every part of the model adds to it, in exact sums.

The residual stream after the last layer is the sum of all that was written to it: the embeddings, and each layer's
attention and MLP. The last norm divides by σ, one number of the run, and is linear otherwise; so is the product with
the token's row of the unembedding. With σ as it was, the parts add up to the logit. They say what each part wrote, not
what the logit would be without it: later parts read what earlier ones wrote, and σ would be another.

Adding one number to every logit leaves all probabilities as they are, so only differences of logits mean something:
`against` subtracts one way from another, part by part.

Source: "direct logit attribution", Elhage et al., A Mathematical Framework for Transformer Circuits, 2021.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

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


class StreamPart(NamedTuple):
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
    written: Sequence[StreamPart]
    norm: Norm  # the last
    unembedding: Callable[[int], tuple[Array, float]]  # a token's row, (d_model,), and bias
    logits: Array  # (vocabulary,), before `cap`
    cap: float | None = None  # c, where the model's logits are c·tanh(logit/c)


def of_decoder(model: Model, ids: Sequence[int], run: ForwardPass, position: int) -> Stream:
    """The stream of a run in NumPy. O(layers·heads·d_model·d_k) time."""
    decoder, config = model.decoder, model.config
    rows = [x[0].astype(np.float64) for x in run.stream(position)]
    token = decoder.weights.rows("token_embd.weight", [ids[position]])[0].astype(np.float64) * config.embedding_scale
    written = [StreamPart("token", None, token)]
    if "position_embd.weight" in decoder.weights:
        written.append(StreamPart("position", None, rows[0] - token))
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
        written.append(StreamPart("attention", number, output, heads, bias, sizes, read, wrote))
        middle = before + output
        read = _norm(decoder, f"{name}.ffn_norm", middle)
        behind = None
        if f"{name}.post_ffw_norm.weight" in decoder.weights:
            behind = _norm(decoder, f"{name}.post_ffw_norm", decoder.mlp(number, middle[None].astype(np.float32))[0])
        written.append(StreamPart("mlp", number, after - middle, sizes=(config.d_mlp,), read=read, wrote=behind))
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


class WayNorm(NamedTuple):
    """A layer norm on the way: the vector's length before and after it, and the σ by which it was divided."""

    before: float
    after: float
    sigma: float
    centred: bool  # does it subtract the mean?


class WayPart(NamedTuple):
    """One part of the model, in the order in which a text goes through them.

    kind    token, position, embeddings; attention, mlp: of `layer`; norm (the last), unembedding: by their biases
    adds    what it adds to the logit; heads: for attention, what each head adds, and `bias` what b^O adds; no heads
            where that is not known
    length  of the vector that it writes to the residual stream, ‖x‖; None for the last norm and the unembedding
    sizes   heads and d_k of attention; d_mlp of an MLP, where known; the vocabulary
    read    the norm that it reads through; for the last norm itself
    wrote   the norm that its output goes through before it is added, where there is one
    """

    kind: PartKind
    layer: int | None
    adds: float
    length: float | None
    heads: tuple[float, ...] = ()
    bias: float = 0.0
    sizes: tuple[int, ...] = ()
    read: WayNorm | None = None
    wrote: WayNorm | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain numbers, lists and words."""
        norms = {"read": self.read, "wrote": self.wrote}
        return {**self._asdict(), **{name: norm and norm._asdict() for name, norm in norms.items()}}


class Way(NamedTuple):
    """The parts of one logit: that of `token`, as what follows the token at `position`."""

    position: int
    token: int
    text: str
    logit: float  # the model's, in float32
    parts: list[WayPart]  # add up to it
    sigma: float  # of the last norm
    shape: tuple[int, int]  # tokens and d_model, of the residual stream
    cap: float | None = None  # c, where the model's own logit is c·tanh(logit/c)

    @property
    def sums(self) -> list[float]:
        """The logit after each part: the sum of all parts up to it."""
        return list(accumulate(part.adds for part in self.parts))

    @property
    def difference(self) -> float:
        """How far the parts' sum, in float64, is from the model's logit."""
        return abs(self.sums[-1] - self.logit)

    def to_json(self) -> dict[str, Any]:
        """As plain numbers, lists and words."""
        parts = [part.to_json() for part in self.parts]
        return {**self._asdict(), "parts": parts, "sums": self.sums, "difference": self.difference}


def way(stream: Stream, token: int, text: str) -> Way:
    """What each part adds to the logit of `token`. O(layers·heads·d_model) time.

    >>> from clearhead.explaining.attribution import of_decoder
    >>> from clearhead.models.model import load
    >>> model = load()
    >>> ids = [token.id for token in model.tokenizer.tokens("humpty dumpty sat on")]
    >>> to_a = way(of_decoder(model, ids, model.run(ids), 3), 12, " a")
    >>> [part.kind for part in to_a.parts]
    ['token', 'position', 'attention', 'mlp', 'attention', 'mlp', 'norm', 'unembedding']
    >>> to_a.difference < 1e-4
    True
    """
    row, bias = stream.unembedding(token)
    along = stream.norm.transposed(row)
    shift = 0.0 if stream.norm.bias is None else float(row @ stream.norm.bias)
    parts = [_part(written, along) for written in stream.written]
    parts.append(WayPart("norm", None, shift, None, read=_lengths(stream.norm)))
    parts.append(WayPart("unembedding", None, bias, None, sizes=(len(stream.logits),)))
    shape = stream.tokens, len(row)
    return Way(stream.position, token, text, float(stream.logits[token]), parts, stream.norm.sigma, shape, stream.cap)


def against(first: Way, second: Way) -> Way:
    """One way minus another of the same run and position, part by part; its logit is the difference of both."""
    parts = [
        part._replace(
            adds=part.adds - other.adds,
            bias=part.bias - other.bias,
            heads=tuple(a - b for a, b in zip(part.heads, other.heads, strict=True)),
        )
        for part, other in zip(first.parts, second.parts, strict=True)
    ]
    return first._replace(logit=first.logit - second.logit, parts=parts)


def _part(written: StreamPart, along: Array) -> WayPart:
    def adds(vectors: Array) -> Any:
        return (vectors.astype(np.float64) @ along).tolist()

    return WayPart(
        written.kind,
        written.layer,
        adds(written.vector),
        length=float(np.linalg.norm(written.vector.astype(np.float64))),
        heads=() if written.heads is None else tuple(adds(written.heads)),
        bias=0.0 if written.heads is None or written.bias is None else adds(written.bias),
        sizes=written.sizes,
        read=_lengths(written.read),
        wrote=_lengths(written.wrote),
    )


def _lengths(norm: Norm | None) -> WayNorm | None:
    return None if norm is None else WayNorm(norm.before, norm.after, norm.sigma, norm.centred)


def heads_by_share(ways: Sequence[Way]) -> list[tuple[int, int]]:
    """The heads, (layer, head), by what they add to the lead of the first of two tokens; none where there is no way."""
    parts = against(*ways).parts if ways else []
    adds = {(part.layer or 0, head): x for part in parts for head, x in enumerate(part.heads)}
    return sorted(adds, key=lambda place: -abs(adds[place]))
