"""How a function of NumPy arrays takes part in what JAX traces: called on the host, now or when a program runs.

`jax.pure_callback` turns its arguments into arrays of JAX's own within the callback, by copies that wait for a thread
of the pool whose threads run callbacks: on one processor it can wait for ever. Here the function gets what XLA hands
over, NumPy arrays, and nothing in the callback waits for JAX. Outside of jax.jit no argument is copied.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from clearhead.core.axes import Array
from clearhead.errors import EngineError

Function = Callable[..., Sequence[Array]]
Kind = tuple[tuple[int, ...], Any]  # an array's shape and dtype


def now(function: Function, results: Sequence[Kind], *arrays: Any) -> list[Any]:
    """What a function answers outside of jax.jit: it reads JAX's arrays, and its results become JAX's, without a copy.

    function  of as many NumPy arrays as are given, which it must neither keep nor write to
    results   the shape and dtype of each array that it returns

    Raises EngineError for arrays on another device than the CPU.
    """
    _check_platforms({device.platform for x in arrays if isinstance(x, jax.Array) for device in x.devices()})
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return [jnp.asarray(x) for x in _returned(function, avals(results), [np.asarray(x) for x in arrays])]


def compiled(ctx: Any, function: Function, *values: Any) -> Any:
    """The same where a compiled program runs. Raises EngineError where that is for another device than the CPU."""
    _check_platforms(ctx.module_context.platforms)

    def run(*arrays: Any) -> tuple[Array, ...]:
        return _returned(function, ctx.avals_out, [np.asarray(x) for x in arrays])

    return mlir.emit_python_callback(ctx, run, None, list(values), ctx.avals_in, ctx.avals_out, has_side_effect=False)[
        0
    ]


def avals(kinds: Sequence[Kind]) -> tuple[ShapedArray, ...]:
    """What JAX knows of arrays of these shapes and dtypes while it traces."""
    return tuple(ShapedArray(shape, jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in kinds)


def _returned(function: Function, results: Sequence[ShapedArray], arrays: Sequence[Array]) -> tuple[Array, ...]:
    result = function(*arrays)
    return tuple(np.asarray(x, one.dtype, order="C") for x, one in zip(result, results, strict=True))


def _check_platforms(platforms: Any) -> None:
    others = sorted({*platforms} - {"cpu"})
    if others:
        raise EngineError(
            f"clearhead.jax computes on the CPU, and this call is for {', '.join(others)}.",
            'jax.device_put(x, jax.devices("cpu")[0]) for each array, or JAX_PLATFORMS=cpu.',
        )
