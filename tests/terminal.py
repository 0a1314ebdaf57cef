"""The command line run in this process, with output streams of any encoding."""

import io
import sys
from typing import NamedTuple

import pytest

from clearhead.cli import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def call(*arguments: object, encoding: str = "utf-8", given: bytes = b"") -> Done:
    """Run one command at 80 columns; `given` is its standard input."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TERM"):
            patch.delenv(name, raising=False)
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as end:
            code = end.code
    return Done(code, *(stream.buffer.getvalue().decode(encoding, "replace") for stream in (out, err)))
