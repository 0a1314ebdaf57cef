"""A text through a model with every layer's attention kept, for the long page."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from clearhead.explaining.gpt2 import Model, Token
from clearhead.explaining.running import forward_pass
from clearhead.explaining.windows import windows
from clearhead.ops.matrix import AttentionMatrix
from clearhead.view.long import ShownLayer, ShownRun
from clearhead.view.parts import one_sequence

if TYPE_CHECKING:
    from clearhead.explaining.hub import HubModel


def seen_in(model: "Model | HubModel", text: str, each: Callable[[range], Iterable[int]] = iter) -> ShownRun:
    """Run a text through a model and keep every layer's attention, for a page. Raises ShapeError as `explain`."""
    return _seen(model, model.tokens(text), model.name, each)


def seen_windows(model: "Model | HubModel", text: str, each: Callable[[range], Iterable[int]] = iter) -> list[ShownRun]:
    """`seen_in` for a text of any length: a run for each window, named by its tokens."""
    parts = windows(model, text)
    names = [f"{w.number}/{w.windows}: {w.first}–{w.stop - 1}" for _, _, w in parts]
    return [_seen(model, part.tokens, name, each) for part, name in zip(parts, names, strict=True)]


def _seen(
    model: "Model | HubModel", tokens: list[Token], name: str, each: Callable[[range], Iterable[int]]
) -> ShownRun:
    run = forward_pass(model, tokens, each)
    layers = [
        ShownLayer(
            str(number),
            range(len(part.q)),
            one_sequence(AttentionMatrix(part.q, part.k, **part.rules), 0),
            v=part.v[None],
        )
        for number, part in enumerate(run.layers)
    ]
    return ShownRun(name, layers, [token.text for token in tokens])
