"""The end of a pass: joins what was queued, what the trainer got and what rollouts saved to rows.

Everything is joined by rollout id and attempt, never by position. Rows are written as they are made, so that
a pass of any size needs little memory; the file appears under its name when it is whole.
"""

from __future__ import annotations

import array
import contextlib
import datetime
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from agl_meta.assembly import AssembledRow, Queued, Result, assemble_row
from agl_meta.decoding import decode
from agl_meta.describing import describe_error
from agl_meta.encoding import encode
from agl_meta.faults import faults
from agl_meta.files import COMPRESSED, AnyPath, list_folder
from agl_meta.publishing import publish_rows
from agl_meta.rows import Rows
from agl_meta.saved import SavedRecords
from agl_meta.storage import (
    FILES,
    PREDICTIONS_FILE,
    SHARDS,
    SUMMARY_FILE,
    SUMMARY_SCHEMA,
    publish,
    write_all,
)
from agl_meta.verdict import (
    COMPLETE,
    INCOMPLETE,
    Tally,
    differences,
    number,
    reasons_incomplete,
)

logger = logging.getLogger(__name__)


class PassRecorder:
    """Writes ``predictions.jsonl`` and ``summary.json`` of one pass.

    Args:
        folder: the pass's, with what its rollouts saved; ``None`` if there is none.
        about: what the summary says first: run, step, epoch, split, reason.
        is_published: whether rows and summary appear in the folder; if not, the rows stand in a
            temporary file until :meth:`discard`.
        is_compressed: whether the rows are compressed when they are published.
    """

    def __init__(
        self,
        folder: AnyPath | None,
        about: Mapping[str, Any],
        *,
        is_published: bool = True,
        is_compressed: bool = False,
    ) -> None:
        self._folder = folder
        self._target = folder if is_published else None
        self._rows_file = PREDICTIONS_FILE + COMPRESSED if is_compressed else PREDICTIONS_FILE
        self._about = dict(about)
        self._is_train = about["split"] == "train"
        self._tally = Tally()
        self._batch = Tally()
        self._differences: list[dict[str, Any]] = []
        self._saved = SavedRecords(None if folder is None else folder / SHARDS)
        self._failures: list[str] = []
        self._faults_before = faults.counts()
        self._superseded = 0
        self._seconds = 0.0
        self._offsets = array.array("q", [0])
        name = f"{PREDICTIONS_FILE}.{secrets.token_hex(6)}.tmp"
        is_beside = isinstance(self._target, Path)
        self._temporary = Path(str(self._target) if is_beside else tempfile.gettempdir(), name)
        self._has_published_rows = False
        # In the folder for temporary files others look, too.
        rights = 0o666 if is_beside else 0o600
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor: int | None = os.open(self._temporary, flags, rights)

    # ------------------------------------------------------------------------------------ rows

    def add(
        self,
        queued: Iterable[Queued],
        results: Mapping[str, Sequence[Result]],
    ) -> Rows:
        """Write the rows of one batch, sorted by sample and repeat; gives these rows.

        Args:
            queued: the rollouts of the batch.
            results: by rollout id, what came of each; first the one that the metrics took.

        Raises :class:`OSError`; the rows that were written until then stay.
        """
        first = len(self._offsets) - 1
        self._batch = Tally()
        self._saved.look()
        for rollout_id, found in results.items():
            for result in found:
                self._saved.add_lines(result.emitted, f"spans of {rollout_id}")
        own_files = self._own_files()
        for task in sorted(queued, key=_place):
            came, records = results.get(task.rollout_id, ()), self._saved.take(task.rollout_id)
            self._write(assemble_row(task, task.context(), came, records, own_files))
        return self._rows(first)

    def fail(self, cause: BaseException) -> None:
        """The rows of a batch could not be written: the summary says so."""
        why = f"rows could not be written: {describe_error(cause)}"
        if why not in self._failures:
            self._failures.append(why)

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Compare what upstream computed of the batch with what its rows say."""
        batch, is_train = self._batch, self._is_train
        found = differences(metrics, batch.metrics(is_train), batch.scales(is_train))
        if found:
            logger.warning("The metrics of %s differ from what its rows say: %s", self._about["pass"], found)
            self._differences += found

    def _write(self, row: AssembledRow) -> None:
        assert self._descriptor is not None
        try:
            write_all(self._descriptor, row.line)
        except BaseException:
            os.ftruncate(self._descriptor, self._offsets[-1])  # no row is glued to half of another
            raise
        self._offsets.append(self._offsets[-1] + len(row.line))
        self._superseded += row.superseded
        self._batch.add(row.facts)
        self._tally.add(row.facts)

    def _own_files(self) -> frozenset[str]:
        if self._folder is None:
            return frozenset()
        try:
            return frozenset(entry.name for entry in list_folder(self._folder / FILES))
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            faults.record("listing the files of rollouts", error)
            return frozenset()

    def _rows(self, first: int = 0) -> Rows:
        # In this order: a file that somebody put under the final name is not what the offsets belong to.
        final = [] if self._target is None else [self._target / self._rows_file]
        return Rows([self._temporary, *final], self._offsets[first:], first + 1)

    # ----------------------------------------------------------------------------------- summary

    def close(self, expected: int, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
        """Publish the rows, then the summary; gives the summary.

        Args:
            expected: how many rollouts the pass was to have.
            metrics: what upstream logs of it; ``None`` if it never came to that.

        Rows that can't be published stay in their temporary file, and the summary says so. Raises
        :class:`OSError` if there can be no summary either.
        """
        with self.timed():
            try:
                self._publish_rows()
            except OSError as error:
                faults.record("publishing the rows of a pass", error)
                self.fail(error)
                self._failures.append(f"the rows were left in {self._temporary}")
        counts = self._tally.counts()
        lost, rewards = self._tally.lost(), self._tally.rewards()
        self._warn(lost, rewards)
        reasons = self._failures or reasons_incomplete(expected, counts, metrics is not None)
        summary = {
            "schema": SUMMARY_SCHEMA,
            **self._about,
            "verdict": INCOMPLETE if reasons else COMPLETE,
            "incomplete_because": reasons,
            "expected": expected,
            **counts,
            "superseded": self._superseded,
            "not_succeeded": self._tally.not_succeeded(),
            "reward": rewards,
            "metrics": None if metrics is None else {name: _plain(metrics[name]) for name in metrics},
            "differences": self._differences,
            "lost": lost,
            "unreadable": self._saved.unreadable,
            "faults": {
                name: count - self._faults_before.get(name, 0)
                for name, count in faults.counts().items()
                if count > self._faults_before.get(name, 0)
            },
            "recording_seconds": round(self._seconds, 6),
            "assembled_at": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        }
        encoded = encode(summary)
        if self._target is not None:
            pretty = orjson.dumps(orjson.loads(encoded), option=orjson.OPT_INDENT_2)
            publish(self._target / SUMMARY_FILE, pretty + b"\n")
        return dict(decode(orjson.loads(encoded)))

    def _warn(self, lost: Mapping[str, int], rewards: Mapping[str, Any]) -> None:
        if lost:
            logger.warning("Rollouts of %s could not save what they wanted: %s", self._about["pass"], lost)
        if rewards["dropped"]:
            logger.warning(
                "%d rollouts of %s gave a reward that upstream dropped, so that the metrics count them as "
                "having none: it assigns rewards to model calls, of which none was traced, and its v0 runner "
                "takes nothing but a float.",
                rewards["dropped"],
                self._about["pass"],
            )

    def _publish_rows(self) -> None:
        if self._target is None or self._descriptor is None or self._has_published_rows:
            return
        publish_rows(self._temporary, self._target / self._rows_file)
        self._has_published_rows = True  # closing may be tried again, after a summary that found no room

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of a block as time that recording took."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    def rows(self) -> Rows:
        """All rows so far, readable until :meth:`discard`, and from a folder for ever."""
        return self._rows()

    def discard(self) -> None:
        """Nothing more comes; deletes the temporary file, unless it holds all that there is of the rows."""
        self._saved.close()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        if self._target is None or self._has_published_rows:
            self._temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """A metric without numpy's kind of it, for people who read the file."""
    return value if type(value) in (int, str, bool) else number(value)


def _place(task: Queued) -> tuple[int, int, int]:
    context = task.context()
    return (context.batch_index or 0, context.sample_index or 0, context.repeat_index or 0)
