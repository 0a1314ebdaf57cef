"""What a decoder is, as data: its sizes and the choices in which families differ."""

from typing import Any, NamedTuple

from clearhead.models.rope import Rope


class Config(NamedTuple):
    """The numbers and choices that the computation needs; which biases and norms there are, the weights say.

    windows         of each layer how many keys a query sees, itself included; None: all before it
    scales          of each layer what q·k is multiplied by
    ropes           of each layer its rotary positions; None: it has none
    added_scale     what attention and MLP multiply by what they add to the residual stream
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    d_model: int
    d_k: int
    d_mlp: int
    positions: int
    vocabulary: int
    epsilon: float
    activation: str
    centred: bool  # layer norms, which subtract the mean; else the root mean square alone
    gated: bool  # is the MLP down(act(gate(x))·up(x))? else down(act(up(x)))
    tied: bool
    windows: tuple[int | None, ...]
    scales: tuple[float, ...]
    ropes: tuple[Rope | None, ...]
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    added_scale: float = 1.0
    logit_scale: float = 1.0

    def facts(self) -> dict[str, Any]:
        """What reports and --json say of it."""
        names = ("family", "layers", "heads", "kv_heads", "d_model", "d_mlp", "positions", "vocabulary", "epsilon")
        usual = self.d_k**-0.5
        scaled = {"scaled": abs(self.scales[0] - usual) < 1e-9, "scaled_by_layer": len(set(self.scales)) > 1}
        return {name: getattr(self, name) for name in (*names, "activation", "tied")} | scaled
