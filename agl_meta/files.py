"""Reading the files of an output folder, local or remote, with bounds: names, lines, documents, JSON.

A file may be anybody's: damaged, another tool's, endless, no file at all. Nothing here takes more memory
than one allowed record does, and what is not allowed is an :class:`OSError` or a :class:`RecordError` with
its cause.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias

import orjson

from agl_meta.describing import describe_error
from agl_meta.errors import ConfigurationError, RecordError
from agl_meta.remote import is_remote, remote_path, store_errors

if TYPE_CHECKING:
    from upath import UPath

AnyPath: TypeAlias = "Path | UPath"
"""A local path, or a remote one with the same methods."""

MAX_LINE_BYTES = 256 * 2**20
"""Of one line, or of a document such as ``summary.json``: a longer one is not read."""
MAX_VALUES = 8_000_000
"""Values in one line or document: parsed, one takes up to 60 times the bytes that it takes in the file."""
COMPRESSED = ".zst"
"""Ending of a file that is compressed with zstd; it is read as the file without it."""

MAX_REPORTED = 100
"""Lines of one file that are reported one by one; a foreign file may have any number."""

MAX_DAMAGED = 1_000_000
"""Damaged lines after which the rest of a file is left alone: compressed, any number takes no room."""

_BUFFER = 2**18
_MAX_SKIPPED = 16 * MAX_LINE_BYTES
_MAX_AT_ONCE = 256
_MAX_FETCHED = 16 * 2**20
_MAX_WINDOW = 2**27
_STRING = re.compile(rb'[^"]*("[^"]*"?)?')
_MARKS = (b",", b"[", b"{")


class Entry(NamedTuple):
    """What a folder holds."""

    name: str
    is_dir: bool
    path: AnyPath
    size: int | None
    """Bytes of a remote file, where its store tells them in its listing."""


class Line(NamedTuple):
    """One line of a file."""

    number: int
    """1-based."""
    begin: int
    """Offset of its first byte."""
    end: int
    """Offset of the byte behind its last."""
    content: bytes | None
    """With its newline, which the last one may lack; ``None`` for one beyond :data:`MAX_LINE_BYTES`."""


def any_path(path: str | os.PathLike[str] | AnyPath) -> AnyPath:
    """A path as a user names it, as an object.

    Raises :class:`OutputDirError` for a URL, if the packages for its store are not installed.
    """
    if isinstance(path, str | os.PathLike):
        return remote_path(os.fspath(path)) if is_remote(path) else Path(path)
    return path


def list_folder(folder: AnyPath) -> list[Entry]:
    """What a folder holds, by name. Raises :class:`OSError`."""
    if isinstance(folder, Path):
        with os.scandir(folder) as found:
            entries = [Entry(each.name, _is_dir(each), Path(each.path), None) for each in found]
    else:
        entries = []
        with store_errors():
            folder.fs.invalidate_cache(folder.path)
            for each in folder.fs.ls(folder.path, detail=True):
                name = each["name"].rstrip("/").rpartition("/")[2]
                if each["name"].rstrip("/") != folder.path.rstrip("/"):  # of a file, itself
                    entries.append(Entry(name, each["type"] == "directory", folder / name, each.get("size")))
    return sorted(entries, key=lambda entry: entry.name)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_folder(path: AnyPath) -> bool:
    """Whether there is such a folder. Raises :class:`OSError` of a remote store that can't be asked."""
    with store_errors():
        return path.is_dir()


def open_file(path: AnyPath) -> BinaryIO:
    """Open a regular file for reading; a pipe or a device, which may block for ever, is refused.

    What is compressed is decompressed as it is read. Raises :class:`OSError`, and
    :class:`ConfigurationError` if the package for that is not installed.
    """
    file: BinaryIO
    if isinstance(path, Path):
        file = os.fdopen(open_descriptor(path), "rb", buffering=_BUFFER)
    else:
        with store_errors():
            path.fs.invalidate_cache(path.path)  # of a path object of the user's
            file = path.fs.open(path.path, "rb")
    return _decompressed(file, path)


def open_descriptor(path: Path, flags: int = 0) -> int:
    """Open a regular local file; ``flags`` such as ``O_NOFOLLOW`` are added. Raises :class:`OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "No regular file", os.fspath(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_files(entries: Iterable[Entry]) -> Iterator[tuple[Entry, BinaryIO | Exception]]:
    """Open files one after another, or say why one can't be opened; close what you got before you go on.

    Small remote ones, of which there is one a record, are fetched many at once.
    """
    waiting: list[Entry] = []
    for entry in entries:
        if entry.size is None or entry.size > _MAX_FETCHED:
            yield entry, _open_or_error(entry.path)
            continue
        waiting.append(entry)
        if len(waiting) >= _MAX_AT_ONCE or sum(each.size or 0 for each in waiting) > _MAX_FETCHED:
            yield from _fetched(waiting)
            waiting = []
    if waiting:
        yield from _fetched(waiting)


def _open_or_error(path: AnyPath) -> BinaryIO | Exception:
    try:
        return open_file(path)
    except OSError as error:
        return error


def _fetched(entries: list[Entry]) -> Iterator[tuple[Entry, BinaryIO | Exception]]:
    remote: Any = [entry.path for entry in entries]
    with store_errors():
        found = remote[0].fs.cat([path.path for path in remote], on_error="return")
    for entry, path in zip(entries, remote, strict=True):
        content = found[path.path]
        if isinstance(content, Exception):
            yield entry, content
        else:
            yield entry, _decompressed(io.BytesIO(content), path)


def _decompressed(file: BinaryIO, path: AnyPath) -> BinaryIO:
    if path.suffix != COMPRESSED:
        return file
    try:
        import zstandard
    except ImportError as error:
        file.close()
        raise ConfigurationError(
            f"{path} is compressed, and the package zstandard is not installed. Install agl_meta[zstd]."
        ) from error
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    return io.BufferedReader(_ZstdErrors(decompressor.stream_reader(file, read_across_frames=True)), _BUFFER)


class _ZstdErrors(io.RawIOBase):
    """Reads a stream, whose errors are those of files."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return int(self._guarded(self._stream.readinto, buffer))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._guarded(self._stream.seek, offset, whence))  # forward only

    def tell(self) -> int:
        return int(self._stream.tell())

    def close(self) -> None:
        self._stream.close()
        super().close()

    @staticmethod
    def _guarded(method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"it can't be decompressed: {describe_error(error):.200}") from error


def read_lines(file: BinaryIO, number: int = 0, begin: int = 0) -> Iterator[Line]:
    """The lines of a file from where it stands. Raises :class:`OSError`.

    Args:
        file: an open file.
        number: how many lines stand before.
        begin: how many bytes stand before.
    """
    with store_errors():
        while content := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            size = len(content)
            if size <= MAX_LINE_BYTES:
                yield Line(number, begin, begin + size, content)
            else:
                while content and not content.endswith(b"\n"):
                    content = file.readline(_BUFFER)
                    size += len(content)
                    if size > _MAX_SKIPPED:  # compressed, a line without end takes no room
                        raise OSError(f"line {number} is longer than {_MAX_SKIPPED} bytes")
                yield Line(number, begin, begin + size, None)
            begin += size


def read_document(path: AnyPath) -> bytes:
    """All of a small file. Raises :class:`OSError` and, for a large one, :class:`RecordError`."""
    with open_file(path) as file, store_errors():
        content = file.read(MAX_LINE_BYTES + 1)
    if len(content) > MAX_LINE_BYTES:
        raise RecordError(f"{path}: longer than {MAX_LINE_BYTES} bytes; expected a {path.name}.")
    return content


def load_json(content: bytes | None, where: str, expected: str) -> Any:
    """Parse one line or document. Raises :class:`RecordError`.

    Args:
        content: ``None`` for what is too long.
        where: file and line, for messages.
        expected: what should stand there.
    """
    check_size(content, where, expected)
    assert content is not None
    try:
        return orjson.loads(content)
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"{where}: not JSON ({describe_error(error):.200}); expected {expected}."
        ) from error


def check_size(content: bytes | None, where: str, expected: str) -> None:
    """Raise :class:`RecordError` for what :func:`load_json` does not take, before it takes memory."""
    if content is None:
        raise RecordError(f"{where}: longer than {MAX_LINE_BYTES} bytes; expected {expected}.")
    if len(content) > MAX_VALUES and _is_crowded(content):
        raise RecordError(f"{where}: more than {MAX_VALUES} values; expected {expected}.")


def _is_crowded(content: bytes) -> bool:
    """Whether there are more values than :data:`MAX_VALUES`: each stands behind one of these marks."""
    if sum(map(content.count, _MARKS)) <= MAX_VALUES:
        return False
    # Texts hold marks, too: count again without them. Every value has two texts at most, its key and itself.
    values = 0
    for texts, match in enumerate(_STRING.finditer(content.replace(rb"\\", b"").replace(rb"\"", b""))):
        begin, end = match.span()
        end = match.start(1) if match[1] is not None else end
        values += sum(match.string.count(mark, begin, end) for mark in _MARKS)
        if values > MAX_VALUES or texts > 2 * MAX_VALUES:
            return True
    return False
