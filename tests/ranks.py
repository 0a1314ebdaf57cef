"""Starts the ranks of tests over process groups, which run functions of a script, and reads what they said."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


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
