"""Attention on PyTorch tensors that keep a graph, for a derivative or for a compiler: what AttentionMatrix hands on.

Tensors without a graph are read as NumPy reads arrays (arrays.py), and none of this is loaded.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import DtypeError
from clearhead.observations import Observation, observation
from clearhead.problem import Rules, check_names, check_shapes
from clearhead.torch_op import ANSWERS, Asked, Given, observe, transposed


class Graph:
    """The attention matrix of tensors that keep a graph: what AttentionMatrix does, as operators."""

    def __init__(self, q: Tensor, k: Any, rules: Rules, engine: str | None) -> None:
        check_names(rules)
        self.q, self.k = (_autocast(torch.as_tensor(x)) for x in (q, k))
        check_shapes(q.shape, k.shape, None)
        self.given = _given(rules, engine)
        self.shape = (*q.shape[:-1], k.shape[-2])
        self.dtype = np.dtype(np.float64 if q.dtype == torch.float64 else np.float32)

    def observe(self, v: Any, asked: Mapping[str, Any], queries: slice = slice(None)) -> Observation:
        if v is not None and v.ndim == self.q.ndim:
            check_shapes(self.q.shape, self.k.shape, v.shape)
        request = _asked(asked, queries, output=v is not None)
        names = request.names.split()
        found = observe(self.q, self.k, self._values(v), *self.given, *request)
        answers = dict(zip(names, found, strict=True))
        if not asked.get("logsumexp"):
            del answers["logsumexp"]
        return observation(answers, len(range(self.q.shape[-2])[queries]), self.k.shape[-2])

    def mix(self, v: Any) -> Tensor:
        """A·v."""
        vector = v.ndim == 1
        found = observe(self.q, self.k, self._values(v), *self.given, *Asked("output logsumexp"))
        return found[0][..., 0] if vector else found[0]

    def transposed(self, g: Any) -> Tensor:
        """Aᵀ·g."""
        vector = g.ndim == 1
        columns = torch.as_tensor(g[:, None] if vector else g)
        if columns.ndim < self.q.ndim:
            columns = columns.expand(*self.q.shape[:-2], *columns.shape)
        found = transposed(self.q, self.k, columns, *self.given)
        return found[0][..., 0] if vector else found[0]

    def _values(self, v: Any) -> Tensor | None:
        if v is None:
            return None
        columns = _autocast(torch.as_tensor(v[:, None] if v.ndim == 1 else v))
        if columns.dtype != self.q.dtype:
            raise DtypeError(f"v is {columns.dtype} but q is {self.q.dtype}: a derivative needs one dtype.")
        shared = columns.ndim == 2 and self.q.ndim > 2
        return columns.expand(*self.k.shape[:-2], *columns.shape) if shared else columns


def _autocast(x: Tensor) -> Tensor:
    """What PyTorch's own attention does under autocast: float32 and narrower become autocast's dtype."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


def _given(rules: Rules, engine: str | None) -> Given:
    left, right = rules.get("window") or (None, None)
    tensors = Given._fields[: Given._fields.index("scale")]
    given: dict[str, Any] = {name: value for name, value in rules.items() if name != "window"}
    for name in tensors:
        if given.get(name) is not None:
            given[name] = _as_tensor(given[name])
    given["causal"] = given.get("causal") or False
    return Given(**given, left=left, right=right, engine=engine)


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))  # lists of numbers stay float64


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
