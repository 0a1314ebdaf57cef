"""The passes over one problem's matrix of effects: what single edges did, in core/effects.py's terms."""

from typing import Any

import torch
from triton import next_power_of_2

from clearhead.core.axes import Array
from clearhead.core.effects import EFFECTS, Edges, Order, WantedEffects
from clearhead.core.problem import Inputs
from clearhead.engines.base import kinds
from clearhead.engines.gpu import effects
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.arguments import Sizes
from clearhead.engines.gpu.column_pass import WIDTH, ColumnPass
from clearhead.engines.gpu.columns import Columns
from clearhead.engines.gpu.effects import ByQuery, Others
from clearhead.engines.gpu.lists import FREE
from clearhead.engines.gpu.tiles import RowTerms


class EffectPass(ColumnPass):
    """The effects of one problem; those of its methods that ColumnPass has sum effects instead of weights."""

    def __init__(self, edges: Edges, split: int | None = None) -> None:
        """`split` is the keys per program where queries are few."""
        problem, q, k, v, g, terms = edges
        super().__init__(Inputs(problem, q, k, v), g=g)
        self.split = split
        self.splits = 1 if split is None else -(-problem.keys // split)
        if terms is not None:
            logsumexp, whole, others = (self.contiguous(x) for x in (terms.logsumexp, terms.whole, terms.others))
            strongest = None if terms.strongest is None else gpu.contiguous(terms.strongest, torch.int32)
            self.terms = RowTerms(logsumexp, whole=whole, others=others, strongest=strongest)

    def sizes(self, width: int) -> Sizes:
        """The sizes of this pass with `width` columns of a product."""
        return gpu.sizes(self.problem, "effect products" if width else "effects", self.d_v, width, WIDTH)

    def others(self) -> list[Others]:
        """core/effects.Others of each split of the keys, in their order."""
        shape = self.splits, self.problem.batch, self.problem.heads, self.problem.queries
        strongest = self.room(*shape, dtype=torch.int32)
        to = Others(strongest, *[self.room(*shape) for _ in range(4)])
        self.launch(effects.others, self.problem.queries, self.sizes(0), splits=self.splits, to=to, split=self.split)
        return [Others(*[x[number] for x in to]) for number in range(self.splits)]

    def product(self, x: Array) -> torch.Tensor:
        """E·x, (batch, heads, queries, columns), in slices of columns."""
        problem = self.problem
        product = self.zeros(problem.batch, problem.heads, problem.queries, x.shape[-1])
        for start in range(0, x.shape[-1], WIDTH):
            part = x[..., start : start + WIDTH]
            result = self.zeros(*product.shape[:3], part.shape[-1])
            self._by_queries(ByQuery(product=result), part)
            product[..., start : start + WIDTH] = result
        return product

    def effects(self, want: WantedEffects) -> dict[str, torch.Tensor]:
        """What is wanted, by the names of core/effects.arrays_of."""
        results = self.rooms(kinds(self.problem, want, want.names(), EFFECTS))
        if want.by_query or want.top is not None or want.strongest is not None:
            self._observe_queries(want, results)
        if want.by_key:
            self.columns(Columns(received=results["by_key"]))
        if want.image is not None:
            self.image(results["image_mean"], results["image_largest"])
        if want.groups is not None:
            self.groups(want.groups, results["groups"])
        return results

    def _observe_queries(self, want: WantedEffects, results: dict[str, torch.Tensor]) -> None:
        problem = self.problem
        top, kept = (max(2, next_power_of_2(count or 0)) for count in (want.top, want.strongest))
        rows = self.splits, problem.batch, problem.heads, problem.queries
        lists = *rows[:3], -(-problem.queries // self.sizes(0).M), kept
        to = ByQuery(
            sums=self.zeros(*rows) if want.by_query else None,
            top=None if want.top is None else self.room(*rows, top),
            top_keys=None if want.top is None else self.room(*rows, top, dtype=torch.int32),
            strongest=None if want.strongest is None else self.room(*lists),
            strongest_places=None if want.strongest is None else self.room(*lists, dtype=torch.int64),
        )
        self._by_queries(to, TOP=top, STRONGEST=kept, ORDER=want.order, split=self.split)
        if want.by_query:
            results["by_query"] = to.sums.sum(0)
        if want.top is not None:
            values, keys = (x.movedim(0, -2).flatten(-2) for x in (to.top, to.top_keys))
            listed = _first(values, keys.long(), keys >= 0, want.order, want.top)
            results["top_values"], results["top_indices"] = listed
        if want.strongest is not None:
            values, places = (x.movedim(0, 2).flatten(2) for x in (to.strongest, to.strongest_places))
            listed = _first(values, places, places < FREE.value, "magnitude", want.strongest)
            results["strongest_values"], results["strongest_indices"] = listed

    def _by_queries(self, to: ByQuery, x: Array | None = None, **more: Any) -> None:
        width = 0 if x is None else x.shape[-1]
        options = {"TOP": 2, "STRONGEST": 2, "ORDER": "magnitude", "split": None, **more}
        if not self.empty:
            self.launch(
                effects.by_queries, self.problem.queries, self.sizes(width),
                splits=1 if options["split"] is None else self.splits, along=self.direction, terms=self.terms,
                x=None if x is None else gpu.strided(x, self.problem), columns=width, to=to, D=gpu.padded(width),
                **options,
            )  # fmt: skip


def _first(
    values: torch.Tensor, places: torch.Tensor, taken: torch.Tensor, order: Order, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` along the last axis in this order, of equal ones the earlier place; 0 and -1 where none is."""
    by_place = places.argsort(stable=True)
    values, places, taken = (x.gather(-1, by_place) for x in (values, places, taken))
    ranks = {"magnitude": values.abs(), "largest": values, "smallest": -values}[order]
    ranks = ranks.clamp(min=torch.finfo(ranks.dtype).min)  # an effect of -inf comes before what is not taken
    best = ranks.where(taken, torch.full_like(ranks, -float("inf"))).argsort(stable=True, descending=True)
    values, places, taken = (x.gather(-1, best[..., :count]) for x in (values, places, taken))
    return values.where(taken, torch.zeros_like(values)), places.where(taken, torch.full_like(places, -1))
