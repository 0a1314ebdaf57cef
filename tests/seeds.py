"""Fresh random numbers for every test, and the seed that draws them again.

A failing test shows its seed; `CLEARHEAD_SEED=… pytest tests/test_x.py::test_y` replays it.
"""

import os
import random
import sys
from typing import Any

import numpy as np

_sequence = np.random.SeedSequence(0)


def start() -> int:
    """Seed NumPy's, Python's and, where it is loaded, PyTorch's generators; return the seed."""
    global _sequence
    seed = int(os.environ.get("CLEARHEAD_SEED") or np.random.SeedSequence().generate_state(1)[0])
    _sequence = np.random.SeedSequence(seed)
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    return seed


def fresh() -> np.random.Generator:
    """A new generator for each call; the same ones in the same order when the test is replayed."""
    return np.random.default_rng(_sequence.spawn(1)[0])


def normal(*shape: int, dtype: Any = np.float64) -> np.ndarray[Any, Any]:
    return fresh().standard_normal(shape).astype(dtype)
