"""Giving the rows of a pass their place, in its folder or in a remote store, compressed or not."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from agl_meta.files import COMPRESSED, AnyPath
from agl_meta.remote import upload_new
from agl_meta.storage import publish_file, sync_folder


def publish_rows(temporary: Path, target: AnyPath) -> None:
    """Publish a whole file under a name that must be free, so that readers see all of it or nothing.

    A temporary file that is neither compressed nor uploaded is gone afterwards. Raises
    :class:`FileExistsError` and other :class:`OSError`.
    """
    if target.suffix != COMPRESSED:
        _publish(temporary, target)
        return
    compressed = temporary.with_name(f"{temporary.name}.{secrets.token_hex(6)}{COMPRESSED}.tmp")
    try:
        _compress(temporary, compressed)
        _publish(compressed, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            compressed.unlink()


def _publish(file: Path, target: AnyPath) -> None:
    if not isinstance(target, Path):
        upload_new(str(file), str(target))
        return
    with file.open("rb") as content:
        os.fsync(content.fileno())
    publish_file(str(file), str(target))
    sync_folder(str(target.parent))


def _compress(file: Path, target: Path) -> None:
    import zstandard

    # The settings were checked for the package. A checksum shows what a damaged disk changed.
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    found = file.stat()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with (
        file.open("rb") as source,
        os.fdopen(os.open(target, flags, found.st_mode & 0o777), "wb") as sink,
        compressor.stream_writer(sink, size=found.st_size, closefd=False) as writer,
    ):
        shutil.copyfileobj(source, writer, 2**20)
