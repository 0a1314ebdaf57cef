"""The command line run in this process, with output streams of any encoding."""

import io
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

import pytest
from rich.cells import cell_len

from clearhead.cli import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def call(*arguments: object, encoding: str = "utf-8", environment: Mapping[str, str] | None = None) -> Done:
    """Run one command at 80 columns, with nothing on standard input."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TERM"):
            patch.delenv(name, raising=False)
        for name, value in {"COLUMNS": "80", **(environment or {})}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdin", io.StringIO())
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as end:
            code = end.code
    return Done(code, *(stream.buffer.getvalue().decode(encoding, "replace") for stream in (out, err)))


def fitting(*arguments: object, environment: Mapping[str, str]) -> str:
    """What a command prints, without colour: each line fits 80 columns, and colour is there where it is asked for."""
    done = call(*arguments, environment=environment)
    assert (done.returncode, done.stderr) == (0, "")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert max(cell_len(line) for line in plain.splitlines()) <= 80
    assert bool(re.search(r"\x1b\[[34]8;2;", done.stdout)) == bool(environment)
    return plain


def refused(*arguments: object) -> str:
    """What a command says on standard error, on one line, where it refuses its arguments."""
    done = call(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


def loaded(*arguments: object) -> tuple[str, str]:
    """What a command prints in its own process, and which heavy packages it loads."""
    program = (
        f"import sys; from clearhead.cli import main; code = main({list(map(str, arguments))!r}); "
        "print(*({'torch', 'transformers', 'jax', 'triton', 'scipy', 'matplotlib'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    said, _, heavy = done.stdout.removesuffix("\n").rpartition("\n")
    return said, heavy
