"""Writes files whole or not at all; reads files with limits on their size and encoding."""

import errno
import json
import mmap
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Any

from clearhead.core.room import OF_FILES, free_bytes, written
from clearhead.errors import FileError

STANDARD = "-"  # standard input or output, as on the command line
_MOST_TEXT = 2**30  # bytes of a text or of JSON
_JSON_COST = 32  # bytes of memory that one byte of JSON can need: "1.0," becomes a Decimal of 104 bytes and a pointer


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that its old or its new content is there, never half of one; - is standard output.

    A regular file is replaced by a finished one beside it, with the old one's mode. Where `path` is a symbolic link,
    the file that it leads to is written and the link stays. A device or a pipe is written to. Raises FileError, and
    leaves no temporary file behind.
    """
    with _said(path, "written"):
        name = _name(path)
        if name == STANDARD:
            _write_standard(data)
        else:
            old = _checked(name)
            if old is None or stat.S_ISREG(old.st_mode):
                _replace(os.path.realpath(name), old, data)
            else:
                _write_all(os.open(name, os.O_WRONLY), data)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise FileError now where `write_whole` could not write later: a folder, a missing folder, no permission."""
    with _said(path, "written"):
        name = _name(path)
        if name != STANDARD:
            _checked(name)


def read_bytes(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """All of a file, at most `most` bytes; - is standard input. Raises FileError.

    None allows half of the free memory, since the data are copied when they become arrays.
    """
    with _said(path, "read"):
        name = _name(path)
        allowed = free_bytes() // 2 if most is None else most
        if name != STANDARD:
            with open(name, "rb") as file:
                fits = os.fstat(file.fileno()).st_size <= allowed
                data = _limited(file, allowed) if fits else None
        elif sys.stdin is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        else:
            data = _limited(sys.stdin.buffer, allowed)
        if data is None:
            raise FileError(f"{path} cannot be read: it has more than {written(allowed, OF_FILES)}.")
        _check_pointer(path, data[:100])
        return data


def _check_pointer(path: object, start: bytes, *, page: bool = False) -> None:
    """Raise FileError if a file is a pointer of Git LFS or, with `page`, a web page instead of the download."""
    if start.startswith(b"version https://git-lfs"):
        what = f"{path} is a pointer of Git LFS, not the file itself."
        raise FileError(what, "git lfs pull, in its folder.")
    if page and start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        what = f"{path} is a web page, not a model's file."
        raise FileError(what, "download the file itself; on huggingface.co its address has /resolve/ in it.")


def mapped(path: str | os.PathLike[str]) -> mmap.mmap:
    """A file's bytes, memory-mapped for reading. Raises FileError."""
    with _said(path, "read"):
        check_waits(path)
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:  # which cannot be mapped
                raise FileError(f"{path} cannot be read: it is empty.")
            _check_pointer(path, file.read(100), page=True)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def check_waits(path: str | os.PathLike[str]) -> None:
    """Raise FileError for a pipe or a device where a file of a model is expected: opening it may wait for ever."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise FileError(f"{path} is no ordinary file.")


def read_text(path: str) -> str:
    """A text in UTF-8 without the newline that ends its last line; - is standard input. Raises FileError."""
    text = _decoded(path, read_bytes(path, _MOST_TEXT))
    return text.removesuffix("\n").removesuffix("\r")


def json_of(path: str | os.PathLike[str], *, number: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """A JSON object from a file; see `object_of`. Raises FileError."""
    most = min(_MOST_TEXT, free_bytes() // _JSON_COST)
    data = read_bytes(path, most)
    _check_pointer(path, data[:100], page=True)
    return object_of(_decoded(path, data), str(path), number=number)


def toml_of(package: str, name: str) -> dict[str, Any]:
    """Read a TOML file in one of clearhead's packages, such as "clearhead.models"."""
    import tomllib

    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def object_of(text: str, name: str, *, number: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """A JSON object from a text.

    number    converts the text of a number that has a point or an exponent; None stands for float
    NaN and Infinity, which JSON lacks but Python's json.dumps writes, are read as floats. Raises FileError for text
    that is not a JSON object, for a name given twice, and for nesting that Python cannot read.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        known = dict(pairs)
        if len(known) < len(pairs):
            names = [key for key, _ in pairs]
            raise FileError(f"{name} gives {next(key for key in known if names.count(key) > 1)!r} twice.")
        return known

    try:
        data = json.loads(text, parse_float=number, object_pairs_hook=once)
    except FileError:
        raise
    except RecursionError:
        raise FileError(f"{name} has lists or objects inside one another too deeply.") from None
    except ValueError as error:
        raise FileError(f"{name} is not valid JSON: {error}.") from None
    except ArithmeticError:
        raise FileError(f"{name} is not valid JSON: the exponent of a number is out of range.") from None
    if not isinstance(data, dict):
        raise FileError(f"{name} holds a {type(data).__name__}: expected a JSON object.")
    return data


@contextmanager
def _said(path: object, done: str) -> Iterator[None]:
    """Turn the system's errors into FileError; BrokenPipeError passes through, since the command line handles it."""
    if path == STANDARD:
        path = "standard output" if done == "written" else "standard input"
    try:
        yield
    except (BrokenPipeError, FileError):
        raise
    except FileNotFoundError:
        if done == "read":
            raise FileError(f"{path} does not exist.") from None
        raise FileError(f"{path} cannot be written: its folder does not exist.") from None
    except OSError as error:
        raise FileError(f"{path} cannot be {done}: {error.strerror or error}.") from None
    except (TypeError, ValueError) as error:  # no name at all, or one with a null character
        raise FileError(f"{path!r} cannot be {done}: {error}.", "expected a file's name.") from None


def _name(path: str | os.PathLike[str]) -> str:
    name = os.fsdecode(path)
    if not name:
        raise ValueError("the name is empty")
    return name


def _checked(name: str) -> os.stat_result | None:
    """The status of the file to write to, None for a new file. Raises OSError where it cannot be written."""
    old: os.stat_result | None = None
    try:
        old = os.stat(name)
    except FileNotFoundError:  # or a link to what is not there yet
        if name.endswith(("/", os.sep)):
            raise
    if old is not None and not stat.S_ISREG(old.st_mode) and not stat.S_ISDIR(old.st_mode):
        return old  # a pipe, which may wait for a reader when it is opened
    if old is not None:
        os.close(os.open(name, os.O_WRONLY))
    folder = os.path.join(os.path.dirname(os.path.realpath(name)), "")
    os.stat(folder)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, f"{os.strerror(errno.EACCES)} in {folder}")
    return old


def _replace(name: str, old: os.stat_result | None, data: bytes) -> None:
    """Write a temporary file in the same folder and rename it to `name`; a new file's mode follows the umask."""
    beside = os.path.join(os.path.dirname(name), f".clearhead-{os.urandom(8).hex()}")
    mode = 0o666 if old is None else 0o600
    try:
        binary = getattr(os, "O_BINARY", 0)
        _write_all(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | binary, mode), data, sync=True)
        if old is not None:
            os.chmod(beside, stat.S_IMODE(old.st_mode) & 0o777)
        os.replace(beside, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def _write_all(descriptor: int, data: bytes, *, sync: bool = False) -> None:
    """Write and close. With `sync`, wait for the disk, so that a full disk raises here."""
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        try:
            if sync:
                os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # some file systems have no such call
                raise


def _write_standard(data: bytes) -> None:
    stream: Any = sys.stdout
    if stream is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    stream.flush()
    if hasattr(stream, "buffer"):
        stream.buffer.write(data)
    else:  # a notebook's or a test's
        stream.write(data.decode("utf-8"))
    stream.flush()


def _limited(file: Any, most: int) -> bytes | None:
    """All of a file's data; None where there are more than `most` bytes."""
    parts, size = [], 0
    while part := file.read(1 << 24):
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _decoded(path: object, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}.") from None
