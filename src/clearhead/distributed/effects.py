"""What single edges of a sharded sequence did: each row's state, effects, products and whole spans, as questions.

The table in core/effects.py says how parts over disjoint keys merge, and core/effects.py `merged` and `joined` do it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from clearhead import engines
from clearhead.core.axes import Array, blocks
from clearhead.core.effect_lists import larger, largest_under, merged_lists
from clearhead.core.effects import Edges, Kind, Others, Terms, WantedEffects, joined, merged, no_keys, terms_of_cuts
from clearhead.core.observations import areas
from clearhead.core.problem import Inputs
from clearhead.core.statistics import Groups, arrays_of
from clearhead.distributed.messages import everywhere, total
from clearhead.distributed.schedule import Meeting, Parts, Question, meet
from clearhead.distributed.sharded_problem import Shards
from clearhead.engines.base import EffectEngine, Engine, room_for_effects
from clearhead.engines.portable_tiles import sandwich
from clearhead.ops.spans_cut import add_changes, changes, of_spans

_TILE, _WIDTH = 1 << 20, 1024  # effects in a tile of a picture, all batches and heads together; and keys


@dataclass(frozen=True, eq=False)
class EdgeEffects:
    """The effects of a sharded matrix. By merge queries travel to the keys; by all others, keys around a ring."""

    kind: Kind
    method: str
    shards: Shards  # with values
    g: Array  # (batch, heads, own queries, d_v)
    logsumexp: Callable[[], Array]  # of own queries, (batch, heads, own queries)

    @cached_property
    def terms(self) -> Terms:
        """What each own query must know of its whole row, for which cuts take a pass over the keys."""
        logsumexp = self.logsumexp()
        if self.kind != "cut":
            return Terms(self.kind, logsumexp)
        return terms_of_cuts(self._others(), self.shards.whole.sinks, logsumexp)

    @property
    def known(self) -> list[Array]:
        """What is known of own queries, as it travels with them."""
        terms = self.terms.logsumexp, self.terms.whole, self.terms.others, self.terms.strongest
        return [self.g, *(x for x in terms if x is not None)]

    def tile(self, engine: Engine, inputs: Inputs, rows: Sequence[Array]) -> Array:
        """A tile of effects, as `by_index` asks for it."""
        return engines.with_effects(engine, inputs.problem).effect_tile(self._edges(inputs, rows))

    def product(self, x: Array, *, transposed: bool) -> Array:
        """E·x in float64 for own queries, or Eᵀ·x for own keys, (batch, heads, own positions, d).

        x is (batch, its heads, own keys, d), or for the transpose (batch, heads or 1, own queries, d).
        """

        def find(one: Meeting, rows: Any) -> Parts:
            columns = rows[-1] if transposed else one.more[0]
            part = [self._engine.effect_product(self._edges(one.inputs, rows), columns, transposed=transposed)]
            return ([], part) if transposed else (part, [])

        def nothing(length: int) -> list[Array]:
            return [self.shards.zeros(length, x.shape[3])]

        if transposed:
            return self._ask(Question(find, [*self.known, x], per_key=nothing))[1][0]
        return self._ask(Question(find, self.known, nothing), x)[0][0]

    def observe(self, want: WantedEffects) -> dict[str, Array]:
        """What is wanted, by array name: for own queries or own keys, or of the whole matrix on every rank."""
        of_queries = replace(want, by_key=False, strongest=None, image=None, groups=None)
        of_all = replace(want, by_key=False, by_query=False, top=None)
        names = [array for name in of_queries.names() for array in arrays_of(name, want.table)]
        whole = room_for_effects(self.shards.whole, of_all)  # this rank's part
        labels = [] if want.groups is None else [side[:, None] for side in want.groups[:2]]

        def find(one: Meeting, rows: Any) -> Parts:
            answers = self._answers(one, rows, want)
            whole.update(_joined(of_all, whole, answers))
            if want.image is not None:
                self._paint(whole, one, rows)
            return [answers[name] for name in names], [answers["by_key"]] if want.by_key else []

        def nothing(length: int) -> list[Array]:
            return list(room_for_effects(replace(self.shards.whole, rows=range(length)), of_queries).values())

        def both(a: list[Array], b: list[Array]) -> list[Array]:
            sides = (dict(zip(names, side, strict=True)) for side in (a, b))
            return list(_joined(of_queries, *sides).values())

        def keys(length: int) -> list[Array]:
            return [self.shards.zeros(length)] if want.by_key else []

        question = Question(find, [*self.known, *labels[:1]], nothing, both, keys)
        rows, columns = self._ask(question, *labels[1:])
        local = zip([*names, "by_key"], [*rows, *columns], strict=False)
        return dict(local) | self._on_all_ranks(whole)

    def spans(self, groups: Groups) -> Array:
        """What cutting whole spans changes, (batch, heads, query groups, key groups) in float64, on every rank."""
        whole, count = self.shards.whole, groups.counts[1]

        def find(one: Meeting, rows: Any) -> Parts:
            parts = []
            for batch in range(whole.batch):
                problem, labels = one.problem.take(batches=np.arange(batch, batch + 1)), one.more[0][batch, 0]
                inputs = Inputs(problem, *(x[batch : batch + 1] for x in _with_values(one.inputs)))
                parts.append(of_spans(self._engine, inputs, rows[0][batch], labels, count))
            return [np.stack(each) for each in zip(*parts, strict=True)], []

        def nothing(length: int) -> list[Array]:
            return [self.shards.zeros(length, count + 1) - np.inf, self.shards.zeros(length, count + 1)]

        question = Question(find, [self.g], nothing, lambda a, b: list(joined((a[0], a[1]), (b[0], b[1]))))
        lse, mean = self._ask(question, groups.keys[:, None])[0]
        changed = np.zeros((whole.batch, whole.heads, *groups.counts))
        for into, change, labels in zip(changed, changes(lse, mean, whole.sinks), groups.queries, strict=True):
            add_changes(into, change, labels)
        return total(self.shards.ranks, "sum of spans", changed)

    @property
    def _engine(self) -> EffectEngine:
        return engines.with_effects(self.shards.engine, self.shards.whole)

    def _ask(self, question: Question, *more: Array) -> Parts:
        return meet("merge" if self.method == "merge" else "ring", replace(self.shards, more=more), question)

    def _edges(self, inputs: Inputs, rows: Sequence[Array]) -> Edges:
        """The edges of these inputs, from what travelled with some queries as `known`."""
        terms = Terms(self.kind, *rows[1 : len(self.known)]).among(inputs.problem.cols)
        return Edges(inputs.problem, *_with_values(inputs), rows[0], terms)

    def _others(self) -> Others:
        """The state of own queries over all keys; the strongest key counts in the whole sequence."""

        def find(one: Meeting, rows: Any) -> Parts:
            others = self._engine.others(Edges(one.problem, *_with_values(one.inputs), rows[0]))
            return [_moved(others.strongest, one.problem.cols.start), *others[1:]], []

        def nothing(length: int) -> list[Array]:
            return list(no_keys((self.shards.whole.batch, self.shards.whole.heads, length)))

        question = Question(find, [self.g], nothing, lambda a, b: list(merged(Others(*a), Others(*b), 0)))
        return Others(*self._ask(question)[0])

    def _answers(self, one: Meeting, rows: Sequence[Array], want: WantedEffects) -> dict[str, Array]:
        """The engine's answers for one meeting but for the picture, with places in the whole matrix."""
        problem, asked = one.problem, replace(want, image=None)
        if want.strongest is not None:
            asked = replace(asked, strongest=min(want.strongest, problem.queries * problem.keys))
        if want.groups is not None:
            asked = replace(asked, groups=Groups(rows[-1][:, 0], one.more[0][:, 0], want.groups.counts))
        if not asked.names():
            return {}
        answers = dict(self._engine.effects(self._edges(one.inputs, rows), asked))
        if want.top is not None:
            answers["top_indices"] = _moved(answers["top_indices"], problem.cols.start)
        if want.strongest is not None:
            places = answers["strongest_indices"]
            query, key = np.divmod(places, problem.keys)
            moved = (query + problem.rows.start) * self.shards.whole.keys + key + problem.cols.start
            answers["strongest_indices"] = np.where(places < 0, -1, moved)
        return answers

    def _paint(self, whole: dict[str, Array], one: Meeting, rows: Sequence[Array]) -> None:
        """Add one meeting's effects to the picture, tile by tile."""
        mean, largest = whole["image_mean"], whole["image_largest"]
        whole_rows, whole_cols = self.shards.whole.queries, self.shards.whole.keys
        q, k, v = _with_values(one.inputs)
        width = min(_WIDTH, one.problem.keys)
        height = max(1, _TILE // max(1, one.problem.batch * one.problem.heads * width))
        for up, right in product(blocks(one.problem.queries, height), blocks(one.problem.keys, width)):
            problem = one.problem.take(queries=range(up.start, up.stop), keys=range(right.start, right.stop))
            inputs = Inputs(problem, q[:, :, up], k[:, :, right], v[:, :, right])
            tile = self.tile(self._engine, inputs, [x[:, :, up] for x in rows])
            high, tall = areas(mean.shape[2], whole_rows, slice(problem.rows.start, problem.rows.stop))
            wide, broad = areas(mean.shape[3], whole_cols, slice(problem.cols.start, problem.cols.stop))
            for batch, head in np.ndindex(tile.shape[:2]):
                part, here = tile[batch, head], (batch, head, high, wide)
                mean[here] += sandwich(tall, part.astype(np.float64), broad)
                largest[here] = larger(largest_under(largest_under(part, tall).T, broad).T, largest[here])

    def _on_all_ranks(self, whole: dict[str, Array]) -> dict[str, Array]:
        """The answers about the whole matrix from each rank's part of them; all ranks must call it."""
        ranks, names = self.shards.ranks, ("strongest_values", "strongest_indices")
        merges = {name: larger if name == "image_largest" else np.add for name in whole if name not in names}
        answers = {name: total(ranks, f"sum of {name}", whole[name], how) for name, how in merges.items()}
        if names[0] in whole:
            each = [everywhere(ranks, "strongest effects", whole[x], [whole[x].shape] * ranks.world) for x in names]
            best = each[0][0], each[1][0]
            for values, places in zip(each[0][1:], each[1][1:], strict=True):
                best = merged_lists(best, (values, places), "magnitude")
            answers |= zip(names, best, strict=True)
        return answers


def _moved(places: Array, start: int) -> Array:
    """Places among some keys, counted from the first key; -1 stays."""
    return np.where(places < 0, -1, places + start)


def _joined(want: WantedEffects, a: dict[str, Array], b: dict[str, Array]) -> dict[str, Array]:
    """Answers over disjoint keys, by array name, but for a picture: added, or lists of the first ones merged."""
    result: dict[str, Array] = {}
    for name in want.names():
        arrays = arrays_of(name, want.table)
        if want.table[name].over_keys == "strongest":
            one, other = ((side[arrays[0]], side[arrays[1]]) for side in (a, b))
            order = want.order if name == "top" else "magnitude"
            result |= zip(arrays, merged_lists(one, other, order), strict=True)
        elif name != "image":
            result[name] = a[name] + b[name]
    return result


def _with_values(inputs: Inputs) -> tuple[Array, Array, Array]:
    _, q, k, v = inputs
    assert v is not None
    return q, k, v
