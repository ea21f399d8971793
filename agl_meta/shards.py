"""Shards: the files into which runners append records, one writer a file, one record a line.

A shard belongs to one process and is named ``<host>.<pid>.<random>.jsonl``; a forked child opens one
of its own (after coverage.py's parallel data files).
"""

from __future__ import annotations

import collections
import os
import re
import secrets
import socket
import threading
from pathlib import Path

from agl_meta.forks import PerProcess
from agl_meta.storage import SHARDS, open_folder, write_all

SHARD_SUFFIX = ".jsonl"

_MAX_OPEN = 16


class ShardWriter:
    """Appends lines to one new file in a folder below ``root``; for one thread at a time."""

    def __init__(self, root: str, folder: tuple[str, ...]) -> None:
        host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())[:60] or "host"
        name = f"{host}.{os.getpid()}.{secrets.token_hex(6)}{SHARD_SUFFIX}"
        directory = open_folder(root, folder)
        try:
            # umask narrows the rights as for any other file of this user.
            self._descriptor = os.open(
                name,
                os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o666,
                dir_fd=directory,
            )
        finally:
            os.close(directory)
        self.path = Path(root, *folder, name)

    def append(self, line: bytes) -> None:
        """Write one line, which ends with its newline, in one call. Raises :class:`OSError`."""
        write_all(self._descriptor, line)

    def is_deleted(self) -> bool:
        """Whether the file was deleted meanwhile, so that what is appended would be lost."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Close the file; appending afterwards is an error."""
        os.close(self._descriptor)


class ShardWriters:
    """The open writers of this process, by folder; the least recently used is closed.

    Thread-safe. One lock serves all writers of a process: it is held for one ``write`` call, and
    keeps a writer from being closed while another thread appends to it. In a forked child the files
    belong to the parent, so it starts without any.
    """

    def __init__(self) -> None:
        self._lock = PerProcess(threading.Lock)
        self._writers: PerProcess[collections.OrderedDict[tuple[str, ...], ShardWriter]] = PerProcess(
            collections.OrderedDict
        )

    def append(self, root: str, folder: tuple[str, ...], line: bytes) -> Path:
        """Append to this process's shard in ``root/folder…/shards``; returns the file's path.

        Raises :class:`OSError`. After one, the next call starts a new file: a line that was cut
        short stays the last of its file and is reported by readers.
        """
        key = (root, *folder)
        with self._lock.value:
            writer = self._writers.value.get(key)
            if writer is not None and writer.is_deleted():
                self._discard(key)
                writer = None
            if writer is None:
                writer = self._writers.value[key] = ShardWriter(root, (*folder, SHARDS))
                if len(self._writers.value) > _MAX_OPEN:
                    self._discard(next(iter(self._writers.value)))
            self._writers.value.move_to_end(key)
            try:
                writer.append(line)
            except OSError:
                self._discard(key)
                raise
            return writer.path

    def _discard(self, key: tuple[str, ...]) -> None:
        self._writers.value.pop(key).close()


shard_writers = ShardWriters()
"""The writers of this process."""
