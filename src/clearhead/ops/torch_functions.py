"""Attention's results, their gradients, and the tangents of both, as functions of tensors; nothing is recorded here.

Each takes a bundle: the operator's arguments by name (q, k, v, the fields of Given and Options), and further tensors by
the part they play, as "by:output". torch_nodes.py makes nodes of PyTorch's graph of them.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from clearhead import engines
from clearhead.core.arrays import as_array, to_torch
from clearhead.core.axes import Array
from clearhead.core.observations import wanted
from clearhead.core.operands import operand
from clearhead.core.problem import Problem, describe
from clearhead.core.statistics import Groups
from clearhead.engines.base import Engine
from clearhead.ops import backward
from clearhead.ops.torch_arguments import Given, Options

Bundle = dict[str, Any]
INPUTS = ("q", "k", "v", "bias", "sinks", "span_table")  # what has a derivative, as arguments name it


def given_of(bundle: Bundle) -> Given:
    """The rules of a bundle."""
    return Given(**{name: bundle[name] for name in Given._fields})


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
    """A validated call: the problem of the chosen queries, its arrays (batch, heads, …), its engine."""

    problem: Problem
    q: Array
    k: Array
    v: Array | None
    rows: range
    engine: Any
    whole: Problem

    @staticmethod
    def read(bundle: Bundle, answering: str = "", queries: slice = slice(None)) -> "Call":
        """The call of a bundle; `answering` names what its engine must have, such as "gradients"."""
        given = given_of(bundle)
        read = describe(bundle["q"], bundle["k"], None, given.rules(), given.num_threads)
        whole = read.problem
        v = None if bundle["v"] is None else values_of(whole, bundle["v"])
        rows = range(whole.queries)[queries]
        choose = partial(engines.choose_for, answering) if answering else engines.choose
        engine: Engine = engines.get(choose(whole, given.engine).engine)
        problem = whole if rows == range(whole.queries) else whole.take(queries=rows)
        return Call(problem, read.q[:, :, queries], read.k, v, rows, engine, whole)


def values_of(problem: Problem, v: Tensor) -> Array:
    """Values as engines take them."""
    array = as_array(v, "v", problem.device)[0]
    return operand(problem, array, "v", problem.keys, (problem.kv_heads, problem.heads))[0]


def values(bundle: Bundle) -> dict[str, Tensor]:
    """The requested arrays, by name."""
    options = options_of(bundle)
    call = Call.read(bundle, queries=options.queries())
    want = wanted(call.whole, options.keywords(), output=call.v is not None).for_queries(call.rows)
    engine = engines.able(call.engine, call.problem, want, bundle["engine"])
    found = engines.answer(engine, call.problem, call.q, call.k, call.v, want)
    return {name: tensor(call.problem.restore(found[name])) for name in options.arrays()}


def gradients(bundle: Bundle) -> dict[str, Tensor]:
    """The gradients of the inputs in "asked", from "known:" results and "by:" upstream gradients."""
    call = Call.read(bundle, "gradients", options_of(bundle).queries())
    known, by = (blocks(call.problem, part(bundle, role)) for role in ("known", "by"))
    arrays = call.q, call.k, call.v
    asked = {"groups": labels(call, bundle), **shapes(call, bundle)}
    found = backward.gradients(call.engine, call.problem, arrays, known, by, **asked)
    return as_given(call, found, bundle)


def transposed(bundle: Bundle) -> dict[str, Tensor]:
    """Aᵀ·g for g in the place of v, (…, heads, keys, d), and the log-sum-exp, which its derivatives need."""
    call = Call.read({**bundle, "v": None})
    problem = call.problem
    columns = operand(problem, as_array(bundle["v"], "g", problem.device)[0], "g", problem.queries, (problem.heads,))[0]
    want = wanted(problem, {"logsumexp": True})
    logsumexp = engines.answer(call.engine, problem, call.q, call.k, None, want)["logsumexp"]
    found = call.engine.transposed(problem, call.q, call.k, logsumexp, columns)
    return {name: tensor(problem.restore(x)) for name, x in (("product", found), ("logsumexp", logsumexp))}


def blocks(problem: Problem, tensors: dict[str, Tensor]) -> dict[str, Array]:
    """Tensors (…, heads, …) as arrays (batch, heads, …)."""
    arrays = {name: as_array(x, "gradient")[0] for name, x in tensors.items()}
    axes = len(problem.prefix)
    return {name: x.reshape(problem.batch, problem.heads, *x.shape[axes:]) for name, x in arrays.items()}


def labels(call: Call, bundle: Bundle) -> Groups | None:
    """The labels of the groups that a loss is of, for the chosen queries."""
    options = options_of(bundle)
    if options.query_groups is None or not any("groups" in part(bundle, role) for role in ("by", "changing")):
        return None
    asked = {"groups": (options.query_groups, options.key_groups)}
    return wanted(call.whole, asked).for_queries(call.rows).groups


def tensor(array: Array) -> Tensor:
    """The same memory as a tensor."""
    return cast("Tensor", to_torch(torch, array))


def as_given(call: Call, found: dict[str, Array], bundle: Bundle) -> dict[str, Tensor]:
    """Gradients of the inputs in "asked", each with the shape and dtype of its tensor in the bundle."""
    made = {}
    for name in bundle["asked"]:
        x: Tensor = bundle[name]
        array = found.get("spans" if name == "span_table" else name)
        if array is None:  # the loss does not use the output
            made[name] = torch.zeros_like(x, memory_format=torch.contiguous_format)
            continue
        own = tensor(array)
        if name == "q" or (name == "bias" and x.ndim > 1 and x.shape[-2] != 1):
            own = _among(own, call)
        if name in ("bias", "span_table"):
            own = _joined(own, call.problem, x)
        made[name] = own.contiguous().to(x.device, x.dtype).reshape(x.shape)
    return made


def shapes(call: Call, bundle: Bundle) -> dict[str, Any]:
    """The shapes in which gradients of the bias and of the table of spans are asked for, 1 where it is broadcast."""
    bias = _shared_shape(call.problem, bundle["bias"]) if "bias" in bundle["asked"] else None
    spans = _shared_shape(call.problem, bundle["span_table"]) if "span_table" in bundle["asked"] else None
    if bias is not None and bias[2] != 1:
        bias = (*bias[:2], call.problem.queries, bias[3])
    return {"bias": bias, "spans": spans}


def _shared_shape(problem: Problem, x: Tensor) -> tuple[int, int, int, int]:
    """The shape of a bias or table as (batch, heads, …, …), 1 where broadcast; batch: along every batch axis."""
    own = _own_shape(problem, x)
    batch = problem.batch if any(size != 1 for size in own[:-3]) else 1
    heads, height, width = (1, *own)[-3:]
    return batch, heads, height, width


def _own_shape(problem: Problem, x: Tensor) -> tuple[int, ...]:
    return (1,) * (len(problem.prefix) + 2 - x.ndim) + tuple(x.shape)


def _joined(found: Tensor, problem: Problem, x: Tensor) -> Tensor:
    """A gradient of a bias or table with its leading batch axes, summed over those along which it is broadcast."""
    own = _own_shape(problem, x)
    if found.shape[0] == 1:
        return found
    apart = found.reshape(*problem.prefix[:-1], *found.shape[1:])
    shared = tuple(axis for axis, size in enumerate(own[:-3]) if size == 1)
    return apart.sum(dim=shared) if shared else apart


def _among(rows: Tensor, call: Call) -> Tensor:
    """Scatter rows of the chosen queries to all queries; the others are zero."""
    if call.rows == range(call.whole.queries):
        return rows
    full = rows.new_zeros((*rows.shape[:-2], call.whole.queries, rows.shape[-1]))
    return full.index_copy(-2, torch.tensor(call.rows, dtype=torch.int64, device=rows.device), rows)
