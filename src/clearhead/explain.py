"""How one token's output came to be: a text through a model, and one attention head of it taken apart.

Everything here is data; `report` draws it. Every number comes from the run.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from clearhead.axes import Array
from clearhead.errors import SelectionError
from clearhead.matrix import AttentionMatrix
from clearhead.model import LayerRun, Model, Token
from clearhead.steps import Sizes, Steps, Used, layer_steps
from clearhead.tracing import TokenTrace, Trace, listed, trace


class Choice(NamedTuple):
    """A token the model may say next."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True, eq=False, slots=True)
class Explanation:
    """A text, what the model says next, and one head of one layer, step by step."""

    model: Model
    text: str
    tokens: list[Token]
    next: list[Choice]
    layer: int
    head: int
    chosen: tuple[bool, bool]  # whether layer and head were chosen here, by sharpness
    token: int
    run: LayerRun
    steps: Steps  # the whole layer's way of shapes, all heads
    trace: Trace  # the chosen head, with its numbers
    row: TokenTrace  # the chosen token, computed alone
    entropy: Array  # (layers, heads): of the chosen token's row, in nats

    def to_json(self) -> dict[str, Any]:
        """All of it as plain numbers, lists and words; -∞ is null."""
        config = self.model.config
        return {
            "model": {"name": self.model.name, **config._asdict()},
            "text": self.text,
            "tokens": [token._asdict() for token in self.tokens],
            "next": [choice._asdict() for choice in self.next],
            "layer": self.layer,
            "head": self.head,
            "token": self.token,
            "entropy": listed(self.entropy),
            "layer_steps": [
                {"name": s.name, "symbol": s.symbol, "formula": s.formula, "axes": s.axes, "shape": s.shape}
                | {"multiply_adds": s.multiply_adds, "bytes": s.bytes}
                for s in self.steps
            ],
            "head_steps": {"x": listed(self.run.x), **{s.name: listed(s.array) for s in self.trace.steps}},
            "logsumexp": listed(self.trace.logsumexp),
            "layer_output": listed(self.run.output),
            "token_arithmetic": {
                "scores": listed(self.row.scores),
                "masked": listed(self.row.masked),
                "weights": listed(self.row.weights),
                "contributions": listed(self.row.contributions),
                "output": listed(self.row.output),
                "difference_from_the_matrix": self.row.difference,
            },
            "check": self.trace.check._asdict(),
        }


def explain(
    model: Model,
    text: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    token: str | None = None,
    count: int = 5,
    each: Callable[[range], Iterable[int]] = iter,
) -> Explanation:
    """Run `text` and take one token's attention apart; what is not given is chosen: the last token, the sharpest head.

    layer, head   from 0; None takes the one whose row for the token has the least entropy
    token         a position (negative counts from the end) or a word of the text; None is the last
    count         how many next tokens to list
    each          walks the model's layers; a progress bar goes there
    Raises SelectionError when there is no such layer, head or token, ShapeError when the text does not fit.
    """
    tokens = model.tokens(text)
    at = find_token(tokens, text, token)
    _check_index("layer", layer, model.config.layers)
    _check_index("head", head, model.config.heads)
    run = model.run([t.id for t in tokens], each)
    entropy = np.stack([_row_entropy(model, number, part, at) for number, part in enumerate(run.layers)])
    picked_layer, picked_head = _sharpest(entropy, layer, head)
    part = run.layers[picked_layer]
    scale = model.scale(picked_layer)
    usual = scale == (model.config.d_model // model.config.heads) ** -0.5
    rules: dict[str, Any] = {} if usual else {"scale": scale}
    q, k, v = (x[picked_head] for x in (part.q, part.k, part.v))
    steps = trace(q, k, v, causal=True, **rules)
    return Explanation(
        model=model,
        text=text,
        tokens=tokens,
        next=_next(model, run.logits[-1], count),
        layer=picked_layer,
        head=picked_head,
        chosen=(layer is None, head is None),
        token=at,
        run=part,
        steps=_layer_steps(model, part, None if usual else scale),
        trace=steps,
        row=steps.token(at),
        entropy=entropy,
    )


def find_token(tokens: list[Token], text: str, wanted: str | None) -> int:
    """The place of a token given as a number or as a word of the text; a word's last token, its last occurrence."""
    if wanted is None:
        return len(tokens) - 1
    try:
        number = int(wanted)
    except ValueError:
        number = None
    if number is not None and -len(tokens) <= number < len(tokens):
        return number % len(tokens)
    word = re.escape(wanted.strip())
    for pattern in (rf"(?<!\w){word}(?!\w)", word):  # a whole word first, then any part of the text
        ends = [found.end() for found in re.finditer(pattern, text, re.IGNORECASE)] if word else []
        places = [place for place, token in enumerate(tokens) if ends and token.start < ends[-1] <= token.stop]
        if places:
            return places[-1]
    said = " ".join(token.text.strip() for token in tokens)
    raise SelectionError(
        f"token {wanted!r} is neither a position 0..{len(tokens) - 1} nor a word of the text.",
        f"the tokens are: {said}",
    )


def _row_entropy(model: Model, layer: int, run: LayerRun, token: int) -> Array:
    matrix = AttentionMatrix(run.q, run.k, causal=True, scale=model.scale(layer))
    seen = matrix.observe(entropy=True, queries=slice(token, token + 1))
    return np.asarray(seen.entropy, dtype=np.float64)[:, 0]


def _sharpest(entropy: Array, layer: int | None, head: int | None) -> tuple[int, int]:
    allowed = np.full(entropy.shape, np.inf)
    rows = slice(None) if layer is None else layer
    cols = slice(None) if head is None else head
    allowed[rows, cols] = entropy[rows, cols]
    place = np.unravel_index(int(allowed.argmin()), entropy.shape)
    return int(place[0]), int(place[1])


def _next(model: Model, logits: Array, count: int) -> list[Choice]:
    exact = logits.astype(np.float64)
    probabilities = np.exp(exact - exact.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")[:count]
    return [Choice(int(i), model.text(int(i)), float(probabilities[i])) for i in order]


def _layer_steps(model: Model, run: LayerRun, scale: float | None) -> Steps:
    n, d = run.x.shape
    sizes = Sizes((), model.config.heads, model.config.heads, n, n, d // model.config.heads, d // model.config.heads)
    used = Used(scale=scale, masked=("causal",))
    biases = frozenset(("b_q", "b_k", "b_v", "b_o"))
    return layer_steps(sizes, (n, d), (n, d), (d, d), used, biases, "rows", run.x.itemsize, cross=False)


def _check_index(name: str, value: int | None, size: int) -> None:
    if value is not None and not 0 <= value < size:
        raise SelectionError(f"{name} {value} is outside 0..{size - 1}: the model has {size} {name}s.")
