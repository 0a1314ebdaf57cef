"""Launches the kernels of effects for one problem: what single edges did, in core/effects.py's terms."""

from typing import Any

import numpy as np
import torch
from triton import next_power_of_2

from clearhead.core.axes import Array, group_size
from clearhead.core.effects import Order, Terms, WantedEffects, shapes
from clearhead.core.problem import Problem
from clearhead.core.statistics import Groups
from clearhead.engines.base import sizes_of
from clearhead.engines.gpu import columns, effects, others, pixels
from clearhead.engines.gpu import tensors as gpu
from clearhead.engines.gpu.effect_tiles import RowTerms
from clearhead.engines.gpu.effects import FREE, ByQuery
from clearhead.engines.gpu.labels import ordered

_WIDTH = 128  # columns of g, v and x in a tile; t = g·v is summed over several where they are wider
_BAND = 64  # pixel rows or query groups per launch
_NOTHING = ByQuery(None, None, None, None, None, None, None)


class Edges:
    """The effects of one problem: the arguments that its kernels share, and their launches."""

    def __init__(
        self, problem: Problem, q: Array, k: Array, v: Array, g: Array, terms: Terms | None, split: int | None = None
    ) -> None:
        """`terms` is None where they are what is to be found; `split` is the keys per program where queries are few."""
        self.problem, self.device, self.split = problem, gpu.device_of(q), split
        self.number, self.width = gpu.statistics(problem), v.shape[-1]
        self.heads = problem.batch * problem.heads
        self.empty = not self.heads * problem.queries * problem.keys
        rules = gpu.rules(problem, self.device)
        self.arguments = {
            **gpu.by_name(q=gpu.as_tensor(q), g=gpu.as_tensor(g), k=gpu.as_tensor(k), v=gpu.as_tensor(v)),
            "d_k": problem.d_k, "d_v": self.width, "rules": rules, "per_key": problem.group,
            "per_value": group_size(problem.heads, v.shape[1]), "DK": gpu.padded(problem.d_k),
            "DV": min(_WIDTH, gpu.padded(self.width)), "WIDE": self.width > _WIDTH,
        }  # fmt: skip
        if terms is not None:
            numbers = {name: getattr(terms, name) for name in ("logsumexp", "whole", "others")}
            sent = {name: None if x is None else gpu.contiguous(x, self.number) for name, x in numbers.items()}
            strongest = None if terms.strongest is None else gpu.contiguous(terms.strongest, torch.int32)
            self.arguments["terms"] = RowTerms(**sent, strongest=strongest)

    def others(self) -> list[others.Found]:
        """core/effects.Others of each split of the keys, in their order."""
        splits = self._splits()
        shape = splits, self.problem.batch, self.problem.heads, self.problem.queries
        strongest = self._room(*shape, dtype=torch.int32)
        found = others.Found(strongest, *[self._room(*shape) for _ in range(4)])
        launch, tiles = self._tiles(0)
        grid = -(-self.problem.queries // tiles.owned) * self.heads, splits
        others.others[grid](**launch, to=found, split=self.split)
        return [others.Found(*[x[at] for x in found]) for at in range(splits)]

    def tile(self) -> torch.Tensor:
        """Every effect, (batch, heads, queries, keys)."""
        problem = self.problem
        found = self._zeros(problem.batch, problem.heads, problem.queries, problem.keys)
        self._by_queries(_NOTHING._replace(tile=found))
        return found

    def product(self, x: Array, *, transposed: bool) -> torch.Tensor:
        """E·x or Eᵀ·x, (batch, heads, queries or keys, columns), in slices of columns."""
        problem = self.problem
        size = problem.keys if transposed else problem.queries
        found = self._zeros(problem.batch, problem.heads, size, x.shape[-1])
        for start in range(0, x.shape[-1], _WIDTH):
            part = x[..., start : start + _WIDTH]
            here = self._zeros(*found.shape[:3], part.shape[-1])
            if transposed:
                self._by_keys(None, here, x=part)
            else:
                self._by_queries(_NOTHING._replace(product=here), x=part)
            found[..., start : start + _WIDTH] = here
        return found

    def effects(self, want: WantedEffects) -> dict[str, torch.Tensor]:
        """What is wanted, by the names of core/effects.arrays_of."""
        found = {
            name: self._zeros(*shape, dtype=torch.int64 if name.endswith("_indices") else self.number)
            for name, shape in shapes(sizes_of(self.problem), want).items()
        }
        if want.by_query or want.top is not None or want.strongest is not None:
            self._observe_queries(want, found)
        if want.by_key:
            self._by_keys(found["by_key"], None)
        if want.image is not None:
            self._image(found["image_mean"], found["image_largest"])
        if want.groups is not None:
            self._groups(want.groups, found["groups"])
        return found

    def _observe_queries(self, want: WantedEffects, found: dict[str, torch.Tensor]) -> None:
        problem, splits = self.problem, self._splits()
        top, kept = (max(2, next_power_of_2(count or 0)) for count in (want.top, want.strongest))
        rows = splits, problem.batch, problem.heads, problem.queries
        lists = problem.batch, problem.heads, splits, -(-problem.queries // self._tiles(0)[1].owned), kept
        to = ByQuery(
            sums=self._zeros(*rows) if want.by_query else None,
            tile=None,
            product=None,
            top=None if want.top is None else self._room(*rows, top),
            top_keys=None if want.top is None else self._room(*rows, top, dtype=torch.int32),
            strongest=None if want.strongest is None else self._room(*lists),
            strongest_places=None if want.strongest is None else self._room(*lists, dtype=torch.int64),
        )
        self._by_queries(to, TOP=top, STRONGEST=kept, ORDER=want.order, split=self.split)
        if want.by_query:
            found["by_query"] = to.sums.sum(0)
        if want.top is not None:
            values, keys = (x.movedim(0, -2).flatten(-2) for x in (to.top, to.top_keys))
            found["top_values"], found["top_indices"] = _first(values, keys.long(), keys >= 0, want.order, want.top)
        if want.strongest is not None:
            values, places = (x.flatten(2) for x in (to.strongest, to.strongest_places))
            listed = _first(values, places, places < FREE.value, "magnitude", want.strongest)
            found["strongest_values"], found["strongest_indices"] = listed

    def _image(self, mean: torch.Tensor, largest: torch.Tensor) -> None:
        problem, (height, width) = self.problem, mean.shape[-2:]
        launch, tiles = self._tiles(0)
        for first in range(0, height, _BAND):
            count = min(_BAND, height - first)
            shape = problem.batch, problem.heads, problem.keys, count
            means, most = self._room(*shape), self._room(*shape)
            pixels.pixels[(-(-problem.keys // tiles.owned) * count * self.heads,)](
                **launch, mean=means, largest=most, first=first, count=count, height=height
            )
            self._pool(means, mean, first)
            pixels.pool_largest[(width * self.heads,)](
                most, largest, problem.keys, width, count, first, height, D=gpu.padded(count), FLOAT=tiles.number, N=32
            )

    def _groups(self, groups: Groups, found: torch.Tensor) -> None:
        """Sums between groups, in bands of query groups: a launch covers the queries from the band's first to last."""
        if not found.numel():
            return
        labels = gpu.to_device(groups.queries, np.int32, self.device)
        table = tuple(gpu.to_device(x, np.int32, self.device) for x in ordered(groups.keys, groups.counts[1]))
        for first in range(0, groups.counts[0], _BAND):
            count = min(_BAND, groups.counts[0] - first)
            inside = np.flatnonzero(((groups.queries >= first) & (groups.queries < first + count)).any(axis=0))
            if len(inside):
                product = self._zeros(*found.shape[:2], self.problem.keys, count)
                span = int(inside[0]), int(inside[-1]) + 1
                self._by_keys(None, product, labels=labels, first=first, columns=count, span=span)
                self._pool(product, found, first, table)

    def _pool(self, product: torch.Tensor, found: torch.Tensor, first: int, table: Any = (None, None)) -> None:
        """Sum the product over the keys of each pixel column or key group, into found[:, :, first:, :]."""
        _, heads, height, parts = found.shape
        count, number = product.shape[-1], self._tiles(0)[1].number
        columns.pool[(parts * self.heads,)](
            product, found, *table, self.problem.keys, parts, heads, count, first, height,
            D=gpu.padded(count), FLOAT=number, N=32,
        )  # fmt: skip

    def _by_queries(self, to: ByQuery, x: Array | None = None, **more: Any) -> None:
        width = 0 if x is None else x.shape[-1]
        launch, tiles = self._tiles(width)
        given = {"TOP": 2, "STRONGEST": 2, "ORDER": "magnitude", "split": None, **more}
        splits = 1 if given["split"] is None else self._splits()
        if not self.empty:
            effects.by_queries[(-(-self.problem.queries // tiles.owned) * self.heads, splits)](
                **launch, **self._given(x), **given, columns=width, to=to, D=gpu.padded(width)
            )

    def _by_keys(
        self, out: torch.Tensor | None, product: torch.Tensor | None, x: Array | None = None, labels: Any = None,
        first: int = 0, columns: int = 0, span: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        width = columns if x is None else x.shape[-1]
        launch, tiles = self._tiles(width)
        if span is not None:
            span = span[0] // tiles.passed * tiles.passed, -(-span[1] // tiles.passed) * tiles.passed
        if not self.empty:
            effects.by_keys[(-(-self.problem.keys // tiles.owned) * self.heads,)](
                **launch, **self._given(x), labels=labels, first=first, columns=width, out=out, out_product=product,
                span=span, D=gpu.padded(width),
            )  # fmt: skip

    def _given(self, x: Array | None) -> dict[str, Any]:
        per_x = self.problem.heads if x is None else group_size(self.problem.heads, x.shape[1])
        return {**gpu.by_name(x=None if x is None else gpu.as_tensor(x)), "per_x": max(1, per_x)}

    def _tiles(self, width: int) -> tuple[dict[str, Any], gpu.Tiles]:
        """The arguments that all kernels take, with the sizes of tiles for products with `width` columns."""
        what = "effect products" if width else "effects"
        tiles = gpu.tiles(self.problem, max(width, min(_WIDTH, self.width)), what)
        sizes = {"M": tiles.owned, "N": tiles.passed, "num_warps": tiles.warps, "num_stages": tiles.stages}
        return {**self.arguments, **sizes, "PRECISION": tiles.precision, "FLOAT": tiles.number}, tiles

    def _splits(self) -> int:
        return 1 if self.split is None else -(-self.problem.keys // self.split)

    def _room(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.number, device=self.device)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self.number, device=self.device)


def _first(
    values: torch.Tensor, places: torch.Tensor, taken: torch.Tensor, order: Order, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` along the last axis in this order, of equal ones the earlier place; 0 and -1 where none is."""
    by_place = places.argsort(stable=True)
    values, places, taken = (x.gather(-1, by_place) for x in (values, places, taken))
    ranks = {"magnitude": values.abs(), "largest": values, "smallest": -values}[order]
    ranks = ranks.clamp(min=torch.finfo(ranks.dtype).min)  # an effect's own -inf comes before what is not taken
    best = ranks.where(taken, torch.full_like(ranks, -float("inf"))).argsort(stable=True, descending=True)
    values, places, taken = (x.gather(-1, best[..., :count]) for x in (values, places, taken))
    return values.where(taken, torch.zeros_like(values)), places.where(taken, torch.full_like(places, -1))
