"""The examples of second derivatives and forward mode: the same numbers with PyTorch's own attention in their place."""

import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.gate, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
FOLDER = Path(__file__).parents[1] / "examples/derivatives"


def example(name: str) -> Any:
    result = util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert result is not None
    assert result.loader is not None
    module = util.module_from_spec(result)
    result.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_the_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [name, "--steps", "4"])
    example(name).main()
    assert "nan" not in capsys.readouterr().out


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
