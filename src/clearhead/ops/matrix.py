"""AttentionMatrix: exact weights that are never stored; indexed, observed, multiplied and transposed on demand.

With q, k and each row's log-sum-exp L, every weight is available: a_ij = exp(logit_ij - L_i).
"""

from types import ModuleType
from typing import Any, Self, Unpack

import numpy as np

from clearhead import engines
from clearhead.core.arrays import as_array, autocast, broadcast, statistics_dtype
from clearhead.core.axes import WEIGHTS, Array, named, part_of
from clearhead.core.call import Call, Given, describe
from clearhead.core.effects import Rest
from clearhead.core.observations import values_of, wanted
from clearhead.core.rule_values import read_place, read_slice
from clearhead.core.rules import Rules, flat, with_options
from clearhead.core.state import State
from clearhead.core.statistics import Asked, Wanted, askable, explained
from clearhead.core.torch_state import graphed
from clearhead.engines.base import Engine
from clearhead.errors import SelectionError, shown
from clearhead.loading import load
from clearhead.ops import causes
from clearhead.ops.attention import recorder_of
from clearhead.ops.causes import EffectMatrix
from clearhead.ops.display import Display
from clearhead.ops.edited import Edit, Editable
from clearhead.ops.given_logsumexp import checked
from clearhead.ops.lazy_matrix import LazyMatrix
from clearhead.ops.observation import Observation, observation

_OUTPUT, _SMALL = Wanted(output=True), 1 << 20  # weights: below, the states of all rows are computed at once


class AttentionMatrix(LazyMatrix, Display, Editable):
    """The weights softmax(scale·q·kᵀ + …) as an array-like object, (…, heads, queries, keys), that is never stored.

    q (…, heads, queries, d_k) and k (…, kv_heads, keys, d_k); 2-D is one head. Rules as in `attention`. Its elements
    have the statistics' dtype: float32, or float64 for float64. Statistics come as the kind of array that q is.
    `engine`, as in `attention`, computes everything that is asked of the matrix.

    Creating it computes nothing. Each row's state, whose sum is the log-sum-exp, is computed once, when first needed,
    and kept: O(queries) memory.

    logsumexp   what another kernel computed for the same q, k and rules, (…, heads, queries): saves the pass over all
                keys. Natural logarithm, any float dtype, on q's device; -inf or +inf where a query sees no key

    Eight rows of each batch item and head are computed again and compared, O(keys·d_k) each. RuleError names the first
    that differs by more than rounding, and the usual causes. The tolerance is ε_L·|L| + 8ε·(1 + |L| + √keys +
    |scale|·‖q‖·‖k‖), ε_L for L's dtype, ε for float32 (float64 if q and L are float64), plus ε_q/2 for half precision.
    `logsumexp()` returns it and weights are computed from it, unless some |L| exceeds 128 (in float32), whose rounding
    would show in the weights: then it is computed here. The output and row statistics take a pass of their own. A given
    logsumexp has no derivative: RuleError while PyTorch records a graph for q, k or a rule.

    Raises what `attention` raises.
    Source: Vaswani et al. 2017, section 3.2.1; weights computed again as in Dao et al. 2022, appendix B.

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
    >>> A.shape, A[1].round(3)
    ((3, 3), array([0.36, 0.64, 0.  ]))
    """

    words = (
        "weights",
        "A[..., :512, :512] is a tile; A.image(256, 256) shows the whole, A.top(8) its strongest weights.",
    )
    instead = "A @ np.ones(A.shape[-1]) sums over keys, A.received() over queries, A.top(1) has each query's largest"

    @with_options
    def __init__(
        self,
        q: Any,
        k: Any,
        *,
        logsumexp: Any = None,
        engine: str | None = None,
        **rules: Unpack[Rules],
    ) -> None:
        given = Given(q, k, rules, engine)
        self._given: Given | None = given
        self._edits: tuple[str, ...] = ()
        self._call: Call | None = None
        self.known_state: State | None = None  # the rows' states, (batch, heads, queries) each, once they are computed
        self._recorder = self._recorder_with(logsumexp)
        if self._recorder is None:
            self._hold(describe(q, k, None, rules), engine)
            if logsumexp is not None:
                self.known_state = checked(self.call, self._engine, logsumexp)
        else:
            self._kind = self._recorder.check(given)
            if logsumexp is not None:
                what = "matrices with another kernel's logsumexp"
                raise self._recorder.refused(given, what, "AttentionMatrix(…), or leave logsumexp out.")

    def _hold(self, call: Call, engine: str | None, state: State | None = None) -> None:
        """Set the call, the engine (of this name, or the first that can) and the rows' states if they are known."""
        self._call = call
        self._engine, self._asked_engine, self.known_state = engines.chosen(call.problem, engine), engine, state
        self._kind = call.problem.shape, statistics_dtype(call.problem.dtype)

    def with_call(self, call: Call, state: State | None = None) -> "AttentionMatrix":
        """Make the matrix of another call, with the same edits and engine, and the rows' states if they are known."""
        made = AttentionMatrix.__new__(AttentionMatrix)
        made._given, made._recorder, made._edits = None, None, self._edits
        made._hold(call, self._asked_engine, state)
        return made

    def _edited(self, words: str, edit: Edit) -> Self:
        q, k, rules, engine = self._given or self.call.as_given(self._asked_engine)
        made = type(self)(q, k, engine=engine, **edit(q, rules))
        made._edits = (*self._edits, words)
        return made

    @property
    def call(self) -> Call:
        """q, k and the rules, read and validated. Raises RuleError while PyTorch records a graph for them."""
        if self._recorder is None and self._call is not None:
            return self._call
        return self._call_for("weights read by index", "A[…]; A @ v and A.observe keep the graph.")

    def _call_for(self, what: str, instead: str) -> Call:
        """Return the call for `what`, which has no derivative. Raises RuleError while PyTorch records a graph."""
        if self._recorder is not None and self._given is not None:
            recorder = self._recorder_with()
            if recorder is not None:
                raise recorder.refused(self._given, what, instead)
            if self._call is None:
                q, k, rules, engine = self._given
                self._hold(describe(q, k, None, rules), engine)
        assert self._call is not None
        return self._call

    def _plain(self, what: str, instead: str) -> "AttentionMatrix":
        """Return this matrix outside of PyTorch's graph, to compute `what` later. Raises as `_call_for`."""
        call = self._call_for(what, instead)
        return self if self._recorder is None else self.with_call(call, self.known_state)

    @property
    def state(self) -> State:
        """The rows' states, (batch, heads, queries) each; computed when first needed, and kept."""
        if self.known_state is None:
            self.known_state = engines.state_of(self._engine, self.call)
        return self.known_state

    def effect_engine(self) -> Engine:
        """Return the engine that computes effects of edges. Raises EngineError if the named engine cannot."""
        if hasattr(self._engine, "others"):
            return self._engine
        return engines.get(engines.choose(self.call.problem, self._asked_engine, what="effects").engine)

    def _recorder_with(self, *others: Any) -> ModuleType | None:
        """Return `recorder_of(q)` if q is a DTensor or PyTorch records q, k, a rule or one of `others`; else None."""
        if self._given is None:
            return None
        q, k, rules, *_ = self._given
        return recorder_of(q) if graphed(q, k, *flat(rules).values(), *others) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, queries, keys)."""
        return self._kind[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the weights: float32, or float64 for float64."""
        return self._kind[1]

    def __repr__(self) -> str:
        after = f", after {', '.join(self._edits)}" if self._edits else ""
        return f"AttentionMatrix{named(self.shape, WEIGHTS)} {self.dtype}, never stored{after}"

    def _known(self, batches: Array | None, heads: range | None, rows: range, cols: range) -> State:
        del cols
        if self.known_state is None and self.size <= _SMALL:
            self.state  # noqa: B018  computed for all rows at once and kept for the next index
        known = self._state_of(batches, heads, rows)
        return known or engines.state_of(self._engine, self.call.take(batches, heads, rows))

    def _part(self, batches: Array | None, heads: range | None, queries: range | None = None) -> "AttentionMatrix":
        """Make the matrix of some batch items, heads or queries (None: all), with their rows' states if known.

        If heads are chosen, each of them gets its own key head.
        """
        return self.with_call(self.call.take(batches, heads, queries), self._state_of(batches, heads, queries))

    def _state_of(self, *part: Any) -> State | None:
        """The states of some batches, heads and queries if they are known."""
        return None if self.known_state is None else State(*(part_of(x, *part) for x in self.known_state))

    def _product(self, x: Any, *, transposed: bool = False) -> Any:
        recorder = self._recorder or self._recorder_with(x)
        if recorder is not None:
            return (recorder.transposed if transposed else recorder.mix)(self._given, x)
        return super()._product(x if transposed else autocast(x), transposed=transposed)

    def _multiply(self, columns: Array, *, transposed: bool) -> Array:
        if transposed:
            return self._engine.transposed(self.call, self.state, columns)
        return self._engine.rows(self.call.with_values(columns), _OUTPUT)["output"]

    @with_options
    @explained(askable())
    def observe(self, v: Any = None, *, queries: slice = slice(None), **asked: Unpack[Asked]) -> Observation:
        """Compute the requested statistics: the output and row statistics in one pass, column statistics in another.

        STATISTICS

        v (…, kv_heads, keys, d_v) requests the output as well. `queries` restricts row statistics to these queries and
        column statistics to sums over them; groups still takes one label for every query.
        Returns an Observation, in which statistics that were not requested are None.
        Raises SelectionError when `queries` is no slice, RuleError, ShapeError, DtypeError or UnknownNameError for
        requests that do not fit, SizeError for more than fits in memory, all before any work; EngineError when no
        engine, or not the one named, computes what is requested.
        O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory beyond the answers.

        >>> import numpy as np, clearhead as ch
        >>> seen = ch.AttentionMatrix(np.eye(3), np.eye(3)).observe(np.eye(3), entropy=True, received=True)
        >>> seen.received, seen.peak is None
        (array([1., 1., 1.]), True)
        """
        if not isinstance(queries, slice):
            raise SelectionError(f"queries is {shown(queries)}: expected a slice.", "queries=slice(-64, None)")
        if queries != slice(None):
            read_slice("queries", queries, self.shape[-2])
        recorder = self._recorder or self._recorder_with(v)
        if recorder is not None:
            seen: Observation = recorder.observe(self._given, v, asked, queries)
            return seen
        problem, rows = self.call.problem, range(self.shape[-2])[queries]
        want = wanted(problem, asked, output=v is not None).for_queries(rows)
        values = None if v is None else values_of(problem, v, problem.kv_heads)
        part = self if rows == range(problem.queries) else self._part(None, None, rows)
        engine = engines.able(part._engine, part.call.problem, want, part._asked_engine)
        result = engines.answer(engine, part.call.with_values(values), want, part.known_state)
        if "largest" in result:
            part.known_state = State(*(result.pop(name) for name in State._fields))
        if want.logsumexp:
            result |= {name: x.copy() for name, x in part.state._asdict().items()}
        return observation(part.call.give_all(result), len(rows), problem.keys)

    def logsumexp(self) -> Any:
        """L_i = ln(Σ_j exp(s_ij) + exp(sink)), (…, heads, queries), by the natural logarithm; s_ij are the logits.

        -inf where a query may attend to no key. Computed once and kept.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).logsumexp().round(2)
        array([0.  , 0.69])
        """
        return self.observe(logsumexp=True).logsumexp

    def max_logit(self) -> Any:
        """The largest logit of each query, max_j s_ij over the keys it may attend to, (…, heads, queries).

        Logits are the softmax's input: after scale, softcap, bias, ALiBi and spans, without sinks. -inf where a
        query may attend to no key.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).max_logit()
        array([0., 0.])
        """
        return self.observe(max_logit=True).max_logit

    def entropy(self) -> Any:
        """-Σ_j a_ij ln a_ij in nats, (…, heads, queries); 0 where a query may attend to no key.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).entropy().round(2)
        array([0.  , 0.69])
        """
        return self.observe(entropy=True).entropy

    def distance(self) -> Any:
        """Σ_j a_ij·|position of query i - j|, the mean distance attended over, in tokens, (…, heads, queries).

        The position of query i is i + query_offset. 0 where a query may attend to no key.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).distance()
        array([0. , 0.5])
        """
        return self.observe(distance=True).distance

    def diagonal(self) -> Any:
        """The weight that each query gives the key at its position, (…, heads, queries); 0 if no key is there.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).diagonal()
        array([1. , 0.5])
        """
        return self.observe(diagonal=True).diagonal

    def received(self) -> Any:
        """Σ_i a_ij, the sum of the weights that each key receives, (…, heads, keys).

        The accumulated attention score of H2O (Zhang et al. 2023).

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).received()
        array([1.5, 0.5])
        """
        return self.observe(received=True).received

    def peak(self) -> Any:
        """max_i a_ij, the largest weight that each key receives from any query, (…, heads, keys); 0 if no query may.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).peak()
        array([1. , 0.5])
        """
        return self.observe(peak=True).peak

    def contributions(self, v: Any, g: Any) -> EffectMatrix:
        """Return each edge's contribution along g, c_ij = a_ij·(g_i·v_j), (…, heads, queries, keys), never stored.

        v   (…, kv_heads or heads, keys, d_v), or one for all heads, (keys, d_v)
        g   (…, heads, queries, d_v): the gradient of any number with respect to the head's output

        Over the keys, contributions sum to g_i·o_i. Creating it computes nothing. float32, or float64 where q, v or g
        is; autocast casts v as it does q and k. Raises ShapeError or DtypeError for arrays that do not fit or require
        grad, RuleError while PyTorch records a graph for q, k or a rule, EngineError if the engine named by the caller
        computes no effects.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True)
        >>> A.contributions(np.array([2.0, 6.0]), np.ones(2))[...]
        array([[2., 0.],
               [1., 3.]])
        """
        return causes.contributions(self._plain("contributions", "A.contributions(v, g)"), v, g)

    def cut_effects(self, v: Any, g: Any, *, rest: Rest = "renormalise") -> EffectMatrix:
        """Return the change of g_i·o_i when query i may not see key j, (…, heads, queries, keys), never stored.

        v and g as in `contributions`. e_ij = a_ij/(1 - a_ij)·(g_i·o_i - g_i·v_j): softmax renormalises the other keys
        and the sink; -g_i·o_i if j is the only key that i sees. A row's largest weight may be so near 1 that 1 - a_ij
        has no digits left, so for that key the output over all other keys is computed separately, m_i = g_i·o'_i, and
        e_ij = a_ij·(m_i - g_i·v_j). Exact at the head's output; g stands for all that follows, to first order.

        rest   "renormalise", or "first": the weight moves to the first key, on which idle heads rest, even where a row
               may not see it: e_ij = a_ij·(g_i·v_0 - g_i·v_j); to the learned sink if there is one: -a_ij·g_i·v_j

        Raises as `contributions`; UnknownNameError for any other `rest`.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True)
        >>> A.cut_effects(np.array([2.0, 6.0]), np.ones(2))[...]
        array([[-2.,  0.],
               [ 2., -2.]])
        >>> A.cut_effects(np.array([2.0, 6.0]), np.ones(2), rest="first")[1]
        array([ 0., -2.])
        """
        return causes.cut_effects(self._plain("cuts", "A.cut_effects(v, g)"), v, g, rest)

    def __shown__(self, batch: int, v: Any = None) -> Any:
        problem, shown = self.call.problem, load("view.long")
        values = None
        if v is not None:
            read = values_of(problem, v, problem.kv_heads)
            values = broadcast(read, (problem.batch, problem.kv_heads, *read.shape[2:]))[batch : batch + 1]
        return shown.ShownRun("attention", [shown.ShownLayer("", range(problem.heads), self.part(batch), v=values)])

    def part(self, batch: int, head: int | None = None) -> "AttentionMatrix":
        """The matrix of one batch item, with all heads or one: (1, heads, queries, keys).

        `batch` counts over all leading axes together. Raises SelectionError when there is no such item or head.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.ones((2, 4, 3, 8)), np.ones((2, 4, 3, 8))).part(batch=1, head=3).shape
        (1, 1, 3, 3)
        """
        problem, heads = self._call_for("parts", "A.part(batch)").problem, None
        batches = np.array([read_place("batch", batch, problem.batch)])
        if head is not None:
            place = read_place("head", head, problem.heads)
            heads = range(place, place + 1)
        return self._part(batches, heads)


def with_state(matrix: AttentionMatrix, state: State) -> AttentionMatrix:
    """Set the rows' known states, (batch, heads, queries), and return the matrix; ignored where a graph is recorded."""
    if matrix._call is not None:
        matrix.known_state = State(*(as_array(x, name)[0] for name, x in state._asdict().items()))
    return matrix
