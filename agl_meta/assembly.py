"""One row: what was queued, what the trainer got of it, and what its attempts saved, put together.

Attempts are joined by their ids, never by position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import orjson

from agl_meta.context import TrainingContext
from agl_meta.describing import describe
from agl_meta.encoding import encode
from agl_meta.encoding_objects import TAG
from agl_meta.errors import StampError
from agl_meta.faults import faults
from agl_meta.files import AnyPath
from agl_meta.records import OUTCOME, PREDICTION
from agl_meta.rows import FAILED, MISSING, SUCCEEDED, Turn, grouped, members, row_line
from agl_meta.saved import Attempt, SavedRecord, SavedRecords, load_value
from agl_meta.storage import FILES, SHARDS, rollout_folder
from agl_meta.verdict import RolloutFacts

MAX_SAVED_BYTES = 64 * 2**20
"""Bytes of the saved values in one row."""
MAX_SAVED_VALUES = 4_000_000
"""About how many values there are in these."""
_NO_ROOM = orjson.dumps(
    {
        TAG: "unsaved",
        "type": "prediction",
        "why": "the row has no room for it; it stands in the shards, where read_predictions finds it",
    }
)
_NOTHING_LOST: dict[str, int] = {}
_NEVER_FINISHED = {
    "type": None,
    "message": "it was queued, and had not finished when the pass ended",
    "traceback": None,
}


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

    def context(self) -> TrainingContext:
        """Where in training it stands."""
        try:
            return TrainingContext.from_rollout(self)
        except StampError as error:  # only a copied-out daemon that changes what it was given
            faults.record("reading the stamp of a queued rollout", error)
            return TrainingContext(rollout_id=self.rollout_id)


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
    outcome: Mapping[str, Any] = attrs.field(factory=dict)
    """How it went from its own side, as a JSON document, where that came with it."""

    @property
    def attempt(self) -> Attempt:
        """What tells it from other attempts of the rollout."""
        return self.attempt_id if self.attempt_id is not None else self.attempt_number


@attrs.frozen
class AssembledRow:
    """A row as it is written, and what verdict and metrics need of it."""

    line: bytes
    facts: RolloutFacts
    superseded: int
    """How many other attempts it tells of."""


def assemble_row(
    task: Queued,
    context: TrainingContext,
    results: Sequence[Result],
    records: Sequence[SavedRecord],
    own_files: frozenset[str],
) -> AssembledRow:
    """Put a row together.

    Args:
        task: the rollout.
        context: where in training it stands.
        results: what came of it; first the one that the metrics took.
        records: what its attempts saved.
        own_files: names of the folders for own files that there are in the pass.
    """
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
    reward = _reward(accepted, own)
    upstreams = None if accepted is None else accepted.reward
    data_source = _data_source(task.input)
    files = rollout_folder(task.rollout_id, context.attempt_number)
    room = _Room()
    predictions = _predictions(own, room)
    superseded = [
        _superseded(
            next((result for result in results[1:] if result.attempt == attempt), None),
            attempt,
            [record for record in records if record.attempt == attempt],
            room,
        )
        for attempt in others
    ]
    superseded += [_superseded(result, None, (), room) for result in results[1:] if result.attempt is None]
    line = row_line(
        context,
        {
            **fields,
            "data_source": data_source,
            "input": task.input,
            "attempts": len(superseded) + (accepted is not None) or None,
            "files": f"{FILES}/{files}" if files in own_files else None,
            "late": False,
        },
        reward=reward,
        predictions=predictions,
        superseded=b"[%b]" % b",".join(superseded),
    )
    facts = RolloutFacts(
        rollout_id=task.rollout_id,
        sample_key=context.sample_key,
        repeat_index=context.repeat_index,
        status=fields["status"],
        error=fields["error"],
        reward=upstreams,
        is_reward_dropped=upstreams is None and reward != b"null",
        reward_used=fields["reward_used"],
        response_tokens=tuple(turn.response_tokens for turn in accepted.turns) if accepted else (),
        has_data_source=_has_data_source(task.input),
        data_source=data_source,
        lost=fields["lost"],
    )
    return AssembledRow(line, facts, len(superseded))


def _data_source(sample: Any) -> Any:
    try:
        return sample.get("data_source") if isinstance(sample, Mapping) else None
    except Exception:  # of a mapping of the user's
        return None


def _has_data_source(sample: Any) -> bool:
    try:
        return isinstance(sample, Mapping) and "data_source" in sample
    except Exception:  # of a mapping of the user's
        return False


def _attempts(results: Sequence[Result], records: Sequence[SavedRecord]) -> list[Attempt]:
    """All attempts that are known of, in order, each once."""
    found = dict.fromkeys(result.attempt for result in results)
    found.update(dict.fromkeys(record.attempt for record in records))
    # A result that does not say its attempt (a v0 agent without the mixin) is that of the one there is.
    if None in found and len(found) > 1:
        del found[None]
    return list(found)


def _accepted(results: Sequence[Result], attempts: Sequence[Attempt]) -> Result | None:
    """The result that the metrics took; one that does not say its attempt is of the last that no other is."""
    if not results:
        return None
    accepted, taken = results[0], [result.attempt for result in results[1:]]
    free = [attempt for attempt in attempts if attempt not in taken]
    if accepted.attempt is None and free:
        attempt = free[-1]
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
            "lost": _lost(result, records),
        }
    return {
        "status": result.status,
        "error": _error(result, records),
        "turns": [attrs.asdict(turn, recurse=False) for turn in result.turns],
        "output": result.turns[-1].response if result.turns else None,
        "reward_used": result.reward_used,
        "lost": _lost(result, records),
    }


def _reward(result: Result | None, records: Sequence[SavedRecord]) -> bytes:
    """The reward as the agent gave it: also where upstream lost it, having no turn to assign it to (v1), or
    taking nothing but a float (v0)."""
    if result is not None and result.reward is not None:
        return encode(result.reward)
    returned = _outcome(result, records).get("returned")
    return b"null" if returned is None else orjson.dumps(returned)


def _lost(result: Result | None, records: Sequence[SavedRecord]) -> dict[str, int]:
    """What the attempt wanted to save and could not: how often, by cause."""
    lost = _outcome(result, records).get("lost")
    found = lost.items() if isinstance(lost, Mapping) else ()
    return {cause: times for cause, times in found if type(times) is int} or _NOTHING_LOST


def _error(result: Result, records: Sequence[SavedRecord]) -> Mapping[str, Any] | None:
    if result.status == SUCCEEDED:
        return None
    outcome = _outcome(result, records)
    error = _texts(outcome.get("error")) or result.error
    if error is not None:
        return error
    message = "no cause was recorded; see the runner's log"
    if outcome:
        message = (
            f"upstream marked it as {result.status} although its method returned, a "
            f"{outcome.get('returned_type')!s:.200}; see the runner's log"
        )
    return {"type": None, "message": message, "traceback": None}


def _texts(error: Any) -> Mapping[str, str | None] | None:
    """An error that came from another machine, as texts; ``None`` if there is none."""
    if not error:
        return None
    given = error if isinstance(error, Mapping) else {"message": error}
    fields = {name: given.get(name) for name in ("type", "message", "traceback")}
    return {
        name: value if value is None or isinstance(value, str) else describe(value, 1000)
        for name, value in fields.items()
    }


def _outcome(result: Result | None, records: Sequence[SavedRecord]) -> Mapping[str, Any]:
    """How the attempt went from its own side, where it recorded that; as a JSON document."""
    for record in reversed(records):
        if record.kind == OUTCOME:
            try:
                found = load_value(record)
            except (ValueError, OSError):
                continue
            if isinstance(found, dict):
                return found
    return {} if result is None else result.outcome


@attrs.define
class _Room:
    """What the saved values of one row may still take: a reader refuses a line that is too long."""

    size: int = attrs.field(factory=lambda: MAX_SAVED_BYTES)
    values: int = attrs.field(factory=lambda: MAX_SAVED_VALUES)

    def take(self, record: SavedRecord) -> bytes:
        """The encoded value, or where there is no room for it, a marker. Raises :class:`OSError`."""
        if record.size <= self.size:
            value = record.value()
            values = value.count(b",") + value.count(b"[") + value.count(b"{")
            if values <= self.values:
                self.size -= len(value)
                self.values -= values
                return value
        return _NO_ROOM


def _predictions(records: Sequence[SavedRecord], room: _Room) -> bytes:
    values = []
    for record in sorted(records, key=lambda record: record.sequence):
        if record.kind == PREDICTION:
            try:
                values.append((record.name, room.take(record)))
            except OSError as error:
                faults.record("reading what a rollout saved", error)
    return grouped(values)


def _superseded(
    result: Result | None, attempt: Attempt, records: Sequence[SavedRecord], room: _Room
) -> bytes:
    fields = _fields(result, records)
    outcome = _outcome(result, records)
    if result is None and outcome:
        fields["error"] = _texts(outcome.get("error"))
        fields["status"] = FAILED if fields["error"] else SUCCEEDED
    fields["attempt_id"] = attempt if isinstance(attempt, str) else None
    fields["attempt_number"] = attempt if isinstance(attempt, int) else None
    if result is not None and result.attempt_number is not None:
        fields["attempt_number"] = result.attempt_number
    encoded = {"reward": _reward(result, records), "predictions": _predictions(records, room)}
    return b"{%b}" % members(fields, encoded)


def late_line(row: bytes, result: Result, folder: AnyPath) -> bytes:
    """The row of a rollout that finished after its pass was assembled.

    Args:
        row: the line that stands in the pass.
        result: what came late.
        folder: the pass's.
    """
    with SavedRecords(folder / SHARDS) as saved:
        saved.look()
        document = orjson.loads(row)
        saved.add_lines(result.emitted, "spans")
        records = [
            record for record in saved.take(document["rollout_id"]) if record.attempt == result.attempt
        ]
        fields = {
            **_fields(result, records),
            "attempt_id": result.attempt_id,
            "attempt_number": result.attempt_number,
            "late": True,
            "superseded": [],
        }
        encoded = {"reward": _reward(result, records), "predictions": _predictions(records, _Room())}
        rest = {
            name: orjson.dumps(value)
            for name, value in document.items()
            if name not in fields and name not in encoded
        }
        # Each for itself: the whole may be nested deeper than orjson writes.
        return b"{%b}\n" % members(fields, {**rest, **encoded})
