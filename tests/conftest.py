"""How the tests run. Three tiers: what has no marker runs by `pytest`; `gate` in .ci/run, `long` in .ci/long.

A test in a browser is of the gate, unless its marker `smoke` says otherwise. `--hypothesis-profile=gate` (or `long`)
draws more examples. One thread for BLAS and OpenMP, unless a test asks for more: the tests' own products are small,
and pytest runs a process for each core.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy loads, which is later
os.environ.setdefault("OMP_NUM_THREADS", "1")  # likewise, of PyTorch
os.environ["LC_ALL"] = "C.UTF-8"  # reports are in English unless a test asks otherwise
os.environ.setdefault("TRITON_INTERPRET", "1")  # the GPU kernels run on the CPU in Triton's interpreter

import seeds
from browser import browser

gc.disable()  # until all is imported: each full collection would look through it again, half a second
atexit.register(gc.unfreeze)  # nanobind reports what is left at the end
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ours

collect_ignore = ["conftest.py"]  # docs has one too, and doctest would take both for the same module

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.differing_executors)

for _name, _examples in {"default": 12, "gate": 18, "long": 1000}.items():
    settings.register_profile(
        _name, max_examples=_examples, deadline=None, suppress_health_check=QUIET, print_blob=True
    )
settings.load_profile("default")


@pytest.fixture(scope="module")
def running() -> Generator[Any, None, None]:
    """A browser that the tests of a module share; they are skipped where there is none."""
    with browser() as started:
        yield started


def pytest_itemcollected(item: pytest.Item) -> None:
    if "running" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("smoke"):
        item.add_marker(pytest.mark.gate)


def pytest_collection_finish() -> None:
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        _prepare_once(interpreter)
    gc.freeze()  # what was imported stays
    gc.enable()


def _prepare_once(interpreter: Any) -> None:
    """Triton's language is replaced once for each module, not in each call of a function: half of the time was that."""
    prepare, prepared, nothing = interpreter._patch_lang, {}, SimpleNamespace(restore=lambda: None)

    def once(function: Any) -> Any:
        prepared[function.__module__] = prepared.get(function.__module__) or prepare(function)
        return nothing

    interpreter._patch_lang = once
    asked, known = interpreter._get_np_dtype, {}  # it makes its table in each call: a tenth of the time was that

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        known[name] = known.get(name) or asked(kind)
        return known[name]

    interpreter._get_np_dtype = dtype_of


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
