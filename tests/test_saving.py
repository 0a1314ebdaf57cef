"""Files are written completely or not at all; links, devices and pipes are written through and never replaced."""

import ast
import errno
import os
import resource
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.core import files
from clearhead.core.files import write_whole
from clearhead.errors import FileError

DATA = bytes(range(256)) * 1000


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("mode", [0o600, 0o755, 0o640])
def test_a_file_is_replaced_and_its_mode_kept_also_behind_links(tmp_path: Path, mode: int, *, exists: bool):
    """A new file has the mode that the umask allows."""
    (tmp_path / "far").mkdir()
    target = tmp_path / "far" / "target"
    (tmp_path / "chain").symlink_to("far/middle")
    (tmp_path / "far" / "middle").symlink_to(target)
    if exists:
        target.write_bytes(b"old")
        target.chmod(mode)
        before = target.stat().st_ino
    old = os.umask(0o777 & ~mode)
    try:
        write_whole(tmp_path / "chain", DATA)
    finally:
        os.umask(old)
    assert (tmp_path / "chain").is_symlink()
    assert (tmp_path / "far" / "middle").is_symlink()
    assert not target.is_symlink()
    assert target.read_bytes() == DATA
    assert stat.S_IMODE(target.stat().st_mode) == (mode if exists else 0o666 & mode)
    assert not exists or target.stat().st_ino != before
    assert sorted(os.listdir(tmp_path / "far")) == ["middle", "target"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, DATA)
    reader.join(10)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert heard == [DATA]


def test_devices_are_written_to(monkeypatch: pytest.MonkeyPatch):
    for name in ("replace", "rename", "unlink", "remove"):  # a failing test would take the real /dev/null away
        monkeypatch.setattr(os, name, lambda *names: pytest.fail(f"{names} would be gone"))
    write_whole("/dev/null", DATA)
    with pytest.raises(FileError, match=r"^/dev/full cannot be written: No space left on device\.$"):
        write_whole("/dev/full", DATA)
    for name in ("/dev/null", "/dev/full"):
        assert stat.S_ISCHR(os.stat(name).st_mode)


@pytest.fixture
def case(tmp_path: Path) -> str:
    place = tmp_path / "case.json"
    place.write_text('{"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]]}')
    return str(place)


def run(command: str, place: Path) -> subprocess.CompletedProcess[bytes]:
    clearhead = f'"{sys.executable}" -m clearhead trace case.json'
    words = ["bash", "-c", command.replace("clearhead", clearhead)]
    return subprocess.run(words, capture_output=True, cwd=place, timeout=120, check=False)


@pytest.mark.gate
def test_standard_output_and_process_substitution(case: str, tmp_path: Path):
    run("clearhead --html page.html --json steps.json", tmp_path)
    page, steps = ((tmp_path / name).read_bytes() for name in ("page.html", "steps.json"))
    assert run("clearhead --html -", tmp_path).stdout == page
    assert run("clearhead --json -", tmp_path).stdout == steps
    run("clearhead --html >(cat > copied.html) | cat; sleep 0.2", tmp_path)
    assert (tmp_path / "copied.html").read_bytes() == page
    both = run("clearhead --json - --html -", tmp_path)
    assert both.returncode == 2
    assert b"--json - and --html -" in both.stderr
    assert both.stdout == b""
    full = run("clearhead --json - > /dev/full", tmp_path)
    assert full.returncode == 2
    assert full.stderr.endswith(b"standard output cannot be written: No space left on device.\n")
    assert sorted(os.listdir(tmp_path)) == ["case.json", "copied.html", "page.html", "steps.json"]


def fails(place: Path, code: int) -> None:
    before = sorted(os.listdir(place.parent))
    with pytest.raises(FileError, match=f"cannot be written: {os.strerror(code)}"):
        write_whole(place, DATA)
    assert sorted(os.listdir(place.parent)) == before


def test_a_file_size_limit_leaves_the_old_file(tmp_path: Path):
    place = tmp_path / "out"
    place.write_bytes(b"old")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(DATA) // 2, old[1]))
    try:
        fails(place, errno.EFBIG)
        fails(tmp_path / "new", errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert place.read_bytes() == b"old"


@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("raised", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_any_failing_call_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, raised: BaseException
):
    place = tmp_path / "out"
    place.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(FileError if isinstance(raised, OSError) else KeyboardInterrupt):
        write_whole(place, DATA)
    assert place.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]


@contextmanager
def somebody_else(place: Path) -> Iterator[None]:
    """Run as an ordinary user, since root may read and write everything."""
    if os.geteuid():
        yield
        return
    for folder in [place, *place.parents]:
        if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
            folder.chmod(0o755 if folder != place else 0o777)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_files_without_write_permission_are_refused(tmp_path: Path):
    closed, guarded = tmp_path / "closed", tmp_path / "guarded"
    closed.mkdir()
    (closed / "out").write_bytes(b"old")
    (closed / "out").chmod(0o666)
    guarded.write_bytes(b"old")
    guarded.chmod(0o444)
    closed.chmod(0o555)
    with somebody_else(tmp_path):
        for place in (closed / "new", closed / "out", guarded):
            for act in (files.check_writable, lambda place: write_whole(place, b"new")):
                with pytest.raises(FileError, match="cannot be written: Permission denied"):
                    act(place)
    closed.chmod(0o755)
    assert (guarded.read_bytes(), (closed / "out").read_bytes()) == (b"old", b"old")
    assert os.listdir(closed) == ["out"]


def test_paths_that_cannot_hold_a_file_are_refused(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "loop").symlink_to("loop")
    wrong: dict[object, str] = {
        tmp_path / "folder": "Is a directory",
        tmp_path / "no" / "such": "its folder does not exist",
        f"{tmp_path}/new/": "its folder does not exist",
        tmp_path / "file" / "under": "Not a directory",
        tmp_path / "loop": "Too many levels of symbolic links",
        tmp_path / ("x" * 300): "File name too long",
        "": "the name is empty",
        "a\0b": "null",
    }
    for place, words in wrong.items():
        for act in (files.check_writable, lambda place: write_whole(place, b"new")):
            with pytest.raises(FileError, match=words):
                act(place)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "loop"]


def test_the_path_is_checked_before_the_work(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for command in (["explain", "humpty"], ["trace", case], ["diagnose", "no-such.json"]):
        for option in ("--json", "--html") if command[0] != "diagnose" else ("--json",):
            assert main([*command, option, str(tmp_path / "no" / "such")]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err == (
                f"clearhead {command[0]}: {tmp_path}/no/such cannot be written: its folder does not exist.\n"
            )


def test_every_file_is_written_through_write_whole():
    """No code but write_whole opens files for writing."""
    package = Path(ch.__file__).parent
    writers = {"write_text", "write_bytes", "save_file", "mkstemp", "NamedTemporaryFile", "imsave", "tofile", "dump"}
    for path in set(package.rglob("*.py")) - {Path(files.__file__)}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            words = ast.unparse(node)
            name = words.partition("(")[0].rpartition(".")[2]
            assert name not in writers, f"{path}: {words}"
            if "os.devnull" in words or "'a'" in words or "'ab'" in words:  # a log grows by lines
                continue
            assert name != "open" or not any(f"'{mode}" in words for mode in "wax"), f"{path}: {words}"
            assert not words.startswith(("np.save", "torch.save", "os.open")), f"{path}: {words}"


def test_many_writers_at_once_leave_one_whole_file(tmp_path: Path):
    place = tmp_path / "out"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=write_whole, args=(place, data)) for data in contents for _ in range(5)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if place.exists():
            assert place.read_bytes() in contents
        time.sleep(0.001)
    assert os.listdir(tmp_path) == ["out"]
