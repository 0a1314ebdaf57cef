"""Attention on DTensors over gloo processes: the numbers of one process, few messages, and plain refusals."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from seeds import fresh


def run(directory: Path, jobs: list[tuple[str, ...]], script: Path) -> list[list[str]]:
    """Start every rank of these jobs, (scenarios, ranks, seed, …), and return the output of each rank of each job."""
    started = ["/".join(job) for job in jobs]
    launcher = subprocess.Popen([sys.executable, str(script), str(directory), *started], start_new_session=True)
    try:
        launcher.wait(timeout=150)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    return [
        [(directory / f"{number}.{rank}").read_text(errors="replace") for rank in range(int(job[1]))]
        for number, job in enumerate(jobs)
    ]


def all_well(directory: Path, jobs: list[tuple[str, ...]], script: Path) -> None:
    for job, said in zip(jobs, run(directory, jobs, script), strict=True):
        for rank, text in enumerate(said):
            assert text.endswith("well\n"), f"{job}, rank {rank}:\n{text[-3000:]}"


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
