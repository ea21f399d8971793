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
    """Give a trainer the stand-ins for what its ``init_workers`` makes on GPUs.

    The inference server runs in a thread of this process until it ends, or until
    ``trainer.async_rollout_manager.server.stop()``.
    """
    logger.warning(
        "DRY RUN: the worker group and the inference server are CPU stand-ins. Nothing is learned, "
        "and answers are words of the prompt. All else is real."
    )
    group = StandInWorkerGroup()
    trainer.actor_rollout_wg = group
    trainer.ref_policy_wg = group
    if getattr(trainer, "use_critic", False):
        trainer.critic_wg = group
    trainer.rm_wg = group if getattr(trainer, "use_rm", False) else None
    server = StandInInferenceServer(trainer.tokenizer, trainer.config.actor_rollout_ref.model.path)
    server.start()
    trainer.async_rollout_mode = True
    trainer.async_rollout_manager = StandInRolloutManager(server)


class StandInRolloutManager:
    """Stands for verl's manager of inference servers; has one :class:`StandInInferenceServer`."""

    def __init__(self, server: StandInInferenceServer) -> None:
        self.server = server
        self.server_addresses = [server.address]

    def wake_up(self, *_: Any, **__: Any) -> None:
        """Nothing to load."""

    def sleep(self, *_: Any, **__: Any) -> None:
        """Nothing to free."""


class StandInWorkerGroup:
    """Stands for the worker groups of actor, reference, critic and reward model; learns nothing.

    Results have the shapes and names of verl's, for every token of the responses.
    """

    world_size = 1

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Log-probability -1 and entropy 1."""
        return _per_token(batch, old_log_probs=-1.0, entropys=1.0)

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """The same log-probability, so that the KL divergence is 0."""
        return _per_token(batch, ref_log_prob=-1.0)

    def compute_values(self, batch: DataProto) -> DataProto:
        """Value 0."""
        return _per_token(batch, values=0.0)

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Score 0."""
        return _per_token(batch, rm_scores=0.0)

    def update_actor(self, batch: DataProto) -> DataProto:
        """Changes nothing; the metrics say so."""
        return _metrics("actor", "pg_loss", "pg_clipfrac", "ppo_kl", "grad_norm", "lr")

    def update_critic(self, batch: DataProto) -> DataProto:
        """Changes nothing; the metrics say so."""
        return _metrics("critic", "vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")

    def save_checkpoint(self, local: str, remote: Any, step: int, *_: Any, **__: Any) -> None:
        """Write a file that says that no weights were saved; upload nothing, remove nothing."""
        os.makedirs(local, exist_ok=True)
        with open(os.path.join(local, _CHECKPOINT), "w", encoding="utf-8") as file:
            json.dump({"global_step": step, "weights": "none: written in a dry run"}, file)

    def load_checkpoint(self, path: str | None = None, *_: Any, **__: Any) -> None:
        """Read the stand-in's file; of a real checkpoint say that its weights are not loaded.

        Nothing is deleted, even if verl asks for it: a real checkpoint has to survive a dry run.
        """
        if path is None:
            return
        try:
            with open(os.path.join(path, _CHECKPOINT), encoding="utf-8") as file:
                step = json.load(file)["global_step"]
        except FileNotFoundError:
            logger.warning("DRY RUN: goes on from %s, whose weights are not loaded.", path)
        else:
            logger.info("DRY RUN: goes on from the stand-in's checkpoint of step %s.", step)


def _per_token(batch: DataProto, **values: float) -> DataProto:
    shape = batch.batch["responses"].shape
    return DataProto.from_dict(tensors={name: torch.full(shape, value) for name, value in values.items()})


def _metrics(worker: str, *names: str) -> DataProto:
    return DataProto(meta_info={"metrics": {f"{worker}/{name}": [0.0] for name in names}})
