"""Many architectures with attn_implementation="clearhead", uncompiled and compiled: outputs equal eager attention's."""

import copy
from typing import Any

import pytest
import torch
import transformers as hf

import clearhead.hf  # noqa: F401  registers
from small_models import small, taken
from test_watch_architectures import ELSEWHERE, QUICK, SLOW, close, outputs, tensors

RANDOM = {"SwitchTransformersModel"}  # its router draws numbers, and a compiler draws them in another order


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], given: dict[str, Any], name: str) -> None:
    for key, truth in expected.items():
        close(found[key], truth, given.get("attention_mask"), f"{name}{key}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_each_architecture_gives_eagers_outputs(name: str):
    model = small(getattr(hf, name))
    given = taken(model)
    model.set_attn_implementation("eager")
    expected = outputs(model, given)
    model.set_attn_implementation("clearhead")
    same(outputs(model, given), expected, given, name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the models' own code breaks graphs, and the compiler says so
@pytest.mark.parametrize("name", sorted({*QUICK, *SLOW} - RANDOM)[::8])  # compiling all of them takes a quarter hour
def test_each_architecture_compiled(name: str):
    model = small(getattr(hf, name))
    given = taken(model)
    model.set_attn_implementation("eager")
    expected = outputs(model, given)
    model.set_attn_implementation("clearhead")
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    with torch.no_grad():
        torch.manual_seed(7)
        found = dict(tensors(compiled(**given)))
    torch.compiler.reset()
    same(found, expected, given, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*ELSEWHERE} - {"GPTJModel", "ViltModel"}))  # for which `taken` has no inputs
def test_attention_outside_the_interface_computes_as_before(name: str):
    model = small(getattr(hf, name))
    given = taken(model)
    model.config._attn_implementation = "eager"  # as from_pretrained sets it; set_attn_implementation only warns
    expected = outputs(model, given)
    model.config._attn_implementation = "clearhead"
    same(outputs(model, given), expected, given, name)
