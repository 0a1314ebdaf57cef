"""Attention's results and their derivatives as functions of tensors; nothing is recorded here.

Each takes a bundle: the operator's arguments by name (q, k, v, the fields of Settings and Options), and further tensors
by the part they play, as "by:output". torch_derivatives.py says which parts there are, and makes nodes of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from clearhead import engines
from clearhead.core.arrays import as_array, to_torch
from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.observations import wanted
from clearhead.core.operands import operand
from clearhead.core.problem import Inputs, Problem, describe
from clearhead.engines.base import Engine
from clearhead.ops import tangents
from clearhead.ops.torch_arguments import Options, Settings

Bundle = dict[str, Any]
INPUTS = ("q", "k", "v", "bias", "sinks", "span_table")  # what has a derivative, as arguments name it


def options_of(bundle: Bundle) -> Options:
    """What a bundle asks for."""
    return Options(**{name: bundle[name] for name in Options._fields})


def part(bundle: Bundle, role: str) -> dict[str, Tensor]:
    """The tensors that play this part, by what they belong to."""
    return {name.partition(":")[2]: x for name, x in bundle.items() if name.startswith(f"{role}:") and x is not None}


def parts(role: str, tensors: dict[str, Any]) -> Bundle:
    """Tensors that are to play a part, as a bundle names them."""
    return {f"{role}:{name}": x for name, x in tensors.items()}


class Call(NamedTuple):
    """A validated call: the problem of the chosen queries with its arrays, its engine, and the whole problem."""

    inputs: Inputs
    rows: range
    engine: Any
    whole: Problem

    @property
    def problem(self) -> Problem:
        return self.inputs.problem

    @staticmethod
    def read(bundle: Bundle, answering: str = "", queries: slice = slice(None)) -> "Call":
        """The call of a bundle; `answering` names what its engine must have, such as "gradients"."""
        settings = Settings(**{name: bundle[name] for name in Settings._fields})
        read = describe(bundle["q"], bundle["k"], None, settings.rules(), settings.num_threads)
        whole = read.problem
        v = None if bundle["v"] is None else values_of(whole, bundle["v"])
        rows = range(whole.queries)[queries]
        choose = partial(engines.choose_for, answering) if answering else engines.choose
        engine: Engine = engines.get(choose(whole, settings.engine).engine)
        problem = whole if rows == range(whole.queries) else whole.take(queries=rows)
        return Call(Inputs(problem, read.q[:, :, queries], read.k, v), rows, engine, whole)


def values_of(problem: Problem, v: Tensor) -> Array:
    """Values as engines take them."""
    array = as_array(v, "v", problem.device)[0]
    return operand(problem, array, "v", problem.keys, (problem.kv_heads, problem.heads))[0]


def values(bundle: Bundle) -> dict[str, Tensor]:
    """The requested arrays, by name."""
    options = options_of(bundle)
    call = Call.read(bundle, queries=options.queries())
    want = wanted(call.whole, options.keywords(), output=call.inputs.v is not None).for_queries(call.rows)
    engine = engines.able(call.engine, call.problem, want, bundle["engine"])
    results = engines.answer(engine, call.inputs, want)
    return {name: tensor(call.problem.restore(results[name])) for name in options.arrays()}


def results_of_map(bundle: Bundle) -> tuple[str, ...]:
    """What `derivative` answers: the results too where only tangents are asked for and none are known."""
    if bundle.get("product"):
        return ("product",)
    values = () if bundle.get("known:logsumexp") is not None else options_of(bundle).arrays()
    return (*bundle["asked"], *values, *(f"moved:{name}" for name in bundle["moved"]))


def derivative(bundle: Bundle) -> dict[str, Tensor]:
    """The linear map of torch_derivatives.py, of the inputs' tangents and the results' upstream gradients."""
    along = part(bundle, "along")
    if bundle.get("product"):
        return {"product": derivative(_as_gradient(bundle))["v"] if along else _transposed(bundle)}
    options, moved = options_of(bundle), bundle["moved"]
    answering = "gradients" if not along else "gradient_tangents" if bundle["asked"] else "tangents"
    call = Call.read(bundle, answering, options.queries())
    known, by, changing = (blocks(call.problem, part(bundle, role)) for role in ("known", "by", "changing"))
    labels = {} if options.query_groups is None else {"groups": (options.query_groups, options.key_groups)}
    want = wanted(call.whole, options.keywords() | labels, output=call.inputs.v is not None).for_queries(call.rows)
    sizes = {name: tuple(bundle[name].shape) for name in bundle["asked"]}
    bias, spans = (tangents.shared_shape(call.problem, name, sizes.get(name)) for name in ("bias", "span_table"))
    direction = directions(call, bundle) if along else Directions()
    sides = known, by, direction, changing
    form = tangents.Derivative(call.engine, call.inputs, *sides, want.groups, bias, spans)
    gradients, slopes, values = tangents.derivative(form, want.only(moved) if known else want)
    answers = as_inputs(call, gradients, bundle) | (
        {} if known else {name: tensor(call.problem.restore(values[name])) for name in options.arrays()}
    )
    return answers | {f"moved:{name}": tensor(call.problem.restore(slopes[name])) for name in moved}


def directions(call: Call, bundle: Bundle) -> Directions:
    """The inputs' tangents as engines take them; those of rules are read as the rules themselves."""
    along = part(bundle, "along")
    rules: Any = {name: along[name] for name in ("bias", "sinks") if name in along}
    if "span_table" in along:
        rules["spans"] = bundle["query_spans"], bundle["key_spans"], along["span_table"]
    read = describe(along.get("q", bundle["q"]), along.get("k", bundle["k"]), None, rules)
    v = values_of(call.whole, along["v"]) if "v" in along else None
    return tangents.directions(replace(read, v=v), call.rows, along)


def _transposed(bundle: Bundle) -> Tensor:
    """Aᵀ·g, (…, heads, keys, d)."""
    call = Call.read(bundle)
    problem, g = call.problem, as_array(bundle["changing:output"], "g", call.problem.device)[0]
    columns = operand(problem, g, "g", problem.queries, (problem.heads,))[0]
    logsumexp = blocks(problem, part(bundle, "known"))["logsumexp"]
    return tensor(problem.restore(call.engine.transposed(call.inputs, logsumexp, columns)))


def in_statistics_dtype(bundle: Bundle) -> Bundle:
    """A bundle whose q, k and v, and what belongs to them and to the output, are in the dtype of statistics."""
    usual = torch.float64 if bundle["q"].dtype == torch.float64 else torch.float32
    names = {name for name in bundle if name.partition(":")[2] in ("q", "k", "v", "output")} | {*"qkv"}
    return {**bundle, **{name: bundle[name].to(usual) for name in names if bundle.get(name) is not None}}


def _as_gradient(bundle: Bundle) -> Bundle:
    """Aᵀ·g as the gradient by values that are zero: what they are does not matter."""
    wide = in_statistics_dtype(bundle)
    q, width = wide["q"], wide["by:output"].shape[-1]
    values = q.new_zeros(()).expand(*q.shape[:-2], bundle["k"].shape[-2], width)
    output = q.new_zeros(()).expand(*q.shape[:-1], width)
    return {**wide, "v": values, "known:output": output, "asked": ("v",), "product": False}


def blocks(problem: Problem, tensors: dict[str, Tensor]) -> dict[str, Array]:
    """Tensors (…, heads, …) as arrays (batch, heads, …)."""
    arrays = {name: as_array(x, "gradient")[0] for name, x in tensors.items()}
    axes = len(problem.prefix)
    return {name: x.reshape(problem.batch, problem.heads, *x.shape[axes:]) for name, x in arrays.items()}


def tensor(array: Array) -> Tensor:
    """The same memory as a tensor."""
    return cast("Tensor", to_torch(torch, array))


def as_inputs(call: Call, gradients: Mapping[str, Array], bundle: Bundle) -> dict[str, Tensor]:
    """Gradients of the inputs in "asked", each with the shape and dtype of its tensor in the bundle."""
    made, prefix, queries = {}, call.problem.prefix, call.whole.queries
    for name in bundle["asked"]:
        x: Tensor = bundle[name]
        array = gradients.get("spans" if name == "span_table" else name)
        if array is None:  # the loss does not use the output
            made[name] = torch.zeros_like(x, memory_format=torch.contiguous_format)
            continue
        gradient = tensor(array)
        if call.rows != range(queries) and (name == "q" or (name == "bias" and x.ndim > 1 and x.shape[-2] != 1)):
            full = gradient.new_zeros((*gradient.shape[:-2], queries, gradient.shape[-1]))  # but for the chosen queries
            rows = torch.tensor(call.rows, dtype=torch.int64, device=gradient.device)
            gradient = full.index_copy(-2, rows, gradient)
        if name in ("bias", "span_table") and gradient.shape[0] != 1:  # summed over batch axes that share a value
            sizes = (1,) * (len(prefix) + 2 - x.ndim) + tuple(x.shape)
            shared = tuple(axis for axis, size in enumerate(sizes[:-3]) if size == 1)
            gradient = gradient.reshape(*prefix[:-1], *gradient.shape[1:])
            gradient = gradient.sum(dim=shared) if shared else gradient
        made[name] = gradient.contiguous().to(x.device, x.dtype).reshape(x.shape)
    return made
