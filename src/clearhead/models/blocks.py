"""`ch.watch` and `ch.change` of a decoder in NumPy: inside a block, `model.run(text)` is recorded or edited."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from clearhead.changing import otherrun
from clearhead.changing.applying import check_layers, placed
from clearhead.changing.edits import Edit
from clearhead.core.axes import group_size
from clearhead.errors import RuleError, SelectionError
from clearhead.models.decoder import choices, may_act
from clearhead.models.model import Placed, blocks
from clearhead.models.protocol import ForwardPass, LayerRun
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
    seen = Seen({}, model=model.name)

    def ran(run: ForwardPass) -> None:
        if seen.parts:
            raise RuleError("a second text is run: a block of ch.watch holds one.", "open another `with ch.watch(…)`.")
        decode = wish.tokenizer and wish.tokenizer.decode
        seen.tokens = [[decode([i]) if decode else model.tokenizer.text(i) for i in run.ids]]
        for number, layer in enumerate(run.layers):
            if wish.layers is None or choices(number, len(run.layers)) & set(map(str, wish.layers)):
                seen.parts[str(number)] = _layer(number, layer, wish)

    with _inside(model, None, ran):
        yield seen


@contextmanager
def changed(model: Any, edits: tuple[Edit, ...], tokenizer: Any) -> Iterator[None]:
    """Inside, the model's runs are edited; the arguments are those of `ch.change`, and it says what is raised."""
    count, heads = model.config.layers, model.config.heads
    layers = [choices(number, count) for number in range(count)]
    check_layers(edits, [(names, heads) for names in layers], model.name, f"layers are 0 to {count - 1}.")
    for edit in edits:
        if edit.seen is not None:
            otherrun.check_kept(edit, layers)
    decode = model.tokenizer.decoded if tokenizer is None else tokenizer.decode
    texts, acted = list[tuple[Edit, ...]](), set[int]()  # the edits by position in each text; places in `edits`

    def in_text(ids: Sequence[int]) -> tuple[Edit, ...]:
        texts.append(placed(edits, Text(len(ids), [pieces_of(list(ids), decode)])))
        return texts[-1]

    def ran(run: ForwardPass) -> None:
        acted.update(place for place, edit in enumerate(texts[-1]) if place not in acted and may_act(edit, run.layers))

    with _inside(model, in_text, ran):
        yield
    idle = [edit for place, edit in enumerate(edits) if place not in acted]
    if idle and not texts:
        raise RuleError(f"{idle[0]} never acted: {model.name} did not run inside the block.", "model.run(text)")
    if idle:
        raise RuleError(
            f"{idle[0]} never acted: none of its queries came with a key that it sees.",
            "where attention is causal, a query sees itself and what is before it.",
        )


@contextmanager
def _inside(model: Any, in_text: Placed | None, ran: Callable[[ForwardPass], None]) -> Iterator[None]:
    here, block = blocks.setdefault(model.decoder, []), (in_text, ran)
    here.append(block)
    try:
        yield
    finally:
        here.remove(block)
        if not here:
            del blocks[model.decoder]


def _layer(number: int, run: LayerRun, wish: Wish) -> Layer:
    rules, heads = run.rules, list(range(len(run.q)))
    q, k, v = (x[None] for x in (run.q, run.k, run.v))
    if wish.heads is not None:
        heads, shared = wish.heads, [head // group_size(len(run.q), len(run.k)) for head in wish.heads]
        q, k, v, rules = q[:, heads], k[:, shared], v[:, shared], for_heads(rules, heads)
    seen = AttentionMatrix(q, k, **rules).observe(**wish.statistics)
    arrays: Any = {"q": q, "k": k} if wish.keep else {}
    if wish.values:
        arrays["v"] = v
    return Layer(str(number), f"blk.{number}", tuple(heads), seen, rules, **arrays)
