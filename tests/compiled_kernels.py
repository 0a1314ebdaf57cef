"""Compiles every kernel for sm_90 on a machine without a GPU, and prints what each takes of shared memory, in bytes.

A stub of a driver names the GPU; the kernels are never launched. Run with TRITON_INTERPRET unset (test_triton.py does).
"""

import sys
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from clearhead.core.arrays import DeviceArray
from clearhead.core.call import describe
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines import triton
from clearhead.engines.base import Upstream

LENGTH = 128
PLACES = np.arange(LENGTH)
EVERY_RULE: dict[str, Any] = {
    "causal": True, "window": (90, None), "query_offset": 3, "softcap": 5.0, "kv_lengths": 9, "query_lengths": 9,
    "alibi_slopes": np.ones(4), "sinks": np.ones(4), "query_segments": PLACES // 50, "kv_segments": PLACES // 50,
    "mask": PLACES % 3 > 0, "bias": np.zeros((LENGTH, 1), np.float32), "scale": np.arange(4.0),
    "spans": (PLACES // 9, PLACES // 9, np.where(np.tri(15, dtype=bool), np.ones((4, 1, 1)), -np.inf)),
}  # fmt: skip
ROWS: Any = dict.fromkeys(("output", "logsumexp", "max_logit", "entropy", "distance", "diagonal"), True)


class Stub:
    """The part of a driver that compiling needs."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))


def every_pass(dtype: torch.dtype, d: int, rules: dict[str, Any]) -> None:
    q, k, v, g = (DeviceArray(torch.zeros(1, heads, LENGTH, d, dtype=dtype)) for heads in (4, 2, 2, 4))
    lse = DeviceArray(torch.zeros(1, 4, LENGTH, dtype=torch.float64 if dtype == torch.float64 else torch.float32))
    inputs, state = describe(q, k, v, rules), State(lse, lse)
    triton.rows(inputs, Wanted(**ROWS))
    triton.rows(inputs, Wanted(top=8))
    triton.columns(inputs, state, Wanted(received=True, peak=True))
    triton.weights(inputs, state)
    triton.transposed(inputs, state, g)
    triton.gradients(inputs, state, Upstream(lse, g, lse, lse, lse))


def main() -> None:
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        code = launch(kernel, *args, grid=grid, warmup=True, **options)
        print(dtype, d, kernel.__name__, code.metadata.shared, flush=True)
        return code

    JITFunction.run = compile_only
    driver.set_active(Stub())
    for name in sys.argv[1:]:
        dtype, d = getattr(torch, name.split(",")[0]), int(name.split(",")[1])
        every_pass(dtype, d, EVERY_RULE if name.endswith("rules") else {"causal": True})


if __name__ == "__main__":
    main()
