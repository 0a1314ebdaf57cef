"""What requests ask for, and what was seen of them. Nothing here needs vLLM.

A token that is generated comes from one query, the last of its request in a step. Of these queries alone, statistics
are computed and kept: of a step's other tokens, which are those of prompts, none.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.core.axes import Array
from clearhead.core.rule_values import is_whole, read_flag
from clearhead.core.statistics import Answers
from clearhead.errors import RuleError, expected, unknown

HINT = "CLEARHEAD_VLLM=0 serves with vLLM's own attention."
KEY = "clearhead"  # among the extra arguments of a request
_MOST = 1000  # requests that are kept
_CHOICES = ("layers", "heads", "entropy", "first", "spans", "top")


class Asked(NamedTuple):
    """What a request asks for; of all layers and heads where it names none."""

    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    entropy: bool
    spans: tuple[tuple[int, int], ...]  # the share on the first token is that of (0, 1), the first of them
    first: bool
    top: int


def read_asked(extra: Mapping[str, Any] | None, layers: int, heads: int, length: int) -> Asked | None:
    """What a request's extra arguments ask for, in a model of so many layers and heads, of a prompt of this length."""
    value = (extra or {}).get(KEY)
    if value is None:
        return None
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, dict):
        raise RuleError(expected(KEY, value, "a dictionary, or one as JSON"))
    for name in value:
        if name not in _CHOICES:
            raise RuleError(expected("a choice of the request", name, ", ".join(_CHOICES)))
    entropy, first = (read_flag(name, value.get(name, False)) for name in ("entropy", "first"))
    top = value.get("top", 0)
    if not is_whole(top) or not 0 <= top <= length:  # no step has fewer keys
        raise RuleError(expected("top", top, f"a number of keys up to the prompt's {length} tokens"))
    spans = _spans(value.get("spans", []), length)
    if not (entropy or first or top or spans):
        raise RuleError("clearhead has nothing to watch.", "entropy, first, spans or top: what shall be seen?")
    chosen = _places("layers", value.get("layers"), layers), _places("heads", value.get("heads"), heads)
    return Asked(*chosen, entropy, ((0, 1), *spans) if first else spans, first, int(top))


def _places(name: str, value: Any, size: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and value and all(is_whole(x) and 0 <= x < size for x in value):
        return tuple(sorted({int(x) for x in value}))
    raise RuleError(expected(name, value, f"a list of whole numbers from 0 to {size - 1}"))


def _spans(value: Any, length: int) -> tuple[tuple[int, int], ...]:
    whole = isinstance(value, list) and all(isinstance(x, list | tuple) and len(x) == 2 for x in value)
    if whole and all(is_whole(s) and is_whole(e) and 0 <= s < e <= length for s, e in value):
        return tuple((int(start), int(stop)) for start, stop in value)
    raise RuleError(expected("spans", value, f"a list of [start, stop) within the prompt's {length} tokens"))


class Group:
    """Requests of one step of which one layer is asked, and what is computed of their last queries."""

    def __init__(self, rows: list[int], asked: list[Asked], starts: Tensor, lengths: Tensor, pages: Tensor) -> None:
        self.rows, self.asked, self.all = rows, asked, len(rows) == len(lengths) == int(starts[-1])
        chosen = torch.tensor(rows)
        self.queries, self.ends = starts[1:][chosen].long() - 1, torch.arange(len(rows) + 1, dtype=torch.int32)
        self.lengths, self.pages = lengths[chosen], pages[chosen]
        named: dict[str, Any] = {"entropy": any(one.entropy for one in asked), "top": max(one.top for one in asked)}
        named["received"] = any(one.spans for one in asked)  # with one query a request, its weights
        self.named = {name: value for name, value in named.items() if value}

    @cached_property
    def spans(self) -> Tensor:
        """(spans of all requests, keys of all requests): 1 where a key is in a span; its products are sums."""
        ends = self.lengths.cumsum(0).tolist()
        spans = torch.zeros(sum(len(one.spans) for one in self.asked), ends[-1])
        row = 0
        for one, first in zip(self.asked, [0, *ends], strict=False):
            for start, stop in one.spans:
                spans[row, first + start : first + stop] = 1
                row += 1
        return spans

    def seen(self, answers: Answers) -> list[dict[str, Array]]:
        """For each request what it asked for, heads first."""
        found: Any = answers
        shares = (self.spans @ found.received.float()).numpy().T if "received" in self.named else None
        seen: list[dict[str, Array]] = []
        row = 0
        for place, one in enumerate(self.asked):
            of: dict[str, Array] = {}
            if one.entropy:
                of["entropy"] = found.entropy[place].numpy()
            if shares is not None and one.spans:
                of["spans"] = shares[:, row : row + len(one.spans)]
                row += len(one.spans)
            if one.top:
                of["top_weights"], of["top_keys"] = (x[place, :, : one.top].numpy() for x in found.top)
            seen.append(of)
        return seen


class Step:
    """One step of vLLM: which of its requests are watched, and what their layers showed."""

    def __init__(self, due: dict[int, tuple[str, Asked]], starts: Tensor, lengths: Tensor, pages: Tensor) -> None:
        self.due, self.where = due, (starts, lengths, pages)
        self.groups: dict[tuple[int, ...], Group] = {}
        self.kept: dict[int, dict[int, dict[str, Array]]] = {row: {} for row in due}  # by request and layer
        self.positions = {row: int(lengths[row]) - 1 for row in due}

    def group(self, layer: int) -> Group | None:
        """The requests that asked for this layer."""
        rows = tuple(row for row, (_, one) in self.due.items() if one.layers is None or layer in one.layers)
        if rows and rows not in self.groups:
            self.groups[rows] = Group(list(rows), [self.due[row][1] for row in rows], *self.where)
        return self.groups.get(rows)

    def keep(self, layer: int, group: Group, answers: Answers) -> None:
        for row, of in zip(group.rows, group.seen(answers), strict=True):
            self.kept[row][layer] = of


class Recorder:
    """The requests that are watched in this process, and what was seen of them."""

    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}
        self.seen: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self.batch: Callable[[], Sequence[tuple[str, int]]] | None = None  # names and lengths of the step's requests
        self.first_head = 0  # of this process, where several share the heads
        self._step: list[Step] = []  # one for each group of layers with a cache of its own

    def step(self, starts: Tensor, lengths: Tensor, pages: Tensor) -> Step | None:
        """What is to be watched in the step that begins: requests whose last query generates a token."""
        if self.batch is None or not self.asked:
            return None
        due = {
            row: (name, self.asked[name])
            for row, (name, length) in enumerate(self.batch())
            if name in self.asked and int(lengths[row]) >= length
        }
        if not due:
            return None
        self._step.append(Step(due, starts, lengths, pages))
        return self._step[-1]

    def finish(self) -> None:
        """Keep what the step has shown, or write it."""
        steps, self._step = self._step, []
        for row, (name, one) in steps[0].due.items() if steps else ():
            kept = {layer: of for step in steps for layer, of in step.kept[row].items()}
            if kept:
                self._record(name, one, steps[0].positions[row], dict(sorted(kept.items())))

    def _record(self, name: str, one: Asked, position: int, kept: dict[int, dict[str, Array]]) -> None:
        parts = list(kept.values())
        here = range(self.first_head, self.first_head + len(next(iter(parts[0].values()))))
        heads = [head for head in here if one.heads is None or head in one.heads]
        local = [head - self.first_head for head in heads]
        seen: dict[str, Any] = {key: np.stack([part[key] for part in parts])[:, local] for key in parts[0]}
        if one.first:
            seen["first"], seen["spans"] = seen["spans"][..., 0], seen["spans"][..., 1:]
            if len(one.spans) == 1:
                del seen["spans"]
        record = {"request": name, "layers": list(kept), "heads": heads, "position": position} | seen
        path = os.environ.get("CLEARHEAD_VLLM_FILE")
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(listed(record)) + "\n")
            return
        self.seen.setdefault(name, []).append(record)
        if len(self.seen) > _MOST:
            self.seen.popitem(last=False)

    def statistics(self, request_id: str) -> dict[str, Any]:
        """What `clearhead.vllm.statistics` answers."""
        names = [name for name in self.seen if request_id in (name, name.rpartition("-")[0])]
        if not names:
            raise unknown("request", request_id, self.seen)
        records = self.seen[names[-1]]
        same = {key: records[0][key] for key in ("request", "layers", "heads")}
        return same | {key: np.stack([one[key] for one in records]) for key in records[0] if key not in same}


def listed(record: dict[str, Any]) -> dict[str, Any]:
    """The same with lists in place of arrays."""
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in record.items()}


RECORDER = Recorder()
