"""Gates: every weight on a key, but that of the key's own query, times a factor α before its row is normalised.

A gated row is the exact merge of two parts: the keys before the query, ln α added to their logits, and the query's own
key. With α = 1 it is attention as it is; with α = 0 no later token may see the key, and its position stays.
"""

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
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.span_terms import SpanTerm, combined

_KNOWN = frozenset(("causal", "query_offset", "scale", "sinks", "softcap", "spans", "window"))


class Attended(NamedTuple):
    """Attention of the last tokens of a text: q (heads, rows, d_k), k and v (kv_heads, tokens, …).

    rules      of all edges; where there are gates, of the edges to earlier keys
    output     (heads, rows, d_v); state (heads, rows) each, both of all edges
    gates      (tokens,) ln α of each key, or None
    """

    q: Array
    k: Array
    v: Array
    rules: dict[str, Any]
    output: Array
    state: State
    gates: Array | None = None

    def weights(self, rows: range) -> Array:
        """Some rows' weights, (heads, rows, keys); where there are gates, without those on the rows' own keys."""
        some = slice(rows.start, rows.stop)
        rules = self.rules | {"query_offset": self.rules.get("query_offset", 0) + rows.start}
        if rules.get("spans") is not None:
            rules["spans"] = combined([SpanTerm.of(rules["spans"]).take(some, slice(None))])
        matrix = AttentionMatrix(self.q[:, some], self.k, **rules)
        part = matrix.observe(logsumexp=True).state
        assert part is not None
        left = share(np, State(*(x.astype(np.float64) for x in part)), taken(self.state, slice(None), some))
        return np.asarray(np.asarray(matrix[:], np.float64) * left[..., None])

    def edges(self, rows: range, g: Array) -> Array:
        """a_ij·(g_i·v_j − g_i·o_i) of some rows, (heads, rows, keys): the derivative by an edge's logit."""
        by, group = g[:, rows.start : rows.stop].astype(np.float64), len(self.q) // len(self.v)
        values = np.einsum("hnd,hmd->hnm", by, np.repeat(self.v, group, axis=0))
        return self.weights(rows) * (
            values - np.einsum("hnd,hnd->hn", by, self.output[:, rows.start : rows.stop])[..., None]
        )


class LayerBack(NamedTuple):
    """One layer's attention in one variant, with derivatives of a number.

    g          (heads, tokens, d_v): by A·v, before edits of outputs and before W^O
    gates      (heads, tokens): by the gates' ln α; zeros without gates
    residual   (tokens, d_model): by the residual stream before the layer; of layer 0 it is by the embeddings
    """

    attended: Attended
    g: Array
    gates: Array
    residual: Array


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
    own = State(to_self, namespace(q).zeros_like(to_self)), _of_queries(v, q)
    output, whole = _merged(q, (cast("State", seen.state), seen.output), own, sinks)
    return Attended(q, k, v, earlier, output, whole, gates)


def attended_together(q: Array, k: Array, v: Array, past: tuple[Array, Array], gates: Array, rules: Any) -> Array:
    """The output of the same last rows in several variants, (heads, variants·rows, d_v), gated on earlier keys alone.

    q, k and v are of these rows, a variant after the other, `past` are the keys and values before them, and gates
    (variants, tokens before) ln α. Each row is the merge of the keys before and the variant's own rows.
    """

    def apart(x: Array) -> Array:
        return x.reshape(len(x), len(gates), -1, x.shape[-1]).swapaxes(0, 1)

    bias = np.repeat(gates, q.shape[1] // len(gates), axis=0)[None].astype(q.dtype)
    seen = AttentionMatrix(q, past[0], bias=bias, **rules | {"causal": False}).observe(past[1], logsumexp=True)
    last = AttentionMatrix(apart(q), apart(k), **rules).observe(apart(v), logsumexp=True)
    state = State(*(x.swapaxes(0, 1).reshape(q.shape[:2]) for x in (last.largest, last.log_sum)))
    own = state, last.output.swapaxes(0, 1).reshape(q.shape)
    return np.asarray(_merged(q, (cast("State", seen.state), seen.output), own)[0])


def _merged(q: Any, first: tuple[State, Any], second: tuple[State, Any], sinks: Any = None) -> tuple[Any, State]:
    """The output and the states of whole rows from those of two parts, (states, output) each."""
    xp = namespace(q)
    whole = merged(xp, first[0], second[0])
    if sinks is not None:  # of the whole row, once
        sink = numbers_like(sinks, whole.largest)[:, None]
        whole = merged(xp, whole, State(sink, xp.zeros_like(sink)))
    left, other = (numbers_like(share(xp, part, whole), q)[..., None] for part in (first[0], second[0]))
    return left * first[1] + other * second[1], whole


def through(part: Attended, g: Array) -> tuple[dict[str, Array], Array]:
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

    def grouped(x: Array) -> Array:
        return x.reshape(len(part.k), group, *x.shape[1:]).sum(axis=1)

    by["q"] = by["q"] + by_logit[..., None] * keys
    for name, more in (("k", by_logit[..., None] * part.q), ("v", weight[..., None] * g)):
        by[name] = by[name].copy()
        by[name][:, -rows:] += grouped(more)
    return by, gradients["bias"][0, :, 0].astype(np.float64)


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
    if rules.get("spans") is not None:
        term = SpanTerm.of(rules["spans"])
        queries, keys = term.query_labels[0], term.key_labels[0, -q.shape[-2] :]
        added = np.where((queries >= 0) & (keys >= 0), np.asarray(term.table)[0][:, queries, keys], 0)
        logits = logits + numbers_like(added, q)
    return logits, slope
