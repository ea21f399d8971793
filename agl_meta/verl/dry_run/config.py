"""What a dry run changes in a user's config so that it runs on one CPU."""

from __future__ import annotations

import logging
import os
from typing import Any

from omegaconf import OmegaConf

from agl_meta.verl.dry_run.tokenizer import can_be_loaded, temporary_tokenizer

logger = logging.getLogger(__name__)

_SUFFIX = "-dry-run"

_FIXED: dict[str, Any] = {
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.device": "cpu",
    # Nothing of a dry run belongs into a user's W&B project.
    "trainer.logger": ["console"],
    "data.val_batch_size": None,
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.rollout.mode": "async",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": 1,
    "critic.ulysses_sequence_parallel_size": 1,
}
_STRATEGIES = (
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.strategy",
    "critic.strategy",
    "reward_model.strategy",
)
# verl refuses a config without them, and no stand-in looks at them.
_MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size",
)

# Set before anything is imported in the Ray actor, which inherits them: no look-up on the network.
_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_config(config: Any) -> None:
    """Change a whole config in place and log what was changed; doing it twice changes nothing more.

    Batch sizes, epochs and frequencies stay the user's. Checkpoints go to a folder of their own, so that
    no real training resumes from a stand-in's.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    changes: list[str] = []
    for path, value in _FIXED.items():
        _change(config, path, value, changes)
    for path in _STRATEGIES:
        # The stand-ins know no strategy, but upstream imports the classes of the one that is named.
        if OmegaConf.select(config, path) == "megatron":
            _change(config, path, "fsdp", changes)
    for path in _MICRO_BATCHES:
        per_gpu = f"{path}_per_gpu"
        if _lacks(config, path) and _lacks(config, per_gpu):
            _change(config, per_gpu, 1, changes)
    checkpoints = OmegaConf.select(config, "trainer.default_local_dir")
    if isinstance(checkpoints, str) and not checkpoints.endswith(_SUFFIX):
        _change(config, "trainer.default_local_dir", checkpoints.rstrip("/") + _SUFFIX, changes)
    model = OmegaConf.select(config, "actor_rollout_ref.model.path")
    if not can_be_loaded(model):
        _change(config, "actor_rollout_ref.model.path", temporary_tokenizer(), changes)
    if changes:
        logger.warning("DRY RUN, changed in the config:\n  %s", "\n  ".join(changes))


def _lacks(config: Any, path: str) -> bool:
    return OmegaConf.select(config, path) is None


def _change(config: Any, path: str, value: Any, changes: list[str]) -> None:
    parent = OmegaConf.select(config, path.rpartition(".")[0])
    if parent is None:  # another verl version
        return
    found = OmegaConf.select(config, path)
    plain = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    if plain != value:
        OmegaConf.update(config, path, value, force_add=True)
        changes.append(f"{path}: {plain!r} -> {value!r}")
