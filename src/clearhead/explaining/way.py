"""The way from a text to one logit: what every part of the model adds to it, in sums that are exact.

The residual stream after the last layer is the sum of all that was written to it: the embeddings, and each layer's
attention and MLP. The last layer norm divides by σ, one number of the run, and is linear otherwise; so is the product
with the token's row of the unembedding. With σ as it was, the parts add up to the logit. They say what each part wrote,
not what the logit would be without it: later parts read what earlier ones wrote, and σ would be another.

Source: "direct logit attribution", Elhage et al., A Mathematical Framework for Transformer Circuits, 2021.
"""

from typing import Any, Literal, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.explaining.gpt2 import ForwardPass, Model, Token, split

PartKind = Literal["token", "position", "attention", "mlp", "norm"]


class WayPart(NamedTuple):
    """One part of the model, in the order in which a text goes through them.

    kind    token, position: the embeddings; attention, mlp: of `layer`; norm: the bias of the last layer norm
    adds    what it adds to the logit; heads: for attention, what each head adds, and `bias` what b^O adds
    length  of the vector that it writes to the residual stream, ‖x‖; None for the last norm
    """

    kind: PartKind
    layer: int | None
    adds: float
    length: float | None
    heads: tuple[float, ...] = ()
    bias: float = 0.0


class Way(NamedTuple):
    """The parts of one logit: that of `token`, as what follows the token at `position`."""

    position: int
    token: int
    text: str
    logit: float  # the model's, in float32
    parts: list[WayPart]  # add up to it
    sigma: float  # of the last layer norm

    @property
    def difference(self) -> float:
        """How far the parts' sum, in float64, is from the model's logit."""
        return abs(sum(part.adds for part in self.parts) - self.logit)

    def to_json(self) -> dict[str, Any]:
        """As plain numbers, lists and words."""
        return {**self._asdict(), "parts": [part._asdict() for part in self.parts], "difference": self.difference}


def likeliest(model: Any, tokens: list[Token], run: ForwardPass, position: int) -> Way | None:
    """The way to the logit of the likeliest token after this position; None for other layouts than GPT-2's."""
    if not isinstance(model, Model) or run.logits is None:
        return None
    return way(model, [token.id for token in tokens], run, position, int(run.logits[position].argmax()))


def way(model: Model, ids: list[int], run: ForwardPass, position: int, token: int) -> Way:
    """What each part adds to the logit of `token` at `position`. O(layers·d_model·(d_model + tokens)) time.

    >>> from clearhead.explaining import gpt2
    >>> model = gpt2.load()
    >>> ids = [token.id for token in model.tokens("humpty dumpty sat on")]
    >>> found = way(model, ids, model.run(ids), 3, 12)
    >>> [part.kind for part in found.parts]
    ['token', 'position', 'attention', 'mlp', 'attention', 'mlp', 'norm']
    >>> found.difference < 1e-4
    True
    """
    assert run.logits is not None
    w = model.weights
    last = run.hidden[-1][position].astype(np.float64)
    sigma = float(np.sqrt(last.var() + model.config.epsilon))
    row = w["lm_head.weight"][token].astype(np.float64)
    along = row * w["ln_f.weight"].astype(np.float64) / sigma
    along -= along.mean()  # the layer norm subtracts a vector's mean: along·(x - mean(x)) is this product

    def adds(vector: Array) -> float:
        return float(along @ vector.astype(np.float64))

    def part(kind: PartKind, layer: int | None, vector: Array, **more: Any) -> WayPart:
        return WayPart(kind, layer, adds(vector), float(np.linalg.norm(vector)), **more)

    parts = [
        part("token", None, w["wte.weight"][ids[position]]),
        part("position", None, w["wpe.weight"][position]),
    ]
    for number, (layer, before, after) in enumerate(zip(run.layers, run.hidden[:-1], run.hidden[1:], strict=True)):
        written, name = layer.output[position], f"h.{number}.attn.c_proj"
        out = split(w[f"{name}.weight"].T, model.config.heads)  # (heads, d_model, d_v): W^O of each head, transposed
        heads = tuple(adds(out[head] @ layer.heads[head, position]) for head in range(model.config.heads))
        parts.append(part("attention", number, written, heads=heads, bias=adds(w[f"{name}.bias"])))
        parts.append(part("mlp", number, after[position] - before[position] - written))
    parts.append(WayPart("norm", None, float(row @ w["ln_f.bias"].astype(np.float64)), None))
    logit = float(run.logits[position, token])
    return Way(position, token, model.text(token), logit, parts, sigma)
