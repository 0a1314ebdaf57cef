"""Attention on DTensors over gloo processes: the numbers of one process, few messages, and plain refusals."""

from pathlib import Path

import pytest

from ranks import all_well
from seeds import fresh

SCRIPT = Path(__file__).with_name("dtensors.py")
SCENARIOS = "everything,narrow,messages,shapes,refused"


def test_two_and_four_ranks_give_the_numbers_of_one(tmp_path: Path):
    seed = str(fresh().integers(2**31))
    all_well(tmp_path, [(SCENARIOS, "2", seed), ("everything", "4", seed)], SCRIPT)


@pytest.mark.gate
@pytest.mark.parametrize("world", ["1", "3", "4"])
def test_any_number_of_ranks_does(tmp_path: Path, world: str):
    seed = str(fresh().integers(2**31))
    names = SCENARIOS if world == "4" else "everything,narrow,messages,shapes"
    all_well(tmp_path, [(names, world, seed)], SCRIPT)
