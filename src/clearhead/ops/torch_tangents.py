"""Tangents of attention's results and of its gradients, as functions of tensors; tangents.py has the formulas.

The bundles are those of torch_functions.py. An input's tangent is "along:" its name, that of an upstream gradient
"changing:" its result.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.core.directions import Directions
from clearhead.core.observations import wanted
from clearhead.core.problem import describe
from clearhead.core.statistics import STATISTICS
from clearhead.engines.base import Kept
from clearhead.ops import tangents
from clearhead.ops.torch_functions import (
    Bundle,
    Call,
    as_given,
    blocks,
    labels,
    options_of,
    part,
    shapes,
    tensor,
    values_of,
)


def values_along(bundle: Bundle) -> dict[str, Tensor]:
    """The requested arrays, and "along:" each its tangent; tangents alone where "known:" results are given."""
    options = options_of(bundle)
    call = Call.read(bundle, "tangents", options.queries())
    problem = call.problem
    want = wanted(call.whole, options.keywords(), output=call.v is not None).for_queries(call.rows)
    known = blocks(problem, part(bundle, "known"))
    arrays, along = (call.q, call.k, call.v), directions(call, bundle)
    found, moved = tangents.forward(
        call.engine, problem, arrays, along, want, known.get("logsumexp"), known.get("output")
    )
    names = options.arrays()
    answered = {} if known else {name: tensor(problem.restore(found[name])) for name in names}
    return answered | {f"along:{name}": tensor(problem.restore(moved[name])) for name in names}


def gradients_along(bundle: Bundle) -> dict[str, Tensor]:
    """The tangents of the gradients of the inputs in "asked", and "moved:" those of results with upstream gradients."""
    call = Call.read(bundle, "gradient_tangents", options_of(bundle).queries())
    known, by, changing = (blocks(call.problem, part(bundle, role)) for role in ("known", "by", "changing"))
    groups, along = labels(call, bundle), directions(call, bundle)
    arrays = call.q, call.k, call.v
    second = tangents.Second(
        call.engine, call.problem, arrays, known, by, along, changing, groups, **shapes(call, bundle)
    )
    found, moved = tangents.gradient_tangents(second)
    made = as_given(call, found, bundle)
    columns = [name for name in bundle["moved"] if STATISTICS[name].computed == "columns"]
    if columns and moved:
        want = wanted(call.whole, options_of(bundle).keywords()).only(columns).for_queries(call.rows)
        kept = Kept(known["logsumexp"], moved["logsumexp"])
        moved |= call.engine.column_tangents(call.problem, call.q, call.k, along, kept, want)
    if not moved:  # no weights: nothing moves
        return made | {f"moved:{name}": torch.zeros_like(bundle[f"by:{name}"]) for name in bundle["moved"]}
    return made | {f"moved:{name}": tensor(call.problem.restore(moved[name])) for name in bundle["moved"]}


def directions(call: Call, bundle: Bundle) -> Directions:
    """The inputs' tangents as engines take them; those of rules are read as the rules themselves."""
    along = part(bundle, "along")
    rules: Any = {name: along[name] for name in ("bias", "sinks") if name in along}
    if "span_table" in along:
        rules["spans"] = bundle["query_spans"], bundle["key_spans"], along["span_table"]
    read = describe(along.get("q", bundle["q"]), along.get("k", bundle["k"]), None, rules)
    own = read.problem if call.problem is call.whole else read.problem.take(queries=call.rows)
    rows = slice(call.rows.start, call.rows.stop, call.rows.step)
    return Directions(
        q=read.q[:, :, rows] if "q" in along else None,
        k=read.k if "k" in along else None,
        v=values_of(call.whole, along["v"]) if "v" in along else None,
        bias=own.bias,
        spans=own.span_table,
        sinks=own.sinks,
    )
