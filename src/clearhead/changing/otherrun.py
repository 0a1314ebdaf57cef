"""Another run's queries and keys, or values, in one call of attention: for `like` and `values_like`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core import visibility
from clearhead.core.arrays import as_array, to_torch, torch_of
from clearhead.core.axes import KEY, QUERY, VALUE, Array, blocks, group_size, named
from clearhead.core.call import Call, describe
from clearhead.core.namespace import namespace, numbers_like
from clearhead.core.problem import Problem
from clearhead.core.rules import RULES, fields_along
from clearhead.core.torch_state import ungraphed
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError
from clearhead.ops.span_terms import SpanTerm, host
from clearhead.watching.layer import Layer
from clearhead.watching.places import Place

Rules = dict[str, Any]
_PER_HEAD = {name: RULES[name].neutral for name in fields_along("heads")}  # and what each is where it is not given
ROWS = 64  # queries whose mask is made at a time


@dataclass(frozen=True, eq=False)
class OtherPart:
    """The part of another run that belongs to one call.

    layer   its name
    call    the other run's attention at the places of this call's queries and keys, of the heads that are taken from it
    heads   this call's heads that take them
    whole   are these all heads of this call?
    """

    layer: str
    call: Call
    heads: list[int]
    whole: bool


def of(edit: Edit, heads: Sequence[int] | None, place: Place, count: int) -> OtherPart:
    """The other run's part for this call, which has so many heads, checked.

    Raises SelectionError where it has not this layer or its heads, RuleError where some of its keys are an encoder's,
    ShapeError where the lengths differ.
    """
    if place.layer not in edit.seen.parts:
        raise SelectionError(f"the other run has no layer {place.layer}.", f"it has {', '.join(edit.seen.layers)}.")
    layer = edit.seen.layer(place.layer)
    if layer.other_keys:
        raise RuleError(f"layer {place.layer} is merged attention, whose last keys are an encoder's.")
    wanted = list(range(count)) if heads is None else list(heads)
    _check_heads(layer, wanted)
    start = _start(layer, place.queries, place.keys, continues=place.continues)
    index, whole = [layer.heads.index(head) for head in wanted], len(wanted) == count
    taken = None if whole and index == list(range(len(layer.heads))) else np.array(index)
    call = layer.read().take(None, taken, range(start, start + len(place.queries)), place.keys)
    return OtherPart(place.layer, call, wanted, whole)


def check_kept(edit: Edit, layers: Collection[Collection[str]]) -> None:
    """Raise unless the other run has the layers, heads and arrays that an edit needs: SelectionError or RuleError.

    layers   what chooses each layer of the model that is changed, as in `applying.check_layers`
    """
    if not edit.seen.parts:
        raise RuleError(
            f"{edit}: the other run saw no attention.", "run a model inside `with ch.watch(model) as seen`."
        )
    side, words, how = {"like": ("q", "queries and keys", "keep=True")}.get(edit.kind, ("v", "values", "values=True"))
    if all(getattr(edit.seen.layer(layer), side) is None for layer in edit.seen.layers):
        raise RuleError(f"{edit}: the other run kept no {words}.", f"ch.watch(model, {how})")
    known = {name: edit.seen.layer(name) for name in edit.seen.layers}
    for asked in edit.named_layers():
        alike = [choices for choices in layers if edit.may_act((asked,), choices)]
        same = [x for name, x in known.items() if any(name == str(asked) or {name, x.path} & set(c) for c in alike)]
        if not same:
            raise SelectionError(f"{edit}: the other run has no layer {asked!r}.", f"it has {', '.join(known)}.")
        for layer in same:
            _check_heads(layer, edit.heads_in({str(asked)}) or (), f"{edit}: ")


def _check_heads(layer: Layer, wanted: Sequence[int], who: str = "") -> None:
    for head in wanted:
        if head not in layer.heads:
            kept = ", ".join(map(str, layer.heads))
            raise SelectionError(f"{who}the other run kept no head {head} of layer {layer.name}: kept are {kept}.")


def _start(layer: Layer, queries: range, keys: range, *, continues: bool) -> int:
    """The place of the first query among those of the other run's layer. Raises ShapeError where lengths differ."""
    seen = layer.observation
    start = queries.start - int(np.max(layer.rules.get("query_offset") or 0))
    same = (seen.queries, seen.keys, start) == (len(queries), len(keys), 0)
    if not same and not continues:
        raise ShapeError(
            f"layer {layer.name} has (queries {len(queries)}, keys {len(keys)}) in this run and (queries "
            f"{seen.queries}, keys {seen.keys}) in the other.",
            "both runs need texts of the same length.",
        )
    if start < 0 or start + len(queries) > seen.queries or keys.stop > seen.keys:
        raise ShapeError(
            f"this run comes to query {queries.stop} and key {keys.stop} of layer {layer.name}, and the other run has "
            f"(queries {seen.queries}, keys {seen.keys}).",
            "generate as many tokens in the other run.",
        )
    return start


def like(part: OtherPart, call: Any) -> Any:
    """The call (an EditedCall), its q, k, rules and terms of some heads or all replaced by the other run's."""
    other_q, other_k, other, *_ = part.call.as_given(None)
    other_q, other_k = _near(other_q, call.q, "q", QUERY), _near(other_k, call.k, "k", KEY)
    heads = call.q.shape[1]
    _check_same_keys(part, call.rules, (*call.q.shape[:3], call.k.shape[2]))
    rules, terms = _with_rules(part, call.rules, other, call.q), []
    if other.get("spans") is not None:  # a term of these heads becomes one of all heads, which adds nothing to others
        term = SpanTerm.of(other["spans"])
        table = host(term.table)
        whole = np.zeros((table.shape[0], heads, *table.shape[2:]), table.dtype)
        whole[:, part.heads] = table
        terms.append(replace(term, table=whole))
    if part.whole:
        v = call.v if other_k.shape[1] == call.v.shape[1] else for_each_head(call.v, heads)
        return replace(call, q=other_q, k=other_k, v=v, rules=rules, terms=tuple(terms))
    kept = []
    for term in call.terms:  # which add nothing to the heads of the other run
        sizes = (term.table.shape[0], heads, *term.table.shape[2:])
        of_each = namespace(term.table).broadcast_to(term.table, sizes)
        kept.append(replace(term, table=_replaced(of_each, part.heads, 0.0)))
    q, k = _replaced(call.q, part.heads, other_q), _replaced(for_each_head(call.k, heads), part.heads, other_k)
    return replace(call, q=q, k=k, v=for_each_head(call.v, heads), rules=rules, terms=(*kept, *terms))


def values_like(part: OtherPart, call: Any) -> Any:
    """The call (an EditedCall), its values of some heads or all replaced by the other run's."""
    other = _near(part.call.restore(cast("Array", part.call.v)), call.v, "v", VALUE)
    heads = call.q.shape[1]
    v = other if part.whole else _replaced(for_each_head(call.v, heads), part.heads, other)
    k = call.k if v.shape[1] == call.k.shape[1] else for_each_head(call.k, heads)
    return replace(call, k=k, v=v)


def for_each_head(x: Any, heads: int) -> Any:
    """Keys or values, one for each query head: (batch, heads, keys, d)."""
    shared = group_size(heads, x.shape[1])
    return x if shared == 1 else x[:, [head // shared for head in range(heads)]]


def _replaced(x: Any, heads: Sequence[int], part: Any) -> Any:
    made = x.copy() if torch_of(x) is None else x.clone()
    made[:, list(heads)] = part
    return made


def _near(x: Any, like: Any, name: str, axes: Sequence[str]) -> Any:
    """The other run's array as the kind of array that this call's is. Raises ShapeError or DtypeError."""
    torch = torch_of(like)
    if torch is None:
        array = as_array(x.detach() if hasattr(x, "detach") else x, name)[0]
    else:
        array = (to_torch(torch, x) if torch_of(x) is None else x).detach().to(like.device)
    if (array.shape[0], array.shape[3]) != (like.shape[0], like.shape[3]):
        raise ShapeError(
            f"the other run's {name} is {named(array.shape, axes)}, and this run's {named(like.shape, axes)}."
        )
    if array.dtype != like.dtype:
        raise DtypeError(f"the other run's {name} is {array.dtype}, and this run's {like.dtype}.")
    return array


def _with_rules(part: OtherPart, rules: Mapping[str, Any], other: Mapping[str, Any], q: Any) -> Rules:
    """The call's rules with the other run's scale, softcap, bias, slopes and sinks for the heads taken from it."""
    count, made = q.shape[1], dict(rules)
    for name, unused in _PER_HEAD.items():
        if rules.get(name) is None and other.get(name) is None:
            continue
        unused = q.shape[-1] ** -0.5 if unused is None else unused
        ours, theirs = (unused if x.get(name) is None else x[name] for x in (rules, other))
        if np.ndim(ours) or (host(theirs) != ours).any():
            made[name] = _mixed(ours, theirs, part.heads, count)
    if rules.get("softcap") != other.get("softcap"):
        if not part.whole:
            what = f"layer {part.layer} has another softcap in the other run, and all its heads have one."
            raise RuleError(what, "take all heads of the layer.")
        made["softcap"] = other.get("softcap")
    if rules.get("bias") is None and other.get("bias") is None:
        return made
    ours, theirs = (
        numbers_like(np.zeros((1,) * 4) if x is None else x, q) for x in (rules.get("bias"), other.get("bias"))
    )
    sizes = part.call.problem.queries, part.call.problem.keys
    whole = namespace(q).broadcast_to(ours, (*q.shape[:2], *sizes))
    return made | {"bias": theirs if part.whole else _replaced(whole, part.heads, theirs)}


def _mixed(ours: Any, theirs: Any, heads: Sequence[int], count: int) -> Any:
    """One number for each head, (heads,): ours, and the other run's for these heads; ours keep their graph."""
    if torch_of(ours) is not None:
        return _replaced(ours[None], heads, numbers_like(host(theirs), ours))[0]
    mixed = np.array(np.broadcast_to(ours, count), np.float64)
    mixed[list(heads)] = host(theirs)
    return mixed


def allowed(shape: Sequence[int], rules: Mapping[str, Any]) -> Problem:
    """The problem of a call (batch, heads, queries, keys) that has those of the rules alone that may forbid a key."""
    q, k = (np.broadcast_to(np.float32(0), (*shape[:2], size, 1)) for size in shape[2:])
    forbidding: Any = {name: value for name, value in rules.items() if RULES[name].forbids and name != "spans"}
    with ungraphed():
        return describe(q, k, None, forbidding | {"query_offset": rules.get("query_offset")}).problem


def _check_same_keys(part: OtherPart, rules: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Raise RuleError unless the other run's queries see the same keys, by its mask, window, padding, documents."""
    ours = allowed(shape, {name: value for name, value in rules.items() if name != "bias"})
    theirs = replace(part.call.problem, bias=None, query_spans=None, key_spans=None, span_table=None)
    alike = all(x.mask is None or x.mask.strides[1] == 0 for x in (ours, theirs))
    for batch, (place, head) in product(range(ours.batch), list(enumerate(part.heads))[: 1 if alike else None]):
        for rows in blocks(ours.queries, ROWS):
            cols = slice(0, ours.keys)
            one, two = visibility.tile(ours, batch, head, rows, cols), visibility.tile(theirs, batch, place, rows, cols)
            if (np.asarray(one) != two).any():
                raise RuleError(
                    f"the other run has another padding or mask in layer {part.layer}: its queries see other keys.",
                    "both runs need the same padding and masks.",
                )
