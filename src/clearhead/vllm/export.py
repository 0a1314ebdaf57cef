"""What a finished request has shown on average, as a span of OpenTelemetry and as metrics of Prometheus."""

import time
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from clearhead.core.axes import Array

_UNITS = {"entropy": "nats", "first": "share", "spans": "share"}


class Means:
    """The means over layers, heads and the tokens generated so far."""

    def __init__(self) -> None:
        self.start, self.tokens = time.time_ns(), 0
        self.sums: dict[str, Any] = {}

    def add(self, seen: dict[str, Array]) -> None:
        """Add one token: its statistics, (layers, heads, …)."""
        self.tokens += 1
        for name in _UNITS.keys() & seen.keys():
            self.sums[name] = self.sums.get(name, 0.0) + seen[name].astype(np.float64)

    def export(self, request: str) -> None:
        """Send them to whichever is on; neither has to be installed. Of spans, a metric has the sum."""
        means = {name: (total.mean((0, 1)) / self.tokens).tolist() for name, total in self.sums.items()}
        with suppress(ImportError):
            for name, mean in means.items():
                _histogram(name).observe(float(np.sum(mean)))
        with suppress(ImportError):
            from opentelemetry import trace

            said = {f"clearhead.{name}": mean for name, mean in means.items()}
            said |= {"gen_ai.request.id": request.rpartition("-")[0], "clearhead.tokens": self.tokens}
            trace.get_tracer("clearhead").start_span("attention", attributes=said, start_time=self.start).end()


@cache
def _histogram(name: str) -> Any:
    from prometheus_client import Histogram

    return Histogram(f"clearhead_attention_{name}_{_UNITS[name]}", f"Mean of a request's attention: {name}.")
