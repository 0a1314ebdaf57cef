"""Attention's results and their derivatives as functions of tensors; nothing is recorded here.

Each takes a bundle: the operator's arguments by name (q, k, v, the fields of Settings and Options), and further tensors
by the part they play, as "by:output". torch_derivatives.py makes nodes of them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from clearhead import engines
from clearhead.core.arrays import as_array, to_torch
from clearhead.core.axes import Array
from clearhead.core.call import Call, describe
from clearhead.core.observations import wanted
from clearhead.core.operands import operand
from clearhead.core.problem import Problem
from clearhead.core.statistics import Wanted
from clearhead.derivatives import backward
from clearhead.engines.base import Engine
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


class Chosen(NamedTuple):
    """A validated call: the problem of the chosen queries with its arrays, its engine, and the whole problem."""

    call: Call
    rows: range
    engine: Any
    whole: Problem

    @property
    def problem(self) -> Problem:
        return self.call.problem

    @staticmethod
    def read(bundle: Bundle, answering: str = "", queries: slice = slice(None)) -> "Chosen":
        """The call of a bundle; `answering` names what its engine must have, such as "gradients"."""
        settings = Settings(**{name: bundle[name] for name in Settings._fields})
        read = describe(bundle["q"], bundle["k"], None, settings.rules(), settings.num_threads)
        whole = read.problem
        v = None
        if bundle["v"] is not None:
            array = as_array(bundle["v"], "v", whole.device)[0]
            v = operand(whole, array, "v", whole.keys, (whole.kv_heads, whole.heads))[0]
        rows = range(whole.queries)[queries]
        choose = partial(engines.choose_for, answering) if answering else engines.choose
        engine: Engine = engines.get(choose(whole, settings.engine).engine)
        problem = whole if rows == range(whole.queries) else whole.take(queries=rows)
        return Chosen(Call(problem, read.q[:, :, queries], read.k, v), rows, engine, whole)


def values(bundle: Bundle) -> dict[str, Tensor]:
    """The requested arrays, by name."""
    options = options_of(bundle)
    chosen = Chosen.read(bundle, queries=options.queries())
    want = wanted(chosen.whole, options.keywords(), output=chosen.call.v is not None).for_queries(chosen.rows)
    engine = engines.able(chosen.engine, chosen.problem, want, bundle["engine"])
    results = engines.answer(engine, chosen.call, want)
    return {name: tensor(chosen.problem.restore(results[name])) for name in options.arrays()}


def gradient(bundle: Bundle) -> dict[str, Tensor]:
    """The gradients of the inputs in "asked", from "by:" upstream gradients and "known:" results, by the inputs' names.

    The log-sum-exp is always among the known results.
    """
    options = options_of(bundle)
    chosen = Chosen.read(bundle, "gradients", options.queries())
    known, by = (blocks(chosen.problem, part(bundle, role)) for role in ("known", "by"))
    groups = None
    if options.query_groups is not None:
        labels = {"groups": (options.query_groups, options.key_groups)}
        groups = wanted(chosen.whole, labels, output=False).for_queries(chosen.rows).groups
    sizes = {name: tuple(bundle[name].shape) for name in bundle["asked"]}
    bias, spans = (_shared_shape(chosen.problem, name, sizes.get(name)) for name in ("bias", "span_table"))
    made = backward.gradients(chosen.engine, chosen.call, known, by, groups=groups, bias=bias, spans=spans)
    return _as_inputs(chosen, made, bundle)


def _shared_shape(problem: Problem, name: str, shape: Sequence[int] | None) -> tuple[int, int, int, int] | None:
    """The shape in which a bias's or a table's gradient is asked for, from the input's: 1 where it is broadcast."""
    if shape is None:
        return None
    *lead, heads, height, width = 1, 1, 1, *shape
    batch = problem.batch if any(size != 1 for size in lead) else 1
    return batch, heads, problem.queries if name == "bias" and height != 1 else height, width


def product(bundle: Bundle) -> dict[str, Tensor]:
    """Aᵀ·g, (…, heads, keys, d) in the dtype of statistics, as "product"; and the log-sum-exp."""
    chosen = Chosen.read(bundle)
    problem, g = chosen.problem, as_array(bundle["g"], "g", chosen.problem.device)[0]
    columns = operand(problem, g, "g", problem.queries, (problem.heads,))[0]
    logsumexp = engines.answer(chosen.engine, chosen.call.with_values(None), Wanted(logsumexp=True))["logsumexp"]
    made = {"product": chosen.engine.transposed(chosen.call, logsumexp, columns), "logsumexp": logsumexp}
    return {name: tensor(problem.restore(x)) for name, x in made.items()}


def in_statistics_dtype(bundle: Bundle) -> Bundle:
    """A bundle whose q, k, v and g are in the dtype of statistics."""
    usual = torch.float64 if bundle["q"].dtype == torch.float64 else torch.float32
    return {**bundle, **{name: bundle[name].to(usual) for name in ("q", "k", "v", "g") if bundle.get(name) is not None}}


def blocks(problem: Problem, tensors: dict[str, Tensor]) -> dict[str, Array]:
    """Tensors (…, heads, …) as arrays (batch, heads, …)."""
    arrays = {name: as_array(x, "gradient")[0] for name, x in tensors.items()}
    axes = len(problem.prefix)
    return {name: x.reshape(problem.batch, problem.heads, *x.shape[axes:]) for name, x in arrays.items()}


def tensor(array: Array) -> Tensor:
    """The same memory as a tensor."""
    return cast("Tensor", to_torch(torch, array))


def _as_inputs(chosen: Chosen, gradients: Mapping[str, Array], bundle: Bundle) -> dict[str, Tensor]:
    """Gradients of the inputs in "asked", each with the shape and dtype of its tensor in the bundle."""
    made, prefix, queries = {}, chosen.problem.prefix, chosen.whole.queries
    for name in bundle["asked"]:
        x: Tensor = bundle[name]
        array = gradients.get("spans" if name == "span_table" else name)
        if array is None:  # the loss does not use the output
            made[name] = torch.zeros_like(x, memory_format=torch.contiguous_format)
            continue
        gradient = tensor(array)
        if chosen.rows != range(queries) and (name == "q" or (name == "bias" and x.ndim > 1 and x.shape[-2] != 1)):
            full = gradient.new_zeros((*gradient.shape[:-2], queries, gradient.shape[-1]))  # but for the chosen queries
            rows = torch.tensor(chosen.rows, dtype=torch.int64, device=gradient.device)
            gradient = full.index_copy(-2, rows, gradient)
        if name in ("bias", "span_table") and gradient.shape[0] != 1:  # summed over batch axes that share a value
            sizes = (1,) * (len(prefix) + 2 - x.ndim) + tuple(x.shape)
            shared = tuple(axis for axis, size in enumerate(sizes[:-3]) if size == 1)
            gradient = gradient.reshape(*prefix[:-1], *gradient.shape[1:])
            gradient = gradient.sum(dim=shared) if shared else gradient
        made[name] = gradient.contiguous().to(x.device, x.dtype).reshape(x.shape)
    return made
