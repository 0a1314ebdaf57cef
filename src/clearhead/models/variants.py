"""Runs variants of a run, with gates on keys or changed heads, and differentiates through all layers.

A gate multiplies every weight on a key by α before its row is normalised, except in the key's own row. A gated row is
the exact merge of two parts: the keys before the query, with ln α added to their logits, and the query's own key. With
α = 1 attention is unchanged; with α = 0 no later token sees the key, but positions stay as they are.

Variants run as a batch from the first row that changes: each layer's weights are read once for all of them, and rows
before that one are taken from the base run.

With y a function of the logits, o_i = Σ_j a_ij·v_j a head's output at query i before W^O, and g_i = ∂y/∂o_i, the
effects of one layer are `A.contributions(v, g)` and `A.cut_effects(v, g)`. An engine differentiates attention, so a
layer takes O(tokens) memory; what is not kept of a layer is computed again on the way back.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead import engines
from clearhead.core.axes import Array
from clearhead.core.call import describe_whole
from clearhead.core.namespace import namespace, numbers_like
from clearhead.core.rules import Rules
from clearhead.core.state import State, merged, share, taken
from clearhead.derivatives import backward
from clearhead.errors import RuleError
from clearhead.models.decoder import Decoder, Turns, in_blocks, is_long, join, split, stream
from clearhead.models.families import Angles
from clearhead.models.mlp import Inner
from clearhead.models.protocol import Attended, Each, ForwardPass, Variant
from clearhead.ops.attention import attention
from clearhead.ops.matrix import AttentionMatrix

Kept = dict[int, tuple[Attended, dict[str, Array], Array, Inner]]  # by layer attention, projections, W^O's product, MLP
Read = dict[int, tuple[Array, Array]]  # keys and values that later layers read, by the layer that computed them
_KNOWN = {
    "alibi_slopes", "causal", "kv_segments", "query_offset", "query_segments", "scale", "sinks", "softcap", "window",
}  # fmt: skip
_ROOM = 2**22  # numbers of the residual stream of all variants that run at once
_FEW = 32  # rows of variants whose attention is one call


class _Rows(NamedTuple):
    """The rows of one variant in a batch of variants.

    places   (keys,) the positions of its tokens
    keys     (keys,) the indices of their keys in the base run's keys followed by the batch's
    own      (rows,) the last of these positions: rows that are computed for it; the others are shared
    inputs   (rows, layers, d_input) of these rows
    code     from `_code`
    """

    variant: Variant
    places: Array
    keys: Array
    own: Array
    inputs: Array
    code: bytes = b""


def attended(q: Any, k: Any, v: Any, rules: dict[str, Any], gates: Array | None = None) -> Attended:
    """Compute causal attention and its rows' states, with gates (…, tokens) if given; on arrays or tensors.

    q (…, heads, rows, d_k) are the last tokens of k and v. Raises RuleError for gates on attention that is not causal,
    or that has other rules than those in `_KNOWN`.
    """
    if gates is None:
        seen = AttentionMatrix(q, k, **rules).observe(v, logsumexp=True)
        return Attended(q, k, v, rules, seen.output, cast("State", seen.state))
    other = sorted(name for name, value in rules.items() if value is not None and name not in _KNOWN)
    if not rules.get("causal") or other:
        why = f"this attention has {other[0]}" if other else "this attention is not causal"
        raise RuleError(f"explain hides parts of the text from all later tokens, but {why}.")
    bias = numbers_like(gates, q)[..., None, None, :]
    earlier = rules | {"bias": bias, "query_offset": (rules.get("query_offset") or 0) - 1}
    sinks = earlier.pop("sinks", None)
    if rules.get("window") is not None:
        earlier["window"] = rules["window"][0] - 1, None
    seen = AttentionMatrix(q, k, **earlier).observe(v, logsumexp=True)
    to_self = _self_logits(q, k, rules)[0]
    own = State(to_self, namespace(q).zeros_like(to_self))
    xp, before = namespace(q), cast("State", seen.state)
    whole = merged(xp, before, own)
    if sinks is not None:  # of the whole row, once
        sink = numbers_like(sinks, whole.largest)[:, None]
        whole = merged(xp, whole, State(sink, xp.zeros_like(sink)))
    left, other = (numbers_like(share(xp, part, whole), q)[..., None] for part in (before, own))
    output = left * seen.output + other * _of_queries(v, q)
    return Attended(q, k, v, earlier, output, whole, gates)


def _of_queries(x: Any, q: Any) -> Any:
    """Take each query's own key or value, (…, heads, rows, d), from (…, kv_heads, tokens, d)."""
    return x[..., np.arange(q.shape[-3]) // (q.shape[-3] // x.shape[-3]), -q.shape[-2] :, :]


def _self_logits(q: Any, k: Any, rules: dict[str, Any]) -> tuple[Any, Any]:
    """Return the logits of the queries' own keys, (…, heads, rows), and their derivative by q·k."""
    xp, scale = namespace(q), rules.get("scale")
    numbers = np.reshape(q.shape[-1] ** -0.5 if scale is None else np.asarray(scale), (-1, 1))
    slope = numbers_like(numbers, q)
    logits = slope * (q * _of_queries(k, q)).sum(-1)
    cap = rules.get("softcap")
    if cap is not None:
        capped = xp.tanh(logits / cap)
        logits, slope = cap * capped, slope * (1 - capped * capped)
    if (alibi := rules.get("alibi_slopes")) is not None:  # query_offset is one less above, so every distance is too
        logits = logits + numbers_like(alibi, q)[:, None]
    return logits, slope


def _rules(decoder: Decoder, number: int, queries: int, keys: int) -> dict[str, Any]:
    """Return a layer's score rules for queries that are the last tokens of the keys."""
    return decoder.rules(number) | ({"query_offset": keys - queries} if queries < keys else {})


def hidden_of(
    decoder: Decoder, ids: Sequence[int], variants: Sequence[Variant], rows: range, kept: Kept, each: Each = iter
) -> Sequence[Array]:
    """Return each variant's residual stream before each layer and after the last, (variants, tokens, d_model) each.

    After the last layer it has only the rows from rows.start on.
    kept   receives what each layer computed, unless it would take as much as a long text's run, and MLPs while they fit
    """
    inputs, shared, layers = decoder.inputs(ids), Read(), decoder.config.layers
    turns, first = decoder.turns(np.arange(len(ids))), np.stack([decoder.embedded(ids)] * len(variants))

    def step(number: int, hidden: Array) -> Array:
        seen, projected = _attention(decoder, number, hidden, variants, turns, shared)
        some, inner = slice(rows.start if number + 1 == layers else 0, None), Inner()
        output = decoder.mixed(number, seen.output[:, :, some])
        if not is_long(2 * first.size * layers):
            kept[number] = seen, projected, output, inner
        numbers = 2 * first[..., 0].size * (number + 1) * decoder.config.sizes[number].d_mlp  # of MLPs up to this one
        fits = number in kept and not is_long(numbers)
        return decoder.after(number, hidden[:, some], output, inputs[some, number], inner if fits else None)

    return stream(step, first, layers, each)


def _attention(
    decoder: Decoder,
    number: int,
    hidden: Array,
    variants: Sequence[Variant],
    turns: Turns,
    shared: Read,
    past: Any = (),
) -> tuple[Attended, dict[str, Array]]:
    """Compute a layer's attention in all variants, and its projections by part, as `Decoder.before` does.

    hidden   (variants, tokens, d_model), the residual stream before the layer
    shared   as in `Decoder.before`; this layer's keys and values are added if others read them
    past     all layers' keys and values of the earlier tokens, or nothing
    """
    _, q, k, v, projected = decoder.before(number, hidden, turns[number], shared)
    if number in decoder.config.sources():
        shared[number] = k, v
    if past:
        k, v = (
            np.stack([np.concatenate([old, one], axis=1) for one in new])
            for old, new in zip(past[number], (k, v), strict=True)
        )
    gates = None if variants[0].gates is None else np.stack([cast("Array", one.gates) for one in variants])
    return attended(q, k, v, _rules(decoder, number, q.shape[-2], k.shape[-2]), gates), projected


def again(
    decoder: Decoder, run: ForwardPass, variants: Sequence[Variant], rows: range, each: Each = iter
) -> Iterator[Array]:
    """Yield each variant's residual stream of some rows after the last layer, (rows, d_model), in order.

    run   the base run: a variant shares its rows, keys and values before the variant's first row
    each  iterates over the layers, once for every batch of variants
    """
    codes = [_code(variant, rows.stop) for variant in variants]
    order = sorted(range(len(variants)), key=lambda place: (variants[place].layer, codes[place]))
    made: dict[int, Array] = {}
    while order:
        seen, total = list[_Rows](), 0
        for place in order:  # as many as fit into the room
            behind = min(rows.stop, len(run.ids)) + total
            new = _rows_of(decoder, run, variants[place], codes[place], seen[-1:], rows, behind)
            if seen and (total + len(new.own)) * decoder.config.d_model > _ROOM:
                break
            seen.append(new)
            total += len(new.own)
        made |= zip(order, _again(decoder, run, seen, rows, each), strict=False)
        order = order[len(seen) :]
    return (made[place] for place in range(len(variants)))


def _code(variant: Variant, tokens: int) -> bytes:
    """Encode a variant's gates and tokens as bytes, so that sorting puts variants with a common beginning together."""
    code = np.zeros((tokens, 2), ">f8")  # the bytes of numbers from 0 on have the order of the numbers
    if variant.gates is not None:
        code[:, 0] = np.abs(variant.gates[:tokens])
    for place, token in variant.ids.items():
        code[place, 1] = token + 1
    return b"" if variant.added else code.tobytes()


def _rows_of(
    decoder: Decoder, run: ForwardPass, variant: Variant, code: bytes, last: list[_Rows], rows: range, count: int
) -> _Rows:
    """Plan a variant's rows after `count` others; rows in which it equals the last variant are shared.

    A token before `rows` whose key no later token sees changes nothing and is left out, except with windows, ALiBi or
    added outputs, which count positions.
    """
    places = np.arange(rows.stop)
    if variant.gates is not None and not (variant.added or decoder.config.slopes or any(decoder.config.windows)):
        places = places[(variant.gates[: rows.stop] > -np.inf) | (places >= rows.start)]
    keys, shared = places.copy(), int(np.searchsorted(places, variant.first))
    if code and last and last[0].code:
        other = np.flatnonzero(np.frombuffer(code, "V16") != np.frombuffer(last[0].code, "V16"))
        same = int(np.searchsorted(places, other[0] if len(other) else rows.stop))
        if same > shared:
            shared, keys[:same] = same, last[0].keys[:same]
    keys[shared:] = count + np.arange(len(keys) - shared)
    own = places[shared:]
    ids = np.take(run.ids, own, mode="clip")
    for place, token in variant.ids.items():
        ids[own == place] = token
    return _Rows(variant, places, keys, own, decoder.inputs(ids), code)


def _again(decoder: Decoder, run: ForwardPass, seen: Sequence[_Rows], rows: range, each: Each) -> list[Array]:
    """Run variants in the order of their first layers as one batch, for `again`."""
    hidden, count, layers = np.empty((0, decoder.config.d_model), run.hidden[0].dtype), 0, decoder.config.layers
    start = min(len(run.ids) - 1, *(one.variant.first for one in seen))
    before, shared = run.stream(start) if seen[-1].variant.layer else [run.hidden[0][start:]], Read()
    turns = decoder.turns(np.concatenate([one.own for one in seen]))
    for number in each(range(seen[0].variant.layer, layers)):
        here, parts = sum(one.variant.layer <= number for one in seen), [hidden]
        for one in seen[count:here]:  # they begin with the base run's stream, except replaced tokens
            entering = before[number].take(one.own - start, axis=0, mode="clip")  # or a token after the text
            for place, token in one.variant.ids.items():
                entering[one.own == place] = decoder.embedded([token], place)
            parts.append(entering)
            for source in (other for other in decoder.config.sources() if other < number):
                k, v = (x.take(one.own, axis=1, mode="clip") for x in run.past[source])
                if source in shared:
                    k, v = (np.concatenate(x, axis=1) for x in zip(shared[source], (k, v), strict=True))
                shared[source] = k, v
        past, count, hidden = [x[:, : rows.stop] for x in run.past[number]], here, np.concatenate(parts)
        least = rows.start if number + 1 == layers else 0
        some = slice(len(hidden))
        angles = {part: None if both is None else both[:, some] for part, both in turns[number].items()}
        hidden = _layer(decoder, number, seen[:here], hidden, angles, shared, past, least)
    asked = np.concatenate([one.own >= rows.start for one in seen])
    lasts = np.concatenate([run.hidden[-1][: rows.stop], np.empty((len(asked), hidden.shape[-1]), hidden.dtype)])
    lasts[-len(asked) :][asked] = hidden
    return [lasts[one.keys[one.places >= rows.start]] for one in seen]


def _layer(
    decoder: Decoder,
    number: int,
    seen: Sequence[_Rows],
    hidden: Array,
    turns: dict[str, Angles],
    shared: Read,
    past: Sequence[Array],
    least: int,
) -> Array:
    """Run a layer on the residual stream, (rows, d_model), in which each variant's own rows follow each other.

    turns   these rows' angles in this layer
    shared  these rows' keys and values in layers that others read, to which this layer's are added
    past    the base run's keys and values
    least   the position of the first row to compute: in the last layer, the first whose logits are wanted
    """
    places = np.concatenate([one.own for one in seen])
    q, k, v = decoder.before(number, hidden, turns, shared)[1:4]
    if number in decoder.config.sources():
        shared[number] = k, v
    k, v = (np.concatenate(pair, axis=1) for pair in zip(past, (k, v), strict=True))
    if least:
        q, hidden = q[:, places >= least], hidden[places >= least]
    heads, counts = np.empty(q.shape, q.dtype), np.array([np.count_nonzero(one.own >= least) for one in seen])
    ends, gates = np.cumsum(counts), list[Array]()
    batches = dict[tuple[int, bool, int], list[int]]()  # variants with as many keys and few rows share a call
    for place, (one, count) in enumerate(zip(seen, counts.tolist(), strict=True)):
        gates.append(np.zeros(1) if one.variant.gates is None else one.variant.gates[one.places])
        if count:  # without gates, all hidden tokens were left out
            key = len(one.keys), bool(gates[-1].any()), place if count > _FEW else -1
            batches.setdefault(key, []).append(place)
    for (size, gated, _), members in batches.items():
        step = max(1, _ROOM // (len(k) * k.shape[-1] * size))  # variants whose keys fit into the room
        for some in (members[first : first + step] for first in range(0, len(members), step)):
            most, keys = counts[some].max(), np.stack([seen[place].keys for place in some])
            batch = ends[some, None] + np.arange(-most, 0)  # fewer rows: others' rows come before them
            own = np.arange(most) >= most - counts[some, None]
            a, b, c = (x[:, which].swapaxes(0, 1) for x, which in ((q, np.maximum(batch, 0)), (k, keys), (v, keys)))
            rules, logs = _rules(decoder, number, most, size), [gates[place] for place in some if gated]
            made = attended(a, b, c, rules, np.stack(logs)).output if gated else attention(a, b, c, **rules)
            heads[:, batch[own]] = made.swapaxes(0, 1)[:, own]
    for end, size, one in zip(ends, counts, seen, strict=True):
        for (layer, head), added in one.variant.added.items():
            if layer == number:
                late = added[max(0, least - one.variant.first) :]
                heads[head, end - size : end - size + len(late)] += late
    given = np.concatenate([one.inputs[:, number] for one in seen])[places >= least]
    return decoder.after(number, hidden, decoder.mixed(number, heads), given)


def through(
    decoder: Decoder,
    ids: Sequence[int],
    hidden: Sequence[Array],
    variants: Sequence[Variant],
    by_last: Array,
    past: Sequence[tuple[Array, Array]] = (),
    each: Each = iter,
    kept: Kept | None = None,
) -> Iterator[tuple[int, int, Attended]]:
    """Differentiate through all layers, the last first; yields a layer's number, a variant's place, its attention.

    ids        the tokens' ids
    hidden     the residual stream before each layer, (variants, tokens, d_model) each
    by_last    (variants, rows, d_model), the derivative by the last rows' stream after the last layer
    past       each layer's keys and values of earlier tokens, if `hidden` has the last tokens only
    each       iterates over the layers
    kept       the layers that `hidden_of` kept, each taken out when it is used; the others are computed again
    """
    upstream, inputs, first = by_last, decoder.inputs(ids), past[0][0].shape[1] if past else 0
    by_inputs = np.zeros((len(by_last), *inputs.shape), inputs.dtype)
    shared, by_shared, kept = Read(), dict[tuple[int, str], Array](), {} if kept is None else kept
    turns = decoder.turns(np.arange(first, first + hidden[0].shape[-2]))
    scale, sizes, parallel = decoder.config.added_scale, decoder.config.sizes, decoder.config.parallel
    for number in (decoder.config.layers - 1 - done for done in each(range(decoder.config.layers))):
        name, before = f"blk.{number}.", hidden[number]
        rows = slice(before.shape[-2] - upstream.shape[-2], None)  # in the last layer only the rows whose logits count
        source = sizes[number].source
        if number not in kept:
            if source != number and source not in shared:
                shared[source] = decoder.before(source, hidden[source], turns[source], shared)[2:4]
            seen, projected = _attention(decoder, number, before, variants, turns, shared, past)
            kept[number] = seen, projected, decoder.mixed(number, seen.output[:, :, rows]), []
        seen, projected, output, inner = kept.pop(number)
        middle = before[:, rows] + scale * decoder.normed(f"{name}post_attention_norm", output)
        ended = decoder.end_back(number, before[:, rows], output, inputs[rows, number], upstream)
        upstream, by_inputs[:, rows, number] = ended
        by_mlp = in_blocks(partial(decoder.mlp_back, number, inner), before[:, rows] if parallel else middle, upstream)
        by_middle, upstream = upstream if parallel else upstream + by_mlp, upstream + by_mlp
        by_output = decoder.normed(f"{name}post_attention_norm", output, scale * by_middle)
        by_heads = decoder.weights.product(by_output, f"{name}attn_output.weight", back=True)
        g = np.zeros(seen.q.shape, before.dtype)
        g[:, :, rows] = split(by_heads, sizes[number].d_k)
        all_by, by_gates = through_attention(seen, g)
        by = {part: x[:, :, -before.shape[-2] :] for part, x in all_by.items()}
        for part in "kv":  # summed over all layers that read them
            by[part] = by[part] + by_shared.pop((source, part), 0.0)
            if source != number:
                by_shared[source, part] = by[part]
        by_x = np.zeros_like(before)
        for part in sorted(projected, reverse=True):
            plain = decoder.placed(number, part, projected[part], turns[number][part], by[part])
            if decoder.config.clip is not None:
                plain = plain * (np.abs(projected[part]) < decoder.config.clip)
            by_x = by_x + decoder.weights.product(join(plain), f"{name}attn_{part}.weight", back=True)
        by_before = decoder.normed(f"{name}attn_norm", before, by_x)
        by_before[:, rows] += upstream
        upstream = by_before + decoder.inputs(ids, by_inputs) if decoder.config.d_input and not number else by_before
        whole = seen._replace(g=g, by_gates=by_gates, residual=upstream)
        for place in range(len(variants)):
            arrays = {name: x[place] for name, x in whole._asdict().items() if isinstance(x, np.ndarray) and x.size}
            rules = {name: x[place] if name == "bias" else x for name, x in whole.rules.items()}
            yield number, place, whole._replace(**arrays, rules=rules, state=taken(whole.state, place))


def through_attention(part: Attended, g: Array) -> tuple[dict[str, Array], Array]:
    """Return the derivatives by q, k and v, and by the gates' ln α, (…, heads, tokens), from `g`, that by the output.

    An edge's logit has the derivative a_ij·(g_i·v_j − g_i·o_i) in whichever part of its row it is. So each part is
    differentiated with the output and state of the whole row, like blocks of keys in FlashAttention (Dao et al. 2022,
    appendix B). Without gates, the gates' derivatives are 0.
    """
    inputs = describe_whole(part.q, part.k, part.v, cast("Rules", part.rules))
    engine = engines.get(engines.choose(inputs.problem, what="gradients").engine)
    shape, tokens, rows = (inputs.problem.batch, *part.q.shape[-3:-1]), part.k.shape[-2], part.q.shape[-2]
    answers = {name: x.reshape(shape) for name, x in part.state._asdict().items()}
    answers["output"], upstream = (np.ascontiguousarray(x, part.q.dtype).reshape(*shape, -1) for x in (part.output, g))
    bias = None if part.gates is None else (*shape[:2], 1, tokens)
    gradients = backward.gradients(engine, inputs, answers, {"output": upstream}, bias=bias)
    by = {name: gradients[name].reshape(getattr(part, name).shape) for name in "qkv"}
    if part.gates is None:
        return by, np.zeros((*part.q.shape[:-2], tokens))
    keys, values = _of_queries(part.k, part.q), _of_queries(part.v, part.q)
    to_self, slope = _self_logits(part.q, part.k, part.rules)
    weight = np.exp((to_self - part.state.largest) - part.state.log_sum)
    by_logit = weight * np.einsum("...d,...d->...", g, values - part.output) * slope
    by["q"] = by["q"] + by_logit[..., None] * keys
    for name, more in (("k", by_logit[..., None] * part.q), ("v", weight[..., None] * g)):
        by[name] = by[name].copy()
        by[name][..., -rows:, :] += more.reshape(*part.k.shape[:-2], -1, *more.shape[-2:]).sum(axis=-3)
    return by, gradients["bias"].reshape(*part.q.shape[:-2], tokens).astype(np.float64)
