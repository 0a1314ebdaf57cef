"""Of this folder pytest reads the pages, whose examples it runs, and no program; the guides train models: slow.

tests/test_written_lessons.py runs the lessons, whose exercises need more than their examples. Chinese pages have the
code of the English ones, which tests/test_chinese_pages.py compares.
"""

from pathlib import Path

import pytest

collect_ignore_glob = ["*.py", "frame/*", "lessons/*", "zh/*"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the guides: they run in the gate."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent / "guides"):
            item.add_marker(pytest.mark.gate)
