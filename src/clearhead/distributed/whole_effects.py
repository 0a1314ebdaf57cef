"""What is asked of a whole matrix of effects, the same on every rank: its strongest edges, groups and picture."""

from dataclasses import replace

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.effect_lists import larger, largest_under, merged_lists
from clearhead.core.effects import WantedEffects
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.distributed.exchange import everywhere, total
from clearhead.distributed.ranks import Ranks
from clearhead.engines.base import room_for_effects
from clearhead.engines.portable_tiles import sandwich


class WholeEffects:
    """The answers about the whole matrix: this rank's part, to which it adds what it finds, then that of all ranks.

    `problem` is that of the whole matrix.
    `found` has them by array name, (batch, heads, …) in float64; places of strongest edges are query·keys + key.
    """

    def __init__(self, problem: Problem, want: WantedEffects) -> None:
        self.problem = problem
        self.found = room_for_effects(problem, replace(want, by_key=False, by_query=False, top=None))

    def add(self, part: dict[str, Array]) -> None:
        """Add what an engine found of some edges, with places in the whole matrix."""
        if "groups" in self.found:
            self.found["groups"] += part["groups"]
        if "strongest_values" in self.found:
            self._keep_strongest(part["strongest_values"], part["strongest_indices"])

    def add_to_picture(self, tile: Array, rows: range, cols: range) -> None:
        """Add the effects (batch, heads, queries, keys) of queries and keys at these positions."""
        mean, largest = self.found["image_mean"], self.found["image_largest"]
        high, tall = areas(mean.shape[2], self.problem.queries, slice(rows.start, rows.stop))
        wide, broad = areas(mean.shape[3], self.problem.keys, slice(cols.start, cols.stop))
        for batch, head in np.ndindex(tile.shape[:2]):
            own, here = tile[batch, head], (batch, head, high, wide)
            mean[here] += sandwich(tall, own.astype(np.float64), broad)
            largest[here] = larger(largest_under(largest_under(own, tall).T, broad).T, largest[here])

    def everywhere(self, ranks: Ranks) -> dict[str, Array]:
        """The answers of all ranks together; all ranks must call it."""
        for name in ("groups", "image_mean"):
            if name in self.found:
                self.found[name] = total(ranks, f"sum of {name}", self.found[name])
        if "image_largest" in self.found:
            self.found["image_largest"] = total(ranks, "largest effects", self.found["image_largest"], larger)
        if "strongest_values" in self.found:
            own = self.found["strongest_values"], self.found["strongest_indices"]
            values, places = (everywhere(ranks, "strongest effects", x, [x.shape] * ranks.world) for x in own)
            for rank in range(ranks.world):
                if rank != ranks.rank:
                    self._keep_strongest(values[rank], places[rank])
        return self.found

    def _keep_strongest(self, values: Array, places: Array) -> None:
        before = self.found["strongest_values"], self.found["strongest_indices"]
        self.found["strongest_values"], self.found["strongest_indices"] = merged_lists(
            before, (values, places), "magnitude"
        )
