"""Calling somebody's function with the arrays that it takes, and reading what it returns."""

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np

from clearhead.core.arrays import FLOATS, as_array, on_cpu, to_torch
from clearhead.core.axes import Array, named
from clearhead.errors import DtypeError, ShapeError
from clearhead.testing.drawing import Drawn

Arrays = Literal["numpy", "torch", "jax"]
Layout = Literal["bhnd", "bnhd"]
_OUTPUT = {"bhnd": ("batch", "heads", "queries", "d_v"), "bnhd": ("batch", "queries", "heads", "d_v")}


@dataclass(frozen=True)
class Caller:
    """Somebody's function, and how it is called.

    arrays   the kind of array that it takes
    layout   the axes of q, k, v and of its result: (batch, heads, n, d) or (batch, n, heads, d)
    device   where its tensors lie
    """

    fn: Any
    arrays: Arrays
    layout: Layout
    device: str

    @property
    def name(self) -> str:
        return str(getattr(self.fn, "__name__", None) or type(self.fn).__name__)

    def converted(self, x: Any, *, swapped: bool | None = None) -> Any:
        """An array as the function takes it; swapped: q, k or v, and whether heads and tokens lie swapped in memory."""
        if isinstance(x, tuple):
            return tuple(self.converted(part) for part in x)
        if not isinstance(x, np.ndarray):
            return x
        x = np.array(x)  # a function that writes into its inputs does not change ours
        if swapped is not None and self.layout == "bnhd":
            x = x.swapaxes(1, 2)
        if self.arrays == "jax":
            return import_module("jax.numpy").asarray(x)
        if self.arrays == "torch":
            tensor = to_torch(sys.modules["torch"], np.ascontiguousarray(x)).to(self.device)
            return tensor.transpose(1, 2).contiguous().transpose(1, 2) if swapped else tensor
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if swapped else np.ascontiguousarray(x)

    def inputs(self, problem: Drawn, *, swapped: bool) -> tuple[list[Any], dict[str, Any]]:
        """q, k, v and the rules as the function takes them."""
        rules = {name: self.converted(value) for name, value in problem.rules.items()}
        return [self.converted(x, swapped=swapped) for x in problem[:3]], rules

    def output(self, problem: Drawn, *, swapped: bool) -> Array:
        """What the function returns, heads first. Raises whatever it raises, DtypeError, ShapeError."""
        inputs, rules = self.inputs(problem, swapped=swapped)
        with np.errstate(all="ignore"):  # NumPy would warn of the NaN and infinities that are given on purpose
            result = self.fn(*inputs, **rules)
        return self.read(result, problem, "the result")

    def read(self, result: Any, problem: Drawn, name: str, like: Array | None = None) -> Array:
        """An array of the function's with the axes of `like`, or of the output, heads first."""
        if hasattr(result, "detach"):
            result = result.detach()
        array: Array = on_cpu(as_array(result, name)[0])
        if array.dtype not in FLOATS:
            raise DtypeError(f"{name} is {array.dtype}: expected {problem.q.dtype}, or a wider float dtype.")
        want = (*problem.q.shape[:3], problem.v.shape[3]) if like is None else like.shape
        shape = want if self.layout == "bhnd" else (want[0], want[2], want[1], want[3])
        if array.shape != shape:
            raise ShapeError(f"{name} has shape {array.shape}: expected {named(shape, _OUTPUT[self.layout])}.")
        return array if self.layout == "bhnd" else array.swapaxes(1, 2)
