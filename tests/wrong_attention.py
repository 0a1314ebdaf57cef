"""Attention of given heads with mistakes: caches, tiles, rotary positions, scores, and the softmax and what follows."""

import numpy as np
import torch

from wrong_rules import alibi, seen_by, spanned


def attention(q, k, v, does, details, rules):
    """One naive attention; `does` holds the names of the mistakes it makes."""
    q, k, v = (_resplit(x, does) for x in (q, k, v))
    heads = q.shape[1]
    group = heads // k.shape[1]
    if "k and v swapped" in does:
        k, v = v, k
    if "packed in another order" in does:
        q, k, v = {0: (k, v, q), 1: (v, q, k)}.get(details["which"], (v, k, q))
    if "rotary" in rules:
        q, k, v = rotary(q, k, v, does, details, rules)
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
    return out


def across(q, k, v, does, details, rules):
    """Attention along the wrong axis: code that expects another order of axes."""
    name = "bnhd" if "attention over heads" in does else "nhbd"
    turned = [torch.einsum(f"bhnd->{name}", x) for x in (q, k, v)]
    causal = bool(rules.get("causal")) and details["which"] % 2 == 0
    out = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=causal)
    return torch.einsum(f"{name}->bhnd", out)


def attended(q, k, v, does, details, rules):
    """From queries, keys and values of each head to its output."""
    batch, heads, n, d = q.shape
    m = k.shape[2]
    s = scores(q, k, does, rules, heads, d, v.shape[-1], details)
    seen = seen_by(n, m, does, rules, batch, heads, details)
    if "sinks not as logits" in does:
        rules = {**rules, "sinks": np.exp(rules["sinks"]) if details["which"] % 2 else np.log(rules["sinks"])}
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
        s = s + bias
    if "softcap in another place" in does and not details["which"] % 2:
        s = rules["softcap"] * torch.tanh(s / rules["softcap"])
    if "alibi_slopes" in rules and not does & {"ALiBi missing", "ALiBi before the scale"}:
        slope = alibi(n, m, rules, s.dtype, does, details)
        s = s + slope if "ALiBi added" in does else s - slope
    if "spans" in rules and "spans missing" not in does:
        s = s + spanned(rules, s)
    if "mask added as 0/1" in does:
        s = s + seen.to(s.dtype)
    elif "mask fills with a finite number" in does:
        s = s.masked_fill(~seen, details["fill"])
    elif "mask of the wrong sign" in does:
        s = s.masked_fill(~seen, 1e9)
    elif not does & {"mask after softmax", "softcap after mask"}:
        s = s.masked_fill(~seen, -torch.inf)
    return mixed(s, v, q, seen, does, details, rules)


def scores(q, k, does, rules, heads, d, d_v, details):
    n, m = q.shape[-2], k.shape[-2]
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
    usual = rules.get("scale", d**-0.5)
    scales = {
        "no scale": 1,
        "scale after the softmax": 1,
        "scale of the length": n**-0.5,
        "scale (d_k ** -1) / 2": d**-1 / 2,
        "log2 e with exp": 1.4426950408889634 * usual,
        "scale 1/d_k": 1 / d,
        "scale of d_model": (heads * d) ** -0.5,
        "scale of d_v": d_v**-0.5,
        "scale inverted": 1 / usual,
        "scale ignored": d**-0.5,
    }
    return s * next((scale for name, scale in scales.items() if name in does), usual)


def _turn(x, places, base, pairs):
    d = x.shape[-1]
    out = torch.empty_like(x)
    for i in range(d // 2):
        a, b = (i, i + d // 2) if pairs == "half" else (2 * i, 2 * i + 1)
        angle = (places.double() * base ** (-2 * i / d)).to(x.dtype)
        out[..., a] = x[..., a] * torch.cos(angle) - x[..., b] * torch.sin(angle)
        out[..., b] = x[..., a] * torch.sin(angle) + x[..., b] * torch.cos(angle)
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
    pairs = "neighbours" if "rotary pairing" in does else "half"
    if "rotary missing" in does:
        return q, k, v
    if "rotary twice" in does:
        q, k = _turn(q, places_q, base, pairs), _turn(k, places_k, base, pairs)
    turned_q, turned_k = _turn(q, places_q, base, pairs), _turn(k, places_k, base, pairs)
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


UNUSUAL = {"softmax twice", "softmax over everything", "one more in the denominator", "softmax without its sum"}


def sunk(s, rules, does, shift, power=torch.exp):
    """What the sinks add to a denominator of powers of s - shift."""
    if "sinks" not in rules or "sinks missing" in does:
        return 0
    return power(torch.tensor(rules["sinks"], dtype=s.dtype)[:, None, None] - shift)


def mixed(s, v, q, seen, does, details, rules):
    """From logits to the output."""
    m, block = s.shape[-1], details["block"]
    if "rescale missing" in does:
        return in_blocks(s, v, does, block, rules)
    if "exp2 without log2 e" in does:
        top = torch.nan_to_num(s.amax(-1, keepdim=True), neginf=0)
        e = torch.exp2(s - top)
        total = e.sum(-1, keepdim=True)
        a = e / (total + sunk(s, rules, does, top, torch.exp2))
    elif does & UNUSUAL:
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
            a = e / (total + (sunk(s, rules, does, 0 if "sinks unshifted" in does else top) if dim == -1 else 0))
    if "scale after the softmax" in does:
        a = a * rules.get("scale", q.shape[-1] ** -0.5)
    if "mask after softmax" in does:
        a = a * seen
    if "empty rows are NaN" in does:
        a = torch.where(seen.any(-1, keepdim=True), a, torch.nan)
    elif "empty rows are averaged" in does:
        a = torch.where(seen.any(-1, keepdim=True), a, 1 / m)
    else:
        a = torch.nan_to_num(a)
    if "weights transposed" in does:
        a = a.transpose(-1, -2)
    if "softmax of the mean of the heads" in does:
        a = a.mean(1, keepdim=True).softmax(-1).expand_as(a)
    return a.to(v.dtype) @ v


def unusual(s, seen, does, details, rules):
    """Weights that are no softmax."""
    which = details["which"]
    if "softmax over everything" in does:
        return s.flatten().softmax(0).view(s.shape)
    top = torch.nan_to_num(s.amax(-1, keepdim=True), neginf=0)
    if "softmax without its sum" in does:
        return torch.exp(s - top) if which % 2 else torch.exp(s)
    if "one more in the denominator" in does:
        shift = top if which % 2 else 0
        e = torch.exp(s - shift)
        return e / (1 + e.sum(-1, keepdim=True) + sunk(s, rules, does, shift))
    a = torch.exp(s - top)
    a = torch.nan_to_num(a / (a.sum(-1, keepdim=True) + sunk(s, rules, does, top)))
    return a.softmax(-1) if which % 2 else torch.nan_to_num(a.masked_fill(~seen, -torch.inf).softmax(-1))


def in_blocks(s, v, does, block, rules):
    """An online softmax, block after block of keys, which forgets to rescale."""
    batch, heads, n, m = s.shape
    acc = torch.zeros(batch, heads, n, v.shape[-1], dtype=s.dtype)
    total = torch.zeros(batch, heads, n, 1, dtype=s.dtype)
    peak = torch.full((batch, heads, n, 1), -torch.inf, dtype=s.dtype)
    for start in range(0, m, block):
        part = s[..., start : start + block]
        new = torch.maximum(peak, part.amax(-1, keepdim=True))
        p = torch.exp(part - torch.where(torch.isneginf(new), 0, new))
        acc = acc + p @ v[..., start : start + block, :]  # not times exp(peak - new)
        total = total + p.sum(-1, keepdim=True)
        peak = new
    total = total + sunk(s, rules, does, peak)
    return torch.where(total == 0, 0, acc / torch.where(total == 0, 1, total))
