"""AttentionMatrix: exact weights that are never stored; indexed, observed, multiplied and transposed on demand.

With q, k and each row's log-sum-exp L, every weight is available: a_ij = exp(logit_ij - L_i).
"""

from types import ModuleType
from typing import Any, Self, Unpack

import numpy as np

from clearhead.core.arrays import as_array
from clearhead.core.axes import WEIGHTS, named
from clearhead.core.call import Given
from clearhead.core.effects import Rest
from clearhead.core.rule_values import read_place, read_slice
from clearhead.core.rules import Rules, flat
from clearhead.core.state import State
from clearhead.core.statistics import Asked, askable, explained
from clearhead.core.torch_state import graphed
from clearhead.errors import RuleError, SelectionError, shown
from clearhead.loading import load
from clearhead.ops import cause_inputs
from clearhead.ops.attention import recorder_of
from clearhead.ops.causes import CauseMatrix
from clearhead.ops.display import Display
from clearhead.ops.edited import Edit, Editable
from clearhead.ops.indexing import TransposedMatrix, read_index
from clearhead.ops.lazy_matrix import LazyMatrix
from clearhead.ops.matrix_data import MatrixData
from clearhead.ops.observable import Observable
from clearhead.ops.observation import Observation


class AttentionMatrix(LazyMatrix, Display, Editable, Observable):
    """The weights softmax(scale·q·kᵀ + …) as an array-like object, (…, heads, queries, keys), that is never stored.

    q (…, heads, queries, d_k) and k (…, kv_heads, keys, d_k); 2-D is one head. Rules as in `attention`. Its elements
    have the statistics' dtype: float32, or float64 for float64. Statistics come as the kind of array that q is. engine
    and num_threads, as in `attention`, hold for whatever is computed of it.

    Creating it computes nothing. Each row's state, whose sum is the log-sum-exp, is computed once, when first needed,
    and kept: O(queries) memory.

    logsumexp   another kernel's, (…, heads, queries), of the same q, k and rules: only looking is paid for then. By the
                natural logarithm, in any float dtype, on q's device; -inf or +inf where a query sees no key

    Eight rows of it for each batch item and head are checked, O(keys·d_k) each. Where one is off by more than rounding,
    ε_L·|L| + 8ε·(1 + |L| + √keys + |scale|·‖q‖·‖k‖) with the ε of L's dtype and of float32 (of float64 where q and L
    are), for half precision half of q's ε more, RuleError names the first row that is, and the usual causes.
    `logsumexp()` returns it and weights are computed from it, unless one of its numbers is so large, above 128 in
    float32, that its rounding would show in the weights: then it is computed here. The output and row statistics come
    from a pass of their own. It has no derivative: RuleError while PyTorch records a graph for q, k or a rule; results
    that a later graph needs are computed without it.

    Pickling and copying keep q, k, the rules and a known log-sum-exp: copy.copy shares them, copy.deepcopy, pickle,
    multiprocessing and torch.save copy them (torch.load needs weights_only=False). Where a tensor of them is the result
    of a graph that PyTorch recorded, RuleError, but for copy.copy; a leaf that requires gradients stays one. Raises
    what `attention` raises.
    Source: Vaswani et al. 2017, section 3.2.1; weights computed again as in Dao et al. 2022, appendix B.

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
    >>> A.shape, A[1].round(3)
    ((3, 3), array([0.36, 0.64, 0.  ]))
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        *,
        logsumexp: Any = None,
        engine: str | None = None,
        num_threads: int | None = None,
        **rules: Unpack[Rules],
    ) -> None:
        given = Given(q, k, rules, engine, num_threads)
        self._given: Given | None = given
        self._edits: tuple[str, ...] = ()
        self._recorder = self._recorder_with(logsumexp)
        self._factors: MatrixData | None = None
        if self._recorder is None:
            self._factors = MatrixData.read(*given, logsumexp)
            self._kind = self._factors.shape, self._factors.dtype
        else:
            self._kind = self._recorder.check(given)
            if logsumexp is not None:
                raise self._recorder.refused_logsumexp(given)

    @classmethod
    def _of(cls, factors: MatrixData, edits: tuple[str, ...]) -> "AttentionMatrix":
        """A matrix of validated factors, such as a part of another matrix after these edits."""
        made = cls.__new__(cls)
        made._given, made._recorder, made._factors, made._edits = None, None, factors, edits
        made._kind = factors.shape, factors.dtype
        return made

    def _edited(self, words: str, edit: Edit) -> Self:
        q, k, rules, engine, num_threads = self._given or self.factors.inputs()
        made = type(self)(q, k, engine=engine, num_threads=num_threads, **edit(q, rules))
        made._edits = (*self._edits, words)
        return made

    @property
    def factors(self) -> MatrixData:
        """q, k, the rules and the log-sum-exp, validated. Raises RuleError while PyTorch records a graph for them."""
        return self._factors_for("weights read by index", "A[…]; A @ v and A.observe keep the graph.")

    def _factors_for(self, what: str, call: str) -> MatrixData:
        if self._factors is not None:
            return self._factors
        assert self._given is not None
        recorder = self._recorder_with()
        if recorder is not None:
            raise recorder.refused(self._given, what, call)
        return MatrixData.read(*self._given)

    def _recorder_with(self, *others: Any) -> ModuleType | None:
        """The module that computes DTensors, or where PyTorch records a graph for q, k, a rule or one of `others`."""
        if self._given is None:
            return None
        q, k, rules, *_ = self._given
        return recorder_of(q) if graphed(q, k, *flat(rules).values(), *others) else None

    def _answers(self, name: str, *given: Any) -> Any:
        """Call the recorder's function or, where PyTorch records nothing, the factors' method; v or g comes first."""
        recorder = self._recorder or self._recorder_with(given[0])
        if recorder is None:
            return getattr(self.factors, name)(*given)
        return getattr(recorder, name)(self._given, *given)

    def __copy__(self) -> "AttentionMatrix":
        made = AttentionMatrix.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        if self._given is None:
            return {"factors": self._factors, "edits": self._edits}
        q, k, rules, *_ = self._given
        for name, x in {"q": q, "k": k, **flat(rules)}.items():
            if getattr(x, "grad_fn", None) is not None:
                raise RuleError(f"{name} belongs to PyTorch's graph, which cannot be copied.", f"{name}.detach()")
        known = None if self._factors is None else self._factors.known_state
        return {"given": self._given, "state": known, "dtype": self._q_dtype(), "edits": self._edits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "factors" in state:
            self.__dict__ = AttentionMatrix._of(state["factors"], state["edits"]).__dict__
            return
        q, k, rules, engine, num_threads = state["given"]
        AttentionMatrix.__init__(self, q, k, engine=engine, num_threads=num_threads, **rules)
        self._edits = state["edits"]
        if self._factors is not None and state["state"] is not None and state["dtype"] == self._q_dtype():
            self._factors.state = state["state"]

    def _q_dtype(self) -> np.dtype[Any] | None:
        """The dtype that q is computed in, which autocast may have narrowed; None for a graph."""
        return None if self._factors is None else self._factors.problem.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, queries, keys)."""
        return self._kind[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the weights: float32, or float64 for float64."""
        return self._kind[1]

    @property
    def T(self) -> "TransposedMatrix[AttentionMatrix]":  # noqa: N802
        """Aᵀ, the last two axes swapped: (…, heads, keys, queries), for A.T @ g. What NumPy calls `mT`."""
        return TransposedMatrix(self, self._by_index, self._transposed)

    mT = T  # noqa: N815

    def __repr__(self) -> str:
        after = f", after {', '.join(self._edits)}" if self._edits else ""
        return f"AttentionMatrix{named(self.shape, WEIGHTS)} {self.dtype}, never stored{after}"

    def __getitem__(self, key: Any) -> Any:
        """Exact weights by integers, slices with steps and Ellipsis; only the weights asked for are computed.

        Returns an array of the indexed shape in the matrix's dtype, of q's kind. Raises SelectionError for any other
        index or one outside its axis, SizeError for more weights than fit in memory, RuleError while PyTorch records a
        graph. O(rows·keys·d_k) time for the log-sum-exp, the first time; then O(weights·d_k).

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)[1:, :2].round(3)
        array([[0.36 , 0.64 ],
               [0.264, 0.264]])
        """
        return self._by_index(key)

    def _by_index(self, key: Any, *, transposed: bool = False) -> Any:
        factors = self.factors
        picked, swap = read_index(key, factors.shape, transposed=transposed)
        tile = factors.weights(picked)
        return factors.restore(tile.swapaxes(-1, -2) if swap else tile)

    def __matmul__(self, v: Any) -> Any:
        """A·v, (…, heads, queries, d_v), the same bits as `attention`.

        v (…, kv_heads or heads, keys, d_v), or one for all heads, (keys,) or (keys, d_v). Raises what `attention`
        raises for v. O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory. torch.compile traces `@` of tensors
        only: use `A.observe(v).output` there.

        >>> import numpy as np, clearhead as ch
        >>> (ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True) @ np.arange(3.0)).round(3)
        array([0.   , 0.64 , 1.207])
        """
        return self._answers("mix", v)

    def _transposed(self, g: Any) -> Any:
        return self._answers("transposed", g)

    @explained(askable())
    def observe(self, v: Any = None, *, queries: slice = slice(None), **asked: Unpack[Asked]) -> Observation:
        """The requested statistics: one pass for the output and row statistics, one more for column statistics.

        STATISTICS

        v (…, kv_heads, keys, d_v) requests the output as well. `queries` restricts everything to some queries: row
        statistics are theirs, column statistics are sums over them; groups still takes one label per query.
        Returns an Observation; what was not requested is None.
        Raises SelectionError when `queries` is no slice, RuleError, ShapeError, DtypeError or UnknownNameError for
        requests that do not fit, SizeError for more than fits in memory, all before any work; EngineError when no
        engine, or not the one named, computes what is requested.
        Time O(queries·keys·(d_k + d_v)), memory O(queries + keys), whatever is observed.

        >>> import numpy as np, clearhead as ch
        >>> seen = ch.AttentionMatrix(np.eye(3), np.eye(3)).observe(np.eye(3), entropy=True, received=True)
        >>> seen.received, seen.peak is None
        (array([1., 1., 1.]), True)
        """
        if not isinstance(queries, slice):
            raise SelectionError(f"queries is {shown(queries)}: expected a slice.", "queries=slice(-64, None)")
        if queries != slice(None):
            read_slice("queries", queries, self.shape[-2])
        return self._answers("observe", v, asked, queries)

    def contributions(self, v: Any, g: Any = None, *, output: Any = None) -> CauseMatrix:
        """What each edge brings along g, c_ij = a_ij·(g_i·v_j), (…, heads, queries, keys), exact and never stored.

        v        (…, kv_heads or heads, keys, d_v), or one for all heads, (keys, d_v)
        g        (…, heads, queries, d_v): the derivative of any number by the head's output; None for norms
        output   without g: W_O (heads·d_v, d_model), for the norms after the projection

        Over the keys, contributions sum to g_i·o_i. Without g, the norm a_ij·‖v_j‖, or a_ij·‖v_j·W_O‖. Creating it
        computes nothing but the values' norms. float32, or float64 where q, v or g is; under autocast v is narrowed as
        q and k are. Raises ShapeError or DtypeError for arrays that do not fit or require grad, RuleError where g and
        output are both given or PyTorch records a graph for q, k or a rule, EngineError where the engine named computes
        no effects.
        Source: Kobayashi et al. 2020, section 3, for the norms.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True)
        >>> A.contributions(np.array([2.0, 6.0]), np.ones(2))[...]
        array([[2., 0.],
               [1., 3.]])
        """
        factors = self._factors_for("contributions", "A.contributions(v, g)")
        return CauseMatrix(*cause_inputs.contributions(factors, v, g, output))

    def cuts(self, v: Any, g: Any, *, rest: Rest = "renormalise") -> CauseMatrix:
        """What g_i·o_i changes by when query i may not see key j, (…, heads, queries, keys), exact and never stored.

        v and g as in `contributions`. e_ij = a_ij/(1 - a_ij)·(g_i·o_i - g_i·v_j): the rest of the row is normalised
        anew, a sink with it; -g_i·o_i where j is all that i sees. A row's largest weight may be so near 1 that 1 - a_ij
        has no digits left, so for that key the answer m_i of all other keys is computed apart: e_ij = a_ij·(m_i -
        g_i·v_j). Exact at the head's output; what comes after the head is linear in g.

        rest   "renormalise", or "first": the weight moves to the first key, where idle heads rest, also in rows that
               may not see it: e_ij = a_ij·(g_i·v_0 - g_i·v_j). With learned sinks it moves there: e_ij = -a_ij·g_i·v_j

        Raises as `contributions`, UnknownNameError for another rest.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True)
        >>> A.cuts(np.array([2.0, 6.0]), np.ones(2))[...]
        array([[-2.,  0.],
               [ 2., -2.]])
        >>> A.cuts(np.array([2.0, 6.0]), np.ones(2), rest="first")[1]
        array([ 0., -2.])
        """
        return CauseMatrix(*cause_inputs.cuts(self._factors_for("cuts", "A.cuts(v, g)"), v, g, rest))

    def plot(self, head: int = 0, *, batch: int = 0, ax: Any = None) -> Any:
        """One head drawn on matplotlib axes (extra `plot`), for papers; returns the axes.

        Above 1,024 queries or keys, each pixel shows the largest of its weights. Raises SelectionError when there is
        no such head or batch item, MissingExtraError without matplotlib, DtypeError when `ax` is no axes.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.eye(3), np.eye(3)).plot().get_xlabel()
        'key'
        """
        return self._plot(head, 0, batch, ax)

    def __shown__(self, batch: int, v: Any = None) -> Any:
        part, problem, shown = self.part(batch), self.factors.problem, load("view.long")
        values = None if v is None else self.factors.values(v)[batch : batch + 1]
        return shown.ShownRun("attention", [shown.ShownLayer("", range(problem.heads), part, v=values)])

    def part(self, batch: int, head: int | None = None) -> "AttentionMatrix":
        """The matrix of one batch item, with all heads or one: (1, heads, queries, keys).

        `batch` counts over all leading axes together. Raises SelectionError when there is no such item or head.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.ones((2, 4, 3, 8)), np.ones((2, 4, 3, 8))).part(batch=1, head=3).shape
        (1, 1, 3, 3)
        """
        factors = self.factors
        batches = np.array([read_place("batch", batch, factors.problem.batch)])
        heads = None
        if head is not None:
            place = read_place("head", head, factors.problem.heads)
            heads = range(place, place + 1)
        return AttentionMatrix._of(factors.take(batches=batches, heads=heads), self._edits)


def with_state(matrix: AttentionMatrix, state: State) -> AttentionMatrix:
    """Set the rows' known states, (batch, heads, queries), and return the matrix; ignored where a graph is recorded."""
    if matrix._factors is not None:
        matrix._factors.state = State(*(as_array(x, name)[0] for name, x in state._asdict().items()))
    return matrix
