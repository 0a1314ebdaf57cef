"""Reads the caller's token names: a list of strings for the text, and one for the text that it attends to."""

from collections.abc import Sequence
from typing import Any

from clearhead.core.problem import Problem
from clearhead.core.rule_values import listed
from clearhead.errors import RuleError, ShapeError, expected

Names = Sequence[str] | None


def token_names(tokens: Any, source_tokens: Any, problem: Problem) -> tuple[Names, Names]:
    """Return the names of rows and columns, (queries,) and (keys,) strings, or None for names that are not given.

    tokens         (keys,) strings of the text; query i is tokens[i + query_offset]. With source_tokens, (queries,)
    source_tokens  (keys,) strings of the other text, for cross-attention
    Raises RuleError for anything but a list of strings, ShapeError for a list of the wrong length.
    """
    texts, other = _strings("tokens", tokens), _strings("source_tokens", source_tokens)
    n, m = problem.queries, problem.keys
    if other is not None:
        if texts is None:
            raise RuleError("source_tokens names the keys, but nothing names the queries.", "tokens=[…]")
        check_count("tokens", texts, n, "queries")
        check_count("source_tokens", other, m, "keys")
        return texts, other
    if texts is None:
        return None, None
    offsets = set(problem.query_offset.tolist()) or {0}
    start = min(offsets)
    inside = len(offsets) == 1 and start >= 0 and start + n <= m
    if not inside or (n != m and not problem.causal and problem.window == (None, None)):
        raise ShapeError(
            f"tokens cannot name both {n} queries and {m} keys: they are two texts.",
            "tokens=[…] names the queries, source_tokens=[…] the keys.",
        )
    check_count("tokens", texts, m, "keys")
    return texts[start : start + n], texts


def _strings(name: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    try:
        strings = listed(value)
        if not all(isinstance(each, str) for each in strings):
            raise TypeError
    except TypeError:
        raise RuleError(expected(name, value, "a list of strings"), f"{name}=['the', ' cat', ' sat']") from None
    return strings


def check_count(name: str, strings: list[str], size: int, axis: str) -> None:
    """Raise ShapeError unless there is one string for each query or key."""
    if len(strings) != size:
        raise ShapeError(f"{name} has {len(strings)} strings for {size} {axis}: expected one for each.")
