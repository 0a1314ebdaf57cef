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
}
SQUARE = {"q and k swapped", "weights transposed", "queries instead of values", "mask transposed", "padding on queries"}
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
NAMES = sorted({*LAYER, *SQUARE, *NEEDS, *SIMPLE})
# mistakes at the same place exclude each other: no code makes both
EXCLUDE = (
    {n for n in NAMES if n.startswith("scale ") or n == "no scale"},
    {
        n
        for n in NAMES
        if n.startswith("softmax ") or n in ("no softmax", "rescale missing", "last block only", "tail of the keys")
    },
    {n for n in NAMES if n.startswith("causal")},
    {n for n in NAMES if n.startswith("padding")},
    {"mask ignored", "mask inverted", "mask transposed"},
    {"mask after softmax", "mask added as 0/1", "mask fills with a finite number", "softcap after mask"},
    {"heads split without the transpose", "heads interleaved"},
    {"heads merged without the transpose", "heads merged interleaved"},
    {"output projection left out", "output projection before joining", "W transposed"},
    {"transpose missing", "q and k swapped"},
    {"keys instead of values", "queries instead of values", "scale of d_v"},
    {"softcap missing", "softcap after mask"},
    {"window missing", "window off by one"},
    {"empty rows are NaN", "empty rows are averaged"},
    {"bias missing", "bias scaled"},
    {"ALiBi missing", "ALiBi added"},
    {"spans missing", "spans transposed", "spans wrapped"},
    {"rotary missing", "rotary pairing", "rotary off by one"},
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
    layer_only = {"keys instead of values", "queries instead of values", "scale of d_v", "transpose missing"}
    if chosen & LAYER and (chosen & layer_only or chosen & SQUARE - {"q and k swapped", "weights transposed"}):
        return False
    blocked = chosen & {"rescale missing", "last block only", "tail of the keys", "tail of the queries"}
    odd = chosen & {"mask after softmax", "weights transposed", "empty rows are NaN", "empty rows are averaged"}
    if len(blocked) > 1 or (blocked and odd):
        return False
    needs = " ".join(NEEDS.get(name, "") for name in names)
    if "uneven" in needs and chosen & (SQUARE | {"transpose missing"}):
        return False
    if "blind" in needs and len(chosen) > 1:
        return False
    return not any(len(chosen & group) > 1 for group in EXCLUDE)


def case(names, rng, dtype=torch.float32):
    """Random inputs that can show these mistakes, and the result of code that makes them."""
    does = set(names)
    needs = set(" ".join(NEEDS.get(name, "") for name in names).split())
    heads = int(rng.choice([2, 3, 4])) if does & LAYER or rng.random() < 0.8 or "heads" in needs else 1
    heads = max(heads, 2) if any("head" in n or n == "scale of d_model" for n in names) else heads
    kv_heads = heads
    if "groups" in needs:
        heads, kv_heads = 4, 2
    d = int(rng.choice([4, 6, 8]))
    n = int(rng.choice([18, 19, 20, 21, 23, 25, 27]))
    m = n if does & SQUARE or does & LAYER or needs & {"causal", "window", "padding"} or rng.random() < 0.5 else n + 5
    m = n + 7 if "uneven" in needs else m
    m += "tail of the keys" in does and m % 16 == 0  # otherwise the last block is not a short one
    d_v = d + 2 if "scale of d_v" in does or (rng.random() < 0.3 and not does & LAYER) else d
    if does & {"keys instead of values", "queries instead of values"}:
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
    if "tail of the queries" in does or "tail of the keys" in does:
        details["block"] = 8 if n % 8 and m % 8 else 16
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
    return Case(inputs, rules, theirs.to(dtype).numpy(), details)


def _rules(needs, rng, n, m, heads):
    rules = {}
    if "causal" in needs or "blind" in needs:
        rules["causal"] = True
        rules["query_offset"] = m - n if "uneven" not in needs or rng.random() < 0.5 else 0
        if "blind" in needs:
            rules["query_offset"] = -3
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
    for name in "qkv":
        w = inputs[f"w_{name}"]
        y = x @ (w.T if "W transposed" in does and name == wrong_one else w)
        if not ("projection bias left out" in does and (name == wrong_one or wrong_one == "k")):
            y = y + inputs[f"b_{name}"]
        made[name] = y
    if "output projection before joining" in does and details["which"] < 2:
        made["v"] = made["v"] @ inputs["w_o"]
    d = width // heads
    split = {name: y.view(batch, n, heads, d).transpose(1, 2) for name, y in made.items()}
    out = attention(split["q"], split["k"], split["v"], does, details, rules)
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


def _turn(x, places, base, pairs):
    d = x.shape[-1]
    out = torch.empty_like(x)
    for i in range(d // 2):
        a, b = (i, i + d // 2) if pairs == "half" else (2 * i, 2 * i + 1)
        angle = (places.double() * base ** (-2 * i / d)).to(x.dtype)
        cos, sin = torch.cos(angle), torch.sin(angle)
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def _resplit(x, does):
    """The result of a wrong split of (batch, tokens, heads·d)."""
    batch, heads, n, d = x.shape
    tokens = x.transpose(1, 2).reshape(batch, n, heads * d)
    if "heads split without the transpose" in does:
        return tokens.reshape(batch, heads, n, d)
    if "heads interleaved" in does:
        return torch.stack([tokens[..., h::heads] for h in range(heads)], dim=1)
    return x


def seen_by(n, m, does, rules, batch, heads):
    """The visibility, bool (batch, heads, n, m), with the mistakes about masks."""
    i, j = torch.arange(n)[:, None], torch.arange(m)[None, :]
    offset = rules.get("query_offset", 0)
    if "causal mask in the other corner" in does:
        offset = 0 if offset else m - n
    seen = torch.ones(batch, heads, n, m, dtype=torch.bool)
    if rules.get("causal") and "causal mask missing" not in does:
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
        seen &= (j >= i + offset - left) & (j <= i + offset + right)
    if "mask" in rules and "mask ignored" not in does:
        mask = torch.tensor(rules["mask"])
        mask = ~mask if "mask inverted" in does else mask.T if "mask transposed" in does else mask
        seen &= mask
    if "kv_lengths" in rules and "padding ignored" not in does:
        lengths = torch.tensor(rules["kv_lengths"])[:, None, None, None]
        inside = j < lengths
        if "padding inverted" in does:
            inside = ~inside
        if "padding on queries" in does:
            inside = i < lengths
        seen &= inside
    if "query_segments" in rules and "segments ignored" not in does:
        own, other = torch.tensor(rules["query_segments"]), torch.tensor(rules["kv_segments"])
        seen &= (own[:, :, None] == other[:, None, :])[:, None]
    if "query_lengths" in rules and "query lengths ignored" not in does:
        seen &= i < torch.tensor(rules["query_lengths"])[:, None, None, None]
    return seen


def attention(q, k, v, does, details, rules):
    """One naive attention; `does` holds the names of the mistakes it makes."""
    q, k, v = (_resplit(x, does) for x in (q, k, v))
    batch, heads, n, d = q.shape
    m, group = k.shape[2], heads // k.shape[1]
    if "rotary" in rules:
        places_q, places_k = torch.arange(n) + rules.get("query_offset", 0), torch.arange(m)
        if "rotary off by one" in does:
            places_q = places_q + 1
        pairs = "neighbours" if "rotary pairing" in does else "half"
        if "rotary missing" not in does:
            q, k = _turn(q, places_q, rules["rotary"], pairs), _turn(k, places_k, rules["rotary"], pairs)
        if "rotary on values" in does and v.shape[-1] % 2 == 0:
            v = _turn(v, places_k, rules["rotary"], pairs)
    if "grouped keys tiled" in does:
        k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
    else:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if "keys instead of values" in does:
        v = k
    if "queries instead of values" in does:
        v = q
    s = scores(q, k, does, rules, heads, d, v.shape[-1])
    seen = seen_by(n, m, does, rules, batch, heads)
    if "softcap after mask" in does:
        s = torch.tanh(s.masked_fill(~seen, -torch.inf) / rules["softcap"]) * rules["softcap"]
    elif "softcap" in rules and "softcap missing" not in does:
        s = rules["softcap"] * torch.tanh(s / rules["softcap"])
    if "bias" in rules and not does & {"bias missing", "bias scaled"}:
        s = s + torch.tensor(rules["bias"], dtype=s.dtype)
    if "alibi_slopes" in rules and "ALiBi missing" not in does:
        far = (torch.arange(n)[:, None] + rules.get("query_offset", 0) - torch.arange(m)).abs()
        slope = torch.tensor(rules["alibi_slopes"], dtype=s.dtype)[:, None, None] * far
        s = s + slope if "ALiBi added" in does else s - slope
    if "spans" in rules and "spans missing" not in does:
        s = s + spanned(does, rules, s)
    if "mask added as 0/1" in does:
        s = s + seen.to(s.dtype)
    elif "mask fills with a finite number" in does:
        s = s.masked_fill(~seen, details["fill"])
    elif not does & {"mask after softmax", "softcap after mask"}:
        s = s.masked_fill(~seen, -torch.inf)
    return mixed(s, v, q, seen, does, details, rules)


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


def scores(q, k, does, rules, heads, d, d_v):
    if "transpose missing" in does:
        s = q @ k
    elif "q and k swapped" in does:
        s = k @ q.transpose(-1, -2)
    else:
        s = q @ k.transpose(-1, -2)
    if "bias scaled" in does:
        s = s + torch.tensor(rules["bias"], dtype=s.dtype)
    if "no scale" in does:
        return s
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
    if "no softmax" in does:
        a = torch.where(torch.isneginf(s), 0, s)
    else:
        dim = -2 if "softmax over queries" in does else 1 if "softmax over heads" in does else -1
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
                total = total + torch.exp(torch.tensor(rules["sinks"], dtype=s.dtype)[:, None, None] - top)
            a = e / total
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
