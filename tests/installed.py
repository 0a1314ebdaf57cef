"""Checks an installed clearhead with nothing but what it needs: `python installed.py native`, or `portable`."""

import json
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from tempfile import TemporaryDirectory

import ml_dtypes
import numpy as np

import clearhead as ch
import seeds
from clearhead.core import definition
from clearhead.core.call import describe

RULES = {"causal": True, "query_offset": 7, "window": (40, None), "softcap": 20.0, "sinks": np.array([0.5, -1.0])}
TOLERANCES = {np.float64: 1e-11, np.float32: 3e-5, np.float16: 3e-3, ml_dtypes.bfloat16: 3e-2}


def command(*inputs: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "clearhead", *inputs], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def check_engine(engine: str) -> None:
    facts = json.loads(command("info", "--json").stdout)
    assert facts["engine"] == engine, facts
    x = np.eye(2)
    assert ch.plan(x, x).engine == engine
    code = "import clearhead as ch, numpy as np; x = np.eye(2); [ch.attention(x, x, x) for _ in range(3)]"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True).stderr
    assert len(said.splitlines()) == (engine == "portable"), said


def check_numbers() -> None:
    rng = seeds.fresh()
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
    q, k, v = seeds.fresh().standard_normal((3, 5, 4))
    assert "得分没有缩放" in ch.diagnose(q, k, v, q @ k.T, stage="scaled").told("zh")


def check_files() -> None:
    package = Path(ch.__file__).resolve().parent
    assert Path(__file__).resolve().parents[1] / "src" not in package.parents, "this is the source tree"
    files = {str(path).replace("\\", "/") for path in distribution("clearhead").files or ()}
    for name in [
        "LICENSE",
        "nanobind.txt",
        "robin_map.txt",
        "py.typed",
        "attention.css",
        "attention.js",
        "tokenizer.json",
    ]:
        assert any(path.endswith("/" + name) for path in files), name
    assert not any(path.endswith((".cpp", ".hpp")) for path in files)


if __name__ == "__main__":
    print(f"CLEARHEAD_SEED={seeds.start()} draws these numbers again.")
    check_engine(sys.argv[1])
    check_numbers()
    check_command_line_with_its_model_and_pages()
    check_diagnosis()
    check_files()
    print(f"clearhead {ch.__version__} on Python {sys.version.split()[0]}: {sys.argv[1]}, all is well")
