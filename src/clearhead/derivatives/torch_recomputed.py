"""Forward mode and second derivatives of a node: converts its tensors to the shapes of `recomputed.py`, and back.

There, tensors are (…, heads, rows, columns): results per query have one column, results per key one row.
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.observations import areas
from clearhead.core.rules import EVERYWHERE, FIELDS, check_supported, turned_on
from clearhead.core.statistics import PER_KEY, PER_QUERY, STATISTICS, arrays_of, smooth
from clearhead.derivatives.arguments import LABELS, Task, part
from clearhead.derivatives.recomputed import Form, Tensors, attention, compute, peak_rows
from clearhead.errors import DerivativeError

Arguments = dict[str, Any]  # a node's tensors and rules by name, None where there is none

_PER_QUERY, _PER_KEY = (
    {array for name, one in STATISTICS.items() if one.axes == axes for array in arrays_of(name)}
    for axes in (PER_QUERY, PER_KEY)
)
_OF_ROWS, _OF_KEYS = {"q", "g", "output", *_PER_QUERY}, {"k", "v", "product"}
_SMOOTH = {array for name in smooth() for array in arrays_of(name)} | {"product"}


def check_smooth(names: Iterable[str], what: str) -> None:
    """Raise DerivativeError for a result that jumps from key to key, such as a maximum.

    names   names of statistics or of their arrays
    """
    missing = sorted({"top" if name in arrays_of("top") else name for name in names} - _SMOOTH)
    if missing:
        said = f"{', '.join(missing)} has no {what} here, since it jumps from one key to another."
        raise DerivativeError(said, "observe it under torch.no_grad().")


def gradients(task: Task, x: Tensors) -> Tensors:
    """Compute a task's gradients where no engine does, from upstream gradients of any results."""
    (given, form), upstream, names = _read(task, x), part(x, "by"), task.answers.split()
    if not form.batch * form.heads * len(form.rows) * form.keys:
        return {name: torch.zeros_like(x[name]) for name in names}
    still, by = _finite(_inputs(form, given, upstream), _shaped(given, form, upstream))
    if "top_weights" in by:
        still["top places"] = _shape(given, form, "top places", x["known:top_indices"]).long()
    if "peak" in by:
        still["peak rows"] = peak_rows(form, tuple(still), tuple(still.values()))
        still["row numbers"] = torch.arange(len(form.rows), device=x["q"].device)[None, :, None]
    first = attention(form, tuple(by), tuple(still)).gradient([name in names for name in still])
    made = dict(zip(first.gives, compute(first, *still.values(), *by.values()), strict=True))
    return {
        name: _input(given, form, name, made[name]) if name in made else torch.zeros_like(x[name]) for name in names
    }


def tangents(task: Task, x: Tensors, results: Tensors, along: Tensors) -> Tensors:
    """Compute the tangents of a node's results by name, or of its gradients if x has upstream gradients."""
    upstream, inputs = part(x, "by"), {name: y for name, y in along.items() if ":" not in name}
    check_smooth(upstream or results, "second derivative" if upstream else "forward-mode derivative")
    answered = upstream or {name: y for name, y in results.items() if name != "largest"}  # largest has no derivative
    given, form = _read(task, x)
    sides = (_shaped(given, form, side) for side in (upstream, inputs, part(along, "by")))
    still, by, moving, changing = _finite(_inputs(form, given, answered), *sides)
    first = attention(form, tuple(answered), tuple(still))
    if upstream:
        first = first.gradient([name in task.answers.split() for name in still])
    blocks = first.tangent([*(name in moving for name in still), *(name in changing for name in by)])
    made = compute(blocks, *still.values(), *by.values(), *_ordered(moving, still), *_ordered(changing, by))
    put = partial(_input, given, form) if upstream else partial(_result, given)
    return {name: put(name, y) for name, y in zip(first.gives, made, strict=True)}


def gradients_gradients(task: Task, x: Tensors, again: Tensors, needed: Iterable[str]) -> Tensors:
    """Compute the gradients of Σ again·gradients at the `needed` inputs and upstream gradients ("by:…").

    again    the upstream gradients of the node's gradients, by the inputs' names
    """
    upstream, names = part(x, "by"), {*needed}
    check_smooth(upstream, "second derivative")
    given, form = _read(task, x)
    sides = _shaped(given, form, upstream), _shaped(given, form, again)
    still, by, second = _finite(_inputs(form, given, upstream), *sides)
    first = attention(form, tuple(by), tuple(still)).gradient([name in second for name in still])
    blocks = first.gradient([*(name in names for name in still), *(f"by:{name}" in names for name in by)])
    made = iter(compute(blocks, *still.values(), *by.values(), *_ordered(second, still)))
    found = {name: _input(given, form, name, next(made)) for name in still if name in names}
    for name in by:
        if f"by:{name}" in names:
            found[f"by:{name}"] = _result(given, name, next(made)).to(upstream[name].dtype)
    return found


def _ordered(some: Tensors, of: Iterable[str]) -> list[Tensor]:
    return [some[name] for name in of if name in some]


def _read(task: Task, x: Tensors) -> tuple[Arguments, Form]:
    """Read a node's tensors and rules by name, and the Form: what the definition needs besides tensors."""
    check_supported("a recomputed derivative", EVERYWHERE, turned_on(task.rules(x)))
    q, k = x["q"], x["k"]
    given: Arguments = {**dict.fromkeys((*FIELDS, *LABELS, "v", "g")), **x}
    right = task.right
    form = Form(
        batch=q.shape[:-3].numel(),
        heads=q.shape[-3] if q.ndim > 2 else 1,
        kv_heads=k.shape[-3] if k.ndim > 2 else 1,
        rows=range(q.shape[-2])[task.queries],
        keys=k.shape[-2],
        scale=1 / max(1, q.shape[-1]) ** 0.5 if task.scale is None else task.scale,
        softcap=task.softcap,
        left=task.left,
        right=right if not task.causal else 0 if right is None else min(right, 0),
        offset=None if "query_offset" in x else task.query_offset or 0,
    )
    return given | {"scales": x.get("scale")}, form


def _usual(given: Arguments) -> torch.dtype:
    return torch.float64 if given["q"].dtype == torch.float64 else torch.float32


def _chosen(form: Form, x: Tensor, place: int, whole: int) -> Tensor:
    """Take the chosen queries along an axis; an axis of size 1 stays as it is."""
    if form.rows == range(whole) or x.shape[place] != whole:
        return x
    return x.index_select(place, torch.tensor([*form.rows], dtype=torch.int64, device=x.device))


def _shape(given: Arguments, form: Form, name: str, x: Tensor) -> Tensor:
    """Reshape an input, a result or their gradient to (…, heads, rows, columns), in the statistics' dtype; linear."""
    x = x.to(_usual(given))
    if name in ("sinks", "scales", "alibi_slopes"):
        return x.reshape(-1, 1, 1)
    if name in _PER_QUERY:
        x = x.unsqueeze(-1)
    elif name in _PER_KEY:
        x = x.unsqueeze(-2)
    x = x.reshape((1,) * (3 - x.ndim) + tuple(x.shape))
    return _chosen(form, x, -2, given["q"].shape[-2]) if name in ("q", "bias") else x


def _shaped(given: Arguments, form: Form, tensors: Tensors) -> Tensors:
    return {name: _shape(given, form, name, x) for name, x in tensors.items()}


def _input(given: Arguments, form: Form, name: str, gradient: Tensor) -> Tensor:
    """A gradient of an input in the input's own shape and dtype: the transpose of `_shape`."""
    made: Tensor = torch.func.vjp(partial(_shape, given, form, name), given[name])[1](gradient)[0]
    return made


def _result(given: Arguments, name: str, x: Tensor) -> Tensor:
    """Reshape a result or its gradient to the shape in which the node returns it: the inverse of `_shape`."""
    x = x.squeeze(-1) if name in _PER_QUERY else x.squeeze(-2) if name in _PER_KEY else x
    x = x if given["q"].ndim > 2 else x.squeeze(0)
    return x.to(given["q"].dtype) if name == "output" else x


def _inputs(form: Form, given: Arguments, results: Tensors) -> Tensors:
    """The tensors that the definition of these results reads."""
    names = ("q", "k", "bias", "sinks", "scales", "alibi_slopes", "span_table", *(["v"] if "output" in results else []))
    names = (*names, "g") if "product" in results else names
    made = {name: _shape(given, form, name, given[name]) for name in names if given.get(name) is not None}
    q, queries = given["q"], given["q"].shape[-2]
    rows = torch.tensor([*form.rows], dtype=torch.int64, device=q.device)[:, None]
    keys = torch.arange(form.keys, device=q.device)
    offset = given["query_offset"]
    made["positions"] = rows + _each(offset) if offset is not None else (rows + (form.offset or 0))[None]
    made["places"] = keys[None, None]
    if given["query_lengths"] is not None:
        made["queries_there"] = rows < _each(given["query_lengths"])
    if given["kv_lengths"] is not None:
        made["keys_there"] = keys < _each(given["kv_lengths"])
    if given["mask"] is not None:
        mask: Tensor = given["mask"]
        made["mask"] = _chosen(form, mask.reshape((1,) * (3 - mask.ndim) + tuple(mask.shape)), -2, queries)
    for name in ("query_segments", "query_spans", "kv_segments", "key_spans"):
        if given[name] is not None:
            labels = given[name].long().reshape(given[name].shape or (1,))
            of_queries = name.startswith("query")
            labels = _chosen(form, labels, -1, queries) if of_queries else labels
            made[name] = labels[..., None, :, None] if of_queries else labels[..., None, None, :]
    for name in {"image", "groups"} & {*results}:
        sides = zip(("queries", "keys"), LABELS, results[name].shape[-2:], (len(form.rows), form.keys), strict=True)
        for side, labels, count, size in sides:
            if name == "groups":  # 1 for each token's group, else 0, (…, 1, tokens, groups)
                x = given[labels] if side == "keys" else _chosen(form, given[labels], -1, queries)
                x = x[..., None, :, None] == torch.arange(count, device=x.device)
            else:  # each token's share in the pixels, (1, tokens, pixels)
                shares = areas(count, size, slice(0, size))[1] if size else np.zeros((count, 0))
                x = torch.from_numpy(shares).T[None]
            made[f"{name} of {side}"] = x.to(q.device, _usual(given))
    return made


def _each(x: Tensor) -> Tensor:
    """Shape one number per batch entry to broadcast over (batch, heads, rows, keys)."""
    return x.long()[..., None, None, None]


def _finite(inputs: Tensors, *others: Tensors) -> tuple[Tensors, ...]:
    """Replace NaN and infinity by 0, and note their places in new inputs, "bad rows" and "bad keys".

    Otherwise 0·NaN would carry them to places that a rule forbids. Biases and tables stay: no product reads them.
    """
    sides = [
        {name: x for name, x in side.items() if name in _OF_ROWS | _OF_KEYS | _PER_KEY} for side in (inputs, *others)
    ]
    with suppress(RuntimeError):  # torch.vmap cannot test the numbers of all calls at once
        if all(bool(x.isfinite().all()) for side in sides for x in side.values()):
            return inputs, *others
    none = inputs["q"].new_zeros((1, 1, 1), dtype=torch.bool)
    bad, heads = {"bad rows": none, "bad keys": none}, inputs["q"].shape[-3]
    for side in sides:
        for name, x in side.items():
            wrong = ~x.isfinite()
            wrong = wrong if name in _PER_KEY else wrong.any(-1, keepdim=True)
            wrong = wrong.mT if name in _OF_KEYS else wrong
            kind = "bad rows" if name in _OF_ROWS else "bad keys"
            bad[kind] = bad[kind] | wrong.repeat_interleave(heads // max(1, wrong.shape[-3]), -3)
            side[name] = torch.where(x.isfinite(), x, 0.0)
    whole = tuple({**side, **part} for side, part in zip((inputs, *others), sides, strict=True))
    return {**whole[0], **bad}, *whole[1:]
