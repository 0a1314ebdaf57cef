"""Makes the console on which reports are printed; lines wrap between words."""

import re
from collections.abc import Iterable, Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from clearhead.spelling import breaks

_CHINESE = re.compile("[\u4e00-\u9fff，。；：、（）]")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the command line handles it; rich would end the process with exit code 1."""
        raise


def console() -> Console:
    """Make a console for standard output; it respects the terminal's colours, NO_COLOR, FORCE_COLOR and pipes."""
    made = _Console(highlight=False, markup=False, emoji=False)
    if made.color_system == "standard":  # sixteen colours are too few for a scale, and nearly all terminals have 256
        made = _Console(highlight=False, markup=False, emoji=False, color_system="256")
    return made


def sections(console: Console, parts: Iterable[Iterator[Text]]) -> None:
    """Print parts of a report, with an empty line between them; a part may be empty."""
    for place, lines in enumerate(filter(None, map(list, parts))):
        if place:
            console.print()
        put(console, lines)


def put(console: Console, lines: Iterable[Text]) -> None:
    """Print lines; a long line continues on the next one, indented by two more characters."""
    for line in lines:
        for part in folded(console, line):
            console.print(part, soft_wrap=True, highlight=False)


def folded(console: Console, line: Text) -> list[Text]:
    """Fold a line into the lines that are printed."""
    if cell_len(line.plain) <= console.width:
        return [line]
    indent = len(line.plain) - len(line.plain.lstrip())
    rest, width = line[indent:], max(20, console.width - indent - 2)
    chinese = _CHINESE.search(rest.plain) is not None
    parts = rest.divide(breaks(rest.plain, width)) if chinese else rest.wrap(console, width)
    for part in parts:
        part.rstrip()
    return [Text(" " * (indent + (2 if place else 0))) + part for place, part in enumerate(parts)]
