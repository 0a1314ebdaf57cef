"""Attention on PyTorch tensors that keep a graph, for a derivative or for a compiler: what AttentionMatrix hands on.

Tensors without a graph are read as NumPy reads arrays (arrays.py), and none of this is loaded.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from clearhead.arrays import autocast, check_tensor, plain, to_torch
from clearhead.errors import DtypeError, RuleError
from clearhead.observations import Observation, check_asked, observation
from clearhead.problem import Rules, check_names, check_shapes
from clearhead.torch_op import ANSWERS, Asked, Given, observe, transposed
from clearhead.values import read_flag, read_number, read_window


class Graph:
    """The attention matrix of tensors that keep a graph: what AttentionMatrix does, as operators."""

    def __init__(self, q: Tensor, k: Any, rules: Rules, engine: str | None) -> None:
        check_names(rules)
        self.q, self.k = autocast(_tensor(q, "q", q)), autocast(_tensor(k, "k", q))
        check_shapes(q.shape, k.shape, None)
        self.given = _given(q, rules, engine)
        self.shape = (*q.shape[:-1], k.shape[-2])
        self.dtype = np.dtype(np.float64 if q.dtype == torch.float64 else np.float32)

    def observe(self, v: Any, asked: Mapping[str, Any], queries: slice = slice(None)) -> Observation:
        request = _asked(check_asked(asked), queries, output=v is not None)
        v = None if v is None else _tensor(v, "v", self.q)
        if v is not None and v.ndim == self.q.ndim:
            check_shapes(self.q.shape, self.k.shape, v.shape)
        names = request.names.split()
        found = observe(self.q, self.k, self._values(v), *self.given, *request)
        answers = dict(zip(names, found, strict=True))
        if not asked.get("logsumexp"):
            del answers["logsumexp"]
        length = self.q.shape[-2]  # not to be looked at where a compiler leaves it open
        count = length if queries == slice(None) else len(range(length)[queries])
        return observation(answers, count, self.k.shape[-2], sinks=self.given.sinks is not None)

    def mix(self, v: Any) -> Tensor:
        """A·v."""
        v = _tensor(v, "v", self.q)
        vector = v.ndim == 1
        found = observe(self.q, self.k, self._values(v), *self.given, *Asked("output logsumexp"))
        return found[0][..., 0] if vector else found[0]

    def transposed(self, g: Any) -> Tensor:
        """Aᵀ·g."""
        g = _tensor(g, "g", self.q)
        vector = g.ndim == 1
        columns = g[:, None] if vector else g
        if columns.ndim < self.q.ndim:
            columns = columns.expand(*self.q.shape[:-2], *columns.shape)
        found = transposed(self.q, self.k, columns, *self.given)
        return found[0][..., 0] if vector else found[0]

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
    """An array as a tensor beside q."""
    if not isinstance(x, Tensor):
        x = _read(x, name)
    else:
        check_tensor(x, name)
    if x.device != q.device:
        raise DtypeError(
            f"{name} is on device {x.device} but q is on device {q.device}.", f"{name}.to({str(q.device)!r}) moves it."
        )
    return x


def _read(x: Any, name: str) -> Tensor:
    """What is no tensor yet, with the numbers that arrays.plain reads."""
    if not torch.compiler.is_compiling():
        return cast("Tensor", to_torch(torch, np.require(plain(x, name), requirements=("C", "W"))))
    found = torch.as_tensor(x)
    return found.double() if isinstance(x, float) else found


def _given(q: Tensor, rules: Rules, engine: str | None) -> Given:
    left, right = read_window(rules.get("window"))
    given: dict[str, Any] = {name: value for name, value in rules.items() if name != "window"}
    for name in Given._fields[: Given._fields.index("scale")]:
        if given.get(name) is not None:
            given[name] = _tensor(given[name], name, q)
    for name in ("scale", "softcap"):
        value = given.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            raise RuleError(
                f"{name} requires grad, and has no derivative here.",
                "scale=1.0 and (q * scale, k) give the same scores." if name == "scale" else "softcap.detach()",
            )
        given[name] = None if value is None else read_number(name, value, 0.0)
    given["causal"] = read_flag("causal", given.get("causal"))
    return Given(**given, left=left, right=right, engine=engine)


def _asked(asked: Mapping[str, Any], queries: slice, *, output: bool) -> Asked:
    top, image, groups = asked.get("top"), asked.get("image"), asked.get("groups")
    present = {
        **asked,
        "output": output,
        "logsumexp": True,  # the derivative needs it
        "top_weights": top is not None,
        "top_indices": top is not None,
        "image": image is not None,
        "groups": groups is not None,
    }
    height, width = image or (0, 0)
    labels = (None, None) if groups is None else (torch.as_tensor(side) for side in groups)
    names = " ".join(name for name in ANSWERS if present.get(name))
    return Asked(names, top or 0, height, width, queries.start, queries.stop, queries.step, *labels)
