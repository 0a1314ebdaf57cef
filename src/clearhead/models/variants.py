"""Variants of one run as a batch, from the first row that changes: other edits, gates on keys, other outputs of heads.

A layer's weights are read once for all variants, and what comes before their first row is the run's own.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from clearhead.core.axes import Array
from clearhead.models import edits as editing
from clearhead.models.decoder import Decoder
from clearhead.models.gates import Attended, attended
from clearhead.models.protocol import Each, ForwardPass, Variant

_ROOM = 2**25  # numbers of the MLP's inner vectors of all variants that run at once


def attend(
    decoder: Decoder, number: int, variant: Variant, q: Array, k: Array, v: Array
) -> tuple[Attended, Array | None]:
    """A layer's attention in one variant, and what edits multiply each head's output by, (heads,), or None."""
    rules = decoder.rules(number)
    if q.shape[1] < k.shape[1]:
        rules["query_offset"] = k.shape[1] - q.shape[1]
    acting = editing.acting(variant.edits, number, decoder.config.layers)
    if acting:
        call = editing.call(q, k, v, rules, acting, number)
        q, k, v, rules = call.q[0], call.k[0], call.v[0], call.whole_rules()
    return attended(q, k, v, rules, variant.gates), editing.factors(acting, len(q))


def hidden_of(decoder: Decoder, ids: Sequence[int], variants: Sequence[Variant], each: Each = iter) -> list[Array]:
    """The residual stream of each variant before each layer and after the last, (variants, tokens, d_model) each."""
    hidden = [np.stack([decoder.embedded(ids)] * len(variants))]
    for number in each(range(decoder.config.layers)):
        hidden.append(_layer(decoder, number, variants, hidden[-1], None))
    return hidden


def again(
    decoder: Decoder, run: ForwardPass, variants: Sequence[Variant], each: Each = iter
) -> Iterator[tuple[int, Array]]:
    """Each variant's first row and the residual stream from it on, after the last layer, (rows, d_model); in order.

    run   what they are variants of: the rows before their first are its own, with its keys and values
    each  iterates over the layers of as many variants as are run at once
    """
    tokens, largest = len(run.hidden[0]), max(decoder.config.d_mlp, decoder.config.d_model)
    order = sorted(range(len(variants)), key=lambda place: (-variants[place].first, variants[place].layer))
    made: dict[int, tuple[int, Array]] = {}
    while order:
        step, start = 1, variants[order[0]].first
        while step < len(order):  # as many as fit into the room, each from the first row of all of them
            lowest = variants[order[step]].first
            if (step + 1) * (tokens - lowest) * largest > _ROOM:
                break
            step, start = step + 1, lowest
        places = sorted(order[:step], key=lambda place: variants[place].layer)
        order = order[step:]
        rows = _again(decoder, run, [variants[place] for place in places], start, each)
        made |= {place: (start, row) for place, row in zip(places, rows, strict=True)}
    return (made[place] for place in range(len(variants)))


def _again(decoder: Decoder, run: ForwardPass, variants: Sequence[Variant], start: int, each: Each) -> Array:
    """`again` for variants in the order of their first layers, all at once: (variants, rows, d_model)."""
    hidden = np.empty((0, *run.hidden[0][start:].shape), run.hidden[0].dtype)
    for number in each(range(variants[0].layer, decoder.config.layers)):
        here = sum(variant.layer <= number for variant in variants)
        new = np.broadcast_to(run.hidden[number][start:], (here - len(hidden), *hidden.shape[1:]))
        ran = run.layers[number]
        past = ran.k[:, :start], ran.v[:, :start]
        hidden = _layer(decoder, number, variants[:here], np.concatenate([hidden, new]), past)
    return hidden


def _layer(
    decoder: Decoder, number: int, variants: Sequence[Variant], hidden: Array, past: tuple[Array, Array] | None
) -> Array:
    """The residual stream after a layer, (variants, rows, d_model), from that before it.

    past   the keys and values before the first row, which all variants share; None where the first row is row 0
    """
    start = 0 if past is None else past[0].shape[1]
    _, q, k, v = decoder.before(number, hidden, decoder.angles(number, start, hidden.shape[1]))
    heads = np.empty(q.shape, q.dtype)
    for place, variant in enumerate(variants):
        keys, values = k[place], v[place]
        if past is not None:
            keys, values = (np.concatenate(pair, axis=1) for pair in zip(past, (keys, values), strict=True))
        part, factors = attend(decoder, number, variant, q[place], keys, values)
        heads[place] = part.output if factors is None else part.output * factors[:, None, None]
        for (layer, head), added in variant.added.items():
            if layer == number:
                first = variant.first - start
                heads[place, head, first : first + len(added)] += added
    return decoder.after(number, hidden, decoder.mixed(number, heads))
