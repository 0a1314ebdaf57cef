"""Forward mode and second derivatives of a bundle's results, by `recomputed.py`; what they need of it, and back.

Tensors are there as (…, heads, rows, columns): results per query have one column, results per key one row.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from clearhead.core.observations import areas
from clearhead.core.rules import EVERYWHERE, check_supported, turned_on
from clearhead.core.statistics import PER_KEY, PER_QUERY, STATISTICS, arrays_of, smooth
from clearhead.errors import DerivativeError
from clearhead.ops.recomputed import Form, Tensors, attention, compute, peak_rows
from clearhead.ops.torch_arguments import Options, Settings
from clearhead.ops.torch_passes import Bundle, options_of

_PER_QUERY, _PER_KEY = ({name for name, one in STATISTICS.items() if one.axes == axes} for axes in (PER_QUERY, PER_KEY))
_OF_ROWS, _OF_KEYS = {"q", "g", "output", *_PER_QUERY}, {"k", "v", "product"}
_SMOOTH = {*smooth(), "product"}


def check_smooth(names: Iterable[str], what: str, hint: str = "observe it under torch.no_grad().") -> None:
    """Raise DerivativeError for a result that jumps from key to key, and so has no such derivative.

    names   of statistics or of their arrays
    """
    missing = sorted({"top" if name in arrays_of("top") else name for name in names} - _SMOOTH)
    if missing:
        raise DerivativeError(f"{', '.join(missing)} has no {what} here, since it jumps from one key to another.", hint)


def gradients(bundle: Bundle, upstream: Tensors) -> Tensors:
    """The gradients of the inputs that bundle["asked"] names, from those of any results, which no engine has."""
    form = _form(bundle)
    still, by = _finite(_inputs(form, bundle, upstream), _shaped(bundle, form, upstream))
    if "top_weights" in by:
        still["top places"] = _shape(bundle, form, "top places", bundle["known:top_indices"]).long()
    if "peak" in by:
        still["peak rows"] = peak_rows(form, tuple(still), tuple(still.values()))
        still["row numbers"] = torch.arange(len(form.rows), device=bundle["q"].device)[None, :, None]
    first = attention(form, tuple(by), tuple(still)).gradient([name in bundle["asked"] for name in still])
    made = dict(zip(first.gives, compute(first, *still.values(), *by.values()), strict=True))
    zero = {name: torch.zeros_like(bundle[name]) for name in bundle["asked"] if name not in made}
    return {**zero, **{name: _input(bundle, form, name, x) for name, x in made.items()}}


def tangents(bundle: Bundle, results: Tensors, along: Tensors) -> Tensors:
    """The results' tangents, by name, from those of inputs."""
    check_smooth(results, "forward-mode derivative")
    form = _form(bundle)
    still, moving = _finite(_inputs(form, bundle, results), _shaped(bundle, form, along))
    blocks = attention(form, tuple(results), tuple(still)).tangent([name in moving for name in still])
    moved = compute(blocks, *still.values(), *_ordered(moving, still))
    return {name: _result(bundle, name, x) for name, x in zip(results, moved, strict=True)}


def gradients_tangents(bundle: Bundle, upstream: Tensors, along: Tensors) -> Tensors:
    """The tangents of the gradients of the inputs that bundle["asked"] names.

    upstream   gradients of results
    along      tangents of inputs and, as "by:output", of upstream gradients
    """
    check_smooth(upstream, "second derivative")
    form, moved = _form(bundle), {name: along[f"by:{name}"] for name in upstream if f"by:{name}" in along}
    inputs = {name: x for name, x in along.items() if ":" not in name}
    sides = _shaped(bundle, form, upstream), _shaped(bundle, form, inputs), _shaped(bundle, form, moved)
    still, by, moving, changing = _finite(_inputs(form, bundle, upstream), *sides)
    first = attention(form, tuple(by), tuple(still)).gradient([name in bundle["asked"] for name in still])
    blocks = first.tangent([*(name in moving for name in still), *(name in changing for name in by)])
    made = compute(blocks, *still.values(), *by.values(), *_ordered(moving, still), *_ordered(changing, by))
    return {name: _input(bundle, form, name, x) for name, x in zip(first.gives, made, strict=True)}


def gradients_gradients(bundle: Bundle, upstream: Tensors, again: Tensors, needed: Iterable[str]) -> Tensors:
    """The gradients of Σ again·gradients by what is `needed`: inputs and, "by:" named, upstream gradients.

    upstream   gradients of results, from which the first gradients came
    again      upstream gradients of these, by the inputs' names
    """
    check_smooth(upstream, "second derivative")
    form, names = _form(bundle), {*needed}
    sides = _shaped(bundle, form, upstream), _shaped(bundle, form, again)
    still, by, second = _finite(_inputs(form, bundle, upstream), *sides)
    first = attention(form, tuple(by), tuple(still)).gradient([name in second for name in still])
    blocks = first.gradient([*(name in names for name in still), *(f"by:{name}" in names for name in by)])
    made = iter(compute(blocks, *still.values(), *by.values(), *_ordered(second, still)))
    found = {name: _input(bundle, form, name, next(made)) for name in still if name in names}
    for name in by:
        if f"by:{name}" in names:
            found[f"by:{name}"] = _result(bundle, name, next(made)).to(upstream[name].dtype)
    return found


def _ordered(some: Tensors, of: Iterable[str]) -> list[Tensor]:
    return [some[name] for name in of if name in some]


def _form(bundle: Bundle) -> Form:
    rules = Settings(**{name: bundle[name] for name in Settings._fields}).rules()
    check_supported("a recomputed derivative", EVERYWHERE, turned_on(rules))
    q, k = bundle["q"], bundle["k"]
    left, right, causal, offset = (bundle[name] for name in ("left", "right", "causal", "query_offset"))
    scale = bundle["scale"]
    return Form(
        batch=q.shape[:-3].numel(),
        heads=q.shape[-3] if q.ndim > 2 else 1,
        kv_heads=k.shape[-3] if k.ndim > 2 else 1,
        rows=range(q.shape[-2])[options_of(bundle).queries()],
        keys=k.shape[-2],
        scale=float(1 / max(1, q.shape[-1]) ** 0.5 if scale is None else scale),
        softcap=None if bundle["softcap"] is None else float(bundle["softcap"]),
        left=left,
        right=right if not causal else 0 if right is None else min(right, 0),
        offset=0 if offset is None else None if isinstance(offset, Tensor) else int(offset),
    )


def _usual(bundle: Bundle) -> torch.dtype:
    return torch.float64 if bundle["q"].dtype == torch.float64 else torch.float32


def _chosen(form: Form, x: Tensor, place: int, whole: int) -> Tensor:
    """The chosen queries along an axis; one that is shared stays as it is."""
    if form.rows == range(whole) or x.shape[place] != whole:
        return x
    return x.index_select(place, torch.tensor([*form.rows], dtype=torch.int64, device=x.device))


def _shape(bundle: Bundle, form: Form, name: str, x: Tensor) -> Tensor:
    """An input, a result or what belongs to it as (…, heads, rows, columns), in the dtype of statistics; linear."""
    x = x.to(_usual(bundle))
    if name in ("sinks", "scales", "alibi_slopes"):
        return x.reshape(-1, 1, 1)
    if name in _PER_QUERY:
        x = x.unsqueeze(-1)
    elif name in _PER_KEY:
        x = x.unsqueeze(-2)
    x = x.reshape((1,) * (3 - x.ndim) + tuple(x.shape))
    return _chosen(form, x, -2, bundle["q"].shape[-2]) if name in ("q", "bias") else x


def _shaped(bundle: Bundle, form: Form, tensors: Tensors) -> Tensors:
    return {name: _shape(bundle, form, name, x) for name, x in tensors.items()}


def _input(bundle: Bundle, form: Form, name: str, gradient: Tensor) -> Tensor:
    """A gradient of an input in the input's own shape and dtype: the transpose of `_shape`."""
    made: Tensor = torch.func.vjp(partial(_shape, bundle, form, name), bundle[name])[1](gradient)[0]
    return made


def _result(bundle: Bundle, name: str, x: Tensor) -> Tensor:
    """A result, or what belongs to it, in the shape in which it is answered."""
    x = x.squeeze(-1) if name in _PER_QUERY else x.squeeze(-2) if name in _PER_KEY else x
    x = x if bundle["q"].ndim > 2 else x.squeeze(0)
    return x.to(bundle["q"].dtype) if name == "output" else x


def _inputs(form: Form, bundle: Bundle, results: Tensors) -> Tensors:
    """The tensors that the definition of these results reads."""
    names = ("q", "k", "bias", "sinks", "scales", "alibi_slopes", "span_table", *(["v"] if "output" in results else []))
    names = (*names, "g") if "product" in results else names
    made = {name: _shape(bundle, form, name, bundle[name]) for name in names if bundle.get(name) is not None}
    q, queries = bundle["q"], bundle["q"].shape[-2]
    rows = torch.tensor([*form.rows], dtype=torch.int64, device=q.device)[:, None]
    keys = torch.arange(form.keys, device=q.device)
    offset = bundle["query_offset"]
    made["positions"] = rows + _each(offset) if isinstance(offset, Tensor) else (rows + (form.offset or 0))[None]
    made["places"] = keys[None, None]
    if bundle["query_lengths"] is not None:
        made["queries_there"] = rows < _each(bundle["query_lengths"])
    if bundle["kv_lengths"] is not None:
        made["keys_there"] = keys < _each(bundle["kv_lengths"])
    if bundle["mask"] is not None:
        mask: Tensor = bundle["mask"]
        made["mask"] = _chosen(form, mask.reshape((1,) * (3 - mask.ndim) + tuple(mask.shape)), -2, queries)
    for name in ("query_segments", "query_spans", "kv_segments", "key_spans"):
        if bundle[name] is not None:
            labels = bundle[name].long().reshape(bundle[name].shape or (1,))
            of_queries = name.startswith("query")
            labels = _chosen(form, labels, -1, queries) if of_queries else labels
            made[name] = labels[..., None, :, None] if of_queries else labels[..., None, None, :]
    for name in {"image", "groups"} & {*results}:
        sides = _of_image(form, results[name]) if name == "image" else _of_groups(form, bundle, results[name])
        for side, x in zip(("queries", "keys"), sides, strict=True):
            made[f"{name} of {side}"] = x.to(q.device, _usual(bundle))
    return made


def _each(x: Tensor) -> Tensor:
    """A number for each batch entry."""
    return x.long()[..., None, None, None]


def _of_image(form: Form, image: Tensor) -> Iterable[Tensor]:
    """The share of each query, and of each key, in a picture's pixels: (1, queries, height) and (1, keys, width)."""
    for pixels, size in zip(image.shape[-2:], (len(form.rows), form.keys), strict=True):
        shares = torch.from_numpy(areas(pixels, size, slice(0, size))[1]) if size else torch.zeros(pixels, 0)
        yield shares.T[None]


def _of_groups(form: Form, bundle: Bundle, groups: Tensor) -> Iterable[Tensor]:
    """Which group each query, and each key, belongs to, as ones: (…, 1, queries or keys, groups)."""
    options: Options = options_of(bundle)
    for labels, count in zip((options.query_groups, options.key_groups), groups.shape[-2:], strict=True):
        assert labels is not None
        if labels is options.query_groups:
            labels = _chosen(form, labels, -1, bundle["q"].shape[-2])
        yield (labels[..., None, :, None] == torch.arange(count, device=labels.device))


def _finite(inputs: Tensors, *others: Tensors) -> tuple[Tensors, ...]:
    """The tensors with 0 for NaN and infinity, and "bad rows" and "bad keys" among the inputs, which say where one was.

    Else 0·NaN would bring them where a rule forbids it. Biases and tables are left as they are: no product reads them.
    """
    sides = [
        {name: x for name, x in side.items() if name in _OF_ROWS | _OF_KEYS | _PER_KEY} for side in (inputs, *others)
    ]
    if all(_all_finite(x) for side in sides for x in side.values()):
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


def _all_finite(x: Tensor) -> bool:
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return bool(x.isfinite().all())
