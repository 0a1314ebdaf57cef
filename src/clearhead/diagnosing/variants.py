"""Changes that depend on the inputs: other scales, the sizes of blocks, narrower dtypes, some of several matrices."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np

from clearhead.diagnosing.conditions import hides, holds
from clearhead.diagnosing.recipe import STAGES, Change, Diagnosed


class Variants(NamedTuple):
    """The changes that are usual, and those that are tried alone and last."""

    usual: Iterable[Change] = ()
    rare: Iterable[Change] = ()


def _scales(inputs: Diagnosed, which: float | str) -> Variants:
    """Other scales, where they differ from the right one: a number, or one that is named after what it comes from."""
    right = inputs.problem.scale
    scales = {which} if isinstance(which, float) else {*_scale(inputs, which)}
    return Variants([{"scale": float(x)} for x in sorted(scales) if (abs(x - right) > 1e-9 * abs(right)).any()])


def _scale(inputs: Diagnosed, which: str) -> Iterable[float]:
    p = inputs.problem
    widths = {  # divided by the square root of a width
        "d_k": [p.d_k],
        "d_v": [inputs.v.shape[-1]],
        "d_model": [p.heads * p.d_k] + ([] if inputs.layer is None else [inputs.layer.x.shape[-1]]),
        "all heads": [p.heads * p.d_k],
        "length": sorted({p.queries, p.keys} - {1}),
        "heads": sorted({p.heads, p.kv_heads} - {1}),
    }
    if which in widths:
        return [width**-0.5 for width in widths[which] if width and (which == "d_k" or width != p.d_k)]
    right = p.scale[:1] if len(np.unique(p.scale)) == 1 else p.scale[:0]  # one number for all heads
    return {
        "1/d_k": [1 / p.d_k],
        "1/2d_k": [0.5 / p.d_k],
        "twice": [*right**2],
        "inverse": [*1 / right[right != 0]],
        "log2 e": [*right * np.log2(np.e)],
    }[which]


def _overflows(inputs: Diagnosed, *_: object) -> Variants:
    """The dtypes whose range exp can leave where no maximum is subtracted; only NaN in theirs shows that."""
    if np.isfinite(inputs.theirs.astype(np.float64)).all():
        return Variants()
    names = {dtype.name for dtype in (inputs.theirs.dtype, inputs.problem.dtype)} & {"float16", "float64"}
    return Variants([{"overflow": name} for name in sorted({*names, "float32"})])


def _later_steps(inputs: Diagnosed, *_: object) -> Variants:
    """The later steps up to the weights that change the numbers."""
    works = {
        "scaled": holds("scaled", inputs),
        "capped": inputs.problem.uses("softcap"),
        "biased": any(map(inputs.problem.uses, ("bias", "alibi_slopes", "spans"))),
        "masked": hides(inputs),
        "weights": True,
    }
    if inputs.stage not in STAGES[:5]:
        return Variants()
    later = STAGES[STAGES.index(inputs.stage) + 1 : 6]  # an earlier step means a missing rule, which has its own entry
    return Variants([{"step": step} for step in later if works[step]])


def _some(field: str, inputs: Diagnosed, value: str) -> Variants:
    """A layer's square matrices, or its biases: each alone, q, k and v, and all together; other subsets are rare."""
    arrays = {} if inputs.layer is None else getattr(inputs.layer, field)
    names = [name for name, x in arrays.items() if field == "b" or x.shape[0] == x.shape[1]]
    subsets = [some for many in range(1, len(names) + 1) for some in combinations(names, many)]
    projections = tuple(name for name in names if name != "o")
    usual = [some for some in subsets if len(some) in (1, len(names)) or some == projections]
    rare = [some for some in subsets if some not in usual]
    return Variants(*([{f"{field}_{name}": value for name in some} for some in chosen] for chosen in (usual, rare)))


def _chunks(inputs: Diagnosed, *_: object) -> Variants:
    """Chunks as wide as the window, or as one of its sides."""
    left, right = inputs.problem.window
    sizes = set() if left is None else {left, left + 1, left + 1 + (right or 0)} - {0}
    return Variants([{"chunk": size} for size in sorted(sizes) if size < inputs.problem.keys])


def _every_rule(inputs: Diagnosed, value: str) -> Variants:
    """All rules that hide keys at once, where there are at least three."""
    fields = {"kv_lengths": "padding", "query_lengths": "query_padding", "query_segments": "segments"}
    rules = ("causal", "window", "mask", *fields)
    change = {fields.get(rule, rule): value for rule in rules if inputs.problem.uses(rule)}
    return Variants([change] if len(change) > 2 else [])


def _narrow(inputs: Diagnosed, where: str) -> Variants:
    size = min(inputs.theirs.dtype.itemsize, inputs.problem.dtype.itemsize)
    names = [name for name, itemsize in (("float32", 4), ("float16", 2), ("bfloat16", 2)) if itemsize < size]
    return Variants([{"half": where, "half_dtype": name} for name in names])


# ── blocks ──


def _sizes(length: int) -> list[int]:
    """The usual sizes of blocks; 2 and 4 only where the length is short."""
    return [size for size in (2, 4) if length <= 64] + [size for size in (8, 16, 32, 64, 128) if size < length]


def _in_blocks(field: str, inputs: Diagnosed, kind: str, *, any_size: bool = False) -> Variants:
    """A bug of some kind in blocks of each size; blocks of fewer than 16 keys are rare unless they have any size."""
    keys = inputs.problem.keys
    sizes = _sizes(keys)
    if any_size:
        others = (*range(1, min(keys, 257)), 512, 1024)
        usual, rare = sizes, [size for size in others if size < keys and size not in sizes]
    else:
        usual = [size for size in sizes if size >= 16] or sizes[-1:]
        rare = [size for size in sizes if size not in usual]
    chosen = ([s for s in some if kind != "overlapping" or keys % s] for some in (usual, rare))
    return Variants(*([{field: (kind, size)} for size in some] for some in chosen))


def _key_tails(inputs: Diagnosed, kind: str) -> Variants:
    """One block size for each number of keys that are skipped, or of zeros that are read."""
    keys = inputs.problem.keys
    usual, every = (_tail_sizes(keys, kind, sizes) for sizes in (_sizes(keys), range(1, min(keys, 257))))
    changes = (
        [{"key_tail": (kind, size)} for size in sizes] for sizes in (usual, [s for s in every if s not in usual])
    )
    return Variants(*changes)


def _tail_sizes(keys: int, kind: str, sizes: Iterable[int]) -> list[int]:
    uneven = sorted((size for size in sizes if keys % size), reverse=True)
    return sorted({tail_length(kind, size, keys): size for size in uneven}.values())


def tail_length(kind: str, block: int, keys: int) -> int:
    """How many keys a kernel skips behind its last whole block, or how many zeros it reads behind them."""
    return keys % block if kind == "skipped" else -keys % block


def _query_tails(inputs: Diagnosed, kind: str) -> Variants:
    """The rows behind the last whole block of queries: 0, or whatever the memory held."""
    n, theirs = inputs.problem.queries, inputs.theirs.astype(np.float64)
    starts = sorted({n // size * size for size in (*_sizes(n), *range(3, min(n, 33))) if n % size}, reverse=True)
    zeros = [start for start in starts if not theirs[:, :, start:].any()]
    chosen = zeros if kind == "zero" else starts if not zeros else []
    return Variants([{"tail": (kind, start)} for start in chosen])


COMPUTED: dict[str, Callable[[Diagnosed, str], Variants]] = {  # by the field that mistakes.toml names
    "scale": _scales,
    "overflow": _overflows,
    "step": _later_steps,
    "w": partial(_some, "w"),
    "b": partial(_some, "b"),
    "chunk": _chunks,
    "every rule": _every_rule,
    "half": _narrow,
    "blocks": partial(_in_blocks, "blocks"),
    "blocks of any size": partial(_in_blocks, "blocks", any_size=True),
    "tile": partial(_in_blocks, "tile"),
    "key_tail": _key_tails,
    "tail": _query_tails,
}
