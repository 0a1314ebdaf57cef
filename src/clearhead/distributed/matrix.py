"""The attention matrix of a sharded sequence: statistics of own queries and keys, pictures and weights of the whole."""

from dataclasses import replace
from typing import Any, Unpack

import numpy as np
from torch import Tensor

from clearhead.arrays import statistics_dtype
from clearhead.axes import WEIGHTS, Array, named
from clearhead.distributed import methods, wholes
from clearhead.distributed.choice import Method, choose
from clearhead.distributed.graph import Call, Leaves, answers
from clearhead.distributed.layouts import Layout
from clearhead.distributed.perkeys import product, statistics
from clearhead.distributed.ranks import Ranks
from clearhead.distributed.shards import agreed, array_of, read
from clearhead.distributed.tiles import sections, tile
from clearhead.errors import SelectionError
from clearhead.indexing import expand
from clearhead.matrix import TransposedMatrix
from clearhead.merging import Top
from clearhead.observations import Groups, Observation, Wanted, observation, wanted
from clearhead.operands import operand
from clearhead.problem import Problem, Rules


class ShardedAttentionMatrix:
    """The weights of a sequence that lies in shards, (…, heads, all queries, all keys); never stored, never gathered.

    q (…, heads, own queries, d_k), k (…, kv_heads, own keys, d_k); group, layout, method, timeout and rules as in
    `clearhead.distributed.attention`. Every method is called by all ranks, with the same questions; DistributedError
    says which rank asked for something else. Row statistics are those of own queries, column statistics those of own
    keys; pictures, sums between groups and weights read by index are those of the whole, the same on every rank.
    A @ v, the output, log-sum-exp, entropy, distance, received, pictures and sums between groups are differentiable, of
    the sum of all ranks' losses; what else is answered carries no graph.

    >>> import torch, torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> A = ch.distributed.ShardedAttentionMatrix(torch.zeros(2, 4), torch.zeros(2, 4), causal=True)
    >>> A.received().tolist(), A[-1].tolist(), A
    ([1.5, 0.5], [0.5, 0.5], ShardedAttentionMatrix(queries 2, keys 2) float32 on 1 rank by gather)
    >>> dist.destroy_process_group()
    """

    __array_ufunc__ = None

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        *,
        group: Any = None,
        layout: Layout = "contiguous",
        method: Method = "auto",
        timeout: float | None = None,
        engine: str | None = None,
        **rules: Unpack[Rules],
    ) -> None:
        ranks, what = Ranks.of(group, timeout), "ShardedAttentionMatrix"
        self._shards = read(what, q, k, None, rules, ranks, layout=layout, method=method, engine=engine)
        self._method = choose(self._shards, method).method
        self._leaves = Leaves.of(q, k, None, rules)
        self._chosen = range(self._shards.whole.queries)
        self._known: Array | None = None  # the log-sum-exp of own queries

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, all queries, all keys)."""
        return (*self._shards.prefix, len(self._chosen), self._shards.whole.keys)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the weights: float32, or float64 for float64."""
        return statistics_dtype(self._shards.whole.dtype)

    @property
    def T(self) -> "ShardedTransposedMatrix":  # noqa: N802  NumPy's name
        """The last two axes swapped: products from the keys' side, (…, heads, own keys, d)."""
        return ShardedTransposedMatrix(self)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        world = self._ranks.world
        place = f"on {world} rank{'s' * (world > 1)} by {self._method}"
        return f"ShardedAttentionMatrix{named(self.shape, WEIGHTS)} {self.dtype} {place}"

    def __getitem__(self, key: Any) -> Any:
        """Exact weights of the whole by integers, slices and Ellipsis, the same on every rank; all give the same index.

        Only the ranks that hold what is asked for compute it. Raises SelectionError as `AttentionMatrix` does.
        """
        return self._give(self._tile(key))

    def __matmul__(self, v: Tensor) -> Tensor:
        """A·v for own values (…, kv_heads or heads, own keys, d_v), or one for all heads, (own keys,), (own keys, d_v).

        Gives own queries' outputs; differentiable.
        """
        local = self._local()
        heads = local.kv_heads, local.heads

        def own() -> tuple[Array, bool]:
            return operand(local, array_of(v, "v"), "v", local.keys, heads)

        (values, vector), _ = agreed(self._ranks, "A @ v", own, lambda found: {"v's width": found[0].shape[3]})
        shards = replace(self._shards, v=values)
        with self._ranks.together("A @ v"):
            found, logsumexp = methods.output(self._method, shards)
        if v.ndim <= 2 and local.prefix:  # one for all heads
            v = (v[:, None] if vector else v).expand(*local.prefix[:-1], 1, *values.shape[2:])
        output = answers(Call("A @ v", shards, self._method, found, logsumexp), self._leaves._replace(v=v))["output"]
        return output[..., 0] if vector else output

    def logsumexp(self) -> Any:
        """See `AttentionMatrix.logsumexp`; of own queries, (…, heads, own queries), as are all row statistics here."""
        return self.observe(logsumexp=True).logsumexp

    def max_logit(self) -> Any:
        return self.observe(max_logit=True).max_logit

    def entropy(self) -> Any:
        return self.observe(entropy=True).entropy

    def distance(self) -> Any:
        return self.observe(distance=True).distance

    def top(self, k: int) -> Top | None:
        """The k strongest keys of each own query, by position in the whole sequence."""
        return self.observe(top=k).top

    def received(self) -> Any:
        """What each own key receives from all queries, (…, heads, own keys)."""
        return self.observe(received=True).received

    def peak(self) -> Any:
        return self.observe(peak=True).peak

    def image(self, height: int, width: int) -> Any:
        """The whole matrix as a picture, the same on every rank."""
        return self.observe(image=(height, width)).image

    def groups(self, query_groups: Any, key_groups: Any) -> Any:
        """Mass between labelled spans of the whole; labels of own queries and own keys, (own,) or (…, own)."""
        return self.observe(groups=(query_groups, key_groups)).groups

    def observe(
        self,
        v: Tensor | None = None,
        *,
        logsumexp: bool = False,
        max_logit: bool = False,
        entropy: bool = False,
        received: bool = False,
        peak: bool = False,
        top: int | None = None,
        distance: bool = False,
        image: tuple[int, int] | None = None,
        groups: tuple[Any, Any] | None = None,
        queries: slice = slice(None),
    ) -> Observation:
        """Everything asked for, together, as `AttentionMatrix.observe`; rows and columns are this rank's own.

        `queries` counts in the whole sequence and steps forwards: row statistics are those of own queries among them,
        in the shard's order, column statistics sums over all of them.
        """
        asked = {
            "logsumexp": logsumexp,
            "max_logit": max_logit,
            "entropy": entropy,
            "received": received,
            "peak": peak,
            "top": top,
            "distance": distance,
            "image": image,
        }
        local = self._local()

        def own() -> tuple[Array | None, Wanted]:
            if not isinstance(queries, slice) or (queries.step or 1) < 0:
                raise SelectionError(f"queries is {queries!r}: expected a slice that steps forwards.")
            want = wanted(local, {**asked, "groups": groups})
            if v is None:
                return None, want
            return operand(local, array_of(v, "v"), "v", local.keys, (local.kv_heads,))[0], want

        def told(found: tuple[Array | None, Wanted]) -> dict[str, Any]:
            values, want = found
            said = {name: str(getattr(want, name)) for name in asked} | {"selection": str(queries)}
            counts = (0, 0) if want.groups is None else want.groups.counts
            more = {"groups": groups is not None, "v's width": None if values is None else values.shape[3]}
            return said | more | {"queries": counts[0], "keys": counts[1]}

        (values, want), everybody = agreed(self._ranks, "observe", own, told)
        part, places = self._only(queries)
        if want.groups is not None:
            counts = max(one["queries"] for one in everybody), max(one["keys"] for one in everybody)
            want = replace(want, groups=Groups(want.groups.queries[:, places], want.groups.keys, counts))
        with self._ranks.together("observe"):
            return part._observe(v, values, want)

    def _observe(self, v: Tensor | None, values: Array | None, want: Wanted) -> Observation:
        shards, method = replace(self._shards, v=values), self._method
        rows = replace(want, output=values is not None, logsumexp=False, received=False, peak=False)
        rows = replace(rows, image=None, groups=None)
        found = methods.rows(method, shards, replace(rows, logsumexp=True)) if rows.rows() else {}
        self._known = found.pop("logsumexp", self._known)
        if want.logsumexp:
            found["logsumexp"] = self._logsumexp().copy()
        if want.received or want.peak:
            ask = statistics(shards.engine, self._logsumexp(), want)
            sums = zip(ask.names, methods.columns(method, self._shards, ask), strict=True)
            found |= {name: array.astype(self.dtype) for name, array in sums}
        whole = {}
        if want.image is not None:
            whole["image"] = wholes.image(method, self._shards, self._chosen, want.image)
        if want.groups is not None:
            whole["groups"] = wholes.groups(method, self._shards, want.groups)
        found |= {name: one.answer.astype(self.dtype) for name, one in whole.items()}
        lse = next((one.logsumexp for one in whole.values()), None) if self._known is None else self._known
        given = answers(Call("observe", shards, method, found, lse, whole), self._leaves._replace(v=v))
        sinks = self._shards.whole.sinks is not None
        return observation(given, self._shards.q.shape[2], self._shards.k.shape[2], sinks=sinks)

    @property
    def _ranks(self) -> Ranks:
        return self._shards.ranks

    def _local(self) -> Problem:
        """The problem's shapes as this rank's own arrays have them."""
        shards = self._shards
        return replace(shards.whole, rows=range(shards.q.shape[2]), cols=range(shards.k.shape[2]), prefix=shards.prefix)

    def _logsumexp(self) -> Array:
        if self._known is None:
            self._known = methods.rows(self._method, self._shards, Wanted(logsumexp=True))["logsumexp"]
        return self._known

    def _give(self, array: Array) -> Any:
        return self._shards.give(array)

    def _without_graph(self) -> "ShardedAttentionMatrix":
        """The same: it has none."""
        return self

    def _tile(self, key: Any) -> Array:
        index, _ = agreed(
            self._ranks, "A[…]", lambda: expand(key, self.shape, WEIGHTS), lambda found: {"index": str(found)}
        )
        chosen = [range(p, p + 1) if isinstance(p, int) else p for p in index]
        shape = tuple(len(p) for p in index if not isinstance(p, int))
        if 0 in shape:
            return np.empty(shape, self.dtype)
        with self._ranks.together("A[…]"):
            return tile(self._shards, self._logsumexp(), chosen[:-2], *chosen[-2:]).reshape(shape)

    def _only(self, queries: slice) -> tuple["ShardedAttentionMatrix", Array]:
        """The matrix of some queries of the whole, and where this rank's among them lie in its shard."""
        shards = self._shards
        chosen = range(shards.whole.queries)[queries]
        held = [[_within(chosen, piece) for piece in own] for own in shards.query_pieces]
        own = zip(shards.own_rows(), held[shards.rank], strict=True)
        places = np.concatenate([np.asarray(rows, np.int64) - piece.start + at.start for (at, piece), rows in own])

        def mine(x: Array | None) -> Array | None:
            return None if x is None else x[:, :, places]

        if len(chosen) == shards.whole.queries:
            return self, places
        part = object.__new__(ShardedAttentionMatrix)
        part._shards = replace(
            shards,
            q=shards.q[:, :, places],
            query_pieces=[tuple(pieces) for pieces in held],
            bias=mine(shards.bias),
            mask=mine(shards.mask),
            query_segments=None if shards.query_segments is None else shards.query_segments[:, places],
        )
        part._method = (
            self._method if self._method in methods.BY_ROWS else "gather"
        )  # all queries or none change places
        part._chosen, part._known = chosen, mine(self._known)
        part._leaves = self._leaves.take(places)
        return part, places


class ShardedTransposedMatrix(TransposedMatrix):
    """Aᵀ of a sharded sequence: products from the queries of all ranks to own keys, and weights; never stored."""

    T: ShardedAttentionMatrix  # type: ignore[assignment]  # it answers to the same names

    def __init__(self, matrix: ShardedAttentionMatrix) -> None:
        self.T = matrix

    def __repr__(self) -> str:
        return f"ShardedTransposedMatrix of {self.T!r}"

    def __matmul__(self, g: Tensor) -> Tensor:
        """Aᵀ·g: g (…, heads, own queries, d), or one for all heads (own queries,), (own queries, d).

        Gives (…, heads, own keys, d): sums over the queries of all ranks.
        """
        matrix = self.T
        local = matrix._local()

        def own() -> tuple[Array, bool]:
            return operand(local, array_of(g, "g"), "g", local.queries, (local.heads, 1))

        (columns, vector), _ = agreed(matrix._ranks, "A.T @ g", own, lambda found: {"g's width": found[0].shape[3]})
        spread = np.broadcast_to(columns, (local.batch, local.heads, *columns.shape[2:]))
        with matrix._ranks.together("A.T @ g"):
            ask = product(matrix._shards.engine, matrix._logsumexp(), spread)
            found = methods.columns(matrix._method, matrix._shards, ask)[0].astype(matrix.dtype)
        whole = found.reshape(local.prefix + found.shape[2:])
        return matrix._shards.give(whole[..., 0] if vector else whole)


def _within(chosen: range, piece: range) -> range:
    """The chosen positions in a piece; none at its start where it has none."""
    found = sections(chosen, (piece,))
    return found[0][2] if found else range(piece.start, piece.start)
