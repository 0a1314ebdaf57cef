"""The Triton engine: launches the kernels in gpu/ on tensors in a GPU's memory; gpu/passes.py has its passes.

It is experimental: its kernels have run in Triton's interpreter only, never on a GPU. Under all rules, it computes row
statistics, sums and maxima per key, single weights, Aᵀ·g, and first derivatives except those of a bias or a table of
spans. It has no pictures, groups, contributions, cut effects, forward mode or second derivatives, and declares so.

Sums are in float32 (float64 for float64). Products of float32 inputs use full precision unless PyTorch allows TF32
(torch.backends.cuda.matmul.allow_tf32); where inputs have 16 bits, products of float32 numbers take three of TF32. If
TRITON_INTERPRET is set, Triton's interpreter runs the same kernels on the CPU's memory: slowly, for tests.
"""

import numpy as np

from clearhead.core.problem import Problem
from clearhead.core.rules import EVERYWHERE
from clearhead.engines.base import unsupported
from clearhead.engines.gpu import MOST_D

try:
    import triton

    from clearhead.engines.gpu.passes import STATISTICS as STATISTICS
    from clearhead.engines.gpu.passes import columns as columns
    from clearhead.engines.gpu.passes import gradients as gradients
    from clearhead.engines.gpu.passes import rows as rows
    from clearhead.engines.gpu.passes import transposed as transposed
    from clearhead.engines.gpu.passes import weights as weights
except ImportError:
    triton, STATISTICS = None, frozenset()

RULES = EVERYWHERE
_MENDED = 3, 9  # the first Triton whose products of float64 may depend on numbers of 8 or 16 bits
GRADIENTS = frozenset(("q", "k", "v", "sinks"))


def missing() -> str:
    """Why the kernels cannot run at all, as a sentence; "" if they can."""
    return "triton or torch is not installed." if triton is None else ""


def reasons_not(problem: Problem) -> list[str]:
    """Reasons against this engine: no Triton, arrays in the CPU's memory, too large a d_k, or an unsupported rule."""
    against = [missing()] if triton is None else []
    if triton is not None and problem.device == "cpu" and not triton.knobs.runtime.interpret:
        against.append("the arrays are in the CPU's memory, and TRITON_INTERPRET is not set.")
    if problem.device.split(":")[0] not in ("cpu", "interpreter", "cuda"):
        against.append(f"the arrays are on device {problem.device}: its kernels run on CUDA's.")
    compiled = triton is not None and not triton.knobs.runtime.interpret
    older = compiled and tuple(map(int, triton.__version__.split(".")[:2])) < _MENDED
    narrow = problem.mask is not None or (problem.bias is not None and problem.bias.dtype.itemsize == 2)
    if older and narrow and problem.dtype == np.float64:
        against.append(f"Triton {triton.__version__} cannot compile float64 with a mask or a bias of 16 bits.")
    if problem.d_k > MOST_D:
        against.append(f"d_k is {problem.d_k}: the kernels hold at most {MOST_D}.")
    return against + unsupported("the triton engine", RULES, problem)
