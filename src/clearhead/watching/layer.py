"""Layer: one layer of a watched model."""

from dataclasses import dataclass
from typing import Any

from clearhead.errors import RuleError
from clearhead.ops.matrix import AttentionMatrix, with_state
from clearhead.ops.observation import Observation


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's attention: its statistics, and the arrays and rules of its matrix."""

    name: str
    path: str  # the module's own name in the model
    observation: Observation
    rules: dict[str, Any]
    q: Any  # (batch, heads, queries, d_k)
    k: Any  # (batch, kv_heads, keys, d_k)
    v: Any  # (batch, kv_heads, keys, d_v)
    call: int = 1  # the number of this call of the module in one forward pass, from 1 up
    cross: bool = False
    padding: Any = None  # (batch, queries), True where a query is padding; or None
    note: str = ""  # why a mask is stored in full, or ""
    other_keys: int = 0  # merged attention: how many of the last keys are an encoder's, not the sequence's own
    derivative: Any = None  # a function that returns g or raises; None without causes=True

    def __repr__(self) -> str:
        arrays = {"q": self.q, "k": self.k, "v": self.v, "padding": self.padding}
        said = [f"{name} {_shown(value)}" for name, value in arrays.items() if value is not None]
        said += [f"{name}={_shown(value)}" for name, value in self.rules.items()]
        who = f"{self.path}{f', call {self.call}' if self.call > 1 else ''}{', cross' if self.cross else ''}"
        note = f"; {self.note}" if self.note else ""
        return f"Layer({self.name}: {who}; {self.observation}; {', '.join(said)}{note})"

    @property
    def g(self) -> Any:
        """The gradient that backward() brought to each head's output, before W_O: (batch, heads, queries, d_v).

        In the model's dtype; added up over backward passes like PyTorch's `.grad`, and 0 where the number does not
        depend on an output. Raises RuleError if `watch` had no causes=True, or no backward pass has run.
        """
        if self.derivative is None:
            raise RuleError(f"layer {self.name} was watched without gradients.", "ch.watch(model, causes=True)")
        return self.derivative()

    def matrix(self) -> AttentionMatrix:
        """The attention matrix, (batch, heads, queries, keys)."""
        state = self.observation.state
        assert state is not None  # watch observes it in every layer
        return with_state(AttentionMatrix(self.q, self.k, **self.rules), state)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"{tuple(value.shape)} {value.dtype}" if hasattr(value, "shape") else repr(value)
