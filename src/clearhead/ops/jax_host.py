"""How a function of NumPy arrays takes part in what JAX traces: called on the host, mapped, compiled.

`jax.pure_callback` turns its arguments into arrays of JAX's own within the callback, by copies that wait for a thread
of the pool whose threads run callbacks: on one processor it can wait for ever. Here the function gets what XLA hands
over, NumPy arrays, and nothing in the callback waits for JAX. Outside of jax.jit no argument is copied.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from clearhead.core.axes import Array
from clearhead.errors import DerivativeError, EngineError

Function = Callable[..., Sequence[Array]]
Kind = tuple[tuple[int, ...], Any]  # an array's shape and dtype


def call(function: Function, results: Sequence[Kind], *arrays: Any) -> list[Any]:
    """Call `function` with NumPy arrays, now or when the compiled program runs; jax.vmap calls it once per element.

    function  of as many arrays as are given, which it must neither keep nor write to
    results   the shape and dtype of each array that it returns

    Differentiating the call raises DerivativeError; compiling it for another device than the CPU raises EngineError.
    """
    kinds = tuple(ShapedArray(shape, jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in results)
    return list(_host.bind(*arrays, function=function, results=kinds))


def _returned(function: Function, results: Sequence[ShapedArray], arrays: Sequence[Array]) -> tuple[Array, ...]:
    found = function(*arrays)
    return tuple(np.asarray(x, one.dtype, order="C") for x, one in zip(found, results, strict=True))


def _now(*arrays: Any, function: Function, results: Sequence[ShapedArray]) -> list[Any]:
    """Outside of jax.jit: JAX's arrays are read, and the results become JAX's, without a copy."""
    _check_platforms({device.platform for x in arrays if isinstance(x, jax.Array) for device in x.devices()})
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return [jnp.asarray(x) for x in _returned(function, results, [np.asarray(x) for x in arrays])]


def _compiled(ctx: Any, *values: Any, function: Function, results: Sequence[ShapedArray]) -> Any:
    _check_platforms(ctx.module_context.platforms)

    def run(*arrays: Any) -> tuple[Array, ...]:
        return _returned(function, results, [np.asarray(x) for x in arrays])

    return mlir.emit_python_callback(ctx, run, None, list(values), ctx.avals_in, ctx.avals_out, has_side_effect=False)[
        0
    ]


def _check_platforms(platforms: Any) -> None:
    others = sorted({*platforms} - {"cpu"})
    if others:
        raise EngineError(
            f"clearhead.jax computes on the CPU, and this call is for {', '.join(others)}.",
            'jax.device_put(x, jax.devices("cpu")[0]) for each array, or JAX_PLATFORMS=cpu.',
        )


def _mapped(arrays: Sequence[Any], axes: Sequence[int | None], *, function: Function, results: Any) -> Any:
    """jax.vmap's rule: one call per element of the mapped axis; what is not mapped is shared, not copied."""
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]

    def each(*given: Array) -> list[Array]:
        found = [np.empty((size, *one.shape), one.dtype) for one in results]
        for at in range(size):
            answers = function(*(x if axis is None else x[at] for x, axis in zip(given, axes, strict=True)))
            for whole, part in zip(found, answers, strict=True):
                whole[at] = part
        return found

    kinds = tuple(ShapedArray((size, *one.shape), one.dtype) for one in results)
    return _host.bind(*moved, function=each, results=kinds), [0] * len(kinds)


def _refuse_second(*_: Any, **__: Any) -> NoReturn:
    raise DerivativeError(
        "attention has no second derivative here, and its gradient was differentiated again "
        "(jax.hessian, jax.grad of jax.grad, a gradient penalty).",
        "jax.nn.dot_product_attention has one; its axes are (batch, length, heads, d).",
    )


def _refuse_forward(*_: Any, **__: Any) -> NoReturn:
    raise DerivativeError(
        "an argument carries a tangent (jax.jvp, jax.jacfwd, jax.linearize): attention has no forward-mode derivative "
        "here.",
        "reverse mode has one: jax.grad, jax.vjp, jax.jacrev.",
    )


@jax.custom_jvp
def reverse_only(x: Any) -> Any:
    """Return x; its derivative in forward mode raises DerivativeError."""
    return x


@reverse_only.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], _tangent.bind(tangents[0])


_host: Any = Primitive("clearhead")
_host.multiple_results = True
_host.def_impl(_now)
_host.def_abstract_eval(lambda *_, results, **__: results)
batching.primitive_batchers[_host] = _mapped
mlir.register_lowering(_host, _compiled)
ad.primitive_jvps[_host] = _refuse_second

_tangent: Any = Primitive("clearhead_tangent")  # the identity; reverse mode transposes it and never computes it
_tangent.def_impl(_refuse_forward)
_tangent.def_abstract_eval(lambda x: x)
batching.primitive_batchers[_tangent] = lambda arrays, axes: (_tangent.bind(*arrays), axes[0])
mlir.register_lowering(_tangent, _refuse_forward)
ad.primitive_jvps[_tangent] = _refuse_forward
ad.primitive_transposes[_tangent] = lambda cotangent, _: [cotangent]
