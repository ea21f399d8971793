"""What stands between a daemon and its queue: stamps each task before a runner can see it."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agl_meta.faults import faults


class Batch(Protocol):
    """What a queue tells of the batch that goes through it."""

    is_recorded: bool
    """Whether it is to be told what was queued."""

    def stamp(self, sample: Any, metadata: dict[str, Any]) -> None:
        """Add to the metadata of a task, given its input."""

    def queued(self, rollout_id: str, metadata: Mapping[str, Any]) -> None:
        """A task was enqueued under this id."""

    def posted(self, rollouts: Sequence[Any]) -> None:
        """v0: what runners posted is given to the daemon."""

    def finished(self, rollouts: Sequence[Any]) -> None:
        """v1: the daemon is told of finished rollouts."""

    def spans_read(self, rollout_id: str, spans: Sequence[Any]) -> None:
        """v1: the daemon read the spans of a rollout."""


class _Queue:
    """Passes everything but the methods below through to what it stands for."""

    def __init__(self, behind: Any, batch: Batch) -> None:
        self.behind = behind
        """What it stands for."""
        self.batch = batch
        """The batch that goes through; another one after each enqueueing."""

    def __getattr__(self, name: str) -> Any:
        if name == "behind" or name.startswith("__"):  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self.behind, name)

    def _stamped(self, sample: Any, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        mine = dict(metadata or {})
        self.batch.stamp(sample, mine)
        return mine


class StampingServer(_Queue):
    """Stands for the ``AgentLightningServer`` of a v0 daemon."""

    def queue_task(
        self,
        sample: Any,
        mode: Any = None,
        resources_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Any:
        """As upstream's coroutine; the task carries the stamp."""
        stamped = self._stamped(sample, metadata)
        task = self.behind.queue_task(sample, mode=mode, resources_id=resources_id, metadata=stamped)
        return self._noted(task, stamped) if self.batch.is_recorded else task

    async def _noted(self, task: Any, metadata: Mapping[str, Any]) -> Any:
        rollout_id = await task
        self.batch.queued(rollout_id, metadata)
        return rollout_id

    async def retrieve_completed_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's; the batch sees what comes."""
        rollouts = await self.behind.retrieve_completed_rollouts(*args, **kwargs)
        with faults.guard("looking at posted rollouts"):
            self.batch.posted(rollouts)
        return rollouts


class StampingStore(_Queue):
    """Stands for the ``LightningStore`` of a v1 daemon."""

    outcomes: collections.Counter[str] | None = None
    """How many of the rollouts that upstream waits for ended how, as it last saw; for the bar."""

    async def enqueue_many_rollouts(self, rollouts: Sequence[Any]) -> Any:
        """As upstream's; the requests carry the stamp."""
        stamp = self.batch.stamp
        for request in rollouts:
            metadata = request.metadata
            if metadata is None:
                request.metadata = self._stamped(request.input, None)
            else:
                # The request's own: pydantic has copied what the daemon gave.
                stamp(request.input, metadata)
        queued = await self.behind.enqueue_many_rollouts(rollouts)
        for rollout in queued:
            self.batch.queued(rollout.rollout_id, rollout.metadata)
        return queued

    async def enqueue_rollout(
        self,
        input: Any,
        mode: Any = None,
        resources_id: str | None = None,
        config: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Any:
        """As upstream's, for a copied-out daemon that enqueues task by task."""
        stamped = self._stamped(input, metadata)
        rollout = await self.behind.enqueue_rollout(
            input, mode=mode, resources_id=resources_id, config=config, metadata=stamped
        )
        self.batch.queued(rollout.rollout_id, stamped)
        return rollout

    async def wait_for_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's; the batch sees what comes."""
        rollouts = await self.behind.wait_for_rollouts(*args, **kwargs)
        with faults.guard("looking at finished rollouts"):
            self.outcomes = collections.Counter(rollout.status for rollout in rollouts)
            self.batch.finished(rollouts)
        return rollouts

    async def query_spans(self, rollout_id: str, *args: Any, **kwargs: Any) -> Any:
        """As upstream's; the batch sees what the daemon reads."""
        spans = await self.behind.query_spans(rollout_id, *args, **kwargs)
        with faults.guard("looking at the spans of a rollout"):
            self.batch.spans_read(rollout_id, spans)
        return spans
