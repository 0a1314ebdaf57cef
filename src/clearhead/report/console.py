"""The console on which reports are printed, with lines wrapped between words."""

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the command line handles it; rich would end the process with exit code 1."""
        raise


def console() -> Console:
    """A console for standard output, in the colours that it supports; respects NO_COLOR, FORCE_COLOR and pipes."""
    made = _Console(highlight=False, markup=False, emoji=False)
    if made.color_system == "standard":  # sixteen colours are too few for a scale, and nearly all terminals have 256
        made = _Console(highlight=False, markup=False, emoji=False, color_system="256")
    return made


def title(text: str) -> Text:
    """A heading; bold where the terminal can."""
    return Text(text, style="bold")


def put(at: Console, line: Text) -> None:
    """Print a line; the rest of a long one follows below, indented by two more characters."""
    if cell_len(line.plain) <= at.width:
        at.print(line, soft_wrap=True, highlight=False)
        return
    indent = len(line.plain) - len(line.plain.lstrip())
    for place, part in enumerate(line[indent:].wrap(at, max(20, at.width - indent - 2))):
        part.rstrip()
        at.print(" " * (indent + (2 if place else 0)), part, sep="", soft_wrap=True, highlight=False)
