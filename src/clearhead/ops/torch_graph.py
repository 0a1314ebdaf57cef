"""Attention on PyTorch tensors whose graph is recorded, for autograd or a compiler; AttentionMatrix delegates to it.

Other tensors are read like NumPy arrays (core/arrays.py), and this module is not imported.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from clearhead.core.arrays import as_rule_array, autocast, check_tensor, to_torch
from clearhead.core.observations import check_asked
from clearhead.core.problem import check_shapes
from clearhead.core.room import array_bytes, check_room
from clearhead.core.rule_values import has_axes, read_flag, read_number, read_threads, read_window
from clearhead.core.rules import Rules, check_names, check_supported, turned_on
from clearhead.core.spans import parts_of
from clearhead.core.statistics import STATISTICS, arrays_of
from clearhead.errors import DtypeError, RuleError
from clearhead.ops.observation import Observation, observation
from clearhead.ops.torch_arguments import RULES, SPANS, TENSORS, Options, Settings
from clearhead.ops.torch_derivatives import VALUES, transposed
from clearhead.ops.torch_nodes import called_plainly, compute
from clearhead.ops.torch_operators import PRODUCT, bundle_of, observe

_INSTEAD = {
    "scale": "scale=1.0 and (q * scale, k) give the same scores.",
    "scales": "scale=1.0 and (q * scale[:, None, None], k) give the same scores.",
    "softcap": "softcap.detach()",
}


class Graph:
    """The operations of AttentionMatrix as PyTorch operators, for tensors whose graph is recorded."""

    def __init__(self, q: Tensor, k: Any, rules: Rules, engine: str | None, num_threads: int | None = None) -> None:
        check_names(rules)
        check_supported("PyTorch's graph", RULES, turned_on(rules))
        self.q, self.k = autocast(_tensor(q, "q", q)), autocast(_tensor(k, "k", q))
        check_shapes(q.shape, k.shape, None)
        self.settings = _settings(q, rules)._replace(engine=engine, num_threads=read_threads(num_threads))
        self.shape = (*q.shape[:-1], k.shape[-2])
        self.dtype = np.dtype(np.float64 if q.dtype == torch.float64 else np.float32)

    def observe(self, v: Any, asked: Mapping[str, Any], queries: slice = slice(None)) -> Observation:
        request = _options(check_asked(asked), queries, output=v is not None)
        v = None if v is None else _tensor(v, "v", self.q)
        if v is not None and v.ndim == self.q.ndim:
            check_shapes(self.q.shape, self.k.shape, v.shape)
        answers = self._answers(v, request)
        if not asked.get("logsumexp"):
            del answers["largest"], answers["log_sum"]
        length = self.q.shape[-2]  # computing with it would fix a size that the compiler leaves open
        count = length if queries == slice(None) else len(range(length)[queries])
        return observation(answers, count, self.k.shape[-2], sinks=self.settings.sinks is not None)

    def mix(self, v: Any) -> Tensor:
        """A·v."""
        v = _tensor(v, "v", self.q)
        vector = v.ndim == 1
        output = self._answers(v, Options("output largest log_sum"))["output"]
        return output[..., 0] if vector else output

    def transposed(self, g: Any) -> Tensor:
        """Aᵀ·g."""
        g = _tensor(g, "g", self.q)
        vector = g.ndim == 1
        columns = g[:, None] if vector else g
        if columns.ndim < self.q.ndim:
            columns = columns.expand(*self.q.shape[:-2], *columns.shape)
        if called_plainly(self.q):
            result = transposed(bundle_of(self.q, self.k, None, self.settings), columns)
        else:
            result = observe(self.q, self.k, columns, *self.settings, *PRODUCT)[0]
        return result[..., 0] if vector else result

    def refused(self, what: str, call: str) -> RuleError:
        """The error for what has no graph; `call` has none either."""
        if self.q.device.type == "meta":
            return RuleError(f"{what} need numbers, and tensors on the meta device have none.")
        return RuleError(
            f"{what} have no derivative, and PyTorch keeps or traces a graph for them.",
            f"with torch.no_grad(): {call}",
        )

    def refused_logsumexp(self) -> RuleError:
        """The error for another kernel's log-sum-exp."""
        return RuleError(
            "logsumexp is given, and PyTorch records or traces a graph: its derivative would be missing.",
            "create the matrix under torch.no_grad(), or leave logsumexp out: it has its derivative then.",
        )

    def _answers(self, v: Tensor | None, request: Options) -> dict[str, Tensor]:
        """The arrays of a request, by name."""
        values = self._values(v)
        if called_plainly(self.q):
            return compute(VALUES, bundle_of(self.q, self.k, values, self.settings, request))
        return dict(zip(request.arrays(), observe(self.q, self.k, values, *self.settings, *request), strict=True))

    def _values(self, v: Tensor | None) -> Tensor | None:
        if v is None:
            return None
        columns = v[:, None] if v.ndim == 1 else v
        columns = columns if columns.dtype == self.q.dtype else autocast(columns)
        if columns.dtype != self.q.dtype:
            raise DtypeError(f"v is {columns.dtype} but q is {self.q.dtype}: a derivative needs one dtype.")
        shared = columns.ndim == 2 and self.q.ndim > 2
        return columns.expand(*self.k.shape[:-2], *columns.shape) if shared else columns


def _tensor(x: Any, name: str, q: Tensor) -> Tensor:
    """A tensor from a tensor or array. Raises DtypeError when it is not on q's device."""
    if not isinstance(x, Tensor):
        return _read(x, name).to(q.device)
    check_tensor(x, name)
    if x.device != q.device:
        raise DtypeError(
            f"{name} is on device {x.device} but q is on device {q.device}.", f"{name}.to({str(q.device)!r}) moves it."
        )
    return x


def _read(x: Any, name: str) -> Tensor:
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


def _settings(q: Tensor, rules: Rules) -> Settings:
    left, right = read_window(rules.get("window"))
    read: dict[str, Any] = {name: value for name, value in rules.items() if name not in ("window", "spans")}
    if rules.get("spans") is not None:
        read |= zip(SPANS, parts_of(rules["spans"]), strict=True)
    if has_axes(read.get("scale")):
        read["scales"] = read.pop("scale")
    for name in TENSORS:
        if read.get(name) is None or (name == "query_offset" and type(read[name]) is int and called_plainly(q)):
            continue  # a number stays one where no operator's schema asks for a tensor: then it need not be saved
        read[name] = _tensor(read[name], SPANS.get(name, "scale" if name == "scales" else name), q)
    for name in ("scales", "scale", "softcap"):
        value = read.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            raise RuleError(f"{name.removesuffix('s')} requires grad, and has no derivative here.", _INSTEAD[name])
        if name != "scales":
            read[name] = None if value is None else read_number(name, value, 0.0)
    read["causal"] = read_flag("causal", read.get("causal"))
    return Settings(**read, left=left, right=right)


def _options(asked: Mapping[str, Any], queries: slice, *, output: bool) -> Options:
    requested = {name: value for name, value in asked.items() if value is not None and value is not False}
    present = {*requested, "logsumexp", *(["output"] if output else [])}  # the backward pass needs the rows' states
    height, width = requested.get("image", (0, 0))
    labels = (None, None) if "groups" not in requested else (torch.as_tensor(side) for side in requested["groups"])
    names = " ".join(array for name in STATISTICS if name in present for array in arrays_of(name))
    return Options(names, requested.get("top", 0), height, width, queries.start, queries.stop, queries.step, *labels)
