"""Which positions of the whole sequence each rank holds, and which keys its queries need."""

from collections.abc import Sequence
from typing import Literal

from clearhead.core import visibility
from clearhead.core.axes import as_slice
from clearhead.core.problem import Problem
from clearhead.errors import unknown

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")
Pieces = tuple[range, ...]  # one rank's positions, in the order in which its shard holds them


def pieces(sizes: Sequence[int], layout: Layout) -> list[Pieces]:
    """The positions that each rank holds, from their numbers `sizes`, by rank. Raises UnknownNameError.

    contiguous  rank after rank
    zigzag      rank r holds the r-th chunk and the r-th from the end, so that a causal rule gives all ranks equal work
    """
    if not (isinstance(layout, str) and layout in LAYOUTS):
        raise unknown("layout", layout, LAYOUTS)
    if layout == "contiguous":
        return [(place,) for place in _chunks(sizes)]
    chunks = _chunks([(size + 1) // 2 for size in sizes] + [size // 2 for size in reversed(sizes)])
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(len(sizes))]


def _chunks(sizes: Sequence[int]) -> list[range]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def needed(problem: Problem, own: Pieces) -> list[range]:
    """The keys that these queries may attend to, judged by position: sorted ranges that neither overlap nor touch.

    `problem` is that of the whole sequence. Mask, bias and segments are not looked at.
    """
    spans: list[range] = []
    for rows in own:
        if not rows:
            continue
        each = [visibility.key_span(problem, b, as_slice(rows)) for b in range(problem.batch)]
        seen = [span for span in each if span.start < span.stop]
        if seen:
            spans.append(range(min(s.start for s in seen), max(s.stop for s in seen)))
    merged: list[range] = []
    for span in sorted(spans, key=lambda s: s.start):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged


def common(a: range, b: range) -> range:
    """The positions in both ranges."""
    return range(max(a.start, b.start), max(max(a.start, b.start), min(a.stop, b.stop)))
