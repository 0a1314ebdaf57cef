"""What every GPU kernel takes: registers, stack, shared memory, by Triton's compiler, on a machine without a GPU.

python -m benchmarks.compiled prints the table; --save keeps its figures in benchmarks/results/compiled.json; --check
compares every case with these figures and with what such GPUs have. A stub of a driver names the GPU; kernels are
compiled down to its own instructions and never launched. Registers that do not fit spill into the stack.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import numpy as np
import torch
import triton as compiler
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from clearhead.core.device_array import DeviceArray
from clearhead.core.directions import Directions
from clearhead.core.effects import Edges, Terms, WantedEffects
from clearhead.core.problem import Inputs, describe
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines import triton
from clearhead.engines.base import Kept, Upstream
from clearhead.engines.gpu import passes, row_pass

GPUS = ("sm_80", "sm_90", "sm_100")
SAVED = Path(__file__).parent / "results" / "compiled.json"
SHARED = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}  # sm_86, 89, 120 run kernels like sm_80's
STACK = 2048
LENGTH = 128
PLACES = np.arange(LENGTH)
BY_HEAD = np.where(np.tri(15, dtype=bool), np.ones((4, 1, 1)), -np.inf)
FORBIDDING = {"spans": (PLACES // 9, PLACES // 9, BY_HEAD), "scale": np.arange(4.0)}
EVERY_RULE: dict[str, Any] = {
    "causal": True, "window": (90, None), "query_offset": 3, "softcap": 5.0, "kv_lengths": 9, "query_lengths": 9,
    "alibi_slopes": np.ones(4), "sinks": np.ones(4), "query_segments": PLACES // 50, "kv_segments": PLACES // 50,
    "mask": PLACES % 3 > 0, "bias": np.zeros((LENGTH, 1), np.float32), **FORBIDDING,
}  # fmt: skip


class Needs(NamedTuple):
    """What a thread of a kernel takes of registers and bytes of stack, and a program of bytes of shared memory."""

    registers: int
    stack: int
    shared: int


class Case(NamedTuple):
    dtype: torch.dtype
    d: int
    rules: dict[str, Any]
    usual: bool = True  # in the table


CASES = {
    "bfloat16, d 64": Case(torch.bfloat16, 64, {"causal": True}),
    "bfloat16, d 128": Case(torch.bfloat16, 128, {"causal": True}),
    "float32, d 128": Case(torch.float32, 128, {"causal": True}),
    "bfloat16, d 64, spans": Case(torch.bfloat16, 64, {"causal": True, **FORBIDDING}, usual=False),
    "float32, d 128, spans": Case(torch.float32, 128, {"causal": True, **FORBIDDING}, usual=False),
    "float16, d 16, every rule": Case(torch.float16, 16, EVERY_RULE, usual=False),
    "bfloat16, d 40": Case(torch.bfloat16, 40, {}, usual=False),
    "float64, d 16": Case(torch.float64, 16, {"causal": True}, usual=False),
    "float32, d 100": Case(torch.float32, 100, {}, usual=False),
}


class CaseArrays:
    """The arrays of a case, which `make` makes as torch.zeros does: heads 4, kv_heads 2, `length` queries and keys."""

    def __init__(self, case: Case, length: int = LENGTH, make: Callable[..., torch.Tensor] = torch.zeros) -> None:
        number = torch.float64 if case.dtype == torch.float64 else torch.float32

        def array(*shape: int, dtype: torch.dtype = case.dtype) -> Any:
            return DeviceArray(make(shape, dtype=dtype))

        self.q, self.g = (array(1, 4, length, case.d) for _ in range(2))
        self.k, self.v = (array(1, 2, length, case.d) for _ in range(2))
        self.few, self.long = array(1, 4, 1, case.d), array(1, 2, 9000, case.d)
        self.per_row = array(1, 4, length, dtype=number)
        self.strongest = array(1, 4, length, dtype=torch.int64)
        self.problem = describe(self.q, self.k, None, case.rules).problem
        self.one = describe(self.few, self.long, None, {"causal": True, "query_offset": 9}).problem
        self.table = None if self.problem.span_table is None else (1, 4, *self.problem.span_table.shape[2:])
        labels = np.zeros((1, length), np.int64)
        self.groups = Groups(labels, labels, (1, 1))
        self.bias = (1, 4, length, 1) if self.problem.bias is not None else None
        moved = {"bias": self.problem.bias, "spans": self.problem.span_table, "sinks": self.problem.sinks}
        self.along = Directions(self.q, self.k, self.v, **moved)

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.problem, self.q, self.k, self.v)

    def edges(self, terms: Terms | None = None) -> Edges:
        return Edges(self.problem, self.q, self.k, self.v, self.g, terms)


def rows(x: CaseArrays) -> None:
    triton.rows(x.inputs, Wanted(output=True, **ROWS, top=8))
    row_pass.launch(x.inputs, 0, {"output": x.q.tensor}, repair=True)


def few_rows(x: CaseArrays) -> None:
    triton.rows(Inputs(x.one, x.few, x.long, x.long), Wanted(output=True, **ROWS, top=8))
    triton.others(Edges(x.one, x.few, x.long, x.long, x.few))


def columns(x: CaseArrays) -> None:
    triton.columns(x.inputs, x.per_row, Wanted(received=True, peak=True))
    triton.weights(x.inputs, x.per_row)


def products(x: CaseArrays) -> None:
    triton.columns(x.inputs, x.per_row, Wanted(image=(64, 64)))
    triton.columns(x.inputs, x.per_row, Wanted(groups=x.groups))
    triton.transposed(x.inputs, x.per_row, x.g)


def gradients(x: CaseArrays) -> None:
    upstream = Upstream(x.per_row, x.g, x.per_row, x.per_row, x.per_row, bias=x.bias, spans=x.table)
    triton.gradients(x.inputs, x.per_row, upstream)


def tangents(x: CaseArrays) -> None:
    asked = Wanted(output=True, entropy=True, distance=True, diagonal=True)
    triton.tangents(x.inputs, x.along, asked, x.per_row, x.g if x.g.dtype == x.per_row.dtype else None)


def column_tangents(x: CaseArrays) -> None:
    kept = Kept(x.per_row, x.per_row)
    triton.column_tangents(x.inputs, x.along, kept, Wanted(received=True))
    triton.column_tangents(x.inputs, x.along, kept, Wanted(image=(64, 64), groups=x.groups))


def gradient_tangents(x: CaseArrays) -> None:
    upstream = Upstream(x.per_row, x.g, None, x.per_row, x.per_row, x.per_row, bias=x.bias, spans=x.table)
    triton.gradient_tangents(x.inputs, x.along, Kept(x.per_row, x.per_row), upstream, upstream)


def effects(x: CaseArrays) -> None:
    triton.others(x.edges())
    asked: dict[str, Any] = {"by_key": True, "by_query": True, "top": 8, "strongest": 20, "image": (256, 256)}
    for terms in (Terms("cut", *[x.per_row] * 3, x.strongest), Terms("contribution", x.per_row)):
        triton.effects(x.edges(terms), WantedEffects(**asked, order="smallest"))
        triton.effect_tile(x.edges(terms))


def effect_products(x: CaseArrays) -> None:
    for terms in (Terms("cut", *[x.per_row] * 3, x.strongest), Terms("contribution", x.per_row)):
        triton.effects(x.edges(terms), WantedEffects(groups=x.groups))
        triton.effect_product(x.edges(terms), x.v, transposed=False)
        triton.effect_product(x.edges(terms), x.g, transposed=True)


ROWS: Any = dict.fromkeys(("logsumexp", "max_logit", "entropy", "distance", "diagonal"), True)
PASSES: dict[str, Callable[[CaseArrays], None]] = {
    "rows": rows,
    "few rows": few_rows,
    "columns": columns,
    "images, groups, Aᵀ·g": products,
    "gradients": gradients,
    "tangents": tangents,
    "tangents of columns": column_tangents,
    "tangents of gradients": gradient_tangents,
    "effects": effects,
    "products of effects": effect_products,
}


class Stub:
    """The part of a driver that compiling needs."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def needs(compiled: Any) -> Needs:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    return Needs(registers, stack, int(compiled.metadata.shared))


@contextmanager
def only_compiled(gpu: str) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """While it is entered, launches only compile for that GPU; each adds its kernel's name, the code, and arguments."""
    launch, many = JITFunction.run, passes.MANY
    made: list[tuple[str, Any, dict[str, Any]]] = []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # noqa: ARG001
        code = launch(kernel, *args, grid=grid, warmup=True, **options)
        made.append((kernel.__name__ + ("" if options.get("CAREFUL", True) else ", first launch"), code, options))
        return code

    JITFunction.run, passes.MANY, Stub.capability = compile_only, 0, int(gpu.removeprefix("sm_"))
    driver.set_active(Stub())
    try:
        yield made
    finally:
        JITFunction.run, passes.MANY = launch, many


def compiled(gpu: str, case: str, names: list[str]) -> dict[str, Needs]:
    """By "pass: kernel", the most that any kernel of that pass needs."""
    results: dict[str, Needs] = {}
    inputs = CaseArrays(CASES[case])
    for name in names:
        with only_compiled(gpu) as made:
            PASSES[name](inputs)
        for kernel, code, _ in made:
            known = results.get(f"{name}: {kernel}", Needs(0, 0, 0))
            results[f"{name}: {kernel}"] = Needs(*map(max, zip(needs(code), known, strict=True)))
    return results


Measured = dict[str, dict[str, dict[str, Needs]]]  # by GPU, case, kernel


def table(measured: Measured) -> Iterator[str]:
    for case in dict.fromkeys(case for cases in measured.values() for case in cases):
        gpus = [gpu for gpu in measured if case in measured[gpu]]
        yield f"| {case} | " + " | ".join(f"{gpu}: registers | stack | shared, KiB" for gpu in gpus) + " |"
        yield "| --- |" + " ---: |" * 3 * len(gpus)
        for kernel in measured[gpus[0]][case]:
            cells = [measured[gpu][case][kernel] for gpu in gpus]
            texts = [f"{registers} | {stack} | {shared / 1024:.0f}" for registers, stack, shared in cells]
            yield f"| {kernel} | " + " | ".join(texts) + " |"
        yield ""


def read() -> tuple[str, Measured]:
    """Triton's version and the figures that were saved."""
    held = json.loads(SAVED.read_text())
    by_gpu = held["kernels"].items()
    return held["triton"], {
        gpu: {case: {name: Needs(*x) for name, x in by_name.items()} for case, by_name in cases.items()}
        for gpu, cases in by_gpu
    }


def against(gpu: str, case: str, results: dict[str, Needs], held: Measured) -> Iterator[str]:
    """What is wrong with these figures: too much shared memory or stack for such a GPU, or more than is saved."""
    for name, taken in results.items():
        where = f"{gpu}, {case}, {name}"
        if taken.shared > SHARED[gpu]:
            yield f"{where}: {taken.shared} bytes of shared memory, and such GPUs have {SHARED[gpu]} or more"
        if taken.stack > STACK:
            yield f"{where}: {taken.stack} bytes of stack, and {STACK} are allowed"
        saved = held.get(gpu, {}).get(case, {}).get(name, taken)
        if taken.stack > saved.stack or taken.shared > saved.shared:
            yield f"{where}: {taken}, and {saved} is saved"
        elif taken.stack and taken.registers > saved.registers:
            yield f"{where}: {taken.registers} registers, and {saved.registers} are saved"


def alone(gpu: str, cases: list[str], passes: list[str]) -> dict[str, dict[str, Needs]]:
    """What `compiled` finds, in a process of its own: Triton keeps a kernel that it compiled, whatever the GPU is."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compiled", "--gpu", gpu, "--json"]
    done = subprocess.run([*command, "--case", *cases, "--only", *passes], stdout=subprocess.PIPE, check=True)
    results = json.loads(done.stdout)[gpu]
    return {case: {name: Needs(*x) for name, x in by_name.items()} for case, by_name in results.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", choices=GPUS, default=list(GPUS), metavar="GPU", help=", ".join(GPUS))
    usual = [name for name, case in CASES.items() if case.usual]
    parser.add_argument("--case", nargs="+", choices=CASES, metavar="CASE", help="; ".join(CASES))
    parser.add_argument(
        "--only", nargs="+", choices=PASSES, default=list(PASSES), metavar="PASS", help="; ".join(PASSES)
    )
    parser.add_argument("--json", action="store_true", help="the figures as one line of JSON")
    parser.add_argument("--saved", action="store_true", help="print the saved figures and compile nothing")
    parser.add_argument("--save", action="store_true", help=f"write {SAVED.name}, beside what is there")
    parser.add_argument("--check", action="store_true", help="print what is more than saved or allowed, of every case")
    values = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing.")
    values.case = values.case or (list(CASES) if values.check else usual)
    if values.saved:
        measured = read()[1]
    elif len(values.gpu) > 1:
        measured = {gpu: alone(gpu, values.case, values.only) for gpu in values.gpu}
    else:
        (gpu,) = values.gpu
        measured = {gpu: {case: compiled(gpu, case, values.only) for case in values.case}}
    if values.check:
        _, held = read()
        wrong = [
            x for gpu, by in measured.items() for case, results in by.items() for x in against(gpu, case, results, held)
        ]
        sys.stdout.write("".join(f"{line}\n" for line in wrong))
        return bool(wrong)
    if values.save:
        held = read()[1] if SAVED.exists() else {}
        for gpu, cases in measured.items():
            for case, results in cases.items():
                held.setdefault(gpu, {}).setdefault(case, {}).update(results)
        SAVED.write_text(json.dumps({"triton": compiler.__version__, "kernels": held}, indent=1) + "\n")
    text = json.dumps(measured) if values.json else "\n".join([f"Triton {compiler.__version__}", "", *table(measured)])
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
