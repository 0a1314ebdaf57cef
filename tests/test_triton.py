"""The GPU's kernels in Triton's interpreter: problems of several tiles, splits and bands; how they are launched."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

import clearhead as ch
from clearhead.core.arrays import DeviceArray, bfloat16
from clearhead.core.axes import Array
from clearhead.core.call import Call, describe
from clearhead.core.state import State
from clearhead.core.statistics import PER_QUERY, Wanted, listed
from clearhead.engines import portable, triton
from clearhead.engines.base import Upstream
from clearhead.engines.gpu import gradients, rows
from clearhead.engines.gpu import tensors as gpu
from clearhead.errors import EngineError
from problems import Case
from seeds import fresh
from slack import assert_close, assert_columns, assert_rows, rounding

DTYPES = tuple(np.dtype(x) for x in (np.float32, np.float16, ml_dtypes.bfloat16, np.float64))


def drawn(dtype: np.dtype[Any], queries: int, keys: int, d_k: int, d_v: int, **rules: Any) -> Case:
    rng = np.random.default_rng((queries, keys))
    q = rng.standard_normal((1, 4, queries, d_k)).astype(dtype)
    k, v = (rng.standard_normal((1, 2, keys, d)).astype(dtype) for d in (d_k, d_v))
    return Case(q, k, v, rules, 0)


RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True, "query_offset": 20},
    "window": {"window": (30, 8), "query_offset": 4},
    "lengths": {"kv_lengths": 71, "query_lengths": 50, "causal": True, "query_offset": 31},
    "packed": {"query_segments": np.arange(70) // 30, "kv_segments": np.arange(101) // 30, "sinks": np.arange(4.0)},
    "scattered": {"query_segments": np.arange(70) % 3, "kv_segments": np.arange(101) // 9 % 4},
    "soft": {"softcap": 3.0, "alibi_slopes": np.arange(4) / 9, "scale": -0.4},
    "spans": {
        "spans": (np.arange(70) // 11 - 1, np.arange(101) // 13, np.where(np.tri(6, 8, 3) > 0, 0.7, -np.inf)),
        "scale": np.array([0.2, -0.3, 0.4, 1.0]),
    },
    "far": {"query_offset": 2**40, "causal": True, "window": (2**41, None), "alibi_slopes": np.full(4, 1e-13)},
}
PAIRS: list[Any] = [(rules, DTYPES[0]) for rules in ("soft",)]
PAIRS += [pytest.param("", dtype, marks=pytest.mark.long) for dtype in DTYPES]  # any of the rules


@pytest.mark.gate
@pytest.mark.parametrize(("rules", "dtype"), PAIRS, ids=str)
def test_problems_of_several_tiles(rules: str, dtype: np.dtype[Any]):
    rules = rules or str(fresh().choice(list(RULES)))
    case = drawn(dtype, 70, 101, 24, 40, **RULES[rules])
    check_rows(case)
    seen = case.matrix(engine="triton").observe(received=True, peak=True)
    assert_columns(case, seen, slice(None), None)


@pytest.mark.gate
def test_what_a_row_must_not_see_does_not_reach_it():
    case = drawn(DTYPES[0], 70, 101, 8, 8, causal=True, query_offset=20)
    q, k, v = case.given.q, case.given.k, case.given.v
    by, rows = fresh().standard_normal((2, *q.shape)).astype(np.float32)
    v[:, :, 60, 2], by[:, :, 40, 1] = np.nan, np.inf
    upstream = Upstream(rows[..., 0], by)
    state = State(*(x.astype(np.float32) for x in case.book.state))
    result, truth = (engine.gradients(case.given, state, upstream) for engine in (triton, portable))
    for name, x in result.items():
        np.testing.assert_allclose(x, truth[name], 1e-4, 1e-4, err_msg=name)
    q[..., 0], k[:, :, 3, 0] = np.abs(q[..., 0]), -np.inf  # a weight of 0 that is visible: 0·ln 0 in the entropy
    for values in (v, np.ones_like(v)):
        seen = [case.matrix(engine=x).observe(values, entropy=True, logsumexp=True) for x in ("triton", "portable")]
        for name in ("output", "entropy", "logsumexp"):
            np.testing.assert_allclose(*(getattr(x, name) for x in seen), 1e-4, 1e-5, err_msg=name)
        assert np.isfinite(seen[0].output[:, :, :40]).all()


def test_weights_are_not_rounded_to_a_narrower_operand():
    q, k, g = fresh().standard_normal((3, 9, 8)).astype(np.float32)
    A, narrow = ch.AttentionMatrix(q, k, engine="triton"), g.astype(bfloat16)
    np.testing.assert_allclose(A.T @ narrow, np.asarray(A).T @ narrow.astype(np.float32), atol=1e-5)
    half = ch.AttentionMatrix(q.astype(np.float16), k.astype(np.float16), engine="triton")
    assert np.isfinite(half.T @ (1e30 * g).astype(bfloat16)).all()  # float16 would hold none of these


def check_rows(case: Case) -> None:
    asked: Any = dict.fromkeys(listed(axes=PER_QUERY), True)
    assert_rows(case, case.matrix(engine="triton").observe(case.v, top=5, **asked), 5, "triton")


@pytest.mark.long
@pytest.mark.parametrize("halves", [False, True])
def test_wide_values_are_processed_in_parts(halves: bool, monkeypatch: pytest.MonkeyPatch):  # noqa: FBT001
    dtype = DTYPES[int(fresh().integers(1, 3))] if halves else DTYPES[0]
    case = drawn(dtype, 9, 40, 8, 40, causal=True, query_offset=30)
    by = np.random.default_rng(1).standard_normal((*case.given.q.shape[:3], 40)).astype(dtype)
    rows = np.random.default_rng(2).standard_normal(by.shape[:3]).astype(np.float32)
    state = State(*(x.astype(np.float32) for x in case.book.state))
    upstream = Upstream(rows, by)
    whole = triton.gradients(case.given, state, upstream)
    monkeypatch.setattr(triton, "MOST_D", 16)
    check_rows(case)
    for name, x in triton.gradients(case.given, state, upstream).items():
        result, truth = x.astype(np.float64), whole[name].astype(np.float64)
        assert_close(result, truth, 4 * rounding(np.abs(truth).max(), dtype), name)


def test_a_number_of_the_table_beyond_float32_does_not_forbid():
    q = fresh().standard_normal((1, 1, 3, 4)).astype(np.float32)
    spans = np.zeros(3, int), np.zeros(3, int), np.full((1, 1), -1e300)
    case = Case(q, q, q, {"spans": spans}, 0)
    np.testing.assert_allclose(
        case.attention(engine="triton"), np.broadcast_to(q.mean(-2, keepdims=True), q.shape), 1e-5
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_bfloat16_bias_beside_wider_inputs(dtype: Any):
    q, k = (np.random.default_rng(2).standard_normal((n, 4)).astype(dtype) for n in (3, 14))
    bias = np.where(np.arange(14) == 2, -np.inf, np.zeros((3, 14))).astype(ml_dtypes.bfloat16)
    weights = [ch.AttentionMatrix(q, k, bias=bias, engine=engine)[...] for engine in ("triton", "portable")]
    np.testing.assert_allclose(*weights, atol=1e-6)


@pytest.mark.parametrize("rules", [{}, {"causal": True}], ids=str)
def test_a_visible_nan_in_a_query_s_key_is_its_diagonal(rules: dict[str, Any]):
    """As in the float64 reference; a NaN in a key that the query may not see stays out."""
    q, k = fresh().standard_normal((2, 1, 1, 40, 4)).astype(np.float32)
    k[..., 35, 1] = np.nan
    result, truth = (ch.AttentionMatrix(q, k, **rules, engine=x).diagonal() for x in ("triton", "portable"))
    assert np.isnan(truth[..., 35])
    np.testing.assert_allclose(result, truth, 1e-5)


@pytest.mark.parametrize(("dtype", "version"), [("float64", "3.8.0"), ("float32", "3.8.0"), ("float64", "3.10.1")])
def test_what_older_compilers_refuse_is_not_launched(dtype: str, version: str, monkeypatch: pytest.MonkeyPatch):
    compiler = SimpleNamespace(__version__=version, knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)))
    monkeypatch.setattr(triton, "triton", compiler)
    monkeypatch.setattr(DeviceArray, "device", "cuda:0")
    q, halves = DeviceArray(torch.zeros(1, 1, 3, 4, dtype=getattr(torch, dtype))), np.zeros((3, 3), ml_dtypes.bfloat16)
    said = [f"Triton {version} cannot compile float64 with a mask or a bias of 16 bits."]
    for narrow, rules in (
        (True, {"mask": np.eye(3) > 0}), (True, {"bias": halves}), (False, {"bias": halves.astype(np.float32)}),
    ):  # fmt: skip
        refused = narrow and (dtype, version) == ("float64", "3.8.0")
        assert triton.reasons_not(describe(q, q, q, rules).problem) == said * refused


@pytest.mark.parametrize("what", ["groups", "image", "contributions", "cut_effects"])
def test_what_the_engine_does_not_compute_is_said(what: str):
    q, wide = fresh().standard_normal((3, 4)), np.zeros((1, 300))
    with pytest.raises(EngineError, match="d_k is 300: the kernels hold at most 256"):
        ch.attention(wide, wide, wide, engine="triton")
    matrix = ch.AttentionMatrix(q, q, engine="triton")
    pictures = {"groups": ([0, 0, 1], [0, 1, 1]), "image": (2, 2)}
    said = rf"does not compute {what}\." if what in pictures else r"no effects\.\n\nhint: leave `engine` out"
    with pytest.raises(EngineError, match=said):
        getattr(matrix, what)(*pictures.get(what, (q, q)))


@pytest.mark.long
def test_every_kernel_compiles_and_fits_a_gpus_shared_memory():
    """99 KiB, which every GPU since sm_80 has; for float64 with rows of 256 numbers 163, as sm_80 and sm_90 have.

    In a process of its own, as this one interprets the kernels.
    """
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    cases = [f"{dtype},{d}" for dtype in ("bfloat16", "float32", "float64") for d in (64, 128, 256)]
    program = Path(__file__).parent / "compiled_kernels.py"
    cases += ["float16,16,rules", "float32,256,rules", "float64,256,rules"]
    command = [sys.executable, "-W", "ignore", program, *cases]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 12 * 7
    most = {True: 163 * 1024, False: 99 * 1024}
    assert [line for line in lines if int(line.split()[-1]) > most["float64 256" in line]] == []


PASSES = ("rows", "columns", "weights", "transposed", "gradients")
RNG = np.random.default_rng(0)


class Recorder:
    """Takes the place of a kernel and records the grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *_, **__: None


def everything(q: Array, k: Array, rules: dict[str, Any]) -> None:
    """Every pass, with all its results."""
    inputs = describe(q, k, k, rules)
    problem = inputs.problem
    zeros = np.zeros(q.shape[:3])
    state = State(zeros, zeros)
    row = {"logsumexp": True, "max_logit": True, "entropy": True, "distance": True, "diagonal": True, "top": 2}
    triton.rows(inputs, Wanted(output=True, **row))
    triton.columns(inputs, state, Wanted(received=True, peak=True))
    triton.weights(inputs, state)
    triton.transposed(inputs, state, q)
    upstream = Upstream(zeros, q, zeros[:, :, :1] + np.zeros(problem.keys), zeros, zeros)
    triton.gradients(inputs, state, upstream)


def test_programs_lie_along_the_first_axis_of_the_grid(monkeypatch: pytest.MonkeyPatch):
    """The others hold 65,535 programs, fewer than batch · heads may be."""
    modules = {
        rows: ("rows", "columns"),
        gradients: ("keys", "queries"),
    }
    kernels = {(module, name): Recorder() for module, names in modules.items() for name in names}
    for (module, name), kernel in kernels.items():
        monkeypatch.setattr(module, name, kernel)
    q, k = np.zeros((22_000, 3, 1, 1)), np.zeros((22_000, 1, 130, 1))
    spans = np.zeros(1, int), np.zeros(130, int), np.zeros((22_000, 3, 1, 1))
    everything(q, k, {"bias": np.zeros((22_000, 3, 1, 1)), "spans": spans})
    for (_, name), kernel in kernels.items():
        assert kernel.grids, name
        assert all(len(grid) == 1 and grid[0] < 2**31 for grid in kernel.grids), name
    assert kernels[rows, "rows"].grids == [(66_000,)]
    assert set(kernels[rows, "columns"].grids) == {(66_000 * 5,)}
    backward = [kernels[gradients, name].grids for name in modules[gradients]]
    assert backward == [2 * [(66_000 * 5,)], [(66_000,)]]  # keys answer Aᵀ·g too


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
    everything(q, k, rules)
    assert longest > batch * heads * queries * keys / 2  # `checked` was called


@pytest.mark.parametrize("name", PASSES)
def test_kernels_are_launched_on_the_device_of_q(name: str, monkeypatch: pytest.MonkeyPatch):
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr(gpu, "device_of", lambda _: torch.device("cuda:1"))
    with pytest.raises((TypeError, AttributeError, ValueError)):
        getattr(triton, name)(Call(None, None, None))  # type: ignore[arg-type]  # no problem, after the device is set
    assert entered == [torch.device("cuda:1")]
