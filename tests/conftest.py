"""How the tests run: `pytest --hypothesis-profile=thorough` draws many more examples.

One BLAS thread, unless a test asks for more: the tests' own products are small, and pytest runs several processes.
"""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy loads, which is later
os.environ.setdefault("TRITON_INTERPRET", "1")  # the GPU's kernels run on the CPU, where tests can be

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.differing_executors)

settings.register_profile("default", max_examples=100, deadline=None, suppress_health_check=QUIET)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=QUIET)
settings.load_profile("default")
