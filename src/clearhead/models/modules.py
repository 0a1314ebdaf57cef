"""Which modules of a Transformers model attend, and what their projections are: known by their names, or refused."""

from collections.abc import Mapping
from typing import Any

from clearhead.errors import RuleError

_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "Wo", "wo", "o", "linear_out", "attention_out")
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv", "in_proj")
_NAMES = ("{}_proj", "{}_lin", "{}", "linear_{}", "project_{}")  # of q, k, v or of query, key, value
_INPUTS = {name.format(word): f"b_{word[0]}" for word in ("q", "k", "v", "query", "key", "value") for name in _NAMES}


def is_attention(module: Any) -> bool:
    """Does the module attend? Transformers' classes say so in their names."""
    return "Attention" in type(module).__name__


def is_norm(module: Any) -> bool:
    """Is it a layer norm or a root-mean-square norm?"""
    return "norm" in type(module).__name__.lower()


def attention_modules(paths: Mapping[str, Any]) -> list[str]:
    """The paths of the innermost attention modules."""
    return [
        path for path, module in paths.items() if is_attention(module) and not any(map(is_attention, module.children()))
    ]


def output_module(paths: Mapping[str, Any], path: str) -> Any:
    """The module whose output is U: W^O inside the attention module, or beside it as in BERT; else the module."""
    children = dict(paths[path].named_children())
    inside = next((children[name] for name in _OUTPUTS if name in children), None)
    beside = paths.get(path.rpartition(".")[0] + ".output.dense")
    return inside if inside is not None else beside if beside is not None else paths[path]


def projections(paths: Mapping[str, Any], path: str) -> tuple[frozenset[str], str]:
    """Which biases an attention module has, and what is applied to its queries and keys after their projections.

    Raises RuleError where a module's part in q, k, v and the output is not known: its formula could lack a bias.
    """
    module, out = paths[path], output_module(paths, path)
    weights = ((name, child, getattr(child, "weight", None)) for name, child in module.named_children())
    linear = {
        name: child
        for name, child, weight in weights
        if weight is not None and weight.ndim == 2 and "Embedding" not in type(child).__name__
    }
    made = {name: ("b_q", "b_k", "b_v") if name in _FUSED else (_INPUTS.get(name, ""),) for name in linear}
    unknown = [name for name, biases in made.items() if "" in biases and name not in _OUTPUTS]
    lacking = {"b_q", "b_k", "b_v"} - {bias for biases in made.values() for bias in biases}
    if unknown or lacking or out is module:
        parts = ", ".join(linear) or "no projections"
        raise RuleError(
            f"{path} has {parts}, and explain does not know what makes q, k, v and U.",
            "it knows q_proj, k_proj, v_proj, o_proj and their like; ch.watch shows the weights of any model.",
        )
    biased = [name for name, child in linear.items() if getattr(child, "bias", None) is not None]
    biases = {bias for name in biased for bias in made[name] if bias}
    if getattr(out, "bias", None) is not None:
        biases.add("b_o")
    normed = any("norm" in name for name, _ in module.named_children())
    rotated = any("Rotary" in type(each).__name__ for each in paths.values())
    rotated = rotated or bool(getattr(module, "rotary_dim", None))  # by a function and a table, as GPT-J
    through = "norm({})" if normed else "{}"
    return frozenset(biases), f"RoPE({through})" if rotated else through
