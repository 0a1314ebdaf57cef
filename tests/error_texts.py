"""Checks of the exact text of an error."""

from collections.abc import Callable
from typing import Any

import pytest

from clearhead import engines
from clearhead.errors import ClearheadError

Wrong = tuple[Callable[[], Any], type[Exception], str]  # a call, the built-in error it raises, and its text


def assert_words(call: Callable[[], Any], kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call fails with this text before any engine runs."""
    for engine in engines.NAMES:
        for work in ("rows", "columns", "weights", "transposed", "others", "effects", "effect_tile", "effect_product"):
            if hasattr(engines.get(engine), work):
                monkeypatch.setattr(engines.get(engine), work, _begin)
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == words
    assert isinstance(error.value, ClearheadError)


def _begin(*args: Any) -> Any:
    raise AssertionError("work began before the input was read")
