"""Attention on DTensors over gloo processes: the numbers of one process, few messages, and plain refusals."""

import subprocess
import sys
from pathlib import Path

import pytest

from seeds import fresh

SCRIPT = Path(__file__).with_name("dtensors.py")
SCENARIOS = "everything,narrow,messages,shapes,refused"
RANKS = [pytest.param(3, marks=pytest.mark.gate), *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4))]


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_give_the_numbers_of_one(tmp_path: Path, ranks: int):
    command = [sys.executable, SCRIPT, SCENARIOS, ranks, fresh().integers(2**31), tmp_path / "store"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
