"""Checks of the exact text of an error, of engines that may not run, and of the passes that they take."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from clearhead import engines
from clearhead.errors import ClearheadError

WORK = ("rows", "columns", "weights", "transposed", "others", "product")
Call = Callable[[], Any]
Errors = dict[type[Exception], dict[str, Call | list[Call]]]  # by the built-in error and its text, what raises it


def exact_texts(*tables: Errors, works: bool = False) -> Callable[..., None]:
    """A test of each error: its kind, its text and, unless the call `works` before, that no engine ran."""
    every = [(kind, text, calls) for table in tables for kind, texts in table.items() for text, calls in texts.items()]
    each = [
        pytest.param(call, kind, text, id=text[:60])
        for kind, text, calls in every
        for call in (calls if isinstance(calls, list) else [calls])
    ]

    @pytest.mark.parametrize(("call", "kind", "words"), each)
    def test(call: Call, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if not works:
            let_no_engine_run(monkeypatch)
        with pytest.raises(kind) as error:
            call()
        assert str(error.value) == words
        assert isinstance(error.value, ClearheadError)

    return test


def let_no_engine_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine, work in product(engines.NAMES, WORK):
        monkeypatch.setattr(engines.get(engine), work, _begin, raising=False)


def _begin(*args: Any) -> Any:
    raise AssertionError("work began before the input was read")


def passes_of(engine: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """The passes of an engine, in the order in which they begin from now on."""
    taken: list[str] = []
    for name in names:
        work = getattr(engine, name)
        noted = lambda *inputs, name=name, work=work: (taken.append(name), work(*inputs))[1]  # noqa: E731
        monkeypatch.setattr(engine, name, noted)
    return taken
