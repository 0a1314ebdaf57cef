"""Attention with mistakes, as users write it: plain PyTorch with a switch for every mistake.

It shares nothing with the catalogue but the mistakes' names. `case(names, rng)`
makes inputs that can show the mistakes, and the result of such code; `case((), rng)` gives the result of correct code.
"""

from dataclasses import dataclass

import numpy as np
import torch

from clearhead.diagnosing.mistakes import mistakes
from right_programs import rules_for
from wrong_attention import attention


def layer(inputs, heads, does, details, rules):
    x = inputs["x"]
    batch, n, width = x.shape
    wrong_one = "qkvo"[details["which"]]
    made = {}
    for name in "qkv":
        w = inputs[f"w_{name}"]
        y = x @ (w.T if "W transposed" in does and name == wrong_one else w)
        if not ("projection bias left out" in does and (name == wrong_one or wrong_one == "k")):
            y = y + inputs[f"b_{name}"]
        made[name] = y
    d = width // heads
    if "packed in another layout" in does:
        made = repacked(made, heads, d, details["which"])
    split = {name: y.view(batch, n, heads, d).transpose(1, 2) for name, y in made.items()}
    if "heads never split" in does:
        split |= {name: made[name][:, None].expand(batch, heads, n, width) for name in "qk"}
        rules = rules if details["which"] % 2 else {**rules, "scale": rules.get("scale", d**-0.5)}
    out = attention(split["q"], split["k"], split["v"], does, details, rules)
    return projected(inputs, out, heads, does, details)


def repacked(made, heads, d, which):
    """One wide projection whose columns are taken for those of another layout."""
    batch, n, width = made["q"].shape
    parts = [made[name].view(batch, n, heads, d) for name in "qkv"]
    if which < 2:  # laid out as [Q | K | V]
        wide = torch.cat([part.flatten(2) for part in parts], -1)
        wide = wide.view(batch, n, heads, 3, d) if which else wide.view(batch, n, heads, d, 3).transpose(-1, -2)
        return {name: wide[:, :, :, i].reshape(batch, n, width) for i, name in enumerate("qkv")}
    wide = torch.stack(parts, dim=3 if which == 2 else 4).flatten(2)
    return {name: wide[..., i * width : (i + 1) * width] for i, name in enumerate("qkv")}


def projected(inputs, out, heads, does, details):
    """The heads joined and projected."""
    batch, _, n, d = out.shape
    width, wrong_one = heads * d, "qkvo"[details["which"]]
    if "heads merged without the transpose" in does:
        joined = out.reshape(batch, n, width)
    elif "heads merged interleaved" in does:
        joined = out.permute(0, 2, 3, 1).reshape(batch, n, width)
    else:
        joined = out.transpose(1, 2).reshape(batch, n, width)
    if "output projection left out" in does:
        return joined
    w_o = inputs["w_o"]
    joined = joined @ (w_o.T if "W transposed" in does and wrong_one == "o" else w_o)
    return joined if "projection bias left out" in does and wrong_one in "ko" else joined + inputs["b_o"]


LAYER = {
    *("W transposed", "heads merged interleaved", "heads merged without the transpose", "heads never split"),
    *("output projection left out", "packed in another layout", "projection bias left out"),
}
SQUARE = {"q and k swapped", "weights transposed", "queries instead of values", "mask transposed", "padding on queries"}
SQUARE |= {"queries in place of keys", "keys in place of queries", "packed in another order", "attention over heads"}
SQUARE |= {"attention over the batch", "bias transposed"}

AS_WIDE = {"k and v swapped", "packed in another order", "values in place of keys"}
AS_WIDE |= {"keys instead of values", "queries instead of values"}

NEEDED = {  # what the inputs must have, and the mistakes that need it
    "softcap": ("softcap missing", "softcap in another form"),
    "softcap causal": ("softcap after mask",),
    "bias": ("bias missing", "bias scaled", "bias negated", "bias transposed"),
    "alibi": ("ALiBi missing", "ALiBi added", "ALiBi before the scale", "other ALiBi slopes"),
    "spans": ("spans missing",),
    "scale": ("scale ignored",),
    "groups": ("grouped keys tiled", "first key group only"),
    "rotary": (
        *("rotary missing", "rotary pairing", "rotary off by one", "rotary on values", "rotary backwards"),
        *("rotary on one side", "rotary twice"),
    ),
    "causal": (
        *("causal mask missing", "causal mask inverted", "causal mask strict", "mask after softmax"),
        *("mask added as 0/1", "mask fills with a finite number", "causal mask one ahead", "mask of the wrong sign"),
    ),
    "causal uneven": ("causal mask in the other corner",),
    "mask": ("mask ignored", "mask inverted", "mask transposed"),
    "padding": (
        *("padding ignored", "padding inverted", "padding on queries", "padding on the left", "padding off by one"),
    ),
    "query_lengths": ("query lengths ignored",),
    "segments": ("segments ignored",),
    "window": (
        *("window missing", "window off by one", "window on both sides", "window on the left only"),
        *("window halved", "window open to the right", "window without the query's position"),
    ),
    "sinks": ("sinks missing", "sinks unshifted", "sinks scaled", "sinks not as logits"),
    "blind": ("empty rows are NaN", "empty rows are averaged"),
    "heads": ("softmax of the mean of the heads",),
    "softcap bias": ("softcap in another place",),
    "rotary decode": ("rotary restarted",),
    "masks": ("mask tiled over heads",),
    "causal padding": ("rules joined by or",),
}
NEEDS = {name: need for need, names in NEEDED.items() for name in names}

ELSEWHERE = {  # made in test_mistakes.py
    *("scale twice", "all masks ignored", "a narrow dtype somewhere", "offset below 0 taken for 0"),
}
NAMES = sorted({mistake.name for mistake in mistakes()} - ELSEWHERE)


@dataclass
class Case:
    """Inputs, rules as diagnose takes them, and the result of the code."""

    inputs: dict
    rules: dict
    theirs: np.ndarray


def case(names, rng, dtype=torch.float32, size=0):
    """Random inputs that can show these mistakes, and the result of code that makes them; size 0, 1 or 2."""
    does = set(names)
    needs = set(" ".join(NEEDS.get(name, "") for name in names).split())
    heads = int(rng.choice([2, 3, 4])) if does & LAYER or rng.random() < 0.8 or "heads" in needs else 1
    if any("head" in name or name in ("scale of d_model", "other ALiBi slopes") for name in names):
        heads = max(heads, 2)
    kv_heads = heads
    if "groups" in needs:
        heads, kv_heads = 4, 2
    d = int(rng.choice([[4, 6, 8], [10, 12, 16], [24, 32, 40]][size]))
    n = int(rng.choice([[18, 19, 20, 21, 23, 25, 27], [35, 37, 41, 46], [66, 70, 75, 99]][size]))
    m = n if does & SQUARE or does & LAYER or needs & {"causal", "window", "padding"} or rng.random() < 0.5 else n + 5
    m = n + 7 if "uneven" in needs else m
    if "decode" in needs:
        n, m = (int(rng.choice([1, 2, 3])) if len(does) == 1 else 4), n
    d_v = d + 2 if "scale of d_v" in does or (rng.random() < 0.3 and not does & LAYER) else d
    if does & AS_WIDE:
        d_v = d
    if "transpose missing" in does:
        m = d = d_v = 12
        n = 12 if does & SQUARE or needs & {"causal", "window"} or rng.random() < 0.5 else 15
    rules = rules_for(needs, rng, n, m, heads)
    details = {
        "block": int(rng.choice([4, 8] if size < 2 else [8])),  # 4 is tried where keys are few
        "fill": -1.0 if does & LAYER else float(rng.choice([-1.0, -3.0, -0.5])),
        "which": int(rng.integers(0, 4)),
    }
    if does & LAYER:
        inputs = _layer_inputs(rng, 2, n, heads, d, dtype)
        theirs = layer(inputs, heads, does, details, rules)
        inputs = {name: x.numpy() for name, x in inputs.items()} | {"num_heads": heads}
    else:
        q, k, v = (
            torch.tensor(rng.standard_normal(shape), dtype=dtype)
            for shape in ((2, heads, n, d), (2, kv_heads, m, d), (2, kv_heads, m, d_v))
        )
        q = q * 1.5
        theirs = attention(q, k, v, does, details, rules)
        inputs = {"q": q.numpy(), "k": k.numpy(), "v": v.numpy()}
    return Case(inputs, rules, theirs.to(dtype).numpy())


def _layer_inputs(rng, batch, n, heads, d, dtype):
    width = heads * d
    inputs = {"x": torch.tensor(rng.standard_normal((batch, n, width)), dtype=dtype)}
    for name in ("w_q", "w_k", "w_v", "w_o"):
        inputs[name] = torch.tensor(rng.standard_normal((width, width)) / width**0.5 * 1.3, dtype=dtype)
    for name in ("b_q", "b_k", "b_v", "b_o"):
        inputs[name] = torch.tensor(rng.standard_normal(width), dtype=dtype)
    return inputs
