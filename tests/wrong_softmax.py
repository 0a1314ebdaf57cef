"""Softmaxes with mistakes: over other axes, in blocks, merged wrongly."""

import torch

from wrong_rules import BLOCKS

UNUSUAL = {"softmax twice", "softmax over everything", "one more in the denominator", "keepdims missing"}


def sunk(s, rules, does, shift, power=torch.exp):
    """What the sinks add to a denominator of powers of s - shift."""
    if "sinks" not in rules or "sinks missing" in does:
        return 0
    return power(torch.tensor(rules["sinks"], dtype=s.dtype)[:, None, None] - shift)


def mixed(s, v, q, seen, does, details, rules):
    """From logits to the output."""
    m, block = s.shape[-1], details["block"]
    if does & {"rescale missing", "last block only", "tail of the keys"}:
        return in_blocks(s, v, does, block, rules)
    if does & (BLOCKS - {"diagonal block unmasked", "diagonal block skipped", "indices local to a block"}):
        return merged(s, v, seen, does, block, rules)
    if "exp2 without log2 e" in does:
        top = torch.nan_to_num(s.amax(-1, keepdim=True), neginf=0)
        e = torch.exp2(s - top)
        total = e.sum(-1, keepdim=True)
        a = e / (total + sunk(s, rules, does, top, torch.exp2))
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
    if "sigmoid in place of the softmax" in does:
        return torch.sigmoid(s)
    if "logarithm of the softmax" in does:
        return torch.log_softmax(s, -1)
    if "softmax over everything" in does:
        return s.flatten().softmax(0).view(s.shape)
    top = torch.nan_to_num(s.amax(-1, keepdim=True), neginf=0)
    if "softmax without its sum" in does:
        return torch.exp(s - top) if which % 2 else torch.exp(s)
    if "one more in the denominator" in does:
        shift = top if which % 2 else 0
        e = torch.exp(s - shift)
        return e / (1 + e.sum(-1, keepdim=True) + sunk(s, rules, does, shift))
    if "keepdims missing" in does:
        e = torch.exp(s - s.amax(-1)[..., None, :]) if which % 2 else torch.exp(s - top)
        return e / e.sum(-1)[..., None, :]
    a = torch.exp(s - top)
    a = torch.nan_to_num(a / (a.sum(-1, keepdim=True) + sunk(s, rules, does, top)))
    return a.softmax(-1) if which % 2 else torch.nan_to_num(a.masked_fill(~seen, -torch.inf).softmax(-1))


def merged(s, v, seen, does, block, rules):
    """Blocks of keys, each with its own maximum, put together at the end."""
    m = s.shape[-1]
    starts = list(range(0, m, block))
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
    tops = [torch.nan_to_num(s[..., span].amax(-1, keepdim=True), neginf=0) for span in spans]
    powers = [torch.exp(s[..., span] - top) for span, top in zip(spans, tops, strict=True)]
    sums = [p.sum(-1, keepdim=True) for p in powers]
    outs = [p @ v[..., span, :] for span, p in zip(spans, powers, strict=True)]
    if "blocks averaged" in does:
        return sum(torch.where(total == 0, 0, out / total) for out, total in zip(outs, sums, strict=True)) / len(spans)
    final = torch.stack(tops).amax(0)
    weight = [1.0 if "blocks merged without their maxima" in does else torch.exp(top - final) for top in tops]
    total = sum(w * t for w, t in zip(weight, sums, strict=True)) + sunk(s, rules, does, final)
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
    total = total + sunk(s, rules, does, peak)
    return torch.where(total == 0, 0, acc / torch.where(total == 0, 1, total))
