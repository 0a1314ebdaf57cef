"""A.cut, A.boost and A.tempered: matrices of the same q and k under edited rules.

An edit changes the rules only: A.cut and A.boost add one more term to the rule `spans`, and A.tempered divides the
rules' numbers by t. So q and k are shared, and nothing is computed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from clearhead.core.arrays import as_rule_array, torch_of, unrepeated
from clearhead.core.axes import Array
from clearhead.core.namespace import astype, dtype_name, namespace
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rule_values import Extent, is_whole, read_number
from clearhead.core.rules import RULES, Rules
from clearhead.core.spans import parts_of, read_spans
from clearhead.core.torch_state import graphed, ungraphed
from clearhead.errors import RuleError, SelectionError, shown
from clearhead.ops.span_terms import SpanTerm, combined

SMALLEST_T = 1e-30  # float32 can hold it and its inverse
_T = "t=1.5 makes weights flatter, t=0.5 sharper."
Edit = Callable[[Any, Rules], Rules]  # of q and the rules


class Editable:
    """The edits of an attention matrix; each subclass has `shape` and `_edited`."""

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, ...]: ...

        def _edited(self, words: str, edit: Edit) -> Self:
            """Make the matrix of the same q and k under edited rules; its repr shows these words."""

    def cut(self, queries: Any = None, keys: Any = None) -> Self:
        """Hide these keys from these queries: logit_ij = -∞, and softmax renormalises the rest of each row.

        queries   None for all; a position, or several in a list or an array of one axis, negative ones counted from the
                  end; a slice; bool (queries,)
        keys      likewise, bool (keys,); give at least one of queries and keys

        Returns a matrix of the same q, k and engine; its log-sum-exp is computed, even if A's was given. A row without
        keys has output 0 and log-sum-exp -∞. The edit becomes a rule `spans`: a label for each query and key, and a
        table of what each pair of labels adds; several edits are merged into one such rule.
        Raises SelectionError for a position outside, a value that is no index or one that chooses nothing, RuleError if
        neither is given, EngineError if the named engine lacks the rule `spans`. O(queries + keys) time and memory.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3)).cut(queries=[1, 2], keys=slice(0, 2))
        >>> A[...].round(3)
        array([[0.471, 0.264, 0.264],
               [0.   , 0.   , 1.   ],
               [0.   , 0.   , 1.   ]])
        >>> A
        AttentionMatrix(queries 3, keys 3) float64, never stored, after cut(queries=[1, 2], keys=0:2)
        """
        if queries is None and keys is None:
            raise RuleError("cut has neither queries nor keys: no weight would be left.", "A.cut(keys=0)")
        return self._added("cut", queries, keys, -np.inf)

    def boost(self, keys: Any, *, by: float, queries: Any = None) -> Self:
        """Add `by` to the logits of these keys: before normalisation, their weights are e^by times as large.

        keys      as in `cut`
        by        a number; below 0, the keys receive less
        queries   as in `cut`: only these queries' rows are boosted; None for all

        Returns a matrix as `cut` does. Raises RuleError for another value of `by`, and what `cut` raises.
        O(queries + keys) time and memory.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((3, 4))).boost(0, by=np.log(2), queries=1)
        >>> A[...].round(3)
        array([[0.333, 0.333, 0.333],
               [0.5  , 0.25 , 0.25 ]])
        """
        hint = "by=2.0, for example; A.cut(queries, keys) removes keys altogether."
        amount = read_number("by", by, None, hint)
        return self._added("boost", queries, keys, amount, by=amount)

    def tempered(self, t: float) -> Self:
        """softmax(logits/t): weights become flatter for t above 1, sharper below. A learned sink is divided as well.

        t   a number above 0 (1e-30 to 1e30)

        Returns a matrix as `cut` does. Divides scale, softcap, bias, alibi_slopes, spans (with earlier edits) and sinks
        by t; later edits add to logits/t. If A has a bias, bias/t is stored, which takes as much memory as the bias.
        Finite numbers stay finite: they are clipped to the largest of their dtype.

        Raises RuleError for another value of t, or one that scale or softcap cannot be divided by; SizeError where
        bias/t does not fit in memory. O(1) time and memory beyond the rules' own.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.eye(2), np.eye(2), scale=1.0).tempered(0.5)
        >>> A[0].round(3), A
        (array([0.881, 0.119]), AttentionMatrix(queries 2, keys 2) float64, never stored, after tempered(0.5))
        """
        number = read_number("t", t, None, _T)
        if not SMALLEST_T <= number <= 1 / SMALLEST_T:
            raise RuleError(f"t is {number}: expected a number above 0, from 1e-30 to 1e30.", _T)
        return self._edited(f"tempered({number})", lambda q, rules: divided(rules, number, q))

    def _added(self, name: str, queries: Any, keys: Any, amount: float, **more: Any) -> Self:
        sizes, said, labels = self.shape[-2:], [], []
        for side, value, size in (("queries", queries, sizes[0]), ("keys", keys, sizes[1])):
            chosen = _chosen(side, value, size)
            said += [] if value is None else [f"{side}={_in_words(value, chosen)}"]
            labels.append(np.where(chosen, 0, -1)[None])
        words = f"{name}({', '.join(said + [f'{one}={value}' for one, value in more.items()])})"
        term = SpanTerm(labels[0], labels[1], np.full((1, 1, 1, 1), amount))
        return self._edited(words, lambda q, rules: with_term(rules, term, q, sizes))


def with_term(rules: Rules, term: SpanTerm, q: Any, sizes: tuple[int, ...]) -> Rules:
    """The rules with one more term of `spans`."""
    prefix = tuple(q.shape[:-2])
    before = [] if rules.get("spans") is None else [_term_of(rules["spans"], prefix, sizes)]
    made = combined([*before, term])
    if made is None:
        return rules
    lead = prefix[:-1]
    labels = [side.reshape(*lead, side.shape[-1]) if side.ndim > 1 else side for side in made[:2]]
    table = made[2].reshape(*lead, *made[2].shape[1:]) if made[2].ndim > 3 else made[2]
    return cast("Rules", {**rules, "spans": (*labels, table)})


def divided(rules: Rules, t: float, q: Any) -> Rules:
    """Make the rules under which logits are divided by t."""
    if t == 1:
        return rules
    result: Any = dict(rules)
    for name, rule in RULES.items():
        if rule.logits and (rules.get(name) is not None or rule.always):
            result[name] = _OVER.get(name, _over)(name, rules.get(name), t, q)
    return cast("Rules", result)


def _scale_over(name: str, value: Any, t: float, q: Any) -> Any:
    prefix = tuple(q.shape[:-2])
    sizes = Extent(prefix, prefix[-1] if prefix else 1, 0, 0, q.shape[-1], "cpu")
    with ungraphed(), np.errstate(over="ignore"):
        numbers = RULES[name].read(name, value, sizes, {}) / t
    return float(numbers[0]) if (numbers == numbers[0]).all() else numbers


_OVER: dict[str, Callable[[str, Any, float, Any], Any]] = {
    "scale": _scale_over,
    "softcap": lambda _, value, t, __: float(value) / t,
    "spans": lambda name, value, t, q: (*parts_of(value)[:2], _over(name, parts_of(value)[2], t, q)),
}


def _over(name: str, value: Any, t: float, q: Any) -> Any:
    """Divide a rule's array by t in at least the statistics' precision; a tensor keeps its graph."""
    whole = name == "bias"  # which may be large; it broadcasts again
    wide = np.float32 if whole and not str(q.dtype).endswith("float64") else np.float64
    x: Any = as_rule_array(value, name) if torch_of(value) is None else value
    x = unrepeated(x) if whole else x
    check_room(f"{name}/t", array_bytes(x.shape, 8), "A.part(batch, head) has less.")
    dtype = np.promote_types(np.dtype(dtype_name(x)), wide)
    x, largest = astype(x, dtype), float(np.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
        result = namespace(x).clip(x / t, -largest, largest)
    return namespace(x).where(namespace(x).isinf(x), x, result)


def _term_of(spans: Any, prefix: tuple[int, ...], sizes: tuple[int, ...]) -> SpanTerm:
    """Read a value of the rule `spans` as a term; its table has size 1 along axes that it is broadcast over."""
    *labels, table = parts_of(spans)
    recorded = graphed(table)
    plain = np.zeros(table.shape) if recorded else table  # where PyTorch transforms a table, its numbers are not read
    with ungraphed():
        queries, keys, numbers = read_spans((*labels, plain), prefix, sizes)
    numbers = unrepeated(numbers, 2)  # the axes batch and heads
    if not recorded:
        return SpanTerm(queries, keys, numbers)
    wide, lead = table.double(), prefix[:-1]
    wide = wide.reshape((1,) * (len(prefix) + 2 - wide.ndim) + tuple(wide.shape))
    if len(numbers) != 1:
        wide = wide.expand(*lead, *wide.shape[len(lead) :])
    return SpanTerm(queries, keys, wide.reshape(numbers.shape))


def _chosen(name: str, value: Any, size: int) -> Array:
    """Read a choice of positions as bool (size,), True for those chosen.

    Raises SelectionError for a value that is no index of one axis, and for one that chooses nothing.
    """
    if value is None:
        return np.ones(size, bool)
    flags, index = np.zeros(size, bool), value
    wanted = f"a position, a list of positions, a slice, or True and False for each of {size}"
    hint = f"{name}=[0, 3] or {name}=slice(0, 4); ch.cut and ch.boost also take words, for a model's run."
    if isinstance(value, (str, bytes)):
        raise SelectionError(f"{name} is {shown(value)}: expected {wanted}.", hint)
    if not isinstance(value, slice):
        index = as_rule_array([*value] if isinstance(value, range) else value, name)
        index = index if index.size else slice(0)
    try:
        if getattr(index, "shape", None) == () and index.dtype.kind == "b":
            raise TypeError("one True or False is no position")  # NumPy would select everything or nothing
        flags[index] = True
    except (IndexError, TypeError, ValueError):
        raise SelectionError(f"{name} is {shown(value)}: expected {wanted}.", hint) from None
    if not flags.any():
        raise SelectionError(f"{name} is {shown(value)}: it chooses none of {size} {name}.", f"{name}=None is all.")
    return flags


def _in_words(value: Any, chosen: Array) -> str:
    """Write a choice as in an index, such as 4:8 or [0, 3]; more than 8 positions as their count."""
    if isinstance(value, slice):
        sides = (value.start, value.stop) if value.step is None else (value.start, value.stop, value.step)
        return ":".join("" if side is None else str(side) for side in sides)
    if is_whole(value):
        return str(value)
    places = np.flatnonzero(chosen).tolist()
    return str(places) if len(places) <= 8 else f"{len(places)} of {len(chosen)}"
