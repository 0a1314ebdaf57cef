"""What is kept of each row's softmax: its largest logit, and the logarithm of the sum of what remains."""

from typing import NamedTuple

from clearhead.core.axes import Array


class State(NamedTuple):
    """A row's largest logit m, its sink's included, and l = ln Σ_j exp(s_ij - m), with the sink's term.

    Each (batch, heads, queries) in the statistics' dtype; -inf and 0 for a row that sees nothing. Every weight is
    exp((s_ij - m) - l), which keeps its digits where m is so large that m + l would lose those of l.
    """

    largest: Array
    log_sum: Array

    @property
    def logsumexp(self) -> Array:
        """M + l: -inf for a row that sees nothing."""
        return self.largest + self.log_sum
