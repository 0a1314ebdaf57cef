"""Rotary positions (Su et al. 2021), in halves as Llama has them: pairs (x_i, x_{i + d/2}) turn with their position."""

from typing import Any

import torch
from torch import Tensor

_BLOCK = 64  # positions whose turns decoding computes at a time


class Turns:
    """The angles position·base^(-2i/d_k), as cosine and signed sine: x_i becomes x_i·cos - x_{i + d/2}·sin.

    The rates are computed in each dtype by itself, since float32's are Llama's only where they are rounded as there.
    """

    def __init__(self, d_k: int, base: float) -> None:
        self._rates = {dtype: _rates(d_k, base, dtype) for dtype in (torch.float32, torch.float64)}
        self._block: tuple[int, torch.dtype | None, Tensor] = -1, None, torch.empty(0)

    def of(self, start: Any, x: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine for x (batch, heads, length, d_k), which they broadcast to.

        start     the first position, a number or one for each sequence, (batch,)
        length    how many positions; default as many as x has
        """
        rates = self._rates[torch.float64 if x.dtype == torch.float64 else torch.float32].to(x.device)
        if not isinstance(start, int):
            start = torch.as_tensor(start, device=x.device).reshape(-1, 1, 1, 1)
        angles = (start + torch.arange(length or x.shape[-2], device=x.device)[:, None]) * rates
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def of_one(self, position: int, x: Tensor) -> Tensor:
        """The same for one position, (2, d_k): decoding asks for them one after the other."""
        first = position // _BLOCK * _BLOCK
        known, dtype, block = self._block
        if known != first or dtype != x.dtype or block.device != x.device:
            block = torch.stack(self.of(first, x, _BLOCK), dim=1)
            self._block = first, x.dtype, block
        return block[position - first]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x (batch, heads, length, d_k) by what `Turns.of` says; the bits are those of Llama's."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def _rates(d_k: int, base: float, dtype: torch.dtype) -> Tensor:
    """By how much one position turns each number, (d_k,); negative in the first half, for the sine's sign."""
    rates = 1 / base ** (torch.arange(d_k // 2, dtype=dtype, device="cpu") / (d_k // 2))
    return torch.cat([-rates, rates])
