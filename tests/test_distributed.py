"""Sharded attention on 1 to 4 gloo processes: the numbers of one process, the same bits, faults that name the rank."""

import subprocess
import sys
from pathlib import Path

import pytest

from ranks import all_well, run
from seeds import fresh

ATTENTION, CAUSES, DERIVATIVES = (
    Path(__file__).with_name(f"sharded_{name}.py") for name in ("attention", "causes", "derivatives")
)
FAULTS = (  # which fault happens on which of three ranks, and during which method
    ("absent", 2, "gather"),
    ("late", 0, "ring"),
    ("dies", 2, "ring"),
    ("dies", 0, "merge"),
    ("stalls", 1, "ring"),
    ("breaks", 0, "merge"),
    ("breaks_early", 2, "gather"),
    ("forgets", 2, "merge"),
    ("dies_backward", 1, "gather"),
)

MORE = pytest.param("134", marks=pytest.mark.long)


@pytest.mark.parametrize("worlds", ["2", MORE])
@pytest.mark.parametrize(("script", "scenario"), [(ATTENTION, "rules"), (DERIVATIVES, "gradients")])
def test_every_rule_with_every_method(tmp_path: Path, script: Path, scenario: str, worlds: str):
    seed = str(fresh().integers(2**31))
    all_well(tmp_path, [(scenario, world, seed) for world in worlds], script)


@pytest.mark.gate
@pytest.mark.parametrize("worlds", ["2", MORE])
def test_effects_over_shards_are_those_of_one_process(tmp_path: Path, worlds: str):
    seed = str(fresh().integers(2**31))
    names = {world: "causes,dtypes,graphs" + ",differently" * (world != "1") for world in worlds}
    all_well(tmp_path, [(names[world], world, seed) for world in worlds], CAUSES)


@pytest.mark.gate
@pytest.mark.parametrize("worlds", ["2", MORE])
def test_forward_mode_and_second_derivatives_are_those_of_one_process(tmp_path: Path, worlds: str):
    seed = str(fresh().integers(2**31))
    names = {world: "both" + ",differing,ways,narrow" * (world == "2") for world in worlds}
    all_well(tmp_path, [(names[world], world, seed) for world in worlds], DERIVATIVES)


@pytest.mark.gate
@pytest.mark.parametrize("worlds", ["3", MORE])
def test_bits_bytes_exactness_and_refused_derivatives(tmp_path: Path, worlds: str):
    names = "bits,exact,windows,counts,cutting,decoding,passes"
    all_well(tmp_path, [(names + ",refused" * (world == "2"), world, "7") for world in worlds], ATTENTION)


@pytest.mark.long  # Triton's interpreter on several ranks
@pytest.mark.parametrize("script", [ATTENTION, CAUSES])
def test_tensors_on_a_device_are_computed_there(tmp_path: Path, script: Path):
    all_well(tmp_path, [("device", "2", "0")], script)


@pytest.mark.parametrize("worlds", ["2", pytest.param("34", marks=pytest.mark.long)])
@pytest.mark.gate
def test_ranks_called_with_different_arguments_are_told_which_rank_and_argument(tmp_path: Path, worlds: str):
    all_well(tmp_path, [("differently", world, "0") for world in worlds], ATTENTION)


@pytest.mark.long
def test_a_fault_on_one_rank_ends_every_rank_with_an_error_that_names_it(tmp_path: Path):
    everything = run(tmp_path, [("fault", "3", str(wrong), kind, method) for kind, wrong, method in FAULTS], ATTENTION)
    for (kind, wrong, method), said in zip(FAULTS, everything, strict=True):
        for rank in {0, 1, 2} - {wrong} | ({wrong} if kind == "late" else set()):
            assert said[rank].endswith("well\n"), (
                f"{kind} on rank {wrong}, {method}, rank {rank}:\n{said[rank][-3000:]}"
            )
        if kind == "stalls":  # the others did not wait for it
            ends = [float(said[rank].split("ended")[1].split()[0]) for rank in {0, 1, 2} - {wrong}]
            assert max(ends) < float(said[wrong].split("awake")[1].split()[0])


def long_context(ranks: int) -> subprocess.CompletedProcess[str]:
    example = Path(__file__).parents[1] / "examples" / "long_context.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    limits = ["--tokens", "16384", "--memory", "210"]
    return subprocess.run([*launch, str(example), *limits], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux counts it")
def test_four_processes_hold_a_text_too_large_for_one():
    together, alone = long_context(4), long_context(1)
    assert together.returncode == 0, together.stderr[-3000:]
    assert "ShardedAttentionMatrix(batch 1, heads 4, queries 16384, keys 16384) float32 on 4 ranks" in together.stdout
    last = together.stdout.splitlines()[-1]  # the passage occurred earlier, after a quarter of the text
    assert "token 16383, the last, looks at token 4607" in last or ", token 4607" in last
    assert alone.returncode != 0
    assert "llocate" in alone.stderr, alone.stderr[-3000:]


@pytest.mark.long
def test_the_predicted_bytes_equal_the_counted_bytes():
    script = Path(__file__).parents[1] / "benchmarks" / "scale.py"
    said = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=True).stdout
    assert said.count("| gather, causal, zigzag |") == 3
