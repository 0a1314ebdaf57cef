"""Files with false claims, endless nesting or the wrong format: each gives one clear error."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

import seeds
from clearhead.cli import main
from clearhead.core import files, room
from clearhead.diagnosing.claims import check_file
from clearhead.diagnosing.diagnose import diagnose_file
from clearhead.errors import ClearheadError, FileError
from clearhead.explaining.steps import steps_of_text
from clearhead.models.finding import load_model as find
from clearhead.models.model import load
from clearhead.textbook.case_file import numbers, precision, read, value_of
from diagnosing import EXAMPLE
from terminal import call
from test_saving import somebody_else

SHIPPED = Path(str(resources("clearhead") / "models" / "rhymes"))
DEEP = "[" * 100_000 + "]" * 100_000
READERS: list[Callable[[Path], Any]] = [check_file, diagnose_file, load]


def case(**values: object) -> str:
    """A case file; the values are given as JSON text."""
    parts = {name: json.dumps(value) for name, value in EXAMPLE.items()} | {k: str(v) for k, v in values.items()}
    return "{" + ", ".join(f'"{name}": {text}' for name, text in parts.items()) + "}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (case(q=DEEP), "inside one another too deeply"),
        (case(q=f"[[{'9' * 400}, 1], [1, 2]]"), "q holds a number that is too large for float64"),
        (case(q=f"[[{'9' * 5000}, 1], [1, 2]]"), "is not valid JSON"),
        (case()[:-1] + ', "q": [[1, 2], [3, 4]]}', "gives 'q' twice"),
        (case(window='["a", 1]'), "window is"),
        ("", "is not valid JSON"),
        ("null", "expected a JSON object"),
        (b'{"q": "\xe4"}', "is not UTF-8 text"),
    ],
    ids=range(8),
)
def test_json_with_false_claims_is_refused(tmp_path: Path, text: str | bytes, words: str):
    place = tmp_path / "case.json"
    data = text.encode() if isinstance(text, str) else text
    place.write_bytes(data)
    reader = diagnose_file if b"theirs" in data else check_file
    with pytest.raises(ClearheadError) as caught:
        reader(place)
    assert words in str(caught.value)


def test_unusual_but_valid_json_is_read(tmp_path: Path):
    place = tmp_path / "case.json"
    place.write_bytes(b"\xef\xbb\xbf" + case(bias="[[-Infinity, 0], [0, null]]").encode())
    np.testing.assert_array_equal(check_file(place).trace.weights, [[0, 1], [1, 0]])
    place.write_text(case(q="[[9007199254740993, 36893488147419103232], [0e400, 1e-400]]"))
    np.testing.assert_array_equal(value_of("q", read(place, "qkv")["q"]), [[9007199254740993.0, 2.0**65], [0, 0]])
    assert numbers("theirs", [[float("nan")]]).dtype == np.float64
    assert precision([[1e300]], np.array([[1e300]])).dtype == np.float64
    place.write_text(case(theirs="[[NaN, 1], [0, Infinity]]"))
    assert diagnose_file(place).verdict != "right"
    place.write_text(case(theirs="[[0e400, 1], [0, 2]]"))
    diagnose_file(place)  # zero with any exponent is still zero


def header(shape: tuple[int, ...], dtype: str = "<f8") -> bytes:
    """The first bytes of a .npy file."""
    made = io.BytesIO()
    np.lib.format.write_array_header_1_0(made, {"descr": dtype, "fortran_order": False, "shape": shape})
    return made.getvalue()


def packed(place: Path, **entries: bytes) -> Path:
    with zipfile.ZipFile(place, "w") as made:
        for name, data in entries.items():
            made.writestr(f"{name}.npy", data)
    return place


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (header((10**6, 10**6)) + bytes(80), "not a readable .npz file"),
        (header((1,), "|O") + b"cos\nsystem\n", "allow_pickle=False.\n\nhint: leave out what is None"),
        (header((2, 2), "|V4") + bytes(16), "holds |V4: expected numbers"),
        (b"hello", "is no array"),
    ],
    ids=range(4),
)
def test_npz_with_false_claims_is_refused(tmp_path: Path, data: bytes, words: str):
    place = packed(tmp_path / "case.npz", q=data, k=header((2, 2)) + bytes(32), v=header((2, 2)) + bytes(32))
    with pytest.raises(ClearheadError) as caught:
        check_file(place)
    assert words in str(caught.value)


def test_other_kinds_of_files_named_npz_are_refused(tmp_path: Path):
    np.save(tmp_path / "one.npy", np.eye(2))
    shutil.copy(tmp_path / "one.npy", tmp_path / "renamed.npz")
    np.savez(tmp_path / "case.NPZ", **EXAMPLE)
    os.rename(tmp_path / "case.NPZ.npz", tmp_path / "case.NPZ")
    shutil.copy(tmp_path / "case.NPZ", tmp_path / "renamed.json")
    for name in ("one.npy", "renamed.npz"):
        with pytest.raises(FileError, match=r"is a \.npy file: one array without a name"):
            check_file(tmp_path / name)
    with pytest.raises(FileError, match=r"it is a NumPy file: write it by np\.savez, with the ending \.npz"):
        check_file(tmp_path / "renamed.json")
    np.testing.assert_array_equal(check_file(tmp_path / "case.NPZ").trace.q, EXAMPLE["q"])


def test_a_file_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    np.savez_compressed(tmp_path / "case.npz", q=np.zeros((1000, 100)), k=np.eye(2), v=np.eye(2))
    (tmp_path / "case.json").write_text(case(q=json.dumps(np.zeros((300, 100)).tolist())))
    for free, place, words in (
        (1_000_000, "case.npz", r"its arrays would take 1\.6 MB of memory, and 1\.0 MB are free"),
        (1_000_000, "case.json", r"cannot be read: it has more than 0\.0 MB"),
    ):
        for home in (files, room):
            monkeypatch.setattr(home, "free_bytes", lambda device="cpu", free=free: free)
        with pytest.raises(FileError, match=words):
            check_file(tmp_path / place)


def test_the_free_memory_is_known_and_at_most_the_machines():
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = Path("/proc/meminfo").read_text().splitlines()
    assert 0 < files.free_bytes() <= whole + sum(int(line.split()[1]) * 1024 for line in lines if "SwapFree" in line)
    code = (
        "import resource; from clearhead.core.room import free_bytes; "
        "resource.setrlimit(resource.RLIMIT_AS, (2**32, -1)); assert 2**30 < free_bytes() < 2**32"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


TENSORS = {"q": np.eye(2), "k": np.eye(2), "v": np.eye(2)}


@pytest.mark.parametrize(
    "data",
    [save(TENSORS)[:-1], struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 2 * len(DEEP)) + 2 * DEEP.encode()],
    ids=range(3),
)
def test_damaged_safetensors_are_refused(tmp_path: Path, data: bytes):
    place = tmp_path / "case.safetensors"
    place.write_bytes(data)
    for reader in (check_file, diagnose_file):
        with pytest.raises(FileError, match="is not a whole safetensors file"):
            reader(place)


@pytest.mark.parametrize("reader", READERS)
def test_paths_that_lead_to_no_file_are_refused(tmp_path: Path, reader: Callable[[Path], Any]):
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for name in ("nothing.safetensors", "folder.npz", "file"):
        with pytest.raises(FileError, match=rf"{name}.* (does not exist|is not|cannot be read)"):
            reader(tmp_path / name)


def test_a_folder_without_read_permission_is_refused(tmp_path: Path):
    folder = shutil.copytree(SHIPPED, tmp_path / "model")
    folder.chmod(0)
    with somebody_else(tmp_path):
        for reader in (load, lambda place: find(str(place))):
            with pytest.raises(FileError, match="Permission denied"):
                reader(folder)
    folder.chmod(0o700)


def test_json_output_for_nonfinite_values_is_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "case.json").write_text(case(q="[[NaN, 1], [1, 2]]", scores="[[Infinity, 1], [0, 2]]"))
    assert main(["trace", str(tmp_path / "case.json"), "--json", "-"]) == 1
    said = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert said["claims"][0]["largest_difference"] is None


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_damaged_weights_are_reported(tmp_path: Path, value: float):
    """Three changed bytes of a download are enough to make the shown numbers NaN."""
    place = Path(shutil.copytree(SHIPPED, tmp_path / "model"))
    weights = load_file(place / "model.safetensors")
    name = next(name for name in weights if name.endswith("h.1.mlp.c_fc.weight"))
    weights[name] = weights[name].astype(np.float32)
    weights[name][:, 3] = value
    save_file(weights, place / "model.safetensors")
    with pytest.raises(FileError, match=r"(NaN or infin).*: its weights are damaged, or too large"):
        steps_of_text("humpty dumpty", load(place))


def originals(place: Path) -> list[Path]:
    """One whole file of each kind."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 8)).round(3)
    arrays = {"q": q, "k": k, "v": v, "theirs": q @ k.swapaxes(-1, -2)}
    rules = {"causal": True, "window": [2, 0], "scale": 0.5, "sinks": [0.1, 0.2], "stage": "scores"}
    (place / "case.json").write_text(json.dumps({n: x.tolist() for n, x in arrays.items()} | rules))
    np.savez_compressed(place / "case.npz", **arrays, stage="scores")
    save_file(arrays, place / "case.safetensors", metadata={"causal": "true", "stage": "scores", "window": "[2, 0]"})
    return sorted(place.iterdir())


@pytest.mark.parametrize("count", [100, pytest.param(5_000, marks=pytest.mark.long)])
def test_damaged_files_give_a_result_or_a_library_error(tmp_path: Path, count: int):
    """Bytes changed, cut off, added and doubled, mostly near the start, where headers are."""
    rng, damaged = seeds.fresh(), tmp_path / "damaged"
    (tmp_path / "whole").mkdir()
    damaged.mkdir()
    for path in originals(tmp_path / "whole"):
        diagnose_file(path)  # undamaged it is right
        whole = path.read_bytes()
        for _ in range(count):
            data = bytearray(whole)
            for _ in range(rng.integers(1, 5)):
                at, size = int(len(data) * rng.random() ** 2), int(rng.integers(1, 9))
                new = (rng.bytes(size), b"\xff" * size, b"9" * size, b"", bytes(data[at : at + 8 * size]) * 2)
                data[at : at + size * rng.integers(0, 2)] = new[rng.integers(len(new))]
            (damaged / path.name).write_bytes(data[: None if rng.integers(4) else int(rng.integers(len(data) + 1))])
            with suppress(ClearheadError):
                diagnose_file(damaged / path.name)


@pytest.mark.parametrize("number", ["NaN", "1e308"])
def test_a_case_whose_numbers_overflow_has_a_page(tmp_path: Path, number: str):
    case = {"k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]], "scores": [[6.5, 10], [2, 3.5]]}
    place = tmp_path / "nan.json"
    place.write_text(json.dumps(case).replace("{", f'{{"q": [[{number}, 1], [1, 2]], ', 1))
    done = call("trace", place, "--html", "-")
    assert done.stderr == ""
    assert done.stdout.startswith("<!doctype html>")
