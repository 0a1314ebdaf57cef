"""Rotary positions (Su et al. 2021) of a decoder, and the ways in which families stretch them to longer texts.

Pairs are half the rotated width apart, (x_i, x_{i + dims/2}), as in safetensors; GGUF's pairs of neighbours are put in
this order when a file is read.
"""

from collections.abc import Mapping
from math import log, pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array, blocks
from clearhead.models.functions import CACHED


class Rope(NamedTuple):
    """Pair i turns by position·rates[i]; the rotated part is multiplied by `magnitude`.

    long, original   the rates for texts of more than `original` tokens, where they are others (Phi-3)
    """

    rates: Array  # (dims/2,), float32
    magnitude: float = 1.0
    long: Array | None = None
    original: int = 0

    def angles(self, start: int, tokens: int) -> tuple[Array, Array]:
        """Cosine and sine of the positions from `start` on, each (tokens, dims/2), times the magnitude."""
        rates = self.rates if self.long is None or start + tokens <= self.original else self.long
        angles = np.arange(start, start + tokens, dtype=np.float32)[:, None] * rates
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


def turned_back(upstream: Array, angles: tuple[Array, Array]) -> Array:
    """The derivative by x, (…, tokens, d_k), from that by turned(x): the transposed rotation."""
    return turned(upstream, (angles[0], -angles[1]))


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
