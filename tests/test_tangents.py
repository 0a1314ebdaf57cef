"""Derivatives along a direction: every engine that has them against PyTorch's forward mode in float64."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from clearhead import engines
from clearhead.core.axes import Array
from clearhead.ops import tangents
from problems import Case, on_every_engine
from tangents import INPUTS, Along

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch imports what it deprecates
ENGINES = [name for name in engines.NAMES if hasattr(engines.get(name), "tangents")]
DRAWN: dict[str, Any] = {
    "moving": st.sets(st.sampled_from(INPUTS), min_size=1).map(sorted),
    "answers": st.sets(st.sampled_from(tangents.SMOOTH), min_size=1).map(sorted),
}
WIDE: dict[str, Any] = {"dtypes": (np.dtype(np.float64),), "most": 20_000}


def close(found: Array, truth: Array, name: str) -> None:
    scale = np.abs(truth).max(initial=0) + 1e-3
    np.testing.assert_allclose(found, truth, atol=1e-10 * scale, rtol=1e-9, err_msg=name)


def arrays_of(along: Along) -> Any:
    given = along.case.given
    return given.q, given.k, given.v if "output" in along.answers else None


@on_every_engine(ENGINES, limits=WIDE, **DRAWN)
def test_tangents_of_every_result(engine: str, case: Case, moving: list[str], answers: list[str]):
    along = Along(case, tuple(moving), tuple(answers))
    values, moved = tangents.forward(
        engines.get(engine), case.problem, arrays_of(along), along.directions, along.wanted
    )
    for name, (value, tangent) in along.first.items():
        if name == "logsumexp":
            values[name] = np.where(np.isneginf(values[name]), 0.0, values[name])
        close(values[name], value, name)
        close(moved[name], tangent, f"{name}, along")


@on_every_engine(ENGINES, limits=WIDE, **DRAWN)
def test_tangents_of_every_gradient(engine: str, case: Case, moving: list[str], answers: list[str]):
    along = Along(case, tuple(moving), tuple(answers))
    problem, (by, changing) = case.problem, along.upstream
    known = tangents.forward(engines.get(engine), problem, arrays_of(along), along.directions, along.wanted)[0]
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    found, _ = tangents.gradient_tangents(
        tangents.Second(
            engines.get(engine),
            problem,
            arrays_of(along),
            known,
            by,
            along.directions,
            changing,
            along.groups if "groups" in answers else None,
            shape if "bias" in along.inputs else None,
            None if problem.span_table is None else problem.span_table.shape,
        )
    )
    for name, truth in along.second.items():
        if name not in found:
            assert name == "v"
            assert not truth.any()
            continue
        mine = found[name]
        if name in ("bias", "spans"):
            lead = (*problem.prefix, *mine.shape[2:])
            own = (1,) * (len(lead) - truth.ndim) + truth.shape
            axes = tuple(at for at, (a, b) in enumerate(zip(lead, own, strict=True)) if b == 1 and a != 1)
            mine = mine.reshape(lead).sum(axes, keepdims=True)
        close(mine.reshape(truth.shape), truth, name)
