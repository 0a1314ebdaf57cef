"""Decorators for old names, which work for one more version and warn what to write instead."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated(instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function as removed in the next version: calls warn with DeprecationWarning, which ends with `instead`."""

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def warned(*args: P.args, **options: P.kwargs) -> R:
            _warn(f"{function.__qualname__} goes with the next version: {instead}.")
            return function(*args, **options)

        vars(warned)["__deprecated__"] = instead  # as Python 3.13 marks them
        return warned

    return mark


def renamed(old: str, new: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept the old name of a keyword, with a DeprecationWarning. Raises TypeError if both names are given."""

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def warned(*args: P.args, **options: P.kwargs) -> R:
            if old in options:
                if new in options:
                    raise TypeError(f"{function.__qualname__}() got {old}= and {new}=, which are one.")
                _warn(f"{old}= of {function.__qualname__} goes with the next version: it is called {new}=.")
                options[new] = options.pop(old)
            return function(*args, **options)

        return warned

    return mark


def _warn(words: str) -> None:
    warnings.warn(words, DeprecationWarning, stacklevel=3)
