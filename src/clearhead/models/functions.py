"""The functions between the linear maps of a decoder, each with its derivative, and rotary positions.

They compute in the dtype of what they are given. Rotary positions (Su et al. 2021) turn pairs half the rotated width
apart, (x_i, x_{i + dims/2}), as in safetensors; GGUF's pairs of neighbours are put in this order when a file is read.
"""

from collections.abc import Callable, Mapping
from math import erf, log, pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array, blocks

CACHED = 128  # tokens whose numbers stay in a core's cache from one operation to the next
_TANH = sqrt(2 / pi), 0.044715  # of GELU's approximation


class NormWeights(NamedTuple):
    """A norm over the last axis: layer norm (Ba et al. 2016), or the root mean square alone (Zhang, Sennrich 2019).

    weight and bias are (d,); centred says whether the mean is subtracted; epsilon is added to the mean square.
    """

    weight: Array
    bias: Array | None
    centred: bool
    epsilon: float

    def value(self, x: Array) -> Array:
        """weight·(x − mean)/σ + bias, (…, d)."""
        y = self.standardised(x)[0]
        y *= self.weight
        if self.bias is not None:
            y += self.bias
        return y

    def backward(self, x: Array, upstream: Array) -> Array:
        """The derivative by x, (…, d), from that by value(x).

        With y = (x − mean)/σ and u = upstream·weight it is (u − mean(u) − y·mean(u·y))/σ; a norm that leaves the mean
        in has no mean(u).
        """
        y, deviation = self.standardised(x)
        u = upstream * self.weight
        along = u - y * (u * y).mean(axis=-1, keepdims=True)
        return np.asarray((along - u.mean(axis=-1, keepdims=True) if self.centred else along) / deviation)

    def standardised(self, x: Array) -> tuple[Array, Array]:
        """(x − mean)/σ and σ, (…, 1)."""
        rest = x - x.mean(axis=-1, keepdims=True) if self.centred else x
        deviation = np.sqrt(np.einsum("...d,...d->...", rest, rest)[..., None] / rest.shape[-1] + self.epsilon)
        deviation = deviation.astype(x.dtype, copy=False)
        return rest / deviation, deviation


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(_TANH[0] * (x + _TANH[1] * (x * x * x))))


def _gelu_tanh_slope(x: Array) -> Array:
    t = np.tanh(_TANH[0] * (x + _TANH[1] * (x * x * x)))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _TANH[0] * (1 + 3 * _TANH[1] * (x * x))


def _normal_share(x: Array) -> Array:
    """The normal distribution's share below x, in float64."""
    exact = np.frompyfunc(lambda value: 0.5 * (1 + erf(value / sqrt(2))), 1, 1)
    return np.asarray(exact(x.astype(np.float64)), dtype=np.float64)


def _gelu_slope(x: Array) -> Array:
    exact = x.astype(np.float64)
    return (_normal_share(x) + exact * np.exp(-0.5 * exact**2) / sqrt(2 * pi)).astype(x.dtype)


def _silu(x: Array) -> Array:
    y = np.negative(x)  # one array for every step: at thousands of tokens, new ones cost more than the arithmetic
    np.exp(y, out=y)
    y += 1
    return np.divide(x, y, out=y)


def _silu_slope(x: Array) -> Array:
    share = 1 / (1 + np.exp(-x))
    return share * (1 + x * (1 - share))


# Each activation function and its slope, of one array, element by element.
ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "gelu_new": (_gelu_tanh, _gelu_tanh_slope),
    "gelu_pytorch_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "gelu": (lambda x: (x * _normal_share(x)).astype(x.dtype), _gelu_slope),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(x.dtype)),
    "silu": (_silu, _silu_slope),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
}


class Rope(NamedTuple):
    """Pair i turns by position·rates[i]; the rotated part is multiplied by `magnitude`.

    long, original   the rates for texts of more than `original` tokens, where they are others (Phi-3)
    """

    rates: Array  # (dims/2,), float32
    magnitude: float = 1.0
    long: Array | None = None
    original: int = 0

    def angles(self, places: Array) -> tuple[Array, Array]:
        """Cosine and sine of these positions, each (tokens, dims/2), times the magnitude."""
        rates = self.rates if self.long is None or places.max(initial=0) < self.original else self.long
        angles = places.astype(np.float32)[:, None] * rates
        return np.cos(angles) * self.magnitude, np.sin(angles) * self.magnitude


def turned(x: Array, angles: tuple[Array, Array]) -> Array:
    """X (…, tokens, d_k) with its pairs turned; what is beyond the rotated width stays."""
    half = angles[0].shape[-1]
    made = np.empty(x.shape, np.result_type(x, *angles))
    for block in blocks(x.shape[-2], CACHED):
        cos, sin = (angle[block] for angle in angles)
        first, second = x[..., block, :half], x[..., block, half : 2 * half]
        parts = first * cos - second * sin, second * cos + first * sin, x[..., block, 2 * half :]
        np.concatenate(parts, axis=-1, out=made[..., block, :])
    return made


def plain_rates(base: float, dims: int) -> Array:
    """base^(−2i/dims) for i below dims/2, in float32 as PyTorch computes them."""
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    return np.asarray(1 / np.power(np.float32(base), exponents), np.float32)


def llama3_rates(rates: Array, factor: float, low: float, high: float, original: float) -> Array:
    """Llama 3's: slow pairs are `factor` times slower, fast ones stay, those between are mixed.

    Source: Llama 3.1's `apply_scaling` (Dubey et al. 2024); low and high are numbers of turns in `original` positions.
    """
    turns = original * rates / np.float32(2 * pi)
    share = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - share) * rates / np.float32(factor) + share * rates


def of_parameters(parameters: Mapping[str, Any], base: float, dims: int, positions: int) -> Rope | str:
    """The rotary positions that config.json asks for; the kind's name where this code does not know it.

    parameters   rope_scaling or rope_parameters; numbers are checked by their use, KeyError and TypeError mean that one
                 is missing or is no number
    """
    rates = plain_rates(base, dims)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return Rope(rates)
    if kind == "linear":
        return Rope(rates / np.float32(parameters["factor"]))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return Rope(llama3_rates(rates, *(float(parameters[name]) for name in names)))
    if kind == "factors":  # one for each pair, in a GGUF file
        return Rope(rates / _factors(rates, parameters["factors"]))
    if kind == "longrope":
        short, long = (_factors(rates, parameters[f"{name}_factor"]) for name in ("short", "long"))
        original = int(parameters["original_max_position_embeddings"])
        stated, stretch = parameters.get("attention_factor"), positions / original
        if stated is None:  # LongRoPE (Ding et al. 2024)
            stated = sqrt(1 + log(stretch) / log(original)) if stretch > 1 else 1.0
        return Rope(rates / short, float(stated), rates / long, original)
    return str(kind)


def _factors(rates: Array, stated: Any) -> Array:
    """One factor for each rotated pair. Raises ValueError for another number of them, and where one is 0 or NaN."""
    factors = np.asarray(stated, np.float32).reshape(rates.shape)
    if not (np.isfinite(factors).all() and factors.all()):
        raise ValueError("a factor is 0, NaN or infinity")
    return factors
