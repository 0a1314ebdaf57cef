"""Checks of the exact text of an error."""

from collections.abc import Callable
from typing import Any

import pytest

from clearhead import engines
from clearhead.errors import ClearheadError

Call = Callable[[], Any]
Errors = dict[type[Exception], dict[str, Call | list[Call]]]  # by the built-in error and its text, what raises it


def each_error(*tables: Errors) -> pytest.MarkDecorator:
    """Parameters of a test of each error: what raises it, of which kind it is, and its text."""
    every = [(kind, text, calls) for table in tables for kind, texts in table.items() for text, calls in texts.items()]
    each = [
        pytest.param(call, kind, text, id=text[:60])
        for kind, text, calls in every
        for call in (calls if isinstance(calls, list) else [calls])
    ]
    return pytest.mark.parametrize(("call", "kind", "words"), each)


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
