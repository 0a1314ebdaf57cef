"""Attention's derivatives in JAX: two primitives, and the rules of JAX's transformations for each.

    call         its tangents are a derivative of it (jax_call.py), which is linear in the inputs' tangents
    derivative   its transpose is a derivative of the same call; a gradient's tangents are such derivatives too

Forward mode evaluates what the first rule makes, reverse mode transposes it. jax.vmap makes one call of the mapped
axis, as one more batch axis, whose arrays are shared where they are not mapped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from clearhead import engines
from clearhead.errors import DerivativeError, RuleError
from clearhead.ops import backward, jax_host
from clearhead.ops.jax_call import Derivative, Traced, answers, axes_of, derivative
from clearhead.ops.jax_host import Kind

Values = dict[str, Any]


def called(call: Traced, arrays: Sequence[Any]) -> Values:
    """The arrays that answer what is wanted, by name."""
    return dict(zip(call.arrays(), _call.bind(*arrays, call=call), strict=True)) if call.want.names() else {}


def _along(
    call: Traced,
    inputs: Values,
    known: Values,
    *,
    by: Values,
    along: Values,
    changing: Values,
    asked: Mapping[str, Kind],
    moved: Sequence[str],
) -> Values:
    """What a derivative answers, by name; what is missing is zero."""
    asked = dict(asked) if (by and along) or changing else {}
    moved = tuple(moved) if along else ()
    by, changing = (by if asked and along else {}), (changing if asked else {})
    if not asked and not moved:
        return {}
    form = Derivative(call, tuple(known), tuple(by), tuple(along), tuple(changing), asked, moved)
    parts = (x for side in (inputs, known, by, along, changing) for x in side.values())
    return dict(zip([*asked, *moved], _derivative.bind(*parts, form=form), strict=True))


def _moving(names: Sequence[str], tangents: Sequence[Any]) -> Values:
    """The tangents that are not zero."""
    return {name: x for name, x in zip(names, tangents, strict=True) if not _is_zero(x)}


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0


def _is_linear(x: Any) -> bool:
    """Does the map have to be transposed by this argument?"""
    return isinstance(x, ad.UndefinedPrimal)


def _kinds(arrays: Values) -> dict[str, Kind]:
    return {name: (x.shape, x.dtype) for name, x in arrays.items()}


def _or_zero(x: Any, like: Any) -> Any:
    return ad.Zero(jax.typeof(like).to_tangent_aval()) if x is None else x


def _call_jvp(arrays: Sequence[Any], tangents: Sequence[Any], *, call: Traced) -> tuple[Any, Any]:
    moving = _moving(call.names, tangents)
    if "alibi_slopes" in moving:
        raise RuleError(
            "alibi_slopes is differentiated, and has no derivative here.",
            "jax.lax.stop_gradient(alibi_slopes), or put them in `bias`.",
        )
    engines.choose_for("gradients", call.problem, call.engine)
    wide = replace(call, want=replace(call.want, logsumexp=True))
    answers = called(wide, arrays)
    known = {name: x for name, x in answers.items() if name in backward.READS}
    smooth = [name for name in call.arrays() if jnp.issubdtype(answers[name].dtype, jnp.inexact)]
    inputs = dict(zip(call.names, arrays, strict=True))
    moved = _along(wide, inputs, known, by={}, along=moving, changing={}, asked={}, moved=smooth)
    results = [answers[name] for name in call.arrays()]
    return results, [_or_zero(moved.get(name), x) for name, x in zip(call.arrays(), results, strict=True)]


def _derivative_jvp(arrays: Sequence[Any], tangents: Sequence[Any], *, form: Derivative) -> tuple[Any, Any]:
    """The map's tangent: the map of its tangents, and of the same arguments as the inputs move."""
    primal, known, by, along, changing = form.split(arrays)
    parts = [_moving([*names], [*side.values()]) for names, side in zip(
        (primal, known, by, along, changing), form.split(tangents), strict=True
    )]  # fmt: skip
    inputs, _, by_moved, along_moved, changing_moved = parts  # known results move as the inputs do
    if by_moved or (inputs and (by or form.moved)):
        raise DerivativeError(
            "attention has no such derivative in JAX: a tangent (jax.jvp, jax.jacfwd) or a second derivative of it was "
            "differentiated again.",
            "jax.jvp of jax.grad, jax.grad of jax.grad and jax.hessian are there. jax.nn.dot_product_attention has "
            "derivatives of every order; its axes are (batch, length, heads, d).",
        )
    results = _derivative.bind(*arrays, form=form)
    sides = {"by": changing, "along": inputs} if inputs else {"by": by, "along": along_moved}
    moved = _along(form.call, primal, known, **sides, changing=changing_moved, asked=form.asked, moved=form.moved)
    names = [*form.asked, *form.moved]
    return results, [_or_zero(moved.get(name), like) for name, like in zip(names, results, strict=True)]


def _derivative_transpose(upstream: Sequence[Any], *arrays: Any, form: Derivative) -> list[Any]:
    inputs, known, by, along, changing = form.split(arrays)
    back = _moving([*form.asked, *form.moved], upstream)
    linear, changed = ({name: x.aval for name, x in side.items() if _is_linear(x)} for side in (along, changing))
    result = _along(
        form.call,
        inputs,
        known,
        by=by,
        along={name: x for name, x in back.items() if name in form.asked},
        changing={name: x for name, x in back.items() if name not in form.asked},
        asked={name: (aval.shape, aval.dtype) for name, aval in linear.items()},
        moved=[*changed],
    )
    return [None] * (len(inputs) + len(known) + len(by)) + [
        result.get(name, ad.Zero(x.aval)) if _is_linear(x) else None for name, x in (*along.items(), *changing.items())
    ]


def _call_mapped(arrays: Sequence[Any], axes: Sequence[Any], *, call: Traced) -> tuple[Any, Any]:
    size = _size(arrays, axes)
    if _per_head(call.names, axes):
        return _one_by_one(partial(_call.bind, call=call), arrays, axes)
    each = zip(call.names, arrays, axes, strict=True)
    wide = {name: _wide(x, axis, _rank(name, call)) for name, x, axis in each}
    result = _call.bind(*wide.values(), call=call.mapped(size, _kinds(wide)))
    return result, [0] * len(result)


def _derivative_mapped(arrays: Sequence[Any], axes: Sequence[Any], *, form: Derivative) -> tuple[Any, Any]:
    size, call = _size(arrays, axes), form.call
    names = [*call.names, *form.known, *form.by, *form.along, *form.changing]
    if _per_head(names, axes) or "sinks" in form.asked:
        return _one_by_one(partial(_derivative.bind, form=form), arrays, axes)
    wide = [_wide(x, axis, _rank(name, call)) for name, x, axis in zip(names, arrays, axes, strict=True)]
    count = len(call.names)
    asked = {name: ((size, *shape), dtype) for name, (shape, dtype) in form.asked.items()}
    whole = call.mapped(size, _kinds(dict(zip(call.names, wide[:count], strict=True))))
    result = _derivative.bind(*wide, form=replace(form, call=whole, asked=asked))
    return result, [0] * len(result)


def _size(arrays: Sequence[Any], axes: Sequence[Any]) -> int:
    return next(int(x.shape[axis]) for x, axis in zip(arrays, axes, strict=True) if axis is not None)


def _per_head(names: Sequence[str], axes: Sequence[Any]) -> bool:
    """Is a rule mapped that has a number for each head, and none for each batch entry?"""
    return any(axis is not None and axes_of(name) == ("heads",) for name, axis in zip(names, axes, strict=True))


def _rank(name: str, call: Traced) -> int | None:
    """How many axes an array needs so that one more in front can be told from them; None where it has them all."""
    axes = axes_of(name)
    if axes == ("heads",):
        return -1
    return len(call.batch) + len(axes) - 1 if axes else None


def _wide(x: Any, axis: int | None, rank: int | None) -> Any:
    """An array with the mapped axis in front, of size 1 where all calls share it, and all axes of one call."""
    if rank == -1:
        return x
    lead = jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0)
    return lead if rank is None else lead.reshape(lead.shape[0], *(1,) * (rank + 1 - lead.ndim), *lead.shape[1:])


def _one_by_one(bind: Callable[..., Any], arrays: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    """One call for each element of the mapped axis."""

    def one(mapped: Sequence[Any]) -> Any:
        rest = iter(mapped)
        return bind(*(x if axis is None else next(rest) for x, axis in zip(arrays, axes, strict=True)))

    moved = [jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True) if axis is not None]
    result = jax.lax.map(one, moved)
    return result, [0] * len(result)


def _on_host_call(*arrays: Any, call: Traced) -> list[Any]:
    return jax_host.call(partial(answers, call), [*call.kinds().values()], *arrays)


def _on_host_derivative(*arrays: Any, form: Derivative) -> list[Any]:
    form.check()
    return jax_host.call(partial(derivative, form), form.kinds(), *arrays)


def _shaped(kinds: Sequence[Kind]) -> list[ShapedArray]:
    return [ShapedArray(shape, jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in kinds]


def _primitive(name: str, evaluate: Callable[..., Any], kinds: Callable[..., Sequence[Kind]], **rules: Any) -> Any:
    """A primitive of JAX's that is computed by `evaluate`; its other rules are for jvp, transpose and mapped."""
    made: Any = Primitive(name)
    made.multiple_results = True
    made.def_impl(evaluate)
    made.def_abstract_eval(lambda *_, **params: _shaped(kinds(**params)))
    mlir.register_lowering(made, mlir.lower_fun(evaluate, multiple_results=True))
    ad.primitive_jvps[made] = rules["jvp"]
    batching.primitive_batchers[made] = rules["mapped"]
    if "transpose" in rules:
        ad.primitive_transposes[made] = rules["transpose"]
    return made


_call = _primitive(
    "clearhead", _on_host_call, lambda call: [*call.kinds().values()], jvp=_call_jvp, mapped=_call_mapped
)
_derivative = _primitive(
    "clearhead_derivative",
    _on_host_derivative,
    lambda form: form.kinds(),
    jvp=_derivative_jvp,
    mapped=_derivative_mapped,
    transpose=_derivative_transpose,
)
