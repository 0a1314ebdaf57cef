"""Token names given by the caller: a list of strings for the text, and one for the text that it attends to."""

from collections.abc import Iterable, Sequence
from typing import Any

from clearhead.core.problem import Problem
from clearhead.errors import RuleError, ShapeError, shown

Names = Sequence[str] | None


def token_names(tokens: Any, source_tokens: Any, problem: Problem) -> tuple[Names, Names]:
    """Names of rows and columns: (queries,) and (keys,) strings, or None where none were given.

    tokens         (keys,) strings of the text; query i is tokens[i + query_offset]. With source_tokens, (queries,)
    source_tokens  (keys,) strings of the other text, for cross-attention
    Raises RuleError for anything but a list of strings, ShapeError for a list of another length.
    """
    own, other = _strings("tokens", tokens), _strings("source_tokens", source_tokens)
    n, m = problem.queries, problem.keys
    if other is not None:
        if own is None:
            raise RuleError("source_tokens is given, but tokens, which name the queries, are not.", "tokens=[…]")
        _check("tokens", own, n, "queries")
        _check("source_tokens", other, m, "keys")
        return own, other
    if own is None:
        return None, None
    offsets = set(problem.query_offset.tolist()) or {0}
    start = min(offsets)
    inside = len(offsets) == 1 and start >= 0 and start + n <= m
    if not inside or (n != m and not problem.causal and problem.window == (None, None)):
        raise ShapeError(
            f"tokens cannot name {n} queries and {m} keys at once: they are not one text.",
            "tokens=[…] for the queries, source_tokens=[…] for the keys.",
        )
    _check("tokens", own, m, "keys")
    return own[start : start + n], own


def _strings(name: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    walked = isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and getattr(value, "ndim", 1) == 1
    strings: list[str] = []
    for each in value if walked else [None]:
        if not isinstance(each, str):  # stop at the first: an array of numbers may be larger than memory
            said = f"{name} is {shown(value)}: expected a list of strings."
            raise RuleError(said, f"{name}=['the', ' cat', ' sat']")
        strings.append(each)
    return strings


def _check(name: str, strings: list[str], size: int, axis: str) -> None:
    if len(strings) != size:
        raise ShapeError(f"{name} has {len(strings)} strings for {size} {axis}: expected one for each.")
