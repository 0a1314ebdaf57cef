"""The matrices of contributions, cuts and norms of a sharded sequence as objects."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from clearhead.core import room
from clearhead.core.arrays import on_cpu, statistics_dtype
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.effect_lists import strongest_edges
from clearhead.core.effects import (
    EFFECTS,
    AskedEffects,
    Effects,
    Kind,
    ObservableEffects,
    Order,
    Ranked,
    SignedImage,
    Strongest,
    WantedEffects,
    arrays_of,
)
from clearhead.core.observations import check_effects_room, wanted_effects
from clearhead.core.operands import operand
from clearhead.core.statistics import Groups, Wanted
from clearhead.distributed import methods
from clearhead.distributed.effects import EdgeEffects, known
from clearhead.distributed.ranks import Ranks
from clearhead.distributed.sharded_transposed import ShardedTransposedMatrix
from clearhead.distributed.shards import Shards, agreed, array_of, fingerprint
from clearhead.distributed.tiles import Compute, by_index
from clearhead.ops import cause_inputs
from clearhead.ops.causes import WORDS, check_cuts
from clearhead.ops.factors import Factors

_KINDS: dict[str, Any] = {"top": Ranked, "image": SignedImage}


class ShardedCauseMatrix(ObservableEffects):
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

    __array_ufunc__ = None

    def __init__(self, kind: Kind, method: str, shards: Shards, g: Array, logsumexp: Callable[[], Array]) -> None:
        self.kind = kind
        self._method, self._shards, self._g, self._logsumexp = method, shards, g, logsumexp

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, all queries, all keys): the shape of the whole matrix."""
        return (*self._shards.prefix, self._shards.whole.queries, self._shards.whole.keys)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the effects: float32, or float64 where q, v or g is."""
        return statistics_dtype(self._shards.whole.dtype)

    @property
    def T(self) -> "ShardedTransposedMatrix[ShardedCauseMatrix]":  # noqa: N802  NumPy's name
        """The transpose: E.T @ x takes x, (…, heads, own queries, d), and gives (…, heads, own keys, d)."""
        return ShardedTransposedMatrix(self, self._effects, self._transposed, words=WORDS)

    mT = T  # noqa: N815

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        world = self._ranks.world
        place = f"on {world} rank{'s' * (world > 1)}"
        return f"ShardedCauseMatrix({self.kind}, {named(self.shape, WEIGHTS)[1:]} {self.dtype} {place}"

    def __getitem__(self, key: Any) -> Any:
        """Exact effects of the whole matrix by integers, slices and Ellipsis; all ranks give the same index.

        Returns and raises what `ShardedAttentionMatrix[…]` does. O(chosen effects·(d_k + d_v)) time once each row's
        state is known, and memory for the chosen effects.
        """
        return self._effects(key)

    def __matmul__(self, x: Tensor) -> Tensor:
        """E·x, from x of own keys to own queries, (…, heads, own queries, d), in E's dtype; without a graph.

        x is (…, kv_heads or heads, own keys, d), or (own keys, d) or (own keys,) for all heads alike. Raises as
        `ShardedAttentionMatrix @ v`.
        """
        return self._product("E @ x", x, transposed=False)

    def spans(self, query_groups: Any, key_groups: Any) -> Tensor:
        """What cutting whole spans of keys changes, (…, heads, query groups, key groups): as `CauseMatrix.spans`.

        Labels are those of own queries and own keys; the answer is that of the whole matrix, the same on every rank.
        O(own queries·key groups) memory.
        """

        def own() -> Groups:
            check_cuts(self.kind)
            return self._labels({"groups": (query_groups, key_groups)})

        def told(groups: Groups) -> dict[str, Any]:
            return {"queries": groups.counts[0], "keys": groups.counts[1]}

        groups, everybody = agreed(self._ranks, "E.spans", own, told)
        groups = groups._replace(counts=_largest(everybody))
        with self._ranks.together("E.spans"):
            self._check_spans(groups.counts[1])
            check_effects_room(self._shards.local(), WantedEffects(groups=groups))
            return self._give(self._edges.spans(groups))

    def observe(self, *, order: Order = "magnitude", **asked: Unpack[AskedEffects]) -> Effects:
        """Everything asked for in one call, as by `CauseMatrix.observe`; for own queries and own keys.

        Returns an Effects, None where something was not asked for. Labels of groups are (own queries,) and (own keys,).
        Raises what `CauseMatrix.observe` raises on the rank whose argument is wrong, and DistributedError as said
        above. One pass, and for cuts one more, the first time.
        """

        def own() -> WantedEffects:
            whole: Any = {name: asked[name] for name in ("strongest",) if name in asked}
            local: Any = {name: value for name, value in asked.items() if name not in whole}
            want = wanted_effects(self._shards.local(), local, order)
            return replace(want, strongest=wanted_effects(self._shards.whole, whole).strongest)

        def told(want: WantedEffects) -> dict[str, Any]:
            counts = (0, 0) if want.groups is None else want.groups.counts
            flat = [name for name in EFFECTS if EFFECTS[name].asked != "labels"]
            said = {name: str(getattr(want, name)) for name in [*flat, "order"]}
            return said | {"groups": want.groups is not None, "queries": counts[0], "keys": counts[1]}

        want, everybody = agreed(self._ranks, "E.observe", own, told)
        if want.groups is not None:
            want = replace(want, groups=want.groups._replace(counts=_largest(everybody)))
        if not want.names():
            return Effects()
        with self._ranks.together("E.observe"):
            check_effects_room(self._shards.local(), want)  # again: another rank may have made the groups more
            found = self._edges.observe(want)
            return Effects(**{name: self._answer(name, found, asked) for name in want.names()})

    @property
    def _ranks(self) -> Ranks:
        return self._shards.ranks

    @cached_property
    def _edges(self) -> EdgeEffects:
        return known(self.kind, self._method, self._shards, self._g, self._logsumexp())

    def _answer(self, name: str, found: dict[str, Array], asked: AskedEffects) -> Any:
        arrays = [found[array] for array in arrays_of(name)]
        if name == "strongest":
            edges = strongest_edges(arrays[0], arrays[1], self._shards.whole.keys, asked["strongest"] or 0)
            rounded = (*edges[:-1], edges[-1].astype(self.dtype))
            return Strongest(*map(self._shards.give, rounded))
        given = [self._give(array) for array in arrays]
        return _KINDS[name](*given) if name in _KINDS else given[0]

    def _give(self, x: Array) -> Tensor:
        """An answer (batch, heads, …) as a tensor with the caller's axes; floats in E's dtype."""
        rounded = x if x.dtype == np.int64 else x.astype(self.dtype)
        return self._shards.give(rounded.reshape(self._shards.prefix + x.shape[2:]))

    def _labels(self, asked: Any) -> Groups:
        groups = wanted_effects(self._shards.local(), asked).groups
        assert groups is not None
        self._check_spans(groups.counts[1])
        return groups

    def _check_spans(self, count: int) -> None:
        whole = self._shards.whole
        shape = whole.batch, whole.heads, self._shards.q.shape[2], count + 1
        size = 6 * room.array_bytes(shape, 8)
        room.check_room(f"spans, of shape {shape} on this rank,", size, "fewer spans of keys at a time.")

    def _effects(self, key: Any, transposed: bool = False) -> Tensor:  # noqa: FBT001
        def known() -> tuple[Compute, Sequence[Array]]:
            return self._edges.tile, self._edges.known

        return by_index("effects", self._shards, self.shape, key, known, transposed=transposed)

    def _transposed(self, x: Any) -> Any:
        return self._product("E.T @ x", x, transposed=True)

    def _product(self, what: str, x: Any, *, transposed: bool) -> Tensor:
        local = self._shards.local()
        long, heads, result = local.keys, (local.heads, local.kv_heads), local.queries
        if transposed:
            long, heads, result = local.queries, (local.heads, 1), local.keys

        def own() -> tuple[Array, bool]:
            given, vector = operand(local, array_of(x, "x"), "x", long, heads)
            size = (local.batch, local.heads, result, given.shape[-1])
            room.check_room(
                f"a product of shape {size}", room.array_bytes(size, 8), "give fewer columns of x.", local.device
            )
            return given, vector

        def told(found: tuple[Array, bool]) -> dict[str, Any]:
            _, count, _, width = found[0].shape
            return {"x's heads": count, "x's width": width, "x's dtype": str(found[0].dtype)}

        (given, vector), _ = agreed(self._ranks, what, own, told)
        with self._ranks.together(what):
            found = self._edges.transposed(given) if transposed else self._edges.product(given)
        whole = self._give(found)
        return whole[..., 0] if vector else whole


def contributions(
    shards: Shards, method: str, logsumexp: Callable[[], Array], v: Any, g: Any, output: Any
) -> ShardedCauseMatrix:
    """The matrix of contributions along g; of norms where g is None. All ranks must call it."""
    how = "A.contributions"
    return _made(how, shards, method, logsumexp, lambda own: cause_inputs.contributions(own, v, g, output), output)


def cuts(shards: Shards, method: str, logsumexp: Callable[[], Array], v: Any, g: Any) -> ShardedCauseMatrix:
    """The matrix of cuts along g. All ranks must call it."""
    return _made("A.cuts", shards, method, logsumexp, lambda own: ("cut", *cause_inputs.along_g(own, v, g)))


def _made(
    what: str,
    shards: Shards,
    method: str,
    logsumexp: Callable[[], Array],
    read: Callable[[Factors], tuple[Kind, Factors, Array, Array]],
    output: Any = None,
) -> ShardedCauseMatrix:
    """The matrix of what `read` reads of own v and g, in one dtype with q and k, the same on every rank."""

    @torch.no_grad()
    def own() -> tuple[Kind, Factors, Array, Array]:
        return read(Factors(shards.local(), shards.q, shards.k, shards.give, shards.engine, None))

    def told(found: tuple[Kind, Factors, Array, Array]) -> dict[str, Any]:
        kind, factors, v, _ = found
        sizes = {"v's heads": v.shape[1], "v's width": v.shape[3], "effects' dtype": str(factors.problem.dtype)}
        return {"kind": kind, **sizes, "output": fingerprint("output", output)}

    (kind, factors, v, g), _ = agreed(shards.ranks, what, own, told)
    dtype = factors.problem.dtype
    wide = replace(shards, whole=replace(shards.whole, dtype=dtype), q=factors.q, k=factors.k)
    if dtype != shards.whole.dtype:
        logsumexp = lambda: methods.rows(method, wide, Wanted(logsumexp=True))["logsumexp"]  # noqa: E731
    return ShardedCauseMatrix(kind, method, replace(wide, v=on_cpu(v)), on_cpu(g), logsumexp)


def _largest(everybody: list[dict[str, Any]]) -> tuple[int, int]:
    """The numbers of groups of queries and of keys of all ranks together."""
    return max(one["queries"] for one in everybody), max(one["keys"] for one in everybody)
