"""`ch.watch` and `ch.change` of a decoder in NumPy: inside a block, `model.run(text)` is recorded or edited."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from clearhead.changing import otherrun
from clearhead.changing.applying import acts, check_layers, placed
from clearhead.changing.edits import Edit
from clearhead.core.axes import group_size
from clearhead.errors import RuleError, SelectionError
from clearhead.models.decoder import acting_edits, choices, place_of
from clearhead.models.protocol import ForwardPass, LayerRun
from clearhead.models.runs import RunBlock, blocks
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.span_terms import for_heads
from clearhead.watching.layer import Layer
from clearhead.watching.pieces import pieces_of
from clearhead.watching.places import Text
from clearhead.watching.seen import Seen
from clearhead.watching.watch import Wish


@contextmanager
def watched(model: Any, wish: Wish) -> Iterator[Seen]:
    """Inside, the layers of the model's one run are kept; the arguments are those of `ch.watch`, and it says the rest.

    model   a `models.model.Model`
    """
    if wish.causes:
        raise RuleError(
            "causes=True wants PyTorch's derivatives, and this decoder runs without PyTorch.",
            "ch.explain(text, model) says what made the answer.",
        )
    known = [name for number in range(model.config.layers) for name in choices(number, model.config.layers)]
    missing = [layer for layer in wish.layers or () if str(layer) not in known]
    if missing:
        raise SelectionError(f"layers: there is no {missing[0]!r} in {model.name}.")
    if wish.heads is not None and max(wish.heads, default=0) >= model.config.heads:
        raise SelectionError(f"heads: there is no head {max(wish.heads)} in {model.name}: it has {model.config.heads}.")
    watching = _WatchedRun(model, wish)
    with _inside(model, watching):
        yield watching.seen


@contextmanager
def changed(model: Any, edits: tuple[Edit, ...], tokenizer: Any) -> Iterator[None]:
    """Inside, the model's runs are edited; the arguments are those of `ch.change`, and it says what is raised."""
    count, heads = model.config.layers, model.config.heads
    layers = [choices(number, count) for number in range(count)]
    check_layers(edits, [(names, heads) for names in layers], model.name, f"layers are 0 to {count - 1}.")
    for edit in edits:
        if edit.seen is not None:
            otherrun.check_kept(edit, layers)
    changing = _ChangedRuns(model, edits, tokenizer)
    with _inside(model, changing):
        yield
    changing.check_acted()


@contextmanager
def _inside(model: Any, block: RunBlock) -> Iterator[None]:
    here = blocks.setdefault(model.decoder, [])
    here.append(block)
    try:
        yield
    finally:
        here.remove(block)
        if not here:
            del blocks[model.decoder]


class _WatchedRun:
    """One block of `ch.watch`: what it asks for, and what it saw."""

    changes = False

    def __init__(self, model: Any, wish: Wish) -> None:
        self.model, self.wish, self.seen = model, wish, Seen({}, model=model.name)

    def edits(self, ids: Sequence[int]) -> tuple[Edit, ...]:  # noqa: ARG002
        """None of its own."""
        return ()

    def ran(self, run: ForwardPass) -> None:
        """Keep the layers of a run. Raises RuleError for a second one."""
        if self.seen.parts:
            raise RuleError("a second text is run: a block of ch.watch holds one.", "open another `with ch.watch(…)`.")
        own, given = self.model.tokenizer, self.wish.tokenizer
        self.seen.tokens = [[own.text(i) if given is None else given.decode([i]) for i in run.ids]]
        for number, layer in enumerate(run.layers):
            if self.wish.layers is None or choices(number, len(run.layers)) & set(map(str, self.wish.layers)):
                self.seen.parts[str(number)] = self._layer(number, layer)

    def _layer(self, number: int, run: LayerRun) -> Layer:
        wish, rules, heads = self.wish, run.rules, list(range(len(run.q)))
        q, k, v = (x[None] for x in (run.q, run.k, run.v))
        if wish.heads is not None:
            heads, shared = wish.heads, [head // group_size(len(run.q), len(run.k)) for head in wish.heads]
            q, k, v, rules = q[:, heads], k[:, shared], v[:, shared], for_heads(rules, heads)
        seen = AttentionMatrix(q, k, **rules).observe(**wish.statistics)
        arrays: Any = {"q": q, "k": k} if wish.keep else {}
        if wish.values:
            arrays["v"] = v
        return Layer(str(number), f"blk.{number}", tuple(heads), seen, rules, **arrays)


class _ChangedRuns:
    """One block of `ch.change`: its edits, and which of them have acted."""

    changes = True

    def __init__(self, model: Any, edits: tuple[Edit, ...], tokenizer: Any) -> None:
        self.model, self.given = model, edits
        self.decode = model.tokenizer.decoded if tokenizer is None else tokenizer.decode
        self.placed: tuple[Edit, ...] = ()  # by position, in the latest text
        self.acted: set[int] = set()  # places in `given`
        self.runs = 0

    def edits(self, ids: Sequence[int]) -> tuple[Edit, ...]:
        """The block's edits with positions in place of words. Raises SelectionError for what the text has not."""
        self.runs += 1
        self.placed = placed(self.given, Text(len(ids), [pieces_of(list(ids), self.decode)]))
        return self.placed

    def ran(self, run: ForwardPass) -> None:
        """Note which edits could change this run."""
        for place, edit in enumerate(self.placed):
            if place not in self.acted and self._acts(edit, run.layers):
                self.acted.add(place)

    def _acts(self, edit: Edit, layers: Collection[LayerRun]) -> bool:
        for number, run in enumerate(layers):
            shape = (1, len(run.q), run.q.shape[1], run.k.shape[1])
            for _, heads in acting_edits([edit], number, len(layers)):
                if acts(edit, heads, shape, run.rules, place_of(number, run.q, run.k)):
                    return True
        return False

    def check_acted(self) -> None:
        """At the block's end: raise RuleError for an edit that never acted."""
        idle = [edit for place, edit in enumerate(self.given) if place not in self.acted]
        if idle and not self.runs:
            raise RuleError(
                f"{idle[0]} never acted: {self.model.name} did not run inside the block.", "model.run(text)"
            )
        if idle:
            raise RuleError(
                f"{idle[0]} never acted: none of its queries came with a key that it sees.",
                "where attention is causal, a query sees itself and what is before it.",
            )
