"""One batch item or one head of an attention matrix, for pages and pictures."""

from typing import TypeVar

from clearhead.view.protocols import Weights

W = TypeVar("W", bound=Weights)


def one_sequence(matrix: W, batch: int) -> W:
    """One batch item, all heads, (1, heads, queries, keys); `batch` counts over all leading axes together.

    Raises SelectionError when there is no such item.
    """
    return matrix.part(batch)


def one_head(matrix: W, head: int) -> W:
    """One head of the first batch item, (1, 1, queries, keys). Raises SelectionError when there is no such head."""
    return matrix.part(0, head)
