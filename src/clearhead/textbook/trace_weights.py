"""`ch.trace_weights`: attention whose weights are given, as in an example that starts with them: O = A·V."""

from typing import Any, NamedTuple

import numpy as np

from clearhead.core.arrays import FLOATS, as_array
from clearhead.core.axes import KEY, VALUE, WEIGHTS, Array, heads_first, named
from clearhead.core.block import block_of, everything
from clearhead.core.call import Call, describe
from clearhead.core.definition import Textbook, check_room, mix, split
from clearhead.core.rule_values import read_numbers, read_place
from clearhead.core.state import State
from clearhead.errors import RuleError, ShapeError
from clearhead.textbook.shapes import Convention, Sizes, check_convention, turned, weights_steps
from clearhead.textbook.trace import Geometry, TokenTrace, Trace, values_of
from clearhead.words import Language, read_language

_NO_SCORES = "the weights were given: there are no queries, keys and scores."


class WeightInputs(NamedTuple):
    """Weights and values as a problem: its logits are the weights' logarithms, so its softmax gives their shares."""

    described: Call  # q and k are zeros
    weights: Array  # (batch, heads, queries, keys), float64, as given: a row need not sum to 1


class WeightsTrace(Trace):
    """A Trace that starts with the weights: it has weights, v, output, steps and check, but no q, k or scores."""

    @np.errstate(invalid="ignore", over="ignore", divide="ignore")
    def __init__(self, inputs: WeightInputs, convention: Convention) -> None:
        described, weights = inputs
        problem, v = described.problem, described.v
        assert v is not None
        values = np.repeat(v.astype(np.float64), problem.group, axis=1)
        zeros, sums = np.zeros(weights.shape), weights.sum(axis=-1)
        output = mix(weights, split(values), lambda: weights == 0)
        way = dict.fromkeys(("scores", "scaled", "capped", "biased"), zeros)
        state = State(np.zeros(sums.shape), np.log(sums))
        book = Textbook(block_of(problem, everything(problem)), zeros, state, weights, **way, output=output)
        arrays = {"weights": weights, "v": v, "output": output}
        axes = 1 if problem.prefix else 2  # two axes are one head without an axis of its own
        restored = {name: x.reshape(*problem.prefix[:-1], *x.shape[axes:]) for name, x in arrays.items()}
        # The fast engine's logits are ln a_ij, and its softmax gives each row's shares.
        self._row_sums = sums[..., None]
        sizes = Sizes.of(restored["output"].shape, restored["v"].shape, restored["v"].shape)
        steps = weights_steps(sizes, convention, problem.dtype.itemsize)
        super().__init__(described, book, steps, restored, convention)

    @property
    @np.errstate(over="ignore")
    def sums(self) -> Array:
        """What each query's weights sum to, (batch, heads, queries): 1, unless they were rounded or are no softmax."""
        return self._book.weights.sum(axis=-1)

    @property
    def geometry(self) -> Geometry:
        """Raises RuleError: without queries and keys there are no norms."""
        raise RuleError(_NO_SCORES, "ch.trace(q, k, v) starts with them.")

    def read_as(self, language: Language = "en") -> str:
        """The empty text: three axes are (heads, queries, keys)."""
        return read_language(language) and ""

    @np.errstate(invalid="ignore", over="ignore")
    def token(self, query: int) -> TokenTrace:
        """One query's weighted sum of values, Σ_j a_j·v_j; its scores and masked are None.

        Raises SelectionError for an unknown query. O(heads·keys·d_v).
        """
        i = read_place("query", query, self.problem.queries)
        weights = self._book.weights[:, :, i]
        contributions = np.where(weights[..., None] > 0, weights[..., None] * values_of(self), 0.0)
        rows = {"weights": weights, "contributions": contributions, "output": contributions.sum(axis=-2)}
        return self._row(i, rows)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "image/svg+xml": self.to_svg()}


def trace_weights(weights: Any, v: Any, *, convention: Convention = "rows") -> WeightsTrace:
    """Attention that starts with its weights: every output is the sum of the values, each times its weight, O = A·V.

    weights     (…, heads, queries, keys), or (queries, keys) for one head, or (keys,) for one query; not negative
    v           (…, kv_heads, keys, d_v)
    convention  "rows", or "columns": weights (…, keys, queries) and v (…, d_v, keys)

    Numbers of any dtype, computed with in float64 as they are: a row that sums to 0.99 is not divided by 0.99, and
    `sums` says what each row sums to. A value of weight 0 is not read, even if it is NaN. Returns a Trace with weights,
    v and output, whose `check` compares the output with the fast engine's.
    Raises ShapeError where the axes do not fit each other, DtypeError for what is no array of numbers, RuleError for a
    weight that is negative, infinite or NaN, or for another convention. O(queries·keys·d_v) for each head.
    Source: Vaswani et al. 2017, section 3.2: "the output is computed as a weighted sum of the values".

    >>> import numpy as np, clearhead as ch
    >>> t = ch.trace_weights(np.array([0.15, 0.25, 0.55, 0.05]), np.array([[1.0, 0], [0, 1], [1, 1], [2, 0]]))
    >>> t.output.round(4).tolist()
    [[0.8, 0.8]]
    """
    return WeightsTrace(describe_weights(weights, v, convention), convention)


def describe_weights(weights: Any, v: Any, convention: Convention) -> WeightInputs:
    """Read and check weights and values; arguments and errors as in `trace_weights`."""
    check_convention(convention)
    restore = as_array(v, "v")[1]
    a, values = read_numbers("weights", weights), turned(read_numbers("v", v), convention)
    a = a[None] if a.ndim == 1 else turned(a, convention)
    if a.size and not ((a >= 0) & np.isfinite(a)).all():
        odd = float(a[~((a >= 0) & np.isfinite(a))].flat[0])
        raise RuleError(
            "weights holds {odd:g}: a weight is a share, finite and not below 0.",
            "scores may be anything; the softmax makes shares of them.",
            odd=odd,
        )
    _check(a, values)
    check_room(a.size)
    values = values if values.dtype in FLOATS else values.astype(np.float64)
    q = np.broadcast_to(np.zeros((), values.dtype), (*a.shape[:-1], 1))
    k = np.broadcast_to(np.zeros((), values.dtype), (*values.shape[:-1], 1))
    with np.errstate(divide="ignore"):
        logits = np.log(a.astype(np.float64))
    described = describe(q, k, values, {"bias": logits, "scale": 1.0}).giving_back(restore)
    return WeightInputs(described, heads_first(a.astype(np.float64)))


def _check(a: Array, v: Array) -> None:
    """Raise ShapeError where weights and values do not fit each other."""
    shapes = {"weights": named(a.shape, WEIGHTS), "v": named(v.shape, VALUE)}
    if v.ndim != a.ndim or v.ndim < 2:
        what = "weights is {weights} and v is {v}: expected as many axes, at least two."
        raise ShapeError(what, "v is {shape} for 4 weights.", **shapes, shape=named((4, 2), VALUE))
    if a.shape[-1] != v.shape[-2]:
        swapped = a.shape[-2] == v.shape[-2]
        raise ShapeError(
            "weights is {weights} and v is {v}: each of the {count} weights of a query needs a value.",
            "weights.swapaxes(-1, -2) would fit, or convention='columns'." if swapped else "",
            **shapes,
            count=a.shape[-1],
        )
    if a.shape[:-3] != v.shape[:-3] or (a.ndim > 2 and (not v.shape[-3] or a.shape[-3] % v.shape[-3])):
        raise ShapeError(
            "weights is {weights} and v is {v}: batches must be equal, and query heads a multiple of "
            "the values' {axis}.",
            **shapes,
            axis=KEY[1],
        )
