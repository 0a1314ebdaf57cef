"""Observation: the statistics computed by one call of `observe`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.core.axes import brief
from clearhead.core.state import State
from clearhead.core.statistics import STATISTICS, Matrix, Strongest, joined_arrays


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Observation:
    """The statistics of one call, by name, (…, heads, …) each; None for those that were not requested.

    `observe` of AttentionMatrix and of EffectMatrix returns it, each field holding what the method of its name returns,
    and so does `varlen_attn`. Arrays are the kind that q is; statistics are float32, or float64 for float64; the output
    has q's dtype. The log-sum-exp is kept as two arrays, each row's largest logit (`largest`) and the rest (`log_sum`),
    since their sum may lose digits. `queries` and `keys` count what it covers.

    >>> import numpy as np, clearhead as ch
    >>> seen = ch.AttentionMatrix(np.eye(2), np.eye(2), causal=True).observe(received=True)
    >>> seen.received.round(2), seen.entropy
    (array([1.33, 0.67]), None)
    >>> ch.AttentionMatrix(np.eye(3), np.eye(3)).cut_effects(np.eye(3), np.eye(3)).observe(by_key=True, top=2)
    Observation(queries 3, keys 3, by_key (3,), top Ranked(values (3, 2), indices (3, 2)))
    """

    output: Any = None
    largest: Any = None
    log_sum: Any = None
    max_logit: Any = None
    entropy: Any = None
    received: Any = None
    peak: Any = None
    by_key: Any = None
    by_query: Any = None
    top: Any = None  # a Top; of effects, a Ranked
    strongest: Strongest | None = None
    distance: Any = None
    diagonal: Any = None
    image: Any = None
    groups: Any = None
    queries: int = 0
    keys: int = 0

    def __repr__(self) -> str:
        result = {**self.statistics(), "logsumexp": self.largest}
        return brief("Observation", {"queries": self.queries, "keys": self.keys, **result})

    @property
    def logsumexp(self) -> Any:
        """The sum of `largest` and `log_sum`."""
        return None if self.largest is None else self.largest + self.log_sum

    @property
    def state(self) -> State | None:
        """`largest` and `log_sum` as a State, or None."""
        return None if self.largest is None else State(self.largest, self.log_sum)

    def statistics(self) -> dict[str, Any]:
        """All statistics by name, None for those not requested; the log-sum-exp as a State."""
        return {name: self.state if name == "logsumexp" else getattr(self, name) for name in STATISTICS}

    def heads(self, chosen: int | slice | Sequence[int]) -> "Observation":
        """Return the result for some heads: an integer, which drops the heads axis, a slice or a list of indices.

        The heads axis is the last but one of statistics per query or key, (…, heads, queries), and the last but two of
        output, top, image and groups. Raises IndexError when there is no such head, or no heads axis.

        >>> import numpy as np, clearhead as ch
        >>> seen = ch.AttentionMatrix(np.ones((2, 3, 4)), np.ones((2, 3, 4))).observe(logsumexp=True, top=1)
        >>> seen.heads(1).logsumexp.shape, seen.heads([1]).top.weights.shape
        ((3,), (1, 3, 1))
        """
        result = {name: x for name, x in self.statistics().items() if x is not None}
        for name, value in result.items():  # the heads lead in each statistic's axes
            place = (Ellipsis, chosen, *(slice(None),) * (len(STATISTICS[name].axes) - 1))
            several = isinstance(value, tuple)
            result[name] = type(value)(*(x[place] for x in value)) if several else value[place]
        return observation(result, self.queries, self.keys)


def observation(result: dict[str, Any], queries: int, keys: int, *, of: Matrix = "weights") -> Observation:
    """An Observation from statistics, or an engine's arrays, by name."""
    state: State | None = result.pop("logsumexp", None)
    arrays = joined_arrays(result, of) | ({} if state is None else state._asdict())
    return Observation(**arrays, queries=queries, keys=keys)
