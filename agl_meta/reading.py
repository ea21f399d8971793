"""Reading saved predictions back; needs neither agentlightning, verl nor torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import orjson

from agl_meta.describing import describe
from agl_meta.errors import DamagedRecordWarning, OutputDirError, RecordError
from agl_meta.records import Prediction, parse_prediction
from agl_meta.shards import SHARD_SUFFIX
from agl_meta.storage import (
    PASS_FILE,
    PASS_SCHEMA,
    SHARDS,
    UNSTAMPED,
    PassFolder,
    find_passes,
)

SPLITS = ("train", "val")


def read_predictions(
    output_dir: str | os.PathLike[str],
    steps: int | Collection[int] | None = None,
    split: str | None = None,
    *,
    all_passes: bool = False,
    strict: bool = False,
) -> Iterator[Prediction]:
    """Saved predictions in step order, each with its :class:`~agl_meta.context.TrainingContext`.

    Args:
        output_dir: the folder given to ``agl_meta.VERL``.
        steps: one global step or several; ``None`` for all.
        split: ``"train"`` or ``"val"``; ``None`` for both.
        all_passes: at a step that was evaluated several times (before training, after a resume, …),
            give the records of every pass and not only of the newest. A rollout's retries stand in
            the same pass and are always given; tell them apart by ``context.attempt_number``.
        strict: raise :class:`RecordError` for a record that can't be read, instead of issuing a
            :class:`DamagedRecordWarning` with file and line and going on.

    Records of one pass come in the order of their files and lines. They are read as the iterator
    advances, so that a run of any size can be read, also while it goes on. Raises
    :class:`OutputDirError` for a folder that does not exist and :class:`ValueError` for an unknown
    split.
    """
    if split is not None and split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected 'train', 'val' or None for both.")
    wanted = {steps} if isinstance(steps, int) else None if steps is None else set(steps)
    root = Path(output_dir)
    if not root.is_dir():
        raise OutputDirError(
            f"{os.fspath(output_dir)!r} is not a folder; expected the output_dir of a training."
        )
    return _read(root, wanted, split, all_passes, strict)


def _read(
    root: Path, steps: set[int] | None, split: str | None, all_passes: bool, strict: bool
) -> Iterator[Prediction]:
    for folder in _chosen_passes(root, steps, split, all_passes):
        yield from _read_shards(folder.path / SHARDS, strict)
    if steps is None and split is None:
        yield from _read_shards(root / UNSTAMPED / SHARDS, strict)


def _chosen_passes(
    root: Path, steps: set[int] | None, split: str | None, all_passes: bool
) -> Iterator[PassFolder]:
    newest: dict[tuple[int, str], PassFolder] = {}
    for folder in find_passes(root):
        if (steps is not None and folder.global_step not in steps) or (
            split is not None and folder.split != split
        ):
            continue
        if all_passes:
            yield folder
        else:
            newest[folder.global_step, folder.split] = folder
    yield from newest.values()


def _read_shards(shards: Path, strict: bool) -> Iterator[Prediction]:
    if not shards.is_dir():
        return
    for path in sorted(shards.iterdir()):
        if path.suffix != SHARD_SUFFIX or not path.is_file():
            continue
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if not line.endswith(b"\n"):
                        raise RecordError(
                            f"{path}, line {number}: the record was cut short after {len(line)} bytes, "
                            "or is being written."
                        )
                    prediction = parse_prediction(line, path, number)
                except RecordError as error:
                    if strict:
                        raise
                    warnings.warn(str(error), DamagedRecordWarning, stacklevel=4)
                    continue
                if prediction is not None:
                    yield prediction


def read_pass(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``pass.json`` says about a pass: run, reason, epoch, what is expected, versions.

    Raises :class:`RecordError` if it is missing, damaged or of an unknown schema version.
    """
    path = Path(folder, PASS_FILE)
    try:
        document = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise RecordError(f"{path}: can't be read ({error}); expected a pass.json.") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != PASS_SCHEMA:
        raise RecordError(
            f"{path}: found schema {describe(schema)}; this agl_meta reads schema {PASS_SCHEMA}. Read it "
            "with the version that wrote it."
        )
    return dict(document)
