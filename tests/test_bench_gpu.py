"""The GPU's bench, tried where there is none: tiny cases in Triton's interpreter."""

import pytest
import torch

from clearhead.bench import floors, gpu
from clearhead.bench.cases import Case
from clearhead.cli import main


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--device", "cuda"]) != 0
    assert "there is no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_a_tiny_run_from_check_to_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object
):
    few = [Case("forward", "observe", 1, 2, 1, 40, 40, 16, "bfloat16", causal=True)]
    monkeypatch.setattr(gpu, "gpu_cases", lambda quick: few)
    monkeypatch.setattr(gpu, "RULES", {name: gpu.RULES[name] for name in ("lengths",)})
    monkeypatch.setattr(gpu, "TOKENS", 40)
    monkeypatch.setattr(gpu, "BACKENDS", {"math": gpu.SDPBackend.MATH})
    gpu.bench(quick=True, save=str(tmp_path), device="cpu")
    told = capsys.readouterr().out
    for contestant in ("math", "materialised", "A @ v", "statistics", "+ received", "+ top 8", "sinks, window"):
        assert contestant in told
    assert "'lengths': 0.0" in told


def test_floors_by_hand():
    case = Case("forward", "observe", 2, 4, 2, 10, 10, 8, "bfloat16")
    limit = floors.Rates(operations=1e3, exponentials=1e9, bytes_read=1e15)
    assert floors.floor(case, "output", limit) == pytest.approx(2 * 2 * 2 * 4 * 100 * 8 / 1e3)
    assert floors.floor(case, "+ received", limit._replace(operations=1e12)) == pytest.approx(2 * 800 / 1e9)
    moved = 2 * 2 * 2 * 10 * 8 * 2 + 2 * 2 * 4 * 10 * 8 * 2
    assert floors.floor(case, "output", floors.Rates(1e12, 1e12, 1e3)) == pytest.approx(moved / 1e3)
