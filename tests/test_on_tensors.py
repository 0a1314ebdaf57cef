"""The portable engine over PyTorch's tensors, as on a GPU: parity, effects, gradients and laws, in the CPU's memory."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import test_causes
import test_gradients
import test_laws
import test_parity
from clearhead import engines
from clearhead.core.arrays import DeviceArray, on_cpu, to_torch
from clearhead.core.call import Call
from clearhead.core.effects import Terms
from clearhead.core.state import State
from clearhead.engines.base import Upstream
from device import DEVICE
from passes import PASSES, RECOMPUTED


class OnTensors:
    """An engine with the arrays of its arguments made tensors of the device, and its answers made NumPy's arrays."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.engine, name)
        if name.isupper() or name == "reasons_not":
            return value
        return lambda *arguments, **named: _near(value(*map(_sent, arguments), **named))


def _sent(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return DeviceArray(to_torch(torch, np.array(x)).to(DEVICE))
    if isinstance(x, Call):
        return Call(x.problem, _sent(x.q), _sent(x.k), _sent(x.v), x.restore)
    if isinstance(x, Terms):
        return replace(x, **{field.name: _sent(getattr(x, field.name)) for field in fields(x)})
    return type(x)(*map(_sent, x)) if isinstance(x, (State, Upstream)) else x


def _near(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: on_cpu(y) for name, y in x.items()}
    return x if isinstance(x, tuple) else on_cpu(x)


DRAWN = (  # each test is of the native engine too, which has the arrays as they are
    test_parity.test_output_and_row_statistics,
    test_parity.test_column_statistics,
    test_parity.test_statistics_of_some_queries_only,
    test_parity.test_indexing_works_as_on_a_numpy_array,
    test_parity.test_products_from_the_keys_side,
    test_causes.test_effects_are_the_references,
    test_causes.test_what_is_observed_is_numpys_answer_to_the_effects,
)
SINGLE = (
    test_causes.test_an_infinite_logit_leaves_no_number_in_its_row,
    test_causes.test_an_infinite_effect_comes_first,
    test_causes.test_equal_effects_come_in_the_order_of_their_places,
    test_gradients.test_gradients_are_nan_exactly_for_queries_that_see_nan,
)


@pytest.fixture(autouse=True)
def _on_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    given = engines.get
    monkeypatch.setattr(engines, "get", lambda name: given(name) if name == "native" else OnTensors(given(name)))


@pytest.mark.parametrize("test", DRAWN, ids=lambda test: test.__name__)
def test_drawn_problems(test: Any):
    test("compiled")
    if DEVICE != "cpu" and test.__module__ == "test_parity":  # on the CPU these run by themselves
        test("triton")


@pytest.mark.parametrize("test", SINGLE, ids=lambda test: test.__name__)
def test_single_problems(test: Any):
    test("portable")


@pytest.mark.gate
@pytest.mark.parametrize("over", [name for name in PASSES if name not in RECOMPUTED])
@pytest.mark.parametrize("law", test_laws.LAWS, ids=lambda law: law.__name__)
def test_laws_over_tensors(law: Any, over: str):
    test_laws.test_every_pass_on_every_engine_obeys_every_law(law, over, "portable")
