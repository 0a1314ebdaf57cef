"""Attention with mistakes, as users write it: plain PyTorch with a switch for every mistake.

It shares nothing with the catalogue but the mistakes' names. `case(names, rng)` makes inputs that can show the
mistakes, and the result of such code; `case((), rng)` gives the result of correct code.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

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
BLOCKS = {
    *("diagonal block unmasked", "diagonal block skipped", "indices local to a block", "hidden keys in the sum"),
    *("blocks averaged", "blocks merged without their maxima", "first block missing", "tail overlapping", "stale tile"),
    "NaN from a hidden block",
}
SQUARE = {"q and k swapped", "weights transposed", "queries instead of values", "mask transposed", "padding on queries"}
SQUARE |= {"queries in place of keys", "keys in place of queries", "packed in another order", "attention over heads"}
SQUARE |= {"attention over the batch", "keepdims missing", "padding on both axes", "bias transposed"}
AS_WIDE = {"k and v swapped", "packed in another order", "values in place of keys", "residual included"}
AS_WIDE |= {"keys instead of values", "queries instead of values"}
CACHE = {
    *("newest slot of the cache empty", "newest slot of the cache early", "newest keys twice", "cache of another beam"),
    "old keys ignored",
}
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


def layer(inputs, heads, does, details, rules):
    x = inputs["x"]
    batch, n, width = x.shape
    wrong_one = "qkvo"[details["which"]]
    made = {}
    context = inputs.get("context", x)
    if "context ignored or swapped" in does:
        x, context = (x, x) if details["which"] < 2 else (context, x)
    if "layer norm included" in does and details["which"] == 0:
        x = context = torch.nn.functional.layer_norm(x, x.shape[-1:])
    for name in "qkv":
        w = inputs[f"w_{name}"]
        y = (x if name == "q" else context) @ (w.T if "W transposed" in does and name == wrong_one else w)
        if not ("projection bias left out" in does and (name == wrong_one or wrong_one == "k")):
            y = y + inputs[f"b_{name}"]
        made[name] = y
    if "output projection before joining" in does and details["which"] < 2:
        made["v"] = made["v"] @ inputs["w_o"]
    d = width // heads
    if "packed in another layout" in does:
        made = repacked(made, heads, d, details["which"])
    split = {name: y.view(batch, n, heads, d).transpose(1, 2) for name, y in made.items()}
    if "heads never split" in does:
        split |= {name: made[name][:, None].expand(batch, heads, n, width) for name in "qk"}
        rules = rules if details["which"] % 2 else {**rules, "scale": rules.get("scale", d**-0.5)}
    out = attention(split["q"], split["k"], split["v"], does - {"residual included"}, details, rules)
    out = projected(inputs, made, out, heads, does, details)
    if "residual included" in does or ("layer norm included" in does and details["which"] == 1):
        out = out + inputs["x"]
    if "layer norm included" in does and details["which"]:
        out = torch.nn.functional.layer_norm(out, out.shape[-1:])
    return out


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


def projected(inputs, made, out, heads, does, details):
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
    if "output projection before joining" in does:
        if details["which"] >= 2:
            parts = [out[:, h] @ w_o[h * d : (h + 1) * d, h * d : (h + 1) * d] for h in range(heads)]
            joined = torch.cat(parts, dim=-1)
        return joined + inputs["b_o"]
    joined = joined @ (w_o.T if "W transposed" in does and wrong_one == "o" else w_o)
    return joined if "projection bias left out" in does and wrong_one in "ko" else joined + inputs["b_o"]


def _turn(x, places, base, pairs, mixed=False):
    d = x.shape[-1]
    out = torch.empty_like(x)
    for i in range(d // 2):
        a, b = (i, i + d // 2) if pairs == "half" else (2 * i, 2 * i + 1)
        # the place of an angle that is meant for column a or b: of the other pairing where they are mixed up
        at_a, at_b = (a, b) if pairs != "half" else (2 * a, 2 * (b - d // 2))
        at_a, at_b = (
            (at_a // 2, at_b // 2)
            if not mixed
            else ((a // 2, b // 2) if pairs == "half" else (a % (d // 2), b % (d // 2)))
        )
        angle_a, angle_b = ((places.double() * base ** (-2 * at / d)).to(x.dtype) for at in (at_a, at_b))
        out[..., a] = x[..., a] * torch.cos(angle_a) - x[..., b] * torch.sin(angle_a)
        out[..., b] = x[..., a] * torch.sin(angle_b) + x[..., b] * torch.cos(angle_b)
    return out


def rotary(q, k, v, does, details, rules):
    """Queries and keys turned to their positions, and values too where they should not be."""
    n, m, base, which = q.shape[2], k.shape[2], rules["rotary"], details["which"]
    places_q, places_k = torch.arange(n) + rules.get("query_offset", 0), torch.arange(m)
    if "rotary off by one" in does:
        places_q = places_q + 1
    if "rotary restarted" in does:
        places_q = torch.arange(n)
    if "rotary backwards" in does:
        places_q, places_k = -places_q, -places_k
    if "rotary positions scaled" in does:
        places_q, places_k = (places / details["factor"] for places in (places_q, places_k))
    if "another rotary base" in does:
        base = details["base"]
    pairs = "neighbours" if "rotary pairing" in does else "half"
    if "rotary missing" in does:
        return q, k, v
    mixed = "rotary angles for other pairs" in does
    part = q.shape[-1] // 2 // 2 * 2 if "rotary on a part" in does else q.shape[-1]

    def turn(x, places):
        return torch.cat([_turn(x[..., :part], places, base, pairs, mixed), x[..., part:]], -1)

    turned_q, turned_k = turn(q, places_q), turn(k, places_k)
    if "rotary on one side" in does:
        return (turned_q, k, v) if which % 2 else (q, turned_k, v)
    if "rotary on values" in does and v.shape[-1] % 2 == 0:
        v = _turn(v, places_k, base, pairs)
    return turned_q, turned_k, v


def _resplit(x, does):
    """The result of a wrong split of (batch, tokens, heads·d)."""
    batch, heads, n, d = x.shape
    tokens = x.transpose(1, 2).reshape(batch, n, heads * d)
    if "heads split without the transpose" in does:
        return tokens.reshape(batch, heads, n, d)
    if "heads interleaved" in does:
        return torch.stack([tokens[..., h::heads] for h in range(heads)], dim=1)
    return x


def seen_by(n, m, does, rules, batch, heads, details):
    """The visibility, bool (batch, heads, n, m), with the mistakes about masks."""
    i, j = torch.arange(n)[:, None], torch.arange(m)[None, :]
    offset = rules.get("query_offset", 0)
    if "causal mask in the other corner" in does:
        offset = 0 if offset else m - n
    seen = torch.ones(batch, heads, n, m, dtype=torch.bool)
    if "rules joined by or" in does:
        lengths = torch.tensor(rules["kv_lengths"])[:, None, None, None]
        return seen & ((j <= i + offset) | (j < lengths))
    if does & BLOCKS and rules.get("causal"):
        seen &= block_mask(i + offset, j, does, details)
    elif rules.get("causal") and "causal mask one ahead" in does:
        seen &= j <= i + offset + 1
    elif rules.get("causal") and "causal mask missing" not in does:
        if "causal mask inverted" in does:
            seen &= j > i + offset
        elif "causal mask strict" in does:
            seen &= j < i + offset
        else:
            seen &= j <= i + offset
    if "window" in rules and "window missing" not in does:
        left, right = rules["window"]
        if "window off by one" in does:
            left -= 1
        if "window on both sides" in does:
            right = left
        if "window on the left only" in does:
            right = 0
        if "chunks in place of a window" in does:
            return seen & ((i + offset) // (left + 1) == j // (left + 1))
        seen &= (j >= i + offset - left) & (j <= i + offset + right)
    if "mask" in rules and "mask ignored" not in does:
        mask = torch.tensor(rules["mask"])
        mask = ~mask if "mask inverted" in does else mask.T if "mask transposed" in does else mask
        if "mask tiled over heads" in does:  # (batch, n, m) made (batch·heads, n, m) in the wrong order
            mask = mask[:, 0].repeat(heads, 1, 1).view(batch, heads, n, m)
        seen &= mask
    if "kv_lengths" in rules and "padding ignored" not in does:
        lengths = torch.tensor(rules["kv_lengths"])[:, None, None, None]
        inside = j < lengths
        if "padding inverted" in does:
            inside = ~inside
        if "padding on queries" in does:
            inside = i < lengths
        if "padding on both axes" in does:
            inside = inside & (i < lengths)
        if "padding on the left" in does:
            inside = j >= m - lengths
        if "padding off by one" in does:
            inside = j < lengths + (1 if details["which"] % 2 else -1)
        if "one length for all" in does:
            inside = j < (lengths.min() if details["which"] % 2 else lengths.max())
        if "padding tiled over heads" in does:
            inside = j < lengths[:, 0, 0, 0].repeat(heads).view(batch, heads, 1, 1)
        seen &= inside
    if "query_segments" in rules and "segments ignored" not in does:
        own, other = torch.tensor(rules["query_segments"]), torch.tensor(rules["kv_segments"])
        seen &= (own[:, :, None] == other[:, None, :])[:, None]
    if "query_lengths" in rules and "query lengths ignored" not in does:
        seen &= i < torch.tensor(rules["query_lengths"])[:, None, None, None]
    return seen


def block_mask(i, j, does, details):
    """The causal mask of a kernel over square blocks."""
    block = details["block"]
    if "diagonal block unmasked" in does:
        return j // block <= i // block
    if "diagonal block skipped" in does:
        return j // block < i // block
    if "indices local to a block" in does:
        inside = j % block <= i % block
        return inside & (j // block <= i // block) if details["which"] % 2 else inside
    return j <= i


def attention(q, k, v, does, details, rules):
    """One naive attention; `does` holds the names of the mistakes it makes."""
    q, k, v = (_resplit(x, does) for x in (q, k, v))
    heads, n = q.shape[1:3]
    group = heads // k.shape[1]
    if "k and v swapped" in does:
        k, v = v, k
    if "packed in another order" in does:
        q, k, v = {0: (k, v, q), 1: (v, q, k)}.get(details["which"], (v, k, q))
    if "rotary" in rules:
        q, k, v = rotary(q, k, v, does, details, rules)
    if does & CACHE:
        k, v = cached(k, v, n, does, details)
    if "stale tile" in does:
        k, v = stale(k, v, details)
    if "grouped keys tiled" in does:
        k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
    elif "first key group only" in does:
        k, v = k[:, :1].expand(-1, heads, -1, -1), v[:, :1].expand(-1, heads, -1, -1)
    else:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if "keys instead of values" in does:
        v = k
    if "queries instead of values" in does:
        v = q
    before = q
    if "queries in place of keys" in does:
        k = q
    if "keys in place of queries" in does:
        q = k
    if "values in place of keys" in does:
        k = v
    if does & {"attention over heads", "attention over the batch"}:
        return across(q, k, v, does, details, rules)
    out = attended(q, k, v, does, details, rules)
    if "one head for all" in does:
        out = out[:, :1].expand(-1, heads, -1, -1)
    elif "mean of the heads" in does:
        out = out.mean(1, keepdim=True).expand(-1, heads, -1, -1)
    return out + before if "residual included" in does else out


def across(q, k, v, does, details, rules):
    """Attention along the wrong axis: code that expects another order of axes."""
    name = "bnhd" if "attention over heads" in does else "nhbd"
    turned = [torch.einsum(f"bhnd->{name}", x) for x in (q, k, v)]
    causal = bool(rules.get("causal")) and details["which"] % 2 == 0
    out = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=causal)
    return torch.einsum(f"{name}->bhnd", out)


def cached(k, v, new, does, details):
    """Keys and values as a faulty cache gives them; the last `new` are of this step."""
    k, v = k.clone(), v.clone()
    if "newest slot of the cache empty" in does:
        if details["which"] != 1:
            k[:, :, -new:] = 0
        if details["which"] != 2:
            v[:, :, -new:] = 0
    elif "newest slot of the cache early" in does:
        for x in (k, v):
            x[:, :, -new - 1 : -1] = x[:, :, -new:].clone()
            x[:, :, -1] = 0
    elif "newest keys twice" in does:
        k, v = (torch.cat([x, x[:, :, -new:]], 2) for x in (k, v))
    elif "cache of another beam" in does:
        for x in (k, v):
            x[:, :, :-new] = x[:, :, :-new].flip(0)
    return k, v


def stale(k, v, details):
    """Tiles of keys or values that were not loaded in time."""
    block, m = details["block"], k.shape[2]
    x = (k if details["which"] % 2 else v).clone()
    old = x.clone()
    for start in range(block, m, block):
        source = 0 if details["which"] >= 2 else start - block
        width = min(block, m - start)
        x[:, :, start : start + width] = old[:, :, source : source + width]
    return (x, v) if details["which"] % 2 else (k, x)


def attended(q, k, v, does, details, rules):
    """From queries, keys and values of each head to its output."""
    batch, heads, n, d = q.shape
    m = k.shape[2]
    s = scores(q, k, does, rules, heads, d, v.shape[-1], details)
    seen = seen_by(n, m, does, rules, batch, heads, details)
    if "old keys ignored" in does:
        seen[..., : m - n] = False
    if "newest keys twice" in does:
        seen[..., -n:] = seen[..., -2 * n : -n]
    if "sinks scaled" in does:
        rules = {**rules, "sinks": rules["sinks"] * rules.get("scale", d**-0.5)}
    if "softcap after mask" in does:
        s = torch.tanh(s.masked_fill(~seen, -torch.inf) / rules["softcap"]) * rules["softcap"]
    elif "softcap in another form" in does:
        s = torch.tanh(s / rules["softcap"]) if details["which"] % 2 else s.clamp(-rules["softcap"], rules["softcap"])
    elif "softcap" in rules and not does & {"softcap missing", "softcap in another place"}:
        s = rules["softcap"] * torch.tanh(s / rules["softcap"])
    if "bias" in rules and not does & {"bias missing", "bias scaled"}:
        bias = torch.tensor(rules["bias"], dtype=s.dtype)
        if "bias negated" in does:
            bias = -bias
        if "bias transposed" in does:
            bias = bias.mT
        if "bias of another head" in does:
            bias = bias[:1] if details["which"] % 2 else bias.roll(-1, 0)
        s = s + bias + (bias if "bias twice" in does else 0)
    if "softcap in another place" in does and not details["which"] % 2:
        s = rules["softcap"] * torch.tanh(s / rules["softcap"])
    if "alibi_slopes" in rules and not does & {"ALiBi missing", "ALiBi before the scale"}:
        slope = alibi(n, m, rules, s.dtype, does, details)
        s = s + slope if "ALiBi added" in does else s - slope
    if "spans" in rules and "spans missing" not in does:
        s = s + spanned(does, rules, s)
    if "mask added as 0/1" in does:
        s = s + seen.to(s.dtype)
    elif "mask fills with a finite number" in does:
        s = s.masked_fill(~seen, details["fill"])
    elif "mask of the wrong sign" in does:
        s = s.masked_fill(~seen, 1e9)
    elif not does & {"mask after softmax", "softcap after mask", "hidden keys in the sum"}:
        s = s.masked_fill(~seen, -torch.inf)
    return mixed(s, v, q, seen, does, details, rules)


def alibi(n, m, rules, dtype, does, details=None):
    """What ALiBi subtracts."""
    far = (torch.arange(n)[:, None] + rules.get("query_offset", 0) - torch.arange(m)).abs()
    slopes = torch.tensor(rules["alibi_slopes"], dtype=dtype)
    if "other ALiBi slopes" in does:
        slopes = (slopes.flip(0), slopes[:1].expand(len(slopes)), slopes.roll(-1), slopes**2)[details["which"]]
    if "ALiBi by a factor" in does:
        slopes = slopes * details["number"]
    return slopes[:, None, None] * far


def spanned(does, rules, s):
    """What the table adds to the scores."""
    mine, theirs, table = (torch.tensor(part) for part in rules["spans"])
    if "spans transposed" in does:
        table = table.transpose(-1, -2)
    found = torch.stack([table[:, mine[b]][:, :, theirs[b]] for b in range(len(s))]).to(s.dtype)  # -1 is the last
    if "spans wrapped" in does:
        return found
    labelled = (mine[:, None, :, None] >= 0) & (theirs[:, None, None, :] >= 0)
    return torch.where(labelled, found, 0.0)


def scores(q, k, does, rules, heads, d, d_v, details):
    n, m = q.shape[-2], k.shape[-2]
    if "cosine in place of the product" in does:
        s = torch.nn.functional.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1, eps=0)
        return s if details["which"] % 2 else s * rules.get("scale", d**-0.5)
    if "transpose missing" in does:
        s = q @ k
    elif "q and k swapped" in does:
        s = k @ q.transpose(-1, -2)
    else:
        s = q @ k.transpose(-1, -2)
    if "ALiBi before the scale" in does:
        s = s - alibi(n, m, rules, s.dtype, does)
    if "softcap in another place" in does and details["which"] % 2:
        s = rules["softcap"] * torch.tanh(s / rules["softcap"])
    if "bias scaled" in does:
        s = s + torch.tensor(rules["bias"], dtype=s.dtype)
    if "no scale" in does or "scale after the softmax" in does:
        return s
    if "scale of the length" in does:
        return s / n**0.5
    if "scale of the heads" in does:
        return s / heads**0.5
    if "scale (d_k ** -1) / 2" in does:
        return s * (d**-1 / 2)
    if "log2 e with exp" in does:
        return s * (1.4426950408889634 * rules.get("scale", d**-0.5))
    if "another scale" in does:
        return s * details["number"]
    if "scale 1/d_k" in does:
        return s / d
    if "scale of d_model" in does:
        return s / (heads * d) ** 0.5
    if "scale of d_v" in does:
        return s / d_v**0.5
    if "scale inverted" in does:
        return s * d**0.5 if "scale" not in rules else s / rules["scale"]
    if "scale ignored" in does:
        return s / d**0.5
    return s * rules["scale"] if "scale" in rules else s / d**0.5


def mixed(s, v, q, seen, does, details, rules):
    """From logits to the output."""
    n, m, block = s.shape[-2], s.shape[-1], details["block"]
    if does & {"rescale missing", "last block only", "tail of the keys"}:
        return in_blocks(s, v, does, block, rules)
    if does & (
        BLOCKS - {"diagonal block unmasked", "diagonal block skipped", "indices local to a block", "stale tile"}
    ):
        return merged(s, v, seen, does, block, rules)
    if "exp2 without log2 e" in does:
        top = torch.nan_to_num(s.amax(-1, keepdim=True), neginf=0)
        e = torch.exp2(s - top)
        total = e.sum(-1, keepdim=True)
        if "sinks" in rules and "sinks missing" not in does:
            total = total + torch.exp2(torch.tensor(rules["sinks"], dtype=s.dtype)[:, None, None] - top)
        a = e / total
    elif does & {"sigmoid in place of the softmax", "logarithm of the softmax", "softmax without its sum", *UNUSUAL}:
        a = unusual(s, seen, does, details, rules)
    elif "no softmax" in does:
        a = torch.where(torch.isneginf(s), 0, s)
    else:
        dim = -2 if "softmax over queries" in does else 1 if "softmax over heads" in does else -1
        dim = 0 if "softmax over the batch" in does else dim
        if "softmax over the whole matrix" in does:
            flat = s.flatten(-2)
            a = torch.exp(flat - flat.amax(-1, keepdim=True))
            a = (a / a.sum(-1, keepdim=True)).view(s.shape)
        else:
            top = s.amax(dim, keepdim=True)
            top = torch.where(torch.isneginf(top), 0, top)
            e = torch.exp(s - top)
            total = e.sum(dim, keepdim=True)
            if "sinks" in rules and "sinks missing" not in does and dim == -1:
                sinks = torch.tensor(rules["sinks"], dtype=s.dtype)[:, None, None]
                if "sinks of another head" in does:
                    sinks = sinks[:1] if details["which"] % 2 else sinks.roll(-1, 0)
                total = total + torch.exp(sinks - (0 if "sinks unshifted" in does else top))
            a = e / total
    if "scale after the softmax" in does:
        a = a * rules.get("scale", q.shape[-1] ** -0.5)
    if "mask after softmax" in does:
        a = a * seen
    if "empty rows are NaN" in does:
        a = torch.where(seen.any(-1, keepdim=True), a, torch.nan)
    elif "empty rows are averaged" in does:
        a = torch.where(seen.any(-1, keepdim=True), a, 1 / m)
    elif "softmax over" not in " ".join(does):
        a = torch.nan_to_num(a)
    else:
        a = torch.nan_to_num(a)
    if "weights transposed" in does:
        a = a.transpose(-1, -2)
    out = a.to(v.dtype) @ v
    if "tail of the queries" in does:
        out[:, :, n // block * block :] = (
            0 if details["which"] % 2 else 1e3 * torch.randn_like(out[:, :, n // block * block :])
        )
    return out


UNUSUAL = {"softmax twice", "softmax over everything", "one more in the denominator", "keepdims missing"}


def unusual(s, seen, does, details, rules):
    """Weights that are no softmax."""
    which = details["which"]
    if "sigmoid in place of the softmax" in does:
        return torch.sigmoid(s)
    if "logarithm of the softmax" in does:
        return torch.log_softmax(s, -1)
    if "softmax over everything" in does:
        return s.flatten().softmax(0).view(s.shape)
    top = torch.nan_to_num(s.amax(-1, keepdim=True), neginf=0)
    sinks = torch.tensor(rules["sinks"], dtype=s.dtype)[:, None, None] if "sinks" in rules else None
    sinks = None if "sinks missing" in does else sinks
    if "softmax without its sum" in does:
        return torch.exp(s - top) if which % 2 else torch.exp(s)
    if "one more in the denominator" in does:
        more = 0 if sinks is None else torch.exp(sinks - (top if which % 2 else 0))
        e = torch.exp(s - top) if which % 2 else torch.exp(s)
        return e / (1 + e.sum(-1, keepdim=True) + more)
    if "keepdims missing" in does:
        e = torch.exp(s - s.amax(-1)[..., None, :]) if which % 2 else torch.exp(s - top)
        return e / e.sum(-1)[..., None, :]
    a = torch.exp(s - top)
    a = torch.nan_to_num(a / (a.sum(-1, keepdim=True) + (0 if sinks is None else torch.exp(sinks - top))))
    return a.softmax(-1) if which % 2 else torch.nan_to_num(a.masked_fill(~seen, -torch.inf).softmax(-1))


def merged(s, v, seen, does, block, rules):
    """Blocks of keys, each with its own maximum, put together at the end."""
    n, m = s.shape[-2:]
    starts = list(range(0, m, block))
    if "tail overlapping" in does:
        starts[-1] = m - block
    if "first block missing" in does:
        starts = starts[1:]
    spans = [slice(start, min(start + block, m)) for start in starts]
    if "NaN from a hidden block" in does:
        peak = torch.full((*s.shape[:-1], 1), -torch.inf, dtype=s.dtype)
        acc, total = 0, 0
        for span in spans:
            new = torch.maximum(peak, s[..., span].amax(-1, keepdim=True))
            p, shrink = torch.exp(s[..., span] - new), torch.exp(peak - new)
            acc, total, peak = acc * shrink + p @ v[..., span, :], total * shrink + p.sum(-1, keepdim=True), new
        return acc / total
    if "hidden keys in the sum" in does:
        hidden, s = ~seen, s.masked_fill(torch.arange(m) // block > torch.arange(n)[:, None] // block, -torch.inf)
        top = s.amax(-1, keepdim=True)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        if "sinks" in rules and "sinks missing" not in does:
            total = total + torch.exp(torch.tensor(rules["sinks"], dtype=s.dtype)[:, None, None] - top)
        return p.masked_fill(hidden, 0) @ v / total
    tops = [torch.nan_to_num(s[..., span].amax(-1, keepdim=True), neginf=0) for span in spans]
    powers = [torch.exp(s[..., span] - top) for span, top in zip(spans, tops, strict=True)]
    sums = [p.sum(-1, keepdim=True) for p in powers]
    outs = [p @ v[..., span, :] for span, p in zip(spans, powers, strict=True)]
    if "blocks averaged" in does:
        return sum(torch.where(total == 0, 0, out / total) for out, total in zip(outs, sums, strict=True)) / len(spans)
    final = torch.stack(tops).amax(0)
    if "blocks merged without their maxima" in does:
        weight = [1.0 for _ in tops]
    else:
        weight = [torch.exp(top - final) for top in tops]
    total = sum(w * t for w, t in zip(weight, sums, strict=True))
    if "sinks" in rules and "sinks missing" not in does:
        total = total + torch.exp(torch.tensor(rules["sinks"], dtype=s.dtype)[:, None, None] - final)
    acc = sum(w * out for w, out in zip(weight, outs, strict=True))
    return torch.where(total == 0, 0, acc / torch.where(total == 0, 1, total))


def in_blocks(s, v, does, block, rules):
    """An online softmax, block after block of keys."""
    batch, heads, n, m = s.shape
    acc = torch.zeros(batch, heads, n, v.shape[-1], dtype=s.dtype)
    total = torch.zeros(batch, heads, n, 1, dtype=s.dtype)
    peak = torch.full((batch, heads, n, 1), -torch.inf, dtype=s.dtype)
    end = m // block * block if "tail of the keys" in does else m
    for start in range(0, end, block):
        part = s[..., start : start + block]
        new = torch.maximum(peak, part.amax(-1, keepdim=True))
        p = torch.exp(part - torch.where(torch.isneginf(new), 0, new))
        shrink = torch.where(torch.isneginf(peak), 0, torch.exp(peak - new))
        if "rescale missing" in does:
            shrink = 1.0
        if "last block only" in does:
            dead = torch.isneginf(part).all(-1, keepdim=True)  # a causal kernel skips this block
            acc = torch.where(dead, acc, p @ v[..., start : start + block, :])
            total = torch.where(dead, total, p.sum(-1, keepdim=True))
        else:
            acc = acc * shrink + p @ v[..., start : start + block, :]
            total = total * shrink + p.sum(-1, keepdim=True)
        peak = new
    if "sinks" in rules and "sinks missing" not in does:
        total = total + torch.exp(torch.tensor(rules["sinks"], dtype=s.dtype)[:, None, None] - peak)
    return torch.where(total == 0, 0, acc / torch.where(total == 0, 1, total))
