"""`ch.watch`: a model's attention observed while it runs inside a block."""

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from clearhead.core.observations import check_asked
from clearhead.core.rule_values import read_members
from clearhead.core.statistics import Watched, explained
from clearhead.errors import DtypeError, MissingExtraError, RuleError, SelectionError, shown
from clearhead.watching.naming import LayerNames, ModulePath
from clearhead.watching.seen import LAYERS, Seen

if TYPE_CHECKING:
    from clearhead.watching.recording import Recording


@explained(Watched.__annotations__)
@contextmanager
def watch(
    model: Any,
    *,
    layers: Collection[int | str] | None = None,
    heads: Collection[int] | None = None,
    keep: bool = True,
    values: bool = False,
    tokenizer: Any = None,
    **statistics: Unpack[Watched],
) -> Iterator[Seen]:
    """Observe every attention of a Transformers model while it runs inside the block; then it is as it was before.

    model      any Transformers model whose attention goes through its AttentionInterface, or a module that holds one;
               any float dtype, CPU or GPU
    statistics as in `AttentionMatrix.observe`; logsumexp always is observed:

        STATISTICS

    layers     which layers to observe, by number (negative ones count from each stack's end) or name; None is all.
               The others cost what attention costs.
    heads      which heads to keep, in every layer; None is all
    keep       keep queries and keys as well, O(tokens), so that `seen.matrix(layer)` has every weight
    values     keep values as well: `seen.layer(i).v`, for what each key brings to the output
    tokenizer  makes texts of the ids in `seen.tokens`; anything with decode(list of ids)

    Gives a Seen: `seen[layer]` is an Observation, `seen.matrix(layer)` an AttentionMatrix, both (batch, heads, queries,
    …). A block holds one sequence, or one batch of them: the steps of `model.generate` follow one another along the
    queries. The model computes what it computed before, but for rounding; queries that see only padding get 0, where
    eager attention takes the mean of everything. In training mode dropout acts on the output as before, and the
    weights are observed before dropout. Masks stay rules (causal, window, padding, segments); `seen.layer(i).note` says
    where a model's own mask has to be stored, queries × keys.
    A module that attends several times in one forward pass (layers that share their weights, images or windows one
    after the other) is a layer for each time: "0", "0#2", "0#3". Compiled models run uncompiled inside the block.
    Merged attention (T5Gemma2: a decoder's keys and an encoder's in one softmax) is one layer whose last
    `seen.layer(i).other_keys` keys are the encoder's, however many steps the decoder went.
    Attention that does not go through the interface is not seen: the model's numbers are right all the same,
    `seen.unseen` lists it, and a UserWarning says so when the block ends.
    Time is that of attention without watching, O(queries·keys·d_k) for each head, and one more such pass where
    received, peak or image is observed. Memory is O(queries + keys) for each layer and head, and with keep or values
    that of the queries and keys, or of the values; never O(queries·keys), unless a note says so.
    Raises MissingExtraError without PyTorch and Transformers, UnknownNameError for a statistic that there is not,
    SelectionError for layers or heads that do not exist,
    DtypeError for a model or tokenizer that cannot be used, RuleError where the model's attention cannot be watched, or
    a second sequence begins.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.watch(model, received=True) as seen:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> seen.tokens, round(float(seen[0].received.sum()))
    ([[1, 2, 3, 4]], 8)
    """
    try:
        from clearhead.watching import switching
    except ImportError as error:
        raise MissingExtraError(
            f"watch needs PyTorch and Transformers: {error}.", "pip install 'clearhead[hf]'"
        ) from error
    known = Watched.__annotations__
    asked = {"logsumexp": True} | check_asked({**statistics}, known, ("layers", "heads", "keep", "values", "tokenizer"))
    _check_options(keep=keep, values=values, tokenizer=tokenizer)
    layers = None if layers is None else read_members("layers", layers, *LAYERS)
    chosen = None if heads is None else _heads(heads)
    switching.check(model)
    watching = _Watching(model, asked, layers, chosen, keep=keep, values=values, tokenizer=tokenizer)
    with _looking_on(model, watching):
        yield watching.seen
    if watching.seen.unseen:
        warnings.warn(watching.seen.told_unseen(), stacklevel=3)


@contextmanager
def _looking_on(model: Any, watching: "_Watching") -> Iterator[None]:
    """Inside, every attention of the model is ours and reports to `watching`; afterwards the model is as before."""
    import torch

    from clearhead.watching import switching
    from clearhead.watching.attending import watchers

    before = switching.switch(model)
    watching.implementations = {id(config): implementation for config, implementation in before}
    with ExitStack() as after:
        after.callback(watching.finish)
        after.callback(switching.restore, before)
        after.enter_context(torch.compiler.set_stance("force_eager"))
        for hook in watching.hooks(switching.models(model)):
            after.callback(hook.remove)
        for module in model.modules():
            watchers[module] = watching.attention
            after.callback(watchers.pop, module, None)
        yield
        watching.check_chosen()


class _Watching:
    """The state of one block: which layers ran, their recordings, and the tokens."""

    def __init__(
        self,
        model: Any,
        asked: dict[str, Any],
        layers: Collection[int | str] | None,
        heads: list[int] | None,
        *,
        keep: bool,
        values: bool,
        tokenizer: Any,
    ) -> None:
        self.asked, self.layers, self.keep, self.values, self.tokenizer = asked, layers, keep, values, tokenizer
        self.heads = heads
        self.model = model
        self.paths = {module: path.replace("_orig_mod.", "") for path, module in model.named_modules()}
        self.by_path = {path: module for module, path in self.paths.items()}
        self.root = _root(self.paths)
        self.names = LayerNames(map(self._inner, self.paths.values()), self._children)
        self.implementations: dict[int, Any] = {}  # what each config's attention was before, by id(config)
        self.recordings: dict[tuple[Any, int], Recording | None] = {}
        self.found: set[int | str] = set()  # which of `layers` ran
        self.entered = False
        self.reads_tokens = True  # until a module of this forward pass has had them
        self.running: list[Any] = []  # the models that are in their forward pass, outermost first
        self.calls: Counter[Any] = Counter()  # how often each module attended in this pass
        self.ran: set[Any] = set()  # attention modules, whether they went through the interface or not
        self.went_through: set[Any] = set()
        self.parts: dict[str, Recording] = {}
        self.seen = Seen(self.parts, model=type(model).__name__)

    def hooks(self, models: Iterable[Any]) -> Iterator[Any]:
        """Hooks that say when a forward pass begins and ends, and which attention modules run in it."""
        from clearhead.watching.unseen import mixes_tokens

        for module in dict.fromkeys((self.model, *models)):
            yield module.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield module.register_forward_hook(self._leave, always_call=True)
        for module in self.paths:
            if mixes_tokens(module):
                yield module.register_forward_pre_hook(lambda module, _: self.ran.add(module))

    def _enter(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.entered = True
        if not self.running:
            self.calls.clear()
            self.reads_tokens = True
        if self.reads_tokens and (given := _inputs(module, args, named)) is not None:
            self.reads_tokens = False
            self._read_tokens(module, given)
        self.running.append(module)

    def _leave(self, module: Any, *_: Any) -> None:
        while self.running and self.running.pop() is not module:
            pass

    def attention(self, module: Any) -> "tuple[Recording | None, dict[str, Any], bool]":
        """The recording of this call's layer, what to observe, and whether the layer's attention was eager before.

        None instead of a recording where the layer was not chosen.
        """
        import torch

        self.went_through.add(module)
        was_eager = self.implementations.get(id(getattr(module, "config", None))) == "eager"
        if torch._C._current_graph_task_id() != -1:  # in a backward pass, where checkpointing computes a layer again
            return None, {}, was_eager
        if not self.running:
            self.calls.clear()
        self.calls[module] += 1
        place = module, self.calls[module]
        if place not in self.recordings:
            self.recordings[place] = self._recording(*place)
        recording = self.recordings[place]
        if recording is None:
            return None, {}, was_eager
        self.parts[recording.name] = recording
        return recording, self.asked if not recording.calls else {**self.asked, "image": None}, was_eager

    def _recording(self, module: Any, call: int) -> "Recording | None":
        from clearhead.watching.recording import Recording

        path = self.paths[module]
        inner = self._inner(path)
        name = self.names.name(inner) if call == 1 else f"{self.names.name(inner)}#{call}"
        if self.layers is not None:
            choices = {name, path} | self.names.choices(inner)
            chosen = {layer for layer in self.layers if str(layer) in choices}
            self.found |= chosen
            if not chosen:
                return None
        cross = ModulePath.of(path).cross
        return Recording(name, path, call, cross, self.heads, self.keep, self.values, self.asked.get("image"))

    def _inner(self, path: str) -> str:
        """A module's path inside the Transformers model."""
        return path.removeprefix(self.root)

    def _children(self, path: str) -> list[str]:
        stack = self.by_path.get(self.root + path, self.by_path.get(path))
        return [] if stack is None else [name for name, _ in stack.named_children()]

    def _read_tokens(self, module: Any, named: Mapping[str, Any]) -> None:
        """Add the ids that an outermost forward pass is called with, if any."""
        ids = named.get("input_ids")
        if "decoder_input_ids" in signature(module.forward).parameters:
            if not self.seen.source_tokens:
                self._add(self.seen.source_tokens, ids)
            self._add(self.seen.tokens, named.get("decoder_input_ids"))
        elif ModulePath.of(self._inner(self.paths[module])).stack == "encoder":
            self._add(self.seen.source_tokens, ids)
        else:
            self._add(self.seen.tokens, ids)

    def _add(self, rows: list[list[Any]], ids: Any) -> None:
        import torch

        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.is_floating_point():
            return
        if rows and len(rows) != len(ids):  # a batch of another size, which `Recording.check` refuses where it must
            return
        if not rows:
            rows += [[] for _ in ids]
        for row, more in zip(rows, ids.tolist(), strict=True):
            row += more if self.tokenizer is None else [self.tokenizer.decode([token]) for token in more]

    def check_chosen(self) -> None:
        """At the block's end: raise where no attention was seen, or a chosen layer was not."""
        if self.entered and not self.went_through:
            kinds = ", ".join(dict.fromkeys(kind for _, kind in self._unseen()))
            why = f"{kinds} does not go through Transformers' AttentionInterface" if kinds else "it has none"
            raise RuleError(f"{self.seen.model} ran, but no attention was seen: {why}.")
        missing = [layer for layer in self.layers or () if layer not in self.found]
        if self.went_through and missing:
            raise SelectionError(f"layers: there is no {missing[0]!r} in {self.seen.model}.")

    def finish(self) -> None:
        """Join the observations of each layer's calls, and release the recordings."""
        self.seen.parts = {name: part.finished() for name, part in self.parts.items() if part.calls}
        self.seen.unseen = self._unseen()
        self.recordings.clear()

    def _unseen(self) -> tuple[tuple[str, str], ...]:
        from clearhead.watching.unseen import unseen

        return unseen(self.paths, self.ran, self.went_through)


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

    found = [path for module, path in paths.items() if isinstance(module, PreTrainedModel)]
    first = f"{found[0]}." if found and found[0] else ""
    return first if all(path.startswith(first) for path in found[1:]) else ""


def _check_options(*, keep: Any, values: Any, tokenizer: Any) -> None:
    """Raise RuleError or DtypeError for values that are not what `watch` says."""
    for name, value in (("keep", keep), ("values", values)):
        if not isinstance(value, (bool, np.bool_)):
            raise RuleError(f"{name} is {shown(value)}: expected True or False.")
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise DtypeError(
            f"tokenizer is a {type(tokenizer).__name__}: expected something with decode(list of ids).",
            "tokenizer=transformers.AutoTokenizer.from_pretrained(…)",
        )


def _heads(given: Any) -> list[int]:
    """The heads to keep, sorted. Raises SelectionError for anything but whole numbers from 0 up."""
    heads = read_members("heads", given, (int, np.integer), "a list of whole numbers from 0 up", "heads=[0, 1]")
    if heads and min(heads) < 0:
        raise SelectionError(f"heads holds {min(heads)}: expected a list of whole numbers from 0 up.", "heads=[0, 1]")
    return sorted(set(heads))
