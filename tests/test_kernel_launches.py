"""How the GPU kernels are launched: the grid, the device, the stream, and the width of offsets."""

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.effects import Edges, Terms, WantedEffects
from clearhead.core.problem import Problem, describe
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines import portable, triton
from clearhead.engines.base import Kept, Upstream
from clearhead.engines.gpu import columns, effects, gradients, row_pass, row_tangents, rows
from clearhead.engines.gpu import tensors as gpu

MOST = 65_535  # CUDA's limit on programs along the second and third axis of a grid
PASSES = ("rows", "columns", "weights", "transposed", "gradients")
PASSES += ("tangents", "column_tangents", "gradient_tangents", "others", "effects", "effect_tile", "effect_product")
RNG = np.random.default_rng(0)


class Recorder:
    """Takes the place of a kernel and records the grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *_, **__: None


def everything(q: Array, k: Array, rules: dict[str, Any], bias: tuple[int, int, int, int]) -> None:
    """Every pass, with all its results."""
    inputs = describe(q, k, k, rules).inputs
    problem = inputs.problem
    lse = np.zeros(q.shape[:3])
    row = {"logsumexp": True, "max_logit": True, "entropy": True, "distance": True, "top": 2}
    labels = np.zeros((len(q), problem.queries), int), np.zeros((len(q), problem.keys), int)
    triton.rows(inputs, Wanted(output=True, **row))
    triton.columns(inputs, lse, Wanted(received=True, peak=True, image=(1, 1)))
    triton.columns(inputs, lse, Wanted(groups=Groups(*labels, (1, 1))))
    triton.weights(inputs, lse)
    triton.transposed(inputs, lse, q)
    table = None if problem.span_table is None else problem.span_table.shape
    upstream = Upstream(lse, q, lse[:, :, :1] + np.zeros(problem.keys), lse, lse, bias=bias, spans=table)
    triton.gradients(inputs, lse, upstream)
    along = Directions(q, k, k, problem.bias, problem.span_table, problem.sinks)
    kept, asked = Kept(lse, lse), Wanted(output=True, entropy=True, distance=True, diagonal=True)
    triton.tangents(inputs, along, asked, lse, q)
    triton.column_tangents(inputs, along, kept, Wanted(received=True, image=(1, 1)))
    upstream = Upstream(lse, q, None, lse, lse, lse, bias, table)
    triton.gradient_tangents(inputs, along, kept, upstream, upstream)
    edges, terms = Edges(*inputs, q), Terms("cut", lse, lse, lse, np.zeros(lse.shape, int))
    triton.others(edges)
    edges = edges._replace(terms=terms)
    asked = {"by_key": True, "by_query": True, "top": 2, "strongest": 2, "image": (1, 1)}
    triton.effects(edges, WantedEffects(**asked, groups=Groups(*labels, (1, 1))))
    triton.effect_tile(edges)
    triton.effect_product(edges, k, transposed=False)
    triton.effect_product(edges, q, transposed=True)


def test_more_heads_than_the_second_grid_axis_holds(monkeypatch: pytest.MonkeyPatch):
    modules = {
        rows: ("rows", "merge"), columns: ("columns", "pool", "pixels", "pool_largest"), row_tangents: ("rows",),
        gradients: ("keys", "queries", "bias", "spans"), effects: ("others", "by_queries"),
    }  # fmt: skip
    kernels = {(module, name): Recorder() for module, names in modules.items() for name in names}
    for (module, name), kernel in kernels.items():
        monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(row_pass, "LONG", 64)
    monkeypatch.setattr(row_pass, "SPLIT", 64)
    q, k = np.zeros((22_000, 3, 1, 1)), np.zeros((22_000, 1, 130, 1))
    spans = np.zeros(1, int), np.zeros(130, int), np.zeros((22_000, 3, 1, 1))
    everything(q, k, {"bias": np.zeros((22_000, 3, 1, 1)), "spans": spans}, (22_000, 3, 1, 1))
    for (_, name), kernel in kernels.items():
        assert kernel.grids, name
        for first, *others in kernel.grids:
            assert first < 2**31, name
            assert all(size <= MOST for size in others), name
    assert kernels[rows, "rows"].grids == [(22_000, 3)]  # a tile of three heads; splits of the keys
    assert set(kernels[columns, "columns"].grids) == {(66_000 * 5, 1)}
    backward = [kernels[gradients, name].grids for name in modules[gradients]]
    assert backward == [2 * [(22_000 * 5, 1)], *[2 * [(66_000, 1)]] * 3]


@pytest.mark.long
def test_32_bit_offsets_are_used_along_one_axis_only(monkeypatch: pytest.MonkeyPatch):
    """A product of the sizes of several axes may exceed 2^31 although no single axis does."""
    longest, add = 0, InterpreterBuilder.create_addptr

    def checked(self: Any, place: Any, offset: Any) -> Any:
        nonlocal longest
        size = int(np.abs(offset.data.astype(np.int64)).max())
        if offset.data.dtype.itemsize < 8:
            assert size < 64, "an offset through several axes in 32 bits"
        longest = max(longest, size)
        return add(self, place, offset)

    monkeypatch.setattr(InterpreterBuilder, "create_addptr", checked)
    sizes = batch, heads, queries, keys = 3, 4, 15, 35
    q, k = RNG.standard_normal((batch, heads, queries, 4)), RNG.standard_normal((batch, 2, keys, 4))
    rules = {
        "mask": RNG.random(sizes) < 0.8,
        "bias": RNG.standard_normal(sizes),
        "spans": (
            *(RNG.integers(0, 3, (batch, n)) for n in (queries, keys)),
            np.tri(3) / np.ones((batch, heads, 1, 1)),
        ),
        "query_segments": RNG.integers(0, 2, (batch, queries)),
        "kv_segments": RNG.integers(0, 2, (batch, keys)),
        "kv_lengths": np.full(batch, keys - 1),
        "query_lengths": np.full(batch, queries - 1),
        "sinks": np.ones(heads),
        "alibi_slopes": np.ones(heads),
    }
    everything(q, k, rules, sizes)
    assert longest > batch * heads * queries * keys / 2  # `checked` was called


@pytest.mark.parametrize("name", PASSES)
def test_kernels_are_launched_on_the_device_of_q(name: str, monkeypatch: pytest.MonkeyPatch):
    entered: list[torch.device] = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            entered.append(device)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(gpu, "device_of", lambda _: torch.device("cuda:1"))
    with pytest.raises((TypeError, AttributeError, ValueError)):
        getattr(triton, name)((None, None))  # which is no problem, after the device is set
    assert entered == [torch.device("cuda:1")]


def test_rules_are_copied_to_the_device_once_per_stream(monkeypatch: pytest.MonkeyPatch):
    q, here = np.zeros((3, 4)), torch.device("cpu")
    problem: Problem = describe(q, q, None, {"kv_lengths": 2}).problem
    first = gpu.rules(problem, here)
    assert gpu.rules(problem, here) is first
    monkeypatch.setattr(gpu, "_stream", lambda _: 1)
    second = gpu.rules(problem, here)
    assert second is not first
    assert gpu.rules(problem, here) is second


def test_broadcast_inputs_give_the_same_gradients_and_weights():
    q, k, v = RNG.standard_normal((3, 1, 1, 40, 8))
    inputs = describe(q, k, v, {}).inputs
    one = np.broadcast_to(np.float64(0.7), (1, 1, 40))
    result, truth = (
        engine.gradients(inputs, one, Upstream(one, output=q, keys=one, entropy=one)) for engine in (triton, portable)
    )
    for name, x in truth.items():
        np.testing.assert_allclose(result[name], x, 1e-10, 1e-12, err_msg=name)
    weights = portable.weights(inputs, one)
    np.testing.assert_allclose(triton.weights(inputs, one), weights, 1e-12)
