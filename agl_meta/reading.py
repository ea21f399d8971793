"""Reading saved predictions back; needs neither agentlightning, verl nor torch."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, BinaryIO, TypeVar

from agl_meta.decoding import decode
from agl_meta.describing import describe, describe_error
from agl_meta.errors import DamagedRecordWarning, OutputDirError, RecordError
from agl_meta.files import (
    COMPRESSED,
    MAX_DAMAGED,
    MAX_REPORTED,
    AnyPath,
    Entry,
    any_path,
    is_folder,
    list_folder,
    load_json,
    open_files,
    read_document,
    read_lines,
)
from agl_meta.records import DAMAGE, Prediction, parse_prediction
from agl_meta.rows import Row, parse_row
from agl_meta.shards import SHARD_SUFFIX
from agl_meta.storage import (
    LATE_FILE,
    PASS_FILE,
    PASS_SCHEMA,
    PREDICTIONS_FILE,
    SHARDS,
    SUMMARY_FILE,
    SUMMARY_SCHEMA,
    UNSTAMPED,
    PassFolder,
    find_passes,
)
from agl_meta.verdict import COMPLETE

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
            give the records of every pass and not only of the newest complete one (of the newest, if
            none is complete). A rollout's retries stand in the same pass and are always given; tell them
            apart by ``context.attempt_number``.
        strict: raise :class:`RecordError` for a record or folder that can't be read, instead of issuing a
            :class:`DamagedRecordWarning` with file and line and going on.

    Records of one pass come in the order of their files and lines. They are read as the iterator
    advances, so that a run of any size can be read, also while it goes on. Raises
    :class:`OutputDirError` for a folder that does not exist and :class:`ValueError` for an unknown
    split.
    """
    choice = _Choice(output_dir, steps, split, all_passes, strict)
    return _read(choice, strict)


def read_rows(
    output_dir: str | os.PathLike[str],
    steps: int | Collection[int] | None = None,
    split: str | None = None,
    *,
    all_passes: bool = False,
    strict: bool = False,
) -> Iterator[Row]:
    """Assembled rows in step order, one a rollout, sorted by sample and repeat.

    Takes and raises what :func:`read_predictions` does. The rows of rollouts that finished after their
    pass had been assembled follow the pass's own; they are flagged ``late``. A pass that is not assembled,
    since it goes on, was interrupted, or is a training pass without ``record_train=True``, has no rows.
    """
    choice = _Choice(output_dir, steps, split, all_passes, strict)
    return _read_rows(choice, strict)


class _Choice:
    """Which passes of an output folder are to be read."""

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        steps: int | Collection[int] | None,
        split: str | None,
        all_passes: bool,
        strict: bool,
    ) -> None:
        if split is not None and split not in SPLITS:
            raise ValueError(f"split is {split!r}; expected 'train', 'val' or None for both.")
        self.root = any_path(output_dir)
        if not is_folder(self.root):
            raise OutputDirError(
                f"{str(output_dir)!r} is not a folder; expected the output_dir of a training."
            )
        self._steps = {steps} if isinstance(steps, int) else None if steps is None else set(steps)
        self._split = split
        self._all_passes = all_passes
        self._strict = strict
        self.is_everything = steps is None and split is None

    def passes(self) -> Iterator[PassFolder]:
        """In numeric order; of several at one step the newest complete one, unless all are wanted."""
        found = filter(self._is_wanted, find_passes(self.root, self._report))
        for _, group in itertools.groupby(found, key=lambda folder: folder[:2]):
            folders = list(group)
            if self._all_passes:
                yield from folders
            elif len(folders) == 1:
                yield folders[0]
            else:
                complete = (folder for folder in reversed(folders) if is_complete(folder.path))
                yield next(complete, folders[-1])

    def _report(self, step: int, folder: AnyPath, error: OSError) -> None:
        if self._steps is not None and step not in self._steps:
            return
        message = f"{folder}: can't be read ({error.strerror or error}); expected a folder of predictions."
        if self._strict:
            raise RecordError(message) from error
        warnings.warn(message, DamagedRecordWarning, stacklevel=5)

    def _is_wanted(self, folder: PassFolder) -> bool:
        return (self._steps is None or folder.global_step in self._steps) and (
            self._split is None or folder.split == self._split
        )


def _read(choice: _Choice, strict: bool) -> Iterator[Prediction]:
    folders = [folder.path / SHARDS for folder in choice.passes()]
    if choice.is_everything:
        folders.append(choice.root / UNSTAMPED / SHARDS)
    for shards in folders:
        files = _listed(shards, _SHARD.fullmatch, strict)
        seen: set[int] = set()
        for prediction in _read_files(files, parse_prediction, strict):
            if prediction is None:
                continue
            # What is the same in all of these was written by one call: somebody copied its file.
            key = hash((prediction.saved_at, prediction.sequence, prediction.context.rollout_id))
            if key in seen:
                _tell(_duplicate(prediction), strict)
                continue
            seen.add(key)
            yield prediction


def _read_rows(choice: _Choice, strict: bool) -> Iterator[Row]:
    for folder in choice.passes():
        entries = {entry.name: entry for entry in _listed(folder.path, _ROW_FILES.fullmatch, strict)}
        if PREDICTIONS_FILE in entries:
            entries.pop(PREDICTIONS_FILE + COMPRESSED, None)
        # What came late stands behind.
        files = sorted(entries.values(), key=lambda entry: (not entry.name.startswith("pred"), entry.name))
        yield from _read_files(files, parse_row, strict)


_SHARD = re.compile(rf".*{SHARD_SUFFIX}({COMPRESSED})?", re.DOTALL)
_ROW_FILES = re.compile(rf"{PREDICTIONS_FILE}({COMPRESSED})?|{LATE_FILE}|late\.[0-9a-f]+\.jsonl")


def _listed(folder: AnyPath, is_wanted: Callable[[str], object], strict: bool) -> list[Entry]:
    try:
        return [entry for entry in list_folder(folder) if not entry.is_dir and is_wanted(entry.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        _tell(_unreadable(folder, error), strict)
        return []


_Parsed = TypeVar("_Parsed")


def _read_files(
    files: Iterable[Entry], parse: Callable[[bytes | None, AnyPath, int], _Parsed], strict: bool
) -> Iterator[_Parsed]:
    for entry, file in open_files(files):
        if isinstance(file, Exception):
            _tell(_unreadable(entry.path, file), strict)
            continue
        with file:
            yield from _read_lines(file, entry.path, parse, strict)


def _read_lines(
    file: BinaryIO, path: AnyPath, parse: Callable[[bytes | None, AnyPath, int], _Parsed], strict: bool
) -> Iterator[_Parsed]:
    damaged = 0
    lines = read_lines(file)
    while True:
        try:
            line = next(lines, None)
        except OSError as error:
            _tell(_unreadable(path, error), strict)
            return
        if line is None:
            break
        try:
            parsed = parse(line.content, path, line.number)
        except RecordError as error:
            damaged += 1
            if strict or damaged <= MAX_REPORTED:
                _tell(error, strict)
            if damaged >= MAX_DAMAGED:
                break
            continue
        yield parsed
    if damaged > MAX_REPORTED:
        end = ", and the rest was left out" if damaged >= MAX_DAMAGED else ""
        further = f"{damaged - MAX_REPORTED} further lines of it can't be read{end}."
        _tell(RecordError(f"{path}: {further}"), strict)


def _duplicate(prediction: Prediction) -> RecordError:
    return RecordError(
        f"{prediction.path}, line {prediction.line}: this record stands in another place of the pass, too, "
        "and is left out here."
    )


def _unreadable(path: AnyPath, error: Exception) -> RecordError:
    return RecordError(f"{path}: can't be read ({describe_error(error):.300}).")


def _tell(error: RecordError, strict: bool) -> None:
    if strict:
        raise error
    warnings.warn(str(error), DamagedRecordWarning, stacklevel=5)


def read_pass(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``pass.json`` says about a pass: run, reason, epoch, what is expected, versions.

    Raises :class:`RecordError` if it is missing, damaged or of an unknown schema version.
    """
    return _read_document(any_path(folder) / PASS_FILE, PASS_SCHEMA)


def read_summary(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``summary.json`` says about a pass: counts, verdict, who did not succeed and why, metrics.

    Raises :class:`RecordError` if it is missing, because the pass goes on or was interrupted, or if it is
    damaged or of an unknown schema version.
    """
    return _read_document(any_path(folder) / SUMMARY_FILE, SUMMARY_SCHEMA)


def is_complete(folder: str | os.PathLike[str]) -> bool:
    """Whether a pass was assembled, and of every rollout that was expected something came."""
    try:
        return read_summary(folder).get("verdict") == COMPLETE
    except RecordError:
        return False


def _read_document(path: AnyPath, schema: int) -> dict[str, Any]:
    try:
        document = load_json(read_document(path), str(path), f"a {path.name}")
    except OSError as error:
        raise RecordError(f"{path}: can't be read ({error}); expected a {path.name}.") from error
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise RecordError(
            f"{path}: found schema {describe(found)}; this agl_meta reads schema {schema}. Read it with the "
            "version that wrote it."
        )
    try:
        return dict(decode(document))
    except DAMAGE as error:
        raise RecordError(f"{path}: damaged content ({describe_error(error):.200}).") from error
