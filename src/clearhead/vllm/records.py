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


class Parts(NamedTuple):
    """Ranges of keys that begin with a page, as requests of their own: a span is one, or the difference of two."""

    signs: Tensor  # (spans, ranges): 1, -1 for the keys of its first page that are before it, or 0
    rows: Tensor  # (ranges,): whose they are
    ends: Tensor  # (ranges + 1,), their queries
    lengths: Tensor  # (ranges,)
    pages: Tensor  # (ranges, most pages)
    gaps: Tensor  # (ranges, 1): how far before the query the last key is, by which ALiBi counts


class Group:
    """Requests of one step of which one layer is asked, and what is computed of their last queries."""

    def __init__(self, rows: list[int], asked: list[Asked], page: int, where: tuple[Tensor, Tensor, Tensor]) -> None:
        starts, lengths, pages = where
        self.rows, self.asked, self.page = rows, asked, page
        self.all = len(rows) == len(lengths) == int(starts[-1])
        chosen = torch.tensor(rows)
        self.queries, self.ends = starts[1:][chosen].long() - 1, torch.arange(len(rows) + 1, dtype=torch.int32)
        self.lengths, self.pages = lengths[chosen], pages[chosen]
        named: dict[str, Any] = {"entropy": any(one.entropy for one in asked), "top": max(one.top for one in asked)}
        named["logsumexp"] = any(one.spans for one in asked)
        self.named = {name: value for name, value in named.items() if value}
        self._parts: dict[int, Parts] = {}

    def parts(self, left: int) -> Parts:
        """The ranges of all spans, where a query sees so many keys to its left; all of them for -1."""
        if left not in self._parts:
            ranges: list[tuple[int, int, int]] = []
            signs, span = [], 0  # (row, first page, last key's place behind its begin), (span, range, sign)
            for row, one in enumerate(self.asked):
                seen = max(0, int(self.lengths[row]) - 1 - left) if left >= 0 else 0
                for start, stop in one.spans:
                    first = max(start, seen)
                    for end, sign in ((stop, 1), (first, -1)) if first < stop else ():
                        if end > first // self.page * self.page:
                            signs.append((span, len(ranges), sign))
                            ranges.append((row, first // self.page, end))
                    span += 1
            matrix = torch.zeros(span, len(ranges))
            for place, at, sign in signs:
                matrix[place, at] = sign
            rows, firsts, ends = torch.tensor(ranges, dtype=torch.int64).reshape(-1, 3).T
            width = self.pages.shape[1]
            pages = self.pages[rows[:, None], (firsts[:, None] + torch.arange(width)).clamp(max=width - 1)]
            gaps = (self.lengths[rows] - ends)[:, None].float()
            lengths = (ends - firsts * self.page).int()
            counts = torch.arange(len(ranges) + 1, dtype=torch.int32)
            self._parts[left] = Parts(matrix, rows, counts, lengths, pages, gaps)
        return self._parts[left]

    def seen(self, found: list[tuple[Any, Tensor | None]]) -> list[dict[str, Array]]:
        """For each request what it asked for, (layers, heads, …), of what each layer found."""
        answers = [one for one, _ in found]
        stacks: dict[str, Any] = {"spans": [shares for _, shares in found], "entropy": [one.entropy for one in answers]}
        if "top" in self.named:
            stacks["top_weights"], stacks["top_keys"] = zip(*(one.top for one in answers), strict=True)
        whole = {name: torch.stack(tuple(x)).numpy() for name, x in stacks.items() if x[0] is not None}
        seen, span = [], 0
        for place, one in enumerate(self.asked):
            of = {"entropy": whole["entropy"][:, place]} if one.entropy else {}
            if one.spans:
                of["spans"] = whole["spans"][:, span : span + len(one.spans)].swapaxes(1, 2)
                span += len(one.spans)
            if one.top:
                of |= {name: whole[name][:, place, :, : one.top] for name in ("top_weights", "top_keys")}
            seen.append(of)
        return seen


class Step:
    """One step of vLLM: which of its requests are watched, and what their layers showed."""

    def __init__(self, due: dict[int, tuple[str, Asked]], page: int, where: tuple[Tensor, Tensor, Tensor]) -> None:
        self.due, self.page, self.where = due, page, where
        self.groups: dict[tuple[int, ...], Group] = {}
        self.kept: dict[int, tuple[Group, Any, Tensor | None]] = {}  # by layer: what it answered, and shares
        self.positions = {row: int(where[1][row]) - 1 for row in due}

    def group(self, layer: int) -> Group | None:
        """The requests that asked for this layer."""
        rows = tuple(row for row, (_, one) in self.due.items() if one.layers is None or layer in one.layers)
        if rows and rows not in self.groups:
            self.groups[rows] = Group(list(rows), [self.due[row][1] for row in rows], self.page, self.where)
        return self.groups.get(rows)

    def seen(self, row: int) -> list[tuple[list[int], dict[str, Array]]]:
        """What layers showed of a request, and which."""
        return [(layers, seen[group.rows.index(row)]) for group, layers, seen in self.by_group if row in group.rows]

    @cached_property
    def by_group(self) -> list[tuple[Group, list[int], list[dict[str, Array]]]]:
        """Each group, its layers, and what they showed of its requests."""
        layers = [(group, [at for at, one in self.kept.items() if one[0] is group]) for group in self.groups.values()]
        return [(group, of, group.seen([self.kept[at][1:] for at in of])) for group, of in layers if of]


class Recorder:
    """The requests that are watched in this process, and what was seen of them."""

    def __init__(self) -> None:
        self.asked: dict[str, Asked] = {}
        self.seen: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self.batch: Callable[[], Sequence[tuple[str, int]]] | None = None  # names and lengths of the step's requests
        self.first_head = 0  # of this process, where several share the heads
        self._step: list[Step] = []  # one for each group of layers with a cache of its own

    def step(self, page: int, where: tuple[Tensor, Tensor, Tensor]) -> Step | None:
        """What is to be watched in the step that begins: requests whose last query generates a token."""
        if self.batch is None or not self.asked:
            return None
        due = {
            row: (name, self.asked[name])
            for row, (name, length) in enumerate(self.batch())
            if name in self.asked and int(where[1][row]) >= length
        }
        if not due:
            return None
        self._step.append(Step(due, page, where))
        return self._step[-1]

    def finish(self) -> None:
        """Keep what the step has shown, or write it."""
        steps, self._step = self._step, []
        for row, (name, one) in steps[0].due.items() if steps else ():
            found = [part for step in steps for part in step.seen(row)]
            if found:
                self._record(name, one, steps[0].positions[row], found)

    def _record(
        self, name: str, one: Asked, position: int, found: list[tuple[list[int], dict[str, Array]]]
    ) -> None:  # fmt: skip
        layers = [layer for some, _ in found for layer in some]
        seen: dict[str, Any] = {key: np.concatenate([of[key] for _, of in found]) for key in found[0][1]}
        here = range(self.first_head, self.first_head + next(iter(seen.values())).shape[1])
        heads = [head for head in here if one.heads is None or head in one.heads]
        local = [head - self.first_head for head in heads]
        seen = {key: value[np.argsort(layers)][:, local] for key, value in seen.items()}
        if one.first:
            seen["first"], seen["spans"] = seen["spans"][..., 0], seen["spans"][..., 1:]
            if len(one.spans) == 1:
                del seen["spans"]
        record = {"request": name, "layers": sorted(layers), "heads": heads, "position": position} | seen
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
