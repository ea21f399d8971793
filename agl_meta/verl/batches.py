"""A batch between trainer and queue: stamped when it is enqueued, recorded when it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from agl_meta.assembly import Queued
from agl_meta.context import STAMP_KEY, split_name
from agl_meta.faults import faults
from agl_meta.recorder import PassRecorder
from agl_meta.rows import Rows
from agl_meta.sample_keys import SampleNamer
from agl_meta.verl.late import LateResults
from agl_meta.verl.positions import Position
from agl_meta.verl.results import Seen, collect_results


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
    is_assembled: bool = False
    summary: Mapping[str, Any] | None = None
    """What was published of it."""


class Batch:
    """One batch: stamps its tasks, and sees what comes of them."""

    def __init__(
        self,
        open_pass: OpenPass,
        position: Position,
        entry: Mapping[str, Any],
        late: LateResults,
        keep_special_tokens: bool,
    ) -> None:
        self._open_pass = open_pass
        self._late = late
        self._keep_special_tokens = keep_special_tokens
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
                self._late.posted(rollout)
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
        results = collect_results(daemon, self._seen, self._keep_special_tokens)
        queued = [
            Queued(
                rollout_id=rollout_id,
                metadata=metadata,
                input=self._inputs.get(metadata[STAMP_KEY]["sample_index"]),
            )
            for rollout_id, metadata in self._queued.items()
        ]
        self._open_pass.rows = recorder.add(queued, results)
        self._late.watch(self._open_pass.pass_path, self._queued, results)

    @property
    def is_pending(self) -> bool:
        """Whether it has tasks whose rows are still to be written."""
        return self._open_pass.batch is self and bool(self._queued)

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Compare the rows with what upstream computed."""
        if self._open_pass.recorder is not None:
            self._open_pass.recorder.check(metrics)
