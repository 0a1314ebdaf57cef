"""Sharded attention on 1 to 4 real gloo processes: one process's numbers, the same bits, faults that name the rank."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("sharded.py")


def run(scenario: str, world: int, seed: int) -> None:
    """Start every rank, and see that all end well; a failure shows what the rank said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), scenario, str(rank), str(world), str(port), str(seed)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120)[0] for rank in started]
    finally:
        for rank in started:
            rank.kill()
    for rank, text in enumerate(said):
        assert text.endswith("well\n"), f"rank {rank} of {world}, seed {seed}:\n{text[-3000:]}"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rule_and_method(world: int):
    run("rules", world, int(np.random.default_rng().integers(2**31)))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("scenario", ["bits", "windows", "decoding", "differently"])
def test_scenario(scenario: str, world: int):
    run(scenario, world, 7)


@pytest.mark.parametrize("stalls", [False, True], ids=["gone", "stalls"])
def test_a_rank_that_does_not_come(stalls: bool):  # noqa: FBT001
    run("absent", 3, int(stalls))
