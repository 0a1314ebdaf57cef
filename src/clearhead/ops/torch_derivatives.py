"""Attention's derivatives in PyTorch: two kinds of nodes, the values and one linear map, and what each becomes.

The map is that of tangents.Derivative. A third derivative is refused.

    bundle           "known:" results (the log-sum-exp is among them), "by:" upstream gradients of results, "along:"
                     tangents of inputs, "changing:" upstream gradients, or tangents of those in "by:"; "asked" and
                     "moved" name what is wanted. Without known results a map of tangents answers the results too
    bundle["product"]   Aᵀ·g: a gradient by values, whatever these are, for "changing:output" = g. Its derivatives are
                     those of A·u, u the upstream gradient of Aᵀ·g
"""

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from clearhead.errors import DerivativeError, RuleError
from clearhead.ops import backward
from clearhead.ops.tangents import check_smooth
from clearhead.ops.torch_batching import is_batched
from clearhead.ops.torch_duals import Tensors
from clearhead.ops.torch_nodes import Kind, compute
from clearhead.ops.torch_passes import (
    INPUTS,
    Bundle,
    derivative,
    in_statistics_dtype,
    options_of,
    part,
    parts,
    results_of_map,
    values,
)

ROLES = ("by", "along", "changing")


def gradients(bundle: Bundle, upstream: Tensors, asked: Iterable[str]) -> Tensors:
    """The gradients of the inputs in `asked`, from the upstream gradients of results, by the inputs' names."""
    return map_of(bundle, changing=upstream, asked=asked)


def product(bundle: Bundle, g: Tensor) -> tuple[Tensor, Tensor]:
    """Aᵀ·g, g (…, heads, queries, d) to (…, heads, keys, d) in the dtype of statistics, and the log-sum-exp."""
    known = compute(VALUES, {**bundle, "names": "logsumexp"})
    answers = map_of({**bundle, **parts("known", known), "product": True}, changing={"output": g})
    return answers["product"], known["logsumexp"]


def map_of(
    bundle: Bundle,
    *,
    by: Tensors | None = None,
    along: Tensors | None = None,
    changing: Tensors | None = None,
    asked: Iterable[str] = (),
    moved: Iterable[str] = (),
    kind: Kind | None = None,
) -> Tensors:
    """What the map answers, "moved:" in front of tangents of results; what is missing is zero.

    kind   the node that computes it; None: MAP
    """
    product = bundle.get("product", False)
    wanted = tuple(asked) if (by and along) or changing else ()
    shifted = tuple(moved) if along else ()
    if not wanted and not shifted and not product:
        return {}
    gradient = wanted or product
    sides = zip(ROLES, (by if along and gradient else {}, along, changing if gradient else {}), strict=True)
    roles = {f"{role}:{name}": x for role, side in sides for name, x in (side or {}).items()}
    return compute(kind or MAP, {**_without(bundle, *ROLES), **roles, "asked": wanted, "moved": shifted})


def differentiable(needed: Iterable[str]) -> tuple[str, ...]:
    """The inputs among these names. Raises RuleError for the one that has no derivative."""
    names = {*needed}
    if "alibi_slopes" in names:
        raise RuleError(
            "alibi_slopes requires grad, and has no derivative here.", "alibi_slopes.detach(), or put them in `bias`."
        )
    return tuple(name for name in INPUTS if name in names)


def _of(role: str, needed: set[str]) -> tuple[str, ...]:
    return tuple(sorted(name.partition(":")[2] for name in needed if name.startswith(f"{role}:")))


def _known(results: Tensors) -> Bundle:
    return parts("known", {name: x for name, x in results.items() if name in backward.READS})


def _without(bundle: Bundle, *roles: str) -> Bundle:
    return {name: x for name, x in bundle.items() if name.partition(":")[0] not in roles or ":" not in name}


def _values_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    backward.check_derivatives(grads)
    return gradients({**bundle, **_known(results)}, grads, differentiable(needed))


def _values_along(bundle: Bundle, results: Tensors | None, tangents: Tensors) -> tuple[Tensors, Tensors]:
    differentiable(tangents)
    names = options_of(bundle).arrays()
    check_smooth(names, "forward-mode derivative")
    if results is None and any(is_batched(x) for x in tangents.values()):
        results = compute(VALUES, bundle)  # one result, many tangents
    known = {} if results is None else parts("known", {x: results[x] for x in ("logsumexp", "output") if x in results})
    answers = map_of({**bundle, **known}, along=tangents, moved=names)
    return results or _without(answers, "moved"), part(answers, "moved")


def _map_backward(bundle: Bundle, results: Tensors, grads: Tensors, needed: set[str]) -> Bundle:
    if bundle.get("product"):
        return _product_backward(bundle, grads["product"], needed)
    inputs = differentiable(needed)
    if part(bundle, "by") or part(bundle, "changing"):
        return map_backward(bundle, grads, inputs, needed, MAP)
    along, moved = part(bundle, "along"), part(grads, "moved")
    of_values = {name: x for name, x in grads.items() if ":" not in name}
    still = {**bundle, **(_known(results) or _known(compute(VALUES, _without(bundle, "along", "known"))))}
    answers = map_of(still, by=moved, along=along, changing=of_values, asked=inputs)
    return {**answers, **parts("along", gradients(still, moved, _of("along", needed)))}


def map_backward(bundle: Bundle, grads: Tensors, inputs: Iterable[str], needed: set[str], kind: Kind) -> Bundle:
    """The gradients of a map's arguments: its transpose, which is the same map, computed by nodes of this kind."""
    by, along, changing = (part(bundle, role) for role in ROLES)
    upstream, moved = {name: x for name, x in grads.items() if ":" not in name}, part(grads, "moved")
    if by and (inputs or _of("by", needed)):
        no_third()
    changed: Any = {"moved": _of("changing", needed), "kind": kind}
    if upstream and not by:  # a gradient's: H of its upstream gradient
        answers = map_of(bundle, by=changing, along=upstream, asked=inputs, **changed)
        return {f"changing:{name[6:]}" if ":" in name else name: x for name, x in answers.items()}
    answers = map_of(bundle, by=by, along=upstream, changing=moved, asked=_of("along", needed), **changed)
    made = {f"changing:{name[6:]}" if ":" in name else f"along:{name}": x for name, x in answers.items()}
    return made | map_of(bundle, by=moved, along=along, asked=inputs, kind=kind)


def _map_along(bundle: Bundle, results: Tensors | None, tangents: Tensors) -> tuple[Tensors, Tensors]:
    if part(bundle, "along"):
        no_third()
    inputs = {name: tangents[name] for name in differentiable(tangents)}  # what is known changes with these
    answers = compute(MAP, bundle) if results is None else results
    changes = part(tangents, "changing")
    return answers, map_of(bundle, by=part(bundle, "changing"), along=inputs, changing=changes, asked=bundle["asked"])


def _product_backward(bundle: Bundle, upstream: Tensor, needed: set[str]) -> Bundle:
    """The gradients of u·Aᵀ·g, which is g·A·u; along a direction likewise."""
    wide = {**in_statistics_dtype({**bundle, "v": upstream}), "product": False}
    by, along, changing = (part(wide, role) for role in ROLES)
    inputs, still = differentiable(needed - {"v"}), _without(wide, *ROLES)
    if by:
        values = compute(MAP, {**_without(still, "known"), **parts("along", along), "asked": (), "moved": ("output",)})
    else:
        values = compute(VALUES, _without(still, "known"))
    still["known:output"] = values["output"]
    answers = map_of(still, by=by, along=along, changing=changing, asked=inputs) | {"changing:output": values["output"]}
    if by:
        answers |= parts("along", gradients(still, by, _of("along", needed))) | {"by:output": values["moved:output"]}
    return {name: x.to(bundle[name].dtype) for name, x in answers.items() if name in needed}


def no_third(*_: Any) -> NoReturn:
    """Raise DerivativeError: a second derivative was differentiated again."""
    raise DerivativeError(
        "attention has no third derivative here, and its second was differentiated again (a hessian of a gradient, "
        "torch.func.jvp within torch.func.jvp).",
        "PyTorch's own attention has one: `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):` "
        "torch.nn.functional.scaled_dot_product_attention(q, k, v).",
    )


VALUES = Kind(lambda bundle: options_of(bundle).arrays(), values, _values_backward, _values_along)
MAP = Kind(results_of_map, derivative, _map_backward, _map_along)
