"""An engine of a GPU for arrays in the CPU's memory: they travel there, and the answers back."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from clearhead.arrays import beside, on_cpu
from clearhead.axes import Array
from clearhead.engines.base import Engine, Upstream


class Remote:
    """The engine of a GPU as one for arrays in the CPU's memory; `like` is any array that lies where it computes."""

    def __init__(self, engine: Engine, like: Array) -> None:
        self.engine, self.like = engine, like

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Any) -> Any:
            found = getattr(self.engine, name)(*(self._sent(x) for x in given))
            return {key: on_cpu(x) for key, x in found.items()} if isinstance(found, dict) else on_cpu(found)

        return ask

    def _sent(self, x: Any) -> Any:
        if isinstance(x, Upstream):
            return replace(x, **{f.name: self._sent(getattr(x, f.name)) for f in fields(x)})
        return beside(x, self.like) if isinstance(x, np.ndarray) else x
