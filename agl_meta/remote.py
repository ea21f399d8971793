"""Output folders on remote file systems, through fsspec: ``s3://``, ``gs://``, ``hdfs://`` and the like.

Object stores append to nothing and know no links. So what is a line of a shard elsewhere is an object of
its own there: it is there whole or not at all, and a process that is killed loses nothing that was
acknowledged. Names that must be free are claimed with fsspec's ``mode="create"``, which S3 takes in one step
(``If-None-Match``). Where a store lies and with which rights is its own and fsspec's configuration
(environment variables, ``~/.config/fsspec``): no credential passes through a stamp or this library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agl_meta.describing import describe, describe_error
from agl_meta.errors import AglMetaError, OutputDirError
from agl_meta.forks import PerProcess

if TYPE_CHECKING:
    from upath import UPath

_OBJECT_STORES = frozenset(["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"])
"""They have no folders: none can or must be made before an object is written."""
PROTOCOLS = _OBJECT_STORES | {"hdfs", "webhdfs", "sftp", "ssh", "smb", "webdav", "webdavs"}
"""What is written to. A URL may come with a stamp: what fetches from anywhere, changes what it reads or
leads on to another URL is none of them."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_PROBE = ".agl_meta-probe"
# What other processes write must be seen.
_OPTIONS: dict[str, Any] = {"use_listings_cache": False}

_systems: PerProcess[dict[str, Any]] = PerProcess(dict)


def is_remote(path: object) -> bool:
    """Whether a path as a user names it is a URL."""
    return isinstance(path, str) and "://" in path


def path_text(path: object, name: str) -> object:
    """A path object as text, and anything else as it is. Raises :class:`OutputDirError`."""
    if isinstance(path, os.PathLike):
        return os.fspath(path)
    options = getattr(path, "storage_options", None)
    if options is None:
        return path
    if {**options} not in ({}, _OPTIONS):
        raise OutputDirError(
            f"{name} is a {type(path).__name__} with storage options, which can't travel to the processes "
            "that write there. Leave them out, and set them on each machine where fsspec looks for them: its "
            "configuration files and variables, and those of the store's package."
        )
    return str(path)


def checked_url(text: str, name: str) -> str:
    """A URL without a slash at its end. Touches no network. Raises :class:`OutputDirError`.

    Args:
        text: as a user, a variable or a stamp gives it.
        name: where it comes from, for messages.
    """
    shown = describe(text, 200)
    match = _URL.fullmatch(text)
    if match is None or match[1] not in PROTOCOLS:
        raise OutputDirError(
            f"{name} is {shown}; expected a local path, or a URL that begins with one of "
            f"{', '.join(sorted(PROTOCOLS))}. Name such a folder."
        )
    place = match[2].rstrip("/")
    parts = place.split("/")
    if ":" in parts[0].rpartition("@")[0]:
        raise OutputDirError(
            f"{name} is a URL with a password, which would be written to stamps and logs. Leave it out, and "
            "configure the store's credentials on each machine."
        )
    has_odd_part = bool({".", ".."} & {*parts}) or "::" in place or bool(set("?*[]#") & {*place})
    if not place or has_odd_part or not place.isprintable():
        raise OutputDirError(
            f"{name} is {shown}; expected a bucket or host and the path of a folder, without '..' and "
            "characters that mean something in URLs. Name it in full."
        )
    return f"{match[1]}://{place}"


def remote_path(url: str) -> UPath:
    """The path object of a URL, of universal_pathlib.

    Raises :class:`OutputDirError` if that, or the package for the store, is not installed.
    """
    with _needs_packages(url):
        from upath import UPath

        return UPath(url, **_OPTIONS)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises :class:`OSError`, and :class:`OutputDirError` if a package is not installed.
    """
    protocol = url.partition("://")[0]
    host = url.split("/")[2] if protocol not in _OBJECT_STORES else ""
    systems = _systems.value
    with _needs_packages(url), store_errors():
        import fsspec

        found = systems.get(protocol + host)
        if found is None:
            found, _ = fsspec.core.url_to_fs(url, **_OPTIONS)
            systems[protocol + host] = found
        return found, found._strip_protocol(url)


@contextlib.contextmanager
def _needs_packages(url: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise OutputDirError(
            f"{describe(url, 200)} needs a package that is not installed ({describe_error(error):.200}). "
            "Install agl_meta[remote] and fsspec's package for this store, such as s3fs, gcsfs or adlfs, on "
            "every machine that reads or writes there."
        ) from error


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Errors of a store as :class:`OSError`: each store has classes of its own."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # saving takes an error without a number for one of the agent's own
            error.errno = errno.EIO
        raise
    except (ImportError, AglMetaError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"the remote file system failed: {describe_error(error):.500}") from error


def prepare_remote_root(url: str, name: str) -> None:
    """Check that a remote folder can be written. Raises :class:`OutputDirError`."""
    probe = f"{url}/{_PROBE}"
    try:
        put(probe, b"agl_meta\n")
    except OSError as error:
        raise OutputDirError(
            f"{name} is {describe(url, 200)}, which can't be written: {describe_error(error):.300}. Expected "
            "a folder that this user may write, in a bucket that exists. Choose another, or set up endpoint, "
            "credentials and rights as fsspec's package for this store says."
        ) from error
    with contextlib.suppress(Exception):  # deleting may be forbidden; it has the same name each time
        fs, path = file_system(probe)
        fs.rm_file(path)


def put(url: str, content: bytes) -> None:
    """Write an object whose name nobody else has. Raises :class:`OSError`."""
    fs, path = file_system(url)
    with store_errors():
        _make_parent(fs, path)
        fs.pipe_file(path, content)


def put_new(url: str, content: bytes) -> None:
    """Write an object whose name must be free. Raises :class:`FileExistsError` and other :class:`OSError`."""
    fs, path = file_system(url)
    with store_errors():
        # Not every store that speaks S3 knows the condition: what is there already is safe in any case.
        if fs.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url)
        _make_parent(fs, path)
        try:
            fs.pipe_file(path, content, mode="create")
        except FileExistsError:
            # A request whose answer got lost is sent again, and then meets its own object.
            if fs.cat_file(path) != content:
                raise


def upload_new(file: str, url: str) -> None:
    """Copy a local file to a name that must be free.

    Raises :class:`FileExistsError` and other :class:`OSError`.
    """
    fs, path = file_system(url)
    with store_errors():
        if fs.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), url)
        _make_parent(fs, path)
        fs.put_file(file, path, mode="create")


def make_folder(url: str) -> UPath:
    """Make a folder, where the store has any; gives its path. Raises :class:`OSError`."""
    fs, path = file_system(url)
    with store_errors():
        _make(fs, path)
    return remote_path(url)


def _make_parent(fs: Any, path: str) -> None:
    _make(fs, fs._parent(path))


def _make(fs: Any, path: str) -> None:
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
    if not protocols & _OBJECT_STORES:
        fs.makedirs(path, exist_ok=True)
