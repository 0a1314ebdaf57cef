"""Variants of a run: gates on keys, other outputs of heads; derivatives of a number through all layers.

A gate multiplies every weight on a key, but that of the key's own query, by α before its row is normalised. A gated row
is the exact merge of two parts: the keys before the query, ln α added to their logits, and the query's own key. With
α = 1 it is attention as it is; with α = 0 no later token may see the key, and its position stays.

Variants run as a batch from the first row that changes: a layer's weights are read once for all of them, and what comes
before that row is the run's own.

With y a number of the logits, o_i = Σ_j a_ij·v_j a head's output at query i before W^O, and g_i = ∂y/∂o_i, the
effects of one layer are `A.contributions(v, g)` and `A.cut_effects(v, g)`. Attention's own derivative comes from an
engine, so that the memory of a layer is O(tokens); what else a layer computed is computed again on the way back.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from clearhead import engines
from clearhead.core.axes import Array
from clearhead.core.call import describe_whole
from clearhead.core.namespace import namespace, numbers_like
from clearhead.core.rules import Rules
from clearhead.core.state import State, merged, share, taken
from clearhead.derivatives import backward
from clearhead.errors import RuleError
from clearhead.models.decoder import Decoder, in_blocks, join, split, stream
from clearhead.models.mlp import mlp_back
from clearhead.models.protocol import Attended, Each, ForwardPass, Variant
from clearhead.ops.matrix import AttentionMatrix

Seen = Sequence[tuple[Variant, Array]]  # each variant with the positions of its rows
_KNOWN = {"causal", "kv_segments", "query_offset", "query_segments", "scale", "sinks", "softcap", "window"}
_ROOM = 2**22  # numbers of the MLP's inner vectors of all variants that run at once


def attended(q: Any, k: Any, v: Any, rules: dict[str, Any], gates: Array | None = None) -> Attended:
    """The output and the rows' states of causal attention, gated where there are gates; arrays or tensors.

    q (…, heads, rows, d_k) are the last of the tokens of k and v. Raises RuleError for gates where attention is not
    causal, or where a rule says more of an edge than its queries and keys.
    """
    if gates is None:
        seen = AttentionMatrix(q, k, **rules).observe(v, logsumexp=True)
        return Attended(q, k, v, rules, seen.output, cast("State", seen.state))
    other = sorted(name for name, value in rules.items() if value is not None and name not in _KNOWN)
    if not rules.get("causal") or other:
        why = f"this attention has {other[0]}" if other else "this attention is not causal"
        raise RuleError(f"parts of a text are hidden from all later tokens, and {why}.")
    earlier = rules | {"bias": numbers_like(gates, q)[None, None], "query_offset": (rules.get("query_offset") or 0) - 1}
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
    """Each query's own key or value, (…, heads, rows, d), of (…, kv_heads, tokens, d)."""
    return x[..., np.arange(q.shape[-3]) // (q.shape[-3] // x.shape[-3]), -q.shape[-2] :, :]


def _self_logits(q: Any, k: Any, rules: dict[str, Any]) -> tuple[Any, Any]:
    """The logits of the queries' own keys, (…, heads, rows), and their slope by q·k."""
    xp, scale = namespace(q), rules.get("scale")
    numbers = np.reshape(q.shape[-1] ** -0.5 if scale is None else np.asarray(scale), (-1, 1))
    slope = numbers_like(numbers, q)
    logits = slope * (q * _of_queries(k, q)).sum(-1)
    cap = rules.get("softcap")
    if cap is not None:
        capped = xp.tanh(logits / cap)
        logits, slope = cap * capped, slope * (1 - capped * capped)
    return logits, slope


def attend(decoder: Decoder, number: int, gates: Array | None, q: Array, k: Array, v: Array) -> Attended:
    """A layer's attention with gates on its keys, or none; q is (…, heads, rows, d_k)."""
    rules = decoder.rules(number)
    if q.shape[-2] < k.shape[-2]:
        rules["query_offset"] = k.shape[-2] - q.shape[-2]
    return attended(q, k, v, rules, gates)


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
    """`again` for variants in the order of their first layers, all at once.

    A token before `rows` whose key no later one sees changes nothing, and is left out. Windows and what is added name
    positions, so that there all are run.
    """
    seen = []
    for variant in variants:
        places = np.arange(start, len(run.hidden[0]))
        if variant.gates is not None and not (variant.added or any(decoder.config.windows)):
            places = places[(variant.gates[start:] > -np.inf) | (places >= rows.start)]
        seen.append((variant, places))
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


def _layer(decoder: Decoder, number: int, seen: Seen, hidden: Array, past: tuple[Array, Array] | None) -> Array:
    """The residual stream after a layer from that before it, (rows, d_model), those of all variants after each other.

    past   the keys and values before the first row, which all variants share; None where the first row is row 0
    """
    start, rows = 0 if past is None else past[0].shape[1], np.concatenate([places for _, places in seen])
    q, k, v = decoder.before(number, hidden, rows)[1:4]
    heads, ends = np.empty(q.shape, q.dtype), np.cumsum([len(places) for _, places in seen])
    batches: dict[int, list[int]] = {}  # variants without gates and of as many rows run as one batch
    for place, (variant, places) in enumerate(seen):
        gated = None if variant.gates is None else np.concatenate([variant.gates[:start], variant.gates[places]])
        if gated is None or not gated.any():  # all that is hidden is left out
            batches.setdefault(len(places), []).append(place)
        else:
            some = slice(ends[place] - len(places), ends[place])
            heads[:, some] = attend(decoder, number, gated, q[:, some], *_behind(past, k[:, some], v[:, some])).output
    for count, members in batches.items():
        most = max(1, _ROOM // (len(k) * k.shape[-1] * (start + count)))  # of which so many keys fit into the room
        for first in range(0, len(members), most):
            batch = ends[members[first : first + most], None] - count + np.arange(count)  # (variants, rows)
            parts = [x[:, batch].swapaxes(0, 1) for x in (q, k, v)]
            made = attend(decoder, number, None, parts[0], *_behind(past, *parts[1:])).output
            heads[:, batch] = made.swapaxes(0, 1)
    for end, (variant, places) in zip(ends, seen, strict=True):
        for (layer, head), added in variant.added.items():
            if layer == number:
                first = end - len(places) + variant.first - start
                heads[head, first : first + len(added)] += added
    return decoder.after(number, hidden, decoder.mixed(number, heads))


def _behind(past: tuple[Array, Array] | None, *new: Array) -> Sequence[Array]:
    """Keys and values, (…, kv_heads, tokens, d_k), behind those that all variants share."""
    if past is None:
        return new
    pairs = zip(past, new, strict=True)
    return [np.concatenate([np.broadcast_to(old, (*x.shape[:-3], *old.shape)), x], axis=-2) for old, x in pairs]


def of_logits(decoder: Decoder, hidden: Array, rows: slice, upstream: Array) -> Array:
    """The derivative by the residual stream after the last layer, (tokens, d_model).

    hidden     (tokens, d_model), that residual stream
    upstream   (rows, vocabulary), the derivative by the logits of some rows
    """
    config, result = decoder.config, np.zeros_like(hidden)
    for position, by_logits in enumerate(upstream, rows.start):
        row = hidden[position]
        by_raw = np.asarray(by_logits, hidden.dtype)
        if config.logit_softcap is not None:
            capped = decoder.logits(row) / config.logit_softcap
            by_raw = by_raw * (1 - capped * capped)
        some = np.flatnonzero(by_raw)
        if not len(some):
            continue
        chosen = decoder.weights.rows(decoder.unembedding, some) if len(some) < len(by_raw) // 8 else None
        if chosen is None:
            direction = decoder.weights.product(by_raw, decoder.unembedding, back=True)
        else:
            direction = by_raw[some] @ chosen
        result[position] = decoder.normed("output_norm", row, direction * config.logit_scale)
    return result


def through(
    decoder: Decoder,
    hidden: Sequence[Array],
    variants: Sequence[Variant],
    by_last: Array,
    past: Sequence[tuple[Array, Array]] = (),
) -> Iterator[tuple[int, int, Attended]]:
    """Differentiate through all layers, the last first: a layer's number, a variant's place, its attention.

    hidden     the residual stream before each layer and after the last, (variants, tokens, d_model) each
    by_last    (variants, tokens, d_model), the derivative by the last of these
    past       each layer's keys and values of the tokens before, if `hidden` is of the last tokens alone
    A layer is computed again from the residual stream, so that nothing of it is kept when the next one is asked for.
    """
    upstream = by_last
    scale = decoder.config.added_scale
    for number in reversed(range(decoder.config.layers)):
        name = f"blk.{number}."
        before, first = hidden[number], past[number][0].shape[1] if past else 0
        places = np.arange(first, first + before.shape[-2])
        x, q, k, v, projected, angles = decoder.before(number, before, places)
        if past:
            k, v = (
                np.stack([np.concatenate([old, each], axis=1) for each in new])
                for old, new in zip(past[number], (k, v), strict=True)
            )
        seen = [attend(decoder, number, each.gates, *x) for each, *x in zip(variants, q, k, v, strict=True)]
        output = decoder.mixed(number, np.stack([part.output for part in seen]))
        middle = before + scale * decoder.normed(f"{name}post_attention_norm", output)
        parallel = decoder.config.parallel
        by_mlp = in_blocks(partial(_through_mlp, decoder, number), before if parallel else middle, upstream)
        by_middle, upstream = upstream if parallel else upstream + by_mlp, upstream + by_mlp
        by_output = decoder.normed(f"{name}post_attention_norm", output, scale * by_middle)
        by_heads = decoder.weights.product(by_output, f"{name}attn_output.weight", back=True)
        g = split(by_heads, decoder.config.d_k)
        results = [through_attention(part, by) for part, by in zip(seen, g, strict=True)]
        by = {part: np.stack([each[part][:, -x.shape[-2] :] for each, _ in results]) for part in "qkv"}
        by_x = decoder.weights.product(join(by["v"]), f"{name}attn_v.weight", back=True)
        for part in "qk":
            plain = decoder.placed(number, part, projected[part], angles[part], by[part])
            by_x = by_x + decoder.weights.product(join(plain), f"{name}attn_{part}.weight", back=True)
        upstream = upstream + decoder.normed(f"{name}attn_norm", before, by_x)
        for place, whole in enumerate(seen):
            yield number, place, whole._replace(g=g[place], by_gates=results[place][1], residual=upstream[place])


def _through_mlp(decoder: Decoder, number: int, source: Array, upstream: Array) -> Array:
    """The derivative by the residual stream that the MLP reads, (tokens, d_model), by way of the MLP."""
    norm, behind = f"blk.{number}.ffn_norm", f"blk.{number}.post_ffw_norm"
    by_output = decoder.config.added_scale * upstream
    if f"{behind}.weight" in decoder.weights:  # else the output is not needed
        by_output = decoder.normed(behind, decoder.mlp(number, source), by_output)
    by_x = mlp_back(decoder.weights, decoder.config, number, decoder.normed(norm, source), by_output)
    return decoder.normed(norm, source, by_x)


def edges(part: Attended, rows: range) -> Array:
    """a_ij·(g_i·v_j − g_i·o_i) of some rows, (heads, rows, keys): the derivative by an edge's logit.

    Where there are gates, the edges on the rows' own keys have none, and are 0.
    """
    some = slice(rows.start, rows.stop)
    rules = part.rules | {"query_offset": part.rules.get("query_offset", 0) + rows.start}
    if "query_segments" in rules:
        rules["query_segments"] = rules["query_segments"][some]
    matrix = AttentionMatrix(part.q[:, some], part.k, **rules)
    before = State(*(x.astype(np.float64) for x in cast("State", matrix.observe(logsumexp=True).state)))
    left = share(np, before, taken(part.state, slice(None), some))  # of the whole row, the own key included
    weights = np.asarray(matrix[:], np.float64) * left[..., None]
    by, values = part.g[:, some].astype(np.float64), np.repeat(part.v, len(part.q) // len(part.v), axis=0)
    along = np.einsum("hnd,hnd->hn", by, part.output[:, some])
    return np.asarray(weights * (np.einsum("hnd,hmd->hnm", by, values) - along[..., None]))


def through_attention(part: Attended, g: Array) -> tuple[dict[str, Array], Array]:
    """The derivatives by q, k and v from `g`, that by the output, and those by the gates' ln α, (heads, tokens).

    The derivative by an edge's logit is a_ij·(g_i·v_j − g_i·o_i), whichever part of its row the edge is in. So each
    part is differentiated with the output and the state of the whole row, as blocks of keys are in FlashAttention
    (Dao et al. 2022, appendix B). Without gates, the gates' derivatives are 0.
    """
    inputs = describe_whole(part.q, part.k, part.v, cast("Rules", part.rules))
    engine = engines.get(engines.choose(inputs.problem, what="gradients").engine)
    answers = {"output": part.output[None], **{name: x[None] for name, x in part.state._asdict().items()}}
    heads, tokens = len(part.q), part.k.shape[1]
    bias = None if part.gates is None else (1, heads, 1, tokens)
    upstream: dict[str, Any] = {"output": np.ascontiguousarray(g, part.q.dtype)[None]}
    gradients = backward.gradients(engine, inputs, answers, upstream, bias=bias)
    by = {name: gradients[name][0] for name in "qkv"}
    if part.gates is None:
        return by, np.zeros((heads, tokens))
    rows, group = part.q.shape[1], heads // len(part.k)
    keys, values = _of_queries(part.k, part.q), _of_queries(part.v, part.q)
    to_self, slope = _self_logits(part.q, part.k, part.rules)
    weight = np.exp((to_self - part.state.largest) - part.state.log_sum)
    by_logit = weight * np.einsum("hnd,hnd->hn", g, values - part.output) * slope
    by["q"] = by["q"] + by_logit[..., None] * keys
    for name, more in (("k", by_logit[..., None] * part.q), ("v", weight[..., None] * g)):
        by[name] = by[name].copy()
        by[name][:, -rows:] += more.reshape(len(part.k), group, *more.shape[1:]).sum(axis=1)
    return by, gradients["bias"][0, :, 0].astype(np.float64)
