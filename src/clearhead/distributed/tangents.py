"""Derivatives along a direction over shards: the tangents of own queries' answers, and those of the gradients.

core/directions.py has the formulas. Tangents of keys and values travel with keys and values. With L the final
log-sum-exp of a row, L_b that over one rank's keys and w_b = exp(L_b - L), and dots for tangents:

    L̇ = Σ_b w_b·L̇_b         ȯ = Σ_b w_b·(ȯ_b + (L̇_b - L̇)·o_b)

and a sink is a part with L_b = sink and no value. Image and groups are products of A with known values, whose tangents
are those of further columns of the output, added over ranks; the tangent of what keys received needs L̇ of all keys,
and so a second pass. The backward pass along a direction needs L and L̇ of all keys too, and adds over disjoint keys as
the backward pass does.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.merging import sink_weights
from clearhead.core.statistics import Wanted
from clearhead.distributed import low_rank, passes
from clearhead.distributed.low_rank import Product
from clearhead.distributed.messages import total
from clearhead.distributed.schedule import Meeting, Parts, Question, meet
from clearhead.distributed.sharded_problem import Names, Shards
from clearhead.engines.base import Kept, TangentEngine, Upstream
from clearhead.errors import EngineError
from clearhead.ops import tangents
from clearhead.ops.backward import over_heads, side_by_side, without_columns

_MERGED = ("output", *tangents.ROWS)  # what merges over keys with the log-sum-exp
Columns = tuple[Array, Array | None]  # of values, (batch or 1, heads or 1, own keys, columns), and their tangents


@dataclass(frozen=True, eq=False, slots=True)
class Moving:
    """Shards that move along a direction.

    logsumexp    of own queries, over all keys
    along        the tangents of own q, k, v, the own rows of the bias, the table of spans and the sinks
    products     image and groups, where they were answered
    """

    method: str
    shards: Shards
    logsumexp: Array
    along: Directions
    products: Mapping[str, Product]

    @property
    def engine(self) -> TangentEngine:
        """The engine. Raises EngineError where it has no derivatives along a direction."""
        engine: Any = self.shards.engine
        if not hasattr(engine, "gradient_tangents"):
            raise EngineError("this engine has no derivatives along a direction.", 'engine="native" on CPU tensors.')
        able: TangentEngine = engine
        return able

    def ask(self, question: Question) -> Parts:
        """Answer a question, with the tangents of keys and values beside them; queries stay on their rank."""
        more = tuple(x for x in (self.along.k, self.along.v) if x is not None)
        method = "gather" if self.method == "gather" else "ring"
        return meet(method, replace(self.shards, more=more), question)

    def direction(self, one: Meeting) -> Directions:
        """The direction of one piece of own queries and one of keys; that of the sinks belongs to no key."""
        along, more, cols = self.along, iter(one.more), one.problem.cols
        k, v = (None if x is None else next(more) for x in (along.k, along.v))
        bias = None if along.bias is None else along.bias[:, :, one.rows, cols.start : cols.stop]
        return Directions(None if along.q is None else along.q[:, :, one.rows], k, v, bias, along.spans)

    def tangents(self, names: Collection[str]) -> dict[str, Array]:
        """The tangents of answers, as "output_tangent" and so on; all ranks ask for the same."""
        columns = {name: (one.values[:, None], None) for name, one in self.products.items() if name in names}
        wide = self._with_values([*columns.values()], output="output" in names)
        return self._answered(names, [*columns], wide._row_tangents(names))

    def _with_values(self, columns: Sequence[Columns], *, output: bool) -> "Moving":
        """The same with further columns of the values; without those of the output where it is not asked for."""
        shards, along = self.shards, self.along
        v, moved = (shards.v, along.v) if output else (None, None)
        if not columns:
            return replace(self, shards=replace(shards, v=v), along=replace(along, v=moved))
        pairs = [*columns]
        if v is not None:
            spread = None if moved is None else over_heads(shards.whole, moved)
            pairs.insert(0, (over_heads(shards.whole, v), spread))
        wide = passes.widened(shards, side_by_side(shards.whole, [x for x, _ in pairs]))
        if any(x is not None for _, x in pairs):
            moved = side_by_side(shards.whole, [np.zeros(x.shape) if y is None else y for x, y in pairs])
        cast = {name: x.astype(shards.dtype, copy=False) for name, x in along.nonzero.items() if name in "qk"}
        return replace(self, shards=wide, along=replace(along, **cast, v=moved))

    def _answered(
        self, names: Collection[str], products: Sequence[str], moved: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The tangents of answers from those of rows.

        products    whose values are columns of the rows' output, after own values where the output is in `names`
        """
        answers, start = {**moved}, 0
        if "output" in names and self.shards.v is not None:
            start = self.shards.v.shape[3]
            answers["output_tangent"] = moved["output_tangent"][..., :start]
        for name in products:
            one = self.products[name]
            columns = slice(start, start + one.values.shape[-1])
            start = columns.stop
            if name in names:
                part = one.rows[:, None].swapaxes(-1, -2) @ moved["output_tangent"][..., columns]
                answers[f"{name}_tangent"] = total(self.shards.ranks, f"tangent of {name}", part)
        if "received" in names:
            answers["received_tangent"] = self._received(moved["logsumexp_tangent"])
        return answers

    def _received(self, tangent: Array) -> Array:
        """The tangent of what own keys received, (batch, heads, own keys), from that of the log-sum-exp."""
        want, without = Wanted(received=True), self._with_values([], output=False)

        def find(one: Meeting, rows: Any) -> Parts:
            direction = without.direction(one)
            part = self.engine.column_tangents(one.inputs, direction, Kept(*rows), want)
            return [], [part["received"]]

        question = Question(find, [self.logsumexp, tangent], per_key=lambda length: [self.shards.zeros(length)])
        return without.ask(question)[1][0]

    @np.errstate(all="ignore")  # NaN and infinity are legal values
    def _row_tangents(self, names: Collection[str]) -> dict[str, Array]:
        """The tangents of own queries' answers, and the answers, unrounded; of the output where there are values.

        The tangent of the log-sum-exp is always among them.
        """
        v, sinks = self.shards.v, self.shards.whole.sinks
        asked = [name for name in _MERGED if (v is not None if name == "output" else name in names)]
        flags: Any = dict.fromkeys((*asked, "logsumexp"), True)
        want = Wanted(**flags, keep_float32=True)

        def find(one: Meeting, rows: Any) -> Parts:
            problem = replace(one.problem, sinks=None)
            part = self.engine.tangents(one.inputs._replace(problem=problem), self.direction(one), want)
            part = {name: x.astype(np.float64) for name, x in part.items()}
            seen, moved = ~np.isneginf(part["logsumexp"]), part["logsumexp_tangent"]
            rise = np.where(seen, rows[0] - part["logsumexp"], 0.0)
            share = np.where(seen, np.exp(-rise), 0.0)
            sums = [share, share * moved]
            for name in asked:
                value = part[name] + rise if name == "entropy" else part[name]
                tangent = part[f"{name}_tangent"] + _times(moved, value)
                sums += [_times(share, value), _times(share, tangent - moved if name == "entropy" else tangent)]
            return sums, []

        def nothing(length: int) -> list[Array]:
            tails = [(), *([v.shape[3]] if v is not None and name == "output" else [] for name in asked)]
            return [self.shards.zeros(length, *tail) for tail in tails for _ in "ab"]

        mass, middle, *sums = self.ask(Question(find, [self.logsumexp], nothing))[0]
        if sinks is not None and self.along.sinks is not None:
            middle = middle + sink_weights(np, sinks, self.logsumexp) * self.along.sinks[:, None]
        answers = {"logsumexp_tangent": middle}
        for name, value, moved in zip(asked, sums[::2], sums[1::2], strict=True):
            answers[name] = value
            answers[f"{name}_tangent"] = moved - _times(middle, value) + (middle * mass if name == "entropy" else 0.0)
        return {name: x.astype(self.shards.dtype) for name, x in answers.items()}

    @np.errstate(all="ignore")
    def gradient_tangents(
        self,
        answers: Mapping[str, Array],
        by: Mapping[str, Array],
        changing: Mapping[str, Array],
        asked: Names,
        names: Collection[str],
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The tangents of own q's, k's and v's gradients, and the parts of others; and those of answers.

        answers     (batch, heads, own queries, …), or own keys, or of the whole
        by          upstream gradients of answers; changing: their tangents
        asked       which of bias and spans are asked for
        names       the answers whose tangents are asked for

        All ranks have the same names in each, and what is in one of them of image, groups and received is in both `by`
        and `changing`.
        """
        v = self.shards.v
        output = v is not None and "output" in {*by, *changing, *names}
        pairs, changes = (low_rank.factors(self.shards, self.products, side) for side in (by, changing))
        left, right = [], []
        for name, (x, y) in pairs.items():
            x_moved, y_moved = changes[name]
            left.append((x, 0 * x) if name == "received" else (x, x_moved))
            right.append((y, y_moved) if name == "received" else (y, None))
        sides = [{name: x for name, x in side.items() if name in ("logsumexp", *_MERGED)} for side in (by, changing)]
        if left:
            for side, columns in zip(sides, zip(*left, strict=True), strict=True):
                first = [side.get("output", np.zeros_like(answers["output"]))] if output else []
                side["output"] = side_by_side(self.shards.whole, [*first, *columns])
        wide = self._with_values(right, output=output)
        moved = wide._row_tangents({*by, *changing, *names})
        back = wide if any("output" in side for side in sides) else wide._with_values([], output=False)
        gradients = back._gradients({**answers, "logsumexp": self.logsumexp}, sides, moved, asked)
        if v is not None and output and left:
            gradients["v"] = without_columns(v, gradients["v"])
        elif v is not None and (left or "v" not in gradients):
            gradients["v"] = np.zeros(v.shape)
        seen = {*names, "output"} if output else names
        return gradients, self._answered(seen, [name for name in pairs if name in self.products], moved)

    def _gradients(
        self, known: Mapping[str, Array], sides: Sequence[Mapping[str, Array]], moved: Mapping[str, Array], asked: Names
    ) -> dict[str, Array]:
        """The tangents of gradients, from upstream gradients of own queries' answers and their tangents."""
        shards = self.shards
        by, changing = sides
        both = tangents.upstreams(shards.whole, known, (by, changing), moved, self.along.sinks, keep_float32=True)
        upstream, changes, by_sinks = both

        def compute(one: Meeting, rows: Any) -> Mapping[str, Array]:
            shapes = shards.shapes(one.problem, asked)
            here = [replace(_rows_of(side, one.rows), **shapes) for side in (upstream, changes)]
            return self.engine.gradient_tangents(one.inputs, self.direction(one), Kept(*rows), *here)

        rows = [self.logsumexp, moved["logsumexp_tangent"]]
        gradients = passes.added_up(self.ask, shards, compute, rows, asked, np.dtype(np.float64))
        return gradients if by_sinks is None else {**gradients, "sinks": by_sinks}


def _times(of_rows: Array, x: Array) -> Array:
    """One number for each row (batch, heads, queries), times numbers of rows or their columns."""
    product: Array = (of_rows if x.ndim == of_rows.ndim else of_rows[..., None]) * x
    return product


def _rows_of(upstream: Upstream, rows: slice) -> Upstream:
    """An upstream gradient for some of its queries."""
    arrays = {name: getattr(upstream, name) for name in ("rows", "output", *tangents.ROWS)}
    return replace(upstream, **{name: x[:, :, rows] for name, x in arrays.items() if x is not None})
