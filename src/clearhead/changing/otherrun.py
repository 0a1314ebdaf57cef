"""Another run's queries and keys, or values, in one call of attention: for `like` and `values_like`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.changing.places import Place
from clearhead.changing.tensors import library, numbers_like, spread
from clearhead.core.arrays import as_array, to_torch, torch_of
from clearhead.core.axes import KEY, QUERY, VALUE, Array, group_size, named
from clearhead.core.rules import RULES, fields_along
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError
from clearhead.layers.layer import Layer
from clearhead.layers.naming import ModulePath
from clearhead.ops.span_terms import SpanTerm, for_heads, host

Rules = dict[str, Any]
_PER_HEAD = {name: RULES[name].neutral for name in fields_along("heads")}  # and what each is where it is not given


@dataclass(frozen=True, eq=False)
class Part:
    """The part of another run that belongs to one call: the layer, and the places of the call's queries and keys."""

    layer: Layer
    heads: list[int]  # the heads that the call takes from it
    index: list[int]  # their places among the layer's kept heads
    whole: bool  # are these all heads of the call?
    queries: slice
    keys: slice
    place: Place


def of(edit: Edit, heads: Sequence[int] | None, place: Place, x: Any) -> Part:
    """The other run's part for this call, checked. `x` is the call's q, or its v for values.

    Raises SelectionError where it has not this layer or its heads, RuleError where it kept no arrays, ShapeError where
    the lengths differ.
    """
    if place.layer not in edit.seen.parts:
        raise SelectionError(f"the other run has no layer {place.layer}.", f"it has {', '.join(edit.seen.layers)}.")
    layer = edit.seen.layer(place.layer)
    if layer.other_keys:
        raise RuleError(f"layer {place.layer} is merged attention, whose last keys are an encoder's.")
    count = x.shape[1] if edit.kind == "like" else max(x.shape[1], 1 + max(layer.heads))  # of v there may be fewer
    wanted = list(range(count)) if heads is None else list(heads)
    _check_heads(layer, wanted)
    start = _start(layer, place.queries, place.keys, continues=place.continues)
    rows, columns = slice(start, start + len(place.queries)), slice(place.keys.start, place.keys.stop)
    index = [layer.heads.index(head) for head in wanted]
    return Part(layer, wanted, index, len(wanted) == count, rows, columns, place)


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


def check_lengths(edit: Edit, kind: ModulePath, queries: range, keys: range, *, continues: bool) -> None:
    """Raise ShapeError where a layer that an edit needs, of this kind, has other lengths in the other run."""
    for name in edit.seen.layers:
        layer, path = edit.seen.layer(name), ModulePath.of(edit.seen.layer(name).path)
        alike = path._replace(numbers=kind.numbers) == kind and layer.call == 1
        if alike and edit.acts_in(name, {name, layer.path, *path.numbers[:1]}):
            try:
                _start(layer, queries, keys, continues=continues)
            except ShapeError as error:
                raise ShapeError(f"{edit}: {error.what}", error.hint) from None


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


def weights(
    part: Part, q: Any, k: Any, rules: Mapping[str, Any], terms: Sequence[SpanTerm]
) -> tuple[Any, Any, Rules, tuple[SpanTerm, ...]]:
    """q, k, rules and terms of the call, those of some heads or all replaced by the other run's."""
    layer = part.layer
    if layer.q is None or layer.k is None:
        raise RuleError(
            f"the other run kept no queries and keys of layer {part.place.layer}.", "ch.watch(…, keep=True)"
        )
    other_q = _near(layer.q, q, "q", QUERY)[:, part.index, part.queries]
    _check_rules(part, rules)
    other_k, chosen = _of_heads(layer.k, part, k, "k", KEY), for_heads(layer.rules, part.index)
    made = _with_rules(part, rules, chosen, q)
    spans = chosen.get("spans")
    new: tuple[SpanTerm, ...] = ()
    if spans is not None:  # a term of these heads becomes one of all heads, which adds nothing to the others
        term = SpanTerm.of(spans).take(part.queries, part.keys)
        table = host(term.table)
        whole = np.zeros((table.shape[0], q.shape[1], *table.shape[2:]), table.dtype)
        whole[:, list(part.heads)] = table
        new = (replace(term, table=whole),)
    if part.whole:
        return other_q, other_k, made, new
    kept = []
    for term in terms:  # which add nothing to the heads of the other run
        of_each = library(term.table).broadcast_to(term.table, (term.table.shape[0], q.shape[1], *term.table.shape[2:]))
        kept.append(replace(term, table=_replaced(of_each, part.heads, 0.0)))
    q = _replaced(q, part.heads, other_q)
    return q, _replaced(for_each_head(k, q.shape[1]), part.heads, other_k), made, (*kept, *new)


def values(part: Part, v: Any, heads: int) -> Any:
    """The call's values, those of some heads or all replaced by the other run's; one for each query head then."""
    layer = part.layer
    if layer.v is None:
        raise RuleError(f"the other run kept no values of layer {part.place.layer}.", "ch.watch(…, values=True)")
    other = _of_heads(layer.v, part, v, "v", VALUE)
    return other if part.whole else _replaced(for_each_head(v, heads), part.heads, other)


def _of_heads(x: Any, part: Part, like: Any, name: str, axes: Sequence[str]) -> Any:
    """The other run's keys or values of the call's places: all of them as they are, or one for each head taken."""
    array, count = _near(x, like, name, axes), len(part.layer.heads)
    if part.whole and part.index == list(range(count)):
        return array[:, :, part.keys]
    shared = group_size(count, x.shape[1])
    return array[:, [place // shared for place in part.index], part.keys]


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


def _with_rules(part: Part, rules: Mapping[str, Any], other: Mapping[str, Any], q: Any) -> Rules:
    """The call's rules with the other run's scale, softcap, bias, slopes and sinks for the heads taken from it."""
    count, made = q.shape[1], dict(rules)
    for name, unused in _PER_HEAD.items():
        if rules.get(name) is None and other.get(name) is None:
            continue
        unused = q.shape[-1] ** -0.5 if unused is None else unused
        ours, theirs = (unused if x.get(name) is None else x[name] for x in (rules, other))
        if np.ndim(ours) == np.ndim(theirs) == 0 and ours == theirs:
            continue
        made[name] = _mixed(ours, theirs, part.heads, count)
    if rules.get("softcap") != other.get("softcap"):
        ours, theirs = (spread(x.get("softcap"), size) for x, size in ((rules, count), (other, len(part.heads))))
        caps = list(ours)
        for head, cap in zip(part.heads, theirs, strict=True):
            caps[head] = cap
        made["softcap"] = caps[0] if len(set(caps)) == 1 else tuple(caps)
    bias = _bias(part, rules.get("bias"), other.get("bias"), q)
    return made if bias is None else made | {"bias": bias}


def _mixed(ours: Any, theirs: Any, heads: Sequence[int], count: int) -> Any:
    """One number for each head, (heads,): ours, and the other run's for these heads; ours keep their graph."""
    if torch_of(ours) is not None:
        return _replaced(ours[None], heads, numbers_like(host(theirs), ours))[0]
    mixed = np.array(np.broadcast_to(ours, count), np.float64)
    mixed[list(heads)] = host(theirs)
    return mixed


def _bias(part: Part, ours: Any, theirs: Any, q: Any) -> Any:
    if theirs is not None:
        theirs = numbers_like(theirs, q)[_places(theirs, part)]
    if ours is None and theirs is None:
        return None
    sizes = len(part.place.queries), len(part.place.keys)
    if part.whole and theirs is not None:
        return theirs
    zeros = numbers_like(np.zeros((1, 1, *sizes)), q)
    whole = library(zeros).broadcast_to(zeros if ours is None else ours, (*q.shape[:2], *sizes))
    return _replaced(whole, part.heads, zeros if theirs is None else theirs)


def _places(x: Any, part: Part) -> tuple[Any, ...]:
    """The index of the call's queries and keys in an array (…, queries or 1, keys or 1)."""
    sides = zip(x.shape[-2:], (part.queries, part.keys), strict=True)
    return (..., *(slice(None) if size == 1 else chosen for size, chosen in sides))


def _check_rules(part: Part, rules: Mapping[str, Any]) -> None:
    """Raise RuleError unless the other run's queries see the same keys: its mask, window, padding, documents."""
    other = _visible(part.layer.rules, part.place, part)
    for name, ours in _visible(rules, part.place, None).items():
        theirs = other[name]
        if ours is None or theirs is None:
            same = ours is theirs
        else:
            one, two = np.broadcast_arrays(ours, theirs)
            same = np.array_equal(one, two)
        if not same:
            raise RuleError(
                f"the other run has another {name} in layer {part.place.layer}: its queries see other keys.",
                "both runs need the same padding and masks.",
            )


def _visible(rules: Mapping[str, Any], place: Place, part: Part | None) -> dict[str, Array | None]:
    """What rules say of which keys are seen, by the names that errors have for it; of the other run, at its places."""
    said = {"causal or window": _reach(rules, place), "padding or mask": _mask(rules, place, part)}
    for name, side in (("query_segments", "queries"), ("kv_segments", "keys")):
        labels = rules.get(name)
        chosen = slice(None) if part is None else getattr(part, side)
        said[name] = None if labels is None else host(labels)[..., chosen]
    return said


def _reach(rules: Mapping[str, Any], place: Place) -> Array:
    """How many keys before and after its own position a query may see, where that forbids any of these keys."""
    left, right = rules.get("window") or (None, None)
    if rules.get("causal"):
        right = 0 if right is None else min(right, 0)
    if left is not None and place.queries.stop - 1 - left <= place.keys.start:
        left = None
    if right is not None and place.keys.stop - 1 <= place.queries.start + right:
        right = None
    return np.array([-1 if left is None else left, -1 if right is None else right])


def _mask(rules: Mapping[str, Any], place: Place, part: Part | None) -> Array | None:
    """What mask and kv_lengths allow, (batch or 1, heads or 1, queries or 1, keys); None where nothing is forbidden."""
    allowed: Array = np.ones((1, 1, 1, len(place.keys)), bool)
    if rules.get("kv_lengths") is not None:
        lengths = host(rules["kv_lengths"]).reshape(-1, 1)
        start = 0 if part is None else part.keys.start
        allowed = (np.arange(start, start + len(place.keys)) < lengths)[:, None, None, :]
    if rules.get("mask") is not None:
        mask = host(rules["mask"])
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        allowed = allowed & (mask if part is None else mask[_places(mask, part)])
    return None if allowed.all() else allowed
