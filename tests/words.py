"""Holding an error to its words."""

from collections.abc import Callable
from typing import Any

import pytest

from clearhead import engines
from clearhead.errors import ClearheadError

Wrong = tuple[Callable[[], Any], type[Exception], str]  # a call, the built-in error it raises, and what that says


def assert_words(call: Callable[[], Any], kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call fails in these words, before any engine has begun."""
    for engine in engines.NAMES:
        for work in ("rows", "columns", "weights", "transposed"):
            monkeypatch.setattr(engines.get(engine), work, _begin)
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == words
    assert isinstance(error.value, ClearheadError)


def _begin(*args: Any) -> Any:
    raise AssertionError("work began before the input was read")
