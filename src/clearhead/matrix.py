"""The attention matrix as an object: exact, never stored; it can be indexed, reduced, multiplied and transposed.

With q, k and each row's log-sum-exp L, every weight is available: a_ij = exp(logit_ij - L_i).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np

from clearhead import engines, room
from clearhead.arrays import Restore, adopt, autocast, empty, graphed, on_cpu, statistics_dtype
from clearhead.axes import TRANSPOSED, WEIGHTS, Array, as_places, as_slice, named
from clearhead.engines.base import Engine
from clearhead.errors import RuleError, SelectionError, shown
from clearhead.indexing import Indexed, expand
from clearhead.merging import Top
from clearhead.observations import Observation, Wanted, check_room, observation, wanted
from clearhead.operands import operand
from clearhead.problem import Problem, Rules, describe
from clearhead.values import read_place, read_slice, whole_number
from clearhead.view.long import Run, Sight
from clearhead.view.pictured import Pictured


class AttentionMatrix(Indexed, Pictured):
    """The weights softmax(scale·q·kᵀ + …) as an array-like object, (…, heads, queries, keys), that is never stored.

    q (…, heads, queries, d_k) and k (…, kv_heads, keys, d_k); 2-D is one head. Rules as in `attention`. Its elements
    have the statistics' dtype: float32, or float64 for float64. Statistics come as the kind of array that q is.

    Creating it computes nothing. The log-sum-exp is computed when first needed, once, and kept: O(queries) memory.
    It can be copied and pickled, with q, k, the rules and the log-sum-exp where that is known; a tensor that hangs on
    a graph raises RuleError then, a leaf that requires gradients stays one. Raises what `attention` raises.

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
    >>> A.shape, A[1].round(3)
    ((3, 3), array([0.36, 0.64, 0.  ]))
    """

    __array_ufunc__ = None  # so that `array @ A` fails loudly instead of looping over elements
    _derived = False  # is it a part of another matrix, with a problem that no rules describe?

    def __init__(self, q: Any, k: Any, *, engine: str | None = None, **rules: Unpack[Rules]) -> None:
        self._source: Any = q, k, rules, engine
        self._graph: Any = self._graph_with()
        if self._graph is not None:
            return
        given = describe(q, k, None, rules)
        self._problem: Problem = given.problem
        self._q, self._k, self._restore_kind = given.q, given.k, given.restore
        self._engine: Engine = engines.get(engines.choose(given.problem, engine).engine)

    def _graph_with(self, *others: Any) -> Any:
        """What answers where PyTorch keeps a graph for q, k, a rule or one of `others`; None where it keeps none."""
        q, k, rules, engine = self._source
        if not graphed(q, k, *rules.values(), *others):
            return None
        from clearhead.torch_graph import Graph

        return Graph(q, k, rules, engine)

    def __getstate__(self) -> dict[str, Any]:
        q, k, rules, _ = self._source
        for name, x in {"q": q, "k": k, **rules}.items():
            if getattr(x, "grad_fn", None) is not None:
                raise RuleError(f"{name} hangs on PyTorch's graph, which is not copied.", f"{name}.detach()")
        state = {"source": self._source, "logsumexp": self.__dict__.get("_logsumexp"), "dtype": self._q_dtype()}
        return state | ({"problem": self._problem, "restore": self._restore_kind} if self._derived else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        q, k, rules, engine = state["source"]
        if "problem" in state:
            self.__dict__ = AttentionMatrix._made(state["problem"], q, k, state["restore"], engine).__dict__
        else:
            AttentionMatrix.__init__(self, q, k, engine=engine, **rules)
        if state["logsumexp"] is not None and state["dtype"] == self._q_dtype():
            self._logsumexp = state["logsumexp"]

    def _q_dtype(self) -> np.dtype[Any] | None:
        """What q is computed in; autocast may have narrowed it."""
        return None if self._graph is not None else self._problem.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, queries, keys)."""
        return self._problem.shape if self._graph is None else self._graph.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the weights: float32, or float64 for float64."""
        return statistics_dtype(self._problem.dtype if self._graph is None else self._graph.dtype)

    @property
    def T(self) -> "TransposedMatrix":  # noqa: N802  NumPy's name
        """The last two axes swapped, for products from the keys' side: (…, heads, keys, queries)."""
        return TransposedMatrix(self)

    def __repr__(self) -> str:
        return f"AttentionMatrix{named(self.shape, WEIGHTS)} {self.dtype}, never stored"

    def __getitem__(self, key: Any) -> Any:
        """Exact weights: integers, slices with steps, Ellipsis, negative; only what is asked for is computed.

        Raises SelectionError for anything else, SizeError for more weights than fit in memory. O(rows·keys) time for
        the rows asked for, the first time.
        """
        matrix = self._without_graph()
        return matrix._give(matrix._tile(key))

    def __matmul__(self, v: Any) -> Any:
        """A·v, the same bits as `attention`.

        v (…, kv_heads or heads, keys, d_v), or one for all heads, (keys,) or (keys, d_v). Under torch.compile, which
        traces `@` of tensors only, `A.observe(v).output` says the same.
        """
        graph = self._graph or self._graph_with(v)
        if graph is not None:
            return graph.mix(v)
        array, restore = adopt(autocast(v), "v", self._problem.device)
        heads = self._problem.kv_heads, self._problem.heads
        values, vector = operand(self._problem, array, "v", self.shape[-1], heads)
        check_room(self._problem, Wanted(output=True), values.shape[-1])
        output = self._engine.rows(self._problem, self._q, self._k, values, Wanted(output=True))["output"]
        whole = self._problem.restore(output)
        return restore(whole[..., 0] if vector else whole)

    def logsumexp(self) -> Any:
        """L_i = ln(Σ_j exp(logit_ij) + exp(sink)), natural; (…, heads, queries). -inf where a query sees nothing."""
        return self.observe(logsumexp=True).logsumexp

    def max_logit(self) -> Any:
        """The largest visible logit of each query, (…, heads, queries); -inf where it sees nothing."""
        return self.observe(max_logit=True).max_logit

    def entropy(self) -> Any:
        """-Σ_j a_ij ln a_ij in nats, (…, heads, queries); 0 where a query sees nothing."""
        return self.observe(entropy=True).entropy

    def distance(self) -> Any:
        """Σ_j a_ij·|position of query i - j|, the mean distance looked, (…, heads, queries)."""
        return self.observe(distance=True).distance

    def top(self, k: int) -> Top:
        """The k strongest weights of each query and their keys, (…, heads, queries, k) each, strongest first.

        Of equal weights the earlier key comes first; 0 and -1 fill up where fewer than k keys are visible.
        """
        top = self.observe(top=whole_number("top", k, 1, hint="top(8)")).top
        assert top is not None
        return top

    def received(self) -> Any:
        """Σ_i a_ij, what each key receives, (…, heads, keys): H2O's accumulated attention score."""
        return self.observe(received=True).received

    def peak(self) -> Any:
        """max_i a_ij, the most that any query gives each key, (…, heads, keys)."""
        return self.observe(peak=True).peak

    def image(self, height: int, width: int) -> Any:
        """The matrix as a picture, (…, heads, height, width): each pixel the mean of the weights over its area."""
        return self.observe(image=(height, width)).image

    def groups(self, query_groups: Any, key_groups: Any) -> Any:
        """Σ of a_ij between labelled spans, (…, heads, query groups, key groups).

        query_groups (queries,) or (…, queries) and key_groups alike: whole numbers 0, 1, 2, …; below 0 is no group.
        """
        return self.observe(groups=(query_groups, key_groups)).groups

    def observe(
        self,
        v: Any = None,
        *,
        logsumexp: bool = False,
        max_logit: bool = False,
        entropy: bool = False,
        received: bool = False,
        peak: bool = False,
        top: int | None = None,
        distance: bool = False,
        image: tuple[int, int] | None = None,
        groups: tuple[Any, Any] | None = None,
        queries: slice = slice(None),
    ) -> Observation:
        """Everything asked for, together: one pass for the output and row statistics, one more for column statistics.

        v (…, kv_heads, keys, d_v) asks for the output as well. `queries` restricts everything to some queries: row
        statistics are theirs, column statistics are sums over them, groups' query labels are still one per query.
        Returns an Observation; what was not asked for is None.
        Raises RuleError, ShapeError, DtypeError, or SizeError for more than fits in memory, before any work.
        Time O(queries·keys·(d_k + d_v)), memory O(queries + keys), whatever is observed.

        >>> import numpy as np, clearhead as ch
        >>> seen = ch.AttentionMatrix(np.eye(3), np.eye(3)).observe(np.eye(3), entropy=True, received=True)
        >>> seen.received, seen.peak is None
        (array([1., 1., 1.]), True)
        """
        asked = {
            "logsumexp": logsumexp,
            "max_logit": max_logit,
            "entropy": entropy,
            "received": received,
            "peak": peak,
            "top": top,
            "distance": distance,
            "image": image,
            "groups": groups,
        }
        if not isinstance(queries, slice):
            raise SelectionError(f"queries is {shown(queries)}: expected a slice.", "queries=slice(-64, None)")
        if queries != slice(None):
            read_slice("queries", queries, self.shape[-2])
        graph = self._graph or self._graph_with(v)
        if graph is not None:
            return graph.observe(v, asked, queries)
        want = wanted(self._problem, asked)
        part, rows = self._rows(queries)
        want = want.for_queries(rows)
        values = None
        if v is not None:
            array = adopt(autocast(v), "v", self._problem.device)[0]
            values, _ = operand(self._problem, array, "v", self.shape[-1], (self._problem.kv_heads,))
        return part._observe(values, want)

    def _observe(self, v: Array | None, want: Wanted) -> Observation:
        known = self.__dict__.get("_logsumexp")
        found = engines.answer(self._engine, self._problem, self._q, self._k, v, want, known)
        if "logsumexp" in found:
            self._logsumexp = found.pop("logsumexp")
        if want.logsumexp:
            found["logsumexp"] = self._logsumexp.copy()
        given = {name: self._give(self._problem.restore(array)) for name, array in found.items()}
        return observation(given, self._problem.queries, self._problem.keys, sinks=self._problem.sinks is not None)

    @cached_property
    def _logsumexp(self) -> Array:
        """(batch, heads, queries), computed once."""
        return self._engine.rows(self._problem, self._q, self._k, None, Wanted(logsumexp=True))["logsumexp"]

    def _give(self, array: Array) -> Any:
        return self._restore_kind(array)

    def near(self, left: int) -> Array:
        """Each query's weight on its own key and the `left` before it, (batch, heads, queries): exp(L within - L)."""
        left, before = min(whole_number("left", left, 0), self._problem.keys), self._problem.window[0]
        window = (left if before is None else min(left, before), 0)
        part = self._part(replace(self._problem, window=window, sinks=None), self._q, self._k)
        with np.errstate(invalid="ignore"):
            within, whole = (on_cpu(lse).astype(np.float64) for lse in (part._logsumexp, self._logsumexp))
            return np.where(np.isneginf(within), 0.0, np.exp(within - whole))

    def sequence(self, batch: int) -> "AttentionMatrix":
        """One batch item, all heads, (1, heads, queries, keys); leading axes are counted as one."""
        batch = read_place("batch", batch, self._problem.batch)
        problem = self._problem.take_heads(np.array([batch]), range(self._problem.heads))
        part = self._part(replace(problem, kv_heads=self._problem.kv_heads), self._q[[batch]], self._k[[batch]])
        if "_logsumexp" in self.__dict__:
            part._logsumexp = self._logsumexp[[batch]]
        return part

    def one(self, head: int) -> "AttentionMatrix":
        """One head of one batch item's matrix, (1, 1, queries, keys)."""
        head = read_place("head", head, self._problem.heads)
        shared = head // (self._problem.heads // self._problem.kv_heads)
        problem = self._problem.take_heads(np.array([0]), range(head, head + 1))
        return self._part(problem, self._q[:, [head]], self._k[:, [shared]])

    def plot(self, head: int = 0, *, batch: int = 0, ax: Any = None) -> Any:
        """One head on matplotlib axes (extra `plot`), for papers; returns the axes. Above 1,024 pixels are pooled."""
        return self._plot(head, 0, batch, ax)

    def _run(self, batch: int) -> Run:
        matrix = self._without_graph()
        return Run("attention", [Sight("", range(matrix._problem.heads), matrix.sequence(batch))])

    def _without_graph(self) -> "AttentionMatrix":
        """The same matrix, to be read by index."""
        if self._graph is None:
            return self
        if self._graph_with() is not None:
            raise RuleError(
                "weights read by index have no derivative, and PyTorch keeps or traces a graph for them.",
                "with torch.no_grad(): A[…]; A @ v and A.observe keep the graph.",
            )
        q, k, rules, engine = self._source
        return AttentionMatrix(q, k, engine=engine, **rules)

    def _part(self, problem: Problem, q: Array, k: Array) -> "AttentionMatrix":
        part = AttentionMatrix._made(problem, q, k, self._restore_kind, self._source[3])
        part._engine = self._engine
        return part

    @staticmethod
    def _made(problem: Problem, q: Array, k: Array, restore: Restore, engine: str | None) -> "AttentionMatrix":
        """A matrix of arrays that were read already, such as a part of another."""
        part = object.__new__(AttentionMatrix)
        part._source = q, k, {}, engine  # arrays: no graph asks for them again
        part._problem, part._q, part._k = problem, q, k
        part._restore_kind, part._graph, part._derived = restore, None, True
        part._engine = engines.get(engines.choose(problem, engine).engine)
        return part

    def _rows(self, queries: slice) -> tuple["AttentionMatrix", range]:
        """The matrix of some queries only; its log-sum-exp is this one's where that is known."""
        rows = range(self._problem.queries)[queries]
        if rows == range(self._problem.queries):
            return self, rows
        part = self._part(self._problem.take(queries=rows), self._q[:, :, queries], self._k)
        if "_logsumexp" in self.__dict__:
            part._logsumexp = self._logsumexp[:, :, queries]
        return part, rows

    def _tile(self, key: Any) -> Array:
        picked = expand(key, self.shape, WEIGHTS)
        chosen = [range(p, p + 1) if isinstance(p, int) else p for p in picked]
        rows, cols = chosen[-2:]
        result_shape = tuple(len(p) for p in picked if not isinstance(p, int))
        if 0 in result_shape:
            return empty(self._q, result_shape, self.dtype)
        room.check_room(
            f"weights of shape {result_shape}",
            room.array_bytes(result_shape, self.dtype.itemsize),
            "A[..., :512, :512] is a tile; A.image(256, 256) shows the whole, A.top(8) its strongest weights.",
            self._problem.device,
        )
        part = self._rows(as_slice(rows))[0]._heads(chosen[:-2])
        lse = part._logsumexp
        small = part._problem.take(keys=cols)
        weights = self._engine.weights(small, part._q, part._k[:, :, as_slice(cols)], lse)
        return weights.reshape(result_shape)

    def _heads(self, lead: Sequence[range]) -> "AttentionMatrix":
        """The matrix of some batches and heads only."""
        sizes = self.shape[:-2]
        if all(len(p) == size for p, size in zip(lead, sizes, strict=True)) and all(p.step == 1 for p in lead):
            return self
        heads = lead[-1]
        batches = np.arange(self._problem.batch).reshape(sizes[:-1])[np.ix_(*lead[:-1])].reshape(-1)
        group = self._problem.heads // self._problem.kv_heads
        problem = self._problem.take_heads(batches, heads)
        places = as_places(batches)
        q, k = self._q[:, as_slice(heads)][places], self._k[:, as_places(np.asarray(heads) // group)][places]
        part = self._part(problem, q, k)
        if "_logsumexp" in self.__dict__:
            part._logsumexp = self._logsumexp[:, as_slice(heads)][places]
        return part


class TransposedMatrix(Indexed):
    """Aᵀ, (…, heads, keys, queries): products and weights from the keys' side; never stored."""

    __array_ufunc__ = None

    def __init__(self, matrix: AttentionMatrix) -> None:
        self.T = matrix

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, queries, keys = self.T.shape
        return (*lead, keys, queries)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.T.dtype

    def __repr__(self) -> str:
        return f"TransposedMatrix of {self.T!r}"

    def __getitem__(self, key: Any) -> Any:
        """Exact weights, as from the matrix with its last two axes swapped."""
        picked = expand(key, self.shape, TRANSPOSED)
        picked[-1], picked[-2] = picked[-2], picked[-1]
        matrix = self.T._without_graph()
        tile = matrix._tile(tuple(p if isinstance(p, int) else as_slice(p) for p in picked))
        both = not isinstance(picked[-1], int) and not isinstance(picked[-2], int)
        return matrix._give(tile.swapaxes(-1, -2) if both else tile)

    def __matmul__(self, g: Any) -> Any:
        """Aᵀ·g: g (…, heads, queries, d), or one for all heads (queries,), (queries, d); gives (…, heads, keys, d).

        O(queries·keys·d) time, less where rows of g are all zero; O(queries + keys) memory.
        """
        graph = self.T._graph or self.T._graph_with(g)
        if graph is not None:
            return graph.transposed(g)
        problem = self.T._problem
        array, restore = adopt(g, "g", problem.device)
        columns, vector = operand(problem, array, "g", problem.queries, (problem.heads, 1))
        shape = (problem.batch, problem.heads, problem.keys, columns.shape[-1])
        size = room.array_bytes(shape, self.dtype.itemsize)
        room.check_room(f"Aᵀ·g of shape {shape}", size, "give fewer columns of g.", problem.device)
        found = self.T._engine.transposed(problem, self.T._q, self.T._k, self.T._logsumexp, columns)
        whole = problem.restore(found)
        return restore(whole[..., 0] if vector else whole)
