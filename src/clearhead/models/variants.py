"""Variants of one run as a batch, from the first row that changes: other edits, gates on keys, other outputs of heads.

A layer's weights are read once for all variants, and what comes before their first row is the run's own.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from clearhead.core.axes import Array
from clearhead.models.decoder import Decoder, acting_edits, edited_call, output_factors
from clearhead.models.gates import Attended, attended, attended_together
from clearhead.models.protocol import Each, ForwardPass, Variant
from clearhead.models.runs import stream

Seen = Sequence[tuple[Variant, Array]]  # each variant with the positions of its rows
_ROOM = 2**22  # numbers of the MLP's inner vectors of all variants that run at once


def attend(
    decoder: Decoder, number: int, variant: Variant, q: Array, k: Array, v: Array
) -> tuple[Attended, Array | None]:
    """A layer's attention in one variant, and what edits multiply each head's output by, (heads,), or None."""
    rules = decoder.rules(number)
    if q.shape[1] < k.shape[1]:
        rules["query_offset"] = k.shape[1] - q.shape[1]
    acting = acting_edits(variant.edits, number, decoder.config.layers)
    if acting:
        call = edited_call(q, k, v, rules, acting, number)
        q, k, v, rules = call.q[0], call.k[0], call.v[0], call.whole_rules()
    return attended(q, k, v, rules, variant.gates), output_factors(acting, len(q))


def hidden_of(decoder: Decoder, ids: Sequence[int], variants: Sequence[Variant]) -> Sequence[Array]:
    """The residual stream of each variant before each layer and after the last, (variants, tokens, d_model) each."""
    seen = [(variant, np.arange(len(ids))) for variant in variants]

    def step(number: int, hidden: Array) -> Array:
        return _layer(decoder, number, seen, np.concatenate(hidden), None).reshape(hidden.shape)

    return stream(step, np.stack([decoder.embedded(ids)] * len(variants)), decoder.config.layers)


def again(
    decoder: Decoder, run: ForwardPass, variants: Sequence[Variant], rows: range, each: Each = iter
) -> Iterator[Array]:
    """The residual stream of some rows after the last layer in each variant, (rows, d_model); in order.

    run   what they are variants of: the rows before their first are its own, with its keys and values
    each  iterates over the layers of as many variants as are run at once
    """
    tokens, largest = len(run.hidden[0]), max(decoder.config.d_mlp, decoder.config.d_model)
    order = sorted(range(len(variants)), key=lambda place: (-variants[place].first, variants[place].layer))
    made: dict[int, Array] = {}
    while order:
        step, start = 1, variants[order[0]].first
        while step < len(order):  # as many as fit into the room, each from the first row of all of them
            lowest = variants[order[step]].first
            if (step + 1) * (tokens - lowest) * largest > _ROOM:
                break
            step, start = step + 1, lowest
        places = sorted(order[:step], key=lambda place: variants[place].layer)
        order = order[step:]
        made |= zip(places, _again(decoder, run, [variants[place] for place in places], start, rows, each), strict=True)
    return (made[place] for place in range(len(variants)))


def _again(
    decoder: Decoder, run: ForwardPass, variants: Sequence[Variant], start: int, rows: range, each: Each
) -> list[Array]:
    """`again` for variants in the order of their first layers, all at once."""
    seen = [(variant, _seen(decoder, variant, start, len(run.hidden[0]), rows)) for variant in variants]
    hidden, count = np.empty((0, decoder.config.d_model), run.hidden[0].dtype), 0
    before = run.stream(start) if variants[-1].layer else [run.hidden[0][start:]]
    for number in each(range(variants[0].layer, decoder.config.layers)):
        here = sum(variant.layer <= number for variant in variants)
        for variant, places in seen[count:here]:  # which begin with the run's stream, but of tokens that were replaced
            entering = before[number][places - start]
            for place, token in variant.ids.items():
                entering[places == place] = decoder.embedded([token], place)
            hidden = np.concatenate([hidden, entering])
        (k, v), count = run.past[number], here
        hidden = _layer(decoder, number, seen[:here], hidden, (k[:, :start], v[:, :start]))
    ends, same = np.cumsum([len(places) for _, places in seen]), run.hidden[-1][rows.start : min(start, rows.stop)]
    parts = zip(np.split(hidden, ends[:-1]), seen, strict=True)
    return [np.concatenate([same, part[np.isin(places, rows)]]) for part, (_, places) in parts]


def _seen(decoder: Decoder, variant: Variant, start: int, tokens: int, rows: range) -> Array:
    """The positions that are run: a token before `rows` whose key no later one sees changes nothing, and is left out.

    Edits, windows and what is added name positions, so that there all are run.
    """
    places = np.arange(start, tokens)
    if variant.gates is None or variant.edits or variant.added or any(decoder.config.windows):
        return places
    return places[(variant.gates[start:] > -np.inf) | (places >= rows.start)]


def _layer(decoder: Decoder, number: int, seen: Seen, hidden: Array, past: tuple[Array, Array] | None) -> Array:
    """The residual stream after a layer from that before it, (rows, d_model), those of all variants after each other.

    past   the keys and values before the first row, which all variants share; None where the first row is row 0
    """
    start, rows = 0 if past is None else past[0].shape[1], np.concatenate([places for _, places in seen])
    angles = decoder.angles(number, start, int(rows.max()) + 1 - start)
    turned = None if angles is None else (angles[0][rows - start], angles[1][rows - start])
    _, q, k, v = decoder.before(number, hidden, turned)
    before = [variant.gates for variant, _ in seen if not (variant.gates is None or variant.edits or variant.added)]
    alike = len(before) == len(seen) and not any(decoder.config.windows)
    if past is not None and alike and not np.any(before, 0)[start:].any():
        heads = attended_together(q, k, v, past, np.stack(before)[:, :start], decoder.rules(number))
        return decoder.after(number, hidden, decoder.mixed(number, heads))
    heads, stop = np.empty(q.shape, q.dtype), 0
    for variant, places in seen:
        some = slice(stop, stop + len(places))
        stop, keys, values, gates = some.stop, k[:, some], v[:, some], variant.gates
        if past is not None:
            keys, values = (np.concatenate(pair, axis=1) for pair in zip(past, (keys, values), strict=True))
        if gates is not None:
            gates = np.concatenate([gates[:start], gates[places]])
            gates = gates if gates.any() else None  # all that is hidden is left out
        part, factors = attend(decoder, number, variant._replace(gates=gates), q[:, some], keys, values)
        heads[:, some] = part.output if factors is None else part.output * factors[:, None, None]
        for (layer, head), added in variant.added.items():
            if layer == number:
                first = some.start + variant.first - start
                heads[head, first : first + len(added)] += added
    return decoder.after(number, hidden, decoder.mixed(number, heads))
