"""The portable engine over PyTorch's tensors in the CPU's memory, as it computes on a GPU, for calls with arrays."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from clearhead.core.arrays import on_cpu, to_torch
from clearhead.core.call import Call
from clearhead.core.device_array import DeviceArray
from clearhead.core.effects import Terms
from clearhead.core.state import State
from clearhead.engines import portable
from clearhead.engines.base import Upstream


class OnTensors:
    """The engine with the arrays of its arguments made tensors, and its answers made NumPy's arrays."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(portable, name)
        if name.isupper() or name == "reasons_not":
            return value
        return lambda *arguments, **named: _near(value(*map(_sent, arguments), **named))


def _sent(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return DeviceArray(to_torch(torch, np.array(x)))
    if isinstance(x, Call):
        return x.of_each(_sent)
    if isinstance(x, (Upstream, Terms)):
        return replace(x, **{field.name: _sent(getattr(x, field.name)) for field in fields(x)})
    return State(*map(_sent, x)) if isinstance(x, State) else x


def _near(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: on_cpu(y) for name, y in x.items()}
    return x if isinstance(x, tuple) else on_cpu(x)
