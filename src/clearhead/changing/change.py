"""`ch.change`: a Transformers model whose attention is edited while it runs inside a block."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clearhead.changing import otherrun
from clearhead.changing.applying import acting_in, acts, check_layers, check_places, edited
from clearhead.changing.edits import Edit, read_edits
from clearhead.changing.places import Place, Text
from clearhead.changing.texts import Texts, check_tokenizer
from clearhead.errors import MissingExtraError, RuleError
from clearhead.layers.naming import ModulePath
from clearhead.layers.saved import Run

if TYPE_CHECKING:
    from clearhead.layers.attending import Change, Finish
    from clearhead.layers.passes import LayerCall
    from clearhead.layers.recording import AttentionCall


@contextmanager
def change(model: Any, edits: Any, *, tokenizer: Any = None) -> Iterator[None]:
    """Run a Transformers model with its attention edited; after the block it is as it was, to the bit.

    model      any model that `ch.watch` takes; one device, any float dtype, CPU or GPU
    edits      an edit or a list of edits: ch.cut, ch.boost, ch.tempered, ch.off, ch.scaled, ch.like, ch.values_like
    tokenizer  finds the words that edits name; anything with decode(list of ids)

    Edits of logits (cut, boost, tempered, like) act in the order given, then values_like, then off and scaled.
    Positions and words refer to the text that the model is given first: (batch, tokens) as they are, padding included;
    in cross-attention queries are the decoder's and keys the encoder's. Whatever a model then generates with its cache
    follows, and a slice without a stop reaches into it. Each forward pass that begins a text anew is a text of its own.

    Together with `ch.watch`, around it or inside, the changed attention is seen: its weights, statistics and rules
    (`spans`, `scale`); with `like` the other run's weights. Gradients go through the edited attention; where layers are
    checkpointed, call backward inside the block. Compiled models run uncompiled inside the block.

    Raises, before the model runs: SelectionError for a layer or head that there is not; RuleError for another run
    without what is needed, or a model whose attention does not go through Transformers' AttentionInterface; DtypeError
    for what is no edit or no model; MissingExtraError without PyTorch and Transformers. Before the attention of the
    first layer runs: SelectionError for a position or word that the text has not, or a word that it has several times;
    ShapeError for another run of other lengths. In its layer: RuleError for another run with other padding. When the
    block ends: RuleError for an edit that never acted, and a UserWarning for attention that was not changed since it
    does not go through the interface.

    Time is that of attention; each cut with rest="first" is two more passes without values. Memory O(queries + keys)
    for each layer. Layers that no edit names run as before.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.change(model, ch.cut(queries=3, keys=[0, 1])), ch.watch(model) as seen:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> bool((seen.matrix(0)[0, :, 3, :2] == 0).all())
    True
    """
    try:
        from clearhead.layers import attending, switching
    except ImportError as error:
        raise MissingExtraError(
            f"change needs PyTorch and Transformers: {error}.", "pip install 'clearhead[hf]'"
        ) from error
    read = tuple(
        replace(edit, seen=Run.read(edit.seen)) if isinstance(edit.seen, str) else edit for edit in read_edits(edits)
    )
    check_tokenizer(tokenizer)
    switching.check(model)
    if any(module in attending.changers for module in model.modules()):
        raise RuleError("the model is being changed already.", "give all edits to one ch.change, as a list.")
    changing = _Changing(model, read, tokenizer)
    changing.check()
    with changing.passes.followed(attending.changers, changing.attention):
        yield
    changing.check_acted()


class _Changing:
    """The state of one block: the edits of each layer, and the texts that the model runs over."""

    def __init__(self, model: Any, edits: tuple[Edit, ...], tokenizer: Any) -> None:
        from clearhead.layers.passes import Passes
        from clearhead.layers.switching import mixes_tokens

        self.edits, self.name = edits, type(model).__name__
        self.texts = Texts(tokenizer)
        self.passes = Passes(model, self.texts.take_tokens, self._begin_pass)
        self.acting: dict[LayerCall, list[tuple[Edit, Any]]] = {}
        self.acted: set[int] = set()  # ids of edits
        mixing = {module: self.passes.inner(path) for module, path in self.passes.paths.items() if mixes_tokens(module)}
        self.modules = {  # that may attend, each with all that may choose its layer
            module: {self.passes.paths[module], *self.passes.names.possible(path)} for module, path in mixing.items()
        }
        self.checked: set[tuple[Text, Text]] = set()
        self.continues = False  # has this pass a cache, so that another may follow?

    def check(self) -> None:
        """Raise SelectionError for a layer or head that the model has not, RuleError for a run without its arrays."""
        layers = [(choices, _head_count(module)) for module, choices in self.modules.items()]
        numbers = sorted({int(name) for choices in self.modules.values() for name in choices if name.isdecimal()})
        hint = f"layers are {numbers[0]} to {numbers[-1]}, or named as ch.watch names them." if numbers else ""
        check_layers(self.edits, layers, self.name, hint)
        for edit in self.edits:
            if edit.seen is not None:
                otherrun.check_kept(edit, self.modules.values())

    def attention(self, module: Any) -> "Change":
        """What to do with this call of an attention module."""
        from clearhead.layers.attending import Change

        again = self.passes.in_backward(module)
        layer = self.passes.place(module) if again else self.passes.call_of(module)
        if again and any("#" in str(name) for edit in self.edits for name in edit.named_layers()):
            raise RuleError("a checkpointed layer is computed again, and which of its calls this is, is not known.")
        start = (lambda queries: self.texts.start(layer.path, queries)) if layer.cross else None
        return Change(layer.name, self.passes.was_eager(module), start, lambda call: self._edit(layer, call))

    def _edit(self, layer: "LayerCall", call: "AttentionCall") -> "tuple[AttentionCall, Finish | None]":
        """The call after the edits of its layer, and what is done with its output."""
        sequence, key_text = self.texts.of(layer.path, call.queries, call.keys)
        self._check_sequences(layer, call, sequence.text, key_text)
        if layer not in self.acting:
            self.acting[layer] = acting_in(self.edits, layer.name, layer.choices)
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
        real = _real(layer, call) if any(edit.kind == "off" for edit, _ in acting) else None
        place = Place(layer.name, call.queries, call.keys, sequence.text, key_text, real, self.continues, sums)
        rules, shape = call.rules(), (*call.q.shape[:3], call.k.shape[2])
        result = edited(call.q, call.k, call.v, rules, acting, place)
        waiting = [(edit, heads) for edit, heads in acting if id(edit) not in self.acted]
        self.acted |= {id(edit) for edit, heads in waiting if acts(edit, heads, shape, rules, place)}
        scores: dict[str, Any] = {
            name: result.rules[name] for name in ("scale", "softcap", "sinks") if name in result.rules
        }
        pattern = replace(call.pattern, bias=result.rules.get("bias"))
        arrays = {"q": result.q, "k": result.k, "v": result.v}
        changed = replace(call, **arrays, pattern=pattern, scores=scores, terms=result.terms, edits=self.edits)
        return changed, result.finish if result.afterwards else None

    def _check_sequences(self, layer: "LayerCall", call: "AttentionCall", queries: Text, keys: Text) -> None:
        """Raise for an edit of any layer with these texts: positions and words, lengths of other runs."""
        if (queries, keys) in self.checked:
            return
        kind = ModulePath.of(layer.path)
        alike = [
            choices
            for module, choices in self.modules.items()
            if ModulePath.of(self.passes.paths[module])._replace(numbers=kind.numbers) == kind
        ]
        for edit in self.edits:
            if any(edit.may_act(edit.named_layers(), choices) for choices in alike):
                check_places(edit, queries, keys)
            if edit.seen is not None and layer.number == 1:
                otherrun.check_lengths(edit, kind, call.queries, call.keys, continues=self.continues)
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
            if ran:
                raise RuleError(
                    f"{idle[0]} never acted: none of its queries came with a key that it sees.",
                    "where attention is causal, a query sees itself and what is before it.",
                )
            rest = f", {kinds} did not" if kinds else ""
            raise RuleError(f"{idle[0]} never acted: none of its layers went through the attention interface{rest}.")
        if missed:
            warnings.warn(
                f"{self.name} has attention that does not go through Transformers' AttentionInterface and was not "
                f"changed: {kinds}.",
                stacklevel=4,
            )


def _real(layer: "LayerCall", call: "AttentionCall") -> Any:
    """(batch, queries), False where a query is padding; None where none is, or it is not known.

    In a mask that is stored, a query that may not see its own key is padding.
    """
    padding, dense, queries = call.pattern.padding, call.pattern.dense, call.queries
    if layer.cross or (padding is None and dense is None):
        return None
    if dense is None:
        assert padding is not None
        real = padding[:, queries.start : queries.stop].bool()
    else:
        mask = dense[..., queries.start - call.keys.start : queries.stop - call.keys.start]
        real = (mask[:, :, 0] if mask.shape[2] == 1 else mask.diagonal(dim1=2, dim2=3)).any(1)
    return real.cpu().numpy() if real.shape[1] == len(queries) and not real.all() else None


def _head_count(module: Any) -> int:
    """The most heads that a module or its configuration speaks of; 0 where neither does."""
    spoken = getattr(getattr(module, "config", None), "__dict__", {}), vars(module)
    counts = (n for owner in spoken for name, n in owner.items() if name.endswith(("heads", "n_head")))
    return max((n for n in counts if isinstance(n, int)), default=0)
