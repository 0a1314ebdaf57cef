"""Many architectures with attn_implementation="clearhead", uncompiled and compiled: outputs equal eager attention's."""

import copy
from typing import Any

import pytest
import torch
import transformers as hf

import clearhead.hf  # noqa: F401  registers
from problems import of_tiers
from small_models import small, taken
from test_watch_architectures import ELSEWHERE, QUICK, SLOW, close, outputs, tensors

RANDOM = {"SwitchTransformersModel"}  # its router draws numbers, and a compiler draws them in another order


def same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], inputs: dict[str, Any], name: str) -> None:
    for key, truth in expected.items():
        close(result[key], truth, inputs.get("attention_mask"), f"{name}{key}")


@pytest.mark.parametrize("name", of_tiers([], [*QUICK, *SLOW]))
def test_each_architecture_gives_eagers_outputs(name: str):
    model = small(getattr(hf, name))
    inputs = taken(model)
    model.set_attn_implementation("eager")
    expected = outputs(model, inputs)
    model.set_attn_implementation("clearhead")
    same(outputs(model, inputs), expected, inputs, name)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the models' own code breaks graphs, and the compiler says so
@pytest.mark.parametrize("name", sorted({*QUICK, *SLOW} - RANDOM)[::8])  # compiling all of them takes a quarter hour
def test_each_architecture_compiled(name: str):
    model = small(getattr(hf, name))
    inputs = taken(model)
    model.set_attn_implementation("eager")
    expected = outputs(model, inputs)
    model.set_attn_implementation("clearhead")
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    with torch.no_grad():
        torch.manual_seed(7)
        result = dict(tensors(compiled(**inputs)))
    torch.compiler.reset()
    same(result, expected, inputs, name)


@pytest.mark.gate
@pytest.mark.parametrize("name", sorted({*ELSEWHERE} - {"GPTJModel", "ViltModel"}))  # for which `taken` has no inputs
def test_attention_outside_the_interface_computes_as_before(name: str):
    model = small(getattr(hf, name))
    inputs = taken(model)
    model.config._attn_implementation = "eager"  # as from_pretrained sets it; set_attn_implementation only warns
    expected = outputs(model, inputs)
    model.config._attn_implementation = "clearhead"
    same(outputs(model, inputs), expected, inputs, name)
