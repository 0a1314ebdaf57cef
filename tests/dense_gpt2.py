"""A GPT-2 in float64 by dense matrices, whose scores, weights and outputs can be changed by hand; and random ones."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import clearhead as ch
from clearhead.models.decoder import Decoder
from clearhead.models.mlp import ACTIVATIONS
from clearhead.models.weights import Stored, Weights

SHIPPED = Path(ch.__file__).parent / "models" / "rhymes"
WORDS = "humpty dumpty sat on a wall and had great fall the king horses men jack jill went up hill little lamb mary"
LONG = "there was an old woman who lived in a shoe she had so many children she did not know what to do"
PARTS = {  # of a GPT-2's layer, by the names of its checkpoints and of GGUF
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "attn.c_proj": "attn_output", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
COLOUR = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}


def gpt2_weights(model):
    """A GPT-2's weights by the names and in the shapes of its checkpoints, W^Q, W^K and W^V apart."""
    w, last = model.decoder.weights, "token_embd" if model.config.tied else "output"
    made = {"wte.weight": w["token_embd.weight"], "wpe.weight": w["position_embd.weight"]}
    made |= {f"ln_f.{kind}": w[f"output_norm.{kind}"] for kind in ("weight", "bias")}
    for layer in range(model.config.layers):
        for theirs, ours in PARTS.items():
            weight, bias = (w[f"blk.{layer}.{ours}.{kind}"] for kind in ("weight", "bias"))
            made |= dict(zip(_names(layer, theirs), (weight.T, bias), strict=True))
    return made | {"lm_head.weight": w[f"{last}.weight"]}


def _names(layer, part):
    """The names of a part's weight and bias in a checkpoint whose W^Q, W^K and W^V are apart."""
    names = (f"attn.w_{part}", f"attn.b_{part}") if len(part) == 1 else (f"{part}.weight", f"{part}.bias")
    return [f"h.{layer}.{name}" for name in names]


def with_gpt2_weights(model, weights):
    """The same model with other weights, named as `gpt2_weights` names them, in their dtype."""
    dtype = weights["wte.weight"].dtype
    kind = {"float32": "F32", "float64": "F64"}[dtype.name]
    made = {"token_embd.weight": weights["wte.weight"], "position_embd.weight": weights["wpe.weight"]}
    made |= {f"output_norm.{kind}": weights[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    if not model.config.tied:
        made["output.weight"] = weights["lm_head.weight"]
    for layer in range(model.config.layers):
        for theirs, ours in PARTS.items():
            weight, bias = (weights[name] for name in _names(layer, theirs))
            made |= {f"blk.{layer}.{ours}.weight": weight.T, f"blk.{layer}.{ours}.bias": bias}
    stored = {name: Stored(kind, array.shape, np.asarray(array, dtype)) for name, array in made.items()}
    return replace(model, decoder=Decoder(model.config, Weights(stored, dtype.type)))


def in_float64(model):
    """The same model, computing in float64."""
    return with_gpt2_weights(model, {name: x.astype(np.float64) for name, x in gpt2_weights(model).items()})


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
    weights_of = model.weights if isinstance(model, SimpleNamespace) else gpt2_weights(model)
    w, config, n = {name: x.astype(np.float64, copy=False) for name, x in weights_of.items()}, model.config, len(ids)
    width = config.d_model // config.heads

    def normal(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.epsilon) * w[f"{name}.weight"] + w[f"{name}.bias"]

    hidden, weights, outputs = w["wte.weight"][ids] + w["wpe.weight"][:n], [], []
    for layer in range(config.layers):
        name = f"h.{layer}"
        x = normal(hidden, f"{name}.ln_1")
        q, k, v = ((x @ w[f"{name}.attn.w_{p}"] + w[f"{name}.attn.b_{p}"]).reshape(n, -1, width) for p in "qkv")
        scores = np.einsum("ihc,jhc->hij", q, k) * config.scale + (0 if added is None else added[layer])
        a = softmax(np.where(np.tri(n, dtype=bool), scores, -np.inf))
        weights.append(a)
        o = np.einsum("hij,jhc->hic", a if weigh is None else weigh(layer, a.copy()), v)
        outputs.append(o if factors is None else o * factors[layer][:, None, None])
        joined = outputs[-1].swapaxes(0, 1).reshape(n, -1)
        hidden = hidden + joined @ w[f"{name}.attn.c_proj.weight"] + w[f"{name}.attn.c_proj.bias"]
        y = normal(hidden, f"{name}.ln_2") @ w[f"{name}.mlp.c_fc.weight"] + w[f"{name}.mlp.c_fc.bias"]
        y = ACTIVATIONS[config.activation][0](y)
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
