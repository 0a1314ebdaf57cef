"""The arguments of the PyTorch operators: tuples of tensors and numbers, from which the operators' schemas follow."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, cast, get_type_hints

from torch import Tensor

from clearhead.core.rules import Rules
from clearhead.core.statistics import STATISTICS, arrays_of, askable

_KINDS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    bool: "bool",
    str: "str",
    str | None: "str?",
    int: "SymInt",
    int | None: "SymInt?",
    float | None: "float?",
}  # fmt: skip  an operator's words for Python's types


def schema(*kinds: type[NamedTuple]) -> str:
    """The part of an operator's schema for the fields of these tuples, in order."""
    return ", ".join(f"{_KINDS[kind]} {name}" for one in kinds for name, kind in get_type_hints(one).items())


def from_flat(flat: Sequence[Any], *kinds: type[Any]) -> list[Any]:
    """Flat arguments, in the order of `schema`, as these tuples again."""
    rest = iter(flat)
    tuples = [kind(*islice(rest, len(kind._fields))) for kind in kinds]
    assert next(rest, None) is None
    return tuples


class Settings(NamedTuple):
    """The score rules, the engine and its threads, each an argument of the operator."""

    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask: Tensor | None = None
    kv_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    query_segments: Tensor | None = None
    kv_segments: Tensor | None = None
    sinks: Tensor | None = None
    query_offset: Tensor | None = None
    query_spans: Tensor | None = None
    key_spans: Tensor | None = None
    span_table: Tensor | None = None
    scales: Tensor | None = None  # one per head
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    left: int | None = None
    right: int | None = None
    engine: str | None = None
    num_threads: int | None = None

    def rules(self) -> Rules:
        """The rules as keywords of `problem.describe`."""
        rules: Any = {name: value for name, value in self._asdict().items() if name in RULES}
        if self.scales is not None:
            rules["scale"] = self.scales
        spans = self.query_spans, self.key_spans, self.span_table
        if any(part is not None for part in spans):
            rules["spans"] = spans
        return cast("Rules", {**rules, "window": (self.left, self.right)})


SPANS = {"query_spans": "spans[0]", "key_spans": "spans[1]", "span_table": "spans[2]"}  # fields of Settings
RULES = frozenset({*Settings._fields, "window", "spans"}) - {
    *SPANS,
    "scales",
    "left",
    "right",
    "engine",
    "num_threads",
}  # fmt: skip  rules that the operators take
TENSORS = tuple(name for name, kind in get_type_hints(Settings).items() if kind == Tensor | None)


class Options(NamedTuple):
    """The requested statistics and queries, each an argument of the operator `observe`."""

    names: str  # of arrays, as engines name them, separated by spaces
    top: int = 0
    height: int = 0
    width: int = 0
    start: int | None = None
    stop: int | None = None
    step: int | None = None
    query_groups: Tensor | None = None
    key_groups: Tensor | None = None

    def arrays(self) -> list[str]:
        return self.names.split()

    def queries(self) -> slice:
        return slice(self.start, self.stop, self.step)

    def keywords(self) -> dict[str, Any]:
        """The keywords of `AttentionMatrix.observe`."""
        values = {
            "flag": True, "count": self.top, "size": (self.height, self.width),
            "labels": (self.query_groups, self.key_groups),
        }  # fmt: skip
        asked = [name for name in askable() if arrays_of(name)[0] in self.arrays()]
        return {name: values[STATISTICS[name].asked] for name in asked}


class Known(NamedTuple):
    """Further arguments of `observe`'s backward: saved results, and the upstream gradients of those in `used`."""

    answers: list[Tensor]
    used: str
    derivatives: list[Tensor]
    by_bias: bool
    by_spans: bool
