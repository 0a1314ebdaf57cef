"""Reads the arguments of a call that PyTorch sees: tensors apart from all else, since its graph has to know each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from clearhead.core.arrays import as_rule_array, autocast, check_tensor, to_torch
from clearhead.core.call import Given
from clearhead.core.observations import check_asked
from clearhead.core.problem import check_shapes
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rule_values import has_axes
from clearhead.core.rules import RULES, Rules, check_names
from clearhead.core.spans import parts_of
from clearhead.core.statistics import STATISTICS, arrays_of
from clearhead.derivatives.recomputed import Tensors
from clearhead.errors import DtypeError, RuleError

LABELS = ("query_groups", "key_groups")
_SPANS = {name: f"spans[{place}]" for place, name in enumerate(RULES["spans"].fields)}
_INSTEAD = {
    "scale": "scale=1.0 and (q * scale[:, None, None], k) give the same scores.",
    "softcap": "softcap.detach()",
}


@dataclass(eq=False)
class Task:
    """What a node of PyTorch's graph computes, but for its tensors.

    A node takes its tensors by name: q, k, v, g of Aᵀ·g, the rules' by their fields in a Problem, the labels of groups;
    for a gradient also results of the forward pass, as "known:output", and what is upstream of them, as "by:output".
    """

    answers: tuple[str, ...]  # what it returns: arrays of statistics, as engines name them; for a gradient, inputs
    rules: dict[str, Any]  # those that are no tensors, by their fields in a Problem
    asked: dict[str, Any]  # the keywords of `observe`, but for the labels of groups
    queries: slice
    engine: str | None
    num_threads: int | None
    is_gradient: bool = False


def read(
    given: Given, v: Any = None, asked: Mapping[str, Any] | None = None, queries: slice = slice(None)
) -> tuple[Task, Tensors]:
    """Read a call of `observe`; without v no output is asked for. What only numbers tell is checked where it runs.

    Raises what `describe` and `observations.wanted` raise, and RuleError for a scale or softcap that requires grad.
    """
    check_names(given.rules)
    q = autocast(tensor_of(given.q, "q", given.q))
    x = {"q": q, "k": autocast(tensor_of(given.k, "k", q))}
    v = None if v is None else tensor_of(v, "v", q)
    check_shapes(q.shape, x["k"].shape, None if v is None or v.ndim != q.ndim else v.shape)
    if v is not None:
        x["v"] = _values(q, x["k"], v)
    rules = {}
    for name, value in _by_field(given.rules).items():
        if name in _INSTEAD and isinstance(value, Tensor) and value.requires_grad:
            raise RuleError(f"{name} requires grad, and has no derivative here.", _INSTEAD[name])
        if name not in ("softcap", "window") and (isinstance(value, Tensor) or has_axes(value)):
            x[name] = tensor_of(value, _SPANS.get(name, name), q)
        elif value is not None:
            rules[name] = value
    checked = check_asked(asked) if asked else {}
    wanted = {name: value for name, value in checked.items() if value is not None and value is not False}
    names = {*wanted, "logsumexp", *(["output"] if "v" in x else [])}  # the gradient needs the log-sum-exp
    answers = tuple(array for name in STATISTICS if name in names for array in arrays_of(name))
    x |= zip(LABELS, map(torch.as_tensor, wanted.pop("groups", ())), strict=False)
    return Task(answers, rules, wanted, queries, given.engine, given.num_threads), x


def _by_field(rules: Rules) -> dict[str, Any]:
    """The rules' values by the fields of a Problem."""
    values: dict[str, Any] = {**rules}
    spans = values.pop("spans", None)
    return values if spans is None else values | dict(zip(_SPANS, parts_of(spans), strict=True))


def by_rule(task: Task, x: Tensors) -> Rules:
    """The rules of a node as keywords again."""
    fields = task.rules | x
    rules = {name: fields[name] for name in RULES if name in fields}
    spans = tuple(fields.get(name) for name in _SPANS)
    return cast("Rules", rules if spans == (None,) * 3 else {**rules, "spans": spans})


def part(x: Tensors, role: str) -> Tensors:
    """The tensors of a gradient's node that play a part, by what they belong to: "known" results, or "by"."""
    start = f"{role}:"
    return {name.removeprefix(start): one for name, one in x.items() if name.startswith(start)}


def tensor_of(x: Any, name: str, q: Tensor) -> Tensor:
    """A tensor from a tensor or array. Raises DtypeError when it is not on q's device."""
    if not isinstance(x, Tensor):
        return _from_array(x, name).to(q.device)
    check_tensor(x, name)
    if x.device != q.device:
        raise DtypeError(
            f"{name} is on device {x.device} but q is on device {q.device}.", f"{name}.to({str(q.device)!r}) moves it."
        )
    return x


def _from_array(x: Any, name: str) -> Tensor:
    """An array, list or number as a tensor, with the dtypes that arrays.as_rule_array gives.

    Raises DtypeError for a dtype that PyTorch does not have, SizeError for an array that memory cannot hold.
    """
    if not torch.compiler.is_compiling():
        array = as_rule_array(x, name)
        check_room(name, array_bytes(array.shape, array.itemsize), "give fewer tokens.")
        try:
            return cast("Tensor", to_torch(torch, np.require(array, requirements=("C", "W"))))
        except (TypeError, ValueError):
            raise DtypeError(f"{name} is {array.dtype}, which PyTorch does not have: expected numbers.") from None
    tensor = torch.as_tensor(x)
    return tensor.double() if isinstance(x, float) else tensor


def _values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The values (…, keys, d_v); what is for all heads alike is expanded."""
    columns = v[:, None] if v.ndim == 1 else v
    columns = columns if columns.dtype == q.dtype else autocast(columns)
    if columns.dtype != q.dtype:
        raise DtypeError(f"v is {columns.dtype} but q is {q.dtype}: a derivative needs one dtype.")
    return columns.expand(*k.shape[:-2], *columns.shape) if columns.ndim == 2 < q.ndim else columns
