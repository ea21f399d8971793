"""Saving from inside a rollout: what :meth:`TrainingContextMixin.save_prediction` and the functions
for code without a ``self`` do."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from agl_meta.context import TrainingContext, current_training_context
from agl_meta.errors import OutputDirError, StampError
from agl_meta.faults import faults
from agl_meta.records import PREDICTION, record_line
from agl_meta.shards import shard_writers
from agl_meta.storage import (
    FILES,
    OUTPUT_DIR_VARIABLE,
    UNSTAMPED,
    open_folder,
    pass_parts,
    rollout_folder,
)

logger = logging.getLogger(__name__)

_NO_OUTPUT_DIR = (
    "There is no output folder to save to: the training was started without output_dir and without "
    f"{OUTPUT_DIR_VARIABLE}. Pass agl_meta.VERL(config, output_dir='runs/…'), or set the environment "
    f"variable {OUTPUT_DIR_VARIABLE} before the training is started."
)


def save_prediction(value: object, name: str = "prediction") -> Path | None:
    """Save ``value`` as it is now, filed under the step, split and rollout that run here.

    Any value can be saved; :mod:`agl_meta.encoding` says how. Returns the file that holds the
    record, or ``None`` if it could not be written (a full disk, say): such a loss is logged and
    counted, and the rollout goes on. Raises :class:`NotInRolloutError` outside a rollout,
    :class:`StampError` if the rollout's stamp can't be read or leads out of the output folder, and
    :class:`OutputDirError` if the training has no output folder.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r:.80} ({type(name).__name__}); expected a str.")
    return save_record(current_training_context(), PREDICTION, name, value)


def save_record(context: TrainingContext, kind: str, name: str, value: object) -> Path | None:
    """Save a record of any kind, as :func:`save_prediction` does."""
    try:
        place = _place(context)
        if place is None:
            return None
        return shard_writers.append(*place, record_line(context, kind, name, value))
    except OSError as error:
        faults.record(f"saving a {kind}", error)
        return None


def current_step_dir() -> Path:
    """The folder of the pass that runs here, made on first use: ``…/global_step_40/val``.

    Shared by all rollouts of the pass; for files of one rollout see :func:`current_rollout_dir`.
    Raises as :func:`save_prediction` does, and :class:`OSError`.
    """
    return _make_folder(current_training_context(), ())


def current_rollout_dir() -> Path:
    """A folder of this rollout's own, made on first use: ``…/global_step_40/val/files/<rollout>``.

    A further attempt of the same rollout gets a folder of its own, with the number of the attempt
    behind a dot. Raises as :func:`save_prediction` does, and :class:`OSError`.
    """
    context = current_training_context()
    name = rollout_folder(context.rollout_id or "rollout", context.attempt_number)
    return _make_folder(context, (FILES, name))


def _make_folder(context: TrainingContext, below: tuple[str, ...]) -> Path:
    place = _place(context)
    if place is None:
        raise OutputDirError(_NO_OUTPUT_DIR)
    root, folder = place
    os.close(open_folder(root, (*folder, *below)))
    return Path(root, *folder, *below)


def _place(context: TrainingContext) -> tuple[str, tuple[str, ...]] | None:
    """Root and folder names below it; ``None`` for a rollout without stamps and without a root."""
    pinned = os.environ.get(OUTPUT_DIR_VARIABLE)
    if not context.is_stamped:
        # Trainer.dev and other algorithms: the agent's code runs on.
        if not pinned:
            faults.record("saving a prediction of a rollout without stamps", _NO_OUTPUT_DIR)
            return None
        return _pinned_root(pinned), (UNSTAMPED,)
    if not context.output_dir:
        raise OutputDirError(_NO_OUTPUT_DIR)
    root = _pinned_root(pinned) if pinned else context.output_dir
    if context.pass_path is None:
        faults.record("saving a prediction", "the trainer could not create the folder of this pass")
        return None
    if root[0] != os.sep:
        raise StampError(
            f"The rollout is stamped with the output folder {root!r:.200}; expected an absolute path."
        )
    return root, pass_parts(context.pass_path)


def _pinned_root(pinned: str) -> str:
    # Where the variable names the root, it is this machine's own folder: it may have to be made.
    os.makedirs(pinned, exist_ok=True)
    return os.path.abspath(pinned)
