"""Checks a package: `python installed.py clearhead-….whl` installs it in an empty environment, and runs it there.

An sdist likewise, for which `portable` says that no compiler is there. `python installed.py native`, or `portable`,
checks the clearhead that is installed, which needs nothing else.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__" and sys.argv[1].endswith((".whl", ".tar.gz")):
    with TemporaryDirectory() as folder:
        file, check = (str(Path(path).resolve()) for path in (sys.argv[1], __file__))
        python = str(Path(folder, "alone", "Scripts" if os.name == "nt" else "bin", "python"))
        install = [python, "-I", "-m", "pip", "install", "--quiet", "--no-cache-dir", file]
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CLEARHEAD_"))}
        for one in (
            [sys.executable, "-m", "venv", "alone"],
            install,
            [python, "-I", check, *(sys.argv[2:] or ["native"])],
        ):
            subprocess.run(one, cwd=folder, env=alone, check=True)
    sys.exit()

import ml_dtypes
import numpy as np

import clearhead as ch
from clearhead.core import definition
from clearhead.core.call import describe

SEED = int(os.environ.get("CLEARHEAD_SEED") or int.from_bytes(os.urandom(4)))
RULES = {"causal": True, "query_offset": 7, "window": (40, None), "softcap": 20.0, "sinks": np.array([0.5, -1.0])}
TOLERANCES = {np.float64: 1e-11, np.float32: 3e-5, np.float16: 3e-3, ml_dtypes.bfloat16: 3e-2}


def command(*inputs: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "clearhead", *inputs], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def check_engine(engine: str) -> None:
    facts = json.loads(command("info", "--json").stdout)
    assert facts["engine"] == engine, facts
    x = np.eye(2)
    assert ch.plan(x, x).engine == engine
    code = "import clearhead as ch, numpy as np; x = np.eye(2); [ch.attention(x, x, x) for _ in range(3)]"
    said = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, encoding="utf-8", check=True).stderr
    assert len(said.splitlines()) == (engine == "portable"), said


def check_numbers() -> None:
    rng = np.random.default_rng(SEED)
    for dtype, tolerance in TOLERANCES.items():
        q, k, v = (rng.standard_normal((1, heads, n, 24)).astype(dtype) for heads, n in ((2, 65), (1, 300), (1, 300)))
        inputs = describe(q, k, v, RULES)
        truth = definition.attend(inputs.problem, inputs.q, inputs.k, inputs.v)
        assert truth.output is not None
        matrix = ch.AttentionMatrix(q, k, **RULES)
        output, received = (np.asarray(x, np.float64) for x in (ch.attention(q, k, v, **RULES), matrix.received()))
        assert np.abs(output - truth.output).max() < tolerance, dtype
        assert np.abs(received - definition.received(truth)).max() < 100 * tolerance, dtype
        assert np.abs(np.asarray(matrix[0, 1, 64], np.float64) - truth.weights[0, 1, 64]).max() < tolerance, dtype


def check_threads() -> None:
    """Calls of several threads at once, which in a free-threaded Python really are, have each call's bits."""
    q, k, v = np.random.default_rng(SEED).standard_normal((3, 8, 2, 300, 16))
    alone = [ch.attention(*each, causal=True) for each in zip(q, k, v, strict=True)]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            for one, other in zip(threads.map(lambda *x: ch.attention(*x, causal=True), q, k, v), alone, strict=True):
                assert np.array_equal(one, other)
    assert "free-threading" not in sys.version or not sys._is_gil_enabled(), "an import turned the lock on"


def check_command_line_with_its_model_and_pages() -> None:
    with TemporaryDirectory() as folder:
        page, long_page, text = (Path(folder, name) for name in ("page.html", "long.html", "text.txt"))
        explained = json.loads(command("explain", "humpty dumpty sat on", "--html", str(page), "--json", "-").stdout)
        assert explained["tokens"]
        text.write_text("humpty dumpty sat on a wall\n", encoding="utf-8")
        command("explain", "--file", str(text), "--html", str(long_page), "--lang", "zh")
        for written in (page, long_page):
            assert re.search("<script.*</html>", written.read_text(encoding="utf-8"), re.DOTALL)


def check_diagnosis() -> None:
    q, k, v = np.random.default_rng(SEED).standard_normal((3, 5, 4))
    assert "得分没有缩放" in ch.diagnose(q, k, v, q @ k.T, stage="scaled").told("zh")


def check_files() -> None:
    package = Path(ch.__file__).resolve().parent
    assert Path(__file__).resolve().parents[1] / "src" not in package.parents, "this is the source tree"
    files = {str(path).replace("\\", "/") for path in distribution("clearhead").files or ()}
    needed = "LICENSE", "nanobind.txt", "robin_map.txt", "py.typed", "attention.css", "attention.js", "tokenizer.json"
    for name in needed:
        assert any(path.endswith("/" + name) for path in files), name
    assert not any(path.endswith((".cpp", ".hpp")) for path in files)


if __name__ == "__main__":
    print(f"CLEARHEAD_SEED={SEED} draws these numbers again.")
    check_engine(sys.argv[1])
    check_numbers()
    check_threads()
    check_command_line_with_its_model_and_pages()
    check_diagnosis()
    check_files()
    assert not sys.flags.isolated or find_spec("torch") is None
    print(f"clearhead {ch.__version__} on Python {sys.version.split()[0]}: {sys.argv[1]}, all is well")
