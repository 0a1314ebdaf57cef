"""What single edges of a sharded sequence did: each row's state, effects, products and whole spans, as edge questions.

The table in core/effects.py says how parts over disjoint keys merge, and core/effects.py `merged` and `joined` do it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from clearhead import engines
from clearhead.core.axes import Array, blocks
from clearhead.core.effect_lists import merged_lists
from clearhead.core.effects import (
    EFFECTS,
    Kind,
    Others,
    Terms,
    WantedEffects,
    arrays_of,
    joined,
    merged,
    no_keys,
    terms_of_cuts,
)
from clearhead.core.problem import Problem
from clearhead.core.statistics import Groups
from clearhead.distributed import methods
from clearhead.distributed.edges import EdgeQuestion
from clearhead.distributed.exchange import total
from clearhead.distributed.partials import Arrays, Meeting
from clearhead.distributed.shards import Shards
from clearhead.distributed.whole_effects import WholeEffects
from clearhead.engines.base import EffectEngine, Engine, room_for_effects
from clearhead.ops.spans_cut import add_changes, changes, of_spans

_TILE, _WIDTH = 1 << 20, 1024  # effects in a tile of a picture, all batches and heads together; and keys
Given = tuple[Problem, Array, Array, Array, Array, Terms]  # what engines take: q, k, v, g and the terms of g's rows


@dataclass(frozen=True, eq=False, slots=True)
class EdgeEffects:
    """The effects of a sharded matrix, as each method answers questions about them."""

    kind: Kind
    method: str
    shards: Shards  # with values
    g: Array  # (batch, heads, own queries, d_v)
    terms: Terms  # of own queries, over all keys

    @property
    def known(self) -> list[Array]:
        """What is known of own queries, as it travels with them."""
        own = self.terms.logsumexp, self.terms.whole, self.terms.others, self.terms.strongest
        return [self.g, *(x for x in own if x is not None)]

    def tile(self, engine: Engine, problem: Problem, arrays: Arrays, rows: Sequence[Array]) -> Array:
        """A tile of effects, as `tiles.tile` asks for it."""
        return _able(engine, problem).effect_tile(*self._given(problem, arrays, rows))

    def product(self, x: Array) -> Array:
        """E·x in float64 for own queries, (batch, heads, own queries, d); x (batch, its heads, own keys, d)."""

        def find(one: Meeting, rows: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            given = self._given(one.problem, one.arrays, rows)
            return [self._engine.effect_product(*given, one.more[0], transposed=False)], []

        ask = EdgeQuestion(self.known, find, lambda n: [self._zeros(n, x.shape[3])], _added)
        return methods.meet(self.method, replace(self.shards, more=(x,)), ask)[0][0]

    def transposed(self, x: Array) -> Array:
        """Eᵀ·x in float64 for own keys, (batch, heads, own keys, d); x (batch, heads or 1, own queries, d)."""

        def find(one: Meeting, rows: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            given = self._given(one.problem, one.arrays, rows)
            return [], [self._engine.effect_product(*given, rows[-1], transposed=True)]

        ask = EdgeQuestion([*self.known, x], find, per_key=lambda n: [self._zeros(n, x.shape[3])])
        return methods.meet(self.method, self.shards, ask)[1][0]

    def observe(self, want: WantedEffects) -> dict[str, Array]:
        """What is wanted, by array name: for own queries or own keys, or of the whole matrix on every rank."""
        whole = WholeEffects(self.shards.whole, want)
        per_query = replace(want, by_key=False, strongest=None, image=None, groups=None)
        names = [array for name in per_query.names() for array in arrays_of(name)]
        more, labels = self._labels(want)

        def find(one: Meeting, rows: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            found = self._found(one, rows, want)
            whole.add(found)
            if want.image is not None:
                self._picture(whole, one, rows)
            return [found[name] for name in names], [found["by_key"]] if want.by_key else []

        def nothing(n: int) -> list[Array]:
            return list(room_for_effects(replace(self.shards.whole, rows=range(n)), per_query).values())

        def keys(n: int) -> list[Array]:
            return [self._zeros(n, 1)[..., 0]] if want.by_key else []

        ask = EdgeQuestion([*self.known, *labels], find, nothing, lambda a, b: _merged(per_query, a, b), keys)
        rows, columns = methods.meet(self.method, replace(self.shards, more=more), ask)
        found = dict(zip(names, rows, strict=True)) | dict(zip(["by_key"] * want.by_key, columns, strict=True))
        return found | whole.everywhere(self.shards.ranks)

    def spans(self, groups: Groups) -> Array:
        """What cutting whole spans changes, (batch, heads, query groups, key groups) in float64, on every rank."""
        whole, count = self.shards.whole, groups.counts[1]

        def find(one: Meeting, rows: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            found = []
            for batch in range(whole.batch):
                at = slice(batch, batch + 1)
                problem, labels = one.problem.take(batches=np.arange(batch, batch + 1)), one.more[0][batch, 0]
                q, k, v = _with_values(one.arrays)
                found.append(of_spans(self._engine, problem, (q[at], k[at], v[at]), rows[0][batch], labels, count))
            return [np.stack(each) for each in zip(*found, strict=True)], []

        def nothing(n: int) -> list[Array]:
            return [self._zeros(n, count + 1) - np.inf, self._zeros(n, count + 1)]

        ask = EdgeQuestion([self.g], find, nothing, lambda a, b: list(joined((a[0], a[1]), (b[0], b[1]))))
        lse, mean = methods.meet(self.method, replace(self.shards, more=(groups.keys[:, None],)), ask)[0]
        found = np.zeros((whole.batch, whole.heads, *groups.counts))
        for into, change, labels in zip(found, changes(lse, mean, whole.sinks), groups.queries, strict=True):
            add_changes(into, change, labels)
        return total(self.shards.ranks, "sum of spans", found)

    @property
    def _engine(self) -> EffectEngine:
        return _able(self.shards.engine, self.shards.whole)

    def _given(self, problem: Problem, arrays: Arrays, rows: Sequence[Array]) -> Given:
        """What engines take, from what travelled with some queries, as `known` has it for own ones."""
        terms = Terms(self.kind, *rows[1 : len(self.known)]).among(problem.cols)
        return problem, *_with_values(arrays), rows[0], terms

    def _zeros(self, n: int, width: int) -> Array:
        return np.zeros((self.shards.whole.batch, self.shards.whole.heads, n, width))

    @staticmethod
    def _labels(want: WantedEffects) -> tuple[tuple[Array, ...], list[Array]]:
        """What of the labels of groups travels with keys, and with queries."""
        if want.groups is None:
            return (), []
        return (want.groups.keys[:, None],), [want.groups.queries[:, None]]

    def _found(self, one: Meeting, rows: Sequence[Array], want: WantedEffects) -> dict[str, Array]:
        """The engine's answers for one meeting but for the picture, with places in the whole matrix."""
        asked = replace(want, image=None)
        if want.strongest is not None:
            asked = replace(asked, strongest=min(want.strongest, one.problem.queries * one.problem.keys))
        if want.groups is not None:
            asked = replace(asked, groups=Groups(rows[-1][:, 0], one.more[0][:, 0], want.groups.counts))
        if not asked.names():
            return {}
        found = dict(self._engine.effects(*self._given(one.problem, one.arrays, rows), asked))
        if want.top is not None:
            places = found["top_indices"]
            found["top_indices"] = np.where(places < 0, -1, places + one.keys.start)
        if want.strongest is not None:
            places = found["strongest_indices"]
            query, key = np.divmod(places, one.problem.keys)
            moved = (query + one.rows.start) * self.shards.whole.keys + key + one.keys.start
            found["strongest_indices"] = np.where(places < 0, -1, moved)
        return found

    def _picture(self, whole: WholeEffects, one: Meeting, rows: Sequence[Array]) -> None:
        """Add one meeting's effects to the picture, tile by tile."""
        q, k, v = _with_values(one.arrays)
        width = min(_WIDTH, one.problem.keys)
        height = max(1, _TILE // max(1, one.problem.batch * one.problem.heads * width))
        for at, here in product(blocks(one.problem.queries, height), blocks(one.problem.keys, width)):
            problem = one.problem.take(queries=range(at.start, at.stop), keys=range(here.start, here.stop))
            arrays = q[:, :, at], k[:, :, here], v[:, :, here]
            tile = self.tile(self._engine, problem, arrays, [x[:, :, at] for x in rows])
            whole.add_to_picture(tile, problem.rows, problem.cols)


def known(kind: Kind, method: str, shards: Shards, g: Array, logsumexp: Array) -> EdgeEffects:
    """The effects with what each own query must know of its whole row, for which cuts take a pass over the keys."""
    terms = Terms(kind, logsumexp)
    if kind == "cut":
        terms = terms_of_cuts(_others(method, shards, g), shards.whole.sinks, logsumexp)
    return EdgeEffects(kind, method, shards, g, terms)


def _others(method: str, shards: Shards, g: Array) -> Others:
    """The state of own queries over all keys; the strongest key counts in the whole sequence."""

    def find(one: Meeting, rows: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        engine = _able(shards.engine, shards.whole)
        found = engine.others(one.problem, *_with_values(one.arrays), rows[0])
        return list(found._replace(strongest=np.where(found.strongest < 0, -1, found.strongest + one.keys.start))), []

    def nothing(n: int) -> list[Array]:
        return list(no_keys((shards.whole.batch, shards.whole.heads, n)))

    ask = EdgeQuestion([g], find, nothing, lambda a, b: list(merged(Others(*a), Others(*b), 0)))
    return Others(*methods.meet(method, shards, ask)[0])


def _merged(want: WantedEffects, a: list[Array], b: list[Array]) -> list[Array]:
    """Answers per query, in the order of `arrays_of`, over disjoint keys: added, or lists of the first ones merged."""
    found: list[Array] = []
    one, other = iter(a), iter(b)
    for name in want.names():
        if EFFECTS[name].over_keys == "added":
            found.append(next(one) + next(other))
        else:
            found += merged_lists((next(one), next(one)), (next(other), next(other)), want.order)
    return found


def _added(a: list[Array], b: list[Array]) -> list[Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _with_values(arrays: Arrays) -> tuple[Array, Array, Array]:
    q, k, v = arrays
    assert v is not None
    return q, k, v


def _able(engine: Engine, problem: Problem) -> EffectEngine:
    return engines.with_effects(engine, problem)
