"""Derivatives of a number of a run by every head's output, the residual stream and the embeddings, in reverse mode.

With y a number of the logits, o_i = Σ_j a_ij·v_j a head's output at query i before W^O, and g_i = ∂y/∂o_i, the
effects of one layer are `A.contributions(v, g)` and `A.cut_effects(v, g)`. Attention's own derivative comes from an
engine, so that the memory of a layer is O(tokens); what else a layer computed is computed again on the way back.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from clearhead.core.axes import Array
from clearhead.models import gates
from clearhead.models.decoder import Angles, Decoder, in_blocks, join, split
from clearhead.models.functions import ACTIVATIONS, turned_back
from clearhead.models.gates import LayerBack
from clearhead.models.products import product
from clearhead.models.protocol import Variant
from clearhead.models.variants import attend


def of_logits(decoder: Decoder, hidden: Array, upstream: Mapping[int, Array]) -> Array:
    """The derivative by the residual stream after the last layer, (tokens, d_model).

    hidden     (tokens, d_model), that residual stream
    upstream   by position, the derivative by the logits there, (vocabulary,)
    """
    config = decoder.config
    norm = decoder.norm("output_norm")
    assert norm is not None
    result = np.zeros_like(hidden)
    for position, by_logits in upstream.items():
        row = hidden[position]
        by_raw = np.asarray(by_logits, hidden.dtype)
        if config.logit_softcap is not None:
            capped = decoder.logits(row) / config.logit_softcap
            by_raw = by_raw * (1 - capped * capped)
        some = np.flatnonzero(by_raw)
        rows = decoder.weights.rows(decoder.unembedding, some) if len(some) < len(by_raw) // 8 else None
        direction = by_raw[some] @ rows if rows is not None else product(by_raw, decoder.weights[decoder.unembedding])
        result[position] = norm.backward(row, direction * config.logit_scale)
    return result


def through(
    decoder: Decoder,
    hidden: Sequence[Array],
    variants: Sequence[Variant],
    by_last: Array,
    past: Sequence[tuple[Array, Array]] = (),
) -> Iterator[list[LayerBack]]:
    """Differentiate through all layers, the last first; of each layer the attention of each variant.

    hidden     the residual stream before each layer and after the last, (variants, tokens, d_model) each
    by_last    (variants, tokens, d_model), the derivative by the last of these
    past       each layer's keys and values of the tokens before, if `hidden` is of the last tokens alone
    A layer is computed again from the residual stream, so that nothing of it is kept when the next one is asked for.
    """
    upstream = by_last
    for number in reversed(range(decoder.config.layers)):
        before = hidden[number]
        x = decoder.read(number, before)
        first = past[number][0].shape[1] if past else 0
        angles = decoder.angles(number, first, x.shape[-2])
        projected = {part: decoder.projected(number, x, part) for part in "qkv"}
        q, k = (decoder.scored(number, projected[part], part, angles) for part in "qk")
        v = projected["v"]
        if past:
            k, v = (
                np.stack([np.concatenate([old, each], axis=1) for each in new])
                for old, new in zip(past[number], (k, v), strict=True)
            )
        seen = [attend(decoder, number, *each) for each in zip(variants, q, k, v, strict=True)]
        ones = np.ones((q.shape[1], 1, 1), q.dtype)
        scales = np.stack([ones if by is None else by[:, None, None].astype(q.dtype) for _, by in seen])
        output = decoder.mixed(number, scales * np.stack([part.output for part, _ in seen]))
        middle = before + decoder.added(number, output, "post_attention_norm")
        upstream = upstream + in_blocks(partial(_through_mlp, decoder, number), middle, upstream)
        by_output = _by_output(decoder, number, "post_attention_norm", output, upstream)
        by_heads = product(by_output, decoder.weights[f"blk.{number}.attn_output.weight"])
        g = scales * split(by_heads, decoder.config.d_k)
        results = [gates.through(part, by) for (part, _), by in zip(seen, g, strict=True)]
        by = {part: np.stack([each[part][:, -x.shape[-2] :] for each, _ in results]) for part in "qkv"}
        upstream = upstream + _through_projections(decoder, number, before, projected, by, angles)
        parts = zip((part for part, _ in seen), g, (gate for _, gate in results), upstream, strict=True)
        yield [LayerBack(*each) for each in parts]


def _by_output(decoder: Decoder, number: int, norm: str, output: Array, upstream: Array) -> Array:
    """The derivative by what attention or the MLP gave, from that by what was added to the residual stream."""
    upstream = upstream if decoder.config.added_scale == 1 else upstream * decoder.config.added_scale
    behind = decoder.norm(f"blk.{number}.{norm}")
    return upstream if behind is None else behind.backward(output, upstream)


def _through_mlp(decoder: Decoder, number: int, middle: Array, upstream: Array) -> Array:
    """The derivative by the residual stream after attention, (tokens, d_model), by way of the MLP."""
    w, name, (value_of, slope_of) = decoder.weights, f"blk.{number}.", ACTIVATIONS[decoder.config.activation]
    gate, up = decoder.inner(number, middle)
    with np.errstate(over="ignore"):
        value, slope = (function(up if gate is None else gate) for function in (value_of, slope_of))
    if f"{name}post_ffw_norm.weight" in w:
        output = decoder.linear(value if gate is None else value * up, name + "ffn_down")
        upstream = _by_output(decoder, number, "post_ffw_norm", output, upstream)
    else:
        upstream = _by_output(decoder, number, "post_ffw_norm", upstream, upstream)
    by_inner = product(upstream, w[name + "ffn_down.weight"])
    if gate is None:
        by_y = product(by_inner * slope, w[name + "ffn_up.weight"])
    else:
        by_y = product(by_inner * value, w[name + "ffn_up.weight"])
        by_y = by_y + product(by_inner * up * slope, w[name + "ffn_gate.weight"])
    norm = decoder.norm(name + "ffn_norm")
    return by_y if norm is None else norm.backward(middle, by_y)


def _through_projections(
    decoder: Decoder,
    number: int,
    before: Array,
    projected: Mapping[str, Array],
    by: Mapping[str, Array],
    angles: Angles,
) -> Array:
    """The derivative by the residual stream before a layer from those by its queries, keys and values."""
    name, w = f"blk.{number}.", decoder.weights
    by_x = product(join(by["v"]), w[name + "attn_v.weight"])
    for part in "qk":
        plain = by[part] if angles is None else turned_back(by[part], angles)
        norm = decoder.norm(f"{name}attn_{part}_norm")
        if norm is not None and len(norm.weight) == decoder.config.d_k:
            plain = norm.backward(projected[part], plain)
        elif norm is not None:
            plain = split(norm.backward(join(projected[part]), join(plain)), decoder.config.d_k)
        by_x = by_x + product(join(plain), w[f"{name}attn_{part}.weight"])
    norm = decoder.norm(name + "attn_norm")
    return by_x if norm is None else norm.backward(before, by_x)
