"""What every head does over a text, and what the answer of an `Explanation` says, in the terminal and in notebooks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.digits import fixed, percent
from clearhead.explaining.texts import token_name
from clearhead.models.protocol import LayerRun
from clearhead.ops.matrix import AttentionMatrix
from clearhead.spelling import cut, spelled, visible
from clearhead.tables import Table
from clearhead.view.captions import KINDS, Caption, captions
from clearhead.view.head_summary import even_heads, summarise_heads
from clearhead.words import Language, say

_KEYS, _TEXT = 8, 100  # keys, and columns of the text


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
    made = []
    for number, run in enumerate(runs):
        matrix = AttentionMatrix(run.q, run.k, **run.rules).part(0)
        heads = summarise_heads(matrix, matrix.observe(logsumexp=True))
        for head, (caption, *means) in enumerate(
            zip(captions(heads, even_heads(matrix)), *heads.values(), strict=True)
        ):
            made.append(CaptionedHead(number, head, dict(zip(heads, means, strict=True)), caption))
    return made


def clearest(heads: Sequence[CaptionedHead]) -> list[tuple[CaptionedHead, int]]:
    """Of each kind that is a pattern the clearest head and how many others there are, in the order of `KINDS`."""
    kinds: dict[str, list[CaptionedHead]] = {kind: [] for kind in KINDS}
    for head in heads:
        if head.caption is not None and head.clearness > 0:
            kinds[head.caption.kind].append(head)
    return [(max(same, key=lambda head: head.clearness), len(same) - 1) for same in kinds.values() if same]


def attending(seen: Any, language: Language) -> str:
    """What the chosen token attends to most."""
    weights, masked = seen.row.weights, np.isneginf(seen.row.masked)
    place = {"layer": seen.layer, "head": seen.head, "token": token_name(seen, seen.token)}
    if masked.all():
        return say(language, "attends to nothing", **place)
    key = int(np.where(masked, -1.0, weights).argmax())
    facts = {"most": token_name(seen, key), "share": percent(float(weights[key]))}
    return say(language, "attends most to itself" if key == seen.token else "attends most", **place, **facts)


def following(seen: Any, language: Language) -> str:
    """The heading of what may come after the chosen token."""
    last = seen.token == len(seen.tokens) - 1
    return say(language, "next" if last else "next after", token=token_name(seen, seen.token))


def kinds_of(seen: Any) -> list[tuple[CaptionedHead, int]]:
    """The chosen head and the clearest head of each kind, each with how many more there are; none without captions."""
    heads = seen.heads()
    chosen = next(head for head in heads if (head.layer, head.head) == (seen.layer, seen.head))
    if chosen.caption is None:
        return []
    kinds = clearest(heads)
    first = (chosen, next((more for head, more in kinds if head is chosen), 0))
    return [first, *(kind for kind in kinds if kind[0] is not chosen)]


def tables(seen: Any, language: Language) -> list[Table]:
    """What follows, what the chosen token attends to, what heads do."""
    result = [Table(cut(visible(seen.text), _TEXT))]
    shares = [choice.probability for choice in seen.after]
    names = [say(language, key) for key in ("key", "weight")]
    rows = [(spelled(choice.text), percent(choice.probability)) for choice in seen.after]
    if rows:
        result.append(Table(following(seen, language), [say(language, "column token"), "p"], rows, shares))
    order = np.argsort(-seen.row.weights, kind="stable")[:_KEYS]
    weights = seen.row.weights[order]
    rows = [(token_name(seen, j), fixed(float(x), 4, 9)) for j, x in zip(order.tolist(), weights, strict=True)]
    result.append(Table(attending(seen, language), names, rows, weights.tolist()))
    kinds = [(head, head.caption) for head, _ in kinds_of(seen)]
    rows = [(f"{head.layer}.{head.head}", caption.said[language]) for head, caption in kinds if caption is not None]
    columns = [say(language, "why head"), ""]
    return [*result, Table(say(language, "what heads do"), columns, rows)] if rows else result
