"""The data behind an attention matrix: q, k, the rules, the engine, and the log-sum-exp once it is computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from clearhead import engines
from clearhead.core.arrays import (
    Restore,
    as_array,
    autocast,
    broadcast,
    empty,
    statistics_dtype,
    unrepeated,
)
from clearhead.core.axes import WEIGHTS, Array, as_places, as_slice
from clearhead.core.call import Call, describe
from clearhead.core.device_array import DeviceArray
from clearhead.core.observations import check_room, wanted
from clearhead.core.operands import check_transposed, operand
from clearhead.core.problem import Problem
from clearhead.core.rules import BROADCAST, FIELDS, Rules
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines import state_of
from clearhead.engines.base import Engine
from clearhead.ops.given_logsumexp import checked
from clearhead.ops.indexing import check_weights
from clearhead.ops.observation import Observation, observation


@dataclass(eq=False)
class MatrixData:
    """q (batch, heads, queries, d_k) and k (batch, kv_heads, keys, d_k), validated, with their problem and engine."""

    problem: Problem
    q: Array
    k: Array
    restore: Restore  # converts results to the kind of array that q was
    engine: Engine
    asked_engine: str | None  # the engine that the caller named; None: chosen automatically

    @classmethod
    def read(
        cls, q: Any, k: Any, rules: Rules, engine: str | None, num_threads: int | None = None, logsumexp: Any = None
    ) -> "MatrixData":
        """Validate the caller's inputs and choose an engine; check a log-sum-exp that was given, and keep it.

        Raises what `attention` raises, and ShapeError, DtypeError or RuleError for a log-sum-exp of something else.
        """
        described = describe(q, k, None, rules, num_threads)
        problem = described.problem
        made = cls(problem, described.q, described.k, described.restore, _chosen(problem, engine), engine)
        if logsumexp is not None:
            state = checked(problem, made.q, made.k, made.engine, logsumexp)
            if state is not None:
                made.state = state
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Without the engine, which is chosen again; what a mask, bias or table repeats along an axis is kept once."""
        once: dict[str, Any] = {name: unrepeated(getattr(self.problem, name)) for name in BROADCAST}
        state = {name: value for name, value in self.__dict__.items() if name != "engine"}
        return {**state, "problem": replace(self.problem, **once)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        problem: Problem = state["problem"]
        sizes = {name: getattr(problem, name) for name in WEIGHTS}
        once = {name: x for name in BROADCAST if (x := getattr(problem, name)) is not None}
        again: dict[str, Any] = {
            name: broadcast(x, tuple(sizes.get(axis, n) for axis, n in zip(FIELDS[name], x.shape, strict=True)))
            for name, x in once.items()
        }
        self.problem = replace(problem, **again)
        self.engine = _chosen(self.problem, self.asked_engine)

    @cached_property
    def state(self) -> State:
        """The rows' states, computed when first needed and kept; they can be set where they are known already."""
        return state_of(self.engine, self.with_values())

    @property
    def logsumexp(self) -> Array:
        """(batch, heads, queries)."""
        return cast("Array", self.state.logsumexp)

    def with_values(self, v: Array | None = None) -> Call:
        """The factors, and values where they are read, as engines take them."""
        return Call(self.problem, self.q, self.k, v)

    @property
    def known_state(self) -> State | None:
        """The rows' states if they were computed or set, else None."""
        return self.__dict__.get("state")

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, queries, keys), with the caller's leading axes."""
        return self.problem.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the weights."""
        return statistics_dtype(self.problem.dtype)

    def inputs(self) -> tuple[Any, Any, Rules, str | None, int | None]:
        """What `read` takes: q and k with 4 axes, the rules, the engine and the threads."""
        rules: Any = self.problem.keywords()
        rules |= {name: self.restore(cast("Array", x)) for name, x in rules.items() if isinstance(x, DeviceArray)}
        return self.restore(self.q), self.restore(self.k), rules, self.asked_engine, self.problem.num_threads

    def changed(self, problem: Problem, q: Array, k: Array) -> "MatrixData":
        """A copy with another problem, q and k; the engine stays, the rows' states are no longer known."""
        return replace(self, problem=problem, q=q, k=k)

    def in_dtype(self, dtype: np.dtype[Any]) -> "MatrixData":
        """The same factors in another dtype; known states stay known where they have the digits for it."""
        problem = replace(self.problem, dtype=dtype)
        made = self.changed(problem, self.q.astype(dtype), self.k.astype(dtype))
        made.engine = _chosen(problem, self.asked_engine)
        if self.known_state is not None and made.dtype == self.dtype:
            made.state = self.known_state
        return made

    def take(
        self, *, batches: Array | None = None, heads: range | None = None, queries: range | None = None
    ) -> "MatrixData":
        """The data of some batch items, heads or queries, with their rows' states if these are known.

        What is left out stays whole; choosing heads gives each of them a key head of its own.
        """
        queries = None if queries == range(self.problem.queries) else queries
        if batches is None and heads is None and queries is None:
            return self
        places = slice(None) if batches is None else as_places(batches)
        chosen, rows = (slice(None) if one is None else as_slice(one) for one in (heads, queries))
        k = self.k if heads is None else self.k[:, as_places(self.problem.kv_head_of(np.asarray(heads)))]
        problem = self.problem.take(queries=queries, batches=batches, heads=heads)
        part = self.changed(problem, self.q[:, chosen, rows][places], k[places])
        if self.known_state is not None:
            part.state = State(*(x[:, chosen, rows][places] for x in self.known_state))
        return part

    def batches(self, lead: Sequence[range]) -> Array:
        """The batch items at one range for each of the caller's batch axes."""
        sizes = self.problem.prefix[:-1]
        return np.arange(self.problem.batch).reshape(sizes)[np.ix_(*lead)].reshape(-1)

    def weights(self, picked: Sequence[int | range]) -> Array:
        """Exact weights for one integer or range per axis; integers drop their axis.

        Raises SizeError for more weights than fit in memory. O(rows·keys·d_k) time for the rows' states the first time.
        """
        *lead, rows, cols = (range(p, p + 1) if isinstance(p, int) else p for p in picked)
        shape = tuple(len(p) for p in picked if not isinstance(p, int))
        if 0 in shape:
            return empty(self.q, shape, self.dtype)
        check_weights(shape, self.dtype, self.problem.device)
        whole = all(p == range(size) for p, size in zip(lead, self.shape[:-2], strict=True))
        part = (
            self.take(queries=rows)
            if whole
            else self.take(batches=self.batches(lead[:-1]), heads=lead[-1], queries=rows)
        )
        state = part.state
        tile = part.problem.take(keys=cols)
        return self.engine.weights(Call(tile, part.q, part.k[:, :, as_slice(cols)]), state).reshape(shape)

    def mix(self, v: Any) -> Any:
        """A·v."""
        array, restore = as_array(autocast(v), "v", self.problem.device)
        heads = self.problem.kv_heads, self.problem.heads
        values, vector = operand(self.problem, array, "v", self.shape[-1], heads)
        check_room(self.problem, Wanted(output=True), values.shape[-1])
        output = self.engine.rows(self.with_values(values), Wanted(output=True))["output"]
        whole = self.problem.restore(output)
        return restore(whole[..., 0] if vector else whole)

    def transposed(self, g: Any) -> Any:
        """Aᵀ·g."""
        problem = self.problem
        array, restore = as_array(g, "g", problem.device)
        columns, vector = operand(problem, array, "g", problem.queries, (problem.heads, 1))
        check_transposed(problem, columns)
        result = self.engine.transposed(self.with_values(), self.state, columns)
        whole = problem.restore(result)
        return restore(whole[..., 0] if vector else whole)

    def observe(self, v: Any, asked: Mapping[str, Any], queries: slice = slice(None)) -> Observation:
        """The requested statistics as an Observation; parameters and errors as `AttentionMatrix.observe`."""
        rows = range(self.problem.queries)[queries]
        want = wanted(self.problem, asked, output=v is not None).for_queries(rows)
        values = None if v is None else self.read_values(v, self.problem.kv_heads)
        part = self.take(queries=rows)
        engine = engines.able(part.engine, part.problem, want, part.asked_engine)
        result = engines.answer(engine, part.with_values(values), want, part.known_state)
        if "largest" in result:
            part.state = State(*(result.pop(name) for name in State._fields))
        if want.logsumexp:
            result |= {name: x.copy() for name, x in part.state._asdict().items()}
        answers = {name: part.restore(part.problem.restore(array)) for name, array in result.items()}
        return observation(answers, part.problem.queries, part.problem.keys, sinks=part.problem.sinks is not None)

    def values(self, v: Any) -> Array:
        """Validated v, (batch, kv_heads, keys, d_v). Raises ShapeError or DtypeError where it does not fit."""
        problem, result = self.problem, self.read_values(v, self.problem.kv_heads)
        return broadcast(result, (problem.batch, problem.kv_heads, *result.shape[2:]))

    def read_values(self, v: Any, *heads: int) -> Array:
        """Validated v, (batch, 1 or one of these numbers of heads, keys, d_v), narrowed by autocast as q and k are."""
        array = as_array(autocast(v), "v", self.problem.device)[0]
        return operand(self.problem, array, "v", self.problem.keys, heads)[0]


def _chosen(problem: Problem, engine: str | None) -> Engine:
    return engines.get(engines.choose(problem, engine).engine)
