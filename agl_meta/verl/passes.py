"""The passes of one ``fit()``: opens their folders and says what a batch is stamped with."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson

from agl_meta.context import STAMP_KEY, STAMP_SCHEMA, split_name
from agl_meta.errors import ConfigurationError
from agl_meta.faults import faults
from agl_meta.sample_keys import SampleNamer
from agl_meta.storage import create_pass, publish
from agl_meta.verl.positions import Position
from agl_meta.verl.settings import Settings
from agl_meta.verl.versions import installed_versions


@attrs.define
class OpenPass:
    """A pass whose tasks are being enqueued; it may hold several batches."""

    position: Position
    """Position of its first batch."""
    pass_path: str | None
    """Its folder below the root; ``None`` if nothing is saved or it could not be made."""
    namer: SampleNamer
    batches: int = 0


class BatchStamp:
    """Stamps the tasks of one batch."""

    def __init__(self, position: Position, entry: Mapping[str, Any], namer: SampleNamer) -> None:
        self._flat = {
            "epoch": position.epoch,
            "global_step": position.global_step,
            "batch_index": position.batch_index,
            "is_train": position.is_train,
        }
        self.label = f"{split_name(position.is_train)} step {position.global_step}"
        """Name of the pass for people."""
        self._entry = dict(entry)
        self._namer = namer
        self._samples: dict[Any, dict[str, Any]] = {}
        self.tasks = 0
        """How many tasks were stamped."""

    def stamp(self, sample: Any, metadata: dict[str, Any]) -> None:
        """Add the stamp to a task's metadata; repeats of a sample are known by its ``data_id``."""
        self.tasks += 1
        data_id = metadata.get("data_id")
        entry = self._samples.get(data_id) if data_id is not None else None
        if entry is None:
            entry = {
                **self._entry,
                "sample_index": len(self._samples),
                "sample_key": self._namer.name(sample),
                "repeat_index": 0,
            }
            # A copied-out daemon may name no sample; then each task is one of its own.
            self._samples[self.tasks if data_id is None else data_id] = entry
        else:
            entry = self._samples[data_id] = {**entry, "repeat_index": entry["repeat_index"] + 1}
        metadata.update(self._flat)
        metadata[STAMP_KEY] = entry


class Run:
    """One ``fit()``: its id, and the pass that is open in it."""

    def __init__(self, settings: Settings, root: str | None, stand_ins: tuple[str, ...]) -> None:
        self.settings = settings
        self.root = root
        """The output folder on this machine; ``None`` for a training that only stamps."""
        self.run_id = uuid.uuid4().hex
        self.open_pass: OpenPass | None = None
        self._stand_ins = stand_ins
        self._started_at = _now()

    @property
    def folder(self) -> Path | None:
        """Folder of the open pass."""
        if self.root is None or self.open_pass is None or self.open_pass.pass_path is None:
            return None
        return Path(self.root, self.open_pass.pass_path)

    def close_pass(self) -> None:
        """The next batch opens a pass of its own, also at the same step."""
        self.open_pass = None

    def begin_batch(self, position: Position, samples: int, repeats: int, mode: str) -> BatchStamp:
        """Open a pass for the batch, unless it belongs to the open one.

        Args:
            position: where the trainer stands.
            samples: number of samples in the batch.
            repeats: rollouts of each sample.
            mode: the daemon's, ``"v0"`` or ``"v1"``.

        A folder that can't be made does not stop the training: the tasks are stamped without one, and
        what their rollouts save is counted as lost.
        """
        expected = {
            "samples": samples,
            "rollouts_per_sample": repeats,
            "rollouts": samples * repeats,
        }
        current = self.open_pass
        if current is None or not _same_pass(current.position, position):
            path = self._create_pass(position, expected, mode)
            namer = SampleNamer(self.settings.sample_key)
            current = self.open_pass = OpenPass(position, path, namer)
        elif self.folder is not None:
            self._note_further_batch(self.folder / "batches", current, position, expected)
        current.batches += 1
        entry = {
            "schema": STAMP_SCHEMA,
            "reason": position.reason,
            "run_id": self.run_id,
            "output_dir": self.settings.output_dir,
            "pass_path": current.pass_path,
        }
        return BatchStamp(position, entry, current.namer)

    def _create_pass(self, position: Position, expected: dict[str, int], mode: str) -> str | None:
        if self.root is None:
            return None
        split = split_name(position.is_train)
        info = {
            "run_id": self.run_id,
            "global_step": position.global_step,
            "epoch": position.epoch,
            "split": split,
            "reason": position.reason,
            "expected": {"batch_index": position.batch_index, **expected},
            "sample_key": self.settings.sample_key,
            "mode": mode,
            "stand_ins": list(self._stand_ins),
            "run_started_at": self._started_at,
            "created_at": _now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": {"python": platform.python_version(), **installed_versions()},
        }
        try:
            return create_pass(self.root, position.global_step, split, info)
        except OSError as error:
            faults.record("creating the folder of a pass", error)
            return None

    def _note_further_batch(
        self, path: Path, current: OpenPass, position: Position, expected: dict[str, int]
    ) -> None:
        try:
            path.mkdir(exist_ok=True)
            content = orjson.dumps({"batch_index": position.batch_index, **expected})
            publish(str(path / f"{current.batches + 1}.json"), content + b"\n")
        except OSError as error:
            faults.record("noting a further batch of a pass", error)


def check_sample_key(settings: Settings, columns: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigurationError` if the samples lack the field that is to name them."""
    field = settings.sample_key
    if field is not None and field not in columns:
        raise ConfigurationError(
            f"sample_key is {field!r}, but the samples have only {', '.join(map(str, columns))}; "
            "expected a field that every training and validation sample has. Correct sample_key, or "
            "leave it out to name samples by their content."
        )


def _same_pass(first: Position, other: Position) -> bool:
    # An evaluation is closed when it ends, a training step when the next one begins.
    return (first.is_train, first.global_step) == (other.is_train, other.global_step)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat()
