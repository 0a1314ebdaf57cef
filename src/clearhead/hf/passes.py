"""Follows a model's forward passes with hooks: their tokens, and which call of which layer an attention is."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from clearhead.errors import DtypeError, RuleError
from clearhead.hf import attending
from clearhead.hf.attending import NAME, register
from clearhead.watching.naming import LayerCall, LayerNames, ModulePath

Implementations = list[tuple[PretrainedConfig, Any]]

_NAMES = re.compile(r"(Attention|Attn|Mixer|DeltaNet|Retention|RecurrentBlock|ShortConv|MambaLayer)(V?\d+D?)?$")
_QUERIES = ("q", "query", "q_proj", "q_lin", "to_q", "wq", "query_proj", "q_a_proj")
_KEYS = ("k", "key", "k_proj", "k_lin", "to_k", "wk", "key_proj")
_VALUES = ("v", "value", "v_proj", "v_lin", "to_v", "wv", "value_proj")
_FUSED = ("qkv", "qkv_proj", "c_attn", "query_key_value", "in_proj_qkv", "in_proj_qkvz", "Wqkv", "key_value", "kv")
_YOURS = "ch.AttentionMatrix(q, k, …) observes q and k that you take from the model yourself."
_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "Wo", "wo", "o", "linear_out", "attention_out")


def check_model(model: Any) -> None:
    """Raise DtypeError unless this is a Transformers model, or a module with one."""
    if not isinstance(model, nn.Module) or not models(model):
        inside = {"model": getattr(model, "model", None), **getattr(model, "__dict__", {})}.items()
        held = ((name, x) for name, x in inside if isinstance(x, nn.Module) and models(x))
        hint = next((f"ch.watch(….{name}) watches its {type(x).__name__}." for name, x in held), _YOURS)
        hint = f"ch.load_model({model!r}) loads a model by its name." if isinstance(model, str) else hint
        raise DtypeError(
            f"model is a {type(model).__name__}: expected a Transformers model (PreTrainedModel) or a module with one.",
            hint,
        )


def switch(model: nn.Module) -> Implementations:
    """Switch every attention to ours and return the former settings. Raises RuleError if a model does not allow it."""
    register()
    inner = models(model)
    before = _implementations(inner)
    try:
        for part in inner:
            if part.config._attn_implementation != NAME:
                part.set_attn_implementation(NAME)
        for part in inner:
            if part.config._attn_implementation != NAME:
                classes = dict.fromkeys(type(module) for module in part.modules() if mixes_tokens(module))
                local = [kind for kind in classes if kind.__module__ == type(part).__module__]
                said = ", ".join(kind.__name__ for kind in local or classes) or "no class called so"
                raise RuleError(
                    f"{type(part).__name__} cannot be watched or changed: its attention ({said}) does not "
                    "go through Transformers' AttentionInterface.",
                    _YOURS,
                )
    except BaseException:
        restore(before)
        raise
    return before


def restore(before: Implementations) -> None:
    """Restore every config, outer ones first, since setting a config also sets those inside it."""
    for config, implementation in before:
        config._attn_implementation = implementation


def mixes_tokens(module: nn.Module) -> bool:
    """Is this module attention, or the token mixer that a hybrid model has in its place?

    True if its class's name says so, if it has projections for two of queries, keys and values, or one projection for
    several of them. Modules without parameters (a kernel inside an attention) do not count.
    """
    children = {name for name, _ in module.named_children()}
    sides = sum(not children.isdisjoint(names) for names in (_QUERIES, _KEYS, _VALUES))
    called_so = _NAMES.search(type(module).__name__) is not None
    result = called_so or sides > 1 or not children.isdisjoint(_FUSED)
    return result and next(module.parameters(), None) is not None


def output_module(paths: Mapping[str, Any], path: str) -> Any:
    """The module whose output is U: W^O inside the attention module or, as in BERT, next to it; else the module."""
    children = dict(paths[path].named_children())
    inside = next((children[name] for name in _OUTPUTS if name in children), None)
    beside = paths.get(path.rpartition(".")[0] + ".output.dense")
    return inside if inside is not None else beside if beside is not None else paths[path]


def models(model: nn.Module) -> list[PreTrainedModel]:
    """The Transformers models in `model`, outermost first."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _implementations(inner: list[PreTrainedModel]) -> Implementations:
    """Every config of the models and their parts, outermost first, with its implementation."""
    configs: dict[int, tuple[PretrainedConfig, Any]] = {}
    waiting = [part.config for part in inner]
    while waiting:
        config = waiting.pop(0)
        if id(config) in configs:
            continue
        configs[id(config)] = (config, config._attn_implementation)
        parts = (getattr(config, key, None) for key in config.sub_configs)
        waiting = [part for part in parts if part is not None] + waiting
    return list(configs.values())


Ids = torch.Tensor | None


class Passes:
    """Follows a model's forward passes inside a block; the subclasses for `ch.watch` and `ch.change` act in them."""

    registry: MutableMapping[Any, Any]  # `watchers` or `changers` of attending.py
    already: tuple[str, str]  # the error and hint for a model that is in such a block already

    def __init__(self, model: Any) -> None:
        check_model(model)
        self.model = model
        self.paths = {module: path.replace("_orig_mod.", "") for path, module in model.named_modules()}
        if not self.registry.keys().isdisjoint(self.paths):
            raise RuleError(*self.already)
        inner = [path for module, path in self.paths.items() if isinstance(module, PreTrainedModel)]
        first = f"{inner[0]}." if inner and inner[0] else ""  # of the paths of one model inside a wrapper
        self.root = first if all(path.startswith(first) for path in inner[1:]) else ""
        self.names = LayerNames(map(self.inner, self.paths.values()))
        self.entered = False
        self.running: list[Any] = []  # the models that are in their forward pass, outermost first
        self.ran: set[Any] = set()  # attention modules, whether they went through the interface or not
        self.went_through: set[Any] = set()
        self._reads_tokens = True  # until the first module of this forward pass was given its tokens
        self._calls: Counter[Any] = Counter()  # how often each module attended in this pass
        self._places: dict[tuple[Any, int], LayerCall] = {}

    def begin_pass(self, named: Mapping[str, Any]) -> None:
        """Note that an outermost forward pass begins, with these keywords."""

    def take_tokens(self, ids: Ids, source: Ids) -> None:
        """Take the ids (batch, length) of a pass's sequences and of its encoder's, or None."""

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, every attention of the model is ours and calls this object; afterwards the model is restored."""
        before = switch(self.model)
        eager = {id(config) for config, implementation in before if implementation == "eager"}
        were_eager = {x for x in self.paths if id(getattr(x, "config", None)) in eager} - attending.eager
        with ExitStack() as after:
            after.callback(restore, before)
            after.enter_context(torch.compiler.set_stance("force_eager"))
            for module in dict.fromkeys((self.model, *(x for x in self.paths if isinstance(x, PreTrainedModel)))):
                after.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                after.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for module in filter(mixes_tokens, self.paths):
                after.callback(module.register_forward_pre_hook(lambda module, _: self.ran.add(module)).remove)
            attending.eager.update(were_eager)
            after.callback(attending.eager.difference_update, were_eager)
            for module in self.paths:
                self.registry[module] = self
                after.callback(self.registry.pop, module, None)
            yield

    def layer_of(self, module: Any) -> LayerCall:
        """Count and name a call of this attention module."""
        self.went_through.add(module)
        if in_backward():
            return self.place(module)
        if not self.running:
            self._calls.clear()
        self._calls[module] += 1
        return self.place(module, self._calls[module])

    def place(self, module: Any, number: int = 1) -> LayerCall:
        """The layer of this module's call."""
        place = module, number
        if place not in self._places:
            path = self.paths[module]
            inner = self.inner(path)
            first = self.names.name(inner)
            name = first if number == 1 else f"{first}#{number}"
            choices = frozenset({name, path} | self.names.choices(inner))
            self._places[place] = LayerCall(module, number, path, name, choices)
        return self._places[place]

    def inner(self, path: str) -> str:
        """A module's path inside the Transformers model."""
        return path.removeprefix(self.root)

    def unseen(self) -> tuple[tuple[str, str], ...]:
        """(path, class) of each attention that ran without Transformers' interface, in the model's order.

        A module counts as seen if it, a module inside it or a module around it used the interface. Of nested modules,
        only the innermost is listed.
        """
        seen = [self.paths[module] for module in self.went_through]
        apart = {
            path: type(module).__name__
            for module, path in self.paths.items()
            if module in self.ran and not any(_within(one, path) or _within(path, one) for one in seen)
        }
        around = {path for path in apart if any(other != path and _within(other, path) for other in apart)}
        return tuple((path, kind) for path, kind in apart.items() if path not in around)

    def _enter(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.entered = True
        if not self.running:
            self._calls.clear()
            self._reads_tokens = True
            self.begin_pass(named)
        if self._reads_tokens and isinstance(module, PreTrainedModel):
            self._reads_tokens = False
            self._read_tokens(module, {"input_ids": args[0] if args else None, **named})
        self.running.append(module)

    def _leave(self, module: Any, *_: Any) -> None:
        while self.running and self.running.pop() is not module:
            pass

    def _read_tokens(self, module: Any, named: Mapping[str, Any]) -> None:
        """Hand on the ids that an outermost forward pass is called with, if any."""
        ids = _ids(named.get("input_ids"))
        if "decoder_input_ids" in signature(module.forward).parameters:
            self.take_tokens(_ids(named.get("decoder_input_ids")), ids)
        elif ModulePath.of(self.inner(self.paths[module])).stack == "encoder":
            self.take_tokens(None, ids)
        else:
            self.take_tokens(ids, None)


def in_backward() -> bool:
    """Is this within a backward pass, where checkpointing computes a layer again?"""
    return torch._C._current_graph_task_id() != -1


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _ids(x: Any) -> Ids:
    """Token ids (batch, length), or None for anything else."""
    return x if isinstance(x, torch.Tensor) and x.ndim == 2 and not x.is_floating_point() else None
