"""Small runs of benchmarks/: a few on the CPU, and those of the GPU in Triton's interpreter."""

import sys
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks import floors, gpu
from benchmarks.__main__ import main
from benchmarks.cases import Case


def test_without_a_gpu_the_gpu_benchmarks_say_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2
    assert "there is no GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quick", "--only", "full", "--save", "README.md/x"], "README.md/x cannot be"),
        (["--device", "cuda", "--only", "full"], "--only is for --device cpu"),
        (["--only", "fuller"], "did you mean `full`?"),
        (["--threads", "0"], "number of threads is 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_without_pytorch_the_gpu_benchmarks_name_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(sys.modules, "benchmarks.gpu")
    monkeypatch.delattr(benchmarks, "gpu")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["--device", "cuda"]) == 2
    assert 'hint: pip install "clearhead[gpu]"' in capsys.readouterr().err


def test_a_few_cpu_benchmarks_run_from_setup_to_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = ["--quick", "--only", "tiny", "--peers", "numpy,torch", "--save", str(tmp_path)]
    assert main(found) == 0
    table = capsys.readouterr().out
    for words in ("[tiny]", "numpy", "torch", "of limit", "times as fast: geometric mean / worst"):
        assert words in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.csv", "bench.json", "bench.md", "bench.svg"]


@pytest.mark.slow
def test_a_small_gpu_run_goes_from_check_to_table(
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


def test_lower_bounds_on_time_equal_those_worked_by_hand():
    case = Case("forward", "observe", 2, 4, 2, 10, 10, 8, "bfloat16")
    limit = floors.Rates(operations=1e3, exponentials=1e9, bytes_read=1e15)
    assert floors.floor(case, "output", limit) == pytest.approx(2 * 2 * 2 * 4 * 100 * 8 / 1e3)
    assert floors.floor(case, "+ received", limit._replace(operations=1e12)) == pytest.approx(2 * 800 / 1e9)
    moved = 2 * 2 * 2 * 10 * 8 * 2 + 2 * 2 * 4 * 10 * 8 * 2
    assert floors.floor(case, "output", floors.Rates(1e12, 1e12, 1e3)) == pytest.approx(moved / 1e3)
