"""The Triton engine: hands tensors in a GPU's memory to the kernels in gpu/; no arithmetic.

Sums are in float32 (float64 for float64); float32 products are exact ones unless PyTorch was told that TF32 will do
(torch.backends.cuda.matmul.allow_tf32). Where TRITON_INTERPRET is set, Triton's interpreter runs the same kernels on
the CPU's memory: slowly, for tests.
"""

from math import gcd
from typing import Any

import numpy as np

from clearhead.axes import Array
from clearhead.observations import Wanted
from clearhead.problem import Problem

try:
    import torch
    import triton

    from clearhead.engines.gpu import given as gpu
    from clearhead.engines.gpu.rows import Partial, Rows
    from clearhead.engines.gpu.rows import merge as merge_kernel
    from clearhead.engines.gpu.rows import rows as rows_kernel
except ImportError:
    triton = None

MOST_D = 256
_quiet = np.errstate(all="ignore")  # the interpreter computes with NumPy; infinities are values here
_FEW_ROWS = 64  # so many rows of a key head are one tile: decoding
_SPLIT = 512  # keys in a split are a multiple of this


def missing() -> str:
    """Why the kernels cannot run at all; "" where they can."""
    return "triton or torch is not installed." if triton is None else ""


def reasons_not(problem: Problem) -> list[str]:
    """Why not: no Triton, arrays elsewhere, rows of q and k that are too wide."""
    against = [missing()] if triton is None else []
    if triton is not None and problem.device == "cpu" and not triton.knobs.runtime.interpret:
        against.append("the arrays are in the CPU's memory, and TRITON_INTERPRET is not set.")
    if problem.d_k > MOST_D:
        against.append(f"d_k is {problem.d_k}: the kernels hold at most {MOST_D}.")
    return against


@_quiet
def rows(problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted) -> dict[str, Array]:
    """The output and the row statistics, in one pass over the keys."""
    device, number = gpu.place_of(q), gpu.statistics(problem)
    shape = (problem.batch, problem.heads, problem.queries)
    found: dict[str, Any] = {}
    if want.output and v is not None:
        found["output"] = torch.empty((*shape, v.shape[-1]), dtype=gpu.own_dtype(problem), device=device)
    for name in ("logsumexp", "max_logit", "entropy", "distance"):
        if getattr(want, name):
            found[name] = torch.empty(shape, dtype=number, device=device)
    if want.top is not None:
        found["top_weights"] = torch.empty((*shape, want.top), dtype=number, device=device)
        found["top_indices"] = torch.empty((*shape, want.top), dtype=torch.int64, device=device)
    if problem.batch * problem.heads * problem.queries:
        _launch_rows(problem, q, k, v if want.output else None, want.top or 0, found)
    return {name: gpu.taken(tensor, q) for name, tensor in found.items()}


def _launch_rows(problem: Problem, q: Array, k: Array, v: Array | None, top: int, found: dict[str, Any]) -> None:
    device, number = gpu.place_of(q), gpu.statistics(problem)
    output = found.get("output")
    d_v = 0 if v is None else v.shape[-1]
    tiles = gpu.tiles(problem, d_v)
    per_key = problem.heads // k.shape[1]
    per_value = per_key if v is None else problem.heads // v.shape[1]
    together = gcd(per_key, per_value)
    pack = together if together * problem.queries <= _FEW_ROWS else 1
    height = min(tiles.queries, gpu.padded(pack * problem.queries))
    split = _split(problem, pack)
    splits = 1 if split is None else -(-problem.keys // split)
    slots = max(2, triton.next_power_of_2(top)) if top else 2
    lines = problem.batch * problem.heads * problem.queries

    def room(wanted: bool, *tail: int, dtype: Any = number) -> Any:  # noqa: FBT001
        return torch.empty((splits, lines, *tail), dtype=dtype, device=device) if wanted and split else None

    want = Rows(*(found.get(name) for name in Rows._fields))
    part = Partial(
        maximum=room(True),
        total=room(True),
        centred=room(want.entropy is not None),
        far=room(want.distance is not None),
        top=room(top > 0, slots),
        places=room(top > 0, slots, dtype=torch.int32),
        output=room(output is not None, d_v),
    )
    sizes = {"DV": gpu.padded(d_v), "TOP": slots, "FLOAT": tiles.number}
    own_q, own_k = gpu.given(q), gpu.given(k)
    own_v = (None, None) if v is None else gpu.given(v)
    rules = gpu.rules(problem, device)
    grid = (-(-pack * problem.queries // height), problem.batch * problem.heads // pack, splits)
    rows_kernel[grid](
        *own_q, *own_k, *own_v, problem.d_k, d_v, rules, want, part, pack, per_key, per_value, split, top,
        M=height, N=tiles.keys, DK=gpu.padded(problem.d_k), PRECISION=tiles.precision, **sizes,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if split:
        merge_kernel[(-(-lines // 16),)](rules, want, part, lines, splits, d_v, top, M=16, **sizes)


def _split(problem: Problem, pack: int) -> int | None:
    """How many keys a program takes where queries are few and keys many: by lengths alone, never by the batch."""
    few = 1 if triton.knobs.runtime.interpret else 8  # the interpreter splits small problems too
    if pack * problem.queries > _FEW_ROWS or problem.keys <= few * _SPLIT // 8:
        return None
    size = _SPLIT if not triton.knobs.runtime.interpret else 64
    return max(size, -(-problem.keys // (128 * size)) * size)
