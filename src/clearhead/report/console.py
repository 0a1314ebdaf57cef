"""The console that reports are printed on, and sentences broken into its lines between words."""

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command line, where rich would end the process with exit code 1."""
        raise


def console() -> Console:
    """Standard output with the colours that it has; NO_COLOR, FORCE_COLOR and pipes are respected."""
    made = _Console(highlight=False, markup=False, emoji=False)
    if made.color_system == "standard":  # sixteen colours make no scale; terminals with only those are gone
        made = _Console(highlight=False, markup=False, emoji=False, color_system="256")
    return made


def put(at: Console, line: Text) -> None:
    """Print a line; a sentence that is too long goes on under its own beginning, two characters further in."""
    if cell_len(line.plain) <= at.width:
        at.print(line, soft_wrap=True, highlight=False)
        return
    indent = len(line.plain) - len(line.plain.lstrip())
    for place, part in enumerate(line[indent:].wrap(at, max(20, at.width - indent - 2))):
        part.rstrip()
        at.print(" " * (indent + (2 if place else 0)), part, sep="", soft_wrap=True, highlight=False)
