"""Saved recordings of ch.watch: loading gives the same again, and every incomplete file a clear error."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

import clearhead as ch
from clearhead.errors import SelectionError
from watched import build, inputs, seen_of


def watched(name: str, padding: str = "", dtype: torch.dtype = torch.float32) -> Any:
    model = build(name).to(dtype)
    asked: dict[str, Any] = {"entropy": True, "received": True, "peak": True, "distance": True, "max_logit": True}
    return seen_of(model, inputs(name, padding), top=3, image=(3, 4), **asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "padding"), [("gpt-oss", "left"), ("t5", "right"), ("gemma2", "right"), ("vit", "")])
def test_a_loaded_file_holds_what_was_saved(tmp_path: Path, name: str, padding: str, dtype: torch.dtype):
    if dtype == torch.bfloat16 and name == "vit":
        return  # its pictures are float32
    seen = watched(name, padding, dtype)
    seen.save(tmp_path / "seen.safetensors")
    again = ch.load(tmp_path / "seen.safetensors")
    assert (again.layers, again.tokens, again.model) == (seen.layers, seen.tokens, seen.model)
    for layer in seen.layers:
        np.testing.assert_array_equal(again.matrix(layer)[...], seen.matrix(layer)[...].numpy())
        for part in ("logsumexp", "entropy", "received", "peak", "distance", "max_logit", "image"):
            np.testing.assert_array_equal(getattr(again[layer], part), getattr(seen[layer], part).numpy())
        for one, other in zip(again[layer].top, seen[layer].top, strict=True):
            np.testing.assert_array_equal(one, other.numpy())
    assert [p.name for p in tmp_path.iterdir()] == ["seen.safetensors"]
    assert str(again.summary()) == str(seen.summary())


def test_another_suffix_is_refused(tmp_path: Path):
    with pytest.raises(ch.errors.FileError, match=r"seen.npz is the name of neither a page nor a safetensors file"):
        watched("gpt2").save(tmp_path / "seen.npz")
    assert list(tmp_path.iterdir()) == []


def header(data: bytes) -> dict[str, Any]:
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def with_words(data: bytes, **changes: Any) -> bytes:
    """The same file with some of its text replaced."""
    head = header(data)
    words = json.loads(head["__metadata__"]["watch"]) | changes
    head["__metadata__"]["watch"] = json.dumps(words)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + struct.unpack("<Q", data[:8])[0] :]


def test_incomplete_files_are_refused(tmp_path: Path):
    place = tmp_path / "seen"
    watched("gpt2").save(place)
    data = place.read_bytes()
    layers = json.loads(header(data)["__metadata__"]["watch"])["layers"]
    faults = {
        "does not exist": None,
        "not a whole safetensors file": data[:-7],
        "not a whole": data[:5],
        "format 7": with_words(data, format=7),
        "not a whole record": with_words(data, layers=[{**layers[0], "queries": 5}]),
        "two layers have one name": with_words(data, layers=[layers[0], {**layers[1], "name": "0"}]),
        "TypeError": with_words(data, layers=[3]),
        "not written by seen.save": save({"x": np.zeros(3, np.float32)}),
        "unknown rule": with_words(data, layers=[{**layers[0], "rules": {"caus": True}}, layers[1]]),
    }
    for said, fault in faults.items():
        what = re.escape(said)
        place.unlink(missing_ok=True)
        if fault is not None:
            place.write_bytes(fault)
        with pytest.raises(ch.errors.FileError, match=what):
            ch.load(place)


def test_a_sequence_outside_the_batch_is_refused():
    with pytest.raises(SelectionError, match=r"^batch 9 is outside 0\.\.1"):
        watched("gpt-oss", "left").to_svg(batch=9)
