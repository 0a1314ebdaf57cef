"""Applies edits to one call of attention, in NumPy and PyTorch alike, by the library's own rules.

Edits of logits become one rule `spans`; edits of outputs act on the output of attention. So an edited call takes the
time of attention and O(queries + keys) memory.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.namespace import astype, beside, dtype_name, namespace, numbers_like
from clearhead.core.rules import RULES
from clearhead.core.state import State
from clearhead.core.torch_state import ungraphed
from clearhead.errors import ClearheadError, RuleError, SelectionError, ShapeError
from clearhead.ops.attention import attention
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.span_terms import SpanTerm, combined, host
from clearhead.watching.places import Place, Positions, Text, find

Rules = dict[str, Any]
OTHER_RUN = "its weights come from another run (ch.like), and ch.watch cannot see them.", "leave it out of layers=[…]."


@dataclass(frozen=True, eq=False)
class EditedCall:
    """A call of attention, edited or not yet. `whole_rules()` and q, k make the matrix of its weights."""

    q: Any  # (batch, heads, queries, d_k)
    k: Any  # (batch, kv_heads, keys, d_k)
    v: Any  # (batch, kv_heads, keys, d_v)
    rules: Rules  # without spans
    terms: tuple[SpanTerm, ...] = ()
    afterwards: tuple[Callable[[Any], Any], ...] = ()

    def whole_rules(self) -> Rules:
        """The rules, with `spans` if a term adds anything."""
        spans = combined(self.terms)
        return self.rules if spans is None else {**self.rules, "spans": spans}

    def finish(self, output: Any) -> Any:
        """Apply the edits of outputs to the output of attention, (batch, heads, queries, d_v)."""
        for change in self.afterwards:
            output = change(output)
        return output

    def output(self) -> Any:
        """The edited output, (batch, heads, queries, d_v)."""
        return self.finish(attention(self.q, self.k, self.v, **self.whole_rules()))


OneCall = TypeVar("OneCall", bound=EditedCall)


def edited(call: OneCall, acting: Sequence[Edit], place: Place) -> OneCall:
    """Apply the edits of a layer to one call of attention.

    call     arrays in NumPy or PyTorch, rules as `ch.attention` takes them, bias and mask with 4 axes
    acting   the edits of this layer
    place    the call's place in the run

    Edits of logits act in the order given, then those of outputs. The result's `output()` is the edited output, and
    `AttentionMatrix(result.q, result.k, **result.whole_rules())` has the edited weights. Raises SelectionError for a
    head, position or word that does not exist, ShapeError if another run's lengths differ, RuleError if a head gets
    another run's weights and a cut or boost. O(queries + keys) time besides attention; two more passes for each cut
    with rest="first".
    """
    plain = dict(call.rules)
    spans = plain.pop("spans", None)
    call = call if spans is None else replace(call, rules=plain, terms=(*call.terms, SpanTerm.of(spans)))
    for edit in acting:
        if edit.heads is not None and max(edit.heads) >= call.q.shape[1]:
            what = f"there is no head {max(edit.heads)} in layer {place.layer}, which has {call.q.shape[1]}."
            raise SelectionError(f"{edit}: {what}")
        others = [one.heads for one in acting if one is not edit and one.kind != "off"]
        if edit.seen is not None and any(not edit.heads or not x or set(edit.heads) & set(x) for x in others):
            raise RuleError(f"{edit}: another edit acts on the weights that it replaces.", "give them different heads.")
        try:
            call = _APPLY[edit.kind](call, edit, place)
        except ClearheadError as error:
            raise type(error)(f"{edit}: {error.what}", error.hint) from error
    return call


def check_layers(edits: Sequence[Edit], layers: Collection[Collection[str]], model: str, hint: str) -> None:
    """Raise SelectionError for an edit of a layer that the model does not have, RuleError for a run that saw nothing.

    layers   for each layer the `choices` of `acts_in`
    """
    for edit in edits:
        for layer in edit.layers or ():
            if not any(replace(edit, layers=(layer,)).may_act(choices) for choices in layers):
                raise SelectionError(f"{edit}: there is no layer {layer!r} in {model}.", hint)
        if edit.seen is not None and not edit.seen.parts:
            what = f"{edit}: the other run saw no attention."
            raise RuleError(what, "run a model inside `with ch.watch(model) as seen`.")


def check_places(edit: Edit, queries: Text, keys: Text) -> dict[str, Positions]:
    """Find the positions that an edit names. Raises SelectionError for a position or word that these texts lack."""
    sides = {"queries": (edit.queries, queries), "keys": (edit.keys, keys)}
    try:
        return {name: find(name, value, text) for name, (value, text) in sides.items() if value is not None}
    except ClearheadError as error:
        raise type(error)(f"{edit}: {error.what}", error.hint) from error


def placed(edits: Sequence[Edit], text: Text) -> tuple[Edit, ...]:
    """Turn the edits' queries and keys into positions. Raises SelectionError for those that the text lacks.

    text   the whole text: nothing will be generated after it
    """
    made: list[Edit] = []
    for edit in edits:
        try:
            found = check_places(edit, text, text)
        except SelectionError as error:  # its hint about generated tokens does not apply here
            hint = f"positions are 0 to {text.length - 1}." if "position" in error.what else error.hint
            raise SelectionError(error.what, hint) from None
        places = {name: np.flatnonzero(x.members(range(text.length))[0]) for name, x in found.items()}
        empty = next((name for name, members in places.items() if not len(members)), None)
        if empty:
            raise SelectionError(f"{edit}: its {empty} lie beyond the text's {text.length} tokens.")
        positions: Any = {name: tuple(members.tolist()) for name, members in places.items()}
        made.append(replace(edit, **positions))
    return tuple(made)


def _labels(edit: Edit, place: Place) -> tuple[Array, Array]:
    """Labels of the call's queries and keys, (batch or 1, queries or keys): 0 if the edit names them, else -1."""
    queries = find("queries", edit.queries, place.query_text).labels(place.queries)
    return queries, find("keys", edit.keys, place.key_text).labels(place.keys)


def acts(edit: Edit, shape: tuple[int, int, int, int], rules: Mapping[str, Any], place: Place) -> bool:
    """Can the edit change this call: do the call's rules let any of the edit's queries see any of its keys?

    shape    (batch, heads, queries, keys)
    rules    the call's rules without edits; `spans` is ignored

    O(queries + keys) memory, and the time of attention with d_k = 1 if the edit names queries and keys of this call.
    """
    if edit.kind not in ("cut", "boost"):
        return True
    queries, keys = _labels(edit, place)
    if not (queries >= 0).any() or not (keys >= 0).any():
        return False
    q, k = (np.broadcast_to(np.float32(0), (*shape[:2], size, 1)) for size in shape[2:])
    forbidding = {name: value for name, value in rules.items() if RULES[name].forbids and name != "spans"}
    if forbidding.get("bias") is not None:
        forbidding["bias"] = np.where(np.isneginf(host(forbidding["bias"])), -np.inf, np.float32(0))
    with ungraphed():
        matrix = AttentionMatrix(q, k, query_offset=rules.get("query_offset"), **forbidding)
        sums = matrix.groups(*(np.broadcast_to(x, (shape[0], x.shape[1])) for x in (queries, keys)))
    return bool((sums if edit.heads is None else sums[:, list(edit.heads)]).any())


def _cut(call: OneCall, edit: Edit, place: Place) -> OneCall:
    """Add -inf to these logits; with rest="first", move the weights by ch.cut's formulas, from log-sum-exps."""
    if edit.rest is None:
        return _added(call, edit, place)
    queries, keys = (labels >= 0 for labels in _labels(edit, place))
    sinks = call.rules.get("sinks")
    first = np.broadcast_to(np.asarray(place.keys) == 0, keys.shape)
    keys = keys & ~first if sinks is None else keys
    moved = _state_of(call, queries, keys, edit.heads)
    xp, moves = namespace(moved.largest), moved.largest > -np.inf
    if sinks is None:
        rest = _state_of(call, queries, first, edit.heads)
    else:
        rest = State(numbers_like(sinks, moved.largest)[:, None], xp.zeros_like(moved.log_sum))
    if not bool(((rest.largest > -np.inf) | ~moves).all()):
        raise RuleError("a query that sees these keys does not see the first token.", 'rest="renormalise"')
    odds = xp.where(moves, moved.largest, 0.0) - xp.where(moves, rest.largest, 0.0) + (moved.log_sum - rest.log_sum)
    gain = xp.where(moves, xp.logaddexp(odds, xp.zeros_like(odds)), 0.0)
    cut = xp.zeros_like(gain) + numbers_like(_per_head(-np.inf, edit.heads, call.q.shape[1]), gain)[:, None]
    table = xp.stack([cut, gain if sinks is None else -gain], -1)
    labels = np.where(keys, 0, np.where(first | (sinks is not None), 1, -1))
    term = SpanTerm(np.where(queries, np.arange(len(place.queries)), -1), labels, table, by_row=True)
    return replace(call, terms=(*call.terms, term))


def _added(call: OneCall, edit: Edit, place: Place) -> OneCall:
    """Add a number to the logits of these queries and keys; -inf cuts."""
    queries, keys = _labels(edit, place)
    amount = edit.by if edit.kind == "boost" else -np.inf
    table = _per_head(amount, edit.heads, call.q.shape[1]).reshape(1, -1, 1, 1)
    return replace(call, terms=(*call.terms, SpanTerm(queries, keys, table)))


def _state_of(call: EditedCall, queries: Array, keys: Array, heads: Sequence[int] | None) -> State:
    """The rows' states over these keys alone, without sinks, (batch, heads, queries); other rows and heads see none."""
    only = np.full((call.q.shape[1], 2, 2), -np.inf)
    only[slice(None) if heads is None else list(heads), 0, 0] = 0.0
    term = SpanTerm(np.where(queries, 0, 1), np.where(keys, 0, 1), only[None])
    rules = {name: value for name, value in call.rules.items() if name != "sinks"}
    rules["spans"] = combined((*call.terms, term))

    state = AttentionMatrix(call.q, call.k, **rules).observe(logsumexp=True).state
    assert state is not None
    return state


def _off(call: OneCall, edit: Edit, place: Place) -> OneCall:
    """Replace the heads' outputs by 0, or by their mean."""
    if edit.to == "mean" and place.queries.start:
        raise RuleError("the mean needs the whole text in one run, and this run continues a cache.", "use_cache=False")

    def change(output: Any) -> Any:
        return _chosen(0.0 if edit.to == "zero" else _mean(output, place), output, edit)

    return replace(call, afterwards=(*call.afterwards, change))


def _like(call: OneCall, edit: Edit, place: Place) -> OneCall:
    """Replace the heads' outputs by another run's weights times this call's values."""
    if place.layer not in edit.seen.parts:
        raise SelectionError(f"the other run has no layer {place.layer}.", f"it has {', '.join(edit.seen.layers)}.")
    matrix, shape = edit.seen.matrix(place.layer), (*call.q.shape[:3], call.k.shape[2])
    if matrix.shape != shape:
        raise ShapeError(
            f"layer {place.layer} has {named(shape, WEIGHTS)} in this run and {named(matrix.shape, WEIGHTS)} in the "
            "other.",
            "both runs need texts of the same length.",
        )

    def change(output: Any) -> Any:
        return _chosen(matrix @ call.v, output, edit)

    return replace(call, afterwards=(*call.afterwards, change))


def _mean(output: Any, place: Place) -> Any:
    """The mean over the queries that are not padding, (batch, heads, 1, d_v)."""
    real = np.ones((1, output.shape[-2]), bool) if place.real is None else place.real
    mask = beside(real[:, None, :, None], output)
    wide = astype(output, "float64" if dtype_name(output) == "float64" else "float32")  # half precision rounds sums
    total, count = namespace(output).where(mask, wide, 0.0).sum(-2, keepdims=True), mask.sum(-2, keepdims=True)
    return total / count.clip(1)


def _chosen(inside: Any, outside: Any, edit: Edit) -> Any:
    """`inside` for the edit's heads, `outside` for the others, (batch, heads, …); in the dtype of `outside`."""
    mask = np.zeros((outside.shape[1], *(1,) * (outside.ndim - 2)), bool)
    mask[slice(None) if edit.heads is None else list(edit.heads)] = True
    return namespace(outside).where(beside(mask, outside), numbers_like(inside, outside), outside)


_APPLY: dict[str, Callable[[Any, Edit, Place], Any]] = {"cut": _cut, "boost": _added, "off": _off, "like": _like}


def _per_head(value: float, heads: Sequence[int] | None, count: int) -> Array:
    """`value` for the chosen heads and 0 for the others, (heads,); (1,) if all are chosen."""
    numbers = np.full(1 if heads is None else count, 0.0)
    numbers[slice(None) if heads is None else list(heads)] = value
    return numbers
