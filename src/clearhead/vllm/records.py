"""Reads what requests ask for, and records their statistics. Nothing here needs vLLM.

A generated token comes from one query, the last of its request in a step. Statistics are computed and kept for these
queries only, not for the other tokens of prompts.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.errors import RuleError, UnknownNameError, expected

HINT = "CLEARHEAD_VLLM=0 serves with vLLM's own attention."
KEY = "clearhead"  # among the extra arguments of a request
FILE = "CLEARHEAD_VLLM_FILE"
_MOST = 64  # spans of a request, and keys of its top
_CHOICES = ("layers", "entropy", "spans", "top")


class Choices(NamedTuple):
    """What a request asks for; layers None means all."""

    layers: tuple[int, ...] | None
    entropy: bool
    spans: tuple[tuple[int, int], ...]
    top: int


def read_asked(extra: Mapping[str, Any] | None, layers: int, length: int) -> Choices | None:
    """Read what a request asks for from its extra arguments, given the model's layers and the prompt's length."""
    value = (extra or {}).get(KEY)
    if value is None:
        for name in get_close_matches(KEY, [*map(str, extra or {})]):  # other names may be another plugin's
            raise UnknownNameError(f"unknown extra argument `{name}`.", f"did you mean `{KEY}`?")
        return None
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, dict):
        raise RuleError(expected(KEY, value, "a dictionary, or one as JSON"))
    for name in value:
        if name not in _CHOICES:
            raise RuleError(expected("a choice of the request", name, ", ".join(_CHOICES)))
    entropy, top, named = value.get("entropy", False), value.get("top", 0), value.get("layers")
    if type(entropy) is not bool:
        raise RuleError(expected("entropy", entropy, "True or False"))
    most = min(_MOST, length)  # no step has fewer keys; vLLM cannot send NumPy's numbers
    if type(top) is not int or not 0 <= top <= most:
        raise RuleError(expected("top", top, f"a number of keys up to {most}, of the prompt's {length} tokens"))
    whole = isinstance(named, list) and named and all(type(x) is int and 0 <= x < layers for x in named)
    if named is not None and not whole:
        raise RuleError(expected("layers", named, f"a list of Python's whole numbers from 0 to {layers - 1}"))
    spans = _spans(value.get("spans", []), length)
    if not (entropy or top or spans):
        raise RuleError("clearhead was given nothing to watch.", 'ask for "entropy": true, "spans" or "top".')
    if not os.environ.get(FILE):
        what = "clearhead has no file to write its statistics to."
        raise RuleError(what, f"start vLLM with {FILE}=seen.jsonl.")
    return Choices(None if named is None else tuple(named), entropy, spans, top)


def _spans(value: Any, length: int) -> tuple[tuple[int, int], ...]:
    whole = isinstance(value, list) and all(isinstance(x, list | tuple) and len(x) == 2 for x in value)
    if whole and len(value) <= _MOST and all(type(s) is type(e) is int and 0 <= s < e <= length for s, e in value):
        return tuple((start, stop) for start, stop in value)
    what = f"at most {_MOST} pairs [start, stop) within the prompt's {length} tokens"
    raise RuleError(expected("spans", value, what))


Where = tuple[Array, None, Array, Array]  # cu_seq_q, cu_seq_k, seqused_k and block_table of a ragged batch


class WatchedStep:
    """The watched requests of a step, and the statistics to compute for their last queries."""

    def __init__(self, due: dict[int, tuple[str, Choices]], where: Where) -> None:
        starts, _, lengths, pages = where
        self.names, self.asked = zip(*due.values(), strict=True)
        self.all = len(due) == len(lengths) == int(starts[-1])
        rows = np.array(list(due))
        self.queries, self.lengths = starts[1:][rows] - 1, lengths[rows]
        self.where = np.arange(len(due) + 1, dtype=np.int32), None, self.lengths, pages[rows]
        named: dict[str, Any] = {"entropy": any(one.entropy for one in self.asked)}
        named |= {"top": max(one.top for one in self.asked), "received": any(one.spans for one in self.asked)}
        self.named = {name: value for name, value in named.items() if value}

    def asks(self, layer: int) -> bool:
        """Does any of the requests ask for this layer?"""
        return any(one.layers is None or layer in one.layers for one in self.asked)

    def shares(self, weights: Array) -> Array:
        """Sum each query's weights over each of its spans, (spans, heads); weights (keys of all requests, heads)."""
        starts = self.lengths.cumsum() - self.lengths
        each = zip(starts.tolist(), self.asked, strict=True)
        return np.stack([weights[at + first : at + stop].sum(0) for at, one in each for first, stop in one.spans])


class Recorder:
    """The watched requests of this process, and the statistics of the current step."""

    def __init__(self) -> None:
        self.asked: dict[str, Choices] = {}
        self.batch: Callable[[], Sequence[tuple[str, int]]] | None = None  # names and lengths of the step's requests
        self.first_head = 0  # of this process, where several share the heads
        self.kept: dict[int, dict[str, Array]] = {}  # each layer's statistics in this step
        self._step: WatchedStep | None = None

    def step(self, where: Where) -> WatchedStep | None:
        """Begin a step: find the watched requests whose last query generates a token."""
        due = {
            row: (name, self.asked[name])
            for row, (name, length) in enumerate(self.batch() if self.batch and self.asked else ())
            if name in self.asked and where[2][row] >= length
        }
        self._step = WatchedStep(due, where) if due else None
        return self._step

    def finish(self) -> None:
        """End the step: write its statistics to the file, one line per token."""
        step, kept, watched = self._step, self.kept, sorted(self.kept)
        self._step, self.kept = None, {}
        if step is None or not kept:
            return
        whole = {name: np.stack([kept[layer][name] for layer in watched]) for name in kept[watched[0]]}
        lines, span, heads = [], 0, next(iter(whole.values())).shape[2]
        for row, (name, one) in enumerate(zip(step.names, step.asked, strict=True)):
            seen = {"entropy": whole["entropy"][:, row]} if one.entropy else {}
            if one.spans:
                seen["spans"] = whole["spans"][:, span : span + len(one.spans)].swapaxes(1, 2)
                span += len(one.spans)
            if one.top:
                top = (whole[name][:, row, :, : one.top] for name in ("top_weights", "top_indices"))
                seen |= dict(zip(("top_weights", "top_keys"), top, strict=True))
            layers = watched if one.layers is None else [layer for layer in watched if layer in one.layers]
            line = {"request": name, "position": int(step.lengths[row]) - 1, "layers": layers}
            line["heads"] = [*range(self.first_head, self.first_head + heads)]
            lines.append(line | {key: x[np.isin(watched, layers)].tolist() for key, x in seen.items()})
        with open(os.environ[FILE], "ab", buffering=0) as file:  # one write, so that lines of processes stay whole
            file.write("".join(f"{json.dumps(line)}\n" for line in lines).encode())


RECORDER = Recorder()
