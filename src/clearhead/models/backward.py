"""Derivatives of a number of a run by every head's output, the residual stream and the embeddings, in reverse mode.

With y a number of the logits, o_i = Σ_j a_ij·v_j a head's output at query i before W^O, and g_i = ∂y/∂o_i, the
matrices of causes of one layer are `A.contributions(v, g)` and `A.cuts(v, g)`. Attention's own derivative comes from an
engine, so that the memory of a layer is O(tokens); what else a layer computed is computed again on the way back.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from clearhead import engines
from clearhead.core.axes import Array
from clearhead.core.problem import describe_whole
from clearhead.core.rules import Rules
from clearhead.core.statistics import Wanted
from clearhead.models.decoder import Decoder, join, split
from clearhead.models.functions import ACTIVATIONS
from clearhead.models.protocol import ForwardPass, LayerRun
from clearhead.models.rope import turned_back
from clearhead.ops import backward


class Back(NamedTuple):
    """Derivatives of one number.

    g          of each layer (heads, tokens, d_v): by A·v, before edits of outputs and before W^O
    outputs    of each layer A·v itself, (heads, tokens, d_v)
    residual   by the residual stream before each layer and after the last, each (tokens, d_model); the first is by the
               embeddings
    """

    g: list[Array]
    outputs: list[Array]
    residual: list[Array]


def of_logits(decoder: Decoder, run: ForwardPass, upstream: Mapping[int, Array]) -> Array:
    """The derivative by the residual stream after the last layer, (tokens, d_model).

    upstream   by position, the derivative by the logits there, (vocabulary,)
    """
    config, hidden = decoder.config, run.hidden[-1]
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
        direction = by_raw[some] @ rows if rows is not None else by_raw @ decoder.weights[decoder.unembedding]
        result[position] = norm.backward(row, direction * config.logit_scale)
    return result


def through(decoder: Decoder, run: ForwardPass, by_last: Array) -> Back:
    """Differentiate through all layers, with the run's edits in force.

    by_last   (tokens, d_model), the derivative by the residual stream after the last layer
    """
    residual = [by_last]
    g: list[Array] = []
    outputs: list[Array] = []
    for number in reversed(range(decoder.config.layers)):
        hidden, ran, upstream = run.hidden[number], run.layers[number], residual[0]
        middle = hidden + decoder.added(number, ran.output, "post_attention_norm")
        upstream = upstream + _through_mlp(decoder, number, middle, upstream)
        by_heads, output, by_hidden = _through_attention(decoder, number, ran, hidden, upstream)
        residual.insert(0, upstream + by_hidden)
        g.insert(0, by_heads)
        outputs.insert(0, output)
    return Back(g, outputs, residual)


def _by_output(decoder: Decoder, number: int, norm: str, output: Array, upstream: Array) -> Array:
    """The derivative by what attention or the MLP gave, from that by what was added to the residual stream."""
    upstream = upstream if decoder.config.added_scale == 1 else upstream * decoder.config.added_scale
    behind = decoder.norm(f"blk.{number}.{norm}")
    return upstream if behind is None else behind.backward(output, upstream)


def _through_mlp(decoder: Decoder, number: int, middle: Array, upstream: Array) -> Array:
    """The derivative by the residual stream after attention, (tokens, d_model), by way of the MLP."""
    w, name, act = decoder.weights, f"blk.{number}.", ACTIVATIONS[decoder.config.activation]
    gate, up = decoder.inner(number, middle)
    with np.errstate(over="ignore"):
        value, slope = act.value(up if gate is None else gate), act.slope(up if gate is None else gate)
    if f"{name}post_ffw_norm.weight" in w:
        output = decoder.linear(value if gate is None else value * up, name + "ffn_down")
        upstream = _by_output(decoder, number, "post_ffw_norm", output, upstream)
    else:
        upstream = _by_output(decoder, number, "post_ffw_norm", upstream, upstream)
    by_inner = upstream @ w[name + "ffn_down.weight"]
    if gate is None:
        by_y = (by_inner * slope) @ w[name + "ffn_up.weight"]
    else:
        by_y = (by_inner * value) @ w[name + "ffn_up.weight"] + (by_inner * up * slope) @ w[name + "ffn_gate.weight"]
    norm = decoder.norm(name + "ffn_norm")
    return by_y if norm is None else norm.backward(middle, by_y)


def _through_attention(
    decoder: Decoder, number: int, ran: LayerRun, hidden: Array, upstream: Array
) -> tuple[Array, Array, Array]:
    """The derivative by a layer's heads, their outputs, and the derivative by the residual stream before the layer."""
    w, name, config = decoder.weights, f"blk.{number}.", decoder.config
    by_output = _by_output(decoder, number, "post_attention_norm", ran.output, upstream)
    g = np.ascontiguousarray(split(by_output @ w[name + "attn_output.weight"], config.d_k))
    if ran.factors is not None:
        g = g * ran.factors[:, None, None].astype(g.dtype)
    output, by_input = of_attention(ran, g)
    angles = decoder.angles(number, 0, len(hidden))
    by_x = join(by_input["v"][0]) @ w[name + "attn_v.weight"]
    for part in "qk":
        turned = by_input[part][0]
        plain = turned if angles is None else turned_back(turned, angles)
        norm = decoder.norm(f"{name}attn_{part}_norm")
        if norm is not None:
            projected = decoder.projected(number, ran.x, part)
            each = len(norm.weight) == config.d_k
            plain = (
                norm.backward(projected, plain)
                if each
                else split(norm.backward(join(projected), join(plain)), config.d_k)
            )
        by_x = by_x + join(plain) @ w[f"{name}attn_{part}.weight"]
    norm = decoder.norm(name + "attn_norm")
    return g, output, by_x if norm is None else norm.backward(hidden, by_x)


def of_attention(ran: LayerRun, g: Array) -> tuple[Array, Mapping[str, Array]]:
    """A·v, (heads, tokens, d_v), and the derivatives by q, k and v, (1, heads, tokens, …), from g, that by A·v."""
    described, values = describe_whole(ran.q, ran.k, ran.v, cast("Rules", ran.rules))
    problem, arrays = described.problem, (described.q, described.k, values)
    engine = engines.get(engines.choose_for("gradients", problem).engine)
    answers = engines.answer(engine, problem, *arrays, Wanted(output=True, logsumexp=True))
    upstream: dict[str, Any] = {"output": np.ascontiguousarray(g)[None]}
    return answers["output"][0], backward.gradients(engine, problem, arrays, answers, upstream)
