"""From what a daemon holds at the end of a batch to what a recorder takes: texts, rewards, statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

import attrs

from agl_meta.assembly import Result
from agl_meta.context import STAMP_KEY
from agl_meta.emitting import emitted_lines
from agl_meta.faults import faults
from agl_meta.outcome import ATTEMPT_KEY
from agl_meta.records import OUTCOME
from agl_meta.rows import FAILED, SUCCEEDED, TIMEOUT, Turn

_TIMEOUTS = frozenset({"timeout", "unresponsive"})
_WAIT_SECONDS = 60.0
_QUERY_SECONDS = 0.1
_AT_ONCE = 50


@attrs.define
class Seen:
    """What passed between a daemon and its queue while a batch was waited for, as far as it is needed."""

    finished: dict[str, tuple[str, int]] = attrs.field(factory=dict)
    """v1: of each finished rollout its status, which the daemon drops, and its ``max_attempts``."""
    spans: dict[str, tuple[str, list[bytes]]] = attrs.field(factory=dict)
    """v1: the attempt whose spans the daemon read, which is the one it took, and the records in them."""
    taken: set[str] = attrs.field(factory=set)
    """v0: rollouts that the daemon was given."""
    again: list[Any] = attrs.field(factory=list)
    """v0: what was posted for a rollout that had been taken already."""

    def note_finished(self, rollouts: Iterable[Any]) -> None:
        """Note what ``wait_for_rollouts`` gave."""
        for rollout in rollouts:
            self.finished[rollout.rollout_id] = rollout.status, rollout.config.max_attempts

    def note_spans(self, rollout_id: str, spans: Sequence[Any]) -> None:
        """Note what ``query_spans`` gave."""
        if spans:
            self.spans[rollout_id] = spans[0].attempt_id, emitted_lines(spans)


def collect_results(daemon: Any, seen: Seen, keep_special_tokens: bool) -> dict[str, list[Result]]:
    """What came of each rollout of the daemon's batch: first what the metrics took, then other attempts."""
    texts = Texts(daemon.tokenizer, keep_special_tokens)
    attempts = _query_attempts(daemon, seen) if daemon.mode == "v1" else {}
    results = {}
    for rollout_id, rollout in daemon._completed_rollouts_v0.items():
        used = _reward_used(daemon, rollout)
        if daemon.mode == "v1":
            status, _ = seen.finished.get(rollout_id, (None, 1))
            attempt_id, emitted = seen.spans.get(rollout_id, (None, []))
            results[rollout_id] = _results_v1(
                rollout, used, texts, status, attempt_id, emitted, attempts.get(rollout_id, ()), daemon
            )
        else:
            results[rollout_id] = [result_v0(rollout, used, texts)]
    for rollout in seen.again:
        if rollout.rollout_id in results:
            results[rollout.rollout_id].append(result_v0(rollout, rollout.final_reward, texts))
    return results


def _reward_used(daemon: Any, rollout: Any) -> Any:
    try:
        return daemon._fillna_reward(rollout)
    except ValueError:  # upstream's reward_fillna_value=None: it will raise this itself
        return None


# -------------------------------------------------------------------------------------------- text


class Texts:
    """Decodes tokens; what can't be decoded is counted and becomes ``None``."""

    def __init__(self, tokenizer: Any, keep_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = not keep_special_tokens

    def turns(self, triplets: Iterable[Any] | None) -> list[Turn]:
        """A turn for each of upstream's triplets."""
        return [self._turn(triplet) for triplet in triplets or ()]

    def _turn(self, triplet: Any) -> Turn:
        prompt, response = _part(triplet.prompt), _part(triplet.response)
        return Turn(
            prompt=self._text(prompt),
            response=self._text(response),
            prompt_tokens=len(prompt.get("token_ids") or ()),
            response_tokens=len(response.get("token_ids") or ()),
            reward=triplet.reward,
        )

    def _text(self, part: Mapping[str, Any]) -> str | None:
        ids = part.get("token_ids")
        if not ids:
            return None
        try:
            text = self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        except Exception as error:  # a user's own tokenizer, or ids beyond its vocabulary
            faults.record("decoding the tokens of a turn", error)
            return None
        return text if isinstance(text, str) else None


def _part(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# ---------------------------------------------------------------------------------------------- v0


def result_v0(rollout: Any, reward_used: Any, texts: Texts) -> Result:
    """What a v0 runner posted. After an exception upstream posts an empty rollout with its task."""
    note = rollout.metadata.get(STAMP_KEY) if isinstance(rollout.metadata, Mapping) else None
    note = note if isinstance(note, Mapping) else {}
    number = note.get(ATTEMPT_KEY)
    if number is None and rollout.task is not None:
        number = rollout.task.num_claims
    number = number if type(number) is int else None  # it came over the network
    is_empty = rollout.final_reward is None and not rollout.triplets and not rollout.trace
    outcome = note.get(OUTCOME)
    outcome = outcome if isinstance(outcome, Mapping) else {}
    failed = bool(outcome.get("error")) or (rollout.task is not None and is_empty)
    return Result(
        status=FAILED if failed else SUCCEEDED,
        turns=texts.turns(rollout.triplets),
        reward=rollout.final_reward,
        reward_used=reward_used,
        outcome=outcome,
        attempt_number=number,
        emitted=emitted_lines(rollout.trace or ()),
    )


# ---------------------------------------------------------------------------------------------- v1


def _results_v1(
    rollout: Any,
    reward_used: Any,
    texts: Texts,
    rollout_status: str | None,
    attempt_id: str | None,
    emitted: list[bytes],
    attempts: Sequence[tuple[Any, Sequence[Any]]],
    daemon: Any,
) -> list[Result]:
    latest = attempts[-1][0] if attempts else None
    accepted = next((attempt for attempt, _ in attempts if attempt.attempt_id == attempt_id), latest)
    if accepted is not None:
        attempt_id = accepted.attempt_id
    status = None if accepted is None else accepted.status
    first = Result(
        status=row_status(rollout_status, status),
        turns=texts.turns(rollout.triplets),
        reward=rollout.final_reward,
        reward_used=reward_used,
        error=attempt_error(status),
        attempt_id=attempt_id,
        attempt_number=1 if accepted is None else accepted.sequence_id,
        emitted=emitted,
    )
    others = [
        result_v1(attempt, spans, daemon, texts)
        for attempt, spans in attempts
        if attempt.attempt_id != attempt_id
    ]
    return [first, *others]


def result_v1(attempt: Any, spans: Sequence[Any], daemon: Any, texts: Texts) -> Result:
    """An attempt that the metrics did not take, from its own spans."""
    triplets = daemon.adapter.adapt(spans) if spans else []
    rewards = [triplet.reward for triplet in triplets if triplet.reward is not None]
    return Result(
        status=row_status(None, attempt.status),
        turns=texts.turns(triplets),
        reward=rewards[-1] if rewards else None,
        reward_used=None,
        error=attempt_error(attempt.status),
        attempt_id=attempt.attempt_id,
        attempt_number=attempt.sequence_id,
        emitted=emitted_lines(spans),
    )


def row_status(rollout_status: str | None, attempt_status: str | None) -> str:
    """Upstream's statuses of a rollout and its attempt, as a row's."""
    if rollout_status == "succeeded" or (rollout_status is None and attempt_status == "succeeded"):
        return SUCCEEDED
    return TIMEOUT if attempt_status in _TIMEOUTS else FAILED


def attempt_error(status: str | None) -> Mapping[str, Any] | None:
    """What upstream's status says about a cause."""
    messages = {
        "timeout": "it ran longer than the timeout of the rollout (upstream: llm_timeout_seconds)",
        "unresponsive": "its runner sent neither spans nor heartbeats (upstream: unresponsive)",
    }
    message = messages.get(str(status))
    return None if message is None else {"type": None, "message": message, "traceback": None}


def _query_attempts(daemon: Any, seen: Seen) -> dict[str, list[tuple[Any, Sequence[Any]]]]:
    """The attempts of the rollouts that may have had several, or did not succeed, or left no spans.

    Of those before the last one the spans are fetched, too.
    """

    # Past our queue, which takes what goes through it for what the daemon reads.
    store = getattr(daemon.store, "behind", daemon.store)

    async def query(rollout_id: str) -> list[tuple[Any, Sequence[Any]]]:
        found = []
        read, _ = seen.spans.get(rollout_id, (None, []))
        for attempt in await store.query_attempts(rollout_id):
            spans: Sequence[Any] = ()
            if attempt.attempt_id != read:
                spans = await store.query_spans(rollout_id, attempt_id=attempt.attempt_id)
            found.append((attempt, spans))
        return found

    ids = [
        rollout_id
        for rollout_id in daemon._completed_rollouts_v0
        if seen.finished.get(rollout_id) != ("succeeded", 1) or rollout_id not in seen.spans
    ]

    async def query_all() -> dict[str, list[tuple[Any, Sequence[Any]]]]:
        found: dict[str, list[tuple[Any, Sequence[Any]]]] = {}
        for begin in range(0, len(ids), _AT_ONCE):
            some = ids[begin : begin + _AT_ONCE]
            found.update(zip(some, await asyncio.gather(*map(query, some)), strict=True))
        return found

    return dict(in_loop(daemon._internal_loop, query_all(), len(ids)))


def in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], queries: int = 0) -> Any:
    """Run a coroutine in the daemon's own loop, where its store lives; limited in time, by its queries."""
    return asyncio.run_coroutine_threadsafe(work, loop).result(_WAIT_SECONDS + queries * _QUERY_SECONDS)
