"""What the tests of `diagnose` share: inputs, a plain softmax, and the answer about a case of wrong.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import clearhead as ch
from clearhead.diagnosing.verdict import Diagnosis, MistakeExplanation
from seeds import fresh

EXAMPLE = {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]]}
WRONG = {**EXAMPLE, "scores": [[3.5, 11], [1.5, 5.5]], "weights": [[0.006, 0.994], [0.047, 0.953]]}


def softmax(x: Any, axis: int = -1) -> Any:
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def written(place: Path, data: dict[str, Any] | str) -> Path:
    """A case in a file of this name: arrays in .npz, else JSON, or text as it is."""
    if place.suffix == ".npz" and isinstance(data, dict):
        np.savez(place, **data)
    else:
        place.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return place


def qkv(n: int = 24, heads: int = 3, d: int = 8, dtype: Any = np.float32) -> Any:
    return fresh().standard_normal((3, 2, heads, n, d)).astype(dtype)


def diagnosed(case: Any) -> Diagnosis:
    inputs = dict(case.inputs)
    if "q" in inputs:
        return ch.diagnose(inputs["q"], inputs["k"], inputs["v"], case.theirs, **case.rules)
    arrays = [inputs.pop(name) for name in ("x", "w_q", "w_k", "w_v", "w_o")]
    return ch.diagnose_layer(*arrays, case.theirs, **inputs, **case.rules)


def top(diagnosis: Diagnosis) -> MistakeExplanation:
    """The best explanation of wrong numbers."""
    assert diagnosis.verdict in ("mistake", "ambiguous"), diagnosis
    return diagnosis.explanations[0]
