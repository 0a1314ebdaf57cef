"""Another run's queries and keys in one call of attention: for `like`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core import visibility
from clearhead.core.arrays import as_rule_array
from clearhead.core.axes import KEY, QUERY, blocks, group_size, named
from clearhead.core.call import describe
from clearhead.core.namespace import namespace, numbers_like
from clearhead.core.problem import Problem
from clearhead.core.rules import RULES, fields_along
from clearhead.core.torch_state import ungraphed
from clearhead.errors import RuleError, SelectionError, ShapeError
from clearhead.ops.span_terms import SpanTerm, host
from clearhead.watching.layer import Layer
from clearhead.watching.places import Place

Rules = dict[str, Any]
_PER_HEAD = {name: RULES[name].neutral for name in fields_along("heads")}  # and what each is where it is not given
ROWS = 64  # queries whose mask is made at a time


def like(edit: Edit, chosen: Sequence[int] | None, place: Place, call: Any) -> Any:
    """The call (an EditedCall) with the other run's q, k, rules and terms in the chosen heads; None is all.

    Raises SelectionError where the other run has not this layer or its heads, ShapeError where the lengths differ,
    RuleError where its queries see other keys, or some of its keys are an encoder's.
    """
    count = call.q.shape[1]
    heads = list(range(count)) if chosen is None else list(chosen)
    layer = _layer(edit, place, call)
    _check_heads(layer, heads)
    whole, places = len(heads) == count, [layer.heads.index(head) for head in heads]
    part = layer.matrix().call
    if places != list(range(len(layer.heads))):
        part = part.take(heads=np.array(places))
    other_q, other_k, other, *_ = part.as_given(None)
    q, k = _near(other_q, call.q, "q", QUERY), _near(other_k, call.k, "k", KEY)
    _check_same_keys(layer.name, part.problem, heads, call.rules, (*call.q.shape[:3], call.k.shape[2]))
    v = call.v if k.shape[1] == call.v.shape[1] and whole else _for_each_head(call.v, count)
    rules, terms = _with_rules(layer.name, call.rules, other, heads, call.q), []
    if not whole:
        q, k = _replaced(call.q, heads, q), _replaced(_for_each_head(call.k, count), heads, k)
        for term in call.terms:  # which add nothing to the heads of the other run
            sizes = (term.table.shape[0], count, *term.table.shape[2:])
            of_each = namespace(term.table).broadcast_to(term.table, sizes)
            terms.append(replace(term, table=_replaced(of_each, heads, 0.0)))
    if other.get("spans") is not None:  # a term of these heads becomes one of all heads, which adds nothing to others
        term = SpanTerm.of(other["spans"])
        table = host(term.table)
        of_all = np.zeros((table.shape[0], count, *table.shape[2:]), table.dtype)
        of_all[:, heads] = table
        terms.append(replace(term, table=of_all))
    return replace(call, q=q, k=k, v=v, rules=rules, terms=tuple(terms))


def _layer(edit: Edit, place: Place, call: Any) -> Layer:
    """The other run's layer that belongs to this call."""
    if place.layer not in edit.seen.parts:
        raise SelectionError(f"the other run has no layer {place.layer}.", f"it has {', '.join(edit.seen.layers)}.")
    layer: Layer = edit.seen.layer(place.layer)
    if layer.other_keys:
        raise RuleError(f"layer {place.layer} is merged attention, whose last keys are an encoder's.")
    ours, theirs = (call.q.shape[2], call.k.shape[2]), (layer.observation.queries, layer.observation.keys)
    if ours != theirs:
        raise ShapeError(
            f"layer {layer.name} has (queries {ours[0]}, keys {ours[1]}) in this run and (queries {theirs[0]}, keys "
            f"{theirs[1]}) in the other.",
            "both runs need texts of the same length.",
        )
    return layer


def check_kept(edit: Edit, layers: Collection[Collection[str]]) -> None:
    """Raise unless the other run has the layers, heads and arrays that an edit needs: SelectionError or RuleError.

    layers   what chooses each layer of the model that is changed, as in `applying.check_layers`
    """
    if not edit.seen.parts:
        raise RuleError(
            f"{edit}: the other run saw no attention.", "run a model inside `with ch.watch(model) as seen`."
        )
    if all(edit.seen.layer(layer).q is None for layer in edit.seen.layers):
        raise RuleError(f"{edit}: the other run kept no queries and keys.", "ch.watch(model, keep=True)")
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


def _for_each_head(x: Any, heads: int) -> Any:
    """Keys or values, one for each query head: (batch, heads, keys, d)."""
    shared = group_size(heads, x.shape[1])
    return x if shared == 1 else x[:, [head // shared for head in range(heads)]]


def _replaced(x: Any, heads: Sequence[int], part: Any) -> Any:
    made = x.copy() if isinstance(x, np.ndarray) else x.clone()
    made[:, list(heads)] = part
    return made


def _near(x: Any, like: Any, name: str, axes: Sequence[str]) -> Any:
    """The other run's array as the kind of array that this call's is. Raises ShapeError."""
    if (x.shape[0], x.shape[3]) != (like.shape[0], like.shape[3]):
        raise ShapeError(f"the other run's {name} is {named(x.shape, axes)}, and this run's {named(like.shape, axes)}.")
    return numbers_like(x.detach() if hasattr(x, "detach") else x, like)


def _with_rules(layer: str, rules: Mapping[str, Any], other: Mapping[str, Any], heads: list[int], q: Any) -> Rules:
    """The call's rules with the other run's scale, slopes, sinks, softcap and bias for the heads taken from it."""
    count, made = q.shape[1], dict(rules)
    for name, unused in _PER_HEAD.items():
        unused = q.shape[-1] ** -0.5 if unused is None else unused
        given = (unused if x.get(name) is None else x[name] for x in (rules, other))
        ours, theirs = (as_rule_array(x.detach() if hasattr(x, "detach") else x, name) for x in given)
        mixed = np.array(np.broadcast_to(ours, count), np.float64)
        if (mixed[heads] != theirs).any():
            mixed[heads] = theirs
            made[name] = mixed
    if rules.get("softcap") != other.get("softcap"):
        if len(heads) < count:
            what = f"layer {layer} has another softcap in the other run, and all its heads have one."
            raise RuleError(what, "take all heads of the layer.")
        made["softcap"] = other.get("softcap")
    if rules.get("bias") is None and other.get("bias") is None:
        return made
    biases = rules.get("bias"), other.get("bias")
    ours, theirs = (numbers_like(np.zeros((1,) * 4) if x is None else x, q) for x in biases)
    whole = namespace(q).broadcast_to(ours, (*q.shape[:2], *np.broadcast_shapes(ours.shape, theirs.shape)[2:]))
    return made | {"bias": theirs if len(heads) == count else _replaced(whole, heads, theirs)}


def allowed(shape: Sequence[int], rules: Mapping[str, Any]) -> Problem:
    """The problem of a call (batch, heads, queries, keys) that has those of the rules alone that may forbid a key."""
    q, k = (np.broadcast_to(np.float32(0), (*shape[:2], size, 1)) for size in shape[2:])
    forbidding: Any = {name: value for name, value in rules.items() if RULES[name].forbids and name != "spans"}
    with ungraphed():
        return describe(q, k, None, forbidding | {"query_offset": rules.get("query_offset")}).problem


def _check_same_keys(
    layer: str, theirs: Problem, heads: list[int], rules: Mapping[str, Any], shape: Sequence[int]
) -> None:
    """Raise RuleError unless the other run's queries see the same keys, by its mask, window, padding, documents."""
    ours = allowed(shape, {name: value for name, value in rules.items() if name != "bias"})
    theirs = replace(theirs, bias=None, query_spans=None, key_spans=None, span_table=None)
    alike = all(x.mask is None or x.mask.strides[1] == 0 for x in (ours, theirs))
    for batch, (place, head) in product(range(ours.batch), list(enumerate(heads))[: 1 if alike else None]):
        for rows in blocks(ours.queries, ROWS):
            cols = slice(0, ours.keys)
            one, two = visibility.tile(ours, batch, head, rows, cols), visibility.tile(theirs, batch, place, rows, cols)
            if (np.asarray(one) != two).any():
                raise RuleError(
                    f"the other run has another padding or mask in layer {layer}: its queries see other keys.",
                    "both runs need the same padding and masks.",
                )
