"""Two PyTorch operators that carry everything, so that autograd, torch.compile and torch.export see attention.

`clearhead::observe` answers like `AttentionMatrix.observe`, `clearhead::transposed` is Aᵀ·g; each has its shapes for
tracing and its derivative as an operator of its own. backward.py has the formulas, torch_graph.py the callers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from clearhead import backward, engines
from clearhead.arrays import adopt, statistics_dtype, to_torch
from clearhead.axes import Array
from clearhead.engines.base import Engine
from clearhead.errors import RuleError
from clearhead.observations import Groups, Wanted, wanted
from clearhead.operands import operand
from clearhead.problem import Problem, Rules, describe
from clearhead.torch_autograd import operator

# What can be asked, in the order in which the operator lists it.
ANSWERS: tuple[str, ...] = ("output", "logsumexp", "max_logit", "entropy", "distance", "top_weights", "top_indices")
ANSWERS += ("received", "peak", "image", "groups")
_NEEDED = {"top_weights": ("top_weights", "top_indices")}  # the answers that a derivative reads, where not just its own
_UNREAD = ("max_logit", "received", "image", "groups")  # answers that no derivative reads
_RULES = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? mask, Tensor? kv_lengths, Tensor? query_lengths, "
    "Tensor? query_segments, Tensor? kv_segments, Tensor? sinks, Tensor? query_offset, float? scale, float? softcap, "
    "bool causal, SymInt? left, SymInt? right, str? engine"
)
_ASKED = (
    "str names, SymInt top, SymInt height, SymInt width, SymInt? start, SymInt? stop, SymInt? step, "
    "Tensor? query_groups, Tensor? key_groups"
)


class Given(NamedTuple):
    """The score rules and the engine, as the operators take them (_RULES)."""

    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask: Tensor | None = None
    kv_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    query_segments: Tensor | None = None
    kv_segments: Tensor | None = None
    sinks: Tensor | None = None
    query_offset: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    left: int | None = None
    right: int | None = None
    engine: str | None = None

    def rules(self) -> Rules:
        rules: Any = {name: value for name, value in self._asdict().items() if name in Rules.__annotations__}
        return cast("Rules", {**rules, "window": (self.left, self.right)})


class Asked(NamedTuple):
    """What is to be answered, about which queries, as the operator takes it (_ASKED)."""

    names: str  # of ANSWERS, separated by spaces
    top: int = 0
    height: int = 0
    width: int = 0
    start: int | None = None
    stop: int | None = None
    step: int | None = None
    query_groups: Tensor | None = None
    key_groups: Tensor | None = None

    def keywords(self) -> dict[str, Any]:
        """The keywords of `AttentionMatrix.observe`."""
        names = self.names.split()
        flags = {name: name in names for name in ("logsumexp", "max_logit", "entropy", "distance", "received", "peak")}
        return {
            **flags,
            "top": self.top or None,
            "image": (self.height, self.width) if "image" in names else None,
            "groups": (self.query_groups, self.key_groups) if "groups" in names else None,
        }


class _Call(NamedTuple):
    """An operator's call, read: the problem of the chosen queries, its arrays (batch, heads, …), its engine."""

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
        read = describe(q, k, None, given.rules())
        whole = read.problem
        values = None
        if v is not None:
            values = operand(whole, adopt(v, "v", whole.device)[0], "v", whole.keys, (whole.kv_heads, whole.heads))[0]
        rows = range(whole.queries)[queries]
        choose = engines.choose_for_gradients if derivative else engines.choose
        engine = engines.get(choose(whole, given.engine).engine)
        return _Call(whole.take(queries=rows), read.q[:, :, queries], read.k, values, rows, engine, whole)


def _observe(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    """What is asked of softmax(…), in the order of ANSWERS."""
    given, asked = Given._make(rest[: len(Given._fields)]), Asked._make(rest[len(Given._fields) :])
    call = _Call.read(q, k, v, given, slice(asked.start, asked.stop, asked.step))
    want = replace(wanted(call.whole, asked.keywords()), output=v is not None).for_queries(call.rows)
    found = engines.answer(call.engine, call.problem, call.q, call.k, call.v, want)
    return [_tensor(call.problem.restore(found[name])) for name in asked.names.split()]


def _observe_shapes(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    asked = Asked._make(rest[len(Given._fields) :])
    chosen = slice(asked.start, asked.stop, asked.step)
    queries = q.shape[-2] if chosen == slice(None) else len(range(int(q.shape[-2]))[chosen])
    lead, keys = q.shape[:-2], k.shape[-2]
    rows = (*lead, queries)
    shapes: dict[str, tuple[Any, ...]] = {
        "output": rows if v is None else (*rows, v.shape[-1]),
        "top_weights": (*rows, asked.top),
        "top_indices": (*rows, asked.top),
        "received": (*lead, keys),
        "peak": (*lead, keys),
        "image": (*lead, asked.height, asked.width),
    }
    if "groups" in asked.names.split():
        context = torch.library.get_ctx()
        shapes["groups"] = (*lead, context.new_dynamic_size(), context.new_dynamic_size())
    dtypes = {"output": q.dtype, "top_indices": torch.int64}
    usual = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [q.new_empty(shapes.get(name, rows), dtype=dtypes.get(name, usual)) for name in asked.names.split()]


def _observe_backward(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    """`names` of the request are the answers handed over, `used` those that the loss has derivatives by."""
    rules = len(Given._fields)
    given, asked = Given._make(rest[:rules]), Asked._make(rest[rules:-4])
    answers, used, derivatives, by_bias = rest[-4:]
    call = _Call.read(q, k, v, given, slice(asked.start, asked.stop, asked.step), derivative=True)
    known, by = (
        {name: _blocks(call.problem, x) for name, x in zip(names.split(), tensors, strict=True)}
        for names, tensors in ((asked.names, answers), (used, derivatives))
    )
    labels = {"groups": (asked.query_groups, asked.key_groups)} if "groups" in by else {}
    groups = wanted(call.whole, labels).for_queries(call.rows).groups
    return _derivatives(call, known, by, (q, k, v, given.bias if by_bias else None, given.sinks), groups)


def _derivative_shapes(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    given, by_bias = Given._make(rest[: len(Given._fields)]), rest[-1]
    like = (q, k, v, given.bias if by_bias else None, given.sinks)
    return [
        q.new_empty((0,)) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in like
    ]


def _transposed(q: Tensor, k: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
    """Aᵀ·g (…, heads, keys, d), and the log-sum-exp that its derivative needs."""
    call = _Call.read(q, k, None, Given._make(rest))
    problem = call.problem
    columns = operand(problem, adopt(g, "g", problem.device)[0], "g", problem.queries, (problem.heads,))[0]
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
    """Aᵀ·g depends on the weights as A·v does, with g in dO's place and the loss's derivative in v's."""
    given, (logsumexp, d_product, by_bias) = Given._make(rest[: len(Given._fields)]), rest[len(Given._fields) :]
    call = _Call.read(q, k, None, given, derivative=True)
    dtype = statistics_dtype(call.problem.dtype)
    arrays = call.q, call.k, *(_blocks(call.problem, x) for x in (logsumexp, g, d_product))
    wide_q, wide_k, lse, columns, product = (x.astype(dtype, copy=False) for x in arrays)
    wide = call._replace(problem=replace(call.problem, dtype=dtype), q=wide_q, k=wide_k, v=product)
    by_g = call.engine.rows(wide.problem, wide_q, wide_k, product, Wanted(output=True))["output"]
    answers, by = {"logsumexp": lse, "output": by_g}, {"output": columns}
    found = _derivatives(wide, answers, by, (q, k, None, given.bias if by_bias else None, given.sinks))
    found[2] = _tensor(call.problem.restore(by_g)).to(g.dtype)
    return found


def _derivatives(
    call: _Call,
    answers: dict[str, Array],
    by: dict[str, Array],
    like: Sequence[Tensor | None],
    groups: Groups | None = None,
) -> list[Tensor]:
    """The loss's derivatives, each shaped as its tensor in `like`: q, k, v, bias, sinks; empty where that is None."""
    bias = None if like[3] is None else _bias_shape(call.problem, like[3])
    arrays = call.q, call.k, call.v
    answered = backward.gradients(call.engine, call.problem, arrays, answers, by, groups=groups, bias=bias)
    found = {name: _tensor(x) for name, x in answered.items()}
    found["q"] = _among(found["q"], call)
    if like[3] is not None:
        own = found["bias"] if like[3].ndim < 2 or like[3].shape[-2] == 1 else _among(found["bias"], call)
        found["bias"] = _joined(own, call.problem, like[3])
    result, first = [], cast("Tensor", like[0])
    for name, x in zip(("q", "k", "v", "bias", "sinks"), like, strict=True):
        if x is None:
            result.append(first.new_empty(0))
        elif name not in found:  # the loss does not use the output
            result.append(torch.zeros_like(x, memory_format=torch.contiguous_format))
        else:
            result.append(found[name].contiguous().to(x.device, x.dtype).reshape(x.shape))
    return result


def _among(part: Tensor, call: _Call) -> Tensor:
    """What belongs to the chosen queries among zeros for all the others."""
    if call.rows == range(call.whole.queries):
        return part
    full = part.new_zeros((*part.shape[:-2], call.whole.queries, part.shape[-1]))
    return full.index_copy(-2, torch.tensor(call.rows, dtype=torch.int64, device=part.device), part)


def _bias_shape(problem: Problem, bias: Tensor) -> tuple[int, int, int, int]:
    """The bias as (batch, heads, queries, keys), 1 where all share it; batches shared in part count as not shared."""
    own = _own_shape(problem, bias)
    batch = problem.batch if any(size != 1 for size in own[:-3]) else 1
    heads, queries, keys = (1, *own)[-3:]
    return batch, heads, 1 if queries == 1 else problem.queries, keys


def _joined(found: Tensor, problem: Problem, bias: Tensor) -> Tensor:
    """A derivative with its batch axes apart again, summed over those that the bias shares."""
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
    array = adopt(x, "gradient")[0]
    return array.reshape(problem.batch, problem.heads, *array.shape[len(problem.prefix) :])


def _tensor(array: Array) -> Tensor:
    return to_torch(torch, array)


def _observe_saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    asked = Asked._make(inputs[3 + len(Given._fields) :])
    ctx.kept = [name for name in asked.names.split() if name not in _UNREAD]
    _save(ctx, inputs, [x for name, x in zip(asked.names.split(), output, strict=True) if name in ctx.kept])


def _observe_derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    q, k, v, given, rest, saved = _saved(ctx)
    asked, kept = Asked._make(rest), dict(zip(ctx.kept, saved, strict=True))
    by = {name: grad for name, grad in zip(asked.names.split(), grads, strict=True) if grad is not None}
    if not by:
        return (None,) * len(ctx.needs_input_grad)
    needed = {"logsumexp": True} | {each: True for name in by for each in _NEEDED.get(name, (name,)) if each in kept}
    request = asked._replace(names=" ".join(needed))
    answers = [kept[name] for name in needed]
    rest = answers, " ".join(by), list(by.values()), _needs(ctx, "bias")
    return _places(ctx, ctx.backward(q, k, v, *given, *request, *rest))


def _transposed_saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _save(ctx, inputs, [output[1]])


def _transposed_derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    q, k, g, given, _, (logsumexp,) = _saved(ctx)
    if grads[0] is None:
        return (None,) * len(ctx.needs_input_grad)
    return _places(ctx, ctx.backward(q, k, g, *given, logsumexp, grads[0], _needs(ctx, "bias")))


def _save(ctx: Any, inputs: tuple[Any, ...], answers: list[Tensor | None]) -> None:
    ctx.set_materialize_grads(False)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *answers)


def _saved(ctx: Any) -> tuple[Any, ...]:
    count = len(ctx.numbers)
    tensors = ctx.saved_tensors
    q, k, third, *rest = (x if y is None else y for x, y in zip(ctx.numbers, tensors[:count], strict=True))
    rules = len(Given._fields)
    return q, k, third, Given._make(rest[:rules]), rest[rules:], tensors[count:]


def _needs(ctx: Any, rule: str) -> bool:
    return bool(ctx.needs_input_grad[3 + Given._fields.index(rule)])


def _places(ctx: Any, found: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Each derivative in the place of its argument."""
    places: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    at = (0, 1, 2, 3 + Given._fields.index("bias"), 3 + Given._fields.index("sinks"))
    for place, derivative in zip(at, found, strict=True):
        if ctx.needs_input_grad[place]:
            places[place] = derivative
    slopes = 3 + Given._fields.index("alibi_slopes")
    if ctx.needs_input_grad[slopes]:
        raise RuleError(
            "alibi_slopes requires grad, and has no derivative here.", "alibi_slopes.detach(), or put them in `bias`."
        )
    return tuple(places)


observe = operator(
    "observe",
    f"(Tensor q, Tensor k, Tensor? v, {_RULES}, {_ASKED}) -> Tensor[]",
    f"(Tensor q, Tensor k, Tensor? v, {_RULES}, {_ASKED}, Tensor[] answers, str used, Tensor[] derivatives, "
    "bool by_bias) -> Tensor[]",
    (_observe, _observe_shapes, _observe_backward, _derivative_shapes),
    (_observe_saves, _observe_derivative),
)
transposed = operator(
    "transposed",
    f"(Tensor q, Tensor k, Tensor g, {_RULES}) -> Tensor[]",
    f"(Tensor q, Tensor k, Tensor g, {_RULES}, Tensor logsumexp, Tensor d_product, bool by_bias) -> Tensor[]",
    (_transposed, _transposed_shapes, _transposed_backward, _derivative_shapes),
    (_transposed_saves, _transposed_derivative),
)
