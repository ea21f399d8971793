"""What stands between a daemon and its queue: stamps each task before a runner can see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Stamp = Callable[[Any, "Mapping[str, Any] | None"], "dict[str, Any]"]
"""From a task's input and upstream's metadata to the metadata that is enqueued."""


class _Through:
    """Passes everything but the enqueueing methods through to what it stands for."""

    def __init__(self, behind: Any, stamp: Stamp) -> None:
        self._behind = behind
        self._stamp = stamp

    def __getattr__(self, name: str) -> Any:
        if name in ("_behind", "_stamp") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._behind, name)


class StampingServer(_Through):
    """Stands for the ``AgentLightningServer`` of a v0 daemon."""

    async def queue_task(
        self,
        sample: Any,
        mode: Any = None,
        resources_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Any:
        """As upstream's; the task carries the stamp."""
        return await self._behind.queue_task(
            sample, mode=mode, resources_id=resources_id, metadata=self._stamp(sample, metadata)
        )


class StampingStore(_Through):
    """Stands for the ``LightningStore`` of a v1 daemon."""

    async def enqueue_many_rollouts(self, rollouts: Sequence[Any]) -> Any:
        """As upstream's; the requests, which the daemon has just made, get the stamp in place."""
        for request in rollouts:
            request.metadata = self._stamp(request.input, request.metadata)
        return await self._behind.enqueue_many_rollouts(rollouts)

    async def enqueue_rollout(
        self,
        input: Any,
        mode: Any = None,
        resources_id: str | None = None,
        config: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Any:
        """As upstream's, for a copied-out daemon that enqueues task by task."""
        return await self._behind.enqueue_rollout(
            input,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata=self._stamp(input, metadata),
        )
