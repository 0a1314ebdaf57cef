"""What every head of a model does over a text: its statistics, its caption, and the clearest head of each kind."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.models.protocol import LayerRun
from clearhead.ops.matrix import AttentionMatrix
from clearhead.view.captions import KINDS, Caption, captions
from clearhead.view.head_summary import even_heads, summarise_heads


class CaptionedHead(NamedTuple):
    """A head's five statistics over the whole text, as `HeadSummary` has them, and its caption."""

    layer: int
    head: int
    statistics: dict[str, float]
    caption: Caption | None

    @property
    def clearness(self) -> float:
        """How clear the caption's pattern is; 0 without one."""
        return 0.0 if self.caption is None else self.caption.clearness

    def to_json(self) -> dict[str, Any]:
        """All of it as plain numbers and words; a statistic that is not known is None."""
        known = {name: x if np.isfinite(x) else None for name, x in self.statistics.items()}
        caption = None if self.caption is None else self.caption._asdict()
        return {"layer": self.layer, "head": self.head, "statistics": known, "caption": caption}


def captioned_heads(runs: Sequence[LayerRun]) -> list[CaptionedHead]:
    """Every head of every layer. O(tokens²·d_k) time for each, O(tokens) memory."""
    return [head for number, run in enumerate(runs) for head in _of_layer(number, run)]


def _of_layer(number: int, run: LayerRun) -> Iterator[CaptionedHead]:
    matrix = AttentionMatrix(run.q, run.k, **run.rules).part(0)
    heads = summarise_heads(matrix, matrix.observe(logsumexp=True))
    for head, (caption, *means) in enumerate(zip(captions(heads, even_heads(matrix)), *heads, strict=True)):
        yield CaptionedHead(number, head, dict(zip(heads._fields, means, strict=True)), caption)


def clearest(heads: Sequence[CaptionedHead]) -> list[tuple[CaptionedHead, int]]:
    """Of each kind that is a pattern the clearest head and how many others there are, in the order of `KINDS`."""
    kinds: dict[str, list[CaptionedHead]] = {kind.name: [] for kind in KINDS}
    for head in heads:
        if head.caption is not None and head.clearness > 0:
            kinds[head.caption.kind].append(head)
    return [(max(same, key=lambda head: head.clearness), len(same) - 1) for same in kinds.values() if same]
