"""Describes what a head does in a sentence, from its statistics, in both languages, for pages and the terminal.

A head gets the first kind in `KINDS` whose conditions hold for its means over the queries:

    kind       its mean                                     is at least             and
    previous   weight on the token before the query's own   0.5                     excess 0.25
    diagonal   weight on the query's own token              0.5                     excess 0.25
    sink       weight on the first token                    0.25                    excess 0.2
    local      mean attention distance                      -                       below 0.25 of even weights'
    broad      entropy                                      0.9 of even weights'

The excess of a share s over the share e that even weights would have is (s - e)/(1 - e): 0 for a head without
preference, 1 if all weight is there. The limit of 0.5 for previous tokens is that of Clark et al. 2019 (What does BERT
look at?). Sinks are those of Xiao et al. 2023 (Efficient streaming language models with attention sinks); Gu et al.
2024 count them from a share of 0.3.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from clearhead.digits import fixed
from clearhead.view.head_summary import HeadSummary
from clearhead.words import LANGUAGES, Language, say


def _excess(share: float, even: float) -> float:
    return (share - even) / (1 - even) if even < 1 else 0.0


KINDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {  # a statistic, and its condition beside even weights'
    "previous": ("previous", lambda share, even: share >= 0.5 and _excess(share, even) >= 0.25),
    "diagonal": ("diagonal", lambda share, even: share >= 0.5 and _excess(share, even) >= 0.25),
    "sink": ("sink", lambda share, even: share >= 0.25 and _excess(share, even) >= 0.2),
    "local": ("distance", lambda distance, even: distance < 0.25 * even),
    "broad": ("entropy", lambda entropy, even: 0 < 0.9 * even <= entropy),
}  # words/ has each kind's sentence under "caption " + its name
MIXED = "mixed"  # the kind of a head that fits none of these


class Caption(NamedTuple):
    """A head's kind, how clear its pattern is, from 0 (mixed or broad) to 1, and the sentence in each language."""

    kind: str
    clearness: float
    said: dict[Language, str]


def captions(heads: HeadSummary, even: HeadSummary) -> list[Caption | None]:
    """Caption each head; None if its statistics are unknown, or no query sees more than one key.

    heads, even   the results of `summarise_heads` and `even_heads` for the same matrix
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
    name = next((name for name in KINDS if _holds(name, head, even)), MIXED)
    numbers = {name: fixed(100 * head[name], 0, 4) for name in ("sink", "previous", "diagonal")}
    numbers |= {name: fixed(head[name], 1, 5) for name in ("distance", "entropy")}
    numbers["even"] = fixed(even["entropy"], 1, 5)
    key = "mixed without distance" if name == MIXED and not np.isfinite(head["distance"]) else name
    said: dict[Language, str] = {language: say(language, f"caption {key}", **numbers) for language in LANGUAGES}
    clearness = 0.0
    if name not in ("broad", MIXED):
        share, level = (numbers_of[KINDS[name][0]] for numbers_of in (head, even))
        clearness = 1 - share / level if name == "local" else _excess(share, level)
    return Caption(name, clearness, said)


def _holds(kind: str, head: dict[str, float], even: dict[str, float]) -> bool:
    """Do a kind's conditions hold? An unknown number fulfils none."""
    statistic, holds = KINDS[kind]
    share, level = head[statistic], even[statistic]
    return bool(np.isfinite(share) and np.isfinite(level) and holds(share, level))
