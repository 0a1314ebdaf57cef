"""Sharded attention on 1 to 4 real gloo processes: one process's numbers, the same bits, faults that name the rank."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("sharded.py")
FAULTS = (  # what goes wrong on which of three ranks, during which method
    ("absent", 2, "gather"),
    ("late", 0, "ring"),
    ("dies", 2, "ring"),
    ("dies", 0, "merge"),
    ("stalls", 1, "ulysses"),
    ("breaks", 0, "ulysses"),
    ("breaks_early", 2, "gather"),
    ("forgets", 2, "merge"),
    ("dies_backward", 1, "gather"),
)


def start(scenario: str, world: int, seed: int, *more: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), scenario, str(rank), str(world), str(port), str(seed), *more],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip


def ends(started: list[subprocess.Popen[str]]) -> list[str]:
    """What every rank said until its end."""
    try:
        return [rank.communicate(timeout=120)[0] for rank in started]
    finally:
        for rank in started:
            rank.kill()


def run(scenario: str, world: int, seed: int) -> None:
    """Start every rank, and see that all end well; a failure shows what the rank said."""
    for rank, text in enumerate(ends(start(scenario, world, seed))):
        assert text.endswith("well\n"), f"rank {rank} of {world}, seed {seed}:\n{text[-3000:]}"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rule_and_method(world: int):
    run("rules", world, int(np.random.default_rng().integers(2**31)))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bits_bytes_and_differences(world: int):
    run("bits,exact,windows,counts,decoding,differently", world, 7)


def test_faults_end_every_rank_with_the_name_of_the_one():
    groups = [start("fault", 3, wrong, kind, method) for kind, wrong, method in FAULTS]
    everything = [ends(started) for started in groups]
    for (kind, wrong, method), said in zip(FAULTS, everything, strict=True):
        for rank in {0, 1, 2} - {wrong}:
            assert said[rank].endswith("well\n"), (
                f"{kind} on rank {wrong}, {method}, rank {rank}:\n{said[rank][-3000:]}"
            )


def long_context(ranks: int) -> subprocess.CompletedProcess[str]:
    example = Path(__file__).parents[1] / "examples" / "long_context.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    limits = ["--tokens", "16384", "--memory", "210"]
    return subprocess.run([*launch, str(example), *limits], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux counts it")
def test_four_processes_hold_the_text_that_one_may_not():
    together, alone = long_context(4), long_context(1)
    assert together.returncode == 0, together.stderr[-3000:]
    assert "ShardedAttentionMatrix(batch 1, heads 4, queries 16384, keys 16384) float32 on 4 ranks" in together.stdout
    last = together.stdout.splitlines()[-1]  # its passage stood there before: after a quarter of the text
    assert "token 16383, the last, looks at token 4607" in last or ", token 4607" in last
    assert alone.returncode != 0
    assert "llocate" in alone.stderr, alone.stderr[-3000:]


def test_the_paper_model_has_the_bytes_that_are_counted():
    script = Path(__file__).parents[1] / "benchmarks" / "scale.py"
    said = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=True).stdout
    assert said.count("| gather, causal, zigzag |") == 3
