"""The functions between the linear maps of a decoder, each with its derivative, in the dtype of what they are given."""

from collections.abc import Callable
from math import erf, pi, sqrt
from typing import NamedTuple

import numpy as np

from clearhead.core.axes import Array

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
