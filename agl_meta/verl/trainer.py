"""Upstream's trainer with the training context."""

from __future__ import annotations

from agentlightning.verl.trainer import AgentLightningTrainer

from agl_meta.verl.trainer_mixin import TrainingContextTrainerMixin


class TrainingContextTrainer(TrainingContextTrainerMixin, AgentLightningTrainer):  # type: ignore[misc]
    """``agentlightning.verl.trainer.AgentLightningTrainer`` that knows and tells its position."""
