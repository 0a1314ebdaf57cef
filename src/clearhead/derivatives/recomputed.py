"""Every derivative that no kernel has: the definition over blocks of rows, recomputed for each derivative.

`Blocks` is a function of tensors whose results are assembled from those of its blocks. Its gradient and its tangent
are such functions again, and PyTorch's graph keeps only their inputs. So a derivative of any order takes
O(queries + keys) memory besides one block. Within a block, core/definition.py writes the formulas in PyTorch's
operations: they run on any device and under every transform of torch.func.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.core import definition
from clearhead.core.block import Block
from clearhead.core.namespace import take
from clearhead.core.statistics import PER_KEY, PER_QUERY, STATISTICS, arrays_of

Tensors = dict[str, Tensor]
INPUTS = ("q", "k", "v", "bias", "sinks", "span_table")  # the inputs that have a derivative
_BLOCK = 1 << 18  # weights of a block; a second derivative holds some forty arrays of this size at a time
_ROWS = 64  # a block gets this many rows before it gets more heads
_AXES = {  # the last three axes of each tensor; "" is not cut into blocks
    **dict.fromkeys(("q", "g", "output", "bad rows"), ("heads", "rows", "")),
    **dict.fromkeys(("k", "v", "product"), ("heads", "keys", "")),
    **dict.fromkeys(("bias", "mask"), ("heads", "rows", "keys")),
    **dict.fromkeys(("span_table", "sinks", "scales", "alibi_slopes", "image", "groups"), ("heads", "", "")),
    **dict.fromkeys(("positions", "queries_there", "query_segments", "query_spans"), ("", "rows", "")),
    **dict.fromkeys(("places", "keys_there", "kv_segments", "key_spans"), ("", "", "keys")),
    **dict.fromkeys(("image of queries", "groups of queries"), ("", "rows", "")),
    **dict.fromkeys(("image of keys", "groups of keys"), ("", "keys", "")),
    **{x: ("heads", "rows", "") for name, one in STATISTICS.items() if one.axes == PER_QUERY for x in arrays_of(name)},
    **{x: ("heads", "", "keys") for name, one in STATISTICS.items() if one.axes == PER_KEY for x in arrays_of(name)},
    **dict.fromkeys(("bad keys", "peak rows"), ("heads", "", "keys")),
    **dict.fromkeys(("top_weights", "top places"), ("heads", "rows", "")),
    "row numbers": ("", "rows", ""),
}
_OF_BLOCK = {field.name for field in fields(Block)}


@dataclass(frozen=True, eq=False, slots=True)
class Form:
    """What the definition needs besides tensors: sizes, numbers and positions."""

    batch: int
    heads: int
    kv_heads: int
    rows: range  # the indices of the queries in the whole matrix
    keys: int
    scale: float
    softcap: float | None
    left: int | None  # how many keys before its position a query may see; None: all
    right: int | None
    offset: int | None  # of the queries' positions; None: not the same known number for all

    def blocks(self) -> Iterator[dict[str, slice]]:
        """The key heads, rows and keys of each block."""
        count, each = len(self.rows), max(1, self.batch * self.heads // max(1, self.kv_heads) * self.keys)
        step = max(1, _BLOCK // (each * max(1, min(count, _ROWS))))
        tall = max(1, _BLOCK // (each * min(step, max(1, self.kv_heads))))
        for head in range(0, max(1, self.kv_heads), step):
            for row in range(0, max(1, count), tall):
                rows = slice(row, min(count, row + tall))
                heads = slice(head, min(self.kv_heads, head + step))
                yield {"heads": heads, "rows": rows, "keys": self._reached(self.rows[rows])}

    def _reached(self, rows: range) -> slice:
        """The keys that these rows may see, judged by position alone."""
        if self.offset is None or not rows:
            return slice(0, self.keys)
        first, last = min(rows) + self.offset, max(rows) + self.offset
        start = 0 if self.left is None else min(self.keys, max(0, first - self.left))
        return slice(start, self.keys if self.right is None else max(start, min(self.keys, last + self.right + 1)))

    def sizes(self, name: str) -> list[int | None]:
        """The sizes of a result's last three axes; None where only the result itself tells."""
        known = {"heads": self.heads, "rows": len(self.rows), "keys": self.keys}
        return [known.get(axis) for axis in _AXES[name]]

    def within(self, name: str, sizes: Sequence[int], block: dict[str, slice]) -> tuple[Any, ...]:
        """The index of a block in a tensor with these last axes; all blocks share an axis of size 1."""
        index: list[Any] = [...]
        for axis, size in zip(_AXES[name], sizes, strict=True):
            part = slice(None) if not axis or size == 1 else block[axis]
            if axis == "heads" and size != 1 and self.kv_heads:
                part = slice(*(place * size // self.kv_heads for place in (part.start, part.stop)))
            index.append(part)
        return tuple(index)


@dataclass(frozen=True, eq=False, slots=True)
class Blocks:
    """A function of tensors that is computed block by block.

    function   maps the tensors of one block to its results, which are added to the whole at the block's place
    takes      the tensors' names in _AXES; gives: the results' names
    """

    form: Form
    function: Callable[..., tuple[Tensor, ...]]
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def gradient(self, wanted: Sequence[bool]) -> "Blocks":
        """The gradients of the wanted tensors, as Blocks that take all tensors and the results' upstream gradients."""
        count = len(self.takes)

        def function(*x: Tensor) -> tuple[Tensor, ...]:
            back = torch.func.vjp(self._of(wanted, x[:count]), *compress(x, wanted))[1]
            return tuple(back(x[count:]))

        return Blocks(self.form, function, (*self.takes, *self.gives), tuple(compress(self.takes, wanted)))

    def tangent(self, moving: Sequence[bool]) -> "Blocks":
        """The results' tangents, as Blocks that take all tensors and the tangents of the moving ones."""
        count = len(self.takes)

        def function(*x: Tensor) -> tuple[Tensor, ...]:
            at = tuple(y.contiguous() for y in compress(x, moving))  # jvp refuses tangents with expanded strides
            of, along = self._of(moving, x[:count]), x[count:]
            try:
                return tuple(torch.func.jvp(of, at, along)[1])
            except RuntimeError as error:  # inside of forward_ad.dual_level, which PyTorch cannot nest
                if "Nested forward mode" not in str(error):
                    raise
            # jvp by two vjps: the gradient is linear in the upstream gradient, so its gradient is the tangent
            results, back = torch.func.vjp(of, *at)[:2]
            return tuple(torch.func.vjp(lambda *by: back(by), *map(torch.zeros_like, results))[1](along))

        return Blocks(self.form, function, (*self.takes, *compress(self.takes, moving)), self.gives)

    def mapped(self, count: int, axes: Sequence[int | None]) -> "Blocks":
        """`count` calls at once: each tensor has the calls' axis in front, or is shared by all if its axis is None."""
        form = replace(self.form, batch=self.form.batch * max(1, count))
        function: Any = torch.func.vmap(self.function, in_dims=tuple(axes))
        return Blocks(form, function, self.takes, self.gives)

    def _of(self, moving: Sequence[bool], still: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        """The function of the moving tensors alone."""

        def function(*x: Tensor) -> tuple[Tensor, ...]:
            given = iter(x)
            return self.function(*(next(given) if moves else y for moves, y in zip(moving, still, strict=True)))

        return function

    def run(self, x: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results."""
        form, totals = self.form, dict[int, Tensor]()
        known = {name: list(y.shape[-3:]) for name, y in zip(self.takes, x, strict=True)}
        for block, parts in self.each(x):
            for place, (name, part) in enumerate(zip(self.gives, parts, strict=True)):
                if place not in totals:
                    sizes = known.get(name, form.sizes(name))
                    whole = [n if size is None else size for size, n in zip(sizes, part.shape[-3:], strict=True)]
                    totals[place] = part.new_zeros((*part.shape[:-3], *whole))
                totals[place][form.within(name, totals[place].shape[-3:], block)].add_(part)
        return tuple(totals[place] for place in range(len(self.gives)))

    def each(self, x: Sequence[Tensor]) -> Iterator[tuple[dict[str, slice], tuple[Tensor, ...]]]:
        """The results of each block."""
        for block in self.form.blocks():
            named = zip(self.takes, x, strict=True)
            yield block, self.function(*(y[self.form.within(name, y.shape[-3:], block)] for name, y in named))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(blocks: Blocks, *x: Tensor) -> tuple[Tensor, ...]:
        return blocks.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del output
        ctx.blocks = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:]
        found = iter(compute(ctx.blocks.gradient(wanted), *ctx.saved_tensors, *upstream))
        return None, *(next(found) if one else None for one in wanted)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        still = [still_of(x) for x in ctx.saved_tensors]
        moving = [t is not None and x.is_floating_point() for x, t in zip(still, tangents, strict=True)]
        along = [t for t in compress(tangents, moving) if t is not None]
        return compute(ctx.blocks.tangent(moving), *still, *along)

    @staticmethod
    def vmap(info: Any, dims: Sequence[int | None], blocks: Blocks, *x: Tensor) -> Any:
        axes = [None if axis is None else 0 for axis in dims[1:]]
        lead = (y if axis is None else y.movedim(axis, 0) for y, axis in zip(x, dims[1:], strict=True))
        return compute(blocks.mapped(info.batch_size, axes), *lead), (0,) * len(blocks.gives)


def compute(blocks: Blocks, *x: Tensor) -> tuple[Tensor, ...]:
    """Compute the results, with derivatives of every order."""
    results: tuple[Tensor, ...] = _Recomputed.apply(blocks, *x)  # type: ignore[no-untyped-call]
    return results


def still_of(x: Tensor) -> Tensor:
    """A tensor without the tangent that it carries in forward mode."""
    still: Tensor = forward_ad.unpack_dual(x).primal if x.is_floating_point() else x  # type: ignore[no-untyped-call]
    return still


def attention(form: Form, names: Sequence[str], takes: Sequence[str]) -> Blocks:
    """Make the Blocks that compute these results of attention; takes: the tensors' names, mostly Block's fields."""
    return Blocks(form, partial(_results, form, tuple(names), tuple(takes)), tuple(takes), tuple(names))


def peak_rows(form: Form, takes: Sequence[str], given: Sequence[Tensor]) -> Tensor:
    """The row with each key's largest weight, (…, heads, 1, keys); the first of equal ones."""
    shape = *given[0].shape[:-3], form.heads, 1, form.keys
    best, at = given[0].new_full(shape, -1.0), given[0].new_zeros(shape, dtype=torch.int64)
    for block, (weights,) in attention(form, ("weights",), takes).each(given):
        index = form.within("peak", shape[-3:], block)
        if not weights.numel():
            continue
        largest, row = weights.max(-2, keepdim=True)
        better = largest > best[index]
        at[index] = torch.where(better, row + block["rows"].start, at[index])
        best[index] = torch.where(better, largest, best[index])
    return at


def _results(form: Form, names: Sequence[str], takes: Sequence[str], *given: Tensor) -> tuple[Tensor, ...]:
    x = dict(zip(takes, given, strict=True))
    rules: dict[str, Any] = {name: y for name, y in x.items() if name in _OF_BLOCK}
    rules["scale"] = x.get("scales", form.scale)
    if "bad rows" in x:
        rules["unknown"] = torch.where(x["bad rows"] | x["bad keys"], torch.nan, 0.0)
    block = Block(softcap=form.softcap, left=form.left, right=form.right, **rules)
    masked = definition.logits(block)
    a = definition.Matrix(block, masked, *definition.softmax(masked, block.sinks))
    made = {name: y[..., None] for name, y in definition.per_query(a, names).items()}
    others: dict[str, Callable[[], Tensor]] = {
        "output": lambda: definition.product(a.weights, x["v"]),
        "product": lambda: a.weights.mT @ x["g"],
        "received": lambda: definition.received(a)[..., None, :],
        "peak": lambda: torch.where(x["peak rows"] == x["row numbers"], a.weights, 0.0).sum(-2, keepdim=True),
        "top_weights": lambda: _at(a.weights, x["top places"], x["places"]),
        "weights": lambda: a.weights,
        "image": lambda: x["image of queries"].mT @ a.weights @ x["image of keys"],
        "groups": lambda: x["groups of queries"].mT @ a.weights @ x["groups of keys"],
    }
    return tuple(made[name] if name in made else others[name]() for name in names)


def _at(weights: Tensor, places: Tensor, keys: Tensor) -> Tensor:
    """Each row's weights at these places among all keys; 0 at a place outside the block."""
    if not keys.shape[-1]:
        return torch.zeros_like(places, dtype=weights.dtype)
    local = places - keys[..., :1]
    inside = (local >= 0) & (local < keys.shape[-1])
    return torch.where(inside, take(weights, local.clamp(0, keys.shape[-1] - 1), -1), 0.0)
