"""What stands between a daemon and its queue: stamps each task before a runner can see it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl_meta.faults import faults

Stamp = Callable[[Any, "dict[str, Any]"], None]
"""Adds to the metadata of a task, given its input."""


class _Queue:
    """Passes everything but the enqueueing methods through to what it stands for."""

    def __init__(self, behind: Any, stamp: Stamp) -> None:
        self._behind = behind
        self.stamp = stamp
        """What stamps the tasks; another one for each batch."""

    def __getattr__(self, name: str) -> Any:
        if name == "_behind" or name.startswith("__"):  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self._behind, name)

    def _stamped(self, sample: Any, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        mine = dict(metadata or {})
        self.stamp(sample, mine)
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
        return self._behind.queue_task(
            sample, mode=mode, resources_id=resources_id, metadata=self._stamped(sample, metadata)
        )


class StampingStore(_Queue):
    """Stands for the ``LightningStore`` of a v1 daemon."""

    def enqueue_many_rollouts(self, rollouts: Sequence[Any]) -> Any:
        """As upstream's coroutine; the requests carry the stamp."""
        stamp = self.stamp
        for request in rollouts:
            metadata = request.metadata
            if metadata is None:
                request.metadata = self._stamped(request.input, None)
            else:
                # The request's own: pydantic has copied what the daemon gave.
                stamp(request.input, metadata)
        return self._behind.enqueue_many_rollouts(rollouts)

    def enqueue_rollout(
        self,
        input: Any,
        mode: Any = None,
        resources_id: str | None = None,
        config: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Any:
        """As upstream's coroutine, for a copied-out daemon that enqueues task by task."""
        return self._behind.enqueue_rollout(
            input,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata=self._stamped(input, metadata),
        )

    outcomes: collections.Counter[str] | None = None
    """How many of the rollouts that upstream waits for ended how, as it last saw; for the bar."""

    async def wait_for_rollouts(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's coroutine; the outcomes of the rollouts, which a daemon drops, are counted."""
        rollouts = await self._behind.wait_for_rollouts(*args, **kwargs)
        try:
            self.outcomes = collections.Counter(rollout.status for rollout in rollouts)
        except Exception as error:
            faults.record("counting the outcomes of rollouts", error)
        return rollouts
