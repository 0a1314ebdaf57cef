"""Derivatives along a direction: every engine that has them against PyTorch's forward mode in float64."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from clearhead import engines
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.problem import Inputs
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
HALVES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
NARROW: dict[str, Any] = {"dtypes": (np.dtype(np.float32), *HALVES), "most": 20_000}
Named = dict[str, Array]
Asked = Callable[[Any], Named]  # of an engine


def close(result: Array, truth: Array, name: str) -> None:
    scale = np.abs(truth).max(initial=0) + 1.0  # a bias that is one number has sums of large numbers, which are 0
    np.testing.assert_allclose(result, truth, atol=1e-9 * scale, rtol=1e-8, err_msg=name)


def inputs_of(along: Along) -> Inputs:
    inputs = along.case.given.inputs
    return inputs if "output" in along.answers else inputs._replace(v=None)


def results(engine: str, along: Along) -> Named:
    """Each result and its tangent, by name and `…, along`."""
    run: Any = engines.get(engine)
    values, moved = tangents.forward(run, inputs_of(along), along.directions, along.wanted)
    if "logsumexp" in values:
        values["logsumexp"] = np.where(np.isneginf(values["logsumexp"]), 0.0, values["logsumexp"])
    return flat({name: (values[name], moved[name]) for name in along.answers})


def flat(pairs: dict[str, tuple[Array, Array]]) -> Named:
    return {name: x for name, (x, _) in pairs.items()} | {f"{name}, along": x for name, (_, x) in pairs.items()}


def gradients(engine: str, along: Along) -> Named:
    """The tangents of the gradients of all inputs, shaped as these."""
    problem, (by, changing) = along.case.problem, along.upstream
    known = tangents.forward(engines.get(engine), inputs_of(along), along.directions, along.wanted)[0]
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    result, _ = tangents.gradient_tangents(
        tangents.Derivative(
            engines.get(engine),
            inputs_of(along),
            known,
            by,
            along.directions,
            changing,
            along.groups if "groups" in along.answers else None,
            shape if "bias" in along.inputs else None,
            None if problem.span_table is None else problem.span_table.shape,
        )
    )
    for name, truth in along.second.items():
        if name not in result:
            assert name == "v"
            assert not truth.any()
            continue
        ours = result[name]
        if name in ("bias", "spans"):
            lead = (*problem.prefix, *ours.shape[2:])
            local = (1,) * (len(lead) - truth.ndim) + truth.shape
            axes = tuple(place for place, (a, b) in enumerate(zip(lead, local, strict=True)) if b == 1 and a != 1)
            ours = ours.reshape(lead).sum(axes, keepdims=True)
        result[name] = ours.reshape(truth.shape)
    return result


@on_every_engine(ENGINES, limits=WIDE, **DRAWN)
def test_tangents_of_every_result_and_gradient(engine: str, case: Case, moving: list[str], answers: list[str]):
    along = Along(case, tuple(moving), tuple(answers))
    result = results(engine, along)
    for name, truth in flat(along.first).items():
        close(result[name], truth, name)
    result = gradients(engine, along)
    for name in result.keys() & along.second.keys():
        close(result[name], along.second[name], name)


def as_close_as_plain(result: Named, truth: Named, run: Callable[..., Named], dtype: Any) -> None:
    """Compare with `truth`: at most twenty times what float32, or rounded inputs and logits, change in a plain run."""
    rounding = float(ml_dtypes.finfo(dtype).eps)
    runs = [run(torch.float32), *(run(spread=rounding / 2, draw=i) for i in (1, 2, 3))]
    for name in result.keys() & truth.keys():
        apart = [np.abs(x[name] - truth[name]).max(initial=0) for x in runs]
        allowed = 20 * max(apart) + 4 * rounding * np.abs(truth[name]).max(initial=0) + 1e-7
        np.testing.assert_allclose(np.asarray(result[name], np.float64), truth[name], 0, allowed, err_msg=name)


@on_every_engine(ENGINES, limits=NARROW, times=0.15, **DRAWN)
def test_rounded_tangents_of_every_result_and_gradient(engine: str, case: Case, moving: list[str], answers: list[str]):
    along, usual = Along(case, tuple(moving), tuple(answers)), case.problem.dtype
    result = results(engine, along)
    for name in answers:
        assert result[f"{name}, along"].dtype == (usual if name == "output" else statistics_dtype(usual))
    as_close_as_plain(result, flat(along.first), lambda *place, **how: flat(along.forward(*place, **how)), usual)
    as_close_as_plain(gradients(engine, along), along.second, along.backward, usual)
