"""`ch.change`, and the edits that it takes: plain values that can be printed and compared."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np

from clearhead.core.effects import Rest, read_rest
from clearhead.core.rule_values import check_size, is_whole, read_members, read_number
from clearhead.errors import DtypeError, RuleError, SelectionError, expected
from clearhead.loading import load
from clearhead.watching.naming import LAYERS
from clearhead.watching.places import Places, read_places

_HEADS = (int, np.integer), "a list of whole numbers from 0 up", "heads=[0, 1]"


@dataclass(frozen=True, kw_only=True, repr=False)
class Edit:
    """An edit: its kind (the name of the function that makes it), target layers and heads, and arguments.

    queries, keys   for cut and boost; rest: for cut, None for "renormalise"
    by              for boost; to: for off
    seen            for like: another run
    """

    kind: str
    layers: tuple[int | str, ...] | None = None
    heads: tuple[int, ...] | None = None
    queries: Places = None
    keys: Places = None
    rest: Rest | None = None
    by: Any = None
    to: str | None = None
    seen: Any = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of its function, layers and heads last; those that are None are left out."""
        names = sorted(signature(MAKERS[self.kind]).parameters, key=lambda name: name in ("layers", "heads"))
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def __repr__(self) -> str:
        unnamed = [x.name for x in signature(MAKERS[self.kind]).parameters.values() if x.kind is not x.KEYWORD_ONLY]
        words = [_as_code(x) if name in unnamed else f"{name}={_as_code(x)}" for name, x in self.arguments().items()]
        return f"{self.kind}({', '.join(words)})"

    def __hash__(self) -> int:
        return hash((self.kind, repr([value for name, value in self.arguments().items() if name != "seen"])))

    def acts_in(self, name: str, choices: Collection[str]) -> bool:
        """Does it act in the layer of this name, which callers may choose by any of `choices`?"""
        if self.layers is None:  # every layer, or for `like` every layer of the other run
            return self.seen is None or name in self.seen.parts
        return any(str(layer) == name or str(layer) in choices for layer in self.layers)

    def may_act(self, choices: Collection[str]) -> bool:
        """May it act in a layer that callers choose by `choices`? "0#2" is a call of layer 0."""
        return self.layers is None or any(str(layer).partition("#")[0] in choices for layer in self.layers)


def cut(
    *, queries: Any = None, keys: Any = None, layers: Any = None, heads: Any = None, rest: Rest = "renormalise"
) -> Edit:
    """Hide these keys from these queries; their weights go to the other keys that the queries see.

    queries   positions in the text, None for all: a whole number (negative ones count from the end), a slice, a word,
              or a list of these. A slice without a stop includes generated tokens
    keys      likewise; give at least one of queries and keys. A row without any key left has output 0
    layers    a list of layers' numbers or names, as in `seen.layers` of ch.watch; negative numbers count from the end
              of their stack; None is all
    heads     a list of heads of these layers; None is all
    rest      "renormalise": the other weights grow in proportion. "first": they stay, and the keys' weight moves to the
              first token, on which idle heads rest, or to a learned sink. To do so, -∞ is added to the keys' logits and
              ln(1 + Σ a_j/a_0) to that of the first token, which is never cut; with a sink of weight s,
              -ln(1 + Σ a_j/s) to the logits of all other keys. A row that may not see the first token is refused

    Words are those of the text that a model is given first: whole words, upper and lower case as written. A word that
    occurs several times is refused: "sat#2" is the second, "sat#all" all of them. Positions are as in ch.watch.

    Returns the edit, for `ch.change`. Raises RuleError if neither queries nor keys are given, DtypeError for a value of
    another kind, SelectionError for one that chooses nothing, UnknownNameError for any other `rest`.

    >>> import clearhead as ch
    >>> ch.cut(queries="on", keys="sat", layers=[0], heads=[3])
    cut(queries='on', keys='sat', layers=[0], heads=[3])
    >>> ch.cut(queries="on", keys="sat", rest="first")
    cut(queries='on', keys='sat', rest='first')
    """
    if queries is None and keys is None:
        raise RuleError("cut has neither queries nor keys: no weight would be left.", "ch.off(heads=[3])")
    moved = None if read_rest(rest) == "renormalise" else rest
    return _made("cut", layers, heads, queries=queries, keys=keys, rest=moved)


def boost(*, keys: Any, by: float, queries: Any = None, layers: Any = None, heads: Any = None) -> Edit:
    """Add `by` to the logits of these keys: before normalisation, their weights are e^by times as large.

    keys, queries, layers, heads   as in `cut`; keys must be given
    by        any finite number; below 0, the keys receive less

    Returns the edit, for `ch.change`. Raises RuleError for keys=None or a `by` that is not a finite number, and as
    `cut`. PASTA (Zhang et al. 2023), SpotLight and InstABoost boost the keys of an instruction this way.

    >>> import clearhead as ch
    >>> ch.boost(keys=slice(0, 12), by=2)
    boost(keys=slice(0, 12), by=2.0)
    """
    if keys is None:
        raise RuleError("boost has no keys: expected the keys that get more weight.", 'ch.boost(keys="word", …)')
    number = read_number("by", by, None)
    check_size("by", number)
    return _made("boost", layers, heads, queries=queries, keys=keys, by=number)


def off(*, layers: Any = None, heads: Any = None, to: str = "zero") -> Edit:
    """Switch heads off: replace their output by 0, or by its mean.

    layers, heads   as in `cut`
    to              "zero", or "mean": the mean over the queries that are not padding; needs the whole text in one run

    Returns the edit, for `ch.change`. Raises RuleError for any other `to`, and as `cut`.

    >>> import clearhead as ch
    >>> ch.off(layers=[1], heads=[2])
    off(to='zero', layers=[1], heads=[2])
    """
    if not isinstance(to, str) or to not in ("zero", "mean"):
        raise RuleError(expected("to", to, "'zero' or 'mean'"), 'to="mean"')
    return _made("off", layers, heads, to=to)


def like(seen: Any, *, layers: Any = None, heads: Any = None) -> Edit:
    """Replace the weights of heads by those of another run, applied to this run's values.

    seen            what ch.watch yielded for the other run, which must have the same batch and lengths
    layers, heads   as in `cut`; None is all that `seen` has

    The weights are computed from the other run's q, k and rules: O(tokens) memory, and the time of one more attention.
    They have no derivative; values have one.
    Returns the edit, for `ch.change`. Raises DtypeError if `seen` is something else, and as `cut`.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.watch(model) as clean:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> ch.like(clean, heads=[1])
    like(<Seen(1 layers of GPT2Model, 2 heads)>, heads=[1])
    """
    if not hasattr(seen, "parts"):
        raise DtypeError(expected("seen", seen, "what `with ch.watch(model) as seen` gave"), "ch.like(seen)")
    return _made("like", layers, heads, seen=seen)


MAKERS: dict[str, Callable[..., Edit]] = {made.__name__: made for made in (cut, boost, off, like)}


def read_edits(value: Any) -> tuple[Edit, ...]:
    """Read one edit or several, as a tuple. Raises DtypeError for anything else, RuleError for an empty list."""
    edits = (value,) if isinstance(value, Edit) else value
    if not isinstance(edits, (list, tuple)) or not all(isinstance(edit, Edit) for edit in edits):
        raise DtypeError(expected("edits", value, "an edit, or a list of edits"), "[ch.cut(keys=3)]")
    if not edits:
        raise RuleError("edits is empty: nothing would change.", "[ch.cut(keys=3)]")
    return tuple(edits)


@contextmanager
def change(model: Any, edits: Any, *, tokenizer: Any = None) -> Iterator[None]:
    """Edit a model's attention inside the block; afterwards the model is exactly as before.

    model      any model that `ch.watch` takes. A model of `ch.load_model` that runs in NumPy
               must run by `model.run(text)`, and can do nothing else inside the block
    edits      an edit or a list of edits: ch.cut, ch.boost, ch.off, ch.like
    tokenizer  finds the words that edits name; anything with decode(list of ids)

    Edits of logits (cut, boost) act in the order given, then those of outputs (off, like). A head with `like` takes no
    cut or boost.
    Positions and words refer to the text that the model is given first: (batch, tokens), padding included; in
    cross-attention, queries are the decoder's and keys the encoder's. Tokens that the model then generates with its
    cache come after it, and a slice without a stop includes them. A forward pass that starts over begins a new text.

    `ch.watch`, around this block or inside it, sees the edited attention: its weights, statistics and rules (`spans`);
    it refuses layers with `like`, whose weights the other run has. Gradients go through the edited attention; if layers
    are checkpointed, call backward inside the block. Compiled models run uncompiled inside the block.

    Raises, before the model runs: SelectionError for a layer that does not exist; RuleError for `like` with a run that
    saw nothing, or a model whose attention does not go through Transformers' AttentionInterface; DtypeError if `edits`
    or `model` is something else; MissingExtraError without PyTorch and Transformers. Before the first layer attends:
    SelectionError for a position or word that the text lacks, or a word that occurs several times. In the layer:
    SelectionError for a head that does not exist, ShapeError for `like` with a run of other lengths. When the block
    ends: RuleError for an edit that never acted, and a UserWarning for attention that bypasses the interface and was
    not changed.

    Takes the time of attention; each cut with rest="first" takes two more passes without values. Memory is
    O(queries + keys) per layer. Layers that no edit names run as before.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.change(model, ch.cut(queries=3, keys=[0, 1])), ch.watch(model) as seen:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> bool((seen.matrix(0)[0, :, 3, :2] == 0).all())
    True
    """
    from clearhead.watching.watch import room_of  # here, so that edits are made without all that watches models

    room, inner, reader = room_of(model, tokenizer)
    changed = load("hf.changing" if room == "hf" else "models.model").changed
    with changed(inner, read_edits(edits), reader):
        yield


def _as_code(value: Any) -> str:
    """Write a field as code."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_code, value))}]"
    if isinstance(value, slice):
        sides = [value.start, value.stop, *([] if value.step is None else [value.step])]
        return f"slice({', '.join(map(repr, sides))})"
    if hasattr(value, "parts"):  # another run
        return f"<{' '.join(repr(value).splitlines()[0].split())}>"
    return repr(value)


def _made(kind: str, layers: Any, heads: Any, **what: Any) -> Edit:
    what |= {name: read_places(name, what[name]) for name in ("queries", "keys") if name in what}
    names = None if layers is None else read_members("layers", layers, *LAYERS)
    whole = re.compile(r"-?[0-9]+").fullmatch  # the name "3" is the number 3
    chosen = names and tuple(int(one) if is_whole(one) or whole(one) else str(one) for one in names)
    some = None if heads is None else sorted(set(read_members("heads", heads, *_HEADS)))
    if some and some[0] < 0:
        raise SelectionError(f"heads holds {some[0]}: expected {_HEADS[1]}.", _HEADS[2])
    named = {"layers": _some("layers", chosen), "heads": _some("heads", some and tuple(map(int, some)))}
    return Edit(kind=kind, **named, **what)


def _some(name: str, members: Any) -> Any:
    """Return the members; None is all. Raises SelectionError for an empty list."""
    if members is not None and not members:
        raise SelectionError(f"{name} is empty: it chooses nothing.", f"leave {name} out for all.")
    return members
