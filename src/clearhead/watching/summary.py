"""One line for each head: what it looks at, in five numbers."""

from typing import Any, NamedTuple

import numpy as np

from clearhead.arrays import read
from clearhead.axes import Array
from clearhead.matrix import AttentionMatrix
from clearhead.watching.layers import Layer


class Head(NamedTuple):
    """Means over the batch's queries that are not padding; nan where it cannot be said."""

    layer: str
    head: int
    sink: float  # weight on the first key that is not padding
    previous: float  # weight on the key before the query's own; queries that have one
    own: float  # weight on the query's own key
    distance: float  # Σ_j a_ij·|i - j|
    entropy: float  # in nats


class Summary(list[Head]):
    """Every head that was seen; `str` makes a table of at most 80 columns."""

    def __str__(self) -> str:
        width = min(max((len(line.layer) for line in self), default=5), 24)
        table = [f"{'layer':<{width}} head   sink  previous    own   distance  entropy"]
        for line in self:
            name = line.layer if len(line.layer) <= width else "…" + line.layer[1 - width :]
            shares = f"{_share(line.sink):>6} {_share(line.previous):>9} {_share(line.own):>6}"
            table.append(
                f"{name:<{width}} {line.head:>4} {shares} {_number(line.distance):>10} {_number(line.entropy):>8}"
            )
        return "\n".join(table)


def heads_of(layer: Layer) -> list[Head]:
    """A line for each head of a layer."""
    observed = layer.observation
    shape = read(observed.logsumexp, "logsumexp")[0].shape
    padding = np.zeros((shape[0], shape[2]), bool) if layer.padding is None else read(layer.padding, "padding")[0]
    distance, entropy = observed.distance, observed.entropy
    sink = previous = own = None
    if layer.q is not None:
        matrix = layer.matrix()
        if distance is None or entropy is None:
            more = matrix.observe(distance=True, entropy=True)
            distance, entropy = more.distance, more.entropy
        sink = np.stack([
            read(matrix[b, :, :, _first(layer, b)], "weights")[0] for b in range(shape[0])
        ])  # fmt: skip
        if not layer.cross:
            near, own = (_within(layer, left) for left in (1, 0))
            previous = near - own
    if layer.cross:
        distance = None
    real = ~padding
    behind = real & (np.cumsum(real, -1) > 1)
    columns_by_query = ((sink, real), (previous, behind), (own, real), (distance, real), (entropy, real))
    means = [_mean(values, which, len(layer.heads)) for values, which in columns_by_query]
    return [Head(layer.name, head, *(mean[at] for mean in means)) for at, head in enumerate(layer.heads)]


def _first(layer: Layer, batch: int) -> int:
    """The first key that is not padding."""
    mask = layer.rules.get("mask")
    if mask is None:
        return 0
    seen = read(mask, "mask")[0][min(batch, len(mask) - 1), 0].any(0)
    return int(seen.argmax())


def _within(layer: Layer, left: int) -> Array:
    """Each query's weight on its own key and the `left` before it, (batch, heads, queries): exp(L within - L)."""
    before, _ = layer.rules.get("window") or (None, None)
    window = (left if before is None else min(left, before), 0)
    rules: dict[str, Any] = {**layer.rules, "window": window, "sinks": None}
    near, _ = read(AttentionMatrix(layer.q, layer.k, **rules).logsumexp(), "logsumexp")
    whole, _ = read(layer.observation.logsumexp, "logsumexp")
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(near), 0.0, np.exp(near.astype(np.float64) - whole))


def _mean(values: Any, which: Array, heads: int) -> list[float]:
    """The mean over the batch's queries that count, one for each head."""
    if values is None or not which.any():
        return [np.nan] * heads
    found = read(values, "values")[0].astype(np.float64)
    return [float(x) for x in np.where(which[:, None], found, 0.0).sum((0, 2)) / which.sum()]


def _share(x: float) -> str:
    return "-" if np.isnan(x) else f"{x:.3f}"


def _number(x: float) -> str:
    return "-" if np.isnan(x) else f"{x:.2f}"
