"""Attention with mistakes, as users write it: plain PyTorch with a switch for every mistake.

It shares nothing with the catalogue but the mistakes' names. `case(names, rng)` makes inputs that can show the
mistakes, and the result of such code; `case((), rng)` gives the result of correct code.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from wrong_attention import CACHE, attention
from wrong_layers import layer
from wrong_rules import BLOCKS

LAYER = {
    "W transposed",
    "projection bias left out",
    "output projection left out",
    "output projection before joining",
    "heads merged without the transpose",
    "heads merged interleaved",
    "packed in another layout",
    "context ignored or swapped",
    "heads never split",
    "layer norm included",
}

SQUARE = {"q and k swapped", "weights transposed", "queries instead of values", "mask transposed", "padding on queries"}
SQUARE |= {"queries in place of keys", "keys in place of queries", "packed in another order", "attention over heads"}
SQUARE |= {"attention over the batch", "keepdims missing", "padding on both axes", "bias transposed"}

AS_WIDE = {"k and v swapped", "packed in another order", "values in place of keys", "residual included"}
AS_WIDE |= {"keys instead of values", "queries instead of values"}

NEEDS = {
    "softcap missing": "softcap",
    "softcap after mask": "softcap causal",
    "bias missing": "bias",
    "bias scaled": "bias",
    "ALiBi missing": "alibi",
    "ALiBi added": "alibi",
    "spans missing": "spans",
    "spans transposed": "spans",
    "spans wrapped": "spans",
    "scale ignored": "scale",
    "grouped keys tiled": "groups",
    "rotary missing": "rotary",
    "rotary pairing": "rotary",
    "rotary off by one": "rotary",
    "rotary on values": "rotary",
    "causal mask missing": "causal",
    "causal mask inverted": "causal",
    "causal mask strict": "causal",
    "causal mask in the other corner": "causal uneven",
    "mask ignored": "mask",
    "mask inverted": "mask",
    "mask transposed": "mask",
    "padding ignored": "padding",
    "padding inverted": "padding",
    "padding on queries": "padding",
    "query lengths ignored": "query_lengths",
    "segments ignored": "segments",
    "window missing": "window",
    "window off by one": "window",
    "mask after softmax": "causal",
    "mask added as 0/1": "causal",
    "mask fills with a finite number": "causal",
    "sinks missing": "sinks",
    "empty rows are NaN": "blind",
    "empty rows are averaged": "blind",
    "output projection before joining": "heads",
    "bias negated": "bias",
    "bias transposed": "bias",
    "bias twice": "bias",
    "bias of another head": "bias",
    "ALiBi before the scale": "alibi",
    "other ALiBi slopes": "alibi",
    "ALiBi by a factor": "alibi",
    "softcap in another place": "softcap bias",
    "softcap in another form": "softcap",
    "sinks unshifted": "sinks",
    "sinks scaled": "sinks",
    "sinks of another head": "sinks",
    "first key group only": "groups",
    "rotary restarted": "rotary decode",
    "rotary backwards": "rotary",
    "rotary on one side": "rotary",
    "rotary on a part": "rotary",
    "rotary angles for other pairs": "rotary",
    "another rotary base": "rotary",
    "rotary positions scaled": "rotary",
    "causal mask one ahead": "causal",
    "window on both sides": "window",
    "window on the left only": "window",
    "chunks in place of a window": "window",
    "mask tiled over heads": "masks",
    "rules joined by or": "causal padding",
    "mask of the wrong sign": "causal",
    "padding on both axes": "padding",
    "padding on the left": "padding",
    "padding off by one": "padding",
    "one length for all": "padding",
    "padding tiled over heads": "padding",
    "diagonal block unmasked": "causal",
    "diagonal block skipped": "causal",
    "indices local to a block": "causal",
    "hidden keys in the sum": "causal",
    "NaN from a hidden block": "window",
    **dict.fromkeys(CACHE, "decode"),
}

NEW = {
    *("scale of the length", "scale of the heads", "scale (d_k ** -1) / 2", "exp2 without log2 e", "log2 e with exp"),
    *("scale after the softmax", "another scale", "cosine in place of the product", "k and v swapped"),
    *("values in place of keys", "residual included", "one head for all", "mean of the heads", "softmax twice"),
    *("softmax without its sum", "softmax over the batch", "softmax over everything", "one more in the denominator"),
    *("sigmoid in place of the softmax", "logarithm of the softmax", "queries in place of keys"),
    *("keys in place of queries", "packed in another order", "attention over heads", "attention over the batch"),
    *("keepdims missing", "packed in another layout", "context ignored or swapped", "heads never split"),
    *("layer norm included", "bias negated", "bias transposed", "bias twice", "bias of another head"),
    *("ALiBi before the scale", "other ALiBi slopes", "ALiBi by a factor", "softcap in another place"),
    *("softcap in another form", "sinks unshifted", "sinks scaled", "sinks of another head", "first key group only"),
    *("rotary restarted", "rotary backwards", "rotary on one side", "rotary on a part", "another rotary base"),
    *("rotary angles for other pairs", "rotary positions scaled", "causal mask one ahead", "window on both sides"),
    *("window on the left only", "chunks in place of a window", "mask tiled over heads", "rules joined by or"),
    *("mask of the wrong sign", "padding on both axes", "padding on the left", "padding off by one"),
    *("one length for all", "padding tiled over heads"),
} | BLOCKS | CACHE  # fmt: skip

# these are made alone, or beside a mistake that is not among them
SELDOM = NEW | {"rescale missing", "last block only", "tail of the keys", "tail of the queries"}

LONE = {
    *("another scale", "ALiBi by a factor", "another rotary base", "rotary positions scaled", "rules joined by or"),
    *("attention over heads", "attention over the batch", "mask of the wrong sign", "NaN from a hidden block"),
    *("context ignored or swapped", "layer norm included", "softmax over everything", "rotary restarted"),
}

SIMPLE = (
    *("transpose missing", "no scale", "scale 1/d_k", "scale of d_model", "scale of d_v", "scale inverted"),
    *(
        "heads split without the transpose",
        "heads interleaved",
        "softmax over queries",
        "softmax over the whole matrix",
    ),
    *("softmax over heads", "no softmax", "keys instead of values", "rescale missing", "last block only"),
    *("tail of the keys", "tail of the queries"),
)

NAMES = sorted({*LAYER, *SQUARE, *NEEDS, *SIMPLE, *NEW})

# mistakes at the same place exclude each other: no code makes both
EXCLUDE = (
    {n for n in NAMES if n.startswith("scale ") or n in ("no scale", "log2 e with exp", "heads never split")}
    | {"cosine in place of the product", "exp2 without log2 e"},
    {
        n
        for n in NAMES
        if n.startswith(("softmax ", "sigmoid", "logarithm"))
        or n in ("no softmax", "rescale missing", "last block only", "tail of the keys", "keepdims missing")
        or n in ("one more in the denominator", "exp2 without log2 e")
        or n in BLOCKS
    },
    {n for n in NAMES if n.startswith("causal")} | BLOCKS,
    {n for n in NAMES if n.startswith("padding")} | {"one length for all"},
    {"mask ignored", "mask inverted", "mask transposed", "mask tiled over heads"},
    {
        "hidden keys in the sum",
        "mask after softmax",
        "mask added as 0/1",
        "mask fills with a finite number",
        "softcap after mask",
    },
    {"heads split without the transpose", "heads interleaved", "heads never split", "packed in another layout"},
    {"heads merged without the transpose", "heads merged interleaved"},
    {"output projection left out", "output projection before joining", "W transposed"},
    {
        *("transpose missing", "q and k swapped", "cosine in place of the product", "heads never split"),
        *("queries in place of keys", "keys in place of queries", "values in place of keys", "packed in another order"),
        "k and v swapped",
    },
    {"keys instead of values", "queries instead of values", "scale of d_v", *AS_WIDE},
    {n for n in NAMES if n.startswith("softcap")},
    {n for n in NAMES if "window" in n},
    {n for n in NAMES if n.startswith("sinks")},
    {"grouped keys tiled", "first key group only"},
    {"empty rows are NaN", "empty rows are averaged"},
    {n for n in NAMES if n.startswith("bias")} | {"softcap in another place"},
    {n for n in NAMES if "ALiBi" in n},
    {"spans missing", "spans transposed", "spans wrapped"},
    {n for n in NAMES if "rotary" in n},
    {"q and k swapped", "rotary on one side", "rotary off by one"},
)


@dataclass
class Case:
    """Inputs, rules as diagnose takes them, the result of the code, and the details of its mistakes."""

    inputs: dict
    rules: dict
    theirs: np.ndarray
    details: dict = field(default_factory=dict)


def compatible(names):
    chosen = set(names)
    if len(chosen) > 1 and (chosen <= SELDOM or chosen & LONE):
        return False
    layer_only = {"keys instead of values", "queries instead of values", "scale of d_v", "transpose missing"}
    if chosen & LAYER and (chosen & layer_only or chosen & SQUARE - {"q and k swapped", "weights transposed"}):
        return False
    if chosen & LAYER and chosen & {"grouped keys tiled", "first key group only"}:  # these layers have no groups
        return False
    if chosen & CACHE and (chosen & SQUARE or chosen & LAYER or "causal" in " ".join(chosen) or "padd" in str(chosen)):
        return False
    if "logarithm of the softmax" in chosen and {*" ".join(NEEDS.get(n, "") for n in names).split()} - {"groups"}:
        return False
    if any("in place of" in n or "sinks" in n for n in chosen) and chosen & {"transpose missing", "grouped keys tiled"}:
        return False
    blocked = chosen & ({"rescale missing", "last block only", "tail of the keys", "tail of the queries"} | BLOCKS)
    odd = chosen & {"mask after softmax", "weights transposed", "empty rows are NaN", "empty rows are averaged"}
    if len(blocked) > 1 or (blocked and odd):
        return False
    needs = " ".join(NEEDS.get(name, "") for name in names)
    if "uneven" in needs and chosen & (SQUARE | {"transpose missing"}):
        return False
    if "blind" in needs and len(chosen) > 1:
        return False
    return not any(len(chosen & group) > 1 for group in EXCLUDE)


def case(names, rng, dtype=torch.float32, size=0):
    """Random inputs that can show these mistakes, and the result of code that makes them; size 0, 1 or 2."""
    does = set(names)
    needs = set(" ".join(NEEDS.get(name, "") for name in names).split())
    heads = int(rng.choice([2, 3, 4])) if does & LAYER or rng.random() < 0.8 or "heads" in needs else 1
    heads = (
        max(heads, 2) if any("head" in n or n in ("scale of d_model", "other ALiBi slopes") for n in names) else heads
    )
    kv_heads = heads
    if "groups" in needs:
        heads, kv_heads = 4, 2
    d = int(rng.choice([[4, 6, 8], [10, 12, 16], [24, 32, 40]][size]))
    d = 6 if "scale of the heads" in does and d == heads else d  # else it is the right scale
    n = int(rng.choice([[18, 19, 20, 21, 23, 25, 27], [35, 37, 41, 46], [66, 70, 75, 99]][size]))
    n = n + 9 if "NaN from a hidden block" in does else n
    m = n if does & SQUARE or does & LAYER or needs & {"causal", "window", "padding"} or rng.random() < 0.5 else n + 5
    m = n + 7 if "uneven" in needs else m
    if "decode" in needs:
        n, m = (int(rng.choice([1, 2, 3])) if len(does) == 1 else 4), n
    m += (
        bool(does & {"tail of the keys", "tail overlapping"}) and m % 16 == 0
    )  # otherwise the last block is not a short one
    d_v = d + 2 if "scale of d_v" in does or (rng.random() < 0.3 and not does & LAYER) else d
    if does & AS_WIDE:
        d_v = d
    if "transpose missing" in does:
        m = d = d_v = 12
        n = 12 if does & SQUARE or needs & {"causal", "window"} or rng.random() < 0.5 else 15
    rules = _rules(needs, rng, n, m, heads)
    details = {
        "block": int(rng.choice([4, 8])),
        "fill": -1.0 if does & LAYER else float(rng.choice([-1.0, -3.0, -0.5])),
    }
    details["which"] = int(rng.integers(0, 4))
    details["number"] = float(rng.choice([0.07, 0.13, 0.41, 1.7]))
    details["factor"] = float(rng.choice([0.5, 2, 4, 8]))
    details["base"] = float(rng.choice([1000.0, 10000.0, 500000.0]))
    if "tail of the queries" in does or "tail of the keys" in does:
        details["block"] = 8 if n % 8 and m % 8 else 16
    if does & BLOCKS:
        details["block"] = 16 if len(does) > 1 or rng.random() < 0.5 else int(rng.choice([4, 8] if size == 0 else [8]))
    if "NaN from a hidden block" in does or ("tail overlapping" in does and m % details["block"] == 0):
        details["block"] = 16
    if does & LAYER or ("residual included" in does and len(does) == 1 and rng.random() < 0.5):
        inputs = _layer_inputs(rng, 2, n, heads, d, dtype)
        if "context ignored or swapped" in does:
            inputs["context"] = torch.tensor(rng.standard_normal(inputs["x"].shape), dtype=dtype)
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
    return Case(inputs, rules, theirs.to(dtype).numpy(), details)


def _rules(needs, rng, n, m, heads):
    rules = {}
    if "causal" in needs or "blind" in needs:
        rules["causal"] = True
        rules["query_offset"] = m - n if "uneven" not in needs or rng.random() < 0.5 else 0
        if "blind" in needs:
            rules["query_offset"] = -3
    if "decode" in needs:
        rules["causal"], rules["query_offset"] = True, m - n
    if "masks" in needs:
        rules["mask"] = rng.random((2, 1, n, m)) < 0.6
        rules["mask"][..., 0] = True
    if "softcap" in needs:
        rules["softcap"] = 1.5
    if "bias" in needs:
        rules["bias"] = rng.standard_normal((heads, n, m)).astype(np.float32)
    if "alibi" in needs:
        rules["alibi_slopes"] = 0.3 / np.arange(1, heads + 1)
    if "spans" in needs:
        table = rng.standard_normal((heads, 4, 4)).astype(np.float32) * 2
        table[:, 1, 2] = -np.inf
        rules["spans"] = rng.integers(-1, 4, (2, n)), rng.integers(-1, 4, (2, m)), table
    if "scale" in needs:
        rules["scale"] = 0.31
    if "rotary" in needs:
        rules["rotary"] = 100.0
    if "mask" in needs:
        rules["mask"] = rng.random((n, m)) < 0.6
        rules["mask"][:, 0] = True
        rules["mask"][np.arange(min(n, m)), np.arange(min(n, m))] = True
    if "padding" in needs:
        rules["kv_lengths"] = np.array([m - 6, m - 3])
    if "query_lengths" in needs:
        rules["query_lengths"] = np.array([n - 6, n])
    if "segments" in needs:
        rules["query_segments"] = (np.arange(n) >= n // 2).astype(int)[None].repeat(2, 0)
        rules["kv_segments"] = (np.arange(m) >= m // 2).astype(int)[None].repeat(2, 0)
    if "window" in needs:
        rules["window"] = (4, 3)
        rules["query_offset"] = m - n
    if "sinks" in needs:
        rules["sinks"] = np.linspace(0.5, 1.5, heads)
    return rules


def _layer_inputs(rng, batch, n, heads, d, dtype):
    width = heads * d
    inputs = {"x": torch.tensor(rng.standard_normal((batch, n, width)), dtype=dtype)}
    for name in ("w_q", "w_k", "w_v", "w_o"):
        inputs[name] = torch.tensor(rng.standard_normal((width, width)) / width**0.5 * 1.3, dtype=dtype)
    for name in ("b_q", "b_k", "b_v", "b_o"):
        inputs[name] = torch.tensor(rng.standard_normal(width), dtype=dtype)
    return inputs
