"""Models where programs keep them: the list says what runs, and files that are no whole models have a sentence each."""

import json
import os
import shutil
from contextlib import suppress

import numpy as np
import pytest

hf = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

import clearhead as ch  # noqa: E402
from clearhead.arguments import columns  # noqa: E402
from clearhead.cli import main  # noqa: E402
from clearhead.errors import ClearheadError, FileError  # noqa: E402
from clearhead.models.finding import models_here  # noqa: E402
from clearhead.models.model import load  # noqa: E402
from decoder_peers import SIZES, peer_of  # noqa: E402
from dense_gpt2 import SHIPPED as FOLDER  # noqa: E402
from gguf_files import write  # noqa: E402
from seeds import fresh  # noqa: E402

FILE = "application/vnd.ollama.image.model"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("file") / "model.gguf", peer_of("llama 3"))


def studio(home, *names, of=None):
    """A folder of LM Studio with files of these names."""
    place = home / ".lmstudio" / "models" / "someone" / "tiny"
    place.mkdir(parents=True)
    for name in names:
        shutil.copy(of, place / name)
    return place


def ollama(home, file, place, *more):
    """A manifest of Ollama's at this place, and the file it names as the model and as `more` kinds of layers."""
    models = home / ".ollama" / "models"
    manifest, blob = models / "manifests" / place, models / "blobs" / "sha256-abc"
    for path in (manifest, blob):
        path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, blob)
    layers = [FILE, *(FILE.replace("model", kind) for kind in more)]
    manifest.write_text(json.dumps({"layers": [{"mediaType": kind, "digest": "sha256:abc"} for kind in layers]}))


def listed(name):
    return {each["name"]: each for each in models_here()}[name]


def test_a_split_model_is_one_and_its_missing_part_is_named(home):
    peer, whole = peer_of("qwen3"), studio(home)
    write(whole / "tiny.gguf", peer, split=13)
    parts = sorted(whole.glob("*.gguf"))
    assert len(parts) > 2
    one = listed("lmstudio:someone/tiny")
    assert (one["reason"], one["size"]) == ("", "0.3 MB")
    ids = list(range(9))
    first, other = (np.asarray(load(place).run(ids).logits) for place in (parts[0], parts[-1]))
    np.testing.assert_array_equal(first, other)
    np.testing.assert_array_equal(first, np.asarray(load(write(home / "one.gguf", peer)).run(ids).logits))
    parts[1].unlink()
    for place in (parts[0], parts[-1]):
        with pytest.raises(FileError, match=rf"one of {len(parts)} parts, and {parts[1].name} is not beside it"):
            load(place)
    assert parts[1].name in listed("lmstudio:someone/tiny")["reason"]


def test_a_projector_beside_a_model_does_not_hide_it(home, file):
    place = studio(home, "model.gguf", of=file)
    writer = gguf.GGUFWriter(place / "mmproj-model.gguf", "clip")
    writer.add_tensor("v.patch", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert ch.load_model("lmstudio:tiny").config.layers == 3
    assert not listed("lmstudio:someone/tiny")["reason"]
    with pytest.raises(FileError, match="is an image projector, and no model by itself"):
        load(place / "mmproj-model.gguf")
    shutil.copy(file, place / "other.gguf")
    names = [each["name"] for each in models_here()[1:] if each["name"].startswith("lmstudio")]
    assert names == ["lmstudio:someone/tiny/model", "lmstudio:someone/tiny/other"]
    assert [ch.load_model(name).name for name in names] == names


def test_ollamas_names_from_other_hosts_are_found(home, file):
    ollama(home, file, "hf.co/Owner/Tiny-GGUF/Q4_K_M")
    ollama(home, file, "registry.ollama.ai/library/tuned/latest", "adapter")
    assert ch.load_model("ollama:hf.co/owner/tiny-gguf:Q4_K_M").config.layers == 3
    assert not listed("ollama:hf.co/Owner/Tiny-GGUF:Q4_K_M")["reason"]
    assert "adapter" in listed("ollama:tuned")["reason"]
    with pytest.raises(FileError, match="it has an adapter, and adapters are not supported"):
        ch.load_model("ollama:tuned")


def test_the_branch_of_the_cache_counts_and_not_the_last_snapshot(home):
    kept = home / "hub" / "models--owner--tiny"
    for commit in ("0a", "ff"):
        shutil.copytree(FOLDER, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0a")
    assert listed("owner/tiny")["place"].endswith("0a")
    (kept / "refs" / "main").unlink()
    assert listed("owner/tiny")["place"].endswith("ff")


@pytest.mark.parametrize("what", ["tokenizer", "tensors", "keys", "no tokenizer"])
def test_the_list_says_what_loading_would_say(home, what):
    if what == "no tokenizer":
        shutil.copytree(FOLDER, place := home / "hub" / "models--owner--tiny" / "snapshots" / "0a")
        (place / "tokenizer.json").unlink()
        name = "owner/tiny"
    else:
        name, place = "lmstudio:someone/tiny", studio(home)

        def more(writer):
            if what == "tensors":
                writer.add_tensor("blk.0.attn_sinks", np.zeros(6, np.float32))
            if what == "keys":
                writer.add_float32("llama.of_tomorrow", 2.0)
            if what == "tokenizer":
                writer.kv_data[0].pop("tokenizer.ggml.pre")
                writer.add_tokenizer_pre("unheard-of")

        write(place / "tiny.gguf", peer_of("llama 3"), more=more)
    reason = listed(name)["reason"]
    with pytest.raises(FileError) as caught:
        load(place if name == "owner/tiny" else place / "tiny.gguf")
    assert reason == caught.value.what


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "is a pointer of Git LFS"),
        (b"\n<!DOCTYPE html><html><title>model</title></html>", "is a web page, not a model"),
        (None, "is not whole|not a whole"),
    ],
    ids=["pointer", "page", "truncated"],
)
def test_what_stands_in_a_files_place_is_named(tmp_path, file, data, words):
    (tmp_path / "model.gguf").write_bytes(data or file.read_bytes()[:-64])
    with pytest.raises(FileError, match=words):
        load(tmp_path / "model.gguf")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        place = tmp_path / name.partition(".")[0]
        shutil.copytree(FOLDER, place)
        whole = (place / name).read_bytes()
        (place / name).write_bytes(data or whole[:-64])
        known = data and not (name == "tokenizer.json" and b"html" in data)
        said = words if known else "cut off|not valid|cannot be read"
        with pytest.raises(FileError, match=said):
            load(place)


@pytest.mark.parametrize(("kind", "words"), [(24, "the type I8"), (9, "the type Q8_1"), (9999, "the type number 9999")])
def test_a_type_that_is_not_unpacked_is_named(tmp_path, file, kind, words):
    data, name = file.read_bytes(), b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16  # behind the number of axes and both of them
    (tmp_path / "model.gguf").write_bytes(data[:at] + kind.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(FileError, match=rf"`blk\.0\.attn_q\.weight` has {words}, which the package gguf does not"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data, at: data[:4] + (3).to_bytes(4, "big") + data[8:], "is a big-endian GGUF file"),
        (lambda data, at: data[:at] + (30).to_bytes(4, "little") + data[at + 4 :], "begins at byte .* expected"),
        (lambda data, at: data[: at + 4] + b"\1" + data[at + 5 :], "`blk.0.attn_norm.weight` begins at byte"),
        (lambda data, at: data.replace(b"gpt-2", b"gpt\xff2"), "splits texts as 'gpt"),
        (lambda data, at: data.replace(b"ggml.merges", b"ggml.mergez"), "has no tokenizer.ggml.merges"),
    ],
    ids=["big-endian", "another type", "another place", "no UTF-8", "no merges"],
)
def test_a_header_that_contradicts_itself_is_named(tmp_path, file, change, words):
    data, name = file.read_bytes(), b"blk.0.attn_norm.weight"
    (tmp_path / "model.gguf").write_bytes(change(data, data.index(name) + len(name) + 4 + 8))
    with pytest.raises(FileError, match=words):
        load(tmp_path / "model.gguf")


def test_names_are_found_as_people_write_them(home, file):
    studio(home, "Tiny-Q4.gguf", of=file)
    shutil.copy(file, home / "a file.gguf")
    shutil.copytree(FOLDER, home / "hub" / "models--Owner--Tiny" / "snapshots" / "0a")
    for kind, names in (("one", ["Q4"]), ("two", ["Q4", "Q8"])):
        place = home / "hub" / f"models--owner--{kind}" / "snapshots" / "0a"
        place.mkdir(parents=True)
        for name in names:
            shutil.copy(file, place / f"{name}.gguf")
    names = "~/a file.gguf", "lmstudio:Tiny-Q4", "lmstudio:someone/tiny/tiny-q4.gguf", "owner/one", "owner/two/Q8.gguf"
    assert {ch.load_model(name).config.layers for name in names} == {3}
    names = "owner/tiny", "hf:Owner/Tiny", "hf.co/Owner/Tiny", "https://huggingface.co/Owner/Tiny"
    assert {ch.load_model(name).config.layers for name in names} == {2}
    with pytest.raises(FileError, match=r"owner/two has several GGUF files[\s\S]*owner/two/q4, owner/two/q8"):
        ch.load_model("owner/two")
    (home / "model.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(FileError, match=r"is no GGUF file\.\s+hint: give the folder"):
        ch.load_model(home / "model.safetensors")


def test_a_file_that_becomes_shorter_is_an_error(tmp_path, file):
    place = tmp_path / "model.gguf"
    shutil.copy(file, place)
    model = load(place)
    model.run([1, 2])
    os.truncate(place, 4096)
    with pytest.raises(FileError, match="became shorter"):
        model.run([1, 2])


def test_what_numpy_refuses_runs_through_transformers(tmp_path):
    sizes = {key: value for key, value in SIZES.items() if key != "eos_token_id"}
    peer = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    peer.save_pretrained(tmp_path)
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    (tmp_path / "config.json").write_text(json.dumps(stated | {"rope_parameters": rope}))
    with pytest.raises(FileError, match="its rotary positions cannot be read"):
        load(tmp_path)
    assert type(ch.load_model(tmp_path)).__name__ == "HubModel"


def test_a_text_that_is_no_unicode_and_a_reply_too_long_are_refused():
    model = load()
    with pytest.raises(FileError, match="character 1 is a lone surrogate"):
        model.tokenizer.tokens("a\ud800")
    count = model.config.positions
    with pytest.raises(ch.errors.ShapeError, match=rf"the text has 2 tokens and the reply {count}, but"):
        model.generate([1, 2], count)


def test_models_are_found_where_ollama_and_lm_studio_keep_them(home, file, capsys):
    ollama(home, file, "registry.ollama.ai/library/tiny/1b")
    (studio(home) / "tiny.gguf").write_bytes(file.read_bytes()[:1000])
    assert ch.load_model("ollama:tiny:1b").config.layers == 3
    with pytest.raises(FileError, match=r"Ollama has no model other here[\s\S]*ollama:tiny:1b"):
        ch.load_model("ollama:other")
    with pytest.raises(FileError, match="not a whole GGUF file"):
        ch.load_model("lmstudio:tiny")
    listed = {each["name"]: each for each in models_here()}
    assert listed["ollama:tiny:1b"]["family"] == "llama"
    assert not listed["ollama:tiny:1b"]["reason"]
    assert "GGUF" in listed["lmstudio:someone/tiny"]["reason"]
    assert listed["(the shipped model)"]["family"] == "gpt2"
    assert main(["models", "--lang", "zh"]) == 0
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.partition("\n\n")[0].splitlines())
    assert shown["（自带的模型）"].strip() == "gpt2，399 万个参数，F16，8.0 MB"
    assert listed["lmstudio:someone/tiny"]["reason"] in shown["lmstudio:someone/tiny"]
    assert len({columns(name + facts) - columns(facts.lstrip()) for name, facts in shown.items()}) == 1


@pytest.mark.parametrize(
    "damages", [200, pytest.param(600, marks=pytest.mark.gate), pytest.param(4000, marks=pytest.mark.long)]
)
def test_damaged_gguf_files_get_one_error(tmp_path, file, damages):
    """Damages of a header, each read without a crash, a hang or another error than our own."""
    data = bytearray(file.read_bytes())
    rng, place = fresh(), tmp_path / "damaged.gguf"
    header, kept = data.index(b"token_embd.weight"), 0
    place.write_bytes(data.replace(b"blk.0.attn_q.weight", b"blk_0_attn_q_weight"))
    with pytest.raises(ClearheadError, match="attn_q"):
        load(place)
    place.write_bytes(data[:24] + b"\xff" * 4 + data[28:])  # the length of the first key
    with pytest.raises(FileError, match="a text is longer than the file"):
        load(place)
    for trial in range(damages):
        copy = bytearray(data if trial % 4 else data[: int(rng.integers(0, len(data)))])
        for _ in range(int(rng.integers(1, 4))):
            if len(copy) > 8:
                start = int(rng.integers(0, min(len(copy) - 8, header + 4000)))
                size = int(rng.integers(1, 9))
                copy[start : start + size] = rng.choice([rng.bytes(size), b"\xff" * size, b"\0" * size])
        place.write_bytes(copy)
        with suppress(ClearheadError):
            load(place)
            kept += 1
    assert kept < damages


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(peer_of("qwen2").config.to_dict()), encoding="utf-8")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model.safetensors"}}')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileError, match=f"{name} is no ordinary file"):
        load(tmp_path)
