"""Attention's derivatives in JAX: three primitives, and the rules of JAX's transformations for each.

    call         its tangents are a derivative of it (jax_call.py), which is linear in the inputs' tangents
    derivative   its transpose is a derivative of the same call; a gradient's tangents are such derivatives too
    twice        a tangent's tangent, linear in both directions; its transpose is a derivative of the call

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
from clearhead.ops.jax_call import Derivative, Traced, answers, axes_of, derivative, second_tangents
from clearhead.ops.jax_host import Kind

Values = dict[str, Any]
_HINT = "jax.nn.dot_product_attention has derivatives of every order; its axes are (batch, length, heads, d)."


def called(call: Traced, arrays: Sequence[Any]) -> Values:
    """The arrays that answer what is wanted, by name."""
    return dict(zip(call.arrays(), _call.bind(*arrays, call=call), strict=True)) if call.want.names() else {}


def _along(
    call: Traced,
    given: Values,
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
    parts = (x for side in (given, known, by, along, changing) for x in side.values())
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
    found = called(wide, arrays)
    known = {name: x for name, x in found.items() if name in backward.READS}
    smooth = [name for name in call.arrays() if jnp.issubdtype(found[name].dtype, jnp.inexact)]
    given = dict(zip(call.names, arrays, strict=True))
    moved = _along(wide, given, known, by={}, along=moving, changing={}, asked={}, moved=smooth)
    results = [found[name] for name in call.arrays()]
    return results, [_or_zero(moved.get(name), x) for name, x in zip(call.arrays(), results, strict=True)]


def _derivative_jvp(arrays: Sequence[Any], tangents: Sequence[Any], *, form: Derivative) -> tuple[Any, Any]:
    """The map's tangent: the map of its tangents, and of the same arguments as the inputs move."""
    given, known, by, along, changing = form.split(arrays)
    parts = [_moving([*names], [*side.values()]) for names, side in zip(
        (given, known, by, along, changing), form.split(tangents), strict=True
    )]  # fmt: skip
    inputs, _, by_moved, along_moved, changing_moved = parts  # known results move as the inputs do
    if by_moved or (by and inputs):
        raise _no_third()
    results = _derivative.bind(*arrays, form=form)
    names = [*form.asked, *form.moved]
    of = partial(_along, form.call, given, known, asked=form.asked)
    if inputs and changing:  # a gradient's tangent, in one pass
        found = [of(by=changing, along=inputs, changing=changing_moved, moved=())]
        found.append(of(by={}, along=along_moved, changing={}, moved=form.moved))
    else:
        found = [of(by=by, along=along_moved, changing=changing_moved, moved=form.moved)]
    if inputs and along and form.moved:
        found.append(_along_both(form.call, given, known, along, inputs, form.moved))
    each = ([one[name] for one in found if name in one] for name in names)
    sums = [sum(terms[1:], terms[0]) if terms else None for terms in each]
    return results, [_or_zero(x, like) for x, like in zip(sums, results, strict=True)]


def _derivative_transpose(upstream: Sequence[Any], *arrays: Any, form: Derivative) -> list[Any]:
    given, known, by, along, changing = form.split(arrays)
    back = _moving([*form.asked, *form.moved], upstream)
    linear, changed = ({name: x.aval for name, x in side.items() if _is_linear(x)} for side in (along, changing))
    found = _along(
        form.call,
        given,
        known,
        by=by,
        along={name: x for name, x in back.items() if name in form.asked},
        changing={name: x for name, x in back.items() if name not in form.asked},
        asked={name: (aval.shape, aval.dtype) for name, aval in linear.items()},
        moved=[*changed],
    )
    return [None] * (len(given) + len(known) + len(by)) + [
        found.get(name, ad.Zero(x.aval)) if _is_linear(x) else None for name, x in (*along.items(), *changing.items())
    ]


def _along_both(
    call: Traced, given: Values, known: Values, along: Values, inputs: Values, moved: Sequence[str]
) -> Values:
    """The second derivatives of results along both directions, by name; reverse mode transposes by the second one."""
    form = Derivative(call, tuple(known), (), tuple(along), (), {}, tuple(moved))
    parts = (x for side in (given, known, along, inputs) for x in side.values())
    return dict(zip(moved, _twice.bind(*parts, form=form, inputs=tuple(inputs)), strict=True))


def _twice_jvp(arrays: Sequence[Any], tangents: Sequence[Any], *, form: Derivative, inputs: Sequence[str]) -> Any:
    """Linear in each of both directions; a tangent by what the call is of would be a third derivative."""
    count = len(arrays) - len(inputs)
    given, known, _, along, _ = form.split(arrays[:count])
    moving, _, _, along_moved, _ = form.split(tangents[:count])
    if _moving([*moving], [*moving.values()]):
        raise _no_third()
    second = dict(zip(inputs, arrays[count:], strict=True))
    pairs = (second, _moving([*along_moved], [*along_moved.values()])), (along, _moving(inputs, tangents[count:]))
    found = [_along_both(form.call, given, known, *pair, form.moved) for pair in pairs if pair[1]]
    results = _twice.bind(*arrays, form=form, inputs=inputs)
    each = zip(form.moved, results, strict=True)
    return results, [
        sum((one[name] for one in found[1:]), found[0][name]) if found else _or_zero(None, x) for name, x in each
    ]


def _twice_transpose(upstream: Sequence[Any], *arrays: Any, form: Derivative, inputs: Sequence[str]) -> list[Any]:
    """By the second direction: of the results' tangent along the first, which is the gradient's tangent."""
    count = len(arrays) - len(inputs)
    given, known, _, along, _ = form.split(arrays[:count])
    back = _moving(form.moved, upstream)
    avals = {name: x.aval for name, x in zip(inputs, arrays[count:], strict=True)}
    asked = {name: (aval.shape, aval.dtype) for name, aval in avals.items()}
    found = _along(form.call, given, known, by=back, along=along, changing={}, asked=asked, moved=())
    return [None] * count + [found.get(name, ad.Zero(aval)) for name, aval in avals.items()]


def _no_third(*_: Any, **__: Any) -> DerivativeError:
    return DerivativeError(
        "attention has no third derivative here, and its second was differentiated again (jax.grad of jax.hessian).",
        _HINT,
    )


def _call_mapped(arrays: Sequence[Any], axes: Sequence[Any], *, call: Traced) -> tuple[Any, Any]:
    size = _size(arrays, axes)
    if _per_head(call.names, axes):
        return _one_by_one(partial(_call.bind, call=call), arrays, axes)
    each = zip(call.names, arrays, axes, strict=True)
    wide = {name: _wide(x, axis, _rank(name, call)) for name, x, axis in each}
    found = _call.bind(*wide.values(), call=call.mapped(size, _kinds(wide)))
    return found, [0] * len(found)


def _derivative_mapped(
    arrays: Sequence[Any], axes: Sequence[Any], *, form: Derivative, bind: Callable[..., Any] | None = None, **more: Any
) -> tuple[Any, Any]:
    bind, size, call = bind or _derivative.bind, _size(arrays, axes), form.call
    inputs = more.get("inputs", ())
    own = [*call.names, *form.known, *form.by, *form.along, *form.changing, *inputs]
    if _per_head(own, axes) or "sinks" in form.asked:
        return _one_by_one(partial(bind, form=form, **more), arrays, axes)
    wide = [_wide(x, axis, _rank(name, call)) for name, x, axis in zip(own, arrays, axes, strict=True)]
    count = len(call.names)
    asked = {name: ((size, *shape), dtype) for name, (shape, dtype) in form.asked.items()}
    whole = call.mapped(size, _kinds(dict(zip(call.names, wide[:count], strict=True))))
    found = bind(*wide, form=replace(form, call=whole, asked=asked), **more)
    return found, [0] * len(found)


def _twice_mapped(arrays: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return _derivative_mapped(arrays, axes, bind=_twice.bind, **params)


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
    found = jax.lax.map(one, moved)
    return found, [0] * len(found)


def _on_host_call(*arrays: Any, call: Traced) -> list[Any]:
    return jax_host.call(partial(answers, call), [*call.kinds().values()], *arrays)


def _on_host_derivative(*arrays: Any, form: Derivative) -> list[Any]:
    form.check()
    return jax_host.call(partial(derivative, form), form.kinds(), *arrays)


def _on_host_twice(*arrays: Any, form: Derivative, inputs: Sequence[str]) -> list[Any]:
    form.check()
    engines.choose_for("second_tangents", form.call.problem, form.call.engine)
    return jax_host.call(partial(second_tangents, form, tuple(inputs)), form.kinds(), *arrays)


def _shaped(kinds: Sequence[Kind]) -> list[ShapedArray]:
    return [ShapedArray(shape, jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in kinds]


def _primitive(name: str, evaluate: Callable[..., Any], kinds: Callable[..., Sequence[Kind]], **rules: Any) -> Any:
    """A primitive of JAX's that is computed by `evaluate`; its other rules are for jvp, transpose and mapped."""
    made: Any = Primitive(name)
    made.multiple_results = True
    made.def_impl(evaluate)
    made.def_abstract_eval(lambda *_, **given: _shaped(kinds(**given)))
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
_twice = _primitive(
    "clearhead_twice",
    _on_host_twice,
    lambda form, **_: form.kinds(),
    jvp=_twice_jvp,
    mapped=_twice_mapped,
    transpose=_twice_transpose,
)
