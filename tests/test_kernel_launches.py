"""How the GPU kernels are launched: the grid, the device, and the width of offsets."""

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from clearhead.core.axes import Array
from clearhead.core.call import Call, describe
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines import portable, triton
from clearhead.engines.base import Upstream
from clearhead.engines.gpu import columns, gradients, rows
from clearhead.engines.gpu import tensors as gpu

PASSES = ("rows", "columns", "weights", "transposed", "gradients")
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
    inputs = describe(q, k, k, rules)
    problem = inputs.problem
    zeros = np.zeros(q.shape[:3])
    state = State(zeros, zeros)
    row = {"logsumexp": True, "max_logit": True, "entropy": True, "distance": True, "diagonal": True, "top": 2}
    triton.rows(inputs, Wanted(output=True, **row))
    triton.columns(inputs, state, Wanted(received=True, peak=True, image=(1, 1)))
    triton.weights(inputs, state)
    triton.transposed(inputs, state, q)
    table = None if problem.span_table is None else problem.span_table.shape
    upstream = Upstream(zeros, q, zeros[:, :, :1] + np.zeros(problem.keys), zeros, zeros, bias=bias, spans=table)
    triton.gradients(inputs, state, upstream)


def test_programs_lie_along_the_first_axis_of_the_grid(monkeypatch: pytest.MonkeyPatch):
    """The others hold 65,535 programs, fewer than batch · heads may be."""
    modules = {
        rows: ("rows",),
        columns: ("columns", "pixels"),
        gradients: ("keys", "queries", "bias", "spans"),
    }
    kernels = {(module, name): Recorder() for module, names in modules.items() for name in names}
    for (module, name), kernel in kernels.items():
        monkeypatch.setattr(module, name, kernel)
    q, k = np.zeros((22_000, 3, 1, 1)), np.zeros((22_000, 1, 130, 1))
    spans = np.zeros(1, int), np.zeros(130, int), np.zeros((22_000, 3, 1, 1))
    everything(q, k, {"bias": np.zeros((22_000, 3, 1, 1)), "spans": spans}, (22_000, 3, 1, 1))
    for (_, name), kernel in kernels.items():
        assert kernel.grids, name
        assert all(len(grid) == 1 and grid[0] < 2**31 for grid in kernel.grids), name
    assert kernels[rows, "rows"].grids == [(66_000,)]
    assert set(kernels[columns, "columns"].grids) == {(66_000 * 5,)}
    backward = [kernels[gradients, name].grids for name in modules[gradients]]
    assert backward == [2 * [(66_000 * 5,)], *[[(66_000,)]] * 3]  # keys answer Aᵀ·g too


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
        getattr(triton, name)(Call(None, None, None))  # type: ignore[arg-type]  # no problem, after the device is set
    assert entered == [torch.device("cuda:1")]


def test_broadcast_inputs_give_the_same_gradients_and_weights():
    q, k, v = RNG.standard_normal((3, 1, 1, 40, 8))
    inputs = describe(q, k, v, {})
    one = np.broadcast_to(np.float64(0.7), (1, 1, 40))
    state = State(one, one)
    result, truth = (
        engine.gradients(inputs, state, Upstream(one, output=q, keys=one, entropy=one)) for engine in (triton, portable)
    )
    for name, x in truth.items():
        np.testing.assert_allclose(result[name], x, 1e-10, 1e-12, err_msg=name)
    weights = portable.weights(inputs, state)
    np.testing.assert_allclose(triton.weights(inputs, state), weights, 1e-12)
