"""How the tests run: `pytest --hypothesis-profile=thorough` draws many more examples.

One BLAS thread, unless a test asks for more: the tests' own products are small, and pytest runs several processes.
"""

import os
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy loads, which is later
os.environ["LC_ALL"] = "C.UTF-8"  # reports are in English unless a test asks otherwise
os.environ.setdefault("TRITON_INTERPRET", "1")  # the GPU kernels run on the CPU in Triton's interpreter

import seeds

collect_ignore = ["conftest.py"]  # docs has one too, and doctest would take both for the same module

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.differing_executors)

settings.register_profile("default", max_examples=40, deadline=None, suppress_health_check=QUIET, print_blob=True)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=QUIET, print_blob=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seed() -> None:
    print(f"CLEARHEAD_SEED={seeds.start()} draws this test's numbers again.")  # pytest shows it when the test fails


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _whole((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _whole((yield))


def _whole(report: Any) -> Any:
    """In CI no test may be skipped: everything that tests need is installed there, otherwise the gate fails."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        report.outcome, report.longrepr = "failed", f"skipped, and CI is set: {report.longrepr[-1]}"
    return report
