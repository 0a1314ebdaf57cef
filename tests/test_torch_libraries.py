"""Other people's models, built from small configurations: the same outputs and gradients while clearhead is active."""

import pytest
import torch

import clearhead.torch
from benchmarks import drop_in

NEEDS = {"diffusers UNet": "diffusers", "diffusers transformer": "diffusers", "Keras attention": "keras"}  # pip's names


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", ["nn.TransformerEncoder", *NEEDS])
def test_outputs_and_gradients_are_the_same(name: str):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    model, call, x = drop_in.MODELS[name]()
    model.eval()
    theirs = drop_in.results(call, x, model)
    ours = drop_in.active(lambda: drop_in.results(call, x, model))
    routes = clearhead.torch.explain().routes
    assert {route.computed_by for route in routes} == {"clearhead"}
    assert sum(route.count for route in routes) >= 2
    assert drop_in.difference(ours[0], theirs[0]) < 1e-4
    largest = max(y.abs().max().item() for y in theirs[1:])
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * largest)
