"""The passes of one ``fit()``: opens, assembles and closes them."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from agl_meta.context import STAMP_SCHEMA, split_name
from agl_meta.errors import ConfigurationError
from agl_meta.faults import faults
from agl_meta.files import AnyPath, any_path
from agl_meta.recorder import PassRecorder
from agl_meta.rows import Rows
from agl_meta.sample_keys import SampleNamer
from agl_meta.storage import create_pass, publish
from agl_meta.verl.batches import Batch, OpenPass
from agl_meta.verl.late import LateResults
from agl_meta.verl.positions import Position
from agl_meta.verl.settings import Settings
from agl_meta.verl.versions import installed_versions


class Run:
    """One ``fit()``: its id, and the pass that is open in it.

    Args:
        settings: the training's.
        root: the output folder on this machine; ``None`` for a training that only stamps.
        stand_ins: names of the CPU stand-ins of a dry run.
        wants_rows: by ``is_train``, whether somebody takes rows though there is no output folder.
    """

    def __init__(
        self,
        settings: Settings,
        root: str | None,
        stand_ins: tuple[str, ...],
        wants_rows: Callable[[bool], bool],
    ) -> None:
        self.settings = settings
        self.root = root
        """The output folder on this machine; ``None`` for a training that only stamps."""
        self.run_id = uuid.uuid4().hex
        self.open_pass: OpenPass | None = None
        self.late = LateResults(root, settings.keep_special_tokens)
        """What finishes after its pass was assembled."""
        self._stand_ins = stand_ins
        self._wants_rows = wants_rows
        self._started_at = _now()

    @property
    def folder(self) -> AnyPath | None:
        """Folder of the open pass."""
        if self.root is None or self.open_pass is None or self.open_pass.pass_path is None:
            return None
        return any_path(self.root) / self.open_pass.pass_path

    def assemble(self, daemon: Any) -> Rows:
        """Publish the open pass, and what came late of former ones; gives its rows.

        ``open_pass.summary`` holds its summary afterwards, unless that failed.
        """
        current = self.open_pass
        if current is None or current.recorder is None:
            return Rows()
        if current.batch is not None:  # the wait for it, or what upstream makes of it, was broken off
            current.batch.record(daemon)
        if not current.is_assembled:
            current.is_assembled = True  # also where it fails: it would fail again
            with faults.guard("assembling a pass"):
                current.summary = current.recorder.close(current.expected, current.metrics)
        self.late.flush(daemon)
        return current.recorder.rows()

    def batch_rows(self) -> Rows:
        """The rows of the batch that was recorded last in the open pass."""
        return Rows() if self.open_pass is None else self.open_pass.rows

    def close_pass(self, daemon: Any) -> None:
        """Assemble the open pass; the next batch opens one of its own, also at the same step."""
        self.assemble(daemon)
        current, self.open_pass = self.open_pass, None
        if current is not None and current.recorder is not None:
            with faults.guard("closing a pass"):
                current.recorder.discard()

    def finish(self, daemon: Any) -> None:
        """File what has come late; afterwards nobody looks any more."""
        if daemon is not None:
            self.late.finish(daemon)

    def begin_batch(self, position: Position, samples: int, repeats: int, daemon: Any) -> Batch:
        """Open a pass for the batch, unless it belongs to the open one.

        Args:
            position: where the trainer stands.
            samples: number of samples in the batch.
            repeats: rollouts of each sample.
            daemon: the one that enqueues it.

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
            self.close_pass(daemon)
            path = self._create_pass(position, expected, daemon.mode)
            namer = SampleNamer(self.settings.sample_key)
            current = self.open_pass = OpenPass(position, path, namer, self._new_recorder(position, path))
        elif self.folder is not None:
            self._note_further_batch(self.folder / "batches", current, position, expected)
        current.batches += 1
        current.expected += samples * repeats
        entry = {
            "schema": STAMP_SCHEMA,
            "reason": position.reason,
            "run_id": self.run_id,
            "output_dir": self.settings.output_dir,
            "pass_path": current.pass_path,
            "is_recorded": current.recorder is not None,
            "transport": self.settings.transport,
            "durability": self.settings.durability,
        }
        current.batch = Batch(current, position, entry, self.late, self.settings.keep_special_tokens)
        return current.batch

    def _new_recorder(self, position: Position, path: str | None) -> PassRecorder | None:
        is_published = path is not None and (self.settings.record_train or not position.is_train)
        if not is_published and not self._wants_rows(position.is_train):
            return None
        about = {
            "pass": path,
            "run_id": self.run_id,
            "global_step": position.global_step,
            "epoch": position.epoch,
            "split": split_name(position.is_train),
            "reason": position.reason,
        }
        with faults.guard("opening the rows of a pass"):
            folder = None if path is None or self.root is None else any_path(self.root) / path
            return PassRecorder(
                folder,
                about,
                is_published=is_published,
                is_compressed=self.settings.compression is not None,
            )
        return None

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
            "is_recorded": self.settings.record_train or not position.is_train,
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
        self, path: AnyPath, current: OpenPass, position: Position, expected: dict[str, int]
    ) -> None:
        try:
            if isinstance(path, Path):
                path.mkdir(exist_ok=True)
            content = orjson.dumps({"batch_index": position.batch_index, **expected})
            publish(path / f"{current.batches + 1}.json", content + b"\n")
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
