"""Benchmarks against other libraries, interleaved in one process: `python -m benchmarks --help`.

Results are ratios to the other libraries, and shares of what the hardware can do at most.
"""

import os

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # before NumPy is loaded: its products are also timed
