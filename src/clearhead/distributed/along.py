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

from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.merging import sink_weights
from clearhead.core.statistics import Wanted
from clearhead.distributed import low_rank, methods
from clearhead.distributed.edges import EdgeQuestion
from clearhead.distributed.exchange import total
from clearhead.distributed.partials import Meeting, no_spans
from clearhead.distributed.pooled import Pooled
from clearhead.distributed.shards import Names, Shards
from clearhead.engines.base import Kept, TangentEngine
from clearhead.errors import EngineError
from clearhead.ops import tangents

_MERGED = ("output", *tangents.ROWS)  # what merges over keys with the log-sum-exp
Columns = tuple[Array, Array | None]  # of values, (batch or 1, heads or 1, own keys, columns), and their tangents


@dataclass(frozen=True, eq=False, slots=True)
class Moving:
    """Shards that move along a direction.

    logsumexp    of own queries, over all keys
    along        the tangents of own q, k, v, the own rows of the bias, the table of spans and the sinks
    pooled       image and groups, where they were answered
    """

    method: str
    shards: Shards
    logsumexp: Array
    along: Directions
    pooled: Mapping[str, Pooled]

    @property
    def engine(self) -> TangentEngine:
        """The engine. Raises EngineError where it has no derivatives along a direction."""
        engine: Any = self.shards.engine
        if not hasattr(engine, "gradient_tangents"):
            raise EngineError("this engine has no derivatives along a direction.", 'engine="native" on CPU tensors.')
        found: TangentEngine = engine
        return found

    def ask(self, question: EdgeQuestion) -> tuple[list[Array], list[Array]]:
        """Answer a question about edges, with the tangents of keys and values beside them."""
        more = tuple(x for x in (self.along.k, self.along.v) if x is not None)
        return methods.meet_at_queries(self.method, replace(self.shards, more=more), question)

    def direction(self, one: Meeting) -> Directions:
        """The direction of one piece of own queries and one of keys; that of the sinks belongs to no key."""
        own, more = self.along, iter(one.more)
        k, v = (None if x is None else next(more) for x in (own.k, own.v))
        bias = None if own.bias is None else own.bias[:, :, one.at, one.keys.start : one.keys.stop]
        return Directions(None if own.q is None else own.q[:, :, one.at], k, v, bias, own.spans)

    def tangents(self, names: Collection[str]) -> dict[str, Array]:
        """The tangents of answers, as "output_tangent" and so on; all ranks ask for the same."""
        columns = {name: (one.values[:, None], None) for name, one in self.pooled.items() if name in names}
        wide = self._with_values([*columns.values()], own="output" in names)
        return self._answered(names, [*columns], wide._row_tangents(names))

    def _with_values(self, columns: Sequence[Columns], *, own: bool) -> "Moving":
        """The same with further columns of the values; without the own ones where they are not asked for."""
        shards, along = self.shards, self.along
        v, moved = (shards.v, along.v) if own else (None, None)
        if not columns:
            return replace(self, shards=replace(shards, v=v), along=replace(along, v=moved))
        pairs = [*columns]
        if v is not None:
            pairs.insert(
                0, (low_rank.over_heads(shards, v), None if moved is None else low_rank.over_heads(shards, moved))
            )
        wide = methods.widened(shards, low_rank.joined(shards, [x for x, _ in pairs]))
        if any(x is not None for _, x in pairs):
            moved = low_rank.joined(shards, [np.zeros(x.shape) if y is None else y for x, y in pairs])
        given = {name: x.astype(wide.whole.dtype, copy=False) for name, x in along.given.items() if name in "qk"}
        return replace(self, shards=wide, along=replace(along, **given, v=moved))

    def _answered(self, names: Collection[str], pooled: Sequence[str], moved: Mapping[str, Array]) -> dict[str, Array]:
        """The tangents of answers from those of rows.

        pooled    whose values are columns of the rows' output, after own values where the output is in `names`
        """
        found, start = {**moved}, 0
        if "output" in names and self.shards.v is not None:
            start = self.shards.v.shape[3]
            found["output_tangent"] = moved["output_tangent"][..., :start]
        for name in pooled:
            one = self.pooled[name]
            columns = slice(start, start + one.values.shape[-1])
            start = columns.stop
            if name in names:
                part = one.rows[:, None].swapaxes(-1, -2) @ moved["output_tangent"][..., columns]
                found[f"{name}_tangent"] = total(self.shards.ranks, f"tangent of {name}", part)
        if "received" in names:
            found["received_tangent"] = self._received(moved["logsumexp_tangent"])
        return found

    def _received(self, tangent: Array) -> Array:
        """The tangent of what own keys received, (batch, heads, own keys), given that of the log-sum-exp."""
        engine, want = self.engine, Wanted(received=True)
        lead = self.logsumexp.shape[:2]
        without = self._with_values([], own=False)

        def find(one: Meeting, _: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            kept = Kept(self.logsumexp[:, :, one.at], tangent[:, :, one.at])
            part = engine.column_tangents(one.problem, *one.arrays[:2], without.direction(one), kept, want)
            return [], [part["received"]]

        ask = EdgeQuestion([], find, per_key=lambda count: [np.zeros((*lead, count))])
        return without.ask(ask)[1][0]

    @np.errstate(all="ignore")  # NaN and infinity are legal values
    def _row_tangents(self, names: Collection[str]) -> dict[str, Array]:
        """The tangents of own queries' answers, and the answers, unrounded; of the output where there are values.

        The tangent of the log-sum-exp is always among them.
        """
        whole, wide = self.shards.whole, statistics_dtype(self.shards.whole.dtype)
        asked = [name for name in _MERGED if name in names and name != "output"]
        asked = asked if self.shards.v is None else ["output", *asked]
        flags: Any = dict.fromkeys((*asked, "logsumexp"), True)
        want = Wanted(**flags, keep_float32=True)
        engine, lead = self.engine, self.logsumexp.shape[:2]
        tails = {"output": () if self.shards.v is None else (self.shards.v.shape[3],)}

        def find(one: Meeting, _: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            problem, (q, k, v) = replace(one.problem, sinks=None), one.arrays
            part = engine.tangents(problem, q, k, v, self.direction(one), want)
            part = {name: x.astype(np.float64) for name, x in part.items()}
            rise, moved = self.logsumexp[:, :, one.at] - part["logsumexp"], part["logsumexp_tangent"]
            seen = ~np.isneginf(part["logsumexp"])
            share = np.where(seen, np.exp(-np.where(seen, rise, 0.0)), 0.0)
            found = [share, share * moved]
            for name in asked:
                value = part[name] + np.where(seen, rise, 0.0) if name == "entropy" else part[name]
                tall = (..., None) if name == "output" else ...
                found.append(share[tall] * value)
                bent = part[f"{name}_tangent"] + moved[tall] * value
                found.append(share[tall] * (bent - moved if name == "entropy" else bent))
            return found, []

        def nothing(count: int) -> list[Array]:
            rows = [np.zeros((*lead, count)) for _ in "ab"]
            return rows + [np.zeros((*lead, count, *tails.get(name, ()))) for name in asked for _ in "ab"]

        ask = EdgeQuestion([], find, nothing, lambda a, b: [x + y for x, y in zip(a, b, strict=True)])
        mass, middle, *sums = self.ask(ask)[0]
        if whole.sinks is not None and self.along.sinks is not None:
            middle = middle + sink_weights(np, whole.sinks, self.logsumexp) * self.along.sinks[:, None]
        found = {"logsumexp_tangent": middle}
        for name, value, moved in zip(asked, sums[::2], sums[1::2], strict=True):
            tall = (..., None) if name == "output" else ...
            found[name] = value
            found[f"{name}_tangent"] = moved - middle[tall] * value + (middle * mass if name == "entropy" else 0.0)
        return {name: x.astype(wide) for name, x in found.items()}

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
        own = self.shards.v is not None and "output" in {*by, *changing, *names}
        given, moving = (low_rank.factors(self.shards, self.pooled, side) for side in (by, changing))
        left, right = [], []
        for name, (x, y) in given.items():
            x_moved, y_moved = moving[name]
            left.append((x, 0 * x) if name == "received" else (x, x_moved))
            right.append((y, y_moved) if name == "received" else (y, None))
        sides = [{name: x for name, x in side.items() if name in ("logsumexp", *_MERGED)} for side in (by, changing)]
        if left:
            for side, columns in zip(sides, zip(*left, strict=True), strict=True):
                output = [side.get("output", np.zeros_like(answers["output"]))] if own else []
                side["output"] = low_rank.joined(self.shards, [*output, *columns])
        wide = self._with_values(right, own=own)
        moved = wide._row_tangents({*by, *changing, *names})
        back = wide if any("output" in side for side in sides) else wide._with_values([], own=False)
        found = back._gradients({**answers, "logsumexp": self.logsumexp}, sides, moved, asked)
        if own and left:
            found["v"] = low_rank.of_own_values(self.shards, found["v"])
        elif self.shards.v is not None and (left or "v" not in found):
            found["v"] = np.zeros(self.shards.v.shape)
        seen = {*names, "output"} if own else names
        return found, self._answered(seen, [name for name in given if name in self.pooled], moved)

    def _gradients(
        self,
        known: Mapping[str, Array],
        sides: Sequence[Mapping[str, Array]],
        moved: Mapping[str, Array],
        asked: Names,
    ) -> dict[str, Array]:
        """The tangents of gradients, from upstream gradients of own queries' answers and their tangents."""
        shards, dtype = self.shards, statistics_dtype(self.shards.whole.dtype)
        by, changing = sides
        both = tangents.upstreams(shards.whole, known, (by, changing), moved, self.along.sinks, keep_float32=True)
        given, moving, by_sinks = both
        found: dict[str, Any] = no_spans(shards, asked)
        if "bias" in asked:
            found["bias"] = np.zeros((*shards.lead["bias"], shards.q.shape[2], shards.whole.keys), dtype)
        engine, tangent = self.engine, moved["logsumexp_tangent"]

        def find(one: Meeting, _: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            at, (q, k, v) = one.at, one.arrays
            kept = Kept(self.logsumexp[:, :, at], tangent[:, :, at])
            shapes = shards.shapes(one.problem, asked)
            upstream, changes = (replace(_rows_of(side, at), **shapes) for side in (given, moving))
            part = engine.gradient_tangents(one.problem, q, k, v, self.direction(one), kept, upstream, changes)
            if "bias" in asked:
                found["bias"][:, :, at, one.keys.start : one.keys.stop] = part["bias"]
            if "spans" in asked:
                found["spans"] += part["spans"]
            return [part["q"]], [part[name] for name in "kv" if name in part]

        widths = [x.shape[1::2] for x in (shards.k, shards.v) if x is not None]  # heads and width

        def per_key(count: int) -> list[Array]:
            return [np.zeros((shards.whole.batch, heads, count, width)) for heads, width in widths]

        def per_query(count: int) -> list[Array]:
            return [np.zeros((*shards.q.shape[:2], count, shards.q.shape[3]))]

        ask = EdgeQuestion([], find, per_query, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], per_key)
        (found["q"],), columns = self.ask(ask)
        found |= dict(zip("kv", columns, strict=False))
        if by_sinks is not None:
            found["sinks"] = by_sinks
        return found


def _rows_of(upstream: Any, at: slice) -> Any:
    """An upstream gradient for some of its queries."""
    names = ("rows", "output", *tangents.ROWS)
    given = {name: getattr(upstream, name) for name in names}
    return replace(upstream, **{name: x[:, :, at] for name, x in given.items() if x is not None})
