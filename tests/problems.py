"""Whole attention problems, drawn by hypothesis: shapes, dtypes, strides, score rules; numbers from a drawn seed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core import definition
from clearhead.core import rules as table
from clearhead.core.arrays import FLOATS
from clearhead.core.axes import Array
from clearhead.core.call import Call, describe
from clearhead.core.problem import Problem
from clearhead.errors import EngineError
from seeds import fresh

RULES = tuple(dict.fromkeys("segments" if "segments" in name else name for name in table.RULES))  # both sides at once
SHORT = st.one_of(st.sampled_from((0, 1, 2, 3)), st.integers(4, 40))
SIZES = (  # queries and keys; the engine's blocks are 64 and 512
    st.tuples(SHORT, SHORT),
    st.tuples(st.sampled_from((63, 64, 65, 127, 150, 600)), st.one_of(SHORT, st.sampled_from((65, 511, 513, 600)))),
    st.tuples(st.integers(0, 8), st.sampled_from((511, 512, 513, 600, 1024, 1100, 2300))),
)
WIDTHS = st.sampled_from((1, 2, 3, 5, 8, 16, 33, 64, 70))
MOST_WEIGHTS = 120_000  # of one problem: batch · heads · queries · keys
INTERPRETED = {"most": 400, "most_heads": 6}  # Triton's interpreter is slow; test_triton.py has larger problems for it


def examples(times: float) -> settings:
    """Multiply the profile's number of examples: more where they are quick and much can go wrong."""
    profile = settings.get_profile(settings.get_current_profile_name())
    return settings(max_examples=max(1, round(times * profile.max_examples)))


@dataclass(frozen=True, slots=True)
class Shape:
    lead: tuple[int, ...]  # the axes before heads
    heads: int | None  # None in 2-D
    kv_heads: int | None
    queries: int
    keys: int
    d_k: int
    d_v: int

    @property
    def prefix(self) -> tuple[int, ...]:
        return () if self.heads is None else (*self.lead, self.heads)

    @property
    def weights(self) -> tuple[int, ...]:
        return (*self.prefix, self.queries, self.keys)

    def kv(self, width: int) -> tuple[int, ...]:
        return (*(() if self.kv_heads is None else (*self.lead, self.kv_heads)), self.keys, width)


@dataclass(frozen=True)
class Case:
    """One problem as a user would write it, with the reference's results."""

    q: Array
    k: Array
    v: Array
    rules: dict[str, Any]
    seed: int

    def __repr__(self) -> str:
        arrays = ", ".join(
            f"{n} {x.shape} strides {x.strides}" for n, x in zip("qkv", (self.q, self.k, self.v), strict=True)
        )
        return f"Case({self.q.dtype} {arrays}, rules={self.rules}, seed={self.seed})"

    @cached_property
    def given(self) -> Call:
        return describe(self.q, self.k, self.v, self.rules)

    @property
    def problem(self) -> Problem:
        return self.given.problem

    @cached_property
    def book(self) -> definition.Matrix:
        return definition.attend(self.problem, self.given.q, self.given.k, self.given.v)

    @property
    def rng(self) -> np.random.Generator:
        """For what a test draws beyond the problem; the same each time."""
        return np.random.default_rng(self.seed + 1)

    def matrix(self, **changes: Any) -> ch.AttentionMatrix:
        return ch.AttentionMatrix(self.q, self.k, **{**self.rules, **changes})

    def attention(self, **changes: Any) -> Array:
        return ch.attention(self.q, self.k, self.v, **{**self.rules, **changes})

    def restore(self, array: Array) -> Array:
        """What the reference computed, (batch, heads, …), with the caller's own leading axes."""
        return self.problem.restore(array)

    @property
    def leaves(self) -> dict[str, Array]:
        """What has a derivative: q, k and v, and of the rules bias, sinks and the table of spans."""
        result = {name: getattr(self, name) for name in "qkv"}
        result |= {name: np.asarray(self.rules[name]) for name in ("bias", "sinks") if name in self.rules}
        return result | ({"spans": self.rules["spans"][2]} if "spans" in self.rules else {})

    def rules_with(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """The rules with these values for bias, sinks and the table of spans."""
        rules = {name: leaves.get(name, value) for name, value in self.rules.items()}
        return rules | ({"spans": (*self.rules["spans"][:2], leaves["spans"])} if "spans" in rules else {})

    def labels(self) -> tuple[Array, Array]:
        """Groups of queries and of keys; -1 is none."""
        lead = self.problem.prefix[:-1]
        return self.rng.integers(-1, 3, (*lead, self.problem.queries)), self.rng.integers(-1, 4, self.problem.keys)


@st.composite
def shapes(
    draw: st.DrawFn, axes: tuple[int, ...] = (2, 3, 4, 5), most: int = MOST_WEIGHTS, most_heads: int = MOST_WEIGHTS
) -> Shape:
    ndim = draw(st.sampled_from(axes))
    queries, keys = draw(SIZES[0] if most < 10_000 else st.one_of(*SIZES))
    if queries * keys > most:
        queries = most // keys
    room = max(1, min(most_heads, most // max(1, queries * keys)))
    lead = tuple(draw(st.integers(0 if draw(st.integers(0, 19)) == 0 else 1, min(3, room))) for _ in range(ndim - 3))
    kv_heads = draw(st.integers(1, max(1, min(3, room // max(1, prod(lead))))))
    group = draw(st.integers(1, max(1, min(4, room // max(1, prod(lead) * kv_heads)))))
    heads = None if ndim == 2 else kv_heads * group
    return Shape(lead, heads, None if ndim == 2 else kv_heads, queries, keys, draw(WIDTHS), draw(WIDTHS))


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    rules: tuple[str, ...] = RULES,
    dtypes: tuple[np.dtype[Any], ...] = FLOATS,
    axes: tuple[int, ...] = (2, 3, 4, 5),
    most: int = MOST_WEIGHTS,
    most_heads: int = MOST_WEIGHTS,
) -> Case:
    """A problem under any combination of `rules`."""
    shape = draw(shapes(axes, most, most_heads))
    seed = draw(st.integers(0, 2**32 - 1))
    rng, dtype = np.random.default_rng(seed), draw(st.sampled_from(dtypes))
    size = draw(st.sampled_from((0.3, 1.0, 3.0)))
    full_shapes = ((*shape.prefix, shape.queries, shape.d_k), shape.kv(shape.d_k), shape.kv(shape.d_v))
    q, k, v = (draw_layout(draw, (rng.standard_normal(full) * size).astype(dtype)) for full in full_shapes)
    count = min(len(rules), draw(st.sampled_from((0, 1, 2, 3, 5, len(RULES)))))
    chosen = draw(st.sets(st.sampled_from(rules), min_size=count, max_size=count)) if count else set()
    values: dict[str, Any] = {}
    for name in (name for name in RULES if name in chosen):
        values.update(_RULES[name](draw, rng, shape))
    positional = values.get("causal") or values.get("window", (None, None)) != (None, None)
    if positional and shape.queries != shape.keys and "query_offset" not in values:
        values.update(_offset(draw, rng, shape))
    return Case(q, k, v, values, seed)


def in_the_gate(names: Iterable[Any], *slow: Any) -> list[Any]:
    """Parameters of which the slow ones are tested in the gate only."""
    return [pytest.param(name, marks=pytest.mark.gate) if name in slow else name for name in names]


def of_tiers(quick: Iterable[str], others: Iterable[str], every: int = 5) -> list[Any]:
    """Parameters: the quick ones by default, of the others each fifth in the gate, and the rest in the long run."""
    marks = (pytest.mark.gate if place % every == 0 else pytest.mark.long for place, _ in enumerate(others))
    return [*quick, *(pytest.param(name, marks=mark) for name, mark in zip(others, marks, strict=False))]


def each_engine(names: Sequence[str] = engines.NAMES, tier: Any = pytest.mark.gate) -> Any:
    """One test for each engine; Triton's interpreter is slow, and runs in this tier."""
    return pytest.mark.parametrize(
        "engine", [pytest.param(name, marks=tier) if name == "triton" else name for name in names]
    )


def refused(engine: str, case: Case) -> bool:
    """Whether this engine refuses the problem; if so, the error must give every reason and the engine must not run."""
    reasons = engines.get(engine).reasons_not(case.problem)
    if reasons:
        with pytest.raises(EngineError) as error:
            case.attention(engine=engine)
        assert all(reason in str(error.value) for reason in reasons)
    return bool(reasons)


def on_every_engine(
    names: Sequence[str] = engines.NAMES, *, times: float = 1.0, limits: dict[str, Any] | None = None, **drawn: Any
) -> Callable[[Callable[..., None]], Callable[[str], None]]:
    """Test `body(engine, case, …)` on random problems: compiled engines on the same ones, Triton on few small ones.

    Of an engine that refuses a problem, the error is tested.
    """
    compiled = tuple(name for name in names if name != "triton")
    tests = {"compiled": (compiled, times, limits or {})}
    if "triton" in names:
        tests["triton"] = (("triton",), times * 0.15, {**(limits or {}), **INTERPRETED})

    def wrap(body: Callable[..., None]) -> Callable[[str], None]:
        def test(drawn_for: str) -> None:
            chosen, share, most = tests[drawn_for]

            def on_these_engines(case: Case, **more: Any) -> None:
                for engine in chosen:
                    note(f"on the {engine} engine")
                    if not refused(engine, case):
                        body(engine, case, **more)

            on_these_engines.__name__ = f"{body.__name__}_{drawn_for}"
            examples(share)(given(case=cases(**most), **drawn)(on_these_engines))()

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return pytest.mark.parametrize("drawn_for", in_the_gate(tests, "triton"))(test)

    return wrap


def draw_layout(draw: st.DrawFn, x: Array) -> Array:
    """The same numbers with different strides in memory."""
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](x)


def _swapped(x: Array) -> Array:
    """(…, length, heads, d) in memory, as most models hold it."""
    return x.swapaxes(-3, -2).copy().swapaxes(-3, -2) if x.ndim > 2 else x


def _stepped(x: Array) -> Array:
    roomy = np.full((*x.shape[:-2], 2 * x.shape[-2], 3 * x.shape[-1]), np.nan, x.dtype)
    roomy[..., ::2, 1::3] = x
    return roomy[..., ::2, 1::3]


def _read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "fortran": np.asfortranarray,
    "read-only": _read_only,
    "reversed": lambda x: x[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
    "stepped": _stepped,
    "swapped": _swapped,
    "transposed": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
}


def _broadcasting(draw: st.DrawFn, full: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `full`."""
    if draw(st.booleans()):
        return full
    kept = full[draw(st.integers(0, len(full))) :]
    return tuple(size if draw(st.booleans()) else 1 for size in kept)


def _bias(draw: st.DrawFn, rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    bias = rng.standard_normal(_broadcasting(draw, shape.weights)) * 2
    if draw(st.booleans()):
        bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
    return {"bias": np.asarray(bias).astype(draw(st.sampled_from(FLOATS)))}


def _mask(draw: st.DrawFn, rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    mask = np.asarray(rng.random(_broadcasting(draw, shape.weights)) < draw(st.sampled_from((0.2, 0.6, 0.95))))
    if mask.ndim > 1 and draw(st.booleans()):
        mask = mask & (rng.random((*mask.shape[:-1], 1)) < 0.8)  # with empty rows
    return {"mask": mask}


def _window(draw: st.DrawFn, rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    side = st.one_of(st.none(), st.integers(0, 5), st.integers(0, shape.keys + 2))
    return {"window": (draw(side), draw(side))}


def _lengths(name: str, most: int, draw: st.DrawFn, rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    least = draw(st.sampled_from((0, most // 2, most)))
    if draw(st.booleans()):
        return {name: draw(st.integers(least, most))}
    return {name: rng.integers(least, most + 1, shape.lead)}


def _segments(draw: st.DrawFn, rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    lead = shape.lead if draw(st.booleans()) else ()
    count = draw(st.integers(1, 4))
    sides = (rng.integers(0, count, (*lead, size)) for size in (shape.queries, shape.keys))
    if draw(st.booleans()):  # documents packed one after the other
        sides = (np.sort(side) for side in sides)
    queries, keys = sides
    return {"query_segments": queries, "kv_segments": keys}


def _per_head(name: str, draw: st.DrawFn, rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    if shape.heads is None and draw(st.booleans()):
        return {name: float(rng.standard_normal())}
    numbers = rng.standard_normal(shape.heads or 1)
    if name == "sinks" and draw(st.booleans()):
        numbers[0] = -np.inf
    return {name: numbers}


def _scale(draw: st.DrawFn, rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"scale": draw(st.sampled_from((0.0, 0.1, 1.0, -0.5, None)))}
    return {"scale": rng.standard_normal(shape.heads or 1)}


def _spans(draw: st.DrawFn, rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    counts = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    table = rng.standard_normal((*_broadcasting(draw, shape.prefix), *counts)) * 2
    if draw(st.booleans()):
        table = np.where(rng.random(table.shape) < draw(st.sampled_from((0.2, 0.6))), -np.inf, table)
    none = draw(st.sampled_from((-1, 0)))  # with or without tokens that have no label
    sides = [
        rng.integers(none, count, (*(shape.lead if draw(st.booleans()) else ()), size))
        for size, count in zip((shape.queries, shape.keys), counts, strict=True)
    ]
    if draw(st.booleans()):  # spans one after the other
        sides = [np.sort(side) for side in sides]
    return {"spans": (*sides, table.astype(draw(st.sampled_from(FLOATS))))}


def _offset(draw: st.DrawFn, rng: np.random.Generator, shape: Shape) -> dict[str, Any]:
    low, high = draw(st.sampled_from(((0, shape.keys), (-shape.queries - 2, shape.keys + 2))))
    if draw(st.booleans()):
        return {"query_offset": draw(st.integers(low, high))}
    return {"query_offset": rng.integers(low, high + 1, shape.lead)}


_RULES: dict[str, Any] = {
    "scale": _scale,
    "softcap": lambda draw, rng, shape: {"softcap": draw(st.sampled_from((0.5, 5.0, 50.0)))},
    "bias": _bias,
    "alibi_slopes": lambda draw, rng, shape: _per_head("alibi_slopes", draw, rng, shape),
    "spans": _spans,
    "causal": lambda draw, rng, shape: {"causal": True},
    "window": _window,
    "mask": _mask,
    "kv_lengths": lambda draw, rng, shape: _lengths("kv_lengths", shape.keys, draw, rng, shape),
    "query_lengths": lambda draw, rng, shape: _lengths("query_lengths", shape.queries, draw, rng, shape),
    "segments": _segments,
    "sinks": lambda draw, rng, shape: _per_head("sinks", draw, rng, shape),
    "query_offset": _offset,
}


def every_rule(lead: tuple[int, ...] = (3,), heads: int = 4, queries: int = 5, keys: int = 7) -> dict[str, Any]:
    """Every rule of the table, in its order, with a value of its own for each batch entry and head."""
    rng, sizes = fresh(), (*lead, heads, queries, keys)
    labels = rng.integers(-1, 6, (*lead, queries)), rng.integers(-1, 8, (*lead, keys))
    return {
        "scale": rng.standard_normal(heads),
        "softcap": 2.0,
        "bias": rng.standard_normal(sizes),
        "alibi_slopes": rng.random(heads),
        "spans": (*labels, rng.standard_normal((*lead, heads, 6, 8))),
        "causal": True,
        "window": (5, 1),
        "mask": rng.random(sizes) < 0.9,
        "kv_lengths": rng.integers(keys // 2, keys + 1, lead),
        "query_lengths": rng.integers(queries // 2, queries + 1, lead),
        "query_segments": rng.integers(0, 2, (*lead, queries)),
        "kv_segments": rng.integers(0, 2, (*lead, keys)),
        "sinks": rng.standard_normal(heads),
        "query_offset": rng.integers(0, 3, lead),
    }
