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

import attrs
import orjson

from agl_meta.context import TrainingContext
from agl_meta.decoding import decode
from agl_meta.encoding import encode
from agl_meta.errors import StampError
from agl_meta.faults import faults
from agl_meta.records import OUTCOME, PREDICTION
from agl_meta.rows import FAILED, MISSING, SUCCEEDED, Rows, Turn, grouped, members, row_line
from agl_meta.saved import Attempt, SavedRecord, SavedRecords, load_value
from agl_meta.storage import (
    FILES,
    PREDICTIONS_FILE,
    SHARDS,
    SUMMARY_FILE,
    SUMMARY_SCHEMA,
    publish,
    publish_file,
    rollout_folder,
)
from agl_meta.verdict import (
    COMPLETE,
    INCOMPLETE,
    RolloutFacts,
    Tally,
    differences,
    number,
    reasons_incomplete,
)

logger = logging.getLogger(__name__)

_NEVER_FINISHED = {
    "type": None,
    "message": "it was queued, and had not finished when the pass ended",
    "traceback": None,
}
_BUFFER = 1 << 20


@attrs.frozen(kw_only=True)
class Queued:
    """A rollout that the trainer enqueued."""

    rollout_id: str
    metadata: Mapping[str, Any]
    """As stamped."""
    input: Any
    """The sample as the agent gets it."""
    attempt: Any = None
    """For :meth:`TrainingContext.from_rollout`; nothing was attempted yet."""


@attrs.frozen(kw_only=True)
class Result:
    """What the trainer got of one attempt of a rollout."""

    status: str
    turns: Sequence[Turn]
    reward: Any
    reward_used: Any
    error: Mapping[str, Any] | None = None
    attempt_id: str | None = None
    attempt_number: int | None = None
    emitted: Sequence[bytes] = ()
    """Record lines that came with it, not through a shard."""

    @property
    def attempt(self) -> Attempt:
        """What tells it from other attempts of the rollout."""
        return self.attempt_id if self.attempt_id is not None else self.attempt_number


class PassRecorder:
    """Writes ``predictions.jsonl`` and ``summary.json`` of one pass.

    Args:
        folder: the pass's, with what its rollouts saved; ``None`` if there is none.
        about: what the summary says first: run, step, epoch, split, reason.
        is_published: whether rows and summary appear in the folder; if not, the rows stand in a
            temporary file until :meth:`discard`.
    """

    def __init__(self, folder: Path | None, about: Mapping[str, Any], *, is_published: bool = True) -> None:
        self._folder = folder
        self._target = folder if is_published else None
        self._about = dict(about)
        self._is_train = about["split"] == "train"
        self._tally = Tally()
        self._batch = Tally()
        self._differences: list[dict[str, Any]] = []
        self._unreadable: list[dict[str, Any]] = []
        self._failures: list[str] = []
        self._faults_before = faults.counts()
        self._superseded = 0
        self._seconds = 0.0
        self._offsets = array.array("q", [0])
        name = f"{PREDICTIONS_FILE}.{secrets.token_hex(6)}.tmp"
        self._temporary = Path(self._target or tempfile.gettempdir(), name)
        self._file = self._temporary.open("xb", buffering=_BUFFER)

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
        """
        first = len(self._offsets) - 1
        self._batch = Tally()
        with SavedRecords(None if self._folder is None else self._folder / SHARDS) as saved:
            for rollout_id, found in results.items():
                for result in found:
                    saved.add_lines(result.emitted, f"spans of {rollout_id}")
            own_files = self._own_files()
            for context, task in sorted(
                ((_context(task), task) for task in queued), key=lambda pair: _place(pair[0])
            ):
                self._write(context, task, results.get(task.rollout_id, ()), saved, own_files)
        for unreadable in saved.unreadable:
            if unreadable not in self._unreadable:
                self._unreadable.append(unreadable)
        self._file.flush()
        return self._rows(first)

    def fail(self, cause: BaseException) -> None:
        """The rows of a batch could not be written: the summary says so."""
        self._failures.append(f"rows could not be written: {type(cause).__name__}: {cause}")

    def check(self, metrics: Mapping[str, Any]) -> None:
        """Compare what upstream computed of the batch with what its rows say."""
        found = differences(metrics, self._batch.metrics(self._is_train))
        if found:
            logger.warning("The metrics of %s differ from what its rows say: %s", self._about["pass"], found)
            self._differences += found

    def _write(
        self,
        context: TrainingContext,
        task: Queued,
        results: Sequence[Result],
        saved: SavedRecords,
        own_files: frozenset[str],
    ) -> None:
        records = saved.of(task.rollout_id)
        attempts = _attempts(results, records)
        accepted = _accepted(results, attempts)
        own: list[SavedRecord] = []
        others = attempts
        if accepted is not None:
            own = [record for record in records if record.attempt == accepted.attempt]
            others = [attempt for attempt in attempts if attempt != accepted.attempt]
            context = attrs.evolve(
                context, attempt_id=accepted.attempt_id, attempt_number=accepted.attempt_number
            )
        fields = _fields(accepted, own)
        data_source = task.input.get("data_source") if isinstance(task.input, Mapping) else None
        files = rollout_folder(task.rollout_id, context.attempt_number)
        superseded = [
            _superseded(
                next((result for result in results[1:] if result.attempt == attempt), None),
                attempt,
                [record for record in records if record.attempt == attempt],
            )
            for attempt in others
        ]
        self._superseded += len(superseded)
        line = row_line(
            context,
            {
                **fields,
                "data_source": data_source,
                "input": task.input,
                "attempts": len(attempts) or None,
                "files": f"{FILES}/{files}" if files in own_files else None,
                "late": False,
            },
            reward=_reward(accepted, own),
            predictions=_predictions(own),
            superseded=b"[%b]" % b",".join(superseded),
        )
        self._file.write(line)
        self._offsets.append(self._offsets[-1] + len(line))
        facts = RolloutFacts(
            rollout_id=task.rollout_id,
            sample_key=context.sample_key,
            repeat_index=context.repeat_index,
            status=fields["status"],
            error=fields["error"],
            reward=accepted.reward if accepted else None,
            reward_used=fields["reward_used"],
            response_tokens=tuple(turn.response_tokens for turn in accepted.turns) if accepted else (),
            data_source=data_source,
        )
        self._batch.add(facts)
        self._tally.add(facts)

    def _own_files(self) -> frozenset[str]:
        if self._folder is None:
            return frozenset()
        try:
            return frozenset(os.listdir(self._folder / FILES))
        except FileNotFoundError:
            return frozenset()

    def _rows(self, first: int = 0) -> Rows:
        final = [] if self._target is None else [self._target / PREDICTIONS_FILE]
        return Rows([*final, self._temporary], self._offsets[first:])

    # ----------------------------------------------------------------------------------- summary

    def close(self, expected: int, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
        """Publish the rows, then the summary; gives the summary.

        Args:
            expected: how many rollouts the pass was to have.
            metrics: what upstream logs of it; ``None`` if it never came to that.

        Raises :class:`OSError`.
        """
        with self.timed():
            self._publish_rows()
        counts = self._tally.counts()
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
            "reward": self._tally.rewards(),
            "metrics": None if metrics is None else {name: _plain(metrics[name]) for name in metrics},
            "differences": self._differences,
            "unreadable": self._unreadable,
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
            publish(str(self._target / SUMMARY_FILE), pretty + b"\n")
        return dict(decode(orjson.loads(encoded)))

    def _publish_rows(self) -> None:
        self._file.flush()
        if self._target is not None:
            os.fsync(self._file.fileno())
        self._file.close()
        if self._target is not None:
            publish_file(str(self._temporary), str(self._target / PREDICTIONS_FILE))

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
        """Delete the rows of a pass that is not published."""
        self._file.close()
        if self._target is None:
            self._temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """A metric without numpy's kind of it, for people who read the file."""
    return value if type(value) in (int, str, bool) else number(value)


# --------------------------------------------------------------------------------------- one row


def _context(task: Queued) -> TrainingContext:
    try:
        return TrainingContext.from_rollout(task)
    except StampError as error:  # only a copied-out daemon that changes what it was given
        faults.record("reading the stamp of a queued rollout", error)
        return TrainingContext(rollout_id=task.rollout_id)


def _place(context: TrainingContext) -> tuple[int, int, int]:
    return (context.batch_index or 0, context.sample_index or 0, context.repeat_index or 0)


def _attempts(results: Sequence[Result], records: Sequence[SavedRecord]) -> list[Attempt]:
    """All attempts that are known of, in order, each once."""
    found = dict.fromkeys(result.attempt for result in results)
    found.update(dict.fromkeys(record.attempt for record in records))
    # A result that does not say its attempt (a v0 agent without the mixin) is that of the one there is.
    if None in found and len(found) > 1:
        del found[None]
    return list(found)


def _accepted(results: Sequence[Result], attempts: Sequence[Attempt]) -> Result | None:
    """The result that the metrics took; one that does not say its attempt is that of the last one."""
    if not results:
        return None
    accepted = results[0]
    if accepted.attempt is None and attempts:
        attempt = attempts[-1]
        if isinstance(attempt, str):
            return attrs.evolve(accepted, attempt_id=attempt)
        return attrs.evolve(accepted, attempt_number=attempt)
    return accepted


def _fields(result: Result | None, records: Sequence[SavedRecord]) -> dict[str, Any]:
    """What a row says of the attempt that counted, or an entry of ``superseded`` of its own."""
    if result is None:
        return {
            "status": MISSING,
            "error": _NEVER_FINISHED,
            "turns": [],
            "output": None,
            "reward_used": None,
        }
    return {
        "status": result.status,
        "error": _error(result, records),
        "turns": [attrs.asdict(turn, recurse=False) for turn in result.turns],
        "output": result.turns[-1].response if result.turns else None,
        "reward_used": result.reward_used,
    }


def _reward(result: Result | None, records: Sequence[SavedRecord]) -> bytes:
    """The reward as the agent gave it: also where upstream lost it, having no turn to assign it to (v1), or
    taking nothing but a float (v0)."""
    if result is not None and result.reward is not None:
        return encode(result.reward)
    outcome = _outcome(records)
    returned = None if outcome is None else outcome.get("returned")
    return b"null" if returned is None else orjson.dumps(returned)


def _error(result: Result, records: Sequence[SavedRecord]) -> Mapping[str, Any] | None:
    if result.status == SUCCEEDED:
        return None
    outcome = _outcome(records) or {}
    if outcome.get("error"):
        return dict(outcome["error"])
    if result.error is not None:
        return result.error
    message = "no cause was recorded; see the runner's log"
    if outcome:
        message = (
            f"upstream marked it as {result.status} although its method returned, a "
            f"{outcome.get('returned_type')}; see the runner's log"
        )
    return {"type": None, "message": message, "traceback": None}


def _outcome(records: Sequence[SavedRecord]) -> dict[str, Any] | None:
    """How the attempt went from its own side, where it recorded that; as a JSON document."""
    for record in reversed(records):
        if record.kind == OUTCOME:
            try:
                found = load_value(record)
            except (ValueError, OSError):
                continue
            if isinstance(found, dict):
                return found
    return None


def _predictions(records: Sequence[SavedRecord]) -> bytes:
    values = []
    for record in sorted(records, key=lambda record: record.sequence):
        if record.kind == PREDICTION:
            try:
                values.append((record.name, record.value()))
            except OSError as error:
                faults.record("reading what a rollout saved", error)
    return grouped(values)


def _superseded(result: Result | None, attempt: Attempt, records: Sequence[SavedRecord]) -> bytes:
    fields = _fields(result, records)
    outcome = _outcome(records)
    if result is None and outcome is not None:
        fields["error"] = outcome.get("error")
        fields["status"] = FAILED if fields["error"] else SUCCEEDED
    fields["attempt_id"] = attempt if isinstance(attempt, str) else None
    fields["attempt_number"] = attempt if isinstance(attempt, int) else None
    if result is not None and result.attempt_number is not None:
        fields["attempt_number"] = result.attempt_number
    encoded = {"reward": _reward(result, records), "predictions": _predictions(records)}
    return b"{%b}" % members(fields, encoded)


def late_line(row: bytes, result: Result, folder: Path) -> bytes:
    """The row of a rollout that finished after its pass was assembled.

    Args:
        row: the line that stands in the pass.
        result: what came late.
        folder: the pass's.
    """
    with SavedRecords(folder / SHARDS) as saved:
        document = orjson.loads(row)
        saved.add_lines(result.emitted, "spans")
        records = [record for record in saved.of(document["rollout_id"]) if record.attempt == result.attempt]
        encoded = {"reward": _reward(result, records)}
        document.update(orjson.loads(b"{%b}" % members(_fields(result, records), encoded)))
        document.update(
            attempt_id=result.attempt_id,
            attempt_number=result.attempt_number,
            late=True,
            superseded=[],
            predictions=orjson.loads(_predictions(records)),
        )
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
