"""`ch.change`: a Transformers model whose attention is edited while it runs inside a block."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clearhead.changing.applying import check_places, edited
from clearhead.changing.edits import Edit, Off, OtherRun, read_edits, with_run
from clearhead.changing.places import Place, Text
from clearhead.changing.texts import Texts
from clearhead.errors import DtypeError, MissingExtraError, RuleError, SelectionError
from clearhead.watching.naming import ModulePath
from clearhead.watching.seen import load

if TYPE_CHECKING:
    from clearhead.watching.attending import Change, Finish
    from clearhead.watching.passes import LayerCall
    from clearhead.watching.recording import AttentionCall

_HEAD_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "encoder_attention_heads",
    "decoder_attention_heads",
)


@contextmanager
def change(model: Any, edits: Any, *, tokenizer: Any = None) -> Iterator[None]:
    """Run a Transformers model with its attention edited; after the block it is as it was, to the bit.

    model      any model that `ch.watch` takes; one device, any float dtype, CPU or GPU
    edits      an edit or a list of edits: ch.cut, ch.boost, ch.share, ch.tempered, ch.off, ch.scaled, ch.like,
               ch.values_like
    tokenizer  finds the words that edits name; anything with decode(list of ids)

    Edits of logits (cut, boost, share, tempered, like) act in the order given, then values_like, then off and scaled.
    Positions and words refer to the text that the model is given first: (batch, tokens) as they are, padding included;
    in cross-attention queries are the decoder's and keys the encoder's. Whatever a model then generates with its cache
    follows, and a slice without a stop reaches into it. Each forward pass that begins a text anew is a text of its own.

    Together with `ch.watch`, around it or inside, the changed attention is seen: its weights, statistics and rules
    (`spans`, `scale`); with `like` the other run's weights. Gradients go through the edited attention; where layers are
    checkpointed, call backward inside the block. Compiled models run uncompiled inside the block.

    Before the model runs are refused: a layer or head that there is not (SelectionError), another run without what is
    needed, a model whose attention does not go through Transformers' AttentionInterface (RuleError), what is no edit or
    no model (DtypeError). Before the first layer's attention runs: a position or word that the text has not, a word
    that it has several times without a number (SelectionError), and before its layer's, lengths or padding of another
    run that differ (ShapeError, RuleError). When the block ends: RuleError for an edit that never acted, a UserWarning
    for attention that did not go through the interface. MissingExtraError without PyTorch and Transformers.

    Time is that of attention; each `share` is one more pass without values. Memory O(queries + keys) for each layer.
    Layers that no edit names run as before.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.change(model, ch.cut(queries=3, keys=[0, 1])), ch.watch(model) as seen:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> bool((seen.matrix(0)[0, :, 3, :2] == 0).all())
    True
    """
    try:
        from clearhead.watching import attending, switching
    except ImportError as error:
        raise MissingExtraError(
            f"change needs PyTorch and Transformers: {error}.", "pip install 'clearhead[hf]'"
        ) from error
    given = tuple(with_run(edit, load) for edit in read_edits(edits))
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise DtypeError(
            f"tokenizer is a {type(tokenizer).__name__}: expected something with decode(list of ids).",
            "tokenizer=transformers.AutoTokenizer.from_pretrained(…)",
        )
    switching.check(model)
    if any(module in attending.changers for module in model.modules()):
        raise RuleError("the model is being changed already.", "give all edits to one ch.change, as a list.")
    changing = _Changing(model, given, tokenizer)
    changing.check()
    with ExitStack() as after:
        after.enter_context(changing.passes.followed())
        for module in model.modules():
            attending.changers[module] = changing.attention
            after.callback(attending.changers.pop, module, None)
        yield
    changing.check_acted()


class _Changing:
    """The state of one block: the edits of each layer, and the texts that the model runs over."""

    def __init__(self, model: Any, edits: tuple[Edit, ...], tokenizer: Any) -> None:
        from clearhead.watching.passes import Passes

        self.edits, self.name = edits, type(model).__name__
        self.texts = Texts(tokenizer)
        self.passes = Passes(model, self.texts.take_tokens, self._begin_pass)
        self.acting: dict[LayerCall, list[tuple[Edit, Any]]] = {}
        self.acted: set[int] = set()  # ids of edits
        self.modules = self._attention_modules()
        self.checked: set[tuple[Text, Text]] = set()
        self.continues = False  # has this pass a cache, so that another may follow?

    def check(self) -> None:
        """Raise SelectionError for a layer or head that the model has not, RuleError for a run without its arrays."""
        for edit in self.edits:
            for layer in edit.named_layers():
                if not any(edit.may_act((layer,), choices) for choices in self.modules.values()):
                    raise SelectionError(f"{edit}: there is no layer {layer!r} in {self.name}.", self._numbers())
            for layers, heads in edit.heads_by_layers():
                own = [module for module, choices in self.modules.items() if edit.may_act(layers, choices)]
                most = max(map(_head_count, own), default=0)
                if most and max(heads) >= most:
                    raise SelectionError(f"{edit}: there is no head {max(heads)} in {self.name}, which has {most}.")
            if isinstance(edit, OtherRun):
                _check_run(edit)

    def _attention_modules(self) -> dict[Any, set[str]]:
        """The modules that may attend, each with all that may choose its layer."""
        from clearhead.watching.unseen import mixes_tokens

        passes = self.passes
        found = {module: passes.inner(path) for module, path in passes.paths.items() if mixes_tokens(module)}
        return {module: {passes.paths[module], *passes.names.possible(path)} for module, path in found.items()}

    def _numbers(self) -> str:
        numbers = sorted({int(name) for choices in self.modules.values() for name in choices if name.isdecimal()})
        return f"layers are {numbers[0]} to {numbers[-1]}, or named as ch.watch names them." if numbers else ""

    def attention(self, module: Any) -> "Change":
        """What to do with this call of an attention module."""
        from clearhead.watching.attending import Change

        again = self.passes.in_backward(module)
        layer = self.passes.place(module) if again else self.passes.call_of(module)
        if again and any("#" in str(name) for edit in self.edits for name in edit.named_layers()):
            raise RuleError("a checkpointed layer is computed again, and which of its calls this is, is not known.")
        start = (lambda queries: self.texts.start(layer.path, queries)) if layer.cross else None
        return Change(layer.name, self.passes.was_eager(module), start, lambda call: self._edit(layer, call))

    def _edit(self, layer: "LayerCall", call: "AttentionCall") -> "tuple[AttentionCall, Finish | None]":
        """The call after the edits of its layer, and what is done with its output."""
        sequence, key_text = self.texts.of(layer.path, call.queries, call.keys)
        self._check_texts(layer, sequence.text, key_text)
        if layer not in self.acting:
            self.acting[layer] = self._acting_in(layer.name, layer.choices)
        acting = self.acting[layer]
        if not acting:
            return call, None
        if call.pattern.others:
            raise RuleError(
                "merged attention has an encoder's keys behind the sequence's own, and no edit names those."
            )
        sums = sequence.sums.setdefault(layer, {})
        if call.queries.start == 0:
            sums.clear()
        real = _real(layer, call) if any(isinstance(edit, Off) for edit, _ in acting) else None
        place = Place(layer.name, call.queries, call.keys, sequence.text, key_text, real, self.continues, sums)
        result = edited(call.q, call.k, call.v, call.rules(), acting, place)
        self.acted |= set(map(id, result.acted))
        scores: dict[str, Any] = {
            name: result.rules[name] for name in ("scale", "softcap", "sinks") if name in result.rules
        }
        pattern = replace(call.pattern, bias=result.rules.get("bias"))
        changed = replace(
            call,
            q=result.q,
            k=result.k,
            v=result.v,
            pattern=pattern,
            scores=scores,
            terms=result.terms,
            edits=self.edits,
        )
        return changed, result.finish if result.afterwards else None

    def _acting_in(self, name: str, choices: Collection[str]) -> list[tuple[Edit, Any]]:
        return [(edit, edit.heads_in(choices)) for edit in self.edits if edit.acts_in(name, choices)]

    def _check_texts(self, layer: "LayerCall", queries: Text, keys: Text) -> None:
        """Raise for an edit of any layer with these texts whose positions or words they have not."""
        if (queries, keys) in self.checked:
            return
        kind = ModulePath.of(layer.path)
        alike = [
            choices
            for module, choices in self.modules.items()
            if (other := ModulePath.of(self.passes.paths[module])).stack == kind.stack and other.cross == kind.cross
        ]
        for edit in self.edits:
            if any(edit.may_act(edit.named_layers(), choices) for choices in alike):
                check_places(edit, queries, keys)
        self.checked.add((queries, keys))

    def _begin_pass(self, named: Mapping[str, Any]) -> None:
        self.texts.begin_pass()
        self.checked.clear()
        self.continues = named.get("past_key_values") is not None

    def check_acted(self) -> None:
        """At the block's end: raise RuleError for an edit that never acted, warn where attention was not seen."""
        idle = [edit for edit in self.edits if id(edit) not in self.acted]
        missed = self.passes.unseen()
        kinds = ", ".join(dict.fromkeys(kind for _, kind in missed))
        if idle and not self.passes.entered:
            raise RuleError(f"{idle[0]} never acted: {self.name} did not run inside the block.")
        if idle:
            ran = [layer.name for layer, acting in self.acting.items() if any(edit is idle[0] for edit, _ in acting)]
            why = (
                "none of its queries and keys came." if ran else "no layer of its went through the attention interface"
            )
            raise RuleError(f"{idle[0]} never acted: {why}{'' if ran else f', {kinds} did not.' if kinds else '.'}")
        if missed:
            warnings.warn(
                f"{self.name} has attention that does not go through Transformers' AttentionInterface and was not "
                f"changed: {kinds}.",
                stacklevel=4,
            )


def _real(layer: "LayerCall", call: "AttentionCall") -> Any:
    """(batch, queries), False where a query is padding; None where none is, or it is not known."""
    padding = call.pattern.padding
    if padding is None or layer.cross:
        return None
    real = padding[:, call.queries.start : call.queries.stop].bool().cpu().numpy()
    return real if real.shape[1] == len(call.queries) and not real.all() else None


def _head_count(module: Any) -> int:
    """The most heads that a module or its configuration speaks of; 0 where neither does."""
    counts = [getattr(owner, name, 0) for owner in (module, getattr(module, "config", None)) for name in _HEAD_COUNTS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def _check_run(edit: OtherRun) -> None:
    """Raise unless the other run has the layers and arrays that an edit needs."""
    assert not isinstance(edit.seen, str)
    if not edit.seen.parts:
        raise RuleError(
            f"{edit}: the other run saw no attention.", "run the model inside `with ch.watch(model) as seen`."
        )
    missing = {"like": ("q", "queries and keys", "keep=True"), "values_like": ("v", "values", "values=True")}
    name, words, how = missing[edit.KIND]
    if all(getattr(edit.seen.layer(layer), name) is None for layer in edit.seen.layers):
        raise RuleError(f"{edit}: the other run kept no {words}.", f"ch.watch(model, {how})")
