"""What can go wrong, and the one form in which it is said.

ClearheadError
├── ShapeError        (ValueError)    an array's shape does not fit
├── DtypeError        (TypeError)     an array's dtype or kind does not fit
├── RuleError         (ValueError)    a score rule's value makes no sense
├── UnknownNameError  (TypeError)     a rule or option that does not exist
├── SelectionError    (IndexError)    an index outside the matrix
├── SizeError         (MemoryError)   what was asked is larger than the machine's memory
├── EngineError       (RuntimeError)  the engine asked for cannot run this problem
├── DerivativeError   (RuntimeError)  a derivative that is not there, such as a second one of a peak
├── FileError         (ValueError)    a file or checkpoint is missing or malformed
└── MissingExtraError (ImportError)   an optional package is not installed
"""

import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class ClearheadError(Exception):
    """Base of all errors; `what` says what is wrong, `hint` what to type instead."""

    def __init__(self, what: str, hint: str = "", /) -> None:
        self.what, self.hint = what, hint
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
    """A derivative that is not there: a second one of a compiled graph, of a peak or of top-k."""


class FileError(ClearheadError, ValueError):
    """A file or checkpoint is missing or malformed."""


class MissingExtraError(ClearheadError, ImportError):
    """An optional package is not installed."""


@contextmanager
def needing(package: str, what: str, extra: str) -> Iterator[None]:
    """Inside, an import that fails raises MissingExtraError: what needs the package, and how to get it."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{what} needs {package}: {error}.", f"pip install 'clearhead[{extra}]'") from None


def unknown(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for an unknown name, with the nearest known one."""
    names, name = sorted(known), name if isinstance(name, str) else shown(name)
    near = get_close_matches(name, names, n=1)
    hint = f"Known: {', '.join(names)}."
    return UnknownNameError(f"unknown {kind} `{name}`.", f"did you mean `{near[0]}`? {hint}" if near else hint)


def check_known(kind: str, names: Iterable[object], known: Collection[str]) -> None:
    """Raise UnknownNameError for the first of these names that is not known."""
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise unknown(kind, name, known)


def expected(name: str, value: object, wanted: str) -> str:
    """What is said of a value of the wrong kind: causal is 3: expected True or False."""
    return f"{name} is {shown(value)}: expected {wanted}."


def shape_of(value: object) -> tuple[int, ...] | None:
    """An array's shape; None for what has none, or does not say it."""
    try:
        shape = getattr(value, "shape", None)
    except Exception:  # a lazy or nested tensor of PyTorch's raises RuntimeError
        return None
    return shape if isinstance(shape, tuple) else None


def shown(value: object, most: int = 80) -> str:
    """A wrong value as errors show it: an array by its shape, anything else on one line and cut where it is long."""
    kind = type(value).__name__
    try:
        shape = shape_of(value)
        if shape:
            array = f"{'an' if kind[0] in 'AEIO' else 'a'} {kind} of shape {tuple(shape)}"
            return array if len(array) <= 2 * most else array[: 2 * most]
        long = isinstance(value, (list, tuple, set, frozenset, dict, str, bytes)) and len(value) > 1000
        text = " ".join((reprlib.repr(value) if long else repr(value)).split())
    except Exception:  # what a stranger's shape or __repr__ raises is its own
        text = f"a {kind}"
    return text if len(text) <= most else text[: most - 1] + "…"
