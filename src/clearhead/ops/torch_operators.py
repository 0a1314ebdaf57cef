"""Two PyTorch operators through which autograd, torch.compile and torch.export see attention.

`clearhead::observe` computes what `AttentionMatrix.observe` does, `clearhead::transposed` is Aᵀ·g. Each has a function
for its shapes in tracing, and its backward as another operator. backward.py has the formulas, torch_graph.py the calls.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from clearhead import engines
from clearhead.core.arrays import as_array, statistics_dtype, to_torch
from clearhead.core.axes import Array
from clearhead.core.observations import wanted
from clearhead.core.operands import operand
from clearhead.core.problem import Problem, describe
from clearhead.core.statistics import STATISTICS, Groups, Wanted, arrays_of
from clearhead.engines.base import Engine
from clearhead.errors import RuleError
from clearhead.ops import backward
from clearhead.ops.torch_arguments import WITH_GRADIENTS, Given, Known, KnownProduct, Options, from_flat, schema
from clearhead.ops.torch_autograd import operator


class _Call(NamedTuple):
    """A validated operator call: the problem of the chosen queries, its arrays (batch, heads, …), its engine."""

    problem: Problem
    q: Array
    k: Array
    v: Array | None
    rows: range
    engine: Engine
    whole: Problem

    @staticmethod
    def read(
        q: Tensor, k: Tensor, v: Tensor | None, given: Given, queries: slice = slice(None), *, derivative: bool = False
    ) -> "_Call":
        read = describe(q, k, None, given.rules(), given.num_threads)
        whole = read.problem
        values = None
        if v is not None:
            values = operand(whole, as_array(v, "v", whole.device)[0], "v", whole.keys, (whole.kv_heads, whole.heads))[
                0
            ]
        rows = range(whole.queries)[queries]
        choose = partial(engines.choose_for, "gradients") if derivative else engines.choose
        engine = engines.get(choose(whole, given.engine).engine)
        problem = whole if rows == range(whole.queries) else whole.take(queries=rows)
        return _Call(problem, read.q[:, :, queries], read.k, values, rows, engine, whole)


def _observe(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    """The requested arrays, in the order of their names."""
    given, options = from_flat(rest, Given, Options)
    call = _Call.read(q, k, v, given, options.queries())
    want = wanted(call.whole, options.keywords(), output=v is not None).for_queries(call.rows)
    engine = engines.able(call.engine, call.problem, want, given.engine)
    found = engines.answer(engine, call.problem, call.q, call.k, call.v, want)
    return [_tensor(call.problem.restore(found[name])) for name in options.arrays()]


def _observe_shapes(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    _, options = from_flat(rest, Given, Options)
    chosen, names = options.queries(), options.arrays()
    queries = q.shape[-2] if chosen == slice(None) else len(range(int(q.shape[-2]))[chosen])
    sizes: dict[str, Any] = {"queries": queries, "keys": k.shape[-2], "k": options.top}
    sizes |= {"d_v": 0 if v is None else v.shape[-1], "height": options.height, "width": options.width}
    if "groups" in names:
        context = torch.library.get_ctx()
        sizes |= {"query groups": context.new_dynamic_size(), "key groups": context.new_dynamic_size()}
    axes = {array: one.axes[1:] for name, one in STATISTICS.items() for array in arrays_of(name)}  # heads lead
    dtypes = {"output": q.dtype, "top_indices": torch.int64}
    usual = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [
        q.new_empty((*q.shape[:-2], *(sizes[axis] for axis in axes[name])), dtype=dtypes.get(name, usual))
        for name in names
    ]


def _observe_backward(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    """Gradients of q, k, v and WITH_GRADIENTS; `names` are the saved results, `used` those with upstream gradients."""
    given, options, handed = from_flat(rest, Given, Options, Known)
    call = _Call.read(q, k, v, given, options.queries(), derivative=True)
    known, by = (
        {name: _blocks(call.problem, x) for name, x in zip(names.split(), tensors, strict=True)}
        for names, tensors in ((options.names, handed.answers), (handed.used, handed.derivatives))
    )
    labels = {"groups": (options.query_groups, options.key_groups)} if "groups" in by else {}
    groups = wanted(call.whole, labels).for_queries(call.rows).groups
    return _derivatives(call, known, by, (q, k, v, *_asked(given, handed)), groups)


def _derivative_shapes(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    given = Given(*rest[: len(Given._fields)])
    like = (q, k, v, given.bias if rest[-2] else None, given.sinks, given.span_table if rest[-1] else None)
    return [
        q.new_empty((0,)) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in like
    ]


def _asked(given: Given, handed: Known | KnownProduct) -> tuple[Tensor | None, ...]:
    """The rules in WITH_GRADIENTS whose gradients are asked for; None for the others."""
    return given.bias if handed.by_bias else None, given.sinks, given.span_table if handed.by_spans else None


def _transposed(q: Tensor, k: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
    """Aᵀ·g (…, heads, keys, d), and the log-sum-exp that its backward needs."""
    call = _Call.read(q, k, None, *from_flat(rest, Given))
    problem = call.problem
    columns = operand(problem, as_array(g, "g", problem.device)[0], "g", problem.queries, (problem.heads,))[0]
    logsumexp = engines.answer(call.engine, problem, call.q, call.k, None, wanted(problem, {"logsumexp": True}))[
        "logsumexp"
    ]
    found = call.engine.transposed(problem, call.q, call.k, logsumexp, columns)
    return [_tensor(problem.restore(array)) for array in (found, logsumexp)]


def _transposed_shapes(q: Tensor, k: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
    del rest
    usual = torch.float64 if q.dtype == torch.float64 else torch.float32
    shapes = (*q.shape[:-2], k.shape[-2], g.shape[-1]), q.shape[:-1]
    return [q.new_empty(shape, dtype=usual) for shape in shapes]


def _transposed_backward(q: Tensor, k: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
    """Aᵀ·g has the gradients of A·v, with g in place of dO and the upstream gradient in place of v."""
    given, handed = from_flat(rest, Given, KnownProduct)
    call = _Call.read(q, k, None, given, derivative=True)
    dtype = statistics_dtype(call.problem.dtype)
    arrays = call.q, call.k, *(_blocks(call.problem, x) for x in (handed.logsumexp, g, handed.d_product))
    wide_q, wide_k, lse, columns, product = (x.astype(dtype, copy=False) for x in arrays)
    wide = call._replace(problem=replace(call.problem, dtype=dtype), q=wide_q, k=wide_k, v=product)
    by_g = call.engine.rows(wide.problem, wide_q, wide_k, product, Wanted(output=True))["output"]
    answers, by = {"logsumexp": lse, "output": by_g}, {"output": columns}
    found = _derivatives(wide, answers, by, (q, k, None, *_asked(given, handed)))
    found[2] = _tensor(call.problem.restore(by_g)).to(g.dtype)
    return found


def _derivatives(
    call: _Call,
    answers: dict[str, Array],
    by: dict[str, Array],
    like: Sequence[Tensor | None],
    groups: Groups | None = None,
) -> list[Tensor]:
    """The gradients of q, k, v and WITH_GRADIENTS, each shaped as its tensor in `like`; empty where that is None."""
    bias = None if like[3] is None else _bias_shape(call.problem, like[3])
    spans = None if like[5] is None else _shared_shape(call.problem, like[5])
    arrays = call.q, call.k, call.v
    answered = backward.gradients(call.engine, call.problem, arrays, answers, by, groups=groups, bias=bias, spans=spans)
    found = {name: _tensor(x) for name, x in answered.items()}
    found["q"] = _among(found["q"], call)
    if like[3] is not None:
        own = found["bias"] if like[3].ndim < 2 or like[3].shape[-2] == 1 else _among(found["bias"], call)
        found["bias"] = _joined(own, call.problem, like[3])
    if like[5] is not None:
        found["spans"] = _joined(found["spans"], call.problem, like[5])
    result, first = [], cast("Tensor", like[0])
    for name, x in zip(("q", "k", "v", "bias", "sinks", "spans"), like, strict=True):
        if x is None:
            result.append(first.new_empty(0))
        elif name not in found:  # the loss does not use the output
            result.append(torch.zeros_like(x, memory_format=torch.contiguous_format))
        else:
            result.append(found[name].contiguous().to(x.device, x.dtype).reshape(x.shape))
    return result


def _among(part: Tensor, call: _Call) -> Tensor:
    """Scatter rows of the chosen queries to all queries; the others are zero."""
    if call.rows == range(call.whole.queries):
        return part
    full = part.new_zeros((*part.shape[:-2], call.whole.queries, part.shape[-1]))
    return full.index_copy(-2, torch.tensor(call.rows, dtype=torch.int64, device=part.device), part)


def _bias_shape(problem: Problem, bias: Tensor) -> tuple[int, int, int, int]:
    """The bias's shape as `_shared_shape`, for the chosen queries."""
    batch, heads, queries, keys = _shared_shape(problem, bias)
    return batch, heads, 1 if queries == 1 else problem.queries, keys


def _shared_shape(problem: Problem, x: Tensor) -> tuple[int, int, int, int]:
    """The shape of a bias or table as (batch, heads, …, …), 1 where broadcast; batch: along every batch axis."""
    own = _own_shape(problem, x)
    batch = problem.batch if any(size != 1 for size in own[:-3]) else 1
    heads, height, width = (1, *own)[-3:]
    return batch, heads, height, width


def _joined(found: Tensor, problem: Problem, bias: Tensor) -> Tensor:
    """A bias gradient with the leading batch axes restored, summed over those along which the bias is broadcast."""
    own = _own_shape(problem, bias)
    if found.shape[0] == 1:
        return found
    apart = found.reshape(*problem.prefix[:-1], *found.shape[1:])
    shared = tuple(axis for axis, size in enumerate(own[:-3]) if size == 1)
    return apart.sum(dim=shared) if shared else apart


def _own_shape(problem: Problem, bias: Tensor) -> tuple[int, ...]:
    return (1,) * (len(problem.prefix) + 2 - bias.ndim) + tuple(bias.shape)


def _blocks(problem: Problem, x: Tensor) -> Array:
    """A tensor (…, heads, …) as an array (batch, heads, …)."""
    array = as_array(x, "gradient")[0]
    return array.reshape(problem.batch, problem.heads, *array.shape[len(problem.prefix) :])


def _tensor(array: Array) -> Tensor:
    return to_torch(torch, array)


def _observe_saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, options = from_flat(inputs[3:], Given, Options)
    found = dict(zip(options.arrays(), output, strict=True))
    ctx.kept = [name for name in found if name in backward.READS]
    _save(ctx, inputs, [found[name] for name in ctx.kept])


def _observe_derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    q, k, v, given, rest, saved = _saved(ctx)
    options, kept = Options(*rest), dict(zip(ctx.kept, saved, strict=True))
    by = {name: grad for name, grad in zip(options.arrays(), grads, strict=True) if grad is not None}
    if not by:
        return (None,) * len(ctx.needs_input_grad)
    backward.check_derivatives(by)
    needed = {"logsumexp": True} | {each: True for name in by for each in _arrays_with(name) if each in kept}
    request = options._replace(names=" ".join(needed))
    known = Known([kept[name] for name in needed], " ".join(by), list(by.values()), *_needs(ctx, "bias", "span_table"))
    return _places(ctx, ctx.backward(q, k, v, *given, *request, *known))


def _arrays_with(array: str) -> tuple[str, ...]:
    """All arrays of the statistic to which this array belongs."""
    return next(arrays for name in STATISTICS if array in (arrays := arrays_of(name)))


def _transposed_saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _save(ctx, inputs, [output[1]])


def _transposed_derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    q, k, g, given, _, (logsumexp,) = _saved(ctx)
    if grads[0] is None:
        return (None,) * len(ctx.needs_input_grad)
    return _places(
        ctx, ctx.backward(q, k, g, *given, *KnownProduct(logsumexp, grads[0], *_needs(ctx, "bias", "span_table")))
    )


def _save(ctx: Any, inputs: tuple[Any, ...], answers: list[Tensor | None]) -> None:
    ctx.set_materialize_grads(False)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *answers)


def _saved(ctx: Any) -> tuple[Any, ...]:
    count = len(ctx.numbers)
    tensors = ctx.saved_tensors
    q, k, third, *rest = (x if y is None else y for x, y in zip(ctx.numbers, tensors[:count], strict=True))
    rules = len(Given._fields)
    return q, k, third, Given(*rest[:rules]), rest[rules:], tensors[count:]


def _needs(ctx: Any, *fields: str) -> list[bool]:
    return [bool(ctx.needs_input_grad[3 + Given._fields.index(field)]) for field in fields]


def _places(ctx: Any, found: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients in the order of the operator's arguments, None for those that need none."""
    places: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    at = (0, 1, 2, *(3 + Given._fields.index(field) for field in WITH_GRADIENTS))
    for place, derivative in zip(at, found, strict=True):
        if ctx.needs_input_grad[place]:
            places[place] = derivative
    if any(_needs(ctx, "alibi_slopes")):
        raise RuleError(
            "alibi_slopes requires grad, and has no derivative here.", "alibi_slopes.detach(), or put them in `bias`."
        )
    return tuple(places)


observe = operator(
    "observe",
    f"(Tensor q, Tensor k, Tensor? v, {schema(Given, Options)}) -> Tensor[]",
    f"(Tensor q, Tensor k, Tensor? v, {schema(Given, Options, Known)}) -> Tensor[]",
    (_observe, _observe_shapes, _observe_backward, _derivative_shapes),
    (_observe_saves, _observe_derivative),
)
transposed = operator(
    "transposed",
    f"(Tensor q, Tensor k, Tensor g, {schema(Given)}) -> Tensor[]",
    f"(Tensor q, Tensor k, Tensor g, {schema(Given, KnownProduct)}) -> Tensor[]",
    (_transposed, _transposed_shapes, _transposed_backward, _derivative_shapes),
    (_transposed_saves, _transposed_derivative),
)
