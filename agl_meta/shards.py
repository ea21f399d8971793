"""Shards: the files into which runners append records, one writer a file, one record a line.

A shard belongs to one process and is named ``<host>.<pid>.<random>.jsonl``; a forked child opens one
of its own (after coverage.py's parallel data files).
"""

from __future__ import annotations

import collections
import fcntl
import itertools
import os
import re
import secrets
import socket
import threading
from pathlib import Path

from agl_meta.faults import faults, is_of_system
from agl_meta.files import AnyPath
from agl_meta.forks import PerProcess
from agl_meta.remote import is_remote, put, remote_path
from agl_meta.storage import SHARDS, open_folder, sync_folder, write_all

SHARD_SUFFIX = ".jsonl"

_MAX_OPEN = 16


def _writer_name() -> str:
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())[:60] or "host"
    return f"{host}.{os.getpid()}.{secrets.token_hex(6)}"


class ShardWriter:
    """Appends lines to one new file in a folder below ``root``; for one thread at a time.

    ``is_synced`` says whether each line is to survive a power loss, too.
    """

    def __init__(self, root: str, folder: tuple[str, ...], is_synced: bool = False) -> None:
        name = f"{_writer_name()}{SHARD_SUFFIX}"
        directory = open_folder(root, folder)
        try:
            # umask narrows the rights as for any other file of this user.
            descriptor = os.open(
                name,
                os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o666,
                dir_fd=directory,
            )
            if is_synced:
                sync_folder(directory)
        finally:
            os.close(directory)
        self._descriptor = _above_standard(descriptor)
        self._identity = _identity(os.fstat(self._descriptor))
        self._flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        self._is_synced = is_synced
        self.path = Path(root, *folder, name)

    def append(self, line: bytes) -> None:
        """Write one line, which ends with its newline, in one call. Raises :class:`OSError`."""
        write_all(self._descriptor, line)
        if self._is_synced:
            os.fsync(self._descriptor)

    def is_usable(self) -> bool:
        """Whether the file is still open and there, so that what is appended can be read."""
        found = self._stat()
        return found is not None and found.st_nlink > 0

    def close(self) -> None:
        """Close the file, if it is still open; appending afterwards is an error."""
        if self._stat() is not None:
            os.close(self._descriptor)

    def _stat(self) -> os.stat_result | None:
        """Stat of the open file; ``None`` if the descriptor is not ours any more.

        Other code of the process may close all descriptors, as daemons do when they start. The number
        then names nothing, or a file of that code, which must be neither written nor closed.
        """
        try:
            found = os.fstat(self._descriptor)
            # An inode that became free is used again at once: Linux keeps O_NOFOLLOW among the flags,
            # which hardly any other file is opened with.
            if (
                _identity(found) != self._identity
                or fcntl.fcntl(self._descriptor, fcntl.F_GETFL) != self._flags
            ):
                return None
        except OSError as error:
            if not is_of_system(error):
                raise
            return None
        return found


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _above_standard(descriptor: int) -> int:
    """The descriptor, moved if it is one of the three that ``print`` and the like write to unasked.

    A process that closed its standard streams gets their numbers for the next files that it opens.
    """
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


class ShardWriters:
    """The open writers of this process, by folder; the least recently used is closed.

    Thread-safe. One lock serves all writers of a process: it is held for one ``write`` call, and
    keeps a writer from being closed while another thread appends to it. A call that interrupts another one
    in the same thread, from a signal handler or a finalizer, writes to a file of its own. In a forked child
    the files belong to the parent, so it starts without any.
    """

    def __init__(self) -> None:
        self._lock = PerProcess(threading.RLock)
        self._is_busy = PerProcess(lambda: False)
        self._writers: PerProcess[collections.OrderedDict[tuple[object, ...], ShardWriter]] = PerProcess(
            collections.OrderedDict
        )
        self._name = PerProcess(_writer_name)
        self._number = itertools.count()

    def append(self, root: str, folder: tuple[str, ...], line: bytes, is_synced: bool = False) -> AnyPath:
        """Append to this process's shard in ``root/folder…/shards``; returns the file's path.

        Raises :class:`OSError`. After one, the next call starts a new file: a line that was cut
        short stays the last of its file and is reported by readers. In a remote store each line is a file
        of its own.
        """
        if is_remote(root):
            url = "/".join(
                [root, *folder, SHARDS, f"{self._name.value}.{next(self._number):09d}{SHARD_SUFFIX}"]
            )
            put(url, line)
            return remote_path(url)
        with self._lock.value:
            if self._is_busy.value:
                return _append_alone(root, folder, line, is_synced)
            try:
                self._is_busy.value = True
                return self._append(root, folder, line, is_synced)
            finally:
                self._is_busy.value = False

    def _append(self, root: str, folder: tuple[str, ...], line: bytes, is_synced: bool) -> Path:
        key = (is_synced, root, *folder)
        writers = self._writers.value
        writer = writers.get(key)
        if writer is not None and not writer.is_usable():
            _close(writers.pop(key))
            writer = None
        if writer is None:
            writer = writers[key] = ShardWriter(root, (*folder, SHARDS), is_synced)
            if len(writers) > _MAX_OPEN:
                _close(writers.popitem(last=False)[1])
        writers.move_to_end(key)
        try:
            writer.append(line)
        except BaseException:  # a signal handler of the user's may raise in the middle of a line
            _close(writers.pop(key))
            raise
        return writer.path


def _append_alone(root: str, folder: tuple[str, ...], line: bytes, is_synced: bool) -> Path:
    writer = ShardWriter(root, (*folder, SHARDS), is_synced)
    try:
        writer.append(line)
    finally:
        _close(writer)
    return writer.path


def _close(writer: ShardWriter) -> None:
    # On some mounts only closing tells that an earlier record was lost; the next one must go on.
    try:
        writer.close()
    except OSError as error:
        if not is_of_system(error):
            raise
        faults.record("closing a file of predictions", error)


shard_writers = ShardWriters()
"""The writers of this process."""
