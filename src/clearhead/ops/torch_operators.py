"""The PyTorch operator through which torch.compile and torch.export see attention.

`clearhead::observe` computes what `AttentionMatrix.observe` does, and Aᵀ·g, with g in v's place, where "product" is
asked for. It has a function for its shapes in tracing, and its backward is another operator. Outside of compilers
torch_nodes.py stands in for them, since PyTorch's dispatcher adds about 0.2 ms to each call of an operator.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor

from clearhead.core.statistics import STATISTICS, arrays_of
from clearhead.derivatives import backward
from clearhead.derivatives.recomputed import INPUTS
from clearhead.errors import DerivativeError, RuleError
from clearhead.ops.torch_arguments import Known, Options, Settings, from_flat, schema
from clearhead.ops.torch_batching import one_by_one
from clearhead.ops.torch_derivatives import PRODUCT as TRANSPOSED
from clearhead.ops.torch_derivatives import differentiable, gradients
from clearhead.ops.torch_passes import Bundle, parts, product, values

PRODUCT = Options("product logsumexp")  # Aᵀ·g, and the log-sum-exp that its backward needs


def bundle_of(q: Tensor, k: Tensor, v: Tensor | None, rules: Settings, options: Options | None = None) -> Bundle:
    """An operator's arguments by name."""
    return {"q": q, "k": k, "v": v, **rules._asdict(), **(options or Options("output logsumexp"))._asdict()}


def _observe(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    """The requested arrays, in the order of their names."""
    rules, options = from_flat(rest, Settings, Options)
    if v is not None and "product" in options.arrays():
        made = product({**bundle_of(q, k, None, rules), "g": v})
        return [made[name] for name in options.arrays()]
    return [*values(bundle_of(q, k, v, rules, options)).values()]


def _observe_shapes(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    _, options = from_flat(rest, Settings, Options)
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
    axes["product"] = "keys", "d_v"
    dtypes = {"output": q.dtype, "top_indices": torch.int64}
    usual = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [
        q.new_empty((*q.shape[:-2], *(sizes[axis] for axis in axes[name])), dtype=dtypes.get(name, usual))
        for name in names
    ]


def _backward(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    """Gradients of INPUTS, empty where none is asked for; `names` are the saved results, `used` have upstream ones."""
    rules, options, handed = from_flat(rest, Settings, Options, Known)
    known = parts("known", dict(zip(options.arrays(), handed.answers, strict=True)))
    upstream = dict(zip(handed.used.split(), handed.derivatives, strict=True))
    there = v is not None, handed.by_bias, rules.sinks is not None, handed.by_spans
    asked = ("q", "k", *compress(INPUTS[2:], there))
    with torch.no_grad():
        if "product" in upstream:
            bundle = {**bundle_of(q, k, None, rules), "g": v}
            result = TRANSPOSED.backward(bundle, {}, upstream, {*asked} - {"v"} | {"g"})
            result["v"] = result.pop("g")
        else:
            result = gradients({**bundle_of(q, k, v, rules, options), **known}, upstream, asked)
    return [result[name] if name in result else q.new_empty(0) for name in INPUTS]


def _backward_shapes(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> list[Tensor]:
    rules = Settings(*rest[: len(Settings._fields)])
    like = (q, k, v, rules.bias if rest[-2] else None, rules.sinks, rules.span_table if rest[-1] else None)
    return [
        q.new_empty((0,)) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in like
    ]


def _saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, options = from_flat(inputs[3:], Settings, Options)
    results = dict(zip(options.arrays(), output, strict=True))
    ctx.kept = [name for name in results if name in backward.READS]
    ctx.set_materialize_grads(False)
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]
    tensors = (x if isinstance(x, Tensor) else None for x in inputs)
    ctx.save_for_backward(*tensors, *(results[name] for name in ctx.kept))


def _derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients in the order of the operator's arguments, None for those that need none."""
    tensors, count = ctx.saved_tensors, len(ctx.numbers)
    inputs = [x if y is None else y for x, y in zip(ctx.numbers, tensors[:count], strict=True)]
    rules, options = from_flat(inputs[3:], Settings, Options)
    by = {name: grad for name, grad in zip(options.arrays(), grads, strict=True) if grad is not None}
    places: list[Tensor | None] = [None] * count
    if not by:
        return tuple(places)
    backward.check_derivatives({*by} - {"product"})
    needs = dict(zip(("q", "k", "v", *Settings._fields), ctx.needs_input_grad, strict=False))
    differentiable(name for name, need in needs.items() if need)  # raises for what has no derivative
    request, by_rules = options._replace(names=" ".join(ctx.kept)), (needs["bias"], needs["span_table"])
    known = Known([*tensors[count:]], " ".join(by), [*by.values()], *by_rules)
    result = dict(zip(INPUTS, observe_backward(*inputs[:3], *rules, *request, *known), strict=True))
    for place, (name, need) in enumerate(needs.items()):
        places[place] = result.get(name) if need else None
    return tuple(places)


def _refuse_second(ctx: Any, *_: Any) -> NoReturn:
    del ctx
    raise DerivativeError(
        "a compiled or exported graph has no second derivative of attention: its gradient was differentiated again "
        "(create_graph=True, a hessian, a gradient penalty, a MAML step).",
        "outside of torch.compile there is one.",
    )


observe = torch.library.custom_op(
    "clearhead::observe",
    _observe,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor? v, {schema(Settings, Options)}) -> Tensor[]",
)
observe_backward = torch.library.custom_op(
    "clearhead::observe_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor? v, {schema(Settings, Options, Known)}) -> Tensor[]",
)
observe.register_fake(_observe_shapes)
observe.register_autograd(_derivative, setup_context=_saves)
observe.register_vmap(lambda info, dims, *inputs: tuple(map(list, one_by_one(observe, info.batch_size, dims, inputs))))
observe_backward.register_fake(_backward_shapes)
observe_backward.register_autograd(_refuse_second)
