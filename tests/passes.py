"""Every pass over a problem or a part of it, and what it answers for each query and key: what test_laws.py iterates."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

import clearhead as ch
from clearhead import engines
from clearhead.core import visibility
from clearhead.core.arrays import as_array, statistics_dtype, to_torch
from clearhead.core.axes import Array
from clearhead.core.statistics import PER_KEY, PER_QUERY, STATISTICS, Matrix, arrays_of, listed, smooth
from problems import LAYOUTS, Case

EXAMPLES: dict[str, Any] = {"flag": True, "count": 3, "size": (5, 6)}
FUSED = {*listed(derivative="row"), *listed(derivative="key")}
FLAGS = [name for name in smooth() if STATISTICS[name].axes in (PER_QUERY, PER_KEY)]
Answers = dict[
    tuple[str, str], Array
]  # by name and axis: queries or keys, (batch, heads, axis, …); whole; labels; list


@dataclass(frozen=True)
class Question:
    """A problem with what passes take besides: g, (…, heads, queries, d_v), and a direction of q, k and v."""

    case: Case
    g: Array
    along: dict[str, Array]
    labels: tuple[Array, Array]
    by: dict[str, Array]  # the loss's derivatives by statistics

    @staticmethod
    def of(case: Case) -> "Question":
        rng, problem = case.rng, case.problem
        draw = lambda shape, dtype: rng.standard_normal(shape).astype(dtype)  # noqa: E731
        along = {name: draw(getattr(case, name).shape, case.q.dtype) for name in "qkv"}
        rows = *problem.prefix, problem.queries
        columns = *problem.prefix, problem.keys
        shapes = {name: columns if STATISTICS[name].axes == PER_KEY else rows for name in FLAGS}
        by = {name: draw(shape, statistics_dtype(problem.dtype)) for name, shape in shapes.items()}
        g = LAYOUTS[sorted(LAYOUTS)[rng.integers(len(LAYOUTS))]](draw((*rows, case.v.shape[-1]), case.q.dtype))
        return Question(case, g, along, case.labels(), by)

    @cached_property
    def visible(self) -> Array:
        return visibility.dense(self.case.problem)

    def spoilt(self, queries: Array, keys: Array, bad: float) -> "Question":
        """As `contiguous`, with all numbers of these queries (batch, heads, …) and keys (batch, kv_heads, …) bad."""

        def spoil(x: Array, where: Array) -> Array:
            columns = where.reshape(x.shape[: self.case.q.ndim - 1] + (1,) * (x.ndim == self.case.q.ndim))
            return np.ascontiguousarray(np.where(columns, np.asarray(bad, x.dtype), x))

        sides = {"q": queries, "k": keys, "v": keys}
        arrays = {name: spoil(getattr(self.case, name), where) for name, where in sides.items()}
        along = {name: spoil(self.along[name], where) for name, where in sides.items()}
        by = {name: x if STATISTICS[name].axes == PER_KEY else spoil(x, queries) for name, x in self.by.items()}
        return replace(self, case=replace(self.case, **arrays), g=spoil(self.g, queries), along=along, by=by)

    def contiguous(self) -> "Question":
        case = replace(self.case, **{name: np.ascontiguousarray(getattr(self.case, name)) for name in "qkv"})
        return replace(self, case=case, g=np.ascontiguousarray(self.g))

    def of_queries(self, start: int, stop: int) -> "Question":
        """The same for some queries alone."""
        rows = slice(start, stop)
        by = {name: x if STATISTICS[name].axes == PER_KEY else x[..., rows] for name, x in self.by.items()}
        along = {**self.along, "q": self.along["q"][..., rows, :]}
        labels = self.labels[0][..., rows], self.labels[1]
        return Question(only_queries(self.case, start, stop), self.g[..., rows, :], along, labels, by)

    def of_batch(self, item: int) -> "Question":
        """The same for one entry of the first axis alone."""
        part = slice(item, item + 1)
        labels = tuple(x[part] if x.ndim > 1 else x for x in self.labels)
        along, by = ({name: x[part] for name, x in each.items()} for each in (self.along, self.by))
        return Question(only_batch(self.case, item), self.g[part], along, labels, by)  # type: ignore[arg-type]

    @cached_property
    def tensors(self) -> list[Any]:
        return [to_torch(torch, getattr(self.case, name).copy()) for name in "qkv"]

    def matrix(self, engine: str) -> ch.AttentionMatrix:
        return self.case.matrix(engine=engine)

    def smooth(self, q: Any, k: Any, v: Any, engine: str) -> dict[str, Any]:
        """The statistics that have every derivative, of these tensors."""
        asked: Any = dict.fromkeys(FLAGS, True)
        seen = ch.AttentionMatrix(q, k, engine=engine, **self.case.rules).observe(v, **asked)
        return {name: getattr(seen, name) for name in ("output", *FLAGS)}


def laid(question: Question, arrays: dict[str, tuple[str, Any]]) -> Answers:
    """Arrays by name, each with its axis, as `Answers`."""
    problem = question.case.problem
    lengths = {"queries": problem.queries, "keys": problem.keys}
    result: Answers = {}
    for name, (axis, x) in arrays.items():
        array, lead = as_array(x, name)[0], len(problem.prefix)
        if axis in lengths:
            heads = array.shape[lead - 1] if lead else 1
            array = array.reshape(problem.batch, heads, lengths[axis], *array.shape[lead + 1 :])
        elif lead and axis == "whole":
            array = array.reshape(problem.batch, *array.shape[lead - 1 :])
        result[name, axis] = array
    return result


def observed(of: Matrix, seen: Any) -> dict[str, tuple[str, Any]]:
    """What was observed by array name, each with its axis."""
    there = {name: x if isinstance(x, tuple) else (x,) for name, x in seen.statistics().items() if x is not None}
    separate, result = {k: x for name, xs in there.items() for k, x in zip(arrays_of(name, of), xs, strict=True)}, {}
    for name in listed(of):
        one = STATISTICS[name]
        axis = next(
            (axis for axis in one.axes if axis in ("queries", "keys")), "labels" if one.asked == "labels" else "whole"
        )
        result |= {array: (axis, separate[array]) for array in arrays_of(name, of) if array in separate}
    return result


def weights(question: Question, engine: str) -> Answers:
    """Every statistic, the product of the transpose, and the weights."""
    A = question.matrix(engine)
    asked = {name: EXAMPLES[kind] for name in listed() if (kind := STATISTICS[name].asked) in EXAMPLES}
    supported = engines.get(engine).STATISTICS
    asked = {name: x for name, x in asked.items() if name in supported}
    labels = question.labels if "groups" in supported else None
    arrays = observed("weights", A.observe(question.case.v, groups=labels, **asked))
    return laid(question, {**arrays, "Aᵀ·g": ("keys", A.T @ question.g), "weights": ("queries", A[...])})


def gradients(question: Question, engine: str) -> Answers:
    """The gradients of a loss of every statistic whose derivative engines compute."""
    leaves = [x.clone().requires_grad_() for x in question.tensors]
    return laid(question, _named("d", _backward(question, leaves, engine, FUSED)))


def all_gradients(question: Question, engine: str) -> Answers:
    """The gradients of a loss of every smooth statistic."""
    leaves = [x.clone().requires_grad_() for x in question.tensors]
    return laid(question, _named("d of all ", _backward(question, leaves, engine)))


def second(question: Question, engine: str) -> Answers:
    """The tangents of the gradients."""
    leaves = [x.clone().requires_grad_() for x in question.tensors]
    first = _backward(question, leaves, engine, create_graph=True)
    along = [to_torch(torch, question.along[name]) for name in "qkv"]
    return laid(question, _named("d²", torch.autograd.grad(first, leaves, along, materialize_grads=True)))


def _backward(
    question: Question, leaves: list[Any], engine: str, names: Container[str] = STATISTICS, **how: Any
) -> Any:
    results = {name: x for name, x in question.smooth(*leaves, engine).items() if name in names}
    by = {name: to_torch(torch, x.copy()) for name, x in {**question.by, "output": question.g}.items()}
    return torch.autograd.grad(
        list(results.values()), leaves, [by[name].to(x.dtype) for name, x in results.items()],
        materialize_grads=True, **how,
    )  # fmt: skip


def _named(mark: str, gradients: Any) -> dict[str, tuple[str, Any]]:
    sides = ("queries", "keys", "keys")
    return {mark + name: (axis, x.detach()) for name, axis, x in zip("qkv", sides, gradients, strict=True)}


def tangents(question: Question, engine: str) -> Answers:
    """Every smooth statistic's tangent along a direction of q, k and v."""
    with forward_ad.dual_level():
        moving = [to_torch(torch, question.along[name]) for name in "qkv"]
        duals = [forward_ad.make_dual(x, y) for x, y in zip(question.tensors, moving, strict=True)]
        results = question.smooth(*duals, engine)
        result = {name: forward_ad.unpack_dual(x).tangent.clone() for name, x in results.items()}
    axes = {name: "keys" if STATISTICS[name].axes == PER_KEY else "queries" for name in result}
    return laid(question, {f"{name}'": (axes[name], x) for name, x in result.items()})


def contributions(question: Question, engine: str) -> Answers:
    return _effects(question, question.matrix(engine).contributions(question.case.v, question.g))


def cuts(question: Question, engine: str) -> Answers:
    return _effects(question, question.matrix(engine).cut_effects(question.case.v, question.g))


def _effects(question: Question, E: ch.EffectMatrix) -> Answers:
    asked = {name: EXAMPLES[kind] for name in listed("effects") if (kind := STATISTICS[name].asked) in EXAMPLES}
    seen = E.observe(groups=question.labels, **asked)
    edges = {f"strongest {name}": ("list", x) for name, x in seen.strongest._asdict().items()}
    arrays = observed("effects", replace(seen, strongest=None)) | edges
    products = {"E·x": ("queries", E @ np.ones((E.shape[-1], 2))), "Eᵀ·x": ("keys", E.T @ question.g)}
    return laid(question, {**arrays, **products, "effects": ("queries", E[...])})


PASSES: dict[str, tuple[str, Callable[[Question, str], Answers]]] = {  # what an engine must have for it
    "weights": ("rows", weights),
    "gradients": ("gradients", gradients),
    "all gradients": ("gradients", all_gradients),
    "tangents": ("gradients", tangents),
    "second": ("gradients", second),
    "contributions": ("others", contributions),
    "cuts": ("others", cuts),
}
RECOMPUTED = (
    "all gradients",
    "tangents",
    "second",
)  # by PyTorch's operations, whose bits depend on the sizes of a product


def each_unreached(question: Question, answers: Answers, queries: Array, keys: Array) -> Iterator[tuple[Any, Array]]:
    """Of each answer per query or key, which entries neither these queries nor these keys reach, (batch, heads, …)."""
    visible = question.visible
    keys = np.repeat(keys, question.case.problem.group, axis=1)
    rows = queries | (visible & keys[:, :, None]).any(-1)
    columns = (visible & rows[..., None]).any(-2) | keys
    for key, x in answers.items():
        if key[1] in ("queries", "keys"):
            reached = rows if key[1] == "queries" else columns
            heads = x.shape[1]
            yield key, ~reached.reshape(len(x), heads, reached.shape[1] // max(1, heads), reached.shape[-1]).any(2)


def unseen(question: Question) -> tuple[Array, Array]:
    """The queries that see nothing, (batch, heads, queries), and the keys that nobody sees, (batch, kv_heads, keys)."""
    problem, visible = question.case.problem, question.visible
    by_key = visible.any(axis=-2).reshape(problem.batch, problem.kv_heads, problem.group, problem.keys)
    return ~visible.any(axis=-1), ~by_key.any(axis=2)


def nothing(name: str) -> float:
    """What a result is for a query that sees nothing."""
    return -np.inf if name in ("largest", "max_logit") else -1.0 if name.endswith("indices") else 0.0


def only_queries(case: Case, start: int, stop: int) -> Case:
    """The case for queries start … stop alone, as a user would call it."""
    rules = _cut(case, (slice(start, stop), slice(None)))
    if "query_segments" in rules:
        rules["query_segments"] = rules["query_segments"][..., start:stop]
    if "spans" in rules:
        ours, theirs, table = rules["spans"]
        rules["spans"] = ours[..., start:stop], theirs, table
    if "query_lengths" in rules:
        rules["query_lengths"] = np.clip(np.asarray(rules["query_lengths"]) - start, 0, stop - start)
    rules["query_offset"] = np.asarray(rules.get("query_offset", 0)) + start
    return replace(case, q=case.q[..., start:stop, :], rules=rules)


def only_batch(case: Case, place: int) -> Case:
    """One entry of the first batch axis; the axis is kept."""
    rules = _cut(case, (slice(place, place + 1), *(slice(None),) * (case.q.ndim - 1)))
    for name in ("kv_lengths", "query_lengths", "query_offset", "query_segments", "kv_segments"):
        value = np.asarray(rules.get(name, 0))
        if value.ndim > (1 if "segments" in name else 0):
            rules[name] = value[place : place + 1]
    if "spans" in rules:
        least = case.q.ndim - 3, case.q.ndim - 3, case.q.ndim - 1  # axes of labels and of a table without batch axes
        rules["spans"] = tuple(
            x[place : place + 1] if x.ndim > n and len(x) > 1 else x for x, n in zip(rules["spans"], least, strict=True)
        )
    q, k, v = (x[place : place + 1] for x in (case.q, case.k, case.v))
    return replace(case, q=q, k=k, v=v, rules=rules)


def _cut(case: Case, where: tuple[slice, ...]) -> dict[str, Any]:
    """The rules, with mask and bias in full and cut on their last axes."""
    rules = dict(case.rules)
    for name in ("mask", "bias"):
        if name in rules:
            full = np.broadcast_to(rules[name], case.matrix().shape)
            rules[name] = full[(..., *where)]
    return rules
