"""Mistakes of whole layers, as unlisted.py: from x through projections and heads to the output, in plain NumPy."""

from typing import Any

import numpy as np

from benchmarks.unlisted import Array, Case, Code, layer_norm, softmax, swapped


def _split(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _made(c: Case, name: str, *, w: Any = None, b: Any = None) -> Array:
    r = c.rules
    return c.q[:, 0] @ (r[f"w_{name}"] if w is None else w) + (r[f"b_{name}"] if b is None else b)


def _layer(
    c: Case,
    *,
    made: Any = None,
    heads: int = 0,
    scale: float = 0.0,
    change: Any = None,
    joined: Any = None,
    w_o: Any = None,
    b_o: Any = None,
) -> Array:
    """The layer with other projections, heads, scale, heads' outputs, joined heads or output projection."""
    r, heads = c.rules, heads or c.rules["num_heads"]
    made = {"q": _made(c, "q"), "k": _made(c, "k"), "v": _made(c, "v")} | (made or {})
    q, k, v = (_split(made[name], heads) for name in "qkv")
    a = softmax(q @ swapped(k) * np.float32(scale or q.shape[-1] ** -0.5))
    out = a @ v if change is None else change(a, v)
    flat = out.swapaxes(1, 2).reshape(made["v"].shape)
    flat = flat if joined is None else joined(flat)
    return flat @ (r["w_o"] if w_o is None else w_o) + (r["b_o"] if b_o is None else b_o)


def _w(c: Case, name: str) -> Array:
    return np.asarray(c.rules[f"w_{name}"])


def _per_head(c: Case) -> Array:
    """[q | k | v] packed per head, where [Q | K | V] was meant."""
    heads, width = c.rules["num_heads"], _w(c, "q").shape[0]
    packed = np.concatenate([_w(c, name) for name in "qkv"], 1)
    return packed.reshape(width, heads, 3, -1).swapaxes(1, 2).reshape(width, 3, width)


LAYER: dict[str, Code] = {
    "w_q and w_k transposed": lambda c: _layer(c, made={n: _made(c, n, w=_w(c, n).T) for n in "qk"}),
    "w_k and w_v transposed": lambda c: _layer(c, made={n: _made(c, n, w=_w(c, n).T) for n in "kv"}),
    "no biases but the last": lambda c: _layer(c, made={n: _made(c, n, b=0.0) for n in "qkv"}),
    "no biases of q and v": lambda c: _layer(c, made={n: _made(c, n, b=0.0) for n in "qv"}),
    "b_q twice": lambda c: _layer(c, made={"q": _made(c, "q", b=2 * c.rules["b_q"])}),
    "b_v added to q": lambda c: _layer(c, made={"q": _made(c, "q", b=c.rules["b_v"])}),
    "w_q for k": lambda c: _layer(c, made={"k": _made(c, "q")}),
    "w_k for v": lambda c: _layer(c, made={"v": _made(c, "k")}),
    "w_v for k": lambda c: _layer(c, made={"k": _made(c, "v")}),
    "k and v swapped": lambda c: _layer(c, made={"k": _made(c, "v"), "v": _made(c, "k")}),
    "q and v swapped": lambda c: _layer(c, made={"q": _made(c, "v"), "v": _made(c, "q")}),
    "no projection of v": lambda c: _layer(c, made={"v": c.q[:, 0]}),
    "no projections": lambda c: _layer(c, made=dict.fromkeys("qkv", c.q[:, 0])),
    "never split": lambda c: _layer(c, heads=1),
    "half as many heads": lambda c: _layer(c, heads=c.rules["num_heads"] // 2),
    "never split, scale of a head": lambda c: _layer(
        c, heads=1, scale=(_w(c, "q").shape[1] / c.rules["num_heads"]) ** -0.5
    ),
    "scale of the length": lambda c: _layer(c, scale=c.n**-0.5),
    "the first head for all": lambda c: _layer(c, change=lambda a, v: np.broadcast_to((a @ v)[:, :1], v.shape)),
    "mean of the heads": lambda c: _layer(
        c, change=lambda a, v: np.broadcast_to((a @ v).mean(1, keepdims=True), v.shape)
    ),
    "heads reversed": lambda c: _layer(c, change=lambda a, v: (a @ v)[:, ::-1]),
    "one head lost": lambda c: _layer(c, change=lambda a, v: (a @ v) * (np.arange(v.shape[1]) > 0)[:, None, None]),
    "weights of the next head": lambda c: _layer(c, change=lambda a, v: np.roll(a, 1, 1) @ v),
    "the residual": lambda c: _layer(c) + c.q[:, 0],
    "the residual and layer norm": lambda c: layer_norm(_layer(c) + c.q[:, 0]),
    "layer norm first": lambda c: _layer(Case(layer_norm(c.q), c.k, c.v, c.rng, c.rules)),
    "layer norm last": lambda c: layer_norm(_layer(c)),
    "w_o twice": lambda c: _layer(c, w_o=_w(c, "o") @ _w(c, "o")),
    "w_o of the inputs": lambda c: _layer(c, w_o=_w(c, "v")),
    "w_o transposed per head": lambda c: _layer(
        c, w_o=np.concatenate([part.T.reshape(part.shape) for part in np.split(_w(c, "o"), c.rules["num_heads"])])
    ),
    "b_o subtracted": lambda c: _layer(c, b_o=-c.rules["b_o"]),
    "b_o of another": lambda c: _layer(c, b_o=c.rules["b_v"]),
    "packed per head": lambda c: _layer(c, made={n: _made(c, n, w=_per_head(c)[:, i]) for i, n in enumerate("qkv")}),
    "relu on the joined heads": lambda c: _layer(c, joined=lambda x: np.maximum(x, 0)),
    "dropout on the joined heads": lambda c: _layer(c, joined=lambda x: x * (c.rng.random(x.shape) < 0.9) / 0.9),
    "tokens shifted": lambda c: np.roll(_layer(c), 1, 1),
    "one token too few": lambda c: _layer(c, change=lambda a, v: softmax(np.log(a[..., :-1])) @ v[:, :, :-1]),
    "noise of a hundredth": lambda c: _layer(c) * (1 + 0.01 * c.rng.standard_normal(c.q[:, 0].shape)),
    "scaled by heads": lambda c: _layer(c) / c.rules["num_heads"],
    "eight bits for w_q": lambda c: _layer(c, made={"q": _made(c, "q", w=np.round(_w(c, "q") * 40) / 40)}),
}
