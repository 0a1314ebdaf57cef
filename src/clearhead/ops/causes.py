"""CauseMatrix: what every edge did, exact at the head's output and never stored; contributions, cuts and norms.

core/effects.py has the formulas and the table of what is observed; the engines compute tiles of it.
"""

from functools import cached_property
from typing import Any, Self, cast

import numpy as np

from clearhead import engines
from clearhead.core import room
from clearhead.core.arrays import as_array, broadcast, empty, graphed, on_cpu, statistics_dtype, to_device_of
from clearhead.core.axes import WEIGHTS, Array, as_places, as_slice, group_size, named
from clearhead.core.effects import (
    Effects,
    Kind,
    Order,
    Ranked,
    SignedImage,
    Strongest,
    Terms,
    arrays_of,
    terms_of_cuts,
)
from clearhead.core.observations import wanted_effects
from clearhead.core.operands import operand
from clearhead.core.rule_values import whole_number
from clearhead.engines.base import EffectEngine
from clearhead.errors import DtypeError, RuleError, ShapeError
from clearhead.ops.factors import Factors
from clearhead.ops.indexing import check_weights, expand
from clearhead.ops.numpy_functions import NumpyFunctions
from clearhead.ops.spans_cut import cut_spans
from clearhead.ops.transposed import TransposedMatrix

_KINDS: dict[str, Any] = {"top": Ranked, "image": SignedImage}


class CauseMatrix(NumpyFunctions):
    """The effect of every edge, (…, heads, queries, keys), as an array-like object that is never stored.

    Made by `AttentionMatrix.contributions` and `AttentionMatrix.cuts`. `kind` is "contribution", "cut" or "norm".
    Elements have the statistics' dtype, answers are of q's kind. Creating it computes nothing; what cuts need of every
    row is computed once, when first needed, and kept: O(queries) memory. It has no derivative.

    >>> import numpy as np, clearhead as ch
    >>> A = ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True)
    >>> E = A.cuts(np.array([1.0, 0.0, 4.0]), np.ones(3))
    >>> E, E[2].round(3)
    (CauseMatrix(cut, queries 3, keys 3) float64, never stored, array([ 0.457,  0.815, -1.807]))
    """

    def __init__(self, factors: Factors, kind: Kind, v: Array, g: Array) -> None:
        self.kind = kind
        self._factors, self._v, self._g = factors, v, g

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, queries, keys)."""
        return self._factors.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the effects: float32, or float64 where q, v or g is."""
        return self._factors.dtype

    @property
    def T(self) -> "TransposedMatrix[Self]":  # noqa: N802
        """Eᵀ, the last two axes swapped: (…, heads, keys, queries), for E.T @ x. What NumPy calls `mT`."""
        return TransposedMatrix(self, self._effects, lambda x: self._product(x, transposed=True))

    mT = T  # noqa: N815

    def __repr__(self) -> str:
        return f"CauseMatrix({self.kind}, {named(self.shape, WEIGHTS)[1:]} {self.dtype}, never stored"

    def __getitem__(self, key: Any) -> Any:
        """Exact effects by integers, slices with steps and Ellipsis; only those asked for are computed.

        Returns and raises what indexing an AttentionMatrix does. O(queries·keys·(d_k + d_v)) time for what cuts need of
        every row, the first time; then O(effects·(d_k + d_v)).
        """
        return self._effects(key)

    def __matmul__(self, x: Any) -> Any:
        """E·x, (…, heads, queries, d); x (…, heads or kv_heads, keys, d), or one for all heads, (keys,) or (keys, d).

        Raises ShapeError or DtypeError for an x that does not fit. O(queries·keys·(d_k + d_v + d)) time.
        """
        return self._product(x, transposed=False)

    def by_key(self) -> Any:
        """Σ_i e_ij, (…, heads, keys): what each key did in all rows together."""
        return self.observe(by_key=True).by_key

    def by_query(self) -> Any:
        """Σ_j e_ij, (…, heads, queries). Contributions along g sum to g_i·o_i; cuts do not sum to anything simple."""
        return self.observe(by_query=True).by_query

    def top(self, k: int, order: Order = "magnitude") -> Ranked:
        """The k first effects of each query and their keys, (…, heads, queries, k) each.

        order   "magnitude" (largest |e| first), "largest" (most positive first) or "smallest" (most negative first)

        Of equal effects the earlier key comes first; where fewer than k keys are visible, the rest has effect 0 and
        index -1. Raises RuleError for another order, or unless k is a whole number from 1 up.
        """
        found = self.observe(top=whole_number("top", k, 1, hint="top(8)"), order=order).top
        return cast("Ranked", found)

    def strongest(self, k: int) -> Strongest:
        """The k edges of largest magnitude in the whole matrix: batch, head, query, key and value, each (≤ k,).

        `batch` counts over all leading axes together. Of equal effects the earlier place comes first. Only edges that
        the rules allow are listed.
        """
        found = self.observe(strongest=whole_number("strongest", k, 1, hint="strongest(20)")).strongest
        return cast("Strongest", found)

    def image(self, height: int, width: int) -> SignedImage:
        """The matrix as a picture, (…, heads, height, width): the mean under each pixel, and what is largest there.

        `largest` is the effect of largest magnitude, with its sign, of all cells that a pixel covers, if only in part.
        """
        return cast("SignedImage", self.observe(image=(height, width)).image)

    def groups(self, query_groups: Any, key_groups: Any) -> Any:
        """Σ of e_ij between labelled spans, (…, heads, query groups, key groups); labels as in AttentionMatrix.groups.

        Effects of single edges do not add up to that of a whole span where it is a cut: see `spans`.
        """
        return self.observe(groups=(query_groups, key_groups)).groups

    def spans(self, query_groups: Any, key_groups: Any) -> Any:
        """What g·o changes by when a query may see no key of a span at all, summed over the queries of each group.

        With a = Σ_J a_ij and n = Σ_J a_ij·t_ij over a span J, that is (g_i·o_i - n)/(1 - a) - g_i·o_i for one query,
        computed as a·(m - n/a), where m is what all keys outside the span answer by themselves.
        Returns (…, heads, query groups, key groups); labels as in `groups`. Raises RuleError for contributions, which
        just add up (`groups`), and what `groups` raises. One pass over the keys, cut into the runs of neighbouring keys
        of one group; O(queries·key groups) memory, in blocks of queries.
        """
        if self.kind != "cut":
            raise RuleError("spans are of cuts: contributions of a span are the sum of those of its edges.", "E.groups")
        problem = self._factors.problem
        want = wanted_effects(problem, {"groups": (query_groups, key_groups)})
        assert want.groups is not None
        found = cut_spans(self._factors, self._v, self._g, want.groups)
        return self._factors.restore(problem.restore(to_device_of(found.astype(self.dtype), self._factors.q)))

    def observe(self, *, order: Order = "magnitude", **asked: Any) -> Effects:
        """Everything asked for, together, in one pass (a GPU takes several), and for cuts one more, the first time.

        by_key=True, by_query=True, top=8 with order="magnitude", strongest=20, image=(256, 256),
        groups=(query_groups, key_groups): what the methods of these names answer. Returns an Effects; what was not
        asked for is None. Raises UnknownNameError, RuleError, ShapeError or DtypeError for requests that do not fit,
        SizeError for answers larger than memory, all before any work; EngineError where the engine named computes no
        effects. O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory beyond the answers.
        """
        factors = self._factors
        want = wanted_effects(factors.problem, asked, order)
        if not want.names():
            return Effects()
        if not factors.problem.queries * factors.problem.keys * factors.problem.heads * factors.problem.batch:
            raise ShapeError(f"{self!r} has no effects to observe.")
        found = dict(self._engine.effects(factors.problem, factors.q, factors.k, self._v, self._g, self._terms, want))
        answers: dict[str, Any] = {}
        if want.strongest is not None:
            listed = on_cpu(found["strongest_values"]), on_cpu(found["strongest_indices"])
            edges = _strongest(*listed, factors.problem.keys, want.strongest)
            answers["strongest"] = Strongest(*[factors.restore(to_device_of(x, factors.q)) for x in edges])
        for name in [name for name in want.names() if name != "strongest"]:
            arrays = [factors.restore(factors.problem.restore(found[array])) for array in arrays_of(name)]
            answers[name] = _KINDS[name](*arrays) if name in _KINDS else arrays[0]
        return Effects(**answers)

    @cached_property
    def _terms(self) -> Terms:
        factors = self._factors
        if self.kind != "cut":
            return Terms(self.kind, factors.logsumexp)
        others = self._engine.others(factors.problem, factors.q, factors.k, self._v, self._g)
        return terms_of_cuts(others, factors.problem.sinks, factors.logsumexp)

    @property
    def _engine(self) -> EffectEngine:
        return engines.with_effects(self._factors.engine, self._factors.problem, self._factors.asked_engine)

    def _effects(self, key: Any, swapped: bool = False) -> Any:  # noqa: FBT001
        factors = self._factors
        picked = expand(key, self.shape, WEIGHTS)
        shape = tuple(len(p) for p in picked if not isinstance(p, int))
        if 0 in shape:
            tile = empty(factors.q, shape, self.dtype)
        else:
            check_weights(shape, self.dtype, factors.problem.device)
            tile = self._tile(*[range(p, p + 1) if isinstance(p, int) else p for p in picked]).reshape(shape)
        return factors.restore(tile.swapaxes(-1, -2) if swapped else tile)

    def _tile(self, *picked: range) -> Array:
        *lead, rows, cols = picked
        problem, terms = self._factors.problem, self._terms
        *sizes, heads = problem.prefix or (1,)
        *chosen, head = lead or [range(1)]
        batches = np.arange(problem.batch).reshape(sizes)[np.ix_(*chosen)].reshape(-1)
        part = self._factors.take_heads(batches, head).take_queries(rows)
        places, at, keys = as_places(batches), np.asarray(head), as_slice(cols)
        v = self._v[places][:, at // group_size(heads, self._v.shape[1]), keys]
        g = self._g[places][:, as_slice(head), as_slice(rows)]
        terms = terms.part(places, as_slice(head), rows)
        if terms.strongest is not None:  # as a place among the keys picked
            terms = terms.among(cols)
        return self._engine.effect_tile(part.problem.take(keys=cols), part.q, part.k[:, :, keys], v, g, terms)

    def _product(self, x: Any, *, transposed: bool) -> Any:
        factors, problem = self._factors, self._factors.problem
        array, restore = as_array(x, "x", problem.device)
        length, heads = (
            (problem.queries, (problem.heads, 1)) if transposed else (problem.keys, (problem.heads, problem.kv_heads))
        )
        given, vector = operand(problem, array, "x", length, heads)
        size = (problem.batch, problem.heads, problem.keys if transposed else problem.queries, given.shape[-1])
        room.check_room(
            f"a product of shape {size}", room.array_bytes(size, 8), "give fewer columns of x.", problem.device
        )
        found = self._engine.effect_product(
            problem, factors.q, factors.k, self._v, self._g, self._terms, given, transposed=transposed
        )
        whole = problem.restore(found)
        return restore(whole[..., 0] if vector else whole)

    def _reduced(self, name: str, axis: Any, *, keepdims: bool) -> Any:
        del axis, keepdims
        raise DtypeError(f"{name} is not answered by {self!r}.", "E.by_key(), E.by_query() and E.strongest(20) are.")


def contributions(factors: Factors, v: Any, g: Any, output: Any) -> CauseMatrix:
    """The matrix of contributions along g; of norms where g is None."""
    if g is None:
        values = _values(factors, v)
        norms = _norms(factors, on_cpu(values), output)
        ones = np.ones((factors.problem.batch, factors.problem.heads, factors.problem.queries, 1), norms.dtype)
        return _matrix(factors, "norm", to_device_of(norms, factors.q), to_device_of(ones, factors.q))
    if output is not None:
        raise RuleError(
            "output is given together with g: it is for norms, and g has been carried through W_O.", "leave it out."
        )
    return _matrix(factors, "contribution", *_both(factors, v, g))


def cuts(factors: Factors, v: Any, g: Any) -> CauseMatrix:
    """The matrix of cuts along g."""
    return _matrix(factors, "cut", *_both(factors, v, g))


def _values(factors: Factors, v: Any) -> Array:
    _check_no_graph(v=v)
    array = as_array(v, "v", factors.problem.device)[0]
    return operand(
        factors.problem, array, "v", factors.problem.keys, (factors.problem.kv_heads, factors.problem.heads)
    )[0]


def _both(factors: Factors, v: Any, g: Any) -> tuple[Array, Array]:
    problem, values = factors.problem, _values(factors, v)
    _check_no_graph(g=g)
    array = as_array(g, "g", problem.device)[0]
    along = operand(problem, array, "g", problem.queries, (problem.heads,))[0]
    if along.shape[-1] != values.shape[-1]:
        raise ShapeError(
            f"g has {along.shape[-1]} columns but v has d_v {values.shape[-1]}: g is the derivative by the head's "
            "output, which has v's columns.",
        )
    return values, broadcast(along, (problem.batch, problem.heads, problem.queries, along.shape[-1]))


def _check_no_graph(**given: Any) -> None:
    for name, x in given.items():
        if graphed(x):
            raise RuleError(
                f"effects have no derivative, and PyTorch records a graph for {name}.",
                f"{name}.detach(), or torch.no_grad().",
            )


def _matrix(factors: Factors, kind: Kind, v: Array, g: Array) -> CauseMatrix:
    """The matrix, in a dtype that holds q's, v's and g's: their own where all are one, else float64 or float32."""
    dtypes = {factors.problem.dtype, v.dtype, g.dtype}
    if len(dtypes) > 1:
        dtype = np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
        factors, v, g = factors.in_dtype(dtype), v.astype(dtype), g.astype(dtype)
    return CauseMatrix(factors, kind, v, g)


def _norms(factors: Factors, v: Array, output: Any) -> Array:
    """‖v_j‖, or ‖v_j·W_O‖ for every query head, (batch, heads of v or heads, keys, 1) in the statistics' dtype."""
    dtype = statistics_dtype(v.dtype)
    if output is None:
        return np.linalg.norm(v.astype(np.float64), axis=-1, keepdims=True).astype(dtype)
    heads, width = factors.problem.heads, v.shape[-1]
    weights = on_cpu(as_array(output, "output", factors.problem.device)[0]).astype(np.float64)
    if weights.ndim != 2 or weights.shape[0] != heads * width:
        raise ShapeError(f"output has shape {weights.shape}: expected W_O, (heads·d_v {heads * width}, d_model).")
    found = np.empty((v.shape[0], heads, v.shape[2], 1), dtype)
    for head in range(heads):
        own = weights[head * width : (head + 1) * width]
        for start in range(0, v.shape[2], 4096):
            part = v[:, head // group_size(heads, v.shape[1]), start : start + 4096].astype(np.float64)
            found[:, head, start : start + 4096, 0] = np.linalg.norm(part @ own, axis=-1)
    return found


def _strongest(values: Array, places: Array, keys: int, count: int) -> Strongest:
    """The strongest of all batches and heads from those of each, (batch, heads, k)."""
    batch, head, rank = np.nonzero(places >= 0)
    value, place = values[batch, head, rank], places[batch, head, rank]
    order = np.lexsort((place, head, batch, -np.abs(value)))[:count]
    return Strongest(batch[order], head[order], place[order] // keys, place[order] % keys, value[order])
