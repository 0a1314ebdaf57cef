"""Files that appear whole or not at all, and texts as people keep them."""

import os
import sys
import tempfile
from pathlib import Path

from clearhead.errors import FileError


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` beside its place first, then move it there. Raises FileError when that cannot be done."""
    place = Path(path)
    try:
        handle, beside = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(beside, 0o666 & ~_umask())
            os.replace(beside, place)
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}.") from None


def read_text(path: str) -> str:
    """A text in UTF-8; - is standard input. Raises FileError."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}.") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
