"""The attention matrix of a sharded sequence as an object."""

from dataclasses import replace
from typing import Any, NoReturn, Unpack

from torch import Tensor

from clearhead.core.arrays import no_forward_mode
from clearhead.core.axes import WEIGHTS, Array, named
from clearhead.core.observations import check_room, wanted
from clearhead.core.operands import check_transposed, operand
from clearhead.core.problem import Problem
from clearhead.core.rule_values import read_slice
from clearhead.core.rules import Rules
from clearhead.core.statistics import PER_KEY, STATISTICS, Asked, Wanted, askable, explained, lacking, listed
from clearhead.distributed import low_rank, passes
from clearhead.distributed.attention import Method, choose
from clearhead.distributed.causes import ShardedCauseMatrix, effects_of
from clearhead.distributed.layout import Layout
from clearhead.distributed.nodes import Call, Leaves, answers, output_of, still
from clearhead.distributed.ranks import Ranks, agreed
from clearhead.distributed.sharded_matrix import Compute, ShardedMatrix, compared, with_all_groups
from clearhead.distributed.sharded_problem import array_of, held_places, read
from clearhead.engines.base import Engine
from clearhead.errors import EngineError, SelectionError, shown
from clearhead.ops import cause_inputs
from clearhead.ops.observable import Observable
from clearhead.ops.observation import Observation, observation
from clearhead.ops.tangents import check_smooth

# One machine's matrix has edits; ranks have labels of their own positions and one table for all.
_INSTEAD = {
    "cut": "spans=(query_spans, key_spans, table) with -inf",
    "boost": "spans=(query_spans, key_spans, table)",
    "tempered": "scale=…/t",
}


class ShardedAttentionMatrix(ShardedMatrix, Observable):
    """The attention matrix of a sharded sequence, (…, heads, all queries, all keys); never stored, never gathered.

    q         this rank's shard, (…, heads, own queries, d_k)
    k         (…, kv_heads, own keys, d_k), in q's dtype
    group, layout, method, timeout, engine, num_threads and rules as in `clearhead.distributed.attention`

    Creating it compares sizes and rules between ranks and computes nothing. Every method must be called by all ranks
    with the same arguments, but for v, g and labels, which belong to own positions. Statistics per query are those of
    own queries, (…, heads, own queries); statistics per key those of own keys, (…, heads, own keys); image, groups and
    weights read by index are those of the whole matrix, the same on every rank. Answers are tensors on q's device:
    float32, or float64 for float64; A @ v and the output have q's dtype.

    A @ v, the output, logsumexp, entropy, distance, diagonal, received, image and groups are differentiable, to second
    order and in forward mode too: gradients are those of the sum of all ranks' losses. All other answers carry no
    graph, and neither do contributions and cuts; in forward mode peak, top and max_logit raise DerivativeError.

    Creation and methods raise on every rank: what `AttentionMatrix` raises on the rank whose argument is wrong, and
    DistributedError on the others; DistributedError on all where ranks asked for different things, or one did not call
    or failed. Time for each rank is O(own queries·visible keys·d_k) per pass (by merge the work is shared by
    keys); the log-sum-exp is computed when first needed and kept.

    >>> import torch, torch.distributed as dist, clearhead as ch
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> A = ch.distributed.ShardedAttentionMatrix(torch.zeros(2, 4), torch.zeros(2, 4), causal=True)
    >>> A.received().tolist(), A[-1].tolist(), A
    ([1.5, 0.5], [0.5, 0.5], ShardedAttentionMatrix(queries 2, keys 2) float32 on 1 rank by gather)
    >>> dist.destroy_process_group()
    """

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
        num_threads: int | None = None,
        **rules: Unpack[Rules],
    ) -> None:
        ranks, how = Ranks.of(group, timeout), {"layout": layout, "method": method}
        self._leaves = Leaves.of(q, k, None, rules)
        plain, threads = self._leaves.still(), {"engine": engine, "num_threads": num_threads}
        values: Any = how | threads
        self._shards = read("ShardedAttentionMatrix", plain.q, plain.k, None, plain.into(rules), ranks, **values)
        self._method = choose(self._shards, method).method
        self._chosen = range(self._shards.whole.queries)
        self._kept: Array | None = None  # the log-sum-exp, (batch, heads, own queries), once computed

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError, which says what to give instead of an edit that only `AttentionMatrix` has."""
        hint = f": give {_INSTEAD[name]} to ShardedAttentionMatrix" if name in _INSTEAD else ""
        raise AttributeError(f"ShardedAttentionMatrix has no {name!r}{hint}.")

    def __repr__(self) -> str:
        return f"ShardedAttentionMatrix{named(self.shape, WEIGHTS)} {self.dtype} {self._on} by {self._method}"

    def __getitem__(self, key: Any) -> Any:
        """Exact weights of the whole matrix by integers, slices and Ellipsis; all ranks give the same index.

        Returns a tensor, the same on every rank, without a graph. Only the ranks that hold the chosen keys compute.
        Raises SelectionError for an index outside the matrix, SizeError where the chosen weights are larger than
        memory, DistributedError where ranks give different indices. O(chosen weights·d_k) time, and memory for
        the chosen weights.
        """
        self._check_still()
        return self._by_index(key)

    def __matmul__(self, v: Tensor) -> Tensor:
        """A·v, from each rank's values to its queries' outputs; differentiable.

        v is (…, kv_heads or heads, own keys, d_v), or (own keys, d_v) or (own keys,) for all heads alike. Returns
        (…, heads, own queries, d_v), without the last axis for a vector, in q's dtype. Raises ShapeError, DtypeError,
        SizeError where the output is larger than memory, and DistributedError as said above.
        """

        def check(local: Problem, columns: Array) -> None:
            check_room(local, Wanted(output=True), columns.shape[-1])

        values, vector = self._operand("A @ v", "v", still(v), check)
        call = output_of("A @ v", replace(self._shards, v=values), self._method)
        if isinstance(v, Tensor) and v.ndim <= 2 and call.shards.prefix:  # one for all heads
            v = (v[:, None] if vector else v).expand(*call.shards.prefix[:-1], 1, *values.shape[2:])
        output = answers(["output"], lambda _: call, self._leaves.with_values(v))["output"]
        return output[..., 0] if vector else output

    @explained(askable())
    def observe(self, v: Tensor | None = None, *, queries: slice = slice(None), **asked: Unpack[Asked]) -> Observation:
        """Everything asked for in one call, as by `AttentionMatrix.observe`; for own queries and own keys.

        STATISTICS

        v          own values, (…, kv_heads, own keys, d_v), for the output; None leaves it out
        queries    a slice of the whole sequence that steps forwards. Statistics per query are those of own queries in
                   it, in the shard's order; statistics per key, image and groups are taken over all queries in it
        groups     labels of own queries and of own keys, (own queries,) and (own keys,)

        Returns an Observation, None where something was not asked for. Raises UnknownNameError, RuleError, ShapeError,
        DtypeError or SelectionError for a wrong argument, SizeError where answers are larger than memory, EngineError
        for a statistic that the engine does not compute or that cannot be merged between ranks, and DistributedError
        as said above.
        """
        local = self._shards.local()

        def read_request() -> tuple[tuple[Array | None, Wanted], dict[str, Any]]:
            length = self._shards.whole.queries
            if not isinstance(queries, slice) or read_slice("queries", queries, length).step < 0:
                raise SelectionError(f"queries is {shown(queries)}: expected a slice that steps forwards.")
            want = wanted(local, asked)
            _check_known(self._shards.engine, want)
            values = None
            if v is not None:
                values, _ = operand(local, array_of(still(v), "v"), "v", local.keys, (local.kv_heads,))
            if self._leaves.with_values(v).moving():
                check_smooth(want.names(), "forward-mode derivative")
            self._check_room(want, values)
            more = {"selection": str(queries), "v's width": None if values is None else values.shape[3]}
            return (values, want), {**compared(want), **more}

        (values, want), everybody = agreed(self._ranks, "observe", read_request)
        want = with_all_groups(want, everybody)
        part, places = self._only(queries)
        if want.groups is not None:
            want = replace(want, groups=want.groups._replace(queries=want.groups.queries[:, places]))
        with self._ranks.together("observe"):
            self._check_room(want, values)  # again: another rank may have made the number of groups larger
            return part._observe(v, values, want)

    def _check_room(self, want: Wanted, values: Array | None) -> None:
        """Raise SizeError where this rank's answers, or what they are summed in, are larger than memory."""
        local = self._shards.local()
        check_room(local, replace(want, output=values is not None), 0 if values is None else values.shape[-1])
        shapes = {f"image={want.image}": want.image, "groups": want.groups and want.groups.counts}
        for what, shape in shapes.items():
            if shape is not None:
                low_rank.check_sums(local, what, shape)

    def _observe(self, v: Tensor | None, values: Array | None, want: Wanted) -> Observation:
        shards, method = replace(self._shards, v=values), self._method
        rows = want.only(name for name in want.rows() if name != "logsumexp")
        rows = replace(rows, output=values is not None)
        results = passes.rows(method, shards, replace(rows, logsumexp=True)) if rows.names() else {}
        self._kept = results.pop("logsumexp", self._kept)
        if want.logsumexp:
            results["logsumexp"] = self._logsumexp().copy()
        per_key = want.only(listed(axes=PER_KEY))
        if per_key.names():
            sums = passes.columns(method, self._shards, self._logsumexp(), per_key)
            results |= {name: array.astype(self.dtype) for name, array in sums.items()}
        products = {}
        if want.image is not None:
            products["image"] = low_rank.image(method, self._shards, self._chosen, want.image)
        if want.groups is not None:
            products["groups"] = low_rank.groups(method, self._shards, want.groups)
        results |= {name: one.answer.astype(self.dtype) for name, one in products.items()}
        lse = next((one.logsumexp for one in products.values()), None) if self._kept is None else self._kept
        call = Call("observe", shards, method, results, lse, products)
        tensors = answers([*results], lambda _: call, self._leaves.with_values(v))
        return observation(tensors, *self._shards.lengths, sinks=self._shards.whole.sinks is not None)

    def contributions(self, v: Tensor, g: Tensor | None = None, *, output: Tensor | None = None) -> ShardedCauseMatrix:
        """What each edge brings along g, a_ij·(g_i·v_j), as by `AttentionMatrix.contributions`; norms without g.

        v        own values, (…, kv_heads or heads, own keys, d_v), or one for all heads, (own keys, d_v)
        g        (…, heads, own queries, d_v), for own queries
        output   without g: W_O (heads·d_v, d_model), the same on every rank

        Returns a matrix of effects, which carry no graph. Raises as said above. It computes nothing but the norms.
        """
        self._check_still()
        made = lambda data: cause_inputs.contributions(data, v, g, output)  # noqa: E731
        return effects_of("A.contributions", self._shards, self._method, self._logsumexp, made, output)

    def cuts(self, v: Tensor, g: Tensor) -> ShardedCauseMatrix:
        """What g_i·o_i changes by when i may not see j, as `AttentionMatrix.cuts` renormalised; v and g as above.

        Returns a matrix of effects, which carry no graph. Raises as said above. It computes nothing.
        """
        self._check_still()
        made: Any = lambda data: ("cut", *cause_inputs.along_g(data, v, g))  # noqa: E731
        return effects_of("A.cuts", self._shards, self._method, self._logsumexp, made)

    def _check_still(self) -> None:
        """Raise DerivativeError for what has no forward-mode derivative, of a matrix whose inputs carry a tangent."""
        for name in self._leaves.moving():
            raise no_forward_mode(name)

    def _logsumexp(self) -> Array:
        if self._kept is None:
            self._kept = passes.rows(self._method, self._shards, Wanted(logsumexp=True))["logsumexp"]
        return self._kept

    def _known(self) -> tuple[Compute, list[Array]]:
        return lambda engine, inputs, rows: engine.weights(inputs, rows[0]), [self._logsumexp()]

    def _transposed(self, g: Tensor) -> Any:
        """Aᵀ·g over the queries of all ranks, from g of own queries: (…, heads, own keys, d), without a graph."""

        def check(local: Problem, columns: Array) -> None:
            self._check_still()
            check_transposed(local, columns)

        columns, vector = self._operand("A.T @ g", "g", g, check, transposed=True)
        with self._ranks.together("A.T @ g"):
            product = passes.transposed(self._method, self._shards, self._logsumexp(), columns)
        return self._restored(product, vector=vector)

    def _only(self, queries: slice) -> tuple["ShardedAttentionMatrix", slice | Array]:
        """The matrix restricted to some queries, and where this rank's among them lie in its shard."""
        shards = self._shards
        chosen = range(shards.whole.queries)[queries]
        places = held_places(chosen, shards.query_pieces[shards.rank])
        if len(chosen) == shards.whole.queries:
            return self, places
        part = object.__new__(ShardedAttentionMatrix)
        part._shards = shards.take(chosen, range(shards.whole.keys))
        part._method, part._chosen = self._method, chosen
        part._kept = None if self._kept is None else self._kept[:, :, places]
        part._leaves = self._leaves.take(places)
        return part, places


def _check_known(engine: Engine, want: Wanted) -> None:
    """Raise EngineError for a statistic that the engine does not compute, or that cannot be merged between ranks."""
    joined = {name for name in listed(computed="rows") if STATISTICS[name].over_keys}
    joined |= {*listed(axes=PER_KEY), "image", "groups"}
    missing = lacking(want, joined & engine.STATISTICS)
    if missing:
        raise EngineError(f"{', '.join(missing)} cannot be observed of shards.", "observe it on one machine.")
