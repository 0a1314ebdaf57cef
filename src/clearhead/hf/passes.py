"""A model's forward passes, followed by hooks: the tokens of each, and which call of which layer an attention is."""

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch

from clearhead.hf import attending, packed, switching
from clearhead.watching.naming import LayerCall, LayerNames, ModulePath, text_of
from clearhead.watching.pieces import pieces_of
from clearhead.watching.places import Text

Ids = torch.Tensor | None


class Passes:
    """The forward passes of a model inside a block; `ch.watch` and `ch.change` say what is done in them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.paths = {module: path.replace("_orig_mod.", "") for path, module in model.named_modules()}
        self.by_path = {path: module for module, path in self.paths.items()}
        self.root = _root(self.paths)
        self.names = LayerNames(map(self.inner, self.paths.values()), self._children)
        self.entered = False
        self.running: list[Any] = []  # the models that are in their forward pass, outermost first
        self.ran: set[Any] = set()  # attention modules, whether they went through the interface or not
        self.went_through: set[Any] = set()
        self._reads_tokens = True  # until a module of this forward pass has had them
        self._calls: Counter[Any] = Counter()  # how often each module attended in this pass
        self._places: dict[tuple[Any, int], LayerCall] = {}

    def attention(self, module: Any) -> Any:
        """What to do with this call of an attention module, for attending.py."""
        raise NotImplementedError

    def begin_pass(self, named: Mapping[str, Any]) -> None:
        """Note that an outermost forward pass begins, with these keywords."""

    def take_tokens(self, ids: Ids, source: Ids) -> None:
        """Take the ids (batch, length) of a pass's sequences and of its encoder's, or None."""

    def begin_batches(self, manager: Any) -> None:
        """Note that continuous batching begins. Raises RuleError where that is refused."""
        raise NotImplementedError

    @contextmanager
    def followed(self, registry: MutableMapping[Any, Any]) -> Iterator[None]:
        """Inside, every attention of the model is ours and asks `attention`; then the model is as before.

        registry   `watchers` or `changers` of attending.py
        """
        before = switching.switch(self.model)
        eager = {id(config) for config, implementation in before if implementation == "eager"}
        were_eager = {x for x in self.paths if id(getattr(x, "config", None)) in eager} - attending.eager
        with ExitStack() as after:
            after.callback(switching.restore, before)
            packed.beginning.append(self._begin_batches)
            after.callback(packed.beginning.remove, self._begin_batches)
            after.enter_context(torch.compiler.set_stance("force_eager"))
            for module in dict.fromkeys((self.model, *switching.models(self.model))):
                after.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                after.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for module in filter(switching.mixes_tokens, self.paths):
                after.callback(module.register_forward_pre_hook(lambda module, _: self.ran.add(module)).remove)
            attending.eager.update(were_eager)
            after.callback(attending.eager.difference_update, were_eager)
            for module in self.model.modules():
                registry[module] = self.attention
                after.callback(registry.pop, module, None)
            yield

    def in_backward(self, module: Any) -> bool:
        """Is this call of a module within a backward pass, where checkpointing computes a layer again?"""
        self.went_through.add(module)
        return torch._C._current_graph_task_id() != -1

    def call_of(self, module: Any) -> LayerCall:
        """Count and name a call of this attention module."""
        self.went_through.add(module)
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

        A module counts as seen if it, a module inside it or a module around it went through the interface. Of modules
        inside one another the innermost is listed.
        """
        seen = [self.paths[module] for module in self.went_through]
        apart = {
            path: type(module).__name__
            for module, path in self.paths.items()
            if module in self.ran and not any(_within(one, path) or _within(path, one) for one in seen)
        }
        around = {path for path in apart if any(other != path and _within(other, path) for other in apart)}
        return tuple((path, kind) for path, kind in apart.items() if path not in around)

    def _begin_batches(self, manager: Any, model: Any) -> None:
        if model in self.paths:
            self.begin_batches(manager)

    def _enter(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.entered = True
        if not self.running:
            self._calls.clear()
            self._reads_tokens = True
            self.begin_pass(named)
        if self._reads_tokens and (tokens := _inputs(module, args, named)) is not None:
            self._reads_tokens = False
            self._read_tokens(module, tokens)
        self.running.append(module)

    def _leave(self, module: Any, *_: Any) -> None:
        while self.running and self.running.pop() is not module:
            pass

    def _children(self, path: str) -> list[str]:
        stack = self.by_path.get(self.root + path, self.by_path.get(path))
        return [] if stack is None else [name for name, _ in stack.named_children()]

    def _read_tokens(self, module: Any, named: Mapping[str, Any]) -> None:
        """Hand on the ids that an outermost forward pass is called with, if any."""
        ids = _ids(named.get("input_ids"))
        if "decoder_input_ids" in signature(module.forward).parameters:
            self.take_tokens(_ids(named.get("decoder_input_ids")), ids)
        elif ModulePath.of(self.inner(self.paths[module])).stack == "encoder":
            self.take_tokens(None, ids)
        else:
            self.take_tokens(ids, None)


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _ids(x: Any) -> Ids:
    """Token ids (batch, length), or None for anything else."""
    return x if isinstance(x, torch.Tensor) and x.ndim == 2 and not x.is_floating_point() else None


def _inputs(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Mapping[str, Any] | None:
    """What a Transformers model is called with, or a wrapper that takes a text's ids in a dictionary; else None.

    A wrapper may call its model's `forward` itself, and then no hook of the model runs.
    """
    from transformers import PreTrainedModel

    first = args[0] if args else None
    if isinstance(module, PreTrainedModel):
        return {"input_ids": first, **named}
    both = any(isinstance(x, PreTrainedModel) and x.config.is_encoder_decoder for x in module.modules())
    return first if isinstance(first, Mapping) and "input_ids" in first and not both else None


def _root(paths: dict[Any, str]) -> str:
    """What the paths of one Transformers model inside a wrapper begin with; "" where several are side by side."""
    from transformers import PreTrainedModel

    inner = [path for module, path in paths.items() if isinstance(module, PreTrainedModel)]
    first = f"{inner[0]}." if inner and inner[0] else ""
    return first if all(path.startswith(first) for path in inner[1:]) else ""


# ── the texts that a model runs over: where each begins, its length and its words, by stack of layers ──


@dataclass(eq=False)
class RunText:
    """A text while the model runs over it: the forward pass it began in, and the positions of its latest queries."""

    text: Text
    began: int
    queries: range
    sums: dict[Any, dict[int, Any]] = field(default_factory=dict)  # what each layer remembers of it


class Texts:
    """The latest text of each stack of layers. A text begins with its first token, or where the block begins."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._pass = 0
        self._ids: Any = None  # of this pass's sequences, (batch, length)
        self._source: Any = None  # of the latest encoder's
        self._known: dict[tuple[str, str], RunText] = {}  # by stack, and what it is there

    def begin_pass(self) -> None:
        """An outermost forward pass begins."""
        self._pass += 1
        self._ids = None

    def take_tokens(self, ids: Any, source: Any) -> None:
        """The ids that it is given, and those of its encoder; None where there are none."""
        self._ids = ids
        self._source = self._source if source is None else source

    def of(self, path: str, queries: range, keys: range) -> tuple[RunText, Text]:
        """The sequence of a call's queries, and the text of its keys. `path` is that of the attention module."""
        stack, _, cross = ModulePath.of(path)
        begins = queries.start == 0
        if not cross:
            sequence = self._at(stack, "own", queries, keys.stop, begins=begins)
            return sequence, sequence.text
        known = self._known.get((stack, "own"))
        if known is None or len(known.queries) != len(queries):  # they attend to the other sequence only
            known = self._at(path, "queries", queries, queries.stop, begins=begins)
        return known, self._at(stack, "keys", range(0), keys.stop, begins=known.began == self._pass).text

    def start(self, path: str, queries: int) -> int:
        """The position of so many queries of cross-attention: that of the decoder's own in this pass."""
        known = self._known.get((ModulePath.of(path).stack, "own"))
        return known.queries.start if known is not None and len(known.queries) == queries else 0

    def _at(self, stack: str, what: str, queries: range, length: int, *, begins: bool) -> RunText:
        known = self._known.get((stack, what))
        if known is None or (begins and (known.began, known.text.length) != (self._pass, length)):
            known = RunText(self._text(stack, what, length, whole=begins), self._pass, queries)
            self._known[stack, what] = known
        known.queries = queries
        return known

    def _text(self, stack: str, what: str, length: int, *, whole: bool) -> Text:
        if self.tokenizer is None:
            return Text(length)
        side = "source" if what == "keys" else text_of(stack, has_source=self._source is not None)
        if not whole or not side:
            return Text(length, why="the text before the block is not known" if not whole else "this is no text")
        ids = self._source if side == "source" else self._ids
        if ids is None:
            return Text(length, why="the model was not given the ids of its tokens")
        if ids.shape[1] != length:
            return Text(length, why=f"the model was given {ids.shape[1]} ids for {length} positions")
        return Text(length, [pieces_of(row, self.tokenizer.decode) for row in ids.tolist()])
