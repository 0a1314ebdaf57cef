"""Contributions and cuts over ranks: the numbers of one process and of the reference; wrong arguments on one rank."""

from pathlib import Path

import pytest

from ranks import all_well
from seeds import fresh

SCRIPT = Path(__file__).with_name("sharded_causes.py")


def test_effects_over_shards_are_those_of_one_process(tmp_path: Path):
    seed = str(fresh().integers(2**31))
    all_well(tmp_path, [("causes,dtypes", "3", seed), ("differently,graphs", "2", seed)], SCRIPT)


@pytest.mark.slow
def test_effects_over_other_numbers_of_ranks(tmp_path: Path):
    seed = str(fresh().integers(2**31))
    jobs = dict.fromkeys("1234", "causes,dtypes,graphs,differently") | {"1": "causes,dtypes,graphs"}
    all_well(tmp_path, [(names, world, seed) for world, names in jobs.items()], SCRIPT)


@pytest.mark.slow  # Triton's interpreter on several ranks
def test_effects_of_tensors_on_a_device_are_computed_there(tmp_path: Path):
    all_well(tmp_path, [("device", "2", "0")], SCRIPT)
