"""The examples of second derivatives and forward mode: the same numbers with PyTorch's own attention in their place."""

import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead as ch

pytestmark = [pytest.mark.gate, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
FOLDER = Path(__file__).parents[1] / "examples/derivatives"


def example(name: str) -> Any:
    result = util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert result is not None
    assert result.loader is not None
    module = util.module_from_spec(result)
    result.loader.exec_module(module)
    return module


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_the_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [name, "--steps", "4"])
    example(name).main()
    assert "nan" not in capsys.readouterr().out


def test_meanflow_has_the_loss_and_the_gradients_of_pytorchs_math_path(monkeypatch: pytest.MonkeyPatch):
    flow = example("meanflow")
    torch.manual_seed(0)
    model, data = flow.DiT().double(), torch.randn(4, 6, 2, dtype=torch.float64)

    def both() -> list[Tensor]:
        monkeypatch.setattr(torch, "rand", lambda *s, **k: random(*s, **k).double())
        monkeypatch.setattr(torch, "randn", lambda *s, **k: normal(*s, **k).double())
        loss = flow.loss(model, data, torch.Generator().manual_seed(1))
        return [loss, *torch.autograd.grad(loss, [*model.parameters()])]

    random, normal = torch.rand, torch.randn
    ours = both()
    monkeypatch.setattr(ch, "attention", plain)
    torch.testing.assert_close(ours, both())


def test_forces_train_as_with_pytorchs_math_path(monkeypatch: pytest.MonkeyPatch):
    atoms = example("forces")
    torch.manual_seed(0)
    model, x = atoms.Potential().double(), torch.randn(3, 5, 3, dtype=torch.float64)
    line = torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *s: line(*s).double())

    def both() -> list[Tensor]:
        error = atoms.forces(model, x.clone(), training=True).square().mean()
        return [error, *torch.autograd.grad(error, [*model.parameters()], allow_unused=True)]

    ours = both()
    monkeypatch.setattr(ch, "attention", plain)
    for actual, theirs in zip(ours, both(), strict=True):
        torch.testing.assert_close(actual, theirs)


@pytest.mark.long
def test_the_spectrum_is_that_of_the_whole_hessian():
    curvature = example("hessian_spectrum")
    torch.manual_seed(0)
    model: nn.Module = curvature.Model(5, width=8, heads=2)
    ids = torch.tensor([[0, 1, 2, 3, 4, 1, 2, 0]])
    product, size = curvature.hessian_product(model, ids)
    whole = torch.stack([product(one) for one in torch.eye(size)])
    torch.testing.assert_close(whole, whole.T, atol=1e-5, rtol=1e-4)
    result = curvature.lanczos(product, size, 30, torch.Generator().manual_seed(0))
    truth = torch.linalg.eigvalsh((whole + whole.T) / 2)
    torch.testing.assert_close(result[[0, -1]], truth[[0, -1]], atol=1e-3, rtol=1e-3)
