"""Attention's derivatives in PyTorch: what each kind of node is, and what differentiating it gives.

Results come from the engines, and so does their gradient, which is a node again (GRADIENT): each in one fused pass. All
other derivatives, forward mode and whatever is differentiated a second time, are recomputed (torch_recomputed.py).

    bundle      "known:" results of the forward pass, the log-sum-exp among them, "by:" upstream gradients of results;
                "asked" names the inputs whose gradients are wanted
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from clearhead.core.arrays import as_array, device_of
from clearhead.core.statistics import listed
from clearhead.errors import RuleError
from clearhead.ops import backward, torch_recomputed
from clearhead.ops.recomputed import INPUTS, Tensors
from clearhead.ops.torch_batching import is_batched, put_together, taken_apart
from clearhead.ops.torch_nodes import Kind, compute
from clearhead.ops.torch_passes import Bundle, gradient, in_statistics_dtype, options_of, part, parts, product, values


def gradients(bundle: Bundle, upstream: Tensors, asked: Iterable[str]) -> Tensors:
    """The gradients of the inputs in `asked`, from the upstream gradients of results, by the inputs' names."""
    wanted = tuple(asked)
    return compute(GRADIENT, {**bundle, **parts("by", upstream), "asked": wanted}) if wanted else {}


def _gradient(bundle: Bundle) -> Tensors:
    """The gradients by an engine's kernel; on a device those that take more than it has are recomputed there."""
    by, fused = part(bundle, "by"), {*listed(derivative="row"), *listed(derivative="key")}
    if {*by} <= fused or device_of(as_array(bundle["q"], "q")[0]) == "cpu":
        return gradient(bundle)
    return torch_recomputed.gradients(bundle, by)


def transposed(bundle: Bundle, g: Tensor) -> Tensor:
    """Aᵀ·g, g (…, heads, queries, d) to (…, heads, keys, d) in the dtype of statistics."""
    return compute(PRODUCT, {**bundle, "g": g})["product"]


def differentiable(needed: Iterable[str]) -> tuple[str, ...]:
    """The inputs among these names. Raises RuleError for the one that has no derivative."""
    names = {*needed}
    if "alibi_slopes" in names:
        raise RuleError(
            "alibi_slopes requires grad, and has no derivative here.", "alibi_slopes.detach(), or put them in `bias`."
        )
    return tuple(name for name in INPUTS if name in names)


def _values_backward(bundle: Bundle, results: Tensors, upstream: Tensors, needed: set[str]) -> Tensors:
    backward.check_derivatives(upstream)
    known = parts("known", {name: x for name, x in results.items() if name in backward.READS})
    return gradients({**bundle, **known}, upstream, differentiable(needed))


def _values_along(bundle: Bundle, results: Tensors, tangents: Tensors) -> Tensors:
    differentiable(tangents)
    return _recomputed(torch_recomputed.tangents, bundle, results, tangents)


def _gradient_backward(bundle: Bundle, results: Tensors, upstream: Tensors, needed: set[str]) -> Tensors:
    del results
    differentiable(needed)
    how = torch_recomputed.gradients_gradients
    return _recomputed(how, bundle, part(bundle, "by"), upstream, needed=tuple(needed))


def _gradient_along(bundle: Bundle, results: Tensors, tangents: Tensors) -> Tensors:
    del results
    differentiable(tangents)
    how = torch_recomputed.gradients_tangents
    return _recomputed(how, bundle, part(bundle, "by"), tangents)


def _product_backward(bundle: Bundle, results: Tensors, upstream: Tensors, needed: set[str]) -> Tensors:
    """The gradients of u·Aᵀ·g, which is g·A·u."""
    del results
    wide = in_statistics_dtype({**bundle, "v": upstream["product"]})
    seen = compute(VALUES, {**wide, "names": "output logsumexp"})
    found = gradients({**wide, **parts("known", seen)}, {"output": wide["g"]}, differentiable(needed))
    found["g"] = seen["output"]
    return {name: x.to(bundle[name].dtype) for name, x in found.items() if name in needed}


def _recomputed(function: Callable[..., Tensors], bundle: Bundle, *sides: Tensors, **named: Any) -> Tensors:
    """The function of a bundle and of further tensors; where some hold many at once, of each of these."""
    given = [{name: x for name, x in side.items() if isinstance(x, Tensor)} for side in (bundle, *sides)]
    if not any(is_batched(x) for side in given for x in side.values()):
        return function(bundle, *sides, **named)
    flat = {f"{place} {name}": x for place, side in enumerate(given) for name, x in side.items()}
    plain, mapped = taken_apart(flat)

    def each(tensors: Tensors) -> Tensors:
        parts = [{name: tensors[f"{place} {name}"] for name in side} for place, side in enumerate(given)]
        return function({**bundle, **parts[0]}, *parts[1:], **named)

    return put_together(torch.func.vmap(each, in_dims=(mapped,))(plain))


VALUES = Kind(lambda bundle: options_of(bundle).arrays(), values, _values_backward, _values_along)
GRADIENT = Kind(lambda bundle: bundle["asked"], _gradient, _gradient_backward, _gradient_along)
PRODUCT = Kind(lambda _: ("product",), lambda bundle: {"product": product(bundle)["product"]}, _product_backward,
               _values_along)  # fmt: skip
