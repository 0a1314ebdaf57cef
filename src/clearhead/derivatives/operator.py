"""The PyTorch operator through which torch.compile, torch.export and make_fx see attention.

`clearhead::observe` answers a Task, whose parts are arguments with types here, from which its schema follows. It has a
function for its shapes in tracing, and its gradient is the same operator, with `more` tensors. Outside of compilers
function.py stands in for it: PyTorch's dispatcher adds about 0.2 ms to each call of an operator.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from clearhead.core.rule_values import read_flag, read_number, read_window
from clearhead.core.rules import check_supported, turned_on
from clearhead.core.statistics import STATISTICS, arrays_of
from clearhead.derivatives import backward, batching, function
from clearhead.derivatives.arguments import Task, by_rule, tensor_of
from clearhead.derivatives.recomputed import INPUTS, Tensors
from clearhead.errors import DerivativeError, RuleError


class Flat(NamedTuple):
    """All arguments but q, k and `more`: operands, rules, the engine, and what is asked for."""

    answers: str  # as in Task
    v: Tensor | None = None
    g: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask: Tensor | None = None
    kv_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    query_segments: Tensor | None = None
    kv_segments: Tensor | None = None
    sinks: Tensor | None = None
    query_offset: Tensor | None = None
    query_spans: Tensor | None = None
    key_spans: Tensor | None = None
    span_table: Tensor | None = None
    scale: Tensor | None = None
    query_groups: Tensor | None = None
    key_groups: Tensor | None = None
    one_scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    left: int | None = None
    right: int | None = None
    engine: str | None = None
    num_threads: int | None = None
    top: int = 0
    height: int = 0
    width: int = 0
    start: int | None = None
    stop: int | None = None
    step: int | None = None
    parts: str = ""  # what `more` are called, such as "known:output by:output"; empty where no gradient is asked for


_KINDS = {
    Tensor | None: "Tensor?",
    bool: "bool",
    str: "str",
    str | None: "str?",
    int: "SymInt",
    int | None: "SymInt?",
    float | None: "float?",
}  # an operator's words for Python's types
_SCHEMA = ", ".join(f"{_KINDS[kind]} {name}" for name, kind in get_type_hints(Flat).items())
_TENSORS = tuple(name for name, kind in get_type_hints(Flat).items() if kind == Tensor | None)
_NAMES = ("q", "k", "more", *Flat._fields)
RULES = frozenset({  # the rules that it passes on
    "scale", "softcap", "bias", "alibi_slopes", "spans", "causal", "window", "mask", "kv_lengths", "query_lengths",
    "query_segments", "kv_segments", "sinks", "query_offset",
})  # fmt: skip


def observe(task: Task, x: Tensors) -> Tensors:
    """Answer a task by the operator. Raises RuleError for a rule that the operator does not have."""
    check_supported("PyTorch's graph", RULES, turned_on(by_rule(task, x)))
    rest, q = {**task.rules, **x}, x["q"]
    left, right = read_window(rest.pop("window", None))
    numbers: dict[str, Any] = {name: rest.pop(name) for name in ("scale", "softcap") if name not in x and name in rest}
    numbers = {name: read_number(name, number, 0.0) for name, number in numbers.items()}
    height, width = task.asked.get("image", (0, 0))
    flat: dict[str, Any] = {
        "answers": " ".join(task.answers),
        "one_scale": numbers.get("scale"),
        "softcap": numbers.get("softcap"),
        "causal": read_flag("causal", rest.pop("causal", None)),
        "left": left,
        "right": right,
        "engine": task.engine,
        "num_threads": task.num_threads,
        "top": task.asked.get("top", 0),
        "height": height,
        "width": width,
        "start": task.queries.start,
        "stop": task.queries.stop,
        "step": task.queries.step,
    }
    rest = {name: y for name, y in rest.items() if name not in ("q", "k")}
    flat |= {name: y if isinstance(y, Tensor) else tensor_of(y, name, q) for name, y in rest.items()}
    return dict(zip(task.answers, operator(q, x["k"], [], *Flat(**flat)), strict=True))


def _read(q: Tensor, k: Tensor, more: Sequence[Tensor], *rest: Any) -> tuple[Task, Tensors]:
    """The task and the tensors of the operator's arguments."""
    flat = Flat(*rest)
    answers, parts = tuple(flat.answers.split()), flat.parts.split()
    tensors = {name: y for name in _TENSORS if (y := getattr(flat, name)) is not None}
    rules: dict[str, Any] = {"causal": flat.causal, "window": (flat.left, flat.right)}
    numbers = {"scale": flat.one_scale, "softcap": flat.softcap}
    rules |= {name: number for name, number in numbers.items() if number is not None}
    values = {"flag": True, "count": flat.top, "size": (flat.height, flat.width)}
    kinds = {name: one.asked for name, one in STATISTICS.items() if arrays_of(name)[0] in answers}
    asked = {name: values[kind] for name, kind in kinds.items() if kind in values}
    queries = slice(flat.start, flat.stop, flat.step)
    task = Task(answers, rules, asked, queries, flat.engine, flat.num_threads, is_gradient=bool(parts))
    return task, {"q": q, "k": k, **tensors, **dict(zip(parts, more, strict=True))}


def _answer(*inputs: Any) -> list[Tensor]:
    """The arrays that are asked for; of a gradient, those of the inputs that are."""
    task, x = _read(*inputs)
    with torch.no_grad():
        if "by:product" in x:
            made = function.gradients_of_product(task, x, x.pop("by:product"), task.answers)
        else:
            made = function.answer(task, x)
    return [made[name] for name in task.answers]


def _shapes(*inputs: Any) -> list[Tensor]:
    task, x = _read(*inputs)
    if task.is_gradient:
        return [torch.empty_like(x[name], memory_format=torch.contiguous_format) for name in task.answers]
    q, v = x["q"], x.get("v", x.get("g"))
    queries = q.shape[-2] if task.queries == slice(None) else len(range(int(q.shape[-2]))[task.queries])
    sizes: dict[str, Any] = {"queries": queries, "keys": x["k"].shape[-2], "k": task.asked.get("top")}
    sizes |= {"d_v": 0 if v is None else v.shape[-1]}
    sizes |= zip(("height", "width"), task.asked.get("image", ()), strict=False)
    if "groups" in task.answers:
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
        for name in task.answers
    ]


def _saves(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    q, k, _, *flat = inputs
    ctx.numbers = [None if isinstance(y, Tensor) else y for y in flat]
    results = dict(zip(Flat(*flat).answers.split(), output, strict=True))
    ctx.known = [name for name in results if name in backward.READS]
    tensors = (y if isinstance(y, Tensor) else None for y in (q, k, *flat))
    ctx.save_for_backward(*tensors, *(results[name] for name in ctx.known))


def _derivative(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The gradients in the order of the operator's arguments, None for those that need none."""
    (q, k, *saved), count = ctx.saved_tensors, len(ctx.numbers)
    flat = Flat(*(number if y is None else y for number, y in zip(ctx.numbers, saved[:count], strict=True)))
    if flat.parts:
        raise DerivativeError(
            "a compiled or exported graph has no second derivative of attention: its gradient was differentiated again "
            "(create_graph=True, a hessian, a gradient penalty, a MAML step).",
            "outside of torch.compile there is one.",
        )
    places: dict[str, Any] = {**dict.fromkeys(_NAMES), "more": []}
    by = {name: grad for name, grad in zip(flat.answers.split(), grads, strict=True) if grad is not None}
    by.pop("largest", None)  # it has no derivative: that of the log-sum-exp is log_sum's
    if by:
        backward.check_derivatives({*by} - {"product"})
        needed = [name for name in compress(_NAMES, ctx.needs_input_grad) if name != "more"]
        function.check_differentiable(needed)
        wanted = [name for name in (*INPUTS, "g") if name in needed]
        parts = {f"known:{name}": y for name, y in zip(ctx.known, saved[count:], strict=True)}
        parts |= {f"by:{name}": y for name, y in by.items()}
        rest = flat._replace(answers=" ".join(wanted), parts=" ".join(parts))
        places |= zip(wanted, operator(q, k, [*parts.values()], *rest), strict=True)
    return tuple(places.values())


def _mapped(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[list[Tensor], list[int]]:
    task, x = _read(*inputs)
    axes = dict(zip(_NAMES, dims, strict=True))
    results = batching.mapped(observe, task, x, {name: axes[name] for name in x}, info.batch_size)
    return [*results.values()], [0] * len(results)


operator = torch.library.custom_op(
    "clearhead::observe", _answer, mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor[] more, {_SCHEMA}) -> Tensor[]"
)
operator.register_fake(_shapes)
operator.register_autograd(_derivative, setup_context=_saves)
operator.register_vmap(_mapped)
