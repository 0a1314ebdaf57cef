"""Two PyTorch operators through which torch.compile and torch.export see attention.

`clearhead::observe` computes what `AttentionMatrix.observe` does, `clearhead::transposed` is Aᵀ·g. Each has a function
for its shapes in tracing, and its backward as another operator. Outside of compilers torch_nodes.py stands in for them,
since PyTorch's dispatcher adds about 0.2 ms to each call of an operator.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from clearhead.core.statistics import STATISTICS, arrays_of
from clearhead.errors import DerivativeError, RuleError
from clearhead.ops import backward
from clearhead.ops.torch_arguments import WITH_GRADIENTS, Given, Known, KnownProduct, Options, from_flat, schema
from clearhead.ops.torch_batching import one_by_one
from clearhead.ops.torch_derivatives import MAP, gradients, product
from clearhead.ops.torch_functions import INPUTS, Bundle, parts, values


def bundle_of(q: Tensor, k: Tensor, v: Tensor | None, rules: Given, options: Options | None = None) -> Bundle:
    """An operator's arguments by name."""
    return {"q": q, "k": k, "v": v, **rules._asdict(), **(options or Options("output logsumexp"))._asdict()}


def _observe(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    """The requested arrays, in the order of their names."""
    return [*values(bundle_of(q, k, v, *from_flat(rest, Given, Options))).values()]


def _observe_shapes(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    _, options = from_flat(rest, Given, Options)
    chosen, names = options.queries(), options.arrays()
    queries = q.shape[-2] if chosen == slice(None) else len(range(int(q.shape[-2]))[chosen])
    sizes: dict[str, Any] = {"queries": queries, "keys": k.shape[-2], "k": options.top}
    sizes |= {"d_v": 0 if v is None else v.shape[-1], "height": options.height, "width": options.width}
    if "groups" in names:
        if q.device.type == "meta":
            raise RuleError("how many groups there are says a label, and tensors on the meta device have no numbers.")
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
    rules, options, handed = from_flat(rest, Given, Options, Known)
    known = parts("known", dict(zip(options.arrays(), handed.answers, strict=True)))
    upstream = dict(zip(handed.used.split(), handed.derivatives, strict=True))
    with torch.no_grad():
        result = gradients({**bundle_of(q, k, v, rules, options), **known}, upstream, _asked(v, rules, handed))
    return _in_order(result, q)


def _in_order(gradients_of: dict[str, Tensor], q: Tensor) -> list[Tensor]:
    """Gradients in the order of INPUTS, empty where none was asked for."""
    return [gradients_of[name] if name in gradients_of else q.new_empty(0) for name in INPUTS]


def _derivative_shapes(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    rules = Given(*rest[: len(Given._fields)])
    like = (q, k, v, rules.bias if rest[-2] else None, rules.sinks, rules.span_table if rest[-1] else None)
    return [
        q.new_empty((0,)) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in like
    ]


def _asked(v: Tensor | None, rules: Given, handed: Known | KnownProduct) -> tuple[str, ...]:
    """The inputs whose gradients are asked for."""
    there = {
        "v": v is not None,
        "bias": handed.by_bias,
        "sinks": rules.sinks is not None,
        "span_table": handed.by_spans,
    }
    return tuple(name for name in INPUTS if there.get(name, True))


def _transposed(q: Tensor, k: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
    """Aᵀ·g (…, heads, keys, d), and the log-sum-exp that its backward needs."""
    with torch.no_grad():
        return [*product(bundle_of(q, k, None, *from_flat(rest, Given)), g)]


def _transposed_shapes(q: Tensor, k: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
    del rest
    usual = torch.float64 if q.dtype == torch.float64 else torch.float32
    shapes = (*q.shape[:-2], k.shape[-2], g.shape[-1]), q.shape[:-1]
    return [q.new_empty(shape, dtype=usual) for shape in shapes]


def _transposed_backward(q: Tensor, k: Tensor, g: Tensor, *rest: Any) -> list[Tensor]:
    rules, handed = from_flat(rest, Given, KnownProduct)
    bundle = {**bundle_of(q, k, None, rules), "known:logsumexp": handed.logsumexp, "changing:output": g}
    needed = {"changing:output" if name == "v" else name for name in _asked(g, rules, handed)}
    with torch.no_grad():
        result = MAP.backward({**bundle, "product": True}, {}, {"product": handed.d_product}, needed)
    return _in_order({**result, "v": result["changing:output"]}, q)


def _observe_saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, options = from_flat(inputs[3:], Given, Options)
    results = dict(zip(options.arrays(), output, strict=True))
    ctx.kept = [name for name in results if name in backward.READS]
    _save(ctx, inputs, [results[name] for name in ctx.kept])


def _observe_derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    q, k, v, rules, rest, saved = _saved(ctx)
    options, kept = Options(*rest), dict(zip(ctx.kept, saved, strict=True))
    by = {name: grad for name, grad in zip(options.arrays(), grads, strict=True) if grad is not None}
    if not by:
        return (None,) * len(ctx.needs_input_grad)
    backward.check_derivatives(by)
    needed = {"logsumexp": True} | {each: True for name in by for each in _arrays_with(name) if each in kept}
    request = options._replace(names=" ".join(needed))
    known = Known([kept[name] for name in needed], " ".join(by), list(by.values()), *_needs(ctx, "bias", "span_table"))
    return _places(ctx, ctx.backward(q, k, v, *rules, *request, *known))


def _arrays_with(array: str) -> tuple[str, ...]:
    """All arrays of the statistic to which this array belongs."""
    return next(arrays for name in STATISTICS if array in (arrays := arrays_of(name)))


def _transposed_saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _save(ctx, inputs, [output[1]])


def _transposed_derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    q, k, g, rules, _, (logsumexp,) = _saved(ctx)
    if grads[0] is None:
        return (None,) * len(ctx.needs_input_grad)
    return _places(
        ctx, ctx.backward(q, k, g, *rules, *KnownProduct(logsumexp, grads[0], *_needs(ctx, "bias", "span_table")))
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


def _places(ctx: Any, result: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients in the order of the operator's arguments, None for those that need none."""
    places: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    indices = (0, 1, 2, *(3 + Given._fields.index(field) for field in WITH_GRADIENTS))
    for place, derivative in zip(indices, result, strict=True):
        if ctx.needs_input_grad[place]:
            places[place] = derivative
    if any(_needs(ctx, "alibi_slopes")):
        raise RuleError(
            "alibi_slopes requires grad, and has no derivative here.", "alibi_slopes.detach(), or put them in `bias`."
        )
    return tuple(places)


def _refuse_second(ctx: Any, *_: Any) -> NoReturn:
    del ctx
    raise DerivativeError(
        "a compiled or exported graph has no second derivative of attention: its gradient was differentiated again "
        "(create_graph=True, a hessian, a gradient penalty, a MAML step).",
        "outside of torch.compile there is one.",
    )


def _operator(
    name: str,
    schemas: tuple[str, str],
    functions: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]],
    derivative: tuple[Callable[..., Any], Callable[..., Any]],
) -> Callable[..., Sequence[Tensor]]:
    """Register a PyTorch operator and its backward.

    functions   the function, its shapes for tracing, its backward, and the backward's shapes
    derivative  how the inputs are saved for the backward, and how the backward is called
    """
    forward, shapes, backward, backward_shapes = functions
    saves, by_inputs = derivative
    whole = torch.library.custom_op(f"clearhead::{name}", forward, mutates_args=(), schema=schemas[0])
    whole.register_fake(shapes)
    back = torch.library.custom_op(f"clearhead::{name}_backward", backward, mutates_args=(), schema=schemas[1])
    back.register_fake(backward_shapes)
    back.register_autograd(_refuse_second)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        ctx.backward = back
        saves(ctx, inputs, output)

    whole.register_autograd(by_inputs, setup_context=setup)
    whole.register_vmap(lambda info, dims, *inputs: tuple(map(list, one_by_one(whole, info.batch_size, dims, inputs))))
    return whole


observe = _operator(
    "observe",
    (
        f"(Tensor q, Tensor k, Tensor? v, {schema(Given, Options)}) -> Tensor[]",
        f"(Tensor q, Tensor k, Tensor? v, {schema(Given, Options, Known)}) -> Tensor[]",
    ),
    (_observe, _observe_shapes, _observe_backward, _derivative_shapes),
    (_observe_saves, _observe_derivative),
)
transposed_product = _operator(
    "transposed",
    (
        f"(Tensor q, Tensor k, Tensor g, {schema(Given)}) -> Tensor[]",
        f"(Tensor q, Tensor k, Tensor g, {schema(Given, KnownProduct)}) -> Tensor[]",
    ),
    (_transposed, _transposed_shapes, _transposed_backward, _derivative_shapes),
    (_transposed_saves, _transposed_derivative),
)
