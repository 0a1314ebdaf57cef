"""Damaged files for every reader, in a process of its own: `python -m tests.damaged_files SEED COUNT [NUMBER]`.

Draws COUNT damaged files from SEED and reads each; ends with a report at the first that raises anything but one of the
library's own errors, or takes more memory than a whole file could need. With NUMBER only that one is read again. What
is being read stands in the last line of output, so that a process that died says of what.
"""

import io
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import clearhead as ch
from benchmarks.memory import peak
from clearhead.diagnosing.claims import check_file
from clearhead.diagnosing.diagnose import diagnose_file
from clearhead.errors import ClearheadError
from clearhead.explaining.steps import steps_of_text
from clearhead.models.finding import load_model
from clearhead.watching import saved
from clearhead.watching.layer import Layer

GROWTH = 512 * 2**20  # bytes that reading one small file may take
VALUES = [
    "0", "-1", "1e400", "9" * 400, "1e-400", "NaN", "-Infinity", "null", "true", '""', '"x"', "[]", "{}", "[[]]",
    "[1, [2]]", "[" * 5000 + "]" * 5000, "1099511627776", "9223372036854775808", "[1e308, 1e308]", '{"a": 1}', "2.5",
    '"\\ud800"', "0.0",
]  # fmt: skip


def originals(place: Path) -> dict[str, Path]:
    """One whole file of each kind."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 8)).round(3)
    theirs = q @ k.swapaxes(-1, -2)
    rules = {"causal": True, "window": [2, 0], "scale": 0.5, "sinks": [0.1, 0.2], "query_offset": 0}
    case = {"q": q.tolist(), "k": k.tolist(), "v": v.tolist(), **rules}
    (place / "trace.json").write_text(json.dumps({**case, "scores": theirs.tolist()}))
    (place / "diagnose.json").write_text(json.dumps({**case, "theirs": theirs.tolist(), "stage": "scores"}))
    x, w = rng.standard_normal((4, 8)), rng.standard_normal((4, 8, 8))
    layer = dict(zip(("w_q", "w_k", "w_v", "w_o"), w, strict=True))
    np.savez(place / "trace.npz", x=x, **layer, num_heads=2, causal=True)
    np.savez_compressed(place / "diagnose.npz", q=q, k=k, v=v, theirs=theirs, stage="scores")
    np.save(place / "trace.npy", q)
    words = {"causal": "true", "stage": "scores", "window": "[2, 0]"}
    save_file({"q": q, "k": k, "v": v, "theirs": theirs}, place / "diagnose.safetensors", metadata=words)
    save_file({"x": x, **layer}, place / "trace.safetensors", metadata={"num_heads": "2"})
    record(place / "seen.safetensors", q, k)
    shipped = Path(str(files("clearhead") / "models" / "rhymes"))
    model(shipped, place / "model")
    return {path.name: path for path in sorted(place.iterdir())}


def record(place: Path, q: Any, k: Any) -> None:
    """What seen.save writes for a model of one layer."""
    seen = ch.AttentionMatrix(q[None], k[None], causal=True).observe(logsumexp=True, entropy=True, received=True, top=2)
    layer = Layer("0", "h.0", (0, 1), seen, {"causal": True}, q[None], k[None])
    saved.write(place, [layer], {"model": "m", "tokens": [["a", "b", "c", "d"]], "source_tokens": []})


def model(shipped: Path, place: Path) -> None:
    """A very small model in GPT-2 layout with the shipped tokenizer's words."""
    place.mkdir()
    tokenizer = json.loads((shipped / "tokenizer.json").read_text())
    vocabulary = len(tokenizer["model"]["vocab"])
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 4, "n_positions": 8, "vocab_size": vocabulary}
    (place / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    linear = {"attn.c_attn": (4, 12), "attn.c_proj": (4, 4), "mlp.c_fc": (4, 16), "mlp.c_proj": (16, 4)}
    shapes = {f"h.0.{name}.weight": shape for name, shape in linear.items()}
    shapes |= {f"h.0.{name}.bias": shape[1:] for name, shape in linear.items()}
    shapes |= {f"{name}.{kind}": (4,) for name in ("h.0.ln_1", "h.0.ln_2", "ln_f") for kind in ("weight", "bias")}
    shapes |= {"wte.weight": (vocabulary, 4), "wpe.weight": (8, 4)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(arrays, place / "model.safetensors")


def read(path: Path) -> None:
    """Read a file by the reader for its suffix, and use what was read."""
    if path.is_dir():
        result = load_model(str(path))
        json.dumps(steps_of_text("humpty dumpty", result).to_json(), allow_nan=False)
    elif path.name.startswith("seen"):
        seen = ch.load(path)
        repr(seen), [seen.layer(name) for name in seen.layers]
    elif path.name.startswith("diagnose"):
        str(diagnose_file(path))
    else:
        json.dumps(check_file(path).to_json(), allow_nan=False)


def damaged(path: Path, rng: random.Random) -> list[str]:
    """Damage a file in place, or one of a directory's; returns what was done."""
    if path.is_dir():
        path = rng.choice(sorted(path.iterdir()))
    by_suffix = {".json": [valued] * 6, ".safetensors": [headed] * 6, ".npz": [repacked] * 6, ".npy": [claimed] * 4}
    ways = [flipped, cut, grown, doubled, *by_suffix.get(path.suffix, [])]
    done = [rng.choice(ways) for _ in range(rng.choice((1, 1, 2)))]
    data = path.read_bytes()
    for way in done:
        try:
            data = way(data, rng)
        except Exception:
            data = flipped(data, rng)  # the first damage left nothing for the second
    path.write_bytes(data)
    return [path.name, *(way.__name__ for way in done)]


def flipped(data: bytes, rng: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(rng.choice((1, 2, 8, 50))):
        if result:
            result[min(rng.randrange(len(result)), rng.randrange(len(result)))] = rng.randrange(256)
    return bytes(result)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice((0, 1, 8, len(data) - 1, rng.randrange(len(data) + 1)))]


def grown(data: bytes, rng: random.Random) -> bytes:
    more = rng.randbytes(rng.choice((1, 8, 1000)))
    return more + data if rng.random() < 0.3 else data + more


def doubled(data: bytes, rng: random.Random) -> bytes:
    place, length = rng.randrange(len(data) + 1), rng.randrange(64)
    return data[:place] + data[place : place + length] * 2 + data[place + length :]


def valued(data: bytes, rng: random.Random) -> bytes:
    """Another value somewhere in JSON, which stays JSON, mostly."""
    spots: list[tuple[Any, Any]] = []
    whole = json.loads(data)
    level = [whole]
    for _ in range(4):
        local = [(part, key) for part in level for key in (part if isinstance(part, dict) else range(len(part)))]
        spots += rng.sample(local, min(8, len(local)))
        level = [part[key] for part, key in local if isinstance(part[key], (dict, list))]
    part, key = rng.choice(spots)
    part[key] = "@hostile@"
    return json.dumps(whole).replace('"@hostile@"', rng.choice(VALUES)).encode()


def headed(data: bytes, rng: random.Random) -> bytes:
    """Another value in a safetensors header, or in the JSON inside its metadata."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    words = header.get("__metadata__", {})
    if words and rng.random() < 0.5:
        name = rng.choice(sorted(words))
        inner = words[name].encode()
        words[name] = (valued(inner, rng) if inner[:1] in b"{[" else rng.choice(VALUES).encode()).decode()
        text = json.dumps(header).encode()
    elif rng.random() < 0.3:
        entry = header[rng.choice([name for name in header if name != "__metadata__"])]
        entry["shape"] = rng.choice(([2**40, 2**40], entry["shape"][::-1], [*entry["shape"], 1], []))
        text = json.dumps(header).encode()
    else:
        text = valued(json.dumps(header).encode(), rng)
    return struct.pack("<Q", rng.choice((len(text), len(text), len(text), 2**62))) + text + data[8 + length :]


def repacked(data: bytes, rng: random.Random) -> bytes:
    """One array of an .npz with another claim or other bytes."""
    with zipfile.ZipFile(io.BytesIO(data)) as stored:
        parts = {entry.filename: stored.read(entry) for entry in stored.infolist()}
    name = rng.choice(sorted(parts))
    way = rng.choice((claimed, claimed, flipped, cut, typed))
    parts[name] = way(parts[name], rng)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as target:
        for each, part in parts.items():
            target.writestr(each, part)
    return made.getvalue()


def claimed(data: bytes, rng: random.Random) -> bytes:
    """Another shape in a .npy header."""
    start = data.index(b"'shape': (")
    end = data.index(b")", start)
    shape = rng.choice(
        ("1048576, 1048576", "9" * 30, "-1, 4", "0, 9999999999999", "2, 4, 8, 1", "", "True,", "4" + ", 1" * 90)
    )
    return data[:start] + b"'shape': (" + shape.encode() + data[end:]


def typed(data: bytes, rng: random.Random) -> bytes:
    """Another dtype in a .npy header."""
    dtype = rng.choice((">f8", "<f2", "|O", "<U2", "|V8", "<c16", "<i8", "|b1", "<M8[s]", "<U0", "<f4", "<u8"))
    start = data.index(b"'descr': '") + 10
    return data[:start] + dtype.encode() + data[data.index(b"'", start) :]


def one(whole: dict[str, Path], place: Path, seed: int, number: int) -> str:
    """Read one damaged file; returns how it went."""
    rng = random.Random(f"{seed} {number}")
    original = whole[rng.choice(sorted(whole))]
    path = place / original.name
    (shutil.copytree if original.is_dir() else shutil.copy)(original, path)
    done = damaged(path, rng)
    print(f"{seed} {number}: {original.name} {done}", flush=True)
    try:
        read(path)
        return "read"
    except ClearheadError as error:
        return f"{type(error).__name__}: {error.one_line()[:200]}"
    finally:
        (shutil.rmtree if path.is_dir() else Path.unlink)(path)


def main() -> int:
    """Read what SEED draws; the exit code says whether all went well."""
    seed, count = (int(word) for word in sys.argv[1:3])
    numbers = [int(sys.argv[3])] if len(sys.argv) > 3 else range(count)
    warnings.simplefilter("error")
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(errors="backslashreplace")  # an error may quote characters that no encoding can write
    with tempfile.TemporaryDirectory() as folder:
        whole_place, place = Path(folder) / "whole", Path(folder) / "damaged"
        whole_place.mkdir()
        place.mkdir()
        whole = originals(whole_place)
        for path in whole.values():
            if path.suffix != ".npy":
                read(path)  # undamaged they are right
        before = peak()
        pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (pages + 2 * GROWTH, resource.RLIM_INFINITY))
        for number in numbers:
            try:
                print(one(whole, place, seed, number), flush=True)
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                return 1
            grown_by = peak() - before
            if grown_by > GROWTH:
                print(f"the memory grew by {grown_by / 1e6:.0f} MB")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
