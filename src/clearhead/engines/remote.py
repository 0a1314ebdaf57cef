"""Runs a GPU's engine on arrays in the CPU's memory: copies arguments to the GPU and results back."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from clearhead.core.arrays import on_cpu, to_device_of
from clearhead.core.axes import Array
from clearhead.core.call import Call
from clearhead.core.effects import Terms
from clearhead.core.state import State
from clearhead.engines.base import Engine, Upstream


class Remote:
    """A GPU's engine, called with arrays in the CPU's memory; `like` is any array on the device that computes."""

    def __init__(self, engine: Engine, like: Array) -> None:
        self.engine, self.like = engine, like
        self.STATISTICS = engine.STATISTICS

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.engine, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*(self._sent(x) for x in arguments), **options)
            return {key: on_cpu(x) for key, x in result.items()} if isinstance(result, dict) else on_cpu(result)

        return call

    def _sent(self, x: Any) -> Any:
        if isinstance(x, Call):
            return x.of_each(self._sent)
        if isinstance(x, (Upstream, Terms)):
            return replace(x, **{f.name: self._sent(getattr(x, f.name)) for f in fields(x)})
        if isinstance(x, State):
            return State(*map(self._sent, x))
        return to_device_of(x, self.like) if isinstance(x, np.ndarray) else x
