"""`clearhead bench`: the check of an installation."""

import numpy as np
import pytest

from clearhead.bench import self_check
from clearhead.cli import main
from clearhead.errors import EngineError

FEW = (
    self_check.Case("4 heads, 40 tokens", 4, 2, 40, 40, "bfloat16", causal=True),
    self_check.Case("  with statistics", 4, 4, 40, 40, observed=True),
)


@pytest.mark.gate
def test_every_case_gets_a_line(capsys: pytest.CaptureFixture[str]):
    self_check.self_check(FEW)
    machine, head, *lines = capsys.readouterr().out.splitlines()
    assert machine.startswith("clearhead ")
    assert head.split()[:3] == ["case", "engine", "ms"]
    assert [line[:31].rstrip() for line in lines] == [case.name for case in FEW]
    assert "portable" in lines[0]
    assert "torch" in lines[0]
    assert "torch" not in lines[1]


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    truth = self_check._truth
    monkeypatch.setattr(self_check, "_truth", lambda *inputs: truth(*inputs) + 0.5)
    with pytest.raises(EngineError, match=r"^the \w+ engine is off by 0\.\d+ in `4 heads, 40 tokens`\."):
        self_check.measured(FEW[0])


def test_nan_counts_as_a_wrong_answer():
    assert not self_check._error(np.full((1, 1, 2, 3), np.nan), np.ones((1, 1, 2, 3))) <= 1


def test_the_command_runs_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(self_check, "measured", lambda case: self_check.Line(case.name, "native", 2e-3, {"torch": 2.0}))
    assert main(["bench"]) == 0
    assert capsys.readouterr().out.count("torch 2.00") == len(self_check.CASES)
