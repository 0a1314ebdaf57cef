"""Where a Transformers model's files are, and whether its config.json and its weights belong together.

A config.json can ask for any size, and Transformers builds that model and fills missing weights with random numbers. So
sizes are compared before anything is built, and missing weights are an error.
"""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from clearhead.core.room import check_room_for_file
from clearhead.errors import FileError
from clearhead.models.folder import one_line, weight_files

_FILES = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja"]
_SECONDS = 2.0  # to reach the hub


def folder(name: str) -> Path:
    """The directory of a model's files: `name` itself, or that model in the cache of the Hugging Face hub.

    A cached model is used without asking the network; any other is downloaded if the hub can be reached within two
    seconds. Raises FileError, which says what was tried.
    """
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    cache = constants.HF_HUB_CACHE
    tried = f"{name} is not a directory here, the cache {cache} has no config.json with safetensors of it, and"
    hint = "give --model the directory of a model, or owner/name as on huggingface.co."
    try:
        with suppress(OSError):  # raised where it is not in the cache
            cached = Path(snapshot_download(name, local_files_only=True))
            with suppress(FileError):  # a download that was cut off leaves some of its files
                if all(map(os.path.isfile, (cached / "config.json", *weight_files(cached)))):
                    return cached
        switches = {key: os.environ.get(key, "").upper() for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
        offline = [key for key, value in switches.items() if value in ("1", "ON", "YES", "TRUE")]
        if offline:
            raise FileError(f"{tried} {offline[0]} does not allow downloading it.", hint)
        address = getproxies().get("https") or constants.ENDPOINT
        if not _reachable(address):
            raise FileError(f"{tried} {urlsplit(address).hostname} cannot be reached to download it.", hint)
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except HFValidationError:
        raise FileError(f"{name!r} is not a directory here, and no model can have that name.", hint) from None
    except RepositoryNotFoundError:
        raise FileError(f"{tried} {constants.ENDPOINT} has no such model, or only for its owner.", hint) from None
    except OSError as error:
        raise FileError(f"{tried} it cannot be downloaded: {one_line(error)}", hint) from None


def check_sizes(place: Path, built: Any) -> None:
    """Refuse a model (built on PyTorch's meta device) with more parameters than its files have, or than fit memory."""
    stored = sum(path.stat().st_size for path in weight_files(place))
    parameters = sum(x.numel() for x in built.parameters())
    if parameters > 2 * stored:  # a number has four bits at least
        raise FileError(
            f"{place}: config.json makes a model of {parameters:,} parameters, but the weights have {stored:,} bytes.",
            "do config.json and the weights belong together?",
        )
    others = sum(x.numel() * x.element_size() for x in built.buffers())
    check_room_for_file(place, 4 * parameters + others, "this model in float32")


def _reachable(address: str) -> bool:
    """Does a server answer soon? Asked in a thread, since looking up a name can take longer than any timeout."""
    place = urlsplit(address if "//" in address else f"//{address}")
    answered = threading.Event()

    def connect() -> None:
        with suppress(OSError):
            port = place.port or {"https": 443, "http": 80}.get(place.scheme, 3128)
            socket.create_connection((place.hostname or "", port), _SECONDS).close()
            answered.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return answered.is_set()
