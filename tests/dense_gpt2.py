"""A GPT-2 in float64 by dense matrices, whose scores, weights and outputs can be changed by hand; and random ones."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

import clearhead as ch
from clearhead.explaining.functions import ACTIVATIONS

SHIPPED = Path(ch.__file__).parent / "models" / "rhymes"
WORDS = "humpty dumpty sat on a wall and had great fall the king horses men jack jill went up hill little lamb mary"
LONG = "there was an old woman who lived in a shoe she had so many children she did not know what to do"
COLOUR = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}


def softmax(x, axis=-1):
    """Of rows without a key, 0."""
    high = x.max(axis=axis, keepdims=True)
    powers = np.exp(x - np.where(np.isfinite(high), high, 0))
    sums = powers.sum(axis=axis, keepdims=True)
    return powers / np.where(sums > 0, sums, 1)


def dense(model, ids, added=None, weigh=None, factors=None):
    """Logits (tokens, vocabulary), weights (layers, heads, n, n) and the heads' outputs (layers, heads, n, d_k).

    added     (layers, heads, n, n) are added to the scaled scores
    weigh     is given a layer and its weights, and returns those that meet the values
    factors   (layers, heads) multiply the outputs
    """
    w, config, n = {name: x.astype(np.float64) for name, x in model.weights.items()}, model.config, len(ids)
    width = config.d_model // config.heads

    def normal(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.epsilon) * w[f"{name}.weight"] + w[f"{name}.bias"]

    hidden, weights, outputs = w["wte.weight"][ids] + w["wpe.weight"][:n], [], []
    for layer in range(config.layers):
        name = f"h.{layer}"
        x = normal(hidden, f"{name}.ln_1")
        q, k, v = ((x @ w[f"{name}.attn.w_{p}"] + w[f"{name}.attn.b_{p}"]).reshape(n, -1, width) for p in "qkv")
        scale = (width**-0.5 if config.scaled else 1.0) / (layer + 1 if config.scaled_by_layer else 1)
        scores = np.einsum("ihc,jhc->hij", q, k) * scale + (0 if added is None else added[layer])
        a = softmax(np.where(np.tri(n, dtype=bool), scores, -np.inf))
        weights.append(a)
        o = np.einsum("hij,jhc->hic", a if weigh is None else weigh(layer, a.copy()), v)
        outputs.append(o if factors is None else o * factors[layer][:, None, None])
        joined = outputs[-1].swapaxes(0, 1).reshape(n, -1)
        hidden = hidden + joined @ w[f"{name}.attn.c_proj.weight"] + w[f"{name}.attn.c_proj.bias"]
        y = normal(hidden, f"{name}.ln_2") @ w[f"{name}.mlp.c_fc.weight"] + w[f"{name}.mlp.c_fc.bias"]
        y = ACTIVATIONS[config.activation].value(y)
        hidden = hidden + y @ w[f"{name}.mlp.c_proj.weight"] + w[f"{name}.mlp.c_proj.bias"]
    return normal(hidden, "ln_f") @ w["lm_head.weight"].T, np.stack(weights), np.stack(outputs)


def random_peer(place, rng, **options) -> Any:
    """A random GPT-2 of Transformers, saved at the place with the shipped tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(int(rng.integers(1 << 31)))
    sizes = {"vocab_size": 2400, "n_positions": 40, "n_embd": 24, "n_layer": 3, "n_head": 4}
    peer = GPT2LMHeadModel(GPT2Config(**sizes | {"bos_token_id": 0, "eos_token_id": 0} | options)).eval()
    for parameter in peer.parameters():  # biases start at zero, which would hide a mistake
        parameter.data += 0.3 * torch.randn_like(parameter)
    peer.save_pretrained(place)
    shutil.copy(SHIPPED / "tokenizer.json", place)
    return peer
