"""A diagnosis in the terminal."""

from rich.console import Console
from rich.text import Text

from clearhead.diagnosing.verdict import Diagnosis
from clearhead.report.console import put
from clearhead.words import Language

_STYLES = {"did": "bold", "mend": "green", "note": "dim"}
_VERDICTS = {"right": "bold green", "mistake": "bold red", "ambiguous": "bold red", "unexplained": "bold yellow"}


def show(console: Console, diagnosis: Diagnosis, language: Language) -> None:
    """Print the answer."""
    for kind, text in diagnosis.lines(language):
        style = _VERDICTS[diagnosis.verdict] if kind == "verdict" else _STYLES.get(kind, "")
        put(console, Text(text, style=style))
