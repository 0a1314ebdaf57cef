"""Writes to standard output and standard error, which may lack characters, be a closed pipe or be full.

Work that takes over two seconds draws a progress bar on standard error; quicker work, and work in a pipe, draws none.
"""

import argparse
import codecs
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from clearhead import spelling
from clearhead.core.files import write_whole
from clearhead.errors import RuleError
from clearhead.words import Language

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

_PATIENCE = 2.0  # seconds before a progress bar is drawn
_CHINESE = "查询关注键"
_MOST = 600  # the most characters of an error message
_INSTEAD = str.maketrans({
    "ᵀ": "T", "␣": "_", "⏎": "/", "…": "~", "·": ".", "×": "x", "√": "sqrt", "∞": "inf", "Σ": "sum", "σ": "sigma",
    "‖": "|", "θ": "t", "≤": "<=", "≠": "!=", "→": "->", "←": "<-", "┃": "|", "▼": "v", "«": '"', "»": '"', "✓": "ok",
    "✗": "x", "⟨": "<", "⟩": ">", "╷": "|", **dict.fromkeys("▀█▉▊▋▌", "#"), **dict.fromkeys("▍▎▏", " "),
    "，": ", ", "：": ": ", "；": "; ", "（": " (", "）": ")", "。": ". ", "、": ", ", "⇥": ">", "␍": "/",
})  # fmt: skip


def complain(program: str, what: str) -> None:
    """Print what is wrong and what to type instead as one line on standard error; control characters are escaped."""
    line = printable(" ".join(what.split()))
    if len(line) > _MOST:
        line = f"{line[: _MOST // 2]} … {line[-_MOST // 2 :]}"
    print(f"{program}: {line}", file=sys.stderr)


def printable(text: str) -> str:
    """`text` without anything that could move the cursor: newlines as ⏎, other control characters escaped."""
    return shown(spelling.visible(text))


def spelled(text: str) -> str:
    """Spell a token with its spaces marked, in characters that standard output can show."""
    return shown(spelling.spelled(text))


def bare(text: str) -> str:
    """Spell a token without its outer spaces, for standard output; in a token of spaces alone they are marked."""
    return shown(spelling.bare(text))


def shown(text: str) -> str:
    """Return the text as standard output will show it; columns are measured on this text."""
    return text.encode(_encoding(), "clearhead").decode(_encoding())


def can_show(language: Language) -> bool:
    """Does standard output's encoding have the language's characters?"""
    return language == "en" or shown(_CHINESE) == _CHINESE


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def check_encoding(language: Language) -> None:
    """Raise RuleError if Chinese is asked for and standard output cannot show it."""
    if not can_show(language):
        raise RuleError(
            f"--lang zh needs Chinese characters, and the output's encoding, {_encoding()}, has none.",
            "set PYTHONIOENCODING=utf-8, or leave --lang out.",
        )


def console_of(options: argparse.Namespace) -> "Console | None":
    """Make the console for a command's report; None if JSON or a page goes to standard output. Raises RuleError."""
    if "-" in (options.json, getattr(options, "html", None)):
        return None
    check_encoding(options.lang)
    from clearhead.report.console import console

    return console()


def write_json(target: str, data: dict[str, Any]) -> None:
    """Write JSON as UTF-8, with escapes for characters that UTF-8 or standard output's encoding cannot hold."""
    other = target == "-" and codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
    try:
        text = json.dumps(data, ensure_ascii=other, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(data, allow_nan=False).encode("ascii")
    write_whole(target, text + b"\n")


def deliver(
    options: argparse.Namespace,
    to_json: Callable[[], dict[str, Any]],
    save: Callable[[str, Language], object] | None = None,
) -> None:
    """Write a result's numbers (--json) and its page (--html), if asked for."""
    if save is not None and options.html is not None:
        save(options.html, options.lang)
    if options.json is not None:
        write_json(options.json, to_json())


@contextmanager
def readable() -> Iterator[None]:
    """Inside, replace characters that the encoding of standard output or standard error lacks."""
    with ExitStack() as after:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # the parent process closed it
                setattr(sys, name, after.enter_context(open(os.devnull, "w", encoding="utf-8")))
                after.callback(setattr, sys, name, None)
            elif isinstance(stream, io.TextIOWrapper):
                after.callback(_restore, stream, stream.errors or "strict")
                stream.reconfigure(errors="clearhead")
        yield


def abandon() -> None:
    """Discard the rest of standard output, which cannot be written, and what Python would write at exit."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items; if they take long, draw a progress bar, which is removed at the end."""
    start = time.monotonic()
    rest = iter(items)
    for done, item in enumerate(rest, 1):
        yield item
        if done < len(items) and (time.monotonic() - start) / done * len(items) > _PATIENCE and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            with Progress(console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(what, total=len(items), completed=done)
                for each in rest:
                    yield each
                    bar.advance(task)


def _restore(stream: io.TextIOWrapper, errors: str) -> None:
    with suppress(OSError, ValueError):  # nothing can be written any more
        stream.reconfigure(errors=errors)


def _substitute(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_INSTEAD)
    return text.encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error("clearhead", _substitute)
