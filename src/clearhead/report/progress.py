"""A progress bar on standard error for work that takes over two seconds; nothing for quicker work, or in a pipe."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_PATIENCE = 2.0  # seconds


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items; once it is clear that all will take long, draw a bar, which is removed at the end."""
    start = time.monotonic()
    rest = iter(items)
    for done, item in enumerate(rest, 1):
        yield item
        if done < len(items) and (time.monotonic() - start) / done * len(items) > _PATIENCE:
            yield from _drawn(rest, what, done, len(items))


def _drawn(rest: Iterator[T], what: str, done: int, total: int) -> Iterator[T]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total, completed=done)
        for item in rest:
            yield item
            bar.advance(task)
