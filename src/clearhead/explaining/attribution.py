"""Direct logit attribution, the way from a text to one logit: what every part of the model adds to it, in exact sums.

The residual stream after the last layer is the sum of all that was written to it: the embeddings, and each layer's
attention and MLP. The last norm divides by σ, one number of the run, and is linear otherwise; so is the product with
the token's row of the unembedding. With σ as it was, the parts add up to the logit. They say what each part wrote, not
what the logit would be without it: later parts read what earlier ones wrote, and σ would be another.

Adding one number to every logit leaves all probabilities as they are, so only differences of logits mean something:
`against` subtracts one way from another, part by part.

Source: "direct logit attribution", Elhage et al., A Mathematical Framework for Transformer Circuits, 2021.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.explaining.stream import Norm, PartKind, Stream, Written


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

    >>> from clearhead.explaining import stream
    >>> from clearhead.models.model import load
    >>> model = load()
    >>> ids = [token.id for token in model.tokenizer.tokens("humpty dumpty sat on")]
    >>> to_a = way(stream.of_decoder(model, ids, model.run(ids), 3), 12, " a")
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


def _part(written: Written, along: Array) -> WayPart:
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
