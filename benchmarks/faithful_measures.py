"""How good a list of parts is, ContextCite's estimate and BM25, for the group `faithful`; nothing here runs a model.

scores     (parts,): above 0 where a part speaks for the answer
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.core.effects import spearman


def lds(scores: Any, kept: Any, values: Sequence[float]) -> float:
    """The linear datamodeling score: Spearman's correlation of the kept parts' sum with y; 0 where either is constant.

    kept   (masks, parts), true where a part was seen; values: y of these runs
    """
    return spearman((np.asarray(kept, np.float64) @ np.asarray(scores)).tolist(), list(values)) or 0.0


def log_p(value: float) -> float:
    """ln P, of y = ln P − ln(1 − P)."""
    return -float(np.logaddexp(0.0, -value))


def deleted(scores: Sequence[float], steps: int = 20) -> list[tuple[int, ...]]:
    """The parts hidden at each step of the curve of deletion, the best first, from none to all."""
    order = np.argsort(-np.asarray(scores), kind="stable").tolist()
    counts = sorted({round(len(order) * step / steps) for step in range(steps + 1)})
    return [tuple(order[:count]) for count in counts]


def curves(scores: Sequence[float], steps: Sequence[tuple[int, ...]], values: Sequence[float]) -> tuple[float, float]:
    """RISE and MAS: the area under P as the best parts are deleted, and with what the scores promised; low is good.

    The curve is scaled to run from 1 to 0, and never rises. MAS (Walker et al. 2024) adds how far it is from the share
    of the scores that is left, clips to 1 and scales again.
    """
    share = [len(step) / len(scores) for step in steps]
    curve = _scaled(np.minimum.accumulate(np.exp([log_p(value) for value in values])))
    positive = np.maximum(scores, 0)
    left = np.array([1 - positive[list(step)].sum() / (positive.sum() or 1.0) for step in steps])
    aligned = _scaled(np.clip(curve + np.abs(curve - left), 0, 1))
    return _area(curve, share), _area(aligned, share)


def _area(curve: Any, share: Sequence[float]) -> float:
    return float(np.diff(share) @ (curve[1:] + curve[:-1]) / 2)


def _scaled(curve: Any) -> Any:
    return (curve - curve.min()) / (np.ptp(curve) or 1.0)


def context_cite(kept: Any, values: Any, alpha: float = 0.01) -> Any:
    """ContextCite's scores, (parts,): LASSO on runs with random parts hidden (Cohen-Wang et al. 2024).

    As in the package context-cite 0.0.4: columns are scaled to a mean of 0 and a deviation of 1, the intercept is free,
    and |y − b − Xw|²/(2·runs) + alpha·|w|₁ is least; the weights are scaled back.
    """
    kept = np.asarray(kept, np.float64)
    size = kept.std(axis=0)
    x = (kept - kept.mean(axis=0)) / np.where(size, size, 1.0)
    rest = np.asarray(values, np.float64) - np.mean(values)
    weights = np.zeros(kept.shape[1])
    for _ in range(2000):
        before = weights.copy()
        for place in np.flatnonzero(size):
            raw = weights[place] + x[:, place] @ rest / len(x)
            new = np.sign(raw) * max(abs(raw) - alpha, 0.0)
            rest += x[:, place] * (weights[place] - new)
            weights[place] = new
        if np.abs(weights - before).max() < 1e-8:
            break
    return weights / np.where(size, size, 1.0)


def bm25(question: Sequence[int], parts: Sequence[Sequence[int]], k: float = 1.2, b: float = 0.75) -> list[float]:
    """Each part's score for a question, both as tokens: no model, only which words are the same."""
    mean, count = np.mean([len(part) for part in parts]), len(parts)
    scores = []
    for part in parts:
        total = 0.0
        for token in set(question):
            having, often = sum(token in other for other in parts), part.count(token) if token in part else 0
            rarity = np.log(1 + (count - having + 0.5) / (having + 0.5))
            total += rarity * often * (k + 1) / (often + k * (1 - b + b * len(part) / mean))
        scores.append(float(total))
    return scores
