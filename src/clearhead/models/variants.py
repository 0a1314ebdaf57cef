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
from clearhead.models.decoder import Decoder, in_blocks, join, split, stream
from clearhead.models.protocol import Attended, Each, ForwardPass, Variant
from clearhead.ops.attention import attention
from clearhead.ops.matrix import AttentionMatrix

Read = dict[int, tuple[Array, Array]]  # keys and values that later layers read, by the number of their layer
_KNOWN = {
    "alibi_slopes", "causal", "kv_segments", "query_offset", "query_segments", "scale", "sinks", "softcap", "window",
}  # fmt: skip
_ROOM = 2**22  # numbers of the residual stream of all variants that run at once
_FEW = 32  # rows of variants whose attention is one call


class _Rows(NamedTuple):
    """The rows of a variant among those that are run with it.

    places   (keys,) the positions of its tokens
    keys     (keys,) where the keys of these lie: among the run's, then among those that are computed
    own      (rows,) the last of these positions, whose rows are computed for it; it shares the others
    inputs   (rows, layers, d_input) of these rows
    code     as `_code` makes it
    """

    variant: Variant
    places: Array
    keys: Array
    own: Array
    inputs: Array
    code: bytes = b""


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
    if (alibi := rules.get("alibi_slopes")) is not None:  # with one position less, all distances before are one less
        logits = logits + numbers_like(alibi, q)[:, None]
    return logits, slope


def attend(decoder: Decoder, number: int, gates: Array | None, q: Array, k: Array, v: Array) -> Attended:
    """A layer's attention with gates on its keys, or none; q is (…, heads, rows, d_k)."""
    return attended(q, k, v, _rules(decoder, number, q.shape[-2], k.shape[-2]), gates)


def _rules(decoder: Decoder, number: int, queries: int, keys: int) -> dict[str, Any]:
    """The rules of a layer's scores, for so many queries that are the last of the keys."""
    return decoder.rules(number) | ({"query_offset": keys - queries} if queries < keys else {})


def hidden_of(
    decoder: Decoder, ids: Sequence[int], variants: Sequence[Variant], rows: range, each: Each = iter
) -> Sequence[Array]:
    """The residual stream of each variant before each layer and after the last, (variants, tokens, d_model) each.

    After the last layer it is that of the text's rows from rows.start on alone.
    """
    tokens, layers = np.arange(len(ids)), decoder.config.layers
    inputs, shared = decoder.inputs(ids), Read()
    seen = [_Rows(each, tokens, tokens + place * len(ids), tokens, inputs) for place, each in enumerate(variants)]

    def step(number: int, hidden: Array) -> Array:
        least = rows.start if number + 1 == layers else 0
        after = _layer(decoder, number, seen, hidden.reshape(-1, hidden.shape[-1]), shared, None, least)
        return after.reshape(len(variants), -1, after.shape[-1])

    return stream(step, np.stack([decoder.embedded(ids)] * len(variants)), layers, each)


def again(
    decoder: Decoder, run: ForwardPass, variants: Sequence[Variant], rows: range, each: Each = iter
) -> Iterator[Array]:
    """The residual stream of some rows after the last layer in each variant, (rows, d_model); in order.

    run   what they are variants of: the rows before their first are its own, with its keys and values
    each  iterates over the layers of as many variants as are run at once
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
    """The gates and tokens of a variant as bytes: those with the longest beginning in common are sorted together."""
    code = np.zeros((tokens, 2), ">f8")  # the bytes of numbers from 0 on have the order of the numbers
    if variant.gates is not None:
        code[:, 0] = np.abs(variant.gates[:tokens])
    for place, token in variant.ids.items():
        code[place, 1] = token + 1
    return b"" if variant.added else code.tobytes()


def _rows_of(
    decoder: Decoder, run: ForwardPass, variant: Variant, code: bytes, last: list[_Rows], rows: range, count: int
) -> _Rows:
    """The rows of a variant, behind `count` other ones; it shares those before which it is as the last variant.

    A token before `rows` whose key no later one sees changes nothing, and is left out. Windows, ALiBi and what is added
    name positions, so that there all are run.
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
    """`again` for variants in the order of their first layers, all at once."""
    hidden, count, layers = np.empty((0, decoder.config.d_model), run.hidden[0].dtype), 0, decoder.config.layers
    start = min(len(run.ids) - 1, *(one.variant.first for one in seen))
    before, shared = run.stream(start) if seen[-1].variant.layer else [run.hidden[0][start:]], Read()
    for number in each(range(seen[0].variant.layer, layers)):
        here, parts = sum(one.variant.layer <= number for one in seen), [hidden]
        for one in seen[count:here]:  # which begin with the run's stream, but of tokens that were replaced
            entering = before[number].take(one.own - start, axis=0, mode="clip")  # or of one behind them
            for place, token in one.variant.ids.items():
                entering[one.own == place] = decoder.embedded([token], place)
            parts.append(entering)
            for source in (other for other in decoder.config.sources() if other < number):
                k, v = (x.take(one.own, axis=1, mode="clip") for x in run.past[source])
                if source in shared:
                    k, v = (np.concatenate(x, axis=1) for x in zip(shared[source], (k, v), strict=True))
                shared[source] = k, v
        past, count = [x[:, : rows.stop] for x in run.past[number]], here
        least = rows.start if number + 1 == layers else 0
        hidden = _layer(decoder, number, seen[:here], np.concatenate(parts), shared, past, least)
    asked = np.concatenate([one.own >= rows.start for one in seen])
    lasts = np.concatenate([run.hidden[-1][: rows.stop], np.empty((len(asked), hidden.shape[-1]), hidden.dtype)])
    lasts[-len(asked) :][asked] = hidden
    return [lasts[one.keys[one.places >= rows.start]] for one in seen]


def _layer(
    decoder: Decoder,
    number: int,
    seen: Sequence[_Rows],
    hidden: Array,
    shared: Read,
    past: Sequence[Array] | None,
    least: int,
) -> Array:
    """The residual stream after a layer from that before it, (rows, d_model), each variant's own rows after each other.

    shared  of layers that others read the keys and values of these rows, to which this layer's are added
    past    the run's keys and values; None where none are used
    least   the position of the first row that is computed: in the last layer of those whose logits are asked for
    """
    places = np.concatenate([one.own for one in seen])
    q, k, v = decoder.before(number, hidden, places, shared)[1:4]
    if number in decoder.config.sources():
        shared[number] = k, v
    if past is not None:
        k, v = (np.concatenate(pair, axis=1) for pair in zip(past, (k, v), strict=True))
    if least:
        q, hidden = q[:, places >= least], hidden[places >= least]
    heads, counts = np.empty(q.shape, q.dtype), np.array([np.count_nonzero(one.own >= least) for one in seen])
    ends, batches = np.cumsum(counts), dict[int, list[int]]()  # variants of as many keys and few rows are a batch
    for place, (one, count) in enumerate(zip(seen, counts.tolist(), strict=True)):
        gates = None if one.variant.gates is None else one.variant.gates[one.places]
        gated = gates is not None and bool(gates.any())  # else all that is hidden is left out
        if count and not gated and count <= _FEW:
            batches.setdefault(len(one.keys), []).append(place)
        elif count:
            rows = slice(ends[place] - count, ends[place])
            new, rules = q[:, rows], _rules(decoder, number, count, len(one.keys))
            both = k[:, one.keys], v[:, one.keys]
            heads[:, rows] = attended(new, *both, rules, gates).output if gated else attention(new, *both, **rules)
    for size, members in batches.items():
        step = max(1, _ROOM // (len(k) * k.shape[-1] * size))  # of which so many keys fit into the room
        for some in (members[first : first + step] for first in range(0, len(members), step)):
            most, keys = counts[some].max(), np.stack([seen[place].keys for place in some])
            batch = ends[some, None] + np.arange(-most, 0)  # of those with fewer rows, with others' before them
            own = np.arange(most) >= most - counts[some, None]
            parts = [x[:, which].swapaxes(0, 1) for x, which in ((q, np.maximum(batch, 0)), (k, keys), (v, keys))]
            made = attention(*parts, **_rules(decoder, number, most, size))
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
) -> Iterator[tuple[int, int, Attended]]:
    """Differentiate through all layers, the last first: a layer's number, a variant's place, its attention.

    ids        of the tokens
    hidden     the residual stream before each layer, (variants, tokens, d_model) each
    by_last    (variants, rows, d_model), the derivative by that of the last rows after the last layer
    past       each layer's keys and values of the tokens before, if `hidden` is of the last tokens alone
    each       iterates over the layers
    A layer is computed again from the residual stream, so that nothing of it is kept when the next one is asked for.
    """
    upstream, inputs = by_last, decoder.inputs(ids)
    by_inputs = np.zeros((len(by_last), *inputs.shape), inputs.dtype)
    shared, by_shared = Read(), dict[tuple[int, str], Array]()
    scale, sizes, parallel = decoder.config.added_scale, decoder.config.sizes, decoder.config.parallel
    for number in (decoder.config.layers - 1 - done for done in each(range(decoder.config.layers))):
        name = f"blk.{number}."
        before, first = hidden[number], past[number][0].shape[1] if past else 0
        rows = slice(before.shape[-2] - upstream.shape[-2], None)  # in the last layer only those of the logits
        places = np.arange(first, first + before.shape[-2])
        source = sizes[number].source
        if source != number and source not in shared:
            shared[source] = decoder.before(source, hidden[source], places, shared)[2:4]
        x, q, k, v, projected, angles = decoder.before(number, before, places, shared)
        if past:
            k, v = (
                np.stack([np.concatenate([old, one], axis=1) for one in new])
                for old, new in zip(past[number], (k, v), strict=True)
            )
        seen = [attend(decoder, number, one.gates, *x) for one, *x in zip(variants, q, k, v, strict=True)]
        output = decoder.mixed(number, np.stack([part.output[:, rows] for part in seen]))
        middle = before[:, rows] + scale * decoder.normed(f"{name}post_attention_norm", output)
        ended = decoder.end_back(number, before[:, rows], output, inputs[rows, number], upstream)
        upstream, by_inputs[:, rows, number] = ended
        by_mlp = in_blocks(partial(decoder.mlp_back, number), before[:, rows] if parallel else middle, upstream)
        by_middle, upstream = upstream if parallel else upstream + by_mlp, upstream + by_mlp
        by_output = decoder.normed(f"{name}post_attention_norm", output, scale * by_middle)
        by_heads = decoder.weights.product(by_output, f"{name}attn_output.weight", back=True)
        g = np.zeros_like(q)
        g[:, :, rows] = split(by_heads, sizes[number].d_k)
        results = [through_attention(part, by) for part, by in zip(seen, g, strict=True)]
        by = {part: np.stack([one[part][:, -x.shape[-2] :] for one, _ in results]) for part in "qkv"}
        for part in "kv":  # of all layers that read them
            by[part] = by[part] + by_shared.pop((source, part), 0.0)
            if source != number:
                by_shared[source, part] = by[part]
        by_x = np.zeros_like(x)
        for part in sorted(projected, reverse=True):
            plain = decoder.placed(number, part, projected[part], angles[part], by[part])
            if decoder.config.clip is not None:
                plain = plain * (np.abs(projected[part]) < decoder.config.clip)
            by_x = by_x + decoder.weights.product(join(plain), f"{name}attn_{part}.weight", back=True)
        by_before = decoder.normed(f"{name}attn_norm", before, by_x)
        by_before[:, rows] += upstream
        upstream = by_before + decoder.inputs(ids, by_inputs) if decoder.config.d_input and not number else by_before
        for place, whole in enumerate(seen):
            yield number, place, whole._replace(g=g[place], by_gates=results[place][1], residual=upstream[place])


def edges(part: Attended, rows: range) -> Array:
    """a_ij·(g_i·v_j − g_i·o_i) of the rows at some positions, (heads, rows, keys): the derivative by an edge's logit.

    Where there are gates, the edges on the rows' own keys have none, and are 0.
    """
    before = part.k.shape[1] - part.q.shape[1]
    some = slice(rows.start - before, rows.stop - before)
    rules = part.rules | {"query_offset": part.rules.get("query_offset", 0) + some.start}
    if "query_segments" in rules:
        rules["query_segments"] = rules["query_segments"][some]
    matrix = AttentionMatrix(part.q[:, some], part.k, **rules)
    earlier = State(*(x.astype(np.float64) for x in cast("State", matrix.observe(logsumexp=True).state)))
    left = share(np, earlier, taken(part.state, slice(None), some))  # of the whole row, the own key included
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
