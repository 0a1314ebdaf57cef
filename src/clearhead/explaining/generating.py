"""Decoding: the likeliest next token, again and again, with the keys and values of earlier tokens kept."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from clearhead.core.axes import Array
from clearhead.errors import RuleError
from clearhead.explaining.gpt2 import Model, Token, too_long

if TYPE_CHECKING:
    from clearhead.explaining.hub import HubModel


def continued(model: "Model | HubModel", tokens: list[Token], count: int) -> list[Token]:
    """The tokens and the `count` that the model puts after them, each the likeliest after all before it (greedy).

    Their `start` and `stop` go on where the text ends. Raises ShapeError where the model has too few positions,
    RuleError for a model that says no next token. Each step takes one token through the layers, O(d_model² + tokens·d_k
    for each head) and layer.
    """
    if not count:
        return tokens
    ids = [token.id for token in tokens]
    if isinstance(model, Model):
        if len(ids) + count > model.config.positions:
            raise too_long(len(ids) + count, model.config.positions)
        found = _with_cache(model, ids, count)
    else:
        found = model.generate(ids, count)
    end, more = tokens[-1].stop, []
    for token in found:
        text = model.text(token)
        more.append(Token(token, text, end, end + len(text)))
        end += len(text)
    return [*tokens, *more]


def _with_cache(model: Model, ids: list[int], count: int) -> Iterable[int]:
    w = model.weights
    past: list[tuple[Array, Array] | None] = [None] * model.config.layers
    found: list[int] = []
    given = ids
    for _ in range(count):
        first = len(ids) + len(found) - len(given)
        hidden = w["wte.weight"][given] + w["wpe.weight"][first : first + len(given)]
        for number in range(model.config.layers):
            run, hidden = model.layer(number, hidden, past=past[number])
            past[number] = run.k, run.v
        found.append(int(np.argmax(model.final(hidden[-1:]) @ w["lm_head.weight"].T)))
        given = found[-1:]
    return found


def check_generates(count: int, *, edited: bool) -> None:
    """Raise RuleError where tokens are to be generated under edits, whose words are of the text alone."""
    if count and edited:
        raise RuleError("generate and edits are given together: edits are of the text alone.", "one of them.")
