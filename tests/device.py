"""The device that tests compute on, by the environment variable CLEARHEAD_DEVICE; without it, the CPU. On a GPU:

    TRITON_INTERPRET=0 CLEARHEAD_DEVICE=cuda pytest -m "long or not long" -k "not elsewhere" \\
        tests/test_device.py tests/test_on_tensors.py

The device `elsewhere` is compiled from device.cpp: its tensors refuse to mix with the CPU's, as a GPU's do. Triton's
interpreter runs the kernels there.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import interpreter

from clearhead.engines import triton

DEVICE = os.environ.get("CLEARHEAD_DEVICE", "cpu")


def start() -> None:
    """Compile the device, and let Triton's interpreter read its memory."""
    from torch.utils.cpp_extension import include_paths, library_paths

    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "device.so"
        command = ["c++", "-shared", "-fPIC", "-std=c++20", Path(__file__).with_name("device.cpp"), "-o", built]
        command += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
        subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
        torch.ops.load_library(built)
    torch.utils.rename_privateuse1_backend(DEVICE)
    facts = {"is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "device_count": 1}
    facts |= {"current_device": 0, "manual_seed_all": 0}
    torch._register_device_module(DEVICE, SimpleNamespace(**{name: lambda *_, x=x: x for name, x in facts.items()}))

    def local(x: Any) -> Any:
        if isinstance(x, tuple):
            return interpreter._tuple_create(x, map(local, x))
        return torch.ops.elsewhere.local(x) if isinstance(x, torch.Tensor) and x.device.type == DEVICE else x

    def sent(_: Any, args: Any, named: dict[str, Any]) -> Any:
        return [*map(local, args)], {name: local(x) for name, x in named.items()}

    interpreter.GridExecutor._init_args_hst = sent
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    reasons_not = triton.reasons_not
    triton.reasons_not = lambda problem: [x for x in reasons_not(problem) if f"on device {DEVICE}" not in x]


if DEVICE == "elsewhere":
    start()
