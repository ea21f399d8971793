"""Upstream's daemon with the training context."""

from __future__ import annotations

from agentlightning.verl.daemon import AgentModeDaemon

from agl_meta.verl.daemon_mixin import TrainingContextDaemonMixin


class TrainingContextDaemon(TrainingContextDaemonMixin, AgentModeDaemon):  # type: ignore[misc]
    """``agentlightning.verl.daemon.AgentModeDaemon`` that stamps its tasks."""
