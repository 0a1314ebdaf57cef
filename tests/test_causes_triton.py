"""What single edges did, by the GPU's kernels in Triton's interpreter, on problems that span several tiles."""

from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from cause_problems import check_elements, check_observed
from clearhead.core.axes import Array
from clearhead.core.device_array import DeviceArray
from clearhead.core.effects import ORDERS
from clearhead.engines.gpu import column_pass, effect_pass, row_pass
from problems import Case
from seeds import fresh, normal

pytestmark = pytest.mark.gate  # Triton's interpreter is slow

LARGER: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "query_offset": 9},
    "sinks": {"sinks": np.arange(2.0), "window": (40, 20), "query_offset": 3},
    "mask": {"mask": np.arange(70)[:, None] % 7 != np.arange(75) % 5, "softcap": 2.0},
    "labels": {"query_segments": np.arange(70) // 33, "kv_segments": np.arange(75) // 33},
    "lengths": {"kv_lengths": 40, "query_lengths": 35, "alibi_slopes": np.ones(2) / 9},
}


@pytest.mark.parametrize("rules", ["any", *(pytest.param(name, marks=pytest.mark.long) for name in LARGER)])
def test_problems_of_several_tiles(rules: str):
    rules = str(fresh().choice(list(LARGER))) if rules == "any" else rules
    dtype, kind = (str(fresh().choice(names)) for names in (("float32", "float64"), ("cut", "contribution", "moved")))
    q, k, v = (normal(heads, n, d, dtype=dtype) for heads, n, d in ((2, 70, 5), (1, 75, 5), (1, 75, 4)))
    case = Case(q, k, v, LARGER[rules], int(fresh().integers(2**31)))
    check_elements("triton", case, kind)
    check_observed("triton", case, kind, orders=(fresh().choice(ORDERS),))


def test_values_wider_than_a_tile_and_keys_split_among_programs(monkeypatch: pytest.MonkeyPatch):
    for module in (effect_pass, column_pass):
        monkeypatch.setattr(module, "WIDTH", 16)
    for name, size in (("LONG", 32), ("SPLIT", 32), ("SPLITS", 4)):
        monkeypatch.setattr(row_pass, name, size)
    q, k, v = normal(3, 5), normal(90, 5), normal(90, 37)
    case = Case(q, k, v, {"causal": True, "query_offset": 80, "sinks": 0.5}, int(fresh().integers(2**31)))
    assert row_pass.split_of(case.problem, 1) == 32
    check_elements("triton", case, "cut")
    check_observed("triton", case, "cut")


def test_answers_stay_on_the_device():
    q, k, v, g = normal(4, 2, 2, 7, 4)

    def there(x: Array) -> Any:
        return DeviceArray(torch.from_numpy(x))

    result = ch.AttentionMatrix(*map(there, (q, k)), causal=True).cuts(there(v), there(g))
    truth = ch.AttentionMatrix(q, k, causal=True, engine="portable").cuts(v, g)
    labels = np.arange(7) // 2, np.arange(7) // 3
    local, expected = (x.observe(by_query=True, top=2, strongest=3, groups=labels) for x in (result, truth))
    for x, y in (
        *zip(local.strongest, expected.strongest, strict=True), *zip(local.top, expected.top, strict=True),
        (local.by_query, expected.by_query), (local.groups, expected.groups), (result[1, :, ::-2], truth[1, :, ::-2]),
        (result[..., 2:5], truth[..., 2:5]), (result.spans(*labels), truth.spans(*labels)),
        (result @ there(v), truth @ v), (result.T @ there(g), truth.T @ g),
    ):  # fmt: skip
        assert isinstance(x, DeviceArray)
        np.testing.assert_allclose(x.tensor.numpy(), y, 1e-9, 1e-12)
    norms, expected = (
        ch.AttentionMatrix(*arrays[:2], engine=engine).contributions(arrays[2]).by_key()
        for arrays, engine in ((tuple(map(there, (q, k, v))), "triton"), ((q, k, v), "portable"))
    )
    np.testing.assert_allclose(norms.tensor.numpy(), expected, 1e-9)
