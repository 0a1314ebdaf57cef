"""What can go wrong, and the one form in which it is said.

ClearheadError
├── ShapeError        (ValueError)    an array's shape does not fit
├── DtypeError        (TypeError)     an array's dtype or kind does not fit
├── RuleError         (ValueError)    a score rule's value makes no sense
├── UnknownNameError  (TypeError)     a rule or option that does not exist
├── SelectionError    (IndexError)    an index outside the matrix
├── SizeError         (MemoryError)   what was asked is larger than the machine's memory
├── EngineError       (RuntimeError)  the engine asked for cannot run this problem
├── DerivativeError   (RuntimeError)  a derivative that is not there, such as a third one
├── DistributedError  (RuntimeError)  a rank is missing, or ranks were called with different arguments
├── FileError         (ValueError)    a file or checkpoint is missing or malformed
└── MissingExtraError (ImportError)   an optional package is not installed
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ClearheadError(Exception):
    """Base of all errors; `what` says what is wrong, `hint` what to type instead."""

    def __init__(self, what: str, hint: str = "") -> None:
        self.what = what
        self.hint = hint
        super().__init__(f"{what}\n\nhint: {hint}" if hint else what)

    def one_line(self) -> str:
        """The same words on one line, for the command line."""
        return " ".join(f"{self.what} hint: {self.hint}".split() if self.hint else self.what.split())


class ShapeError(ClearheadError, ValueError):
    """An array's shape does not fit."""


class DtypeError(ClearheadError, TypeError):
    """An array's dtype or kind does not fit."""


class RuleError(ClearheadError, ValueError):
    """A score rule's value makes no sense."""


class UnknownNameError(ClearheadError, TypeError):
    """A rule or option that does not exist."""


class SelectionError(ClearheadError, IndexError):
    """An index outside the matrix, or of a kind that it does not take."""


class SizeError(ClearheadError, MemoryError):
    """What was asked is larger than the machine's memory."""


class EngineError(ClearheadError, RuntimeError):
    """The engine asked for cannot run this problem."""


class DerivativeError(ClearheadError, RuntimeError):
    """A derivative that is not there: a third one, or a second one of a compiled graph, of a peak or of top-k."""


class DistributedError(ClearheadError, RuntimeError):
    """A rank is missing, or ranks were called with different arguments."""


class FileError(ClearheadError, ValueError):
    """A file or checkpoint is missing or malformed."""


class MissingExtraError(ClearheadError, ImportError):
    """An optional package is not installed."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for an unknown name, with the nearest known one."""
    names, given = sorted(known), name if isinstance(name, str) else shown(name)
    near = get_close_matches(given, names, n=1)
    guess = f"did you mean `{near[0]}`? " if near else ""
    return UnknownNameError(f"unknown {kind} `{given}`.", f"{guess}Known: {', '.join(names)}.")


def shown(value: object, most: int = 80) -> str:
    """A wrong value as errors show it: an array by its shape, anything else on one line and cut where it is long."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        kind = type(value).__name__
        return f"{'an' if kind[0] in 'AEIO' else 'a'} {kind} of shape {tuple(shape)}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # what a stranger's __repr__ raises is its own
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else text[: most - 1] + "…"
