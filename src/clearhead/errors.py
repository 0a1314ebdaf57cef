"""The exceptions, and the helpers that word their messages.

ClearheadError
├── ShapeError        (ValueError)    an array's shape does not fit
├── DtypeError        (TypeError)     an array's dtype or kind does not fit
├── RuleError         (ValueError)    a score rule's value makes no sense
├── UnknownNameError  (TypeError)     a rule or option that does not exist
├── SelectionError    (IndexError)    an index outside the matrix
├── SizeError         (MemoryError)   the result would not fit in the machine's memory
├── EngineError       (RuntimeError)  no engine, or not the one named, can run this problem
├── DerivativeError   (RuntimeError)  a derivative that does not exist, such as the second of a peak
├── FileError         (ValueError)    a file or checkpoint is missing or malformed
└── MissingExtraError (ImportError)   an optional package is not installed
"""

import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class ClearheadError(Exception):
    """Base class of all errors: `what` says what is wrong, `hint` what to type instead."""

    def __init__(self, what: str, hint: str = "", /) -> None:
        self.what, self.hint = what, hint
        super().__init__(f"{what}\n\nhint: {hint}" if hint else what)

    def one_line(self) -> str:
        """Return the message and its hint on one line, for the command line."""
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
    """An index or a choice that is out of range, empty or of the wrong kind."""


class SizeError(ClearheadError, MemoryError):
    """The result would not fit in the machine's memory."""


class EngineError(ClearheadError, RuntimeError):
    """No engine, or not the one named, can run this problem."""


class DerivativeError(ClearheadError, RuntimeError):
    """A derivative that does not exist, such as the second of a compiled graph, of a peak or of top-k."""


class FileError(ClearheadError, ValueError):
    """A file or checkpoint is missing or malformed."""


class MissingExtraError(ClearheadError, ImportError):
    """An optional package is not installed."""


@contextmanager
def needing(package: str, what: str, extra: str) -> Iterator[None]:
    """Turn an ImportError inside the block into a MissingExtraError that says how to install the package."""
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
    """Word the message for a wrong value, such as `causal is 3: expected True or False.`."""
    return f"{name} is {shown(value)}: expected {wanted}."


def shape_of(value: object) -> tuple[int, ...] | None:
    """Return an array's shape; None if the value has none or raises when asked for it."""
    try:
        shape = getattr(value, "shape", None)
    except Exception:  # a lazy or nested tensor of PyTorch's raises RuntimeError
        return None
    return shape if isinstance(shape, tuple) else None


def shown(value: object, most: int = 80) -> str:
    """Show a wrong value in an error: an array as its shape, anything else as its repr on one line, cut if long."""
    kind = type(value).__name__
    try:
        shape = shape_of(value)
        if shape:
            array = f"{'an' if kind[0] in 'AEIO' else 'a'} {kind} of shape {tuple(shape)}"
            return array if len(array) <= 2 * most else array[: 2 * most]
        long = isinstance(value, (list, tuple, set, frozenset, dict, str, bytes)) and len(value) > 1000
        text = " ".join((reprlib.repr(value) if long else repr(value)).split())
    except Exception:  # another library's shape or __repr__ may raise anything
        text = f"a {kind}"
    return text if len(text) <= most else text[: most - 1] + "…"
