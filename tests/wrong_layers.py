"""Layers with mistakes: projections, biases, packed weights, joined heads."""

import torch

from wrong_attention import attention


def layer(inputs, heads, does, details, rules):
    x = inputs["x"]
    batch, n, width = x.shape
    wrong_one = "qkvo"[details["which"]]
    made = {}
    context = inputs.get("context", x)
    if "context ignored or swapped" in does:
        x, context = (x, x) if details["which"] < 2 else (context, x)
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
    return out + inputs["x"] if "residual included" in does else out


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
