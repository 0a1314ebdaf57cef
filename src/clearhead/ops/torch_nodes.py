"""Nodes of PyTorch's graph: attention, its gradients, and the tangents of both, each the derivative of another.

                 backward                          forward mode
    VALUES       GRADIENTS                         VALUES_ALONG
    GRADIENTS    GRADIENTS_ALONG (see below)       GRADIENTS_ALONG
    VALUES_ALONG GRADIENTS, GRADIENTS_ALONG        none
    PRODUCT      VALUES and GRADIENTS              PRODUCT_ALONG

Second derivatives are symmetric, so the gradient of u·gradients by the inputs is the gradients' tangent along u; and
that is linear in u, so that u has a gradient too. A third derivative is refused. Aᵀ·g is the gradient of A·v by v, so
all its derivatives are those of A·v. `compute` calls each of these; nodes are made only where something differentiates.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.core.arrays import traced_by_fx
from clearhead.errors import DerivativeError, RuleError
from clearhead.ops import backward
from clearhead.ops.tangents import check_smooth
from clearhead.ops.torch_batching import folded, is_batched, put_together, taken_apart, unfolded
from clearhead.ops.torch_duals import Tensors, apart, may_carry, together, top_transform, unpack
from clearhead.ops.torch_functions import INPUTS, Bundle, gradients, options_of, part, parts, transposed, values
from clearhead.ops.torch_tangents import gradients_along, values_along

_TRACED = (
    "a compiler traces attention inside of torch.func.grad, vjp or jvp, or with a tangent, where its operator has no "
    "derivative; torch.compile without fullgraph=True runs that part uncompiled."
)


class Kind(NamedTuple):
    """A function of a bundle, and its derivatives.

    names      of its results, from the bundle
    function   the results, by name
    backward   (bundle, results, upstream gradients, what needs one) to gradients, by the bundle's names
    along      (bundle, results or None where unknown, tangents) to the results and their tangents
    inert      results that nothing is differentiated by: other functions' work, kept for the backward pass
    folds      can a mapped axis become one more batch axis? Else the function is called for each of its elements
    """

    names: Callable[[Bundle], Sequence[str]]
    function: Callable[[Bundle], Tensors]
    backward: Callable[[Bundle, Tensors, Tensors, set[str]], Bundle]
    along: Callable[[Bundle, Tensors | None, Tensors], tuple[Tensors, Tensors]]
    inert: tuple[str, ...] = ()
    folds: bool = True


def compute(kind: Kind, bundle: Bundle) -> Tensors:
    """The results, with nodes in PyTorch's graph where it records one, and tangents where inputs carry one."""
    if "torch._dynamo" in sys.modules:  # where it runs this part uncompiled, it would still compile single functions
        return torch.compiler.disable(_compute)(kind, bundle)  # type: ignore[no-untyped-call]
    return _compute(kind, bundle)


def _compute(kind: Kind, bundle: Bundle) -> Tensors:
    names = [name for name, x in bundle.items() if isinstance(x, Tensor)]
    if any(is_batched(bundle[name]) for name in names):
        plain, mapped = taken_apart(bundle)
        count = next(plain[name].shape[0] for name, axis in mapped.items() if axis == 0)
        return put_together(_all_at_once(kind, plain, mapped, count))
    top = top_transform()
    recorded = not top and torch.is_grad_enabled() and any(bundle[name].requires_grad for name in names)
    if may_carry(top) and not recorded:  # results and tangents in one pass
        with apart({name: bundle[name] for name in names}) as (still, moving):
            given, results = {**bundle, **still}, partial(compute, kind) if top else kind.function
            found, tangents = kind.along(given, None, moving) if moving else (results(given), {})
        return together(found, tangents)
    if not top and not recorded:
        return kind.function(bundle)
    rest = {name: x for name, x in bundle.items() if not isinstance(x, Tensor)}
    found = _Node.apply(_Rest(kind, names, rest), *(bundle[name] for name in names))  # type: ignore[no-untyped-call]
    return dict(zip(kind.names(bundle), found, strict=True))


def called_plainly(q: Tensor) -> bool:
    """Is a call with this tensor computed by these nodes, and not by an operator that a compiler sees?

    Raises DerivativeError where the operator would be seen inside torch.func's grad or jvp: it has no derivative there.
    """
    plain = type(q) in (Tensor, torch.nn.Parameter) and q.device.type != "meta"
    if plain and not torch.compiler.is_compiling() and not traced_by_fx():
        return True
    if _differentiated():
        if torch.compiler.is_compiling():  # which knows built-in errors, and then runs this part uncompiled
            raise RuntimeError(_TRACED)
        raise DerivativeError(_TRACED, "outside of make_fx and fake tensors every derivative is there.")
    return False


def _differentiated() -> bool:
    """Is this inside torch.func's grad or jvp, or may tensors carry tangents?"""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(level.key().name in ("Grad", "Jvp") for level in stack)


_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result, which loads much


class _Rest:
    """A kind, the names of a bundle's tensors, and what it holds besides; PyTorch looks into tuples and dicts."""

    def __init__(self, kind: Kind, names: list[str], others: Bundle) -> None:
        self.kind, self.names, self.others = kind, names, others

    def bundle(self, tensors: Sequence[Tensor]) -> Bundle:
        return {**self.others, **dict(zip(self.names, tensors, strict=True))}


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(rest: _Rest, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(rest.kind.function(rest.bundle(tensors)).values())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        rest, *tensors = inputs
        ctx.kind, ctx.names, ctx.rest = rest.kind, rest.names, rest
        ctx.set_materialize_grads(False)
        results = zip(rest.kind.names(rest.bundle(tensors)), output, strict=True)
        ctx.mark_non_differentiable(*(x for name, x in results if name in ctx.kind.inert or not x.is_floating_point()))
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        bundle, results = _saved(ctx)
        given = {name: grad for name, grad in zip(results, grads, strict=True) if grad is not None}
        inputs = zip(ctx.names, ctx.needs_input_grad[1:], ctx.next_functions, strict=True)
        needed = {name for name, needs, (node, _) in inputs if needs and _reached(node)}
        found = ctx.kind.backward(bundle, results, given, needed) if given else {}
        return None, *(found.get(name) for name in ctx.names)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        bundle, results = (_still(saved) for saved in _saved(ctx))
        moving = {name: x for name, x in zip(ctx.names, tangents[1:], strict=True) if x is not None}
        found = ctx.kind.along(bundle, results, moving)[1]
        return tuple(found.get(name) for name in results)

    @staticmethod
    def vmap(info: Any, dims: Any, rest: _Rest, *tensors: Tensor) -> Any:
        mapped = dict(zip(rest.names, dims[1:], strict=True))
        found = _all_at_once(rest.kind, rest.bundle(tensors), mapped, info.batch_size)
        return tuple(found.values()), (0,) * len(found)


def _all_at_once(kind: Kind, bundle: Bundle, mapped: dict[str, int | None], count: int) -> Tensors:
    """The results of `count` calls, stacked; `mapped` says along which axis each tensor has one for each call."""
    together = folded(bundle, mapped, count) if kind.folds else None
    if together is not None:
        return unfolded(compute(kind, together[0]), bundle, mapped, count, heads=together[1])
    each = [compute(kind, _at(bundle, mapped, place)) for place in range(count)]  # one batch cannot hold them
    return {name: torch.stack([one[name] for one in each]) for name in kind.names(bundle)}


def _reached(node: Any) -> bool:
    """Does the backward pass under way come to this node? PyTorch cannot say so of leaves."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


def _saved(ctx: Any) -> tuple[Bundle, Tensors]:
    tensors, count = ctx.saved_tensors, len(ctx.names)  # a checkpoint lets them be read once
    bundle = ctx.rest.bundle(tensors[:count])
    return bundle, dict(zip(ctx.kind.names(bundle), tensors[count:], strict=True))


def _still(bundle: Bundle) -> Bundle:
    """Without the tangents that tensors carry."""
    return {name: unpack(x).primal if isinstance(x, Tensor) else x for name, x in bundle.items()}


def _at(bundle: Bundle, mapped: dict[str, int | None], place: int) -> Bundle:
    return {name: x if mapped.get(name) is None else x.select(mapped[name], place) for name, x in bundle.items()}


def _asked(needed: set[str]) -> tuple[str, ...]:
    if "alibi_slopes" in needed:
        raise RuleError(
            "alibi_slopes requires grad, and has no derivative here.", "alibi_slopes.detach(), or put them in `bias`."
        )
    return tuple(name for name in INPUTS if name in needed)


def _known(results: Tensors) -> Bundle:
    return parts("known", {name: x for name, x in results.items() if name in backward.READS})


def _values_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    backward.check_derivatives(grads)
    asked = _asked(needed)
    return compute(GRADIENTS, {**bundle, **_known(results), **parts("by", grads), "asked": asked}) if asked else {}


def _values_along(bundle: Bundle, results: Tensors | None, tangents: Tensors) -> tuple[Tensors, Tensors]:
    _asked({*tangents})
    check_smooth(_without_rest(options_of(bundle).arrays()), "forward-mode derivative")
    if results is None and any(is_batched(x) for x in tangents.values()):
        results = compute(VALUES, bundle)  # one result, many tangents
    known = {} if results is None else parts("known", {x: results[x] for x in ("logsumexp", "output") if x in results})
    found = compute(VALUES_ALONG, {**bundle, **known, **parts("along", tangents)})
    return results or {name: x for name, x in found.items() if ":" not in name}, part(found, "along")


def _without_rest(arrays: list[str]) -> list[str]:
    return ["top" if name.startswith("top_") else name for name in arrays]


def _gradients_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    del results
    asked, moved = _asked(needed), tuple(name.partition(":")[2] for name in needed if name.startswith("by:"))
    if not asked and not moved:
        return {}
    found = compute(GRADIENTS_ALONG, {**bundle, **parts("along", grads), "asked": asked, "moved": moved})
    return {f"by:{name.partition(':')[2]}" if ":" in name else name: x for name, x in found.items()}


def _gradients_along(bundle: Bundle, results: Tensors | None, tangents: Tensors) -> tuple[Tensors, Tensors]:
    _asked({*tangents})
    along = {name: x for name, x in tangents.items() if ":" not in name}  # what is known changes with the inputs
    moving = {**bundle, **parts("along", along), **parts("changing", part(tangents, "by")), "moved": ()}
    return compute(GRADIENTS, bundle) if results is None else results, compute(GRADIENTS_ALONG, moving)


def _values_along_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    by, changing = part(grads, "along"), {name: x for name, x in grads.items() if ":" not in name}
    asked = _asked({name for name in needed if ":" not in name})
    given = {**bundle, **(_known(results) or _known_of(bundle)), "asked": asked}
    found: Bundle = {}
    if asked and by:
        found = compute(GRADIENTS_ALONG, {**given, **parts("by", by), **parts("changing", changing), "moved": ()})
    elif asked:
        found = compute(GRADIENTS, {**_without(given, "along"), **parts("by", changing)})
    along = tuple(name for name in INPUTS if f"along:{name}" in needed)
    if along and by:
        still = {**_without(given, "along"), **parts("by", by), "asked": along}
        found |= {f"along:{name}": x for name, x in compute(GRADIENTS, still).items()}
    return found


def _known_of(bundle: Bundle) -> Bundle:
    """What the backward pass reads, computed again where only tangents were."""
    return _known(compute(VALUES, _without(_without(bundle, "along"), "known")))


def _without(bundle: Bundle, role: str) -> Bundle:
    return {name: x for name, x in bundle.items() if not name.startswith(f"{role}:")}


def _product_parts(bundle: Bundle, values: Tensor, logsumexp: Tensor) -> Bundle:
    """Aᵀ·g as a gradient of A·values: the bundle of a backward pass whose upstream gradient is g."""
    usual = torch.float64 if bundle["q"].dtype == torch.float64 else torch.float32
    wide = {name: bundle[name].to(usual) for name in ("q", "k")}
    given = {"names": "output logsumexp", "v": values.to(usual), "known:logsumexp": logsumexp}
    return {**bundle, **wide, **given, "by:output": bundle["v"].to(usual)}


def _product_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    if "product" not in grads:
        return {}
    asked = _asked(needed - {"v"})
    given = _product_parts(bundle, grads["product"], results["logsumexp"])
    by_g = compute(VALUES, _without(_without(given, "by"), "known"))["output"]
    found = compute(GRADIENTS, {**given, "known:output": by_g, "asked": asked}) if asked else {}
    return {name: x.to(bundle[name].dtype) for name, x in {**found, "v": by_g}.items() if name in needed}


def _product_along(bundle: Bundle, results: Tensors | None, tangents: Tensors) -> tuple[Tensors, Tensors]:
    _asked({*tangents})
    found = compute(PRODUCT, bundle) if results is None else results
    known = {"known:logsumexp": found["logsumexp"]}
    return found, compute(PRODUCT_ALONG, {**bundle, **known, **parts("along", tangents)})


def _product_tangent(bundle: Bundle) -> Tensors:
    """Ȧᵀ·g + Aᵀ·ġ: the tangent of a gradient by values, whatever these are."""
    g = bundle["v"]
    values = g.new_zeros(()).expand(*bundle["k"].shape[:-1], g.shape[-1])
    if bundle["k"].shape[:-2] != bundle["q"].shape[:-2]:  # the product has all heads
        values = g.new_zeros(()).expand(*bundle["q"].shape[:-2], bundle["k"].shape[-2], g.shape[-1])
    output = g.new_zeros(()).expand(*bundle["q"].shape[:-1], g.shape[-1])
    given = _product_parts(bundle, values, bundle["known:logsumexp"]) | {"asked": ("v",), "moved": ()}
    given["known:output"] = output.to(given["q"].dtype)
    return {"product": gradients_along(_turned(given))["v"]}


def _turned(given: Bundle) -> Bundle:
    """The tangents of q, k and g as those of a backward pass whose upstream gradient is g."""
    usual = given["q"].dtype
    found = _without(given, "along")
    for name, x in part(given, "along").items():
        found["changing:output" if name == "v" else f"along:{name}"] = x.to(usual) if name in "qkv" else x
    return found


def _product_along_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    del results
    asked = _asked({name for name in needed if ":" not in name} - {"v"})
    along = tuple(name for name in INPUTS if f"along:{name}" in needed and name != "v")
    given = _product_parts(bundle, grads["product"], bundle["known:logsumexp"])
    moving = _turned(given)
    of_values = _without(_without(moving, "by"), "changing")
    by_g = compute(VALUES, _without(_without(of_values, "along"), "known"))["output"]
    known = {"known:output": by_g}
    found: Bundle = {"along:v": by_g}
    if asked:
        found |= compute(GRADIENTS_ALONG, {**moving, **known, "asked": asked, "moved": ()})
    if along:
        still = _without(_without(moving, "along"), "changing")
        by_along = compute(GRADIENTS, {**still, **known, "asked": along})
        found |= {f"along:{name}": x for name, x in by_along.items()}
    if "v" in needed:
        found["v"] = compute(VALUES_ALONG, of_values)["along:output"] if part(of_values, "along") else 0 * by_g
    return {name: x.to(bundle[name].dtype) for name, x in found.items() if name in needed}


def _gradients_along_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    """By the direction alone, in which the tangents are linear."""
    del results
    if any(":" not in name or name.startswith("by:") for name in needed):
        no_third()
    directions = tuple(name for name in INPUTS if f"along:{name}" in needed)
    changing = tuple(name.partition(":")[2] for name in needed if name.startswith("changing:"))
    moved, own = part(grads, "moved"), {name: x for name, x in grads.items() if ":" not in name}
    still = _without(_without(bundle, "along"), "changing")
    if own:
        given = {**still, **parts("along", own), **parts("changing", moved), "asked": directions, "moved": changing}
        found = compute(GRADIENTS_ALONG, given)
    else:
        found = compute(GRADIENTS, {**_without(still, "by"), **parts("by", moved), "asked": directions})
    return {f"changing:{x.partition(':')[2]}" if ":" in x else f"along:{x}": y for x, y in found.items()}


def no_third(*_: Any) -> NoReturn:
    """Raise DerivativeError: a second derivative was differentiated again."""
    raise DerivativeError(
        "attention has no third derivative here, and its second was differentiated again (a hessian of a gradient, "
        "torch.func.jvp within torch.func.jvp).",
        "PyTorch's own attention has one: `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):` "
        "torch.nn.functional.scaled_dot_product_attention(q, k, v).",
    )


def _along_names(bundle: Bundle) -> list[str]:
    names = options_of(bundle).arrays()
    return [*([] if bundle.get("known:logsumexp") is not None else names), *(f"along:{name}" for name in names)]


VALUES = Kind(lambda bundle: options_of(bundle).arrays(), values, _values_backward, _values_along)
GRADIENTS = Kind(lambda bundle: bundle["asked"], gradients, _gradients_backward, _gradients_along)
VALUES_ALONG = Kind(_along_names, values_along, _values_along_backward, no_third)
GRADIENTS_ALONG = Kind(
    lambda bundle: (*bundle["asked"], *(f"moved:{name}" for name in bundle["moved"])),
    gradients_along,
    _gradients_along_backward,
    no_third,
)
PRODUCT = Kind(lambda _: ("product", "logsumexp"), transposed, _product_backward, _product_along, ("logsumexp",))
PRODUCT_ALONG = Kind(lambda _: ("product",), _product_tangent, _product_along_backward, no_third)
