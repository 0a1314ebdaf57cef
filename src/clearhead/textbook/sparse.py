"""Sparse patterns, the answer to n²: full attention beside a window, blocks and segments, with what each costs."""

from typing import NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.room import check_room
from clearhead.core.rule_values import whole_number
from clearhead.core.rules import Rules
from clearhead.core.visibility import dense


class Pattern(NamedTuple):
    """A pattern of attention over n tokens."""

    name: str  # full, window, blocks or segments
    rules: Rules  # the keywords of `attention` that make it
    pairs: int  # of a query and a key that it may attend to: each costs d_k multiply-adds for S and d_v for A·V
    share: float  # of all n² pairs
    picture: Array  # bool, at most (16, 16): is there such a pair in this part of the matrix?


def sparse_patterns(n: int, width: int) -> tuple[Pattern, ...]:
    """Full attention over n tokens, and three patterns whose cost grows with n·width instead of n².

    window     a token attends to itself and to `width` tokens on each side
    blocks     the text is cut into blocks of `width`; a token attends to its own block, the one before, and the first
    segments   several texts of `width` tokens in one row, each on its own

    Raises RuleError for anything but whole numbers from 1 up, SizeError for more pairs than the memory. O(n²).
    Source: Child et al. 2019; Beltagy et al. 2020 (window); Zaheer et al. 2020 (blocks).

    >>> [(each.name, each.pairs) for each in sparse_patterns(12, 2)]
    [('full', 144), ('window', 54), ('blocks', 60), ('segments', 24)]
    """
    n = whole_number("n", n, 1)
    width = min(whole_number("width", width, 1), n)
    check_room(f"{n} × {n} pairs", 24 * n * n, "give a smaller n.")
    labels = np.arange(n) // width
    count = int(labels[-1]) + 1
    behind = np.subtract.outer(np.arange(count), np.arange(count))
    table = np.where((behind == 0) | (behind == 1) | (np.arange(count) == 0), 0.0, -np.inf)
    rules: dict[str, Rules] = {
        "full": {},
        "window": {"window": (width, width)},
        "blocks": {"spans": (labels, labels, table)},
        "segments": {"query_segments": labels, "kv_segments": labels},
    }
    return tuple(_pattern(name, each, n) for name, each in rules.items())


def _pattern(name: str, rules: Rules, n: int) -> Pattern:
    token = np.zeros((n, 1))
    seen = dense(describe(token, token, None, rules).problem)[0, 0]
    starts = np.linspace(0, n, min(n, 16) + 1).astype(int)[:-1]
    parts = np.logical_or.reduceat(np.logical_or.reduceat(seen, starts, axis=0), starts, axis=1)
    return Pattern(name, rules, int(seen.sum()), float(seen.mean()), parts)
