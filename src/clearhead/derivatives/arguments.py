"""Splits a call for PyTorch's graph into its tensors, by name, and a Task with everything else."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from clearhead.core.arrays import as_rule_array, autocast, check_tensor, to_torch
from clearhead.core.call import Given
from clearhead.core.observations import check_asked
from clearhead.core.problem import check_shapes
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rule_values import has_axes, read_flag, read_number, read_window
from clearhead.core.rules import RULES, Rules, check_names
from clearhead.core.spans import parts_of
from clearhead.core.statistics import STATISTICS, arrays_of
from clearhead.derivatives.recomputed import Tensors
from clearhead.errors import DtypeError, RuleError

LABELS = ("query_groups", "key_groups")
_SPANS = {name: f"spans[{place}]" for place, name in enumerate(RULES["spans"].fields)}
_INSTEAD = {"scale": "scale=1.0 and (q * scale[:, None, None], k) give the same scores.", "softcap": "softcap.detach()"}
_NUMBERS = ("scale", "softcap", "causal", "query_offset")  # rules that can be numbers; the window is left and right


class Task(NamedTuple):
    """What a node of PyTorch's graph computes, apart from its tensors; for compilers each field is an argument.

    A node takes its tensors by name: q, k, v, g of Aᵀ·g, rules by their fields in a Problem, labels of groups; for a
    gradient also results of the forward pass, as "known:output", and their upstream gradients, as "by:output".
    """

    answers: str  # the names of what it returns: arrays of statistics as in engines; for a gradient, inputs
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    left: int | None = None  # of the window
    right: int | None = None
    query_offset: int | None = None
    engine: str | None = None
    top: int = 0
    height: int = 0  # of the image
    width: int = 0
    start: int | None = None  # of the slice of queries
    stop: int | None = None
    step: int | None = None

    @property
    def queries(self) -> slice:
        return slice(self.start, self.stop, self.step)

    def rules(self, x: Tensors) -> Rules:
        """The rules as keywords again, including those that are tensors."""
        window = None if self.left is None and self.right is None else (self.left, self.right)
        spans = tuple(x.get(name) for name in _SPANS) if any(name in x for name in _SPANS) else None
        fields = {name: getattr(self, name) for name in _NUMBERS} | {"window": window, "spans": spans} | x
        named = {name: fields[name] for name in RULES if name in fields}
        return cast("Rules", {name: y for name, y in named.items() if y is not None and y is not False})

    def asked(self) -> dict[str, Any]:
        """The keywords of `observe`, except the labels of groups."""
        values = {"flag": True, "count": self.top, "size": (self.height, self.width)}
        arrays = self.answers.split()
        kinds = {name: one.asked for name, one in STATISTICS.items() if arrays_of(name)[0] in arrays}
        return {name: values[kind] for name, kind in kinds.items() if kind in values}


def read(
    given: Given, v: Any = None, asked: Mapping[str, Any] | None = None, queries: slice = slice(None)
) -> tuple[Task, Tensors]:
    """Read a call of `observe`; without v, no output is requested. Checks of tensors' numbers wait until it runs.

    Raises what `describe` and `observations.wanted` raise, and RuleError for a scale or softcap that requires grad.
    """
    check_names(given.rules)
    q = autocast(tensor_of(given.q, "q", given.q))
    x = {"q": q, "k": autocast(tensor_of(given.k, "k", q))}
    v = None if v is None else tensor_of(v, "v", q)
    check_shapes(q.shape, x["k"].shape, None if v is None or v.ndim != q.ndim else v.shape)
    if v is not None:
        x["v"] = _values(q, x["k"], v)
    numbers: dict[str, Any] = {}
    rules: dict[str, Any] = {**given.rules}  # by the fields of a Problem
    spans = rules.pop("spans", None)
    rules |= {} if spans is None else zip(_SPANS, parts_of(spans), strict=True)
    for name, value in rules.items():
        if value is None:
            continue
        if name in _INSTEAD and isinstance(value, Tensor) and value.requires_grad:
            raise RuleError(f"{name} requires grad, and has no derivative here.", _INSTEAD[name])
        if name == "causal":
            numbers[name] = read_flag(name, value)
        elif name == "window":
            numbers["left"], numbers["right"] = read_window(value)
        elif name == "softcap" or (name == "scale" and not isinstance(value, Tensor) and not has_axes(value)):
            numbers[name] = read_number(name, value, 0.0)
        elif name == "query_offset" and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            numbers[name] = value
        else:
            small = isinstance(value, Tensor) and value.device.type == "cpu" and name not in ("mask", "bias")
            x[name] = tensor_of(value.to(q.device) if small else value, _SPANS.get(name, name), q)  # such as lengths
    checked = check_asked(asked) if asked else {}
    wanted = {name: value for name, value in checked.items() if value is not None and value is not False}
    names = {*wanted, "logsumexp", *(["output"] if "v" in x else [])}  # the gradient needs the log-sum-exp
    answers = " ".join(array for name in STATISTICS if name in names for array in arrays_of(name))
    x |= zip(LABELS, map(torch.as_tensor, wanted.get("groups", ())), strict=False)
    height, width = wanted.get("image", (0, 0))
    task = Task(
        answers, **numbers, engine=given.engine, top=wanted.get("top", 0),
        height=height, width=width, start=queries.start, stop=queries.stop, step=queries.step,
    )  # fmt: skip
    return task, x


def part(x: Tensors, role: str) -> Tensors:
    """The tensors of a gradient's node in one role, by result: "known" results, or "by", their upstream gradients."""
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
    """The values (…, keys, d_v), expanded if all heads share them."""
    columns = v[:, None] if v.ndim == 1 else v
    columns = columns if columns.dtype == q.dtype else autocast(columns)
    if columns.dtype != q.dtype:
        raise DtypeError(f"v is {columns.dtype} but q is {q.dtype}: a derivative needs one dtype.")
    return columns.expand(*k.shape[:-2], *columns.shape) if columns.ndim == 2 < q.ndim else columns
