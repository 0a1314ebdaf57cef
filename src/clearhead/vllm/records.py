"""What requests ask for, and what was seen of them. Nothing here needs vLLM.

A token that is generated comes from one query, the last of its request in a step. Of these queries alone, statistics
are computed and kept: of a step's other tokens, which are those of prompts, none.
"""

import json
import os
from collections import OrderedDict
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
MEMORY, NUMBERS = "CLEARHEAD_VLLM_MEMORY", "CLEARHEAD_VLLM_NUMBERS"
_LIMITS = {MEMORY: 256, NUMBERS: 100_000}  # MiB that are kept in memory; numbers of one token
_SPANS = 256  # of a request
_RECORD = 1024  # bytes of a token's record beside its numbers
_CHOICES = ("layers", "heads", "entropy", "first", "spans", "top")


class Choices(NamedTuple):
    """What a request asks for; of all layers and heads where it names none."""

    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None
    entropy: bool
    spans: tuple[tuple[int, int], ...]  # the share on the first token is that of (0, 1), the first of them
    first: bool
    top: int

    def numbers(self, layers: int, heads: int) -> int:
        """How many numbers there are of a token, in a model of so many layers and heads."""
        watched = len(self.layers or range(layers)) * len(self.heads or range(heads))
        return watched * (self.entropy + len(self.spans) + 2 * self.top)


def limit(name: str) -> int:
    """The limit that an environment variable sets, or its default. Raises RuleError for anything but a whole number."""
    text = os.environ.get(name) or str(_LIMITS[name])
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RuleError(expected(name, text, "a whole number from 0 up"))
    return int(text)


def check_room(asked: Choices, layers: int, heads: int, tokens: int) -> None:
    """Raise RuleError for more than the limits allow of a request of so many new tokens, or if nobody could read it."""
    numbers, most, memory = asked.numbers(layers, heads), limit(NUMBERS), limit(MEMORY)
    if numbers > most:
        what = f"clearhead is asked for {numbers:,} numbers of each token: the most are {most:,}."
        raise RuleError(what, f"fewer layers, heads or spans, a smaller top, or {NUMBERS}={numbers} when vLLM starts.")
    if os.environ.get(FILE):
        return
    if not memory:
        what = "nobody could read what clearhead is asked for: this server writes no file and keeps nothing in memory."
        raise RuleError(what, f"{FILE}=seen.jsonl, or VLLM_SERVER_DEV_MODE=1, when it starts.")
    size = -(-tokens * (_RECORD + 8 * numbers) // 2**20)
    if size > memory:
        what = f"what clearhead is asked for may take {size:,} MiB in {tokens} tokens: {memory:,} MiB are kept."
        raise RuleError(what, f"a smaller max_tokens or top, {MEMORY}={size}, or {FILE}=seen.jsonl when vLLM starts.")


def read_asked(extra: Mapping[str, Any] | None, layers: int, heads: int, length: int) -> Choices | None:
    """What a request's extra arguments ask for, in a model of so many layers and heads, of a prompt of this length."""
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
    entropy, first = (value.get(name, False) for name in ("entropy", "first"))
    for name, flag in (("entropy", entropy), ("first", first)):
        if type(flag) is not bool:
            raise RuleError(expected(name, flag, "True or False"))
    top = value.get("top", 0)
    if type(top) is not int or not 0 <= top <= length:  # no step has fewer keys; vLLM cannot send NumPy's numbers
        raise RuleError(expected("top", top, f"a number of keys up to the prompt's {length} tokens"))
    spans = _spans(value.get("spans", []), length)
    if not (entropy or first or top or spans):
        raise RuleError("clearhead has nothing to watch.", "entropy, first, spans or top: what shall be seen?")
    chosen = _places("layers", value.get("layers"), layers), _places("heads", value.get("heads"), heads)
    return Choices(*chosen, entropy, ((0, 1), *spans) if first else spans, first, top)


def _places(name: str, value: Any, size: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and value and all(type(x) is int and 0 <= x < size for x in value):
        return tuple(sorted(set(value)))
    raise RuleError(expected(name, value, f"a list of Python's whole numbers from 0 to {size - 1}, at least one"))


def _spans(value: Any, length: int) -> tuple[tuple[int, int], ...]:
    if isinstance(value, list) and len(value) > _SPANS:
        raise RuleError(f"there are {len(value):,} spans: expected at most {_SPANS}.")
    whole = isinstance(value, list) and all(isinstance(x, list | tuple) and len(x) == 2 for x in value)
    if whole and all(type(s) is type(e) is int and 0 <= s < e <= length for s, e in value):
        return tuple((start, stop) for start, stop in value)
    raise RuleError(expected("spans", value, f"a list of [start, stop) within the prompt's {length} tokens"))


Where = tuple[Array, None, Array, Array]  # cu_seq_q, cu_seq_k, seqused_k and block_table of a ragged batch


class WatchedStep:
    """The requests of a step that are watched, and what is computed of their last queries."""

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
        """The share of each query on each of its spans, (spans, heads); weights are those of all requests' keys."""
        starts = self.lengths.cumsum() - self.lengths
        each = zip(starts.tolist(), self.asked, strict=True)
        return np.stack([weights[at + first : at + stop].sum(0) for at, one in each for first, stop in one.spans])


class Recorder:
    """The requests that are watched in this process, and what was seen of them."""

    def __init__(self) -> None:
        self.asked: dict[str, Choices] = {}
        self.seen: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()  # the oldest first
        self.size = 0  # bytes of it
        self.batch: Callable[[], Sequence[tuple[str, int]]] | None = None  # names and lengths of the step's requests
        self.first_head = 0  # of this process, where several share the heads
        self.kept: dict[int, dict[str, Array]] = {}  # what each layer has answered in this step
        self._step: WatchedStep | None = None

    def step(self, where: Where) -> WatchedStep | None:
        """What is to be watched in the step that begins: requests whose last query generates a token."""
        due = {
            row: (name, self.asked[name])
            for row, (name, length) in enumerate(self.batch() if self.batch and self.asked else ())
            if name in self.asked and where[2][row] >= length
        }
        self._step = WatchedStep(due, where) if due else None
        return self._step

    def finish(self) -> None:
        """Keep what the step has shown, or write it."""
        step, kept, layers = self._step, self.kept, np.sort(np.array([*self.kept], np.int64))
        self._step, self.kept = None, {}
        if step is None or not kept:
            return
        whole = {name: np.stack([kept[layer][name] for layer in layers]) for name in kept[layers[0]]}
        span = 0
        for row, (name, one) in enumerate(zip(step.names, step.asked, strict=True)):
            seen: dict[str, Any] = {"entropy": whole["entropy"][:, row]} if one.entropy else {}
            if one.spans:
                shares = whole["spans"][:, span : span + len(one.spans)].swapaxes(1, 2)
                seen |= {"first": shares[..., 0]} if one.first else {}
                seen |= {"spans": shares[..., one.first :]} if len(one.spans) > one.first else {}
                span += len(one.spans)
            if one.top:
                top = (whole[name][:, row, :, : one.top] for name in ("top_weights", "top_indices"))
                seen |= dict(zip(("top_weights", "top_keys"), top, strict=True))
            self._record(name, one, int(step.lengths[row]) - 1, layers, seen)

    def _record(self, name: str, one: Choices, position: int, layers: Array, seen: dict[str, Array]) -> None:
        here = np.arange(next(iter(seen.values())).shape[1]) + self.first_head
        heads = here if one.heads is None else here[np.isin(here, one.heads)]
        chosen = slice(None) if one.layers is None else np.isin(layers, one.layers)
        columns = slice(None) if one.heads is None else heads - self.first_head
        record = {"request": name, "layers": layers[chosen].tolist(), "heads": heads.tolist(), "position": position}
        record |= {key: value[chosen][:, columns].copy() for key, value in seen.items()}
        path = os.environ.get(FILE)
        if path:
            with open(path, "ab", buffering=0) as file:  # one write, so that lines of several processes stay whole
                file.write(f"{json.dumps(listed(record))}\n".encode())
            return
        self.seen.setdefault(name, []).append(record)
        self.size += _size(record)
        while self.size > limit(MEMORY) * 2**20:
            self.size -= sum(map(_size, self.seen.popitem(last=False)[1]))

    def statistics(self, request_id: str) -> dict[str, Any]:
        """What `clearhead.vllm.statistics` answers."""
        names = [name for name in self.seen if request_id in (name, name.rpartition("-")[0])]
        if not names:
            last = ", ".join(list(self.seen)[-3:]) or "none"
            hint = f"The last are {last}. Of several answers to one prompt (n=2) they begin with 0_ and 1_."
            raise UnknownNameError(f"unknown request `{request_id}`.", hint)
        records = self.seen[names[-1]]
        same = {key: records[0][key] for key in ("request", "layers", "heads")}
        return same | {key: np.stack([one[key] for one in records]) for key in records[0] if key not in same}


def _size(record: dict[str, Any]) -> int:
    return _RECORD + sum(value.nbytes for value in record.values() if isinstance(value, np.ndarray))


def listed(record: dict[str, Any]) -> dict[str, Any]:
    """The same with lists in place of arrays."""
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in record.items()}


RECORDER = Recorder()
