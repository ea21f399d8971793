"""What a dry run changes in a user's config so that it runs on one CPU."""

from __future__ import annotations

import logging
import os
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from agl_meta.verl.dry_run.tokenizer import can_be_loaded, temporary_tokenizer

logger = logging.getLogger(__name__)

_SUFFIX = "-dry-run"
_BYTES_PER_TOKEN = 4

_FIXED: dict[str, Any] = {
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.device": "cpu",
    # Nothing of a dry run belongs into a user's W&B project.
    "trainer.logger": ["console"],
    "data.val_batch_size": None,
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.rollout.mode": "async",
}
_NOTES = {
    "data.val_batch_size": "upstream wants one validation batch; in a real training, too",
    "data.max_prompt_length": "in bytes, as the stand-in tokenizer counts",
    "agentlightning.trace_aggregator.trajectory_max_prompt_length": "in bytes, as well",
}
# Numbers of devices that work on one copy of a model.
_PARALLEL_SIZES = (
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.data_parallel_size",
    "actor_rollout_ref.rollout.expert_parallel_size",
    "actor_rollout_ref.rollout.pipeline_model_parallel_size",
    "critic.ulysses_sequence_parallel_size",
    "reward_model.ulysses_sequence_parallel_size",
)
_STRATEGIES = (
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.ref.strategy",
    "critic.strategy",
    "reward_model.strategy",
)
_NUM_CPUS = ("ray_kwargs.ray_init.num_cpus", "ray_init.num_cpus")  # the second: verl 0.5
_MAX_PROMPT_LENGTHS = (
    "data.max_prompt_length",
    "agentlightning.trace_aggregator.trajectory_max_prompt_length",
)

# What the Ray actor inherits, where all is imported anew: no look-up on the network.
_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_config(config: DictConfig) -> None:
    """Change a whole config in place and log what was changed; doing it twice changes nothing more.

    Batch sizes, epochs and frequencies stay the user's. Checkpoints go to a folder of their own, so
    that no real training resumes from a stand-in's. Sections that the config lacks (verl's versions
    differ) stay away, and what can't be changed is logged, too.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    changes = _Changes(config)
    for path, value in _FIXED.items():
        changes.set(path, value)
    for path in _PARALLEL_SIZES:
        if _number(config, path) > 1:
            changes.set(path, 1)
    for path in _STRATEGIES:
        # The stand-ins know no strategy, but upstream imports the worker classes of the one that is
        # named, and Megatron's can't be imported on a CPU.
        if _get(config, path) == "megatron":
            changes.set(path, "fsdp")
    _limit_cpus(config, changes)
    _move_checkpoints(config, changes)
    _replace_models(config, changes)
    added = _Changes(config)
    for path in _missing_micro_batches(config):
        added.set(path, 1)
    message = ""
    if changes.lines:
        message += "DRY RUN: changed in the config, so that it runs on one CPU:" + changes.text()
    if added.lines:
        message += "\n" if message else ""
        message += "DRY RUN: added, as verl asks for it; a real training needs it from you:"
        message += added.text()
    if message:
        logger.warning("%s", message)


class _Changes:
    """Changes a config, and keeps a line for the log about each change."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self.lines: list[str] = []

    def set(self, path: str, value: Any) -> None:
        """Set what is not so yet, unless the whole section is missing (another verl version)."""
        parent = _get(self._config, path.rpartition(".")[0])
        if not isinstance(parent, DictConfig):
            return
        found = _get(self._config, path)
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found)
        if found == value and path.rpartition(".")[2] in parent:
            return
        try:
            with flag_override(parent, ["readonly", "struct"], [False, False]):
                OmegaConf.update(self._config, path, value, force_add=True)
        except OmegaConfBaseException as error:
            self.lines.append(f"{path}: {found!r}, can't be changed to {value!r} ({error})")
            return
        note = f"  ({_NOTES[path]})" if path in _NOTES else ""
        self.lines.append(f"{path}: {found!r} -> {value!r}{note}")

    def text(self) -> str:
        return "".join(f"\n  {line}" for line in self.lines)


def _get(config: DictConfig, path: str) -> Any:
    """A value with its interpolations resolved; ``None`` if there is none, or if they can't be."""
    try:
        return OmegaConf.select(config, path)
    except OmegaConfBaseException:
        return None


def _number(config: DictConfig, path: str) -> int:
    value = _get(config, path)
    return value if isinstance(value, int) else 0


def _limit_cpus(config: DictConfig, changes: _Changes) -> None:
    available = os.cpu_count() or 1
    for path in _NUM_CPUS:
        count = _get(config, path)
        if isinstance(count, int):  # None: Ray takes what there is
            # The trainer's actor needs one, and Ray starts a process for each.
            changes.set(path, max(1, min(count, available)))


def _move_checkpoints(config: DictConfig, changes: _Changes) -> None:
    folder = _get(config, "trainer.default_local_dir")
    if isinstance(folder, str) and not folder.endswith(_SUFFIX):
        changes.set("trainer.default_local_dir", folder.rstrip("/") + _SUFFIX)


def _replace_models(config: DictConfig, changes: _Changes) -> None:
    """Take the stand-in tokenizer if the user's is not on this machine; weights are never loaded."""
    trust = bool(_get(config, "data.trust_remote_code"))
    critic = "critic.model.path"  # only looked at by verl's validation, from 0.7 on
    if _uses_critic(config) and not can_be_loaded(_get(config, critic), trust_remote_code=trust):
        changes.set(critic, temporary_tokenizer())
    path = _get(config, "actor_rollout_ref.model.path")
    if can_be_loaded(path, trust_remote_code=trust):
        return
    changes.set("actor_rollout_ref.model.path", temporary_tokenizer())
    for length in _MAX_PROMPT_LENGTHS:
        # Upstream drops longer prompts, and fails if none is left: what fits in the user's tokens
        # has to fit in bytes.
        if _number(config, length) > 0:
            changes.set(length, _number(config, length) * _BYTES_PER_TOKEN)


def _uses_critic(config: DictConfig) -> bool:
    enabled = _get(config, "critic.enable")
    if enabled is None:
        return bool(_get(config, "algorithm.adv_estimator") == "gae")
    return bool(enabled)


def _missing_micro_batches(config: DictConfig) -> list[str]:
    """The settings that verl's own validation refuses to do without."""
    actor = "actor_rollout_ref.actor"
    needed = []
    if not _get(config, f"{actor}.use_dynamic_bsz"):
        needed += [
            f"{actor}.ppo_micro_batch_size",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        ]
        if _get(config, f"{actor}.use_kl_loss") or _get(config, "algorithm.use_kl_in_reward"):
            needed.append("actor_rollout_ref.ref.log_prob_micro_batch_size")
    if _uses_critic(config) and not _get(config, "critic.use_dynamic_bsz"):
        needed.append("critic.ppo_micro_batch_size")
    if _get(config, "reward_model.enable") and not _get(config, "reward_model.use_dynamic_bsz"):
        needed.append("reward_model.micro_batch_size")
    return [
        f"{path}_per_gpu"
        for path in needed
        if _get(config, path) is None and _get(config, f"{path}_per_gpu") is None
    ]
