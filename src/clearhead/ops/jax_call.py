"""One call that JAX traces: what is known of it while JAX traces, and what the host computes when it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead import engines
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, as_slice
from clearhead.core.directions import Directions
from clearhead.core.problem import Described, Inputs, Problem, describe
from clearhead.core.rules import FIELDS, RULES, Rules, joined
from clearhead.core.statistics import STATISTICS, Groups, Wanted, arrays_of
from clearhead.engines.base import kinds
from clearhead.ops import backward, tangents
from clearhead.ops.jax_host import Kind

TABLE = "spans[2]"
INPUTS = ("q", "k", "v", "bias", "sinks", TABLE)  # what has a derivative
Arrays = Mapping[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Traced:
    """What is known of a call while JAX traces it."""

    names: tuple[str, ...]  # of the arrays that come when it runs: q, k, v where it is given, and traced rules
    rules: Rules  # those that are not traced
    batch: tuple[int, ...]  # q's axes in front of its heads
    problem: Problem  # of the chosen queries; traced rules are zeros in it
    d_v: int
    rows: range
    queries: int  # of q, chosen or not
    want: Wanted
    engine: str | None

    def arrays(self) -> list[str]:
        """The names of the arrays that answer what is wanted."""
        return [array for name in self.want.names() for array in arrays_of(name)]

    def kinds(self) -> list[Kind]:
        """The shapes and dtypes of what it answers."""
        result = kinds(self.problem, self.want, self.want.names(), frozenset(STATISTICS), self.d_v)
        return [((*self.problem.prefix, *result[name][0][2:]), result[name][1]) for name in self.arrays()]

    def run(self, *arrays: Array) -> list[Array]:
        """The arrays that answer what is wanted."""
        inputs = self.read(dict(zip(self.names, arrays, strict=True)))
        engine = engines.get(engines.choose(inputs.problem, self.engine, self.want).engine)
        result = engines.answer(engine, inputs, self.want)
        return [inputs.problem.restore(result[name]) for name in self.arrays()]

    def describe(self, arrays: Arrays) -> Described:
        """The problem of all queries; what all calls of a mapped axis share has there an axis of size 1, or none."""
        each: dict[str, Any] = {**self.rules, **arrays}
        for name, x in each.items():
            axes = axes_of(name)
            if name in ("q", "k", "v"):
                each[name] = np.broadcast_to(x, (*self.batch, *x.shape[-3:]))
            elif len(axes) == 2 and np.ndim(x) > 1:
                each[name] = np.broadcast_to(x, (*self.batch, x.shape[-1]))
        q, k, v = (each.pop(name, None) for name in "qkv")
        return describe(q, k, v, joined(each))

    def read(self, arrays: Arrays) -> Inputs:
        """The problem of the chosen queries, with its arrays (batch, heads, …), now that the numbers are there."""
        read = self.describe(arrays)
        return Inputs(read.problem.take(queries=self.rows), read.q[:, :, as_slice(self.rows)], read.k, read.v)

    def blocks(self, results: Arrays) -> dict[str, Array]:
        """Results (…, heads, …), or what belongs to them, as arrays (batch, heads, …)."""
        axes = len(self.problem.prefix)
        wide = {name: np.broadcast_to(x, (*self.problem.prefix, *x.shape[axes:])) for name, x in results.items()}
        return {name: x.reshape(self.problem.batch, self.problem.heads, *x.shape[axes:]) for name, x in wide.items()}

    def directions(self, arrays: Arrays, along: Arrays) -> Directions:
        """The inputs' tangents as engines take them; those of rules are read as the rules themselves."""
        moved = {name: x for name, x in along.items() if name != TABLE}
        if TABLE in along:
            every = {**self.rules, **arrays}
            moved |= {name: every[name] for name in ("spans[0]", "spans[1]")} | {TABLE: along[TABLE]}
        read = replace(self, rules={}).describe({name: arrays[name] for name in ("q", "k")} | moved)
        return tangents.directions(read, self.rows, along)

    def mapped(self, count: int, arrays: Sequence[Kind]) -> "Traced":
        """The call that makes `count` calls at once, of arrays of these shapes with one more batch axis in front."""
        groups = self.want.groups
        if groups is not None:
            groups = Groups(np.tile(groups.queries, (count, 1)), np.tile(groups.keys, (count, 1)), groups.counts)
        call = replace(self, batch=(count, *self.batch), want=replace(self.want, groups=groups))
        zeros = [np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in arrays]
        return replace(call, problem=call.read(dict(zip(self.names, zeros, strict=True))).problem)


def axes_of(name: str) -> tuple[str, ...]:
    """The axes of a rule's value with all its axes; () for what is no rule."""
    rule, _, part = name.partition("[")
    if rule not in RULES:
        return ()
    return FIELDS[[*RULES[rule].fields][int(part[:-1]) if part else 0]]


@dataclass(frozen=True, eq=False, repr=False)
class Derivative:
    """A derivative of a call, the linear map of tangents.Derivative: of `along` and `changing` to `asked` and `moved`.

    known     results that are known, by name; the log-sum-exp is among them
    by        upstream gradients of results
    along     the inputs' tangents
    changing  the tangents of `by`
    asked     gradients of inputs, or their tangents, each with its shape and dtype
    moved     the tangents of results
    """

    call: Traced
    known: tuple[str, ...]
    by: tuple[str, ...]
    along: tuple[str, ...]
    changing: tuple[str, ...]
    asked: dict[str, Kind]
    moved: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the map's arguments: the call's own arrays, known, by, along and changing."""
        return *self.call.names, *self.known, *self.by, *self.along, *self.changing

    @property
    def batch(self) -> tuple[int, ...]:
        return self.call.batch

    def split(self, arguments: Sequence[Any]) -> list[dict[str, Any]]:
        """Values in the order of the arguments, by name: the call's own arrays, known, by, along, changing."""
        rest, parts = iter(arguments), (self.call.names, self.known, self.by, self.along, self.changing)
        return [{name: next(rest) for name in names} for names in parts]

    def kinds(self) -> list[Kind]:
        """The shapes and dtypes of what it answers."""
        results = dict(zip(self.call.arrays(), self.call.kinds(), strict=True))
        return [*self.asked.values(), *(results[name] for name in self.moved)]

    def mapped(self, count: int, arrays: Sequence[Kind]) -> "Derivative":
        """The derivative of `count` calls at once, as `Traced.mapped`."""
        asked = {name: ((count, *shape), dtype) for name, (shape, dtype) in self.asked.items()}
        return replace(self, call=self.call.mapped(count, arrays[: len(self.call.names)]), asked=asked)

    def check(self) -> None:
        """Raise DerivativeError for a result that has no such derivative."""
        hint = "jax.lax.stop_gradient of what comes of it."
        if self.moved:
            tangents.check_smooth(self.moved, "forward-mode derivative", hint)
        if self.by:
            tangents.check_smooth((*self.by, *self.changing), "second derivative", hint)
        backward.check_derivatives(self.changing)

    def run(self, *arrays: Array) -> list[Array]:
        """What the map answers."""
        call = self.call
        named, *results, along, changing = self.split(arrays)
        inputs = call.read(named)
        problem = inputs.problem
        known, by, changing = (call.blocks(side) for side in (*results, changing))
        name = "gradients" if not self.along else "gradient_tangents" if self.asked else "tangents"
        engine: Any = engines.get(engines.choose_for(name, problem, call.engine).engine)
        direction = call.directions(named, along) if along else Directions()
        shapes = {name: shape for name, (shape, _) in self.asked.items()}
        bias, spans = (tangents.shared_shape(problem, name, shapes.get(name)) for name in ("bias", TABLE))
        sides = known, by, direction, changing
        one = tangents.Derivative(engine, inputs, *sides, call.want.groups, bias, spans)
        gradients, moved, _ = tangents.derivative(one, call.want.only(self.moved))
        return [_as_asked(call, gradients, *each) for each in self.asked.items()] + [
            problem.restore(moved[name]) for name in self.moved
        ]


def _as_asked(call: Traced, gradients: Mapping[str, Array], name: str, kind: Kind) -> Array:
    """A gradient in the shape asked for: that of its input, 1 where calls or batch entries share it."""
    shape, dtype = kind
    part = gradients.get(name.replace(TABLE, "spans"))
    if part is None:  # v, where the loss does not use the output
        return np.zeros(shape, dtype)
    if name == "sinks":
        return part
    if call.rows != range(call.queries) and (name == "q" or (name == "bias" and shape[-2] != 1)):
        chosen, part = part, np.zeros((*part.shape[:-2], call.queries, part.shape[-1]), part.dtype)
        part[..., as_slice(call.rows), :] = chosen  # all other queries' are zero
    lead = call.batch if part.shape[0] == call.problem.batch else (1,) * len(call.batch)
    part = part.reshape(*lead, *part.shape[1:])
    shared = tuple(axis for axis, size in enumerate(shape) if size == 1 != part.shape[axis])
    return part.astype(statistics_dtype(part.dtype)).sum(shared, keepdims=True) if shared else part
