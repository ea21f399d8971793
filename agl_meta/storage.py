"""The folders of an output directory: the root, one folder for each pass, and safe names in them.

Layout (the folder name ``global_step_N`` is verl's own, from its checkpoints)::

    <output_dir>/global_step_40/val/      first evaluation at this step; further ones are val.2, val.3
        pass.json                         written first, by the trainer side
        shards/<host>.<pid>.<random>.jsonl     one line a record, one writer a file
        files/<rollout>/                  what a rollout wrote itself
        predictions.jsonl                 assembled at the end, one row a rollout
        summary.json                      written last: counts, metrics, verdict
        late.jsonl                        rows of rollouts that finished after that

In a remote store each record is an object of its own, ``shards/<host>.<pid>.<random>.<number>.jsonl``, and so
is each late row. ``predictions.jsonl`` may be compressed, and is then called ``predictions.jsonl.zst``.

Only the trainer side creates pass folders, exclusively, so that nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from agl_meta.describing import describe
from agl_meta.encoding_objects import is_text
from agl_meta.errors import OutputDirError, StampError
from agl_meta.files import COMPRESSED, AnyPath, any_path, list_folder, open_file
from agl_meta.remote import checked_url, is_remote, path_text, prepare_remote_root, put_new

OUTPUT_DIR_VARIABLE = "AGL_META_OUTPUT_DIR"
"""Environment variable that names the output folder on this machine, whatever the trainer calls it."""

PASS_FILE = "pass.json"
PASS_SCHEMA = 1
SUMMARY_SCHEMA = 1
SHARDS = "shards"
FILES = "files"
PREDICTIONS_FILE = "predictions.jsonl"
SUMMARY_FILE = "summary.json"
LATE_FILE = "late.jsonl"
UNSTAMPED = "unstamped"
"""Folder for what rollouts without stamps save, when the environment variable names a root."""

# Some mounts know no hard links (FUSE, SMB).
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_MOUNT_PARENTS = frozenset({"/", "/mnt", "/media", "/net", "/Volumes"})
_STEP_FOLDER = re.compile(r"global_step_([0-9]{1,18})")
_PASS_FOLDER = re.compile(r"(train|val)(?:\.([1-9][0-9]{0,8}))?")
_SAFE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
# Windows refuses these as file names, with or without an ending.
_DEVICE_NAME = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])")


class PassFolder(NamedTuple):
    """One pass folder on disk; sorts by step, then split, then number."""

    global_step: int
    split: str
    number: int
    path: AnyPath


# --------------------------------------------------------------------------------------------- root


def root_path(output_dir: object, name: str = "output_dir") -> str:
    """The absolute path or URL of an output folder as a user names it: one way for trainer and runners.

    ``~`` is the home folder of this process; a relative path starts from its current directory.
    ``name`` says in messages where the path comes from. Touches no disk. Raises :class:`OutputDirError`.
    """
    text = path_text(output_dir, name)
    if not isinstance(text, str) or not text or not _is_file_name(text):
        raise OutputDirError(f"{name} is {describe(text, 200)}; expected the path of a folder.")
    text = text.removeprefix("file://")
    if is_remote(text):
        return checked_url(text, name)
    if text[0] == "~":
        text = os.path.expanduser(text)
        if text[0] == "~":
            raise OutputDirError(
                f"{name} is {describe(text, 200)}, a home folder that is not known here; expected the path "
                "of a folder. Name it in full, or write './~…' for a folder of that name."
            )
    return os.path.abspath(text)


def pinned_root() -> str | None:
    """The output folder that :data:`OUTPUT_DIR_VARIABLE` names on this machine, if it is set.

    A relative one starts from the directory that is current when this process first asks for it, wherever
    the agent's code goes afterwards. Raises :class:`OutputDirError`, and :class:`OSError` where there is no
    current directory any more.
    """
    return _pinned_root(os.environ.get(OUTPUT_DIR_VARIABLE))


@functools.lru_cache(maxsize=1)
def _pinned_root(pinned: str | None) -> str | None:
    return root_path(pinned, OUTPUT_DIR_VARIABLE) if pinned else None


def settle_root() -> None:
    """Ask for :func:`pinned_root` before code of the agent runs; what is wrong with it is told later."""
    with contextlib.suppress(OutputDirError, FileNotFoundError, PermissionError):
        pinned_root()


def make_root(root: str) -> None:
    """Create the output folder on a runner's machine, unless it is there. Raises :class:`OSError`."""
    if is_remote(root):
        return
    try:
        os.stat(root)
    except FileNotFoundError:
        missing = _missing_mount(root)
        if missing is not None:
            raise FileNotFoundError(errno.ENOENT, "No such mounted or existing folder", missing) from None
        _make_folders(root)


def prepare_root(output_dir: str | os.PathLike[str], name: str = "output_dir") -> str:
    """Check and create the output folder; returns its absolute path or URL.

    Raises :class:`OutputDirError` when it is a file, can't be written, lies in a folder that looks
    like a missing mount, or in a remote store that is not known or not there.
    """
    root = root_path(output_dir, name)
    if is_remote(root):
        prepare_remote_root(root, name)
        return root
    shown = describe(root, 200)
    existing = _nearest_existing(root)
    if not os.path.isdir(existing):
        raise OutputDirError(
            f"{name} is {shown}, and {describe(existing, 200)} is a file; expected a folder or a free name. "
            f"Choose another {name}."
        )
    missing = _missing_mount(root)
    if missing is not None:
        raise OutputDirError(
            f"{name} is {shown}, but {describe(missing, 200)} does not exist; expected a mounted or existing "
            f"folder there. Mount it, or create {describe(missing, 200)} yourself if it is meant to be local."
        )
    try:
        _make_folders(root)
        # Rights alone don't tell (root, read-only mounts, quotas): only writing does.
        with tempfile.TemporaryFile(dir=root) as probe:
            probe.write(b"agl_meta")
            probe.flush()
    except OSError as error:
        raise OutputDirError(
            f"{name} is {shown}, which can't be written: {error.strerror or error}. Expected a "
            f"folder that this user may write. Choose another {name} or change its rights."
        ) from error
    return root


def find_root(output_dir: str | None) -> tuple[str | None, str | None]:
    """The output folder on this machine, checked and created, and the name that goes into stamps.

    They differ where :data:`OUTPUT_DIR_VARIABLE` names the folder of this machine. Both are ``None`` where
    nothing is to be saved. Raises :class:`OutputDirError`.
    """
    pinned = pinned_root()
    # Looked at before anything is created.
    stamped, name = (root_path(output_dir), "output_dir") if output_dir else (pinned, OUTPUT_DIR_VARIABLE)
    if stamped is None:
        return None, None
    if not is_text(stamped):
        raise OutputDirError(
            f"{name} is {describe(stamped, 200)}; expected a path that is valid UTF-8, since it travels to "
            f"the runners as text. Choose another {name}."
        )
    root = prepare_root(stamped, name) if pinned is None else prepare_root(pinned, OUTPUT_DIR_VARIABLE)
    return root, stamped


def _make_folders(path: str) -> None:
    """As ``os.makedirs(path, exist_ok=True)``, which raises RecursionError for a deep or overlong path."""
    missing = []
    while path:
        try:
            os.stat(path)
            break
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.mkdir(folder)


def _is_file_name(text: str) -> bool:
    """Whether the system takes the text for a path; for any other, its functions raise ValueError."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _missing_mount(root: str) -> str | None:
    """What has to be mounted before ``root`` can be created."""
    existing = _nearest_existing(root)
    if existing == root or existing not in _MOUNT_PARENTS:
        return None
    return os.path.join(existing, os.path.relpath(root, existing).split(os.sep)[0])


def _nearest_existing(path: str) -> str:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


# ----------------------------------------------------------------------------------- trainer's side


def create_pass(root: str, global_step: int, split: str, info: dict[str, Any]) -> str:
    """Create the folder of a new pass and write its ``pass.json``; returns its path below ``root``.

    ``info`` must hold nothing but JSON. Creation is exclusive: of two callers each gets its own
    folder. Raises :class:`OSError`.
    """
    step_folder = f"global_step_{global_step}"
    number = 1
    while True:
        pass_path = f"{step_folder}/{split}" if number == 1 else f"{step_folder}/{split}.{number}"
        document = {"schema": PASS_SCHEMA, "pass_path": pass_path, **info}
        content = orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        try:
            if is_remote(root):
                put_new(f"{root}/{pass_path}/{PASS_FILE}", content)
            else:
                _create_local_pass(root, pass_path, content)
            return pass_path
        except FileExistsError:
            number += 1


def _create_local_pass(root: str, pass_path: str, content: bytes) -> None:
    folder = os.path.join(root, pass_path)
    _make_folders(os.path.dirname(folder))
    os.mkdir(folder)
    os.mkdir(os.path.join(folder, SHARDS))
    publish(Path(folder, PASS_FILE), content)
    for each in (os.path.dirname(folder), root):
        sync_folder(each)


def sync_folder(folder: str | int) -> None:
    """Make the names in a folder survive a power loss, where its file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC) if isinstance(folder, str) else folder
        try:
            os.fsync(descriptor)
        finally:
            if descriptor != folder:
                os.close(descriptor)
    except OSError:  # some mounts know no fsync of folders
        pass


def publish(target: AnyPath, content: bytes) -> None:
    """Write a file so that readers see all of it or nothing, also after a power loss.

    Temporary file, flush, fsync, then a link that refuses to replace what is there (after
    inspect_ai's ``atomic_write``, which replaces); remotely one request that does. Raises
    :class:`FileExistsError` and other :class:`OSError`.
    """
    if not isinstance(target, Path):
        put_new(str(target), content)
        return
    path = str(target)
    temporary = f"{path}.{secrets.token_hex(6)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        publish_file(temporary, path)
        sync_folder(os.path.dirname(path))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def publish_file(temporary: str, path: str) -> None:
    """Give a whole file its name, which must be free; the temporary name is gone afterwards.

    Raises :class:`FileExistsError` and other :class:`OSError`.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # There the exclusively created folder keeps others away; the name must appear at once.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def write_all(descriptor: int, content: bytes) -> None:
    """``os.write`` until all is written."""
    written = os.write(descriptor, content)
    while written < len(content):
        written += os.write(descriptor, memoryview(content)[written:])


# ----------------------------------------------------------------------------------- runner's side


def open_folder(root: str, parts: tuple[str, ...]) -> int:
    """Open ``root/parts…`` as a directory descriptor, creating what is missing below the root.

    No part is followed through a link: a link that somebody planted in the output folder could
    lead a write out of it. Raises :class:`StampError` for a link, else :class:`OSError`.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    current = os.open(root, flags)
    try:
        for part in parts:
            try:
                following = os.open(part, flags | os.O_NOFOLLOW, dir_fd=current)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another runner was quicker
                    os.mkdir(part, dir_fd=current)
                following = os.open(part, flags | os.O_NOFOLLOW, dir_fd=current)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not _is_link(part, current):
                    raise
                place = os.path.join(root, *parts)
                raise StampError(
                    f"{part!r} in {place!r} is a link; expected a folder. Nothing is written through it: "
                    "remove it, or choose another output_dir."
                ) from error
            current, above = following, current
            os.close(above)
    except BaseException:
        os.close(current)
        raise
    return current


def _is_link(name: str, folder: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


@functools.lru_cache(maxsize=64)
def stamped_root(output_dir: str) -> str:
    """The output folder as stamped, unchanged.

    Raises :class:`StampError` for anything but an absolute path or the URL of a store: the stamp came over
    the network, and another process's current directory means nothing here.
    """
    if is_remote(output_dir):
        try:
            return checked_url(output_dir, "the rollout's output folder")
        except OutputDirError as error:
            raise StampError(f"{error} Nothing is written to it.") from error
    if not output_dir.startswith(os.sep) or not _is_file_name(output_dir):
        raise StampError(
            f"The rollout is stamped with the output folder {describe(output_dir, 200)}; expected an "
            "absolute path. Nothing is written to it."
        )
    return output_dir


@functools.lru_cache(maxsize=64)
def pass_parts(pass_path: str) -> tuple[str, str]:
    """Split a stamped pass path into its two folder names.

    Raises :class:`StampError` unless it is of the form ``global_step_N/val``: the stamp came over
    the network, and no path in it may lead out of the output folder.
    """
    step, _, folder = pass_path.partition("/")
    if _STEP_FOLDER.fullmatch(step) is None or _PASS_FOLDER.fullmatch(folder) is None:
        raise StampError(
            f"The rollout is stamped with the pass folder {describe(pass_path, 200)}; expected something "
            "like 'global_step_40/val'. It is not written to."
        )
    return step, folder


def safe_name(name: str) -> str:
    """A file name for ``name``: distinct names stay distinct, also where case is ignored.

    Plain lower-case names stay as they are; any other gets a hash of its full text.
    """
    if _SAFE_NAME.fullmatch(name) and not _DEVICE_NAME.fullmatch(name):
        return name
    readable = re.sub(r"[^a-z0-9_-]+", "-", name.lower())[:40].strip("-")
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()
    # "=" never stands in a plain name, so the two kinds can't meet.
    return f"{readable}={digest}"


def rollout_folder(rollout_id: str, attempt_number: int | None) -> str:
    """Name of an attempt's own folder in :data:`FILES`; further attempts have their number behind a dot."""
    name = safe_name(rollout_id)
    return name if attempt_number is None or attempt_number <= 1 else f"{name}.{attempt_number}"


# ----------------------------------------------------------------------------------- reader's side


def open_rows(folder: AnyPath) -> BinaryIO:
    """Open the rows of an assembled pass, compressed or not. Raises :class:`OSError`."""
    try:
        return open_file(folder / PREDICTIONS_FILE)
    except FileNotFoundError:
        return open_file(folder / (PREDICTIONS_FILE + COMPRESSED))


def _raise(step: int, folder: AnyPath, error: OSError) -> None:
    raise error


def find_passes(
    root: str | os.PathLike[str] | AnyPath, unreadable: Callable[[int, AnyPath, OSError], None] = _raise
) -> Iterator[PassFolder]:
    """All pass folders of an output directory, in numeric order of steps.

    ``unreadable`` is told of each step whose folder can't be listed (no rights, gone meanwhile): step, path
    and why. The others are found all the same.
    """
    found = []
    for step in list_folder(any_path(root)):
        step_match = _STEP_FOLDER.fullmatch(step.name)
        if step_match is None or not step.is_dir:
            continue
        number = int(step_match[1])
        try:
            entries = list_folder(step.path)
        except OSError as error:
            unreadable(number, step.path, error)
            continue
        for entry in entries:
            match = _PASS_FOLDER.fullmatch(entry.name)
            if match is not None and entry.is_dir:
                found.append(PassFolder(number, match[1], int(match[2] or 1), entry.path))
    yield from sorted(found)
