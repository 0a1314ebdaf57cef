"""Derivatives along a direction: the formulas that every engine computes, in forward mode and for second derivatives.

With s_ij the logits, a_ij the weights, and a tangent ẋ of every input x, where i may see j:

    ṡ_ij = c'_ij·scale·(q̇_i·k_j + q_i·k̇_j) + bias tangent + table tangent      c' = 1 - tanh²(scale·q_i·k_j / softcap)
    m_i  = Σ_j a_ij·ṡ_ij + a_i,sink·(sink tangent)                              the tangent of the log-sum-exp
    ȧ_ij = a_ij·(ṡ_ij - m_i)
    ȯ_i  = Σ_j ȧ_ij·v_j + a_ij·v̇_j

All sums run beside those of the output (Lu & Song 2024, arXiv 2410.11081, appendix F). A second derivative is the
tangent of the backward pass: since second derivatives are symmetric, the derivative of u·gradient by the inputs is the
gradient's tangent along u. So forward mode and one version of the backward pass are all that is needed.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from clearhead.core.axes import Array


@dataclass(frozen=True, eq=False, slots=True)
class Directions:
    """The inputs' tangents; None is zero. q, k and v have any strides and the problem's dtype."""

    q: Array | None = None  # (batch, heads, queries, d_k)
    k: Array | None = None  # (batch, kv_heads, keys, d_k)
    v: Array | None = None  # (batch, heads of v, keys, d_v)
    bias: Array | None = None  # (batch, heads, queries, keys), a broadcast view
    spans: Array | None = None  # (batch, heads, query spans, key spans), a broadcast view: of the table
    sinks: Array | None = None  # (heads,)

    @property
    def nonzero(self) -> dict[str, Any]:
        """The tangents that are not zero, by name."""
        return {field.name: x for field in fields(self) if (x := getattr(self, field.name)) is not None}

    def astype(self, dtype: Any) -> "Directions":
        """The same with q, k and v in this dtype."""
        moved = {name: x.astype(dtype, copy=False) for name, x in self.nonzero.items() if name in "qkv"}
        return replace(self, **moved)
