"""EffectMatrix: the effect of every edge on the head's output, exact and never stored; contributions and cuts.

core/effects.py has the formulas; the engines compute tiles of the matrix.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack, cast

import numpy as np

from clearhead.core.arrays import as_array, broadcast, on_cpu, statistics_dtype, to_device_of
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.call import Call
from clearhead.core.effects import Kind, Terms, read_rest, terms_of_cuts
from clearhead.core.observations import operand, values_of, wanted
from clearhead.core.rules import with_options
from clearhead.core.statistics import STATISTICS, AskedEffects, Strongest
from clearhead.engines.base import Engine, kinds, room_for_sums
from clearhead.errors import ShapeError
from clearhead.ops.lazy_matrix import LazyMatrix
from clearhead.ops.observation import Observation, observation

Inputs = tuple[Any, Array, Array]  # weights, v (batch, 1, kv_heads or heads, keys, d_v), g (batch, heads, queries, d_v)


class EffectMatrix(LazyMatrix):
    """The effect of every edge, (…, heads, queries, keys), as an array-like object that is never stored.

    Made by `AttentionMatrix.contributions` and `AttentionMatrix.cut_effects`, which have the formulas. `kind` is
    "contribution", "cut" or "moved" (a cut with rest="first"). Where query i may not see key j, e_ij is 0.

    Elements are float32, or float64 where q, v or g is; results are the kind of array that q is, products that of the
    right-hand side. Creating it computes nothing; the row terms of cuts are computed when first needed, and kept:
    O(queries) memory. It has no derivative. np.asarray stores all of it; other NumPy functions and operators refuse it.

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
    >>> E = A.cut_effects(np.array([1.0, 0.0, 4.0]), np.ones(3))
    >>> E, E[2].round(3)
    (EffectMatrix(cut, queries 3, keys 3) float64, array([ 0.413,  0.773, -1.649]))
    """

    words = (
        "effects",
        "E[..., :512, :512] is a tile; E.image(256, 256) shows the whole, E.strongest(20) its strongest edges.",
    )
    instead = "E.by_query() sums over keys, E.by_key() over queries, E.top(1) has each query's strongest"

    def __init__(self, kind: Kind, weights: Any, v: Array, g: Array) -> None:
        self.kind, self._weights, self._v, self._g = kind, weights, v, g
        self._engine  # noqa: B018  raises if the named engine computes no effects

    @property
    def call(self) -> Call:
        """q, k, v and the rules."""
        call: Call = self._weights.call
        return call.with_values(self._v)

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, queries, keys)."""
        return self._weights.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the effects: float32, or float64 where q, v or g is."""
        return self._weights.dtype

    def __repr__(self) -> str:
        return f"EffectMatrix({self.kind}, {named(self.shape, WEIGHTS)[1:]} {self.dtype}"

    @with_options
    def observe(self, **asked: Unpack[AskedEffects]) -> Observation:
        """Compute the requested statistics in one pass (several on a GPU); cuts take one more, the first time.

        by_key=True, by_query=True, top=8, strongest=20, image=(256, 256), groups=(query_groups, key_groups): each as
        the method of that name. Returns an Observation, in which statistics that were not requested are None. Raises
        UnknownNameError, RuleError, ShapeError or DtypeError for requests that do not fit, SizeError for answers larger
        than memory, all before any work. O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory beyond the answers.

        >>> import numpy as np, clearhead as ch
        >>> E = ch.AttentionMatrix(np.eye(3), np.eye(3)).contributions(np.array([1.0, 0.0, 4.0]), np.ones(3))
        >>> seen = E.observe(by_key=True, strongest=1)
        >>> seen.by_key.round(3), seen.strongest.key, seen.top is None
        (array([1., 0., 4.]), array([2]), True)
        """
        problem = self.call.problem
        want = wanted(problem, asked, of="effects")
        if 0 in self.shape:
            zeros = room_for_sums(kinds(problem, want, want.names(), STATISTICS))
            arrays = {name: x if x.dtype == np.int64 else x.astype(self.dtype) for name, x in zeros.items()}
        else:
            arrays = dict(self._engine.columns(self.call, self._terms, want))
        strongest = _take_strongest(arrays, problem.keys, asked.get("strongest"))
        answers = {name: self._restore(problem.restore(x)) for name, x in arrays.items()}
        seen = observation(answers, problem.queries, problem.keys, of="effects")
        return seen if strongest is None else replace(seen, strongest=Strongest(*map(self._restore, strongest)))

    def by_key(self) -> Any:
        """Σ_i e_ij, (…, heads, keys): the effect of each key, summed over all rows in float64.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)))
        >>> A.contributions(np.array([2.0, 6.0]), np.ones(2)).by_key()
        array([2., 6.])
        """
        return self.observe(by_key=True).by_key

    def by_query(self) -> Any:
        """Σ_j e_ij, (…, heads, queries): g_i·o_i for contributions; for cuts, the sum has no such meaning.

        >>> import numpy as np, clearhead as ch
        >>> A = ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)))
        >>> A.contributions(np.array([2.0, 6.0]), np.ones(2)).by_query()
        array([4., 4.])
        """
        return self.observe(by_query=True).by_query

    def strongest(self, k: int) -> Strongest:
        """Return the k edges of largest magnitude in the matrix: batch, head, query, key and value, each (≤ k,).

        `batch` counts over all leading axes together. Of equal effects the earlier place comes first. Only edges that
        the rules allow are listed, and no effect that is NaN. Raises RuleError unless k is a whole number from 1 up.
        O(queries·keys·(d_k + d_v)) time, O(batch·heads·k) memory.

        >>> import numpy as np, clearhead as ch
        >>> E = ch.AttentionMatrix(np.eye(3), np.eye(3)).contributions(np.array([1.0, 0.0, 4.0]), np.ones(3))
        >>> E.strongest(2).key, E.strongest(2).value.round(3)
        (array([2, 2]), array([1.884, 1.058]))
        """
        return cast("Strongest", self.observe(strongest=0 if k is None else k).strongest)

    @property
    def _terms(self) -> Terms:
        return replace(self._rows, g=self._g)

    @cached_property
    def _rows(self) -> Terms:
        state = self._weights.state
        if self.kind != "cut":
            return Terms(self.kind, state)
        others = self._engine.others(self.call, self._g)
        return terms_of_cuts(others, self.call.problem.sinks, state)

    @property
    def _engine(self) -> Engine:  # type: ignore[override]
        return self._weights.effect_engine()

    def _known(self, batches: Array | None, heads: range | None, rows: range, cols: range) -> Terms:
        return self._terms.part(batches, heads, rows).among(cols)

    def _multiply(self, columns: Array, *, transposed: bool) -> Array:
        result = self.call.problem.keys if transposed else self.call.problem.queries
        if 0 in (*self.shape, columns.shape[-1]):
            size = (*self._g.shape[:2], result, columns.shape[-1])
            return to_device_of(np.zeros(size, self.dtype), columns)
        return (self._engine.transposed if transposed else self._engine.product)(self.call, self._terms, columns)


def contributions(weights: Any, v: Any, g: Any) -> EffectMatrix:
    """Make the matrix of contributions along g."""
    return EffectMatrix("contribution", *_along_g(weights, v, g))


def cut_effects(weights: Any, v: Any, g: Any, rest: Any) -> EffectMatrix:
    """Make the matrix of cuts; rest="first" takes contributions of v_0 - v_j, or of -v_j with learned sinks."""
    weights, values, along = _along_g(weights, v, g)
    if read_rest(rest) == "renormalise":
        return EffectMatrix("cut", weights, values, along)
    dtype = statistics_dtype(values.dtype)
    shifted = on_cpu(values).astype(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = (shifted[:, :, :1] if weights.call.problem.sinks is None else 0) - shifted
    return EffectMatrix("moved", *_in_one_dtype(weights, to_device_of(shifted, values), along))


def _along_g(weights: Any, v: Any, g: Any) -> Inputs:
    """Validate v and g, and give q, k, v and g one dtype."""
    problem = weights.call.problem
    values = values_of(problem, v, problem.kv_heads, problem.heads)
    along = operand(problem, as_array(g, "g", problem.device)[0], "g", problem.queries, (problem.heads,))[0]
    if along.shape[-1] != values.shape[-1]:
        raise ShapeError(
            f"g has {along.shape[-1]} columns but v has d_v {values.shape[-1]}: g is the gradient at the head's "
            "output, which has v's columns.",
            "o = A @ v; g, = torch.autograd.grad(number, o)",
        )
    rows = problem.batch, problem.heads, problem.queries
    return _in_one_dtype(weights, values, broadcast(along, (*rows, along.shape[-1])))


def _in_one_dtype(weights: Any, v: Array, g: Array) -> Inputs:
    """Convert all to one dtype: the one they share, else float64 if any is float64, else float32."""
    dtypes = {weights.call.problem.dtype, v.dtype, g.dtype}
    if len(dtypes) == 1:
        return weights, v, g
    dtype = np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
    known = weights.known_state if statistics_dtype(dtype) == weights.dtype else None
    return weights.with_call(weights.call.astype(dtype), known), v.astype(dtype), g.astype(dtype)


def _take_strongest(arrays: dict[str, Array], keys: int, count: int | None) -> Strongest | None:
    """Merge the heads' strongest edges into one list, (≤ count,); pop them from `arrays`; return None if absent.

    strongest_values and strongest_indices are (batch, heads, k); an index is query·keys + key, -1 for an unused place.
    """
    if "strongest_values" not in arrays:
        return None
    values, places = (on_cpu(arrays.pop(f"strongest_{name}")) for name in ("values", "indices"))
    batch, head, rank = np.nonzero(places >= 0)
    value, place = values[batch, head, rank], places[batch, head, rank]
    order = np.lexsort((place, head, batch, -np.abs(value)))[:count]
    query, key = np.divmod(place[order], max(1, keys))
    return Strongest(batch[order], head[order], query, key, value[order])
