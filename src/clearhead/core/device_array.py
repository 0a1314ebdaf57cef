"""Arrays in a GPU's memory: a PyTorch tensor with the part of NumPy's interface that the core uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch


class DeviceArray:
    """A tensor in a GPU's memory; engines for that GPU use its `tensor`, all others refuse it.

    One that wraps a tensor in the CPU's memory is for Triton's interpreter; its device is then "interpreter".
    """

    __array_ufunc__ = None  # NumPy must not compute with it: arithmetic belongs in kernels
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def device(self) -> str:
        name = str(self.tensor.device)
        return "interpreter" if name == "cpu" else name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def size(self) -> int:
        return self.tensor.numel()

    @property
    def dtype(self) -> np.dtype[Any]:
        name = str(self.tensor.dtype).removeprefix("torch.")
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> DeviceArray:
        """Basic indexing, and integer arrays; a negative step copies, since PyTorch has no negative strides."""
        parts = key if isinstance(key, tuple) else (key,)
        if Ellipsis in [part for part in parts if part is Ellipsis]:
            place = next(place for place, part in enumerate(parts) if part is Ellipsis)
            count = sum(part is not None for part in parts) - 1
            parts = (*parts[:place], *[slice(None)] * (self.ndim - count), *parts[place + 1 :])
        tensor, axis = self.tensor, 0
        plain: list[Any] = []
        for part in parts:
            if isinstance(part, slice) and part.step is not None and part.step < 0:
                chosen = range(tensor.shape[axis])[part]
                tensor = tensor.flip(axis)
                last = tensor.shape[axis] - 1
                part = slice(last - chosen[0], last - chosen[-1] + 1, -chosen.step) if chosen else slice(0, 0)
            elif isinstance(part, np.ndarray):
                part = self._places(part)
            plain.append(part)
            axis += part is not None
        return DeviceArray(tensor[tuple(plain)])

    def __add__(self, other: DeviceArray) -> DeviceArray:
        return DeviceArray(self.tensor + other.tensor)

    def reshape(self, *shape: Any) -> DeviceArray:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return DeviceArray(self.tensor.reshape(sizes))

    def swapaxes(self, first: int, second: int) -> DeviceArray:
        return DeviceArray(self.tensor.transpose(first, second))

    def copy(self) -> DeviceArray:
        return DeviceArray(self.tensor.clone())

    def astype(self, dtype: Any, *, copy: bool = True) -> DeviceArray:
        import torch

        return DeviceArray(self.tensor.to(getattr(torch, np.dtype(dtype).name), copy=copy))

    def _places(self, places: Any) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(places)).to(self.tensor.device)
