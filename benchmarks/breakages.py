"""Do the tests fail where the code is wrong? python -m benchmarks.breakages [--only NAME …] [--tier TIER] [--list]

breakages.toml has small edits that each break a promise. For each of them, a copy of this checkout is edited and,
where the file is the kernel's or the page's, built again; then the tests run until the first fails, tier after tier,
of a tier those first that are the likeliest to notice it.
The table says which test noticed each breakage, and after how many seconds. The checkout itself is not changed.

Before anything runs, every edit is looked up: where its text does not stand in the file exactly once, the sources have
changed and the edit must be written again. The exit code is 0 where every breakage was noticed, 1 where one was not or
the tests fail without any, 2 where an edit no longer applies or a name is unknown, 130 when interrupted.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent
TIERS: dict[str, list[str]] = {  # in the order in which they run: each one's options for pytest
    "default": ["-m", "not gate and not long"],
    "gate": ["-m", "gate and not long", "--hypothesis-profile=gate"],
}
PAGE_TIER = "gate"  # the page's own tests run with it, for breakages of the page
PYTEST = ["-x", "-q", "-rfE", "--tb=no", "--no-header", "-p", "no:cacheprovider"]
NO_TESTS = 5  # pytest's exit code where a tier has none among the chosen files
NATIVE, PAGE = "native/", "page/"  # what has to be built
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
FAILED_IN_NODE = re.compile(r"^\s*not ok \d+ - (.+)$", re.MULTILINE)


class Breakage(NamedTuple):
    """One edit: `old`, which stands in the file once, becomes `new`. Of a tier, the tests in `first` run first."""

    name: str
    file: str
    old: str
    new: str
    first: str = ""

    def times(self, root: Path) -> int:
        """How often its text stands in its file."""
        place = root / self.file
        return place.read_text(encoding="utf-8").count(self.old) if place.is_file() else 0


class Copy(NamedTuple):
    """A copy of the checkout, with an environment of its own in which the copy is installed."""

    root: Path
    python: Path
    scratch: Path


class Outcome(NamedTuple):
    """Which tier noticed a breakage, by which test, and after how many seconds of tests; "" where none did."""

    name: str
    file: str
    tier: str
    test: str
    seconds: float


class CannotRunError(Exception):
    """The copy could not be built, or the tests did not run."""


def read(path: Path = HERE / "breakages.toml") -> list[Breakage]:
    return [Breakage(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["breakage"]]


def stale(breakages: Sequence[Breakage], root: Path) -> list[str]:
    """A sentence for each breakage that no longer applies."""
    results = []
    for one in breakages:
        times = one.times(root)
        if times != 1:
            results.append(f"this breakage no longer applies: {one.name}: its text stands in {one.file} {times} times.")
        if one.first and not (root / one.first).is_file():
            results.append(f"this breakage no longer applies: {one.name}: there is no {one.first}.")
    return results


@contextmanager
def applied(breakage: Breakage, root: Path) -> Iterator[None]:
    """Inside, the file is broken; afterwards it is as it was."""
    place = root / breakage.file
    before = place.read_bytes()
    try:
        _write(place, before.decode("utf-8").replace(breakage.old, breakage.new).encode("utf-8"))
        yield
    finally:
        _write(place, before)


def _write(place: Path, data: bytes) -> None:
    place.write_bytes(data)
    shutil.rmtree(place.parent / "__pycache__", ignore_errors=True)  # Python tells versions apart by whole seconds


@contextmanager
def copied() -> Iterator[Copy]:
    """A copy of what git has of the checkout, or would take; gone afterwards."""
    with TemporaryDirectory(prefix="clearhead-breakages-", ignore_cleanup_errors=True) as folder:
        root, environment = Path(folder, "clearhead"), Path(folder, "environment")
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        # The packages of this environment are read in place. Its own .pth files are not, and so neither is its editable
        # install of this checkout: in the tests, and in the processes they start, `import clearhead` gives the copy.
        venv.create(environment, with_pip=False, symlinks=True)
        local = next(environment.glob("lib/python*/site-packages"))
        packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (local / "packages.pth").write_text("".join(f"{path}\n" for path in packages), encoding="utf-8")
        yield Copy(root, environment / "bin" / "python", Path(folder, "scratch"))


def build_kernel(copy: Copy) -> None:
    """Install the copy: the kernel is compiled, Python files are read where they lie."""
    command = [str(copy.python), "-m", "pip", "install", "--quiet", "--no-deps", "-e", str(copy.root)]
    if find_spec("scikit_build_core") and find_spec("nanobind"):
        command.append("--no-build-isolation")
    variables = {"CCACHE_BASEDIR": str(copy.root), "CCACHE_NOHASHDIR": "1", "CMAKE_CXX_COMPILER_LAUNCHER": "ccache"}
    _built(copy, command, copy.root, variables if shutil.which("ccache") else {})


def build_page(copy: Copy) -> None:
    """Write the page's program anew from its sources."""
    page = copy.root / "page"
    if not (page / "node_modules").exists():
        if (ROOT / "page" / "node_modules").is_dir():
            (page / "node_modules").symlink_to((ROOT / "page" / "node_modules").resolve())
        else:
            _built(copy, ["npm", "ci", "--silent", "--no-audit", "--no-fund"], page, {})
    _built(copy, ["node", "build.js"], page, {})


def _built(copy: Copy, command: list[str], folder: Path, variables: dict[str, str]) -> None:
    code, said = _run(copy, command, folder, variables, None)
    if code:
        raise CannotRunError(f"{' '.join(command[:4])} … failed:\n{said[-2000:]}")


def build(copy: Copy, file: str) -> None:
    """Build again what is made of this file, if anything is."""
    if file.startswith(NATIVE):
        build_kernel(copy)
    elif file.startswith(PAGE):
        build_page(copy)


def first_failure(copy: Copy, command: list[str], folder: Path, failed: re.Pattern[str], limit: float) -> str:
    """The first test that fails; "" where all pass. What does not end within `limit` seconds counts as failed."""
    shutil.rmtree(copy.scratch, ignore_errors=True)
    copy.scratch.mkdir()
    variables = {"HYPOTHESIS_STORAGE_DIRECTORY": str(copy.scratch / "hypothesis")}  # examples of other breakages
    code, said = _run(copy, command, folder, variables, limit)
    if code is None:
        return f"it did not end within {limit:.0f} s"
    named = failed.search(said)
    if code == NO_TESTS:
        return ""
    if code and not named:
        raise CannotRunError(f"the tests stopped with exit code {code}:\n{said[-2000:]}")
    return named.group(1) if code and named else ""


def _run(
    copy: Copy, command: list[str], folder: Path, variables: dict[str, str], limit: float | None
) -> tuple[int | None, str]:
    """Exit code and output of a command, None where it was stopped; no process is left behind, interrupted or not."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    path = f"{copy.python.parent}{os.pathsep}{inherited.get('PATH', '')}"
    environment = {**inherited, "PATH": path, "VIRTUAL_ENV": str(copy.python.parent.parent), **variables}
    with subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, encoding="utf-8", errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def tried(copy: Copy, breakage: Breakage, tiers: Sequence[str], inputs: argparse.Namespace) -> Outcome:
    """Break the copy, see who notices, and mend the file; what is built of it is left broken."""
    with applied(breakage, copy.root):
        try:
            build(copy, breakage.file)
            return noticed(copy, breakage, tiers, inputs.tests, inputs.limit)
        except CannotRunError as error:
            _tell(f"{error}\n")
            return Outcome(breakage.name, breakage.file, "", "could not be tried", 0.0)


def noticed(copy: Copy, breakage: Breakage, tiers: Sequence[str], tests: Sequence[str], limit: float) -> Outcome:
    """Which of these tiers notices what is broken in the copy; `tests` are the files to run, () for all."""
    start = time.perf_counter()
    for tier in tiers:
        if tier == PAGE_TIER and breakage.file.startswith(PAGE) and not tests:
            command = ["node", "--test", "--test-reporter=tap"]
            test = first_failure(copy, command, copy.root / "page", FAILED_IN_NODE, limit)
            if test:
                return _outcome(breakage, tier, f"page: {test}", start)
        base = ["--basetemp", str(copy.scratch / "pytest")]
        for chosen in ([breakage.first], tests) if breakage.first and not tests else (tests,):
            command = [str(copy.python), "-m", "pytest", *PYTEST, *base, *TIERS[tier], *chosen]
            test = first_failure(copy, command, copy.root, FAILED, limit)
            if test:
                return _outcome(breakage, tier, test, start)
    return _outcome(breakage, "", "", start)


def _outcome(breakage: Breakage, tier: str, test: str, start: float) -> Outcome:
    return Outcome(breakage.name, breakage.file, tier, test, time.perf_counter() - start)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown, and below how many each tier noticed."""
    lines = ["| breakage | file | noticed by | test | seconds |", "| --- | --- | --- | --- | ---: |"]
    for one in outcomes:
        test = one.test.replace("|", "\\|")
        lines.append(f"| {one.name} | {one.file} | {one.tier or '**nobody**'} | {test} | {one.seconds:.0f} |")
    counts = [f"{sum(one.tier == tier for one in outcomes)} by {tier}" for tier in TIERS]
    unnoticed = [one.name for one in outcomes if not one.tier]
    lines += ["", f"{len(outcomes)} breakages: {', '.join(counts)}, {len(unnoticed)} by nobody."]
    return "\n".join([*lines, *(f"Not noticed: {name}." for name in unnoticed)])


def run(chosen: Sequence[Breakage], inputs: argparse.Namespace) -> int:
    """Try all chosen breakages in one copy; the exit code."""
    tiers = list(TIERS)[: list(TIERS).index(inputs.tier) + 1]
    outcomes: list[Outcome] = []
    try:
        with copied() as copy:
            _tell("building a copy of the checkout …\n")
            build_kernel(copy)
            if inputs.baseline:
                page = next((one.file for one in chosen if one.file.startswith(PAGE)), "")
                build(copy, page)
                untouched = noticed(copy, Breakage("nothing broken", page, "", ""), tiers, inputs.tests, inputs.limit)
                _tell(f"nothing broken: {untouched.test or 'all pass'} ({untouched.seconds:.0f} s)\n")
                if untouched.tier:
                    return 1
            for number, breakage in enumerate(chosen, 1):
                _tell(f"[{number}/{len(chosen)}] {breakage.name} … ")
                one = tried(copy, breakage, tiers, inputs)
                outcomes.append(one)
                _tell(f"{one.tier or 'nobody'}: {one.test or 'no test fails'} ({one.seconds:.0f} s)\n")
                if number < len(chosen):
                    build(copy, breakage.file)  # as it was
    except KeyboardInterrupt:
        _tell("interrupted\n")
        return 130
    except CannotRunError as error:
        _tell(f"{error}\n")
        return 1
    finally:
        if outcomes:
            print(table(outcomes))
    return 0 if all(one.tier for one in outcomes) else 1


def _tell(words: str) -> None:
    print(words, end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.breakages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the breakages; exit 2 where one no longer applies")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="those with one of these in their names")
    parser.add_argument("--tier", choices=TIERS, default=list(TIERS)[-1], help="the last tier that runs; default: all")
    parser.add_argument("--tests", nargs="+", metavar="PATH", default=[], help="run these test files only")
    parser.add_argument("--baseline", action="store_true", help="first see that the untouched copy passes")
    parser.add_argument("--limit", type=float, metavar="S", default=3600.0, help="seconds for a tier; default 3600")
    inputs = parser.parse_args(arguments)
    every = read()
    chosen = [one for one in every if not inputs.only or any(part in one.name for part in inputs.only)]
    unknown = [part for part in inputs.only if not any(part in one.name for one in every)]
    problems = [f"no breakage has {part!r} in its name: --list prints them." for part in unknown] + stale(chosen, ROOT)
    if inputs.list:
        print("\n".join(f"{one.name:<60} {one.file}" for one in chosen))
    for problem in problems:
        _tell(f"{problem}\n")
    if problems or inputs.list:
        return 2 if problems else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(chosen, inputs)


if __name__ == "__main__":
    sys.exit(main())
