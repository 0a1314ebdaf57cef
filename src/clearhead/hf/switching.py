"""Sets a model's attention to ours through Transformers' public interface, and back to exactly what it was."""

import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from clearhead.errors import DtypeError, RuleError
from clearhead.hf.attending import NAME, register

Implementations = list[tuple[PretrainedConfig, Any]]

_NAMES = re.compile(r"(Attention|Attn|Mixer|DeltaNet|Retention|RecurrentBlock|ShortConv)(V?\d+D?)?$")
_QUERIES = ("q", "query", "q_proj", "q_lin", "to_q", "wq", "query_proj", "q_a_proj")
_KEYS = ("k", "key", "k_proj", "k_lin", "to_k", "wk", "key_proj")
_VALUES = ("v", "value", "v_proj", "v_lin", "to_v", "wv", "value_proj")
_FUSED = ("qkv", "qkv_proj", "c_attn", "query_key_value", "in_proj_qkv", "in_proj_qkvz", "Wqkv", "key_value", "kv")


def check(model: Any) -> None:
    """Raise DtypeError unless this is a model on one device."""
    if not isinstance(model, nn.Module) or not models(model):
        inside = {"model": getattr(model, "model", None), **getattr(model, "__dict__", {})}.items()
        held = ((name, x) for name, x in inside if isinstance(x, nn.Module) and models(x))
        hint = next((f"ch.watch(….{name}) watches its {type(x).__name__}." for name, x in held), "")
        raise DtypeError(
            f"model is a {type(model).__name__}: expected a Transformers model (PreTrainedModel), or a module with "
            "one.",
            hint,
        )
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise DtypeError(
            f"the model's parameters are on several devices, {', '.join(devices)}: expected one.", "model.to('cpu')"
        )
    if devices and not devices[0].startswith(("cpu", "cuda")):
        raise DtypeError(f"the model is on device {devices[0]}: no engine here runs there.", "model.to('cpu')")


def switch(model: nn.Module) -> Implementations:
    """Set every attention to ours; returns what they were before. Raises RuleError where a model does not allow it."""
    register()
    before = _implementations(model)
    try:
        for part in models(model):
            if part.config._attn_implementation != NAME:
                part.set_attn_implementation(NAME)
        for part in models(model):
            if part.config._attn_implementation != NAME:
                classes = dict.fromkeys(type(module) for module in part.modules() if mixes_tokens(module))
                local = [kind for kind in classes if kind.__module__ == type(part).__module__]
                said = ", ".join(kind.__name__ for kind in local or classes) or "no class called so"
                raise RuleError(
                    f"{type(part).__name__} cannot be watched or changed: its attention ({said}) does not "
                    "go through Transformers' AttentionInterface.",
                    "ch.AttentionMatrix(q, k, …) observes q and k that you take from the model yourself.",
                )
    except BaseException:
        restore(before)
        raise
    return before


def restore(before: Implementations) -> None:
    """Set every config back; outer configs come first, since setting one sets those inside it too."""
    for config, implementation in before:
        config._attn_implementation = implementation


def mixes_tokens(module: nn.Module) -> bool:
    """Is this module attention, or what a hybrid model has in its place?

    It is if the name of its class says so, or if it has projections for two of queries, keys and values, or one
    projection for several of them. Modules without parameters (a kernel inside an attention) do not count.
    """
    children = {name for name, _ in module.named_children()}
    sides = sum(not children.isdisjoint(names) for names in (_QUERIES, _KEYS, _VALUES))
    called_so = _NAMES.search(type(module).__name__) is not None
    result = called_so or sides > 1 or not children.isdisjoint(_FUSED)
    return result and next(module.parameters(), None) is not None


def models(model: nn.Module) -> list[PreTrainedModel]:
    """The Transformers models in `model`, outermost first."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _implementations(model: nn.Module) -> Implementations:
    """Every config of the model and its parts, outermost first, with its implementation."""
    configs: dict[int, tuple[PretrainedConfig, Any]] = {}
    waiting = [part.config for part in models(model)]
    while waiting:
        config = waiting.pop(0)
        if id(config) in configs:
            continue
        configs[id(config)] = (config, config._attn_implementation)
        parts = (getattr(config, key, None) for key in config.sub_configs)
        waiting = [part for part in parts if part is not None] + waiting
    return list(configs.values())
