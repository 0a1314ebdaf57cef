"""The lessons' figures: pages that commands write, made by docs/lessons/figures.py when the site is built."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

PLACE = Path(__file__).parent.parent / "lessons/figures.py"


@cache
def _lessons() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lessons_figures", PLACE)
    if spec is None or spec.loader is None:
        raise ValueError(f"{PLACE} cannot be read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def embedded(text: str, language: str) -> str:
    """A lesson with its figures in the place of their pictures."""
    return str(_lessons().embedded(text, language)) if PLACE.exists() else text


def write(folder: Path, language: str) -> None:
    """Write the page of each figure."""
    if PLACE.exists():
        _lessons().figures(folder, language)
