"""`ch.change` for Transformers models: applies edits to each layer that runs in the block, by position and word."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from clearhead.changing.applying import acts, check_layers, check_places, edited
from clearhead.changing.edits import Edit, cut
from clearhead.errors import RuleError
from clearhead.hf import attending
from clearhead.hf.call import AttentionCall
from clearhead.hf.passes import Passes, in_backward, mixes_tokens
from clearhead.watching.effects import VERIFIED, Edge, Lines
from clearhead.watching.naming import LayerCall, ModulePath, text_of
from clearhead.watching.pieces import pieces_of
from clearhead.watching.places import Place, Text


@contextmanager
def changed(model: Any, edits: tuple[Edit, ...], tokenizer: Any) -> Iterator[None]:
    """Edit the model's attention inside the block; arguments and errors as `ch.change`."""
    changing = _Changing(model, edits, tokenizer)
    changing.check()
    with changing.followed():
        yield
    changing.check_acted()


class _Changing(Passes):
    """The state of one block: the edits of each layer, and the texts that the model runs over."""

    registry = attending.changers
    already = "the model is being changed already.", "give all edits to one ch.change, as a list."

    def __init__(self, model: Any, edits: tuple[Edit, ...], tokenizer: Any) -> None:
        super().__init__(model)
        self.edits, self.name = edits, type(model).__name__
        self.tokenizer = tokenizer
        self._pass = 0
        self._ids: Any = None  # of this pass's sequences, (batch, length)
        self._source: Any = None  # of the latest encoder's
        # The latest text of each stack, by its role there ("own", "keys" or "queries"): the text, the pass it began
        # in, and the positions of its latest queries. A text begins with its first token, or where the block begins.
        self._known: dict[tuple[str, str], tuple[Text, int, range]] = {}
        self.acting: dict[LayerCall, list[Edit]] = {}
        self.acted: set[int] = set()  # ids of edits
        attending = [(module, path) for module, path in self.paths.items() if mixes_tokens(module)]
        self.modules = {  # each module with the names and numbers that may choose its layer
            module: {path, *self.names.possible(self.inner(path))} for module, path in attending
        }
        self.checked: set[tuple[Text, Text]] = set()

    def check(self) -> None:
        """Raise SelectionError for a layer that the model does not have, RuleError for another run that saw nothing."""
        numbers = sorted({int(name) for choices in self.modules.values() for name in choices if name.isdecimal()})
        hint = f"layers are {numbers[0]} to {numbers[-1]}, or named as ch.watch names them." if numbers else ""
        check_layers(self.edits, self.modules.values(), self.name, hint)

    def layer_of(self, module: Any) -> LayerCall:
        """Count and name a call of this module. Raises RuleError if an edit names one of several calls in backward."""
        if in_backward() and any("#" in str(name) for edit in self.edits for name in edit.layers or ()):
            raise RuleError("a checkpointed layer is computed again, and it is not known which of its calls this is.")
        return super().layer_of(module)

    def edited(self, layer: LayerCall, call: AttentionCall) -> AttentionCall:
        """Apply the edits of its layer to a call."""
        if layer.cross:
            *_, latest = self._known.get((ModulePath.of(layer.path).stack, "own"), (None, 0, range(0)))
            call = call.moved(latest.start if len(latest) == len(call.queries) else 0)  # the decoder's own queries
        text, key_text = self._texts_of(layer.path, call.queries, call.keys)
        self._check_places(layer, text, key_text)
        if layer not in self.acting:
            self.acting[layer] = [edit for edit in self.edits if edit.acts_in(layer.name, layer.choices)]
        acting = self.acting[layer]
        if not acting:
            return call
        if call.pattern.others:
            raise RuleError(
                "merged attention has an encoder's keys after the sequence's own, and edits cannot name them."
            )
        off = not layer.cross and any(edit.kind == "off" for edit in acting)
        there = call.pattern.real(call.queries, call.keys) if off else None
        real = None if there is None else there.cpu().numpy()
        place = Place(layer.name, call.queries, call.keys, text, key_text, real)
        result = edited(call, acting, place)
        waiting, shape = [edit for edit in acting if id(edit) not in self.acted], (*call.q.shape[:3], call.k.shape[2])
        self.acted |= {id(edit) for edit in waiting if acts(edit, shape, call.rules, place)}
        return replace(result, edits=self.edits)

    def _check_places(self, layer: LayerCall, queries: Text, keys: Text) -> None:
        """Raise SelectionError if an edit names a position or word that these texts of its layer lack."""
        if (queries, keys) in self.checked:
            return
        self.checked.add((queries, keys))
        kinds = {module: ModulePath.of(path)._replace(numbers=()) for module, path in self.paths.items()}
        alike = [choices for module, choices in self.modules.items() if kinds[module] == kinds[layer.module]]
        for edit in self.edits:
            if any(edit.may_act(choices) for choices in alike):
                check_places(edit, queries, keys)

    def begin_pass(self, named: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Note that texts may begin."""
        self._pass += 1
        self._ids = None
        self.checked.clear()

    def take_tokens(self, ids: Any, source: Any) -> None:
        """Note the ids that the model and its encoder are given; None if there are none."""
        self._ids = ids
        self._source = self._source if source is None else source

    def _texts_of(self, path: str, queries: range, keys: range) -> tuple[Text, Text]:
        """The texts of a call's queries and keys. `path` is that of the attention module."""
        stack, _, cross = ModulePath.of(path)
        begins = queries.start == 0
        if not cross:
            text = self._text_at(stack, "own", queries, keys.stop, begins=begins)
            return text, text
        known = self._known.get((stack, "own"))
        if known is None or len(known[2]) != len(queries):  # queries without self-attention
            self._text_at(path, "queries", queries, queries.stop, begins=begins)
            known = self._known[path, "queries"]
        text, began, _ = known
        return text, self._text_at(stack, "keys", range(0), keys.stop, begins=began == self._pass)

    def _text_at(self, stack: str, what: str, queries: range, length: int, *, begins: bool) -> Text:
        text, began, _ = self._known.get((stack, what), (None, 0, queries))
        if text is None or (begins and (began, text.length) != (self._pass, length)):
            text, began = self._new_text(stack, what, length, whole=begins), self._pass
        self._known[stack, what] = text, began, queries
        return text

    def _new_text(self, stack: str, what: str, length: int, *, whole: bool) -> Text:
        if self.tokenizer is None:
            return Text(length)
        side = "source" if what == "keys" else text_of(stack, has_source=self._source is not None)
        if not whole or not side:
            return Text(length, why="the text before the block is not known" if not whole else "the layer sees no text")
        ids = self._source if side == "source" else self._ids
        if ids is None:
            return Text(length, why="the model was not given the ids of its tokens")
        if ids.shape[1] != length:
            return Text(length, why=f"the model was given {ids.shape[1]} ids for {length} positions")
        return Text(length, [pieces_of(row, self.tokenizer.decode) for row in ids.tolist()])

    def check_acted(self) -> None:
        """At the block's end: raise RuleError for an edit that never acted, warn where attention was not seen."""
        idle = [edit for edit in self.edits if id(edit) not in self.acted]
        missed = self.unseen()
        kinds = ", ".join(dict.fromkeys(kind for _, kind in missed))
        if idle and not self.entered:
            raise RuleError(f"{idle[0]} never acted: {self.name} did not run inside the block.")
        if idle:
            ran = [layer.name for layer, acting in self.acting.items() if any(edit is idle[0] for edit in acting)]
            if ran:
                raise RuleError(
                    f"{idle[0]} never acted: none of its queries sees any of its keys.",
                    "choose keys that come before the queries: causal attention sees no later ones.",
                )
            rest = f", {kinds} did not" if kinds else ""
            raise RuleError(f"{idle[0]} never acted: none of its layers used Transformers' AttentionInterface{rest}.")
        if missed:
            warnings.warn(
                f"{self.name} has attention that does not go through Transformers' AttentionInterface and was not "
                f"changed: {kinds}.",
                stacklevel=4,
            )


def verified(model: Any, edges: Iterable[Edge], run: Callable[[], Any], batch: int) -> Lines[Edge]:
    """Run the model once as it is and once without each edge; errors as `seen.verify`."""
    if batch > 1:
        raise RuleError(
            f"{batch} texts were watched together: a cut acts on the whole batch, but an edge belongs to one text.",
            "watch one text at a time.",
        )
    result: list[Edge] = []
    with torch.no_grad():
        before = float(run())
        for edge in edges:
            without = cut(queries=edge.query, keys=edge.key, layers=[edge.layer], heads=[edge.head], rest=edge.rest)
            with changed(model, (without,), None):
                result.append(edge._replace(truth=float(run()) - before))
    return Lines(result, "verified table", VERIFIED, edges.tokens if isinstance(edges, Lines) else ())
