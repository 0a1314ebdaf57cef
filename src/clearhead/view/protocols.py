"""The protocols through which pages and pictures read AttentionMatrix and its factors."""

from collections.abc import Mapping
from typing import Any, Protocol, Self, Unpack

from clearhead.core.axes import Array
from clearhead.core.problem import Problem
from clearhead.core.state import State
from clearhead.core.statistics import Answers, Asked


class MatrixData(Protocol):
    """The arrays and rules that weights are computed from."""

    @property
    def problem(self) -> Problem: ...  # the shapes and the score rules
    @property
    def q(self) -> Array: ...  # (batch, heads, queries, d_k)
    @property
    def k(self) -> Array: ...  # (batch, kv_heads, keys, d_k)
    @property
    def logsumexp(self) -> Array: ...  # (batch, heads, queries)
    @property
    def state(self) -> State: ...  # of each row
    def changed(self, problem: Problem, q: Array, k: Array) -> Self: ...  # the same with another problem, q and k
    def observe(self, v: Any, asked: Mapping[str, Any]) -> Answers: ...


class Weights(Protocol):
    """An attention matrix, (batch, heads, queries, keys), never stored."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # (batch, heads, queries, keys)
    @property
    def factors(self) -> MatrixData: ...
    def __getitem__(self, key: Any) -> Any: ...  # exact weights by integers and slices
    def observe(self, v: Any = None, *, queries: slice = slice(None), **asked: Unpack[Asked]) -> Answers: ...
    def part(self, batch: int, head: int | None = None) -> Self: ...  # of one batch item, with all heads or one
