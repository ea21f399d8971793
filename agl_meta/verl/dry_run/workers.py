"""Stand-ins for what verl runs on GPUs: the worker groups and the manager of inference servers."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import torch
from verl import DataProto

from agl_meta.verl.dry_run.inference import StandInInferenceServer

logger = logging.getLogger(__name__)

_CHECKPOINT = "stand_in.json"


def init_workers(trainer: Any) -> None:
    """Give a trainer the stand-ins that its ``init_workers`` would have made on GPUs."""
    logger.warning(
        "DRY RUN: the worker group and the inference server are CPU stand-ins. Nothing is learned, and "
        "answers are words of the prompt. All else is real."
    )
    group = StandInWorkerGroup()
    trainer.actor_rollout_wg = group
    trainer.ref_policy_wg = group
    trainer.critic_wg = group
    trainer.rm_wg = group if getattr(trainer, "use_rm", False) else None
    server = StandInInferenceServer(trainer.tokenizer)
    server.start()
    trainer.async_rollout_mode = True
    trainer.async_rollout_manager = StandInRolloutManager(server)


class StandInRolloutManager:
    """Stands for verl's manager of inference servers; it has one, a :class:`StandInInferenceServer`."""

    def __init__(self, server: StandInInferenceServer) -> None:
        self.server = server
        self.server_addresses = [server.address]

    def wake_up(self) -> None:
        """Nothing to load."""

    def sleep(self) -> None:
        """Nothing to free."""


class StandInWorkerGroup:
    """Stands for the worker groups of actor, reference, critic and reward model; learns nothing."""

    world_size = 1

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probability -1 and entropy 1 for every token."""
        shape = batch.batch["responses"].shape
        return DataProto.from_dict(
            tensors={"old_log_probs": torch.full(shape, -1.0), "entropys": torch.ones(shape)}
        )

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """The same log-probability, so that the KL divergence is 0."""
        shape = batch.batch["responses"].shape
        return DataProto.from_dict(tensors={"ref_log_prob": torch.full(shape, -1.0)})

    def compute_values(self, batch: DataProto) -> DataProto:
        """Value 0 for every token."""
        return DataProto.from_dict(tensors={"values": torch.zeros(batch.batch["responses"].shape)})

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Score 0 for every token."""
        return DataProto.from_dict(tensors={"rm_scores": torch.zeros(batch.batch["responses"].shape)})

    def update_actor(self, batch: DataProto) -> DataProto:
        """Changes nothing."""
        return DataProto(meta_info={"metrics": {"actor/pg_loss": [0.0], "actor/lr": [0.0]}})

    def update_critic(self, batch: DataProto) -> DataProto:
        """Changes nothing."""
        return DataProto(meta_info={"metrics": {"critic/vf_loss": [0.0], "critic/lr": [0.0]}})

    def save_checkpoint(self, local: str, remote: Any, step: int, **_: Any) -> None:
        """Write a file that says that no weights were saved."""
        os.makedirs(local, exist_ok=True)
        with open(os.path.join(local, _CHECKPOINT), "w", encoding="utf-8") as file:
            json.dump({"global_step": step, "weights": "none: written in a dry run"}, file)

    def load_checkpoint(self, path: str | None, **_: Any) -> None:
        """Check that the checkpoint is a stand-in's; a real one holds weights that would be lost."""
        if path is not None and not os.path.exists(os.path.join(path, _CHECKPOINT)):
            logger.warning("DRY RUN: the weights in %s are not loaded.", path)
