"""The matrices of contributions, cuts and norms of a sharded sequence as objects."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from clearhead.core.arrays import on_cpu
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.effect_lists import take_strongest
from clearhead.core.effects import EFFECTS, AskedEffects, Effects, Kind, Order, Strongest, WantedEffects
from clearhead.core.observations import check_effects_room, wanted_effects
from clearhead.core.problem import Problem
from clearhead.core.room import array_bytes, check_room
from clearhead.core.statistics import Wanted, joined_arrays
from clearhead.distributed import passes
from clearhead.distributed.effects import EdgeEffects
from clearhead.distributed.ranks import agreed
from clearhead.distributed.sharded_matrix import Compute, ShardedMatrix, compared, with_all_groups
from clearhead.distributed.sharded_problem import Shards, fingerprint
from clearhead.ops.causes import CauseMatrix, check_cuts
from clearhead.ops.matrix_data import MatrixData
from clearhead.ops.observable import ObservableEffects


class ShardedCauseMatrix(ShardedMatrix, ObservableEffects):
    """The effect of every edge of a sharded sequence, (…, heads, all queries, all keys); never stored, never gathered.

    Made by `ShardedAttentionMatrix.contributions` and `ShardedAttentionMatrix.cuts`; `kind` is "contribution", "cut" or
    "norm". All is as in `CauseMatrix`, but that every rank calls every method, with the same arguments except for x and
    labels, which belong to own positions. by_key is that of own keys; by_query and top are those of own queries, and
    indices count in the whole sequence; strongest, image, groups, spans and effects read by index are those of the
    whole matrix, the same on every rank. Answers are tensors on q's device and carry no graph: effects have no
    derivative.

    Keys and values travel around the ranks as by the method ring, with memory for two shards of them; by the method
    merge, queries travel to the keys with g and what is known of their rows. The log-sum-exp is computed by the
    attention matrix's own method. Creating it computes nothing but the values' norms; what cuts need of every row is
    computed once, when first needed, and kept. Raises on every rank, as `ShardedAttentionMatrix` does.

    >>> import torch, torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> A = ch.distributed.ShardedAttentionMatrix(torch.zeros(2, 4), torch.zeros(2, 4), causal=True)
    >>> E = A.cuts(torch.tensor([2.0, 6.0]), torch.ones(2))
    >>> E, E.by_key().tolist(), E.strongest(1).value.tolist()
    (ShardedCauseMatrix(cut, queries 2, keys 2) float32 on 1 rank, [0.0, -2.0], [-2.0])
    >>> dist.destroy_process_group()
    """

    instead, _entries = CauseMatrix.instead, "effects"

    def __init__(self, edges: EdgeEffects) -> None:
        self.kind, self._method, self._shards, self._edges = edges.kind, edges.method, edges.shards, edges

    def __repr__(self) -> str:
        return f"ShardedCauseMatrix({self.kind}, {named(self.shape, WEIGHTS)[1:]} {self.dtype} {self._on}"

    def __getitem__(self, key: Any) -> Any:
        """Exact effects of the whole matrix by integers, slices and Ellipsis; all ranks give the same index.

        Returns and raises what `ShardedAttentionMatrix[…]` does. O(chosen effects·(d_k + d_v)) time once each row's
        state is known, and memory for the chosen effects.
        """
        return self._by_index(key)

    def __matmul__(self, x: Tensor) -> Tensor:
        """E·x, from x of own keys to own queries, (…, heads, own queries, d), in E's dtype; without a graph.

        x is (…, kv_heads or heads, own keys, d), or (own keys, d) or (own keys,) for all heads alike. Raises as
        `ShardedAttentionMatrix @ v`.
        """
        return self._product("E @ x", x)

    def spans(self, query_groups: Any, key_groups: Any) -> Tensor:
        """What cutting whole spans of keys changes, (…, heads, query groups, key groups): as `CauseMatrix.spans`.

        Labels are those of own queries and own keys; the answer is that of the whole matrix, the same on every rank.
        O(own queries·key groups) memory.
        """

        def read() -> tuple[WantedEffects, dict[str, Any]]:
            check_cuts(self.kind)
            want = wanted_effects(self._shards.local(), {"groups": (query_groups, key_groups)})
            self._check_spans(want)
            return want, compared(want)

        want = with_all_groups(*agreed(self._ranks, "E.spans", read))
        assert want.groups is not None
        with self._ranks.together("E.spans"):
            self._check_spans(want)
            check_effects_room(self._shards.local(), want)
            return self._restored(self._edges.spans(want.groups))

    def observe(self, *, order: Order = "magnitude", **asked: Unpack[AskedEffects]) -> Effects:
        """Everything asked for in one call, as by `CauseMatrix.observe`; for own queries and own keys.

        Returns an Effects, None where something was not asked for. Labels of groups are (own queries,) and (own keys,).
        Raises what `CauseMatrix.observe` raises on the rank whose argument is wrong, and DistributedError as said
        above. One pass, and for cuts one more, the first time.
        """

        def read() -> tuple[WantedEffects, dict[str, Any]]:
            whole: Any = {name: asked[name] for name in ("strongest",) if name in asked}
            local: Any = {name: value for name, value in asked.items() if name not in whole}
            want = wanted_effects(self._shards.local(), local, order)
            want = replace(want, strongest=wanted_effects(self._shards.whole, whole).strongest)
            return want, {**compared(want), "order": want.order}

        want = with_all_groups(*agreed(self._ranks, "E.observe", read))
        if not want.names():
            return Effects()
        with self._ranks.together("E.observe"):
            check_effects_room(self._shards.local(), want)  # again: another rank may have made the groups more
            arrays = self._edges.observe(want)
            strongest = take_strongest(arrays, self._shards.whole.keys, asked.get("strongest"))
            answers = joined_arrays({name: self._restored(x) for name, x in arrays.items()}, EFFECTS)
            if strongest is not None:
                edges = strongest._replace(value=strongest.value.astype(self.dtype))
                answers["strongest"] = Strongest(*map(self._shards.give, edges))
            return Effects(**answers)

    def _known(self) -> tuple[Compute, Sequence[Array]]:
        return self._edges.tile, self._edges.known

    def _check_spans(self, want: WantedEffects) -> None:
        whole, groups = self._shards.whole, want.groups
        shape = whole.batch, whole.heads, self._shards.lengths[0], 1 + (0 if groups is None else groups.counts[1])
        size = 6 * array_bytes(shape, 8)
        check_room(f"spans, of shape {shape} on this rank,", size, "fewer spans of keys at a time.")

    def _transposed(self, x: Any) -> Any:
        return self._product("E.T @ x", x, transposed=True)

    def _product(self, what: str, x: Any, *, transposed: bool = False) -> Tensor:
        def check(local: Problem, columns: Array) -> None:
            size = (local.batch, local.heads, local.keys if transposed else local.queries, columns.shape[-1])
            check_room(f"a product of shape {size}", array_bytes(size, 8), "give fewer columns of x.", local.device)

        columns, vector = self._operand(what, "x", x, check, transposed=transposed)
        with self._ranks.together(what):
            product = self._edges.product(columns, transposed=transposed)
        return self._restored(product, vector=vector)


def effects_of(
    what: str,
    shards: Shards,
    method: str,
    logsumexp: Callable[[], Array],
    made: Callable[[MatrixData], tuple[Kind, MatrixData, Array, Array]],
    output: Any = None,
) -> ShardedCauseMatrix:
    """The matrix of what `made` makes of own v and g, in one dtype with q and k. All ranks must call it."""

    @torch.no_grad()
    def read() -> tuple[tuple[Kind, MatrixData, Array, Array], dict[str, Any]]:
        parts = made(MatrixData(shards.local(), shards.q, shards.k, shards.give, shards.engine, None))
        kind, data, v, _ = parts
        sizes = {"v's heads": v.shape[1], "v's width": v.shape[3], "effects' dtype": str(data.problem.dtype)}
        return parts, {"kind": kind, **sizes, "output": fingerprint("output", output)}

    (kind, data, v, g), _ = agreed(shards.ranks, what, read)
    dtype = data.problem.dtype
    wide = replace(shards, whole=replace(shards.whole, dtype=dtype), q=data.q, k=data.k)
    if dtype != shards.whole.dtype:
        logsumexp = lambda: passes.rows(method, wide, Wanted(logsumexp=True))["logsumexp"]  # noqa: E731
    return ShardedCauseMatrix(EdgeEffects(kind, method, replace(wide, v=on_cpu(v)), on_cpu(g), logsumexp))
