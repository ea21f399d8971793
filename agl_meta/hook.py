"""The training context for agents without a class of their own: ``@agl.rollout`` and its kin."""

from __future__ import annotations

from typing import Any

from agentlightning import Hook

from agl_meta.context import enter, leave_rollout
from agl_meta.storage import settle_root


class TrainingContextHook(Hook):  # type: ignore[misc]
    """Makes :func:`agl_meta.current_training_context` known inside a decorated agent's function.

    Goes into ``agl.Trainer(hooks=[agl_meta.TrainingContextHook()])``. v1 runners only: the legacy
    runner (v0) knows no hooks; there a function that takes ``rollout`` reads
    ``TrainingContext.from_rollout(rollout)``.
    """

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
        """Enter the rollout's context; the runner awaits this in the task that runs the agent."""
        settle_root()
        enter(rollout)

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        """Leave it again, so that nothing between two rollouts sees the first one's values or error."""
        leave_rollout(rollout)
