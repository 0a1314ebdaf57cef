"""Forward mode and second derivatives over ranks: the numbers of one process."""

from pathlib import Path

import pytest

from ranks import all_well
from seeds import fresh

SCRIPT = Path(__file__).with_name("sharded_derivatives.py")


def test_derivatives_over_shards_are_those_of_one_process(tmp_path: Path):
    all_well(tmp_path, [("both,matrices", "2", str(fresh().integers(2**31)))], SCRIPT)


@pytest.mark.slow
def test_other_numbers_of_ranks_and_all_ways(tmp_path: Path):
    seed = str(fresh().integers(2**31))
    jobs = dict.fromkeys("134", "both,matrices") | {"2": "both,matrices,differing,ways,narrow"}
    all_well(tmp_path, [(names, world, seed) for world, names in jobs.items()], SCRIPT)
