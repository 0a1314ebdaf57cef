"""Computes a layer's MLP, either dense or a mixture of experts, and its derivative.

Gemma 4's layers have a second MLP, `.input`, whose gate multiplies the layer's embedding of the token, its `up`.

In a mixture, the router's logits r = W·x + b choose `chosen` experts for each token. The output is the sum of their
outputs, each times its share: softmax(r), or, if `shares_sum`, the softmax of the chosen logits. Others do not run.
"""

from collections.abc import Callable
from math import erf, pi, sqrt
from typing import Any

import numpy as np

from clearhead.core.axes import Array, blocks
from clearhead.models.families import CACHED, Config
from clearhead.models.weights import Weights

Inner = list[tuple[Array | None, Array]]  # of a dense MLP what `_inner` returned for each block of rows
_QUICK = 1.702  # x·σ(1.702·x) is close to GELU
_TANH = sqrt(2 / pi), 0.044715  # of GELU's approximation


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(_TANH[0] * (x + _TANH[1] * (x * x * x))))


def _gelu_tanh_slope(x: Array) -> Array:
    t = np.tanh(_TANH[0] * (x + _TANH[1] * (x * x * x)))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _TANH[0] * (1 + 3 * _TANH[1] * (x * x))


def _normal_share(x: Array) -> Array:
    """Return the normal distribution's share below x, in float64."""
    exact = np.frompyfunc(lambda value: 0.5 * (1 + erf(value / sqrt(2))), 1, 1)
    return np.asarray(exact(x.astype(np.float64)), dtype=np.float64)


def _gelu_slope(x: Array) -> Array:
    exact = x.astype(np.float64)
    return (_normal_share(x) + exact * np.exp(-0.5 * exact**2) / sqrt(2 * pi)).astype(x.dtype)


def _silu(x: Array) -> Array:
    y = np.negative(x)  # one array for every step: at thousands of tokens, new ones cost more than the arithmetic
    np.exp(y, out=y)
    y += 1
    return np.divide(x, y, out=y)


def _silu_slope(x: Array) -> Array:
    share = 1 / (1 + np.exp(-x))
    return share * (1 + x * (1 - share))


# Each activation function and its slope; both act element by element.
ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "gelu_new": (_gelu_tanh, _gelu_tanh_slope),
    "gelu_pytorch_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "gelu": (lambda x: (x * _normal_share(x)).astype(x.dtype), _gelu_slope),
    "quick_gelu": (lambda x: _silu(_QUICK * x) / _QUICK, lambda x: _silu_slope(_QUICK * x)),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(x.dtype)),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "silu": (_silu, _silu_slope),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
}


def chosen(weights: Weights, config: Config, number: int, x: Array) -> tuple[Array, Array, Array]:
    """Return each token's experts and their shares, largest first, (tokens, chosen) each, and the shares of all.

    The latter, (tokens, experts), are the softmax of all logits; if `shares_sum`, of the chosen ones, and 0 elsewhere.
    x   (tokens, d_model), the MLP's normed input
    """
    logits = weights.linear(x, f"blk.{number}.ffn_gate_inp")
    experts = np.argsort(-logits, axis=-1, kind="stable")[:, : config.chosen]
    every = np.exp(logits - logits.max(axis=-1, keepdims=True))
    if config.shares_sum:
        some = np.take_along_axis(every, experts, axis=-1)
        every = np.zeros_like(every)
        np.put_along_axis(every, experts, some, axis=-1)
    every /= every.sum(axis=-1, keepdims=True)
    return experts, np.take_along_axis(every, experts, axis=-1), every


def mlp(weights: Weights, config: Config, number: int, x: Array, inner: Inner | None = None) -> Array:
    """Apply a layer's MLP to its normed input, (…, tokens, d_model); a norm may follow. Adds to `inner`, if given."""
    if not config.experts:
        return one(weights, config, number, "", x, inner=inner)
    rows = x.reshape(-1, x.shape[-1])
    experts, shares, _ = chosen(weights, config, number, rows)
    made = np.zeros_like(rows)
    for expert in np.unique(experts):
        some, place = np.nonzero(experts == expert)
        made[some] += shares[some, place, None] * one(weights, config, number, f".{expert}", rows[some])
    return made.reshape(x.shape)


def mlp_back(weights: Weights, config: Config, number: int, x: Array, upstream: Array, inner: Inner) -> Array:
    """Return the derivative by the MLP's normed input, from that by its output; takes the first of `inner`, if any."""
    if not config.experts:
        return one_back(weights, config, number, "", x, upstream, inner.pop(0) if inner else None)[0]
    rows, upstream = x.reshape(-1, x.shape[-1]), upstream.reshape(-1, x.shape[-1])
    experts, shares, every = chosen(weights, config, number, rows)
    by_x, by_shares = np.zeros_like(rows), np.empty_like(shares)
    for expert in np.unique(experts):
        some, place = np.nonzero(experts == expert)
        by_rows, by_shares[some, place] = one_back(weights, config, number, f".{expert}", rows[some], upstream[some])
        by_x[some] += shares[some, place, None] * by_rows
    by_every = np.zeros_like(every)
    np.put_along_axis(by_every, experts, by_shares, axis=-1)
    by_logits = every * (by_every - (every * by_every).sum(axis=-1, keepdims=True))
    by_x += weights.product(by_logits, f"blk.{number}.ffn_gate_inp.weight", back=True)
    return by_x.reshape(x.shape)


def _inner(
    weights: Weights, config: Config, number: int, expert: str, x: Array, up: Array | None
) -> tuple[Array | None, Array]:
    """Return an MLP's gate before its activation, or None, and what the gate multiplies, (…, tokens, d_mlp)."""
    up = weights.linear(x, f"blk.{number}.ffn_up{expert}") if up is None else up + np.zeros_like(x[..., :1])
    return weights.linear(x, f"blk.{number}.ffn_gate{expert}") if config.gated else None, up


def _limited(config: Config, gate: Array, up: Array) -> tuple[Array, Array]:
    """Limit the gate and what it multiplies, if the config has a limit."""
    limit = config.limit
    return (gate, up) if limit is None else (np.minimum(gate, limit), np.clip(up, -limit, limit) + 1)


def one(
    weights: Weights, config: Config, number: int, expert: str, x: Array, up: Any = None, inner: Inner | None = None
) -> Array:
    """Compute a dense MLP, or one expert, such as `.3`; `up` is what the gate multiplies, if no weights make it."""
    act, _ = ACTIVATIONS[config.activation]
    gate, up = _inner(weights, config, number, expert, x, up)
    if inner is not None:
        inner.append((gate, up.copy()))
    with np.errstate(over="ignore"):  # exp of a large number is infinite, and its share 0
        for block in blocks(up.shape[-2], CACHED):
            some = up[..., block, :]
            if gate is None:
                some[...] = act(some)
            else:
                gates, gated = _limited(config, gate[..., block, :], some)
                np.multiply(gated, act(gates), out=some)
    return weights.linear(up, f"blk.{number}.ffn_down{expert}")


def one_back(
    weights: Weights, config: Config, number: int, expert: str, x: Array, upstream: Array, given: Any = None
) -> tuple[Array, Array]:
    """Return the derivative by an MLP's input; and that by `given`, or of an expert, by token, output·upstream."""
    w, name, (value_of, slope_of) = weights, f"blk.{number}.ffn_", ACTIVATIONS[config.activation]
    gate, up = given if isinstance(given, tuple) else _inner(weights, config, number, expert, x, given)
    by_inner = w.product(upstream, f"{name}down{expert}.weight", back=True)
    with np.errstate(over="ignore"):
        gates, gated = (up, up) if gate is None else _limited(config, gate, up)
        value, slope = value_of(gates), slope_of(gates)
    by_value = by_inner if gate is None else by_inner * gated
    along = upstream[..., 0]
    if expert and given is None:
        bias = w.get(f"{name}down{expert}.bias")
        along = (by_value * value).sum(axis=-1) + (0.0 if bias is None else upstream @ bias)
    if gate is None:
        return w.product(by_value * slope, f"{name}up{expert}.weight", back=True), along
    by_gate, by_up = by_value * slope, by_inner * value
    if config.limit is not None:
        by_gate *= gates == gate
        by_up *= gated == up + 1
    by_x = w.product(by_gate, f"{name}gate{expert}.weight", back=True)
    if isinstance(given, np.ndarray):
        return by_x, by_up
    return w.product(by_up, f"{name}up{expert}.weight", back=True) + by_x, along
