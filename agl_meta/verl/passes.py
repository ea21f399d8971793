"""The passes of one ``fit()``: opens their folders and says what a batch is stamped with."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson

from agl_meta.context import STAMP_KEY, STAMP_SCHEMA, split_name
from agl_meta.errors import ConfigurationError
from agl_meta.faults import faults
from agl_meta.recorder import PassRecorder, Queued
from agl_meta.rows import Rows
from agl_meta.sample_keys import SampleNamer
from agl_meta.storage import create_pass, publish
from agl_meta.verl.late import LateResults
from agl_meta.verl.positions import Position
from agl_meta.verl.results import Seen, collect_results
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
    recorder: PassRecorder | None
    """What writes its rows; ``None`` if they are not wanted."""
    batches: int = 0
    expected: int = 0
    """Rollouts that its batches were to have."""
    batch: Batch | None = None
    """The batch whose rollouts are waited for."""
    rows: Rows = attrs.field(factory=Rows)
    """Those of the batch that was recorded last."""
    metrics: Mapping[str, Any] | None = None
    """What upstream logs of it, once it does."""
    summary: Mapping[str, Any] | None = None
    """What was published of it."""


class Batch:
    """One batch: stamps its tasks, and sees what comes of them."""

    def __init__(self, run: Run, open_pass: OpenPass, position: Position, entry: Mapping[str, Any]) -> None:
        self._run = run
        self._open_pass = open_pass
        self._flat = {
            "epoch": position.epoch,
            "global_step": position.global_step,
            "batch_index": position.batch_index,
            "is_train": position.is_train,
        }
        self.label = f"{split_name(position.is_train)} step {position.global_step}"
        """Name of the pass for people."""
        self._entry = dict(entry)
        self._samples: dict[Any, dict[str, Any]] = {}
        self._inputs: dict[Any, Any] = {}
        self._queued: dict[str, Mapping[str, Any]] = {}
        self._seen = Seen()
        self.is_recorded = open_pass.recorder is not None
        self.tasks = 0
        """How many tasks were stamped."""

    # What the queue calls: see agl_meta.verl.stamping.Batch.

    def stamp(self, sample: Any, metadata: dict[str, Any]) -> None:
        """Add the stamp to a task's metadata; repeats of a sample are known by its ``data_id``."""
        self.tasks += 1
        data_id = metadata.get("data_id")
        entry = self._samples.get(data_id) if data_id is not None else None
        if entry is None:
            entry = {
                **self._entry,
                "sample_index": len(self._samples),
                "sample_key": self._open_pass.namer.name(sample),
                "repeat_index": 0,
            }
            # A copied-out daemon may name no sample; then each task is one of its own.
            self._samples[self.tasks if data_id is None else data_id] = entry
            if self.is_recorded:
                self._inputs[entry["sample_index"]] = sample
        else:
            entry = self._samples[data_id] = {**entry, "repeat_index": entry["repeat_index"] + 1}
        metadata.update(self._flat)
        metadata[STAMP_KEY] = entry

    def queued(self, rollout_id: str, metadata: Mapping[str, Any]) -> None:
        """A task was enqueued under this id."""
        if self.is_recorded:
            self._queued[rollout_id] = metadata

    def posted(self, rollouts: Sequence[Any]) -> None:
        """v0: what runners posted is given to the daemon."""
        for rollout in rollouts:
            if rollout.rollout_id not in self._queued:
                self._run.late.posted(rollout)
            elif rollout.rollout_id in self._seen.taken:
                self._seen.again.append(rollout)
            else:
                self._seen.taken.add(rollout.rollout_id)

    def finished(self, rollouts: Sequence[Any]) -> None:
        """v1: the daemon is told of finished rollouts."""
        if self.is_recorded:
            self._seen.note_finished(rollouts)

    def spans_read(self, rollout_id: str, spans: Sequence[Any]) -> None:
        """v1: the daemon read the spans of a rollout."""
        if self.is_recorded:
            self._seen.note_spans(rollout_id, spans)

    # What the daemon calls.

    def record(self, daemon: Any) -> None:
        """Write the rows of what the daemon holds, before it is cleared."""
        self._open_pass.batch = None
        recorder = self._open_pass.recorder
        if recorder is None:
            return
        with recorder.timed():
            try:
                self._write_rows(recorder, daemon)
            except Exception as error:
                faults.record("writing the rows of a pass", error)
                recorder.fail(error)
        self._inputs = {}

    def _write_rows(self, recorder: PassRecorder, daemon: Any) -> None:
        results = collect_results(daemon, self._seen, self._run.settings.keep_special_tokens)
        queued = [
            Queued(
                rollout_id=rollout_id,
                metadata=metadata,
                input=self._inputs.get(metadata[STAMP_KEY]["sample_index"]),
            )
            for rollout_id, metadata in self._queued.items()
        ]
        self._open_pass.rows = recorder.add(queued, results)
        self._run.late.watch(self._open_pass.pass_path, self._queued, results)

    @property
    def is_pending(self) -> bool:
        """Whether it has tasks whose rows are still to be written."""
        return self._open_pass.batch is self and bool(self._queued)

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Compare the rows with what upstream computed."""
        if self._open_pass.recorder is not None:
            self._open_pass.recorder.check(metrics)


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
    def folder(self) -> Path | None:
        """Folder of the open pass."""
        if self.root is None or self.open_pass is None or self.open_pass.pass_path is None:
            return None
        return Path(self.root, self.open_pass.pass_path)

    def assemble(self, daemon: Any) -> Rows:
        """Publish the open pass, and what came late of former ones; gives its rows.

        ``open_pass.summary`` holds its summary afterwards, unless that failed.
        """
        current = self.open_pass
        if current is None or current.recorder is None:
            return Rows()
        if current.batch is not None:  # the wait for it, or what upstream makes of it, was broken off
            current.batch.record(daemon)
        if current.summary is None:
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
        }
        current.batch = Batch(self, current, position, entry)
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
            folder = None if path is None or self.root is None else Path(self.root, path)
            return PassRecorder(folder, about, is_published=is_published)
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
