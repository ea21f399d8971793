"""What a daemon's queue holds, seen from outside: counts for a bar, and why nobody takes a task."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import attrs

from agl_meta.faults import faults
from agl_meta.verl.stamping import StampingStore

QUERY_SECONDS = 5.0
"""Pause between two questions to a store, as long as upstream's own."""
ALIVE_SECONDS = 45.0
"""A runner that gave a sign of life within this time is alive; by default it gives one every 10 s."""
_ANSWER_SECONDS = 60.0


@attrs.frozen(kw_only=True)
class Counts:
    """Where the rollouts of a pass stand; ``None`` for what can't be seen."""

    completed: int | None = None
    total: int | None = None
    failed: int | None = None
    """Those of the completed ones that came without a result."""
    running: int | None = None
    queued: int | None = None


@attrs.frozen(kw_only=True)
class Stall:
    """What a closer look at a queue found that seems to stand still."""

    running: int
    queued: int
    cause: str
    """The likely causes and what to do, in sentences."""


class Queue(Protocol):
    """One wait of a daemon; its methods are called from one thread and never block for long."""

    def look(self) -> Counts:
        """Count, by what is at hand."""

    def why_stalled(self) -> Stall | None:
        """Look closer; ``None`` while the answer is under way."""

    def close(self) -> None:
        """The wait is over."""


def queue_of(daemon: Any) -> Queue:
    """The queue of a daemon in its mode."""
    return V0Queue(daemon) if getattr(daemon, "mode", None) == "v0" else V1Queue(daemon)


def _completed(daemon: Any) -> Mapping[str, Any] | None:
    found = getattr(daemon, "_completed_rollouts_v0", None)
    # A copy in one step: the daemon's loop adds to it meanwhile.
    return None if found is None else dict(found)


class V0Queue:
    """The queue in the v0 server, which lives in this process."""

    def __init__(self, daemon: Any) -> None:
        self._daemon = daemon
        self._server = getattr(daemon, "server", None)

    def look(self) -> Counts:
        completed = _completed(self._daemon)
        store = getattr(self._server, "_store", None)
        tasks = getattr(store, "_task_queue", None)
        claimed = getattr(store, "_processing_tasks", None)
        running = queued = None
        if tasks is not None and claimed is not None:
            fresh = [self._is_fresh(task) for task in dict(claimed).values()]
            running = sum(fresh)
            # Upstream gives a timed-out task to the next client that asks: it waits like the others.
            queued = tasks.qsize() + len(fresh) - running
        return Counts(
            completed=None if completed is None else len(completed),
            total=getattr(self._daemon, "_total_tasks_queued", None),
            # A runner posts an empty rollout when the agent raised.
            failed=None if completed is None else sum(map(_is_empty, completed.values())),
            running=running,
            queued=queued,
        )

    def _is_fresh(self, task: Any) -> bool:
        claimed_at = getattr(task, "last_claim_time", None)
        limit = getattr(self._server, "_task_timeout_seconds", None)
        return claimed_at is None or limit is None or time.time() - claimed_at <= limit

    def why_stalled(self) -> Stall | None:
        counts = self.look()
        if counts.running is None or counts.queued is None:
            return None
        port = getattr(self._daemon, "server_port", "?")
        return Stall(
            running=counts.running,
            queued=counts.queued,
            cause=(
                f"No agent client asks this server (port {port}) for tasks. Likely causes: none was "
                "started; it asks another host or port, which it does in silence; it died of an "
                "exception, which stands in its own log. Start one, for example with agentlightning."
                f"Trainer(n_workers=8).fit_v0(agent, 'http://<this host>:{port}'); the training goes on "
                "as soon as it asks."
            ),
        )

    def close(self) -> None:
        pass


def _is_empty(rollout: Any) -> bool:
    return not rollout.triplets and rollout.final_reward is None


@attrs.frozen(kw_only=True)
class _Answer:
    """What a store said."""

    workers: list[Any]
    claimed: int | None
    """Rollouts that are being prepared or run, and those that wait; asked for a closer look only."""
    queued: int | None


class V1Queue:
    """The queue in a v1 store, which may be in another process.

    Asked is for the workers, of which there are few. To count rollouts, a store goes through all that
    it ever held, under its lock (33 ms for 100,000 in memory; 1 s for 1,000 given ids), so that is
    done only when nothing seems to move. How many failed is seen in what upstream itself asks for.
    """

    def __init__(self, daemon: Any) -> None:
        self._daemon = daemon
        self._store = getattr(daemon, "store", None)
        self._answer: _Answer | None = None
        self._pending: concurrent.futures.Future[_Answer] | None = None
        self._asked_at: float | None = None
        self._closer = False
        self._closed = False
        if isinstance(self._store, StampingStore):
            self._store.outcomes = None

    def look(self) -> Counts:
        self._ask()
        completed = _completed(self._daemon)
        done = None if completed is None else len(completed)
        total = getattr(self._daemon, "_total_tasks_queued", None)
        running = None
        if self._answer is not None:
            workers = self._answer.workers
            running = sum(worker.status == "busy" for worker in workers) - len(_lost(workers))
        queued = None
        if done is not None and total is not None and running is not None:
            running = min(running, total - done)
            # What finished since upstream last asked counts as queued until it asks again.
            queued = total - done - running
        outcomes = getattr(self._store, "outcomes", None)
        return Counts(
            completed=done,
            total=total,
            failed=None if outcomes is None else sum(outcomes.values()) - outcomes["succeeded"],
            running=running,
            queued=queued,
        )

    def why_stalled(self) -> Stall | None:
        answer = self._answer
        if answer is None or answer.claimed is None or answer.queued is None:
            self._closer = True  # the next question; each answer replaces the one before
            return None
        return Stall(
            running=max(answer.claimed - len(_lost(answer.workers)), 0),
            queued=answer.queued,
            cause=_cause(answer.workers, self._store),
        )

    def close(self) -> None:
        self._closed = True
        self._drop_pending()

    def _ask(self) -> None:
        """Take an answer that has come; put the next question when it is time. Never waits."""
        pending, now = self._pending, time.monotonic()
        if pending is not None and pending.done():
            self._pending = None
            try:
                self._answer = pending.result()
            except concurrent.futures.CancelledError:
                pass  # dropped
            except Exception as error:
                self._answer = None
                faults.record("asking the store about its runners", error)
        elif pending is not None and self._asked_at is not None and now - self._asked_at > _ANSWER_SECONDS:
            self._drop_pending()
            self._answer = None
            faults.record("asking the store about its runners", f"no answer for {_ANSWER_SECONDS:.0f} s")
        loop = getattr(self._daemon, "_internal_loop", None)
        if self._closed or self._pending is not None or self._store is None:
            return
        if loop is None or not loop.is_running():
            return
        if self._asked_at is None or now - self._asked_at >= QUERY_SECONDS:
            self._asked_at = now
            self._pending = asyncio.run_coroutine_threadsafe(_query(self._store, self._closer), loop)
            self._closer = False

    def _drop_pending(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None


async def _query(store: Any, closer: bool) -> _Answer:
    workers = list(await store.query_workers())
    if not closer:
        return _Answer(workers=workers, claimed=None, queued=None)
    return _Answer(
        workers=workers,
        claimed=await _count(store, "preparing", "running"),
        queued=await _count(store, "queuing", "requeuing"),
    )


async def _count(store: Any, *statuses: str) -> int:
    found = await store.query_rollouts(status_in=list(statuses), limit=1)
    return int(getattr(found, "total", len(found)))


def _age(moments: Iterable[float | None]) -> float | None:
    """Seconds since the last of some moments, on a store's clock; ``None`` if there was none."""
    known = [moment for moment in moments if moment is not None]
    return max(time.time() - max(known), 0.0) if known else None


def _lost(workers: list[Any]) -> list[Any]:
    """Runners that hold a rollout, have sent heartbeats, and send none any more."""
    ages = [(worker, _age([worker.last_heartbeat_time])) for worker in workers if worker.status == "busy"]
    return [worker for worker, age in ages if age is not None and age > ALIVE_SECONDS]


def _cause(workers: list[Any], store: Any) -> str:
    address = _address(store)
    if not workers:
        return (
            f"No runner has ever asked the store{address} for work. Likely causes: none was started "
            "(n_runners, or the role of this process); they died at their start, of an exception that "
            "stands in their own log; they use a store at another address. The training goes on as "
            "soon as a runner asks."
        )
    asked = _age(worker.last_dequeue_time for worker in workers)
    seen = _age(
        moment for worker in workers for moment in (worker.last_heartbeat_time, worker.last_dequeue_time)
    )
    if seen is None or seen > ALIVE_SECONDS:
        age = "never seen" if seen is None else f"{seen:.0f} s ago"
        held = len(_lost(workers))
        return (
            f"No runner is alive: the last heartbeat of the {len(workers)} that the store{address} knows "
            f"was {age}"
            + (f", and {held} of them still held a rollout" if held else "")
            + ". Likely causes: their processes died (an exception in their own log, or out of memory: "
            "see dmesg), or they lost the connection. Start runners again with this store; the training "
            "goes on as soon as one asks."
        )
    asks = "none of them has ever asked for work" if asked is None else f"the last asked {asked:.0f} s ago"
    return (
        f"Runners are alive (of the {len(workers)} that the store{address} knows, the last gave a sign of "
        f"life {seen:.0f} s ago) but take nothing; {asks}. "
        + (
            "They ask and get nothing: they probably look at another copy of the store than this "
            "trainer. Give both the same one."
            if asked is not None and asked <= ALIVE_SECONDS
            else "Their agent probably hangs in an earlier rollout or in a hook: `py-spy dump --pid` of "
            "a runner shows where. Give the agent's own calls a timeout."
        )
    )


def _address(store: Any) -> str:
    for name in ("server_address_root", "endpoint"):
        try:
            address = getattr(store, name, None)
        except Exception:  # a store that is not served
            continue
        if address:
            return f" at {address}"
    return ""
