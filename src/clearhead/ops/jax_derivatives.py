"""Attention in JAX: one primitive for calls and their derivatives (jax_call.py), and its rules for transformations.

    call         its tangents are a derivative of it, which is linear in the inputs' tangents
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
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from clearhead import engines
from clearhead.errors import DerivativeError, RuleError
from clearhead.ops import backward, jax_host
from clearhead.ops.jax_call import Derivative, Traced, axes_of
from clearhead.ops.jax_host import Kind

Values = dict[str, Any]


def called(call: Traced, arrays: Sequence[Any]) -> Values:
    """The arrays that answer what is wanted, by name."""
    return dict(zip(call.arrays(), _attention.bind(*arrays, form=call), strict=True)) if call.want.names() else {}


def _along(
    call: Traced, inputs: Values, known: Values, asked: Mapping[str, Kind], moved: Sequence[str], **sides: Values
) -> Values:
    """What a derivative answers, by name; what is missing of the sides `by`, `along` and `changing` is zero."""
    by, along, changing = (sides.get(role, {}) for role in ("by", "along", "changing"))
    asked = dict(asked) if (by and along) or changing else {}
    moved = tuple(moved) if along else ()
    by, changing = (by if asked and along else {}), (changing if asked else {})
    if not asked and not moved:
        return {}
    form = Derivative(call, tuple(known), tuple(by), tuple(along), tuple(changing), asked, moved)
    parts = (x for side in (inputs, known, by, along, changing) for x in side.values())
    return dict(zip([*asked, *moved], _attention.bind(*parts, form=form), strict=True))


def _moving(names: Sequence[str], tangents: Sequence[Any]) -> Values:
    """The tangents that are not zero."""
    each = zip(names, tangents, strict=True)
    return {name: x for name, x in each if type(x) is not ad.Zero and x.dtype != jax.dtypes.float0}


def _is_linear(x: Any) -> bool:
    """Does the map have to be transposed by this argument?"""
    return isinstance(x, ad.UndefinedPrimal)


def _or_zero(x: Any, like: Any) -> Any:
    return ad.Zero(jax.typeof(like).to_tangent_aval()) if x is None else x


def _call_jvp(arrays: Sequence[Any], tangents: Sequence[Any], call: Traced) -> tuple[Any, Any]:
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
    moved = _along(wide, inputs, known, {}, smooth, along=moving)
    results = [answers[name] for name in call.arrays()]
    return results, [_or_zero(moved.get(name), x) for name, x in zip(call.arrays(), results, strict=True)]


def _derivative_jvp(arrays: Sequence[Any], tangents: Sequence[Any], form: Derivative) -> tuple[Any, Any]:
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
    results = _attention.bind(*arrays, form=form)
    sides = {"by": changing, "along": inputs} if inputs else {"by": by, "along": along_moved}
    moved = _along(form.call, primal, known, form.asked, form.moved, **sides, changing=changing_moved)
    names = [*form.asked, *form.moved]
    return results, [_or_zero(moved.get(name), like) for name, like in zip(names, results, strict=True)]


def _derivative_transpose(upstream: Sequence[Any], *arrays: Any, form: Derivative) -> list[Any]:
    inputs, known, by, along, changing = form.split(arrays)
    back = _moving([*form.asked, *form.moved], upstream)
    linear, changed = ({name: x.aval for name, x in side.items() if _is_linear(x)} for side in (along, changing))
    asked = {name: (aval.shape, aval.dtype) for name, aval in linear.items()}
    to_asked = {name: back.pop(name) for name in form.asked if name in back}
    result = _along(form.call, inputs, known, asked, [*changed], by=by, along=to_asked, changing=back)
    return [None] * (len(inputs) + len(known) + len(by)) + [
        result.get(name, ad.Zero(x.aval)) if _is_linear(x) else None for name, x in (*along.items(), *changing.items())
    ]


def _mapped(arrays: Sequence[Any], axes: Sequence[Any], *, form: Traced | Derivative) -> tuple[Any, Any]:
    """One call of the mapped axis; one for each element where a rule with a number for each head is mapped."""
    moving = {name for name, axis in zip(form.names, axes, strict=True) if axis is not None}
    if any(axes_of(name) == ("heads",) for name in moving) or "sinks" in getattr(form, "asked", ()):
        return _one_by_one(partial(_attention.bind, form=form), arrays, axes)
    size = next(int(x.shape[axis]) for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    each = zip(form.names, arrays, axes, strict=True)
    wide = [_wide(x, axis, axes_of(name), len(form.batch)) for name, x, axis in each]
    result = _attention.bind(*wide, form=form.mapped(size, [(x.shape, x.dtype) for x in wide]))
    return result, [0] * len(result)


def _wide(x: Any, axis: int | None, rule: tuple[str, ...], lead: int) -> Any:
    """An array with the mapped axis in front, of size 1 where all calls share it, and all axes of one call.

    rule   the axes of the rule that it is a value of, () for other arrays; lead: the batch axes of one call
    """
    if rule == ("heads",):
        return x
    wide = jnp.expand_dims(x, 0) if axis is None else jnp.moveaxis(x, axis, 0)
    missing = lead + len(rule) - wide.ndim if rule else 0
    return wide.reshape(wide.shape[0], *(1,) * missing, *wide.shape[1:])


def _one_by_one(bind: Callable[..., Any], arrays: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    """One call for each element of the mapped axis."""

    def one(mapped: Sequence[Any]) -> Any:
        rest = iter(mapped)
        return bind(*(x if axis is None else next(rest) for x, axis in zip(arrays, axes, strict=True)))

    moved = [jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True) if axis is not None]
    result = jax.lax.map(one, moved)
    return result, [0] * len(result)


def _jvp(arrays: Sequence[Any], tangents: Sequence[Any], *, form: Traced | Derivative) -> tuple[Any, Any]:
    rule: Any = _call_jvp if isinstance(form, Traced) else _derivative_jvp
    return rule(arrays, tangents, form)


def _function(form: Traced | Derivative) -> jax_host.Function:
    if isinstance(form, Derivative):
        form.check()
    return form.run


_attention: Any = Primitive("clearhead")
_attention.multiple_results = True
_attention.def_impl(lambda *arrays, form: jax_host.now(_function(form), form.kinds(), *arrays))
_attention.def_abstract_eval(lambda *_, form: jax_host.avals(form.kinds()))
mlir.register_lowering(_attention, lambda ctx, *values, form: jax_host.compiled(ctx, _function(form), *values))
ad.primitive_jvps[_attention] = _jvp
ad.primitive_transposes[_attention] = _derivative_transpose
batching.primitive_batchers[_attention] = _mapped
