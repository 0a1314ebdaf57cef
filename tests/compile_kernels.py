"""Compile every kernel for an H200 (sm_90) without one: `python compile_kernels.py [more]`; prints their names.

`python compile_kernels.py effects sm_80` compiles those kernels of effects that need most, for that GPU, and prints of
each its bytes of shared memory and of stack, into which registers spill.

The driver is a stub that names the target; kernels are compiled down to the device's own instructions, never launched.
"""

import re
import subprocess
import sys
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from clearhead.core.device_array import DeviceArray
from clearhead.core.effects import Terms, WantedEffects
from clearhead.core.problem import describe
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines import triton
from clearhead.engines.base import Upstream


class Stub:
    """The part of a driver that compiling needs."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
    if "effects" in sys.argv:
        print(kernel.__name__, compiled.metadata.shared, stack(compiled.asm["cubin"]))
    else:
        print(kernel.__name__, len(compiled.asm["cubin"]) > 0)
    return compiled


def stack(cubin: bytes) -> int:
    """The bytes of stack that a thread of a compiled kernel uses."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", told)[0])


def array(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return DeviceArray(torch.zeros(shape, dtype=dtype))


def everything(dtype: torch.dtype, d: int, **rules: Any) -> None:
    """Each kernel, with all its results at once."""
    q, k, v = (array(1, heads, 128, d, dtype=dtype) for heads in (4, 2, 2))
    problem = describe(q, k, None, rules).problem
    number = torch.float64 if dtype == torch.float64 else torch.float32
    lse, g = array(1, 4, 128, dtype=number), array(1, 4, 128, d, dtype=dtype)
    labels = np.zeros((1, 128), np.int64)
    asked = {"logsumexp": True, "max_logit": True, "entropy": True, "distance": True}
    triton.rows(problem, q, k, v, Wanted(output=True, **asked, top=8))
    triton._launch_rows(problem, q, k, v, 0, {"output": q.tensor}, repair=True)
    few = array(1, 4, 1, d, dtype=dtype)
    long = array(1, 2, 9000, d, dtype=dtype)
    one = describe(few, long, None, {"causal": True, "query_offset": 9}).problem
    triton.rows(one, few, long, long, Wanted(output=True, **asked, top=8))
    triton.columns(problem, q, k, lse, Wanted(received=True, peak=True, image=(20, 20)))
    triton.columns(problem, q, k, lse, Wanted(received=True, groups=Groups(labels, labels, (1, 1))))
    triton.weights(problem, q, k, lse)
    triton.transposed(problem, q, k, lse, g)
    spans = None if problem.span_table is None else (1, 4, *problem.span_table.shape[2:])
    told = Upstream(lse, g, lse, lse, lse, bias=(1, 4, 128, 1), spans=spans)
    triton.gradients(problem, q, k, v, lse, told)
    strongest = array(1, 4, 128, dtype=torch.int64)
    groups = Groups(labels, labels, (1, 1))
    asked = {"by_key": True, "by_query": True, "top": 8, "strongest": 20, "image": (20, 20), "groups": groups}
    arrays = problem, q, k, v, g
    triton.others(*arrays)
    triton.others(one, few, long, long, few)
    for terms in (Terms("cut", lse, lse, lse, strongest), Terms("contribution", lse)):
        triton.effects(*arrays, terms, WantedEffects(**asked, order="smallest"))
        triton.effect_tile(*arrays, terms)
        triton.effect_product(*arrays, terms, v, transposed=False)
        triton.effect_product(*arrays, terms, g, transposed=True)


def demanding(dtype: torch.dtype, d: int, asked: WantedEffects, **rules: Any) -> None:
    """The kernels of cuts, with what is asked for together, and the products."""
    q, g, k, v = (array(1, heads, 128, d, dtype=dtype) for heads in (4, 4, 2, 2))
    lse, strongest = array(1, 4, 128), array(1, 4, 128, dtype=torch.int64)
    arrays, terms = (describe(q, k, None, rules).problem, q, k, v, g), Terms("cut", lse, lse, lse, strongest)
    triton.others(*arrays)
    triton.effects(*arrays, terms, asked)
    triton.effect_product(*arrays, terms, v, transposed=False)
    triton.effect_product(*arrays, terms, g, transposed=True)


if __name__ == "__main__":
    launch = JITFunction.run
    JITFunction.run = compile_only
    driver.set_active(Stub())
    places = np.arange(128)
    if "effects" in sys.argv:
        Stub.capability = int(sys.argv[-1].removeprefix("sm_"))
        everywhere = WantedEffects(by_key=True, by_query=True, top=8, strongest=20, image=(256, 256))
        table = np.where(np.tri(15, dtype=bool), np.ones((4, 1, 1)), -np.inf)
        spans = {"spans": (places // 9, places // 9, table), "scale": np.arange(4.0)}
        demanding(torch.bfloat16, 64, everywhere, causal=True, **spans)
        demanding(torch.float32, 128, WantedEffects(top=8, strongest=20), causal=True, **spans)
        sys.exit()
    if "more" in sys.argv:
        everything(torch.bfloat16, 40)
        everything(torch.float64, 16, causal=True)
        everything(torch.bfloat16, 64, spans=(places // 9, places // 9, np.tri(15)), scale=np.arange(4.0))
        everything(torch.float32, 100)
    everything(
        torch.float16, 16, causal=True, window=(90, None), query_offset=3, softcap=5.0, kv_lengths=9, query_lengths=9,
        alibi_slopes=np.ones(4), sinks=np.ones(4), query_segments=places // 50, kv_segments=places // 50,
        mask=places % 3 > 0, bias=np.zeros((128, 1), np.float32), scale=np.arange(4.0),
        spans=(places // 9, places // 9, np.where(np.tri(15, dtype=bool), np.ones((4, 1, 1)), -np.inf)),
    )  # fmt: skip
