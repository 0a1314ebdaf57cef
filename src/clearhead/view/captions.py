"""What a head does, as a sentence in each language, from its statistics: for pages and for the terminal.

A head is called by the first kind in `KINDS` all of whose conditions hold for its mean over the queries:

    kind       its mean                                     is at least             and
    previous   weight on the token before the query's own   0.5                     excess 0.25
    diagonal   weight on the query's own token              0.5                     excess 0.25
    sink       weight on the first token                    0.25                    excess 0.2
    local      mean attention distance                      -                       below 0.25 of even weights'
    broad      entropy                                      0.9 of even weights'

The excess of a share s over the share e that even weights would have is (s - e)/(1 - e): 0 for a head without
preference, 1 where all weight is there. Half of the weight for previous tokens is the measure of Clark et al. 2019
(What does BERT look at?); sinks are those of Xiao et al. 2023 (Efficient streaming language models with attention
sinks), called so by Gu et al. 2024 from a share of 0.3.
"""

from typing import NamedTuple

import numpy as np

from clearhead.digits import fixed
from clearhead.view.head_summary import HeadSummary
from clearhead.words import LANGUAGES, Language, say


class Kind(NamedTuple):
    """A kind of head: conditions on one of the statistics of `HeadSummary`."""

    name: str  # its sentence is "caption " + name in words/
    statistic: str
    share: float = 0.0  # at least this
    excess: float | None = None  # (share - even)/(1 - even), at least this
    most: float | None = None  # below this part of what even weights would have
    least: float | None = None  # at least this part of it


KINDS = (
    Kind("previous", "previous", share=0.5, excess=0.25),
    Kind("diagonal", "diagonal", share=0.5, excess=0.25),
    Kind("sink", "sink", share=0.25, excess=0.2),
    Kind("local", "distance", most=0.25),
    Kind("broad", "entropy", least=0.9),
)
MIXED = "mixed"  # none of these


class Caption(NamedTuple):
    """A head's kind, how clear its pattern is from 0 (none: mixed or broad) to 1, and the sentence in each language."""

    kind: str
    clearness: float
    said: dict[Language, str]


def captions(heads: HeadSummary, even: HeadSummary) -> list[Caption | None]:
    """A caption for each head; None where its statistics are not known, or no query sees more than one key.

    heads, even   what `summarise_heads` and `even_heads` give for the same matrix
    O(heads).

    >>> heads = {"sink": [0.1], "previous": [0.8], "diagonal": [0.02], "distance": [1.4], "entropy": [0.9]}
    >>> even = {"sink": [0.27], "previous": [0.2], "diagonal": [0.27], "distance": [2.5], "entropy": [1.59]}
    >>> captions(heads, even)[0].said["en"]
    'previous-token head, 80% on the token before'
    """
    baseline = {name: values[0] if values else np.nan for name, values in even.items()}
    return [_caption(dict(zip(heads, head, strict=True)), baseline) for head in zip(*heads.values(), strict=True)]


def _caption(head: dict[str, float], even: dict[str, float]) -> Caption | None:
    if not any(np.isfinite(x) for x in head.values()) or even["entropy"] == 0:
        return None
    kind = next((kind for kind in KINDS if _holds(kind, head[kind.statistic], even[kind.statistic])), None)
    numbers = {name: fixed(100 * head[name], 0, 4) for name in ("sink", "previous", "diagonal")}
    numbers |= {name: fixed(head[name], 1, 5) for name in ("distance", "entropy")}
    numbers["even"] = fixed(even["entropy"], 1, 5)
    name = MIXED if kind is None else kind.name
    key = "mixed without distance" if name == MIXED and not np.isfinite(head["distance"]) else name
    said: dict[Language, str] = {language: say(language, f"caption {key}", **numbers) for language in LANGUAGES}
    clearness = 0.0
    if kind is not None and (kind.most is not None or kind.excess is not None):
        share, level = head[kind.statistic], even[kind.statistic]
        clearness = 1 - share / level if kind.excess is None else _excess(share, level)
    return Caption(name, clearness, said)


def _holds(kind: Kind, share: float, even: float) -> bool:
    """Do all conditions hold? A number that is not known fulfils none."""
    if not np.isfinite(share) or not np.isfinite(even):
        return False
    return (
        share >= kind.share
        and (kind.excess is None or _excess(share, even) >= kind.excess)
        and (kind.most is None or share < even * kind.most)
        and (kind.least is None or 0 < even * kind.least <= share)
    )


def _excess(share: float, even: float) -> float:
    return (share - even) / (1 - even) if even < 1 else 0.0
