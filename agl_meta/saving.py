"""Saving from inside a rollout: what :meth:`TrainingContextMixin.save_prediction` and the functions
for code without a ``self`` do."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from pathlib import Path

from agl_meta.context import FSYNC, TrainingContext, current_training_context, note_loss
from agl_meta.describing import describe
from agl_meta.emitting import emit_record
from agl_meta.encoding_images import Attach
from agl_meta.errors import OutputDirError, StampError
from agl_meta.faults import faults, is_of_system
from agl_meta.files import AnyPath
from agl_meta.records import PREDICTION, record_line
from agl_meta.remote import is_remote, make_folder, put
from agl_meta.shards import shard_writers
from agl_meta.storage import (
    FILES,
    OUTPUT_DIR_VARIABLE,
    UNSTAMPED,
    make_root,
    open_folder,
    pass_parts,
    pinned_root,
    rollout_folder,
    stamped_root,
    sync_folder,
    write_all,
)

logger = logging.getLogger(__name__)

_NO_OUTPUT_DIR = (
    "There is no output folder to save to: the training was started without output_dir and without "
    f"{OUTPUT_DIR_VARIABLE}. Pass agl_meta.VERL(config, output_dir='runs/…'), or set the environment "
    f"variable {OUTPUT_DIR_VARIABLE} before the training is started."
)
_NOT_STAMPED = (
    "There is no output folder to save to: this rollout was enqueued without agl_meta, and the environment "
    f"variable {OUTPUT_DIR_VARIABLE} is not set where it runs. Train with agl_meta.VERL(config, "
    "output_dir='runs/…') as Trainer(algorithm=…), or set the variable."
)
_NO_PASS_FOLDER = (
    "There is no folder to save to: the trainer could not create the folder of this pass. Its log says why, "
    "as 'creating the folder of a pass failed'; that cause has to go (a full disk, say)."
)


def save_prediction(value: object, name: str = "prediction") -> AnyPath | None:
    """Save ``value`` as it is now, filed under the step, split and rollout that run here.

    Any value can be saved; :mod:`agl_meta.encoding` says how. An image of Pillow becomes a file in the
    rollout's own folder. Returns the file that holds the record, or
    ``None`` if it went to the store (``transport="store"``) or could not be written (a full disk, say): such
    a loss is logged and counted, and the rollout goes on. Raises :class:`NotInRolloutError` outside a
    rollout, :class:`StampError` if the rollout's stamp can't be read or leads out of the output folder, and
    :class:`OutputDirError` if the training has no output folder or the environment variable names none.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {describe(name)} ({type(name).__name__}); expected a str.")
    return save_record(current_training_context(), PREDICTION, name, value)


def save_record(context: TrainingContext, kind: str, name: str, value: object) -> AnyPath | None:
    """Save a record of any kind, as :func:`save_prediction` does."""
    if context.transport == "store":
        emit_record(context, kind, name, value)
        return None
    cause: str | OSError
    try:
        place = _place(context)
        if not isinstance(place, str):
            line = record_line(context, kind, name, value, _attachments(context, *place))
            return shard_writers.append(*place, line, context.durability == FSYNC)
        cause = place
    except OSError as error:
        if not is_of_system(error):
            raise
        cause = error
    note_loss(faults.record(f"saving a {kind}", cause))
    return None


def current_step_dir() -> AnyPath:
    """The folder of the pass that runs here, made on first use: ``…/global_step_40/val``.

    Shared by all rollouts of the pass; for files of one rollout see :func:`current_rollout_dir`.
    Raises as :func:`save_prediction` does; and where that returns ``None``, :class:`OutputDirError` for a
    pass or a rollout without a folder, and :class:`OSError`.
    """
    return _make_folder(current_training_context(), ())


def current_rollout_dir() -> AnyPath:
    """A folder of this rollout's own, made on first use: ``…/global_step_40/val/files/<rollout>``.

    A further attempt of the same rollout gets a folder of its own, with the number of the attempt
    behind a dot. Raises as :func:`current_step_dir` does.
    """
    context = current_training_context()
    return _make_folder(context, _own_folder(context))


def _own_folder(context: TrainingContext) -> tuple[str, str]:
    return FILES, rollout_folder(context.rollout_id or "rollout", context.attempt_number)


def _attachments(context: TrainingContext, root: str, folder: tuple[str, ...]) -> Attach:
    """What writes a file into the rollout's own folder."""

    def attach(name: str, content: bytes) -> str | None:
        below = _own_folder(context)
        try:
            if is_remote(root):
                put("/".join((root, *folder, *below, name)), content)
            else:
                _write_file(root, (*folder, *below), name, content, context.durability == FSYNC)
        except (OSError, StampError) as error:
            if isinstance(error, OSError) and not is_of_system(error):
                raise
            note_loss(faults.record("saving an image", error))
            return None
        return "/".join((*below, name))

    return attach


def _write_file(root: str, parts: tuple[str, ...], name: str, content: bytes, is_synced: bool) -> None:
    """Write a file named after its content; one that is there holds the same."""
    folder = open_folder(root, parts)
    try:
        _write_file_in(folder, name, content, is_synced)
    finally:
        os.close(folder)


def _write_file_in(folder: int, name: str, content: bytes, is_synced: bool) -> None:
    temporary = f"{name}.{secrets.token_hex(6)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
    try:
        try:
            write_all(descriptor, content)
            if is_synced:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        if is_synced:
            sync_folder(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _make_folder(context: TrainingContext, below: tuple[str, ...]) -> AnyPath:
    place = _place(context)
    if isinstance(place, str):
        raise OutputDirError(place)
    root, folder = place
    if is_remote(root):
        return make_folder("/".join((root, *folder, *below)))
    os.close(open_folder(root, (*folder, *below)))
    return Path(root, *folder, *below)


def _place(context: TrainingContext) -> tuple[str, tuple[str, ...]] | str:
    """Root and folder names below it; or, where a rollout has no place and may run on, why."""
    pinned = pinned_root()
    if not context.is_stamped:
        # Trainer.dev and other algorithms: the agent's code runs on.
        if pinned is None:
            return _NOT_STAMPED
        folder: tuple[str, ...] = (UNSTAMPED,)
    elif not context.output_dir:
        raise OutputDirError(_NO_OUTPUT_DIR)
    elif context.pass_path is None:
        return _NO_PASS_FOLDER
    else:
        folder = pass_parts(context.pass_path)
        if pinned is None:
            return stamped_root(context.output_dir), folder
    # Where the variable names the root, it is this machine's own folder: it may have to be made.
    make_root(pinned)
    return pinned, folder
