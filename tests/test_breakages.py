"""The runner of breakages, on a toy checkout: what is noticed, what is not, and what no longer applies."""

import subprocess
import tempfile
from pathlib import Path

import pytest

from benchmarks import breakages
from benchmarks.breakages import Breakage

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
    Breakage("a name", "sums.py", "def halved", "def halve"),  # no test can be collected
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
    assert breakages.main(["--baseline"]) == 1
    out, err = capsys.readouterr()
    cells = [[cell.strip() for cell in line.split("|")[1:5]] for line in out.splitlines()[2:6]]
    assert cells == [
        ["doubling", "sums.py", "default", "test_sums.py::test_doubled"],
        ["halving", "sums.py", "gate", "test_sums.py::test_halved"],
        ["a name", "sums.py", "default", "test_sums.py"],
        ["unused", "sums.py", "**nobody**", ""],
    ]
    assert "4 breakages: 2 by default, 1 by gate, 1 by nobody.\nNot noticed: unused." in out
    assert "nothing broken: all pass" in err
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


def test_an_interrupt_leaves_nothing_behind(toy: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(breakages, "first_failure", interrupted)
    assert breakages.main(["--tier", "default"]) == 130
    assert not list(Path(tempfile.gettempdir()).iterdir())


@pytest.mark.gate
def test_tests_that_do_not_end_count_as_failed(toy: Path, capsys: pytest.CaptureFixture[str]):
    (toy / "test_sums.py").write_text("def test_endless():\n    while True: pass\n", encoding="utf-8")
    assert breakages.main(["--only", "doubling", "--limit", "2"]) == 0
    assert "it did not end within 2 s" in capsys.readouterr().out
