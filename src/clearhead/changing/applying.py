"""One call of attention, edited: NumPy arrays and PyTorch tensors alike, through the library's own rules.

Edits of logits become the rules `scale`, `softcap`, `bias`, `alibi_slopes`, `sinks` and one rule `spans`; edits of
outputs act on what attention returns. So an edited call costs what attention costs, and O(queries + keys) memory.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np

from clearhead.changing import otherrun
from clearhead.changing.edits import Edit
from clearhead.core import visibility
from clearhead.core.axes import Array, blocks
from clearhead.core.namespace import astype, beside, dtype_name, namespace, numbers_like
from clearhead.core.problem import Problem
from clearhead.core.rules import Rules as RuleNames
from clearhead.core.state import State
from clearhead.errors import ClearheadError, RuleError, SelectionError
from clearhead.ops.attention import attention
from clearhead.ops.edited import divided
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.span_terms import SpanTerm, combined
from clearhead.watching.places import Place, Positions, Text, find

Heads = Sequence[int] | None  # None is all
Rules = dict[str, Any]


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
        """The rules, with `spans` where a term adds anything."""
        spans = combined(self.terms)
        return self.rules if spans is None else {**self.rules, "spans": spans}

    def finish(self, output: Any) -> Any:
        """The edits of outputs on what attention returned, (batch, heads, queries, d_v)."""
        for change in self.afterwards:
            output = change(output)
        return output

    def output(self) -> Any:
        """The edited output, (batch, heads, queries, d_v)."""
        return self.finish(attention(self.q, self.k, self.v, **self.whole_rules()))


OneCall = TypeVar("OneCall", bound=EditedCall)


def edited(call: OneCall, acting: Sequence[tuple[Edit, Heads]], place: Place) -> OneCall:
    """One call of attention with edits, in the order given.

    call     its arrays are NumPy's or tensors, its rules as `ch.attention` takes them; bias and mask with 4 axes
    acting   the edits of this layer, each with the heads that it changes, as `acting_in` gives them; None is all
    place    where in the run this call is

    Edits of weights act in the order given, then those of outputs. The result's `output()` is the
    edited output, and `AttentionMatrix(result.q, result.k, **result.whole_rules())` the edited weights. Raises
    SelectionError for a head, position or word that there is not, ShapeError where another run's lengths differ,
    RuleError where its rules do. Time O(queries + keys) and what attention takes; two more passes for each cut with
    rest="first".
    """
    plain = dict(call.rules)
    spans = plain.pop("spans", None)
    call = call if spans is None else replace(call, rules=plain, terms=(*call.terms, SpanTerm.of(spans)))
    for edit, heads in acting:
        if heads is not None and max(heads) >= call.q.shape[1]:
            what = f"there is no head {max(heads)} in layer {place.layer}, which has {call.q.shape[1]}."
            raise SelectionError(f"{edit}: {what}")
        try:
            call = _APPLY[edit.kind](call, edit, heads, place)
        except ClearheadError as error:
            raise type(error)(f"{edit}: {error.what}", error.hint) from error
    return call


def acting_in(edits: Sequence[Edit], name: str, choices: Collection[str]) -> list[tuple[Edit, Heads]]:
    """The edits that act in a layer, each with its heads there.

    name      the layer's name, as `seen.layers` of ch.watch has it, such as "3"
    choices   all that chooses it in `layers=`: its name, its number, its number from the end, such as {"3", "-1"}
    """
    return [(edit, edit.heads_in(choices)) for edit in edits if edit.acts_in(name, choices)]


def check_layers(edits: Sequence[Edit], layers: Sequence[tuple[Collection[str], int]], model: str, hint: str) -> None:
    """Raise SelectionError for an edit of a layer or head that the model has not, before it runs.

    layers   for each layer what chooses it, as in `acting_in`, and how many heads it has; 0 where that is not known
    """
    for edit in edits:
        for layer in edit.named_layers():
            if not any(edit.may_act((layer,), choices) for choices, _ in layers):
                raise SelectionError(f"{edit}: there is no layer {layer!r} in {model}.", hint)
        for named, heads in edit.heads_by_layers():
            most = max((count for choices, count in layers if edit.may_act(named, choices)), default=0)
            if most and max(heads) >= most:
                raise SelectionError(f"{edit}: there is no head {max(heads)} in {model}, which has {most}.")


def check_places(edit: Edit, queries: Text, keys: Text) -> dict[str, Positions]:
    """The positions of what an edit names. Raises SelectionError for a position or a word that these texts have not."""
    sides = {"queries": (edit.queries, queries), "keys": (edit.keys, keys)}
    try:
        return {name: find(name, value, text) for name, (value, text) in sides.items() if value is not None}
    except ClearheadError as error:
        raise type(error)(f"{edit}: {error.what}", error.hint) from error


def placed(edits: Sequence[Edit], text: Text) -> tuple[Edit, ...]:
    """The same edits, their queries and keys as positions. Raises SelectionError for those that the text has not.

    text   the whole text: nothing is generated after it
    """
    made: list[Edit] = []
    for edit in edits:
        try:
            found = check_places(edit, text, text)
        except SelectionError as error:  # of a position it would say how to wait for a generated token
            hint = f"positions are 0 to {text.length - 1}." if "position" in error.what else error.hint
            raise SelectionError(error.what, hint) from None
        places = {name: np.flatnonzero(x.members(range(text.length))[0]) for name, x in found.items()}
        empty = next((name for name, members in places.items() if not len(members)), None)
        if empty:
            raise SelectionError(f"{edit}: its {empty} are none of the text's {text.length} tokens.")
        positions: Any = {name: tuple(members.tolist()) for name, members in places.items()}
        made.append(replace(edit, **positions))
    return tuple(made)


def _labels(edit: Edit, place: Place) -> tuple[Array, Array]:
    """The queries and the keys of this call that an edit is about, 0, others -1: (batch or 1, queries or keys)."""
    queries = find("queries", edit.queries, place.query_text).labels(place.queries)
    return queries, find("keys", edit.keys, place.key_text).labels(place.keys)


def acts(edit: Edit, heads: Heads, shape: tuple[int, int, int, int], rules: Mapping[str, Any], place: Place) -> bool:
    """Can the edit change this call: do the call's own rules let any of its queries see any of its keys?

    shape    (batch, heads, queries, keys)
    rules    those of the call without edits; what `spans` forbids is not asked

    O(queries + keys) where positions decide it; where masks, segments or biases forbid all of it, they are read.
    """
    if edit.kind not in ("cut", "boost"):
        return True
    queries, keys = (np.broadcast_to(labels >= 0, (shape[0], labels.shape[1])) for labels in _labels(edit, place))
    if not queries.any() or not keys.any():
        return False
    problem = otherrun.allowed(shape, rules)
    alike = all(x is None or x.strides[1] == 0 for x in (problem.mask, problem.bias))
    asked = range(shape[1]) if heads is None else heads
    return any(
        _meet(problem, batch, head, queries[batch], keys[batch])
        for batch in range(shape[0])
        for head in (asked[:1] if alike else asked)
    )


def _meet(problem: Problem, batch: int, head: int, queries: Array, keys: Array) -> bool:
    """May any of these queries, bool (queries,), of one head see any of these keys, bool (keys,)?"""
    columns = np.flatnonzero(keys)
    for rows in blocks(problem.queries, otherrun.ROWS) if len(columns) else ():
        if not queries[rows].any():
            continue
        reach = visibility.key_span(problem, batch, rows)
        near = columns[np.searchsorted(columns, reach.start) : np.searchsorted(columns, reach.stop)]
        if len(near):
            cols = slice(near[0], near[-1] + 1)
            seen = visibility.tile(problem, batch, head, rows, cols)
            if (seen & queries[rows, None] & keys[cols]).any():
                return True
    return False


def _cut(call: OneCall, edit: Edit, heads: Heads, place: Place) -> OneCall:
    """-inf added to these logits; where the weights move, it is by ch.cut's formulas, from log-sum-exps."""
    if edit.rest is None:
        return _added(call, edit, heads, place)
    queries, keys = (labels >= 0 for labels in _labels(edit, place))
    sinks = call.rules.get("sinks")
    first = np.broadcast_to(np.asarray(place.keys) == 0, keys.shape)
    keys = keys & ~first if sinks is None else keys
    moved = _state_of(call, queries, keys, heads)
    xp, moves = namespace(moved.largest), moved.largest > -np.inf
    if sinks is None:
        rest = _state_of(call, queries, first, heads)
    else:
        rest = State(numbers_like(sinks, moved.largest)[:, None], xp.zeros_like(moved.log_sum))
    if not bool(((rest.largest > -np.inf) | ~moves).all()):
        raise RuleError("a query that sees these keys does not see the first token.", 'rest="renormalise"')
    odds = xp.where(moves, moved.largest, 0.0) - xp.where(moves, rest.largest, 0.0) + (moved.log_sum - rest.log_sum)
    gain = xp.where(moves, xp.logaddexp(odds, xp.zeros_like(odds)), 0.0)
    cut = xp.zeros_like(gain) + numbers_like(_per_head(-np.inf, 0.0, heads, call.q.shape[1]), gain)[:, None]
    table = xp.stack([cut, gain if sinks is None else -gain], -1)
    labels = np.where(keys, 0, np.where(first | (sinks is not None), 1, -1))
    term = SpanTerm(np.where(queries, np.arange(len(place.queries)), -1), labels, table, by_row=True)
    return replace(call, terms=(*call.terms, term))


def _added(call: OneCall, edit: Edit, heads: Heads, place: Place) -> OneCall:
    """A number added to the logits of these queries and keys: -inf cuts."""
    queries, keys = _labels(edit, place)
    amount = edit.by if edit.kind == "boost" else -np.inf
    table = _per_head(amount, 0.0, heads, call.q.shape[1]).reshape(1, -1, 1, 1)
    return replace(call, terms=(*call.terms, SpanTerm(queries, keys, table)))


def _state_of(call: EditedCall, queries: Array, keys: Array, heads: Heads) -> State:
    """The rows' states over these keys alone, without sinks, (batch, heads, queries); other rows and heads see none."""
    only = np.full((call.q.shape[1], 2, 2), -np.inf)
    only[slice(None) if heads is None else list(heads), 0, 0] = 0.0
    term = SpanTerm(np.where(queries, 0, 1), np.where(keys, 0, 1), only[None])
    rules = {name: value for name, value in call.rules.items() if name != "sinks"}
    rules["spans"] = combined((*call.terms, term))

    state = AttentionMatrix(call.q, call.k, **rules).observe(logsumexp=True).state
    assert state is not None
    return state


def _tempered(call: OneCall, edit: Edit, heads: Heads, _: Place) -> OneCall:
    """Every logit, the sink's too, over t."""
    t = np.ones(call.q.shape[1])
    t[slice(None) if heads is None else list(heads)] = edit.t
    rules: Rules = dict(divided(cast("RuleNames", call.rules), t, call.q))
    return replace(call, rules=rules, terms=tuple(term.times(1 / t) for term in call.terms))


def _of_outputs(call: OneCall, edit: Edit, heads: Heads, place: Place) -> OneCall:
    """The heads' outputs times a number, or 0, or their mean."""
    if edit.to == "mean" and place.queries.start:
        raise RuleError("the mean is over the queries of one run, and this one goes on with a text.", "use_cache=False")

    def change(output: Any) -> Any:
        if edit.kind == "scaled":
            return _chosen(_wide(output) * edit.by, output, heads)
        return _chosen(0.0 if edit.to == "zero" else _mean(output, place), output, heads)

    return replace(call, afterwards=(*call.afterwards, change))


def _mean(output: Any, place: Place) -> Any:
    """The mean over the queries that are not padding, (batch, heads, 1, d_v)."""
    real = np.ones((1, output.shape[-2]), bool) if place.real is None else place.real
    mask = beside(real[:, None, :, None], output)
    total, count = namespace(output).where(mask, _wide(output), 0.0).sum(-2, keepdims=True), mask.sum(-2, keepdims=True)
    return total / count.clip(1)


def _chosen(inside: Any, outside: Any, heads: Heads) -> Any:
    """`inside` for these heads, `outside` for the others, (batch, heads, …); in the dtype of `outside`."""
    mask = np.zeros((outside.shape[1], *(1,) * (outside.ndim - 2)), bool)
    mask[slice(None) if heads is None else list(heads)] = True
    return namespace(outside).where(beside(mask, outside), numbers_like(inside, outside), outside)


def _wide(x: Any) -> Any:
    """The same in float32 or better: half precision would round sums and factors."""
    return astype(x, "float64" if dtype_name(x) == "float64" else "float32")


_APPLY: dict[str, Callable[[Any, Edit, Heads, Place], Any]] = {
    "cut": _cut,
    "boost": _added,
    "tempered": _tempered,
    "off": _of_outputs,
    "scaled": _of_outputs,
    "like": lambda call, edit, heads, place: otherrun.like(edit, heads, place, call),
}


def _per_head(value: float, rest: float, heads: Heads, count: int) -> Array:
    """One number for each head, (heads,); (1,) where all have the same."""
    if heads is None:
        return np.full(1, value)
    numbers = np.full(count, rest)
    numbers[list(heads)] = value
    return numbers
