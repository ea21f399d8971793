"""``python -m agl_meta.verl``: takes what ``python -m agentlightning.verl`` takes."""

from __future__ import annotations

import functools
from typing import Any

import hydra
from agentlightning.verl.entrypoint import run_ppo

from agl_meta.verl.algorithm import check_callbacks, settle_config
from agl_meta.verl.daemon import TrainingContextDaemon
from agl_meta.verl.daemon_mixin import check_port
from agl_meta.verl.trainer import TrainingContextTrainer
from agl_meta.verl.versions import check_versions


@hydra.main(config_path="pkg://agl_meta/verl", config_name="agl_meta", version_base=None)
def main(config: Any) -> None:
    """Train on the config's ``train_files`` in v0 mode, with the training context."""
    check_versions()
    settle_config(config)
    callbacks = [hydra.utils.get_object(path)() for path in config.agl_meta.get("callbacks") or ()]
    check_callbacks(callbacks)
    check_port(config.agentlightning.port)
    run_ppo(
        config,
        train_dataset=None,
        val_dataset=None,
        store=None,
        llm_proxy=None,
        adapter=None,
        trainer_cls=functools.partial(TrainingContextTrainer, callbacks=callbacks),
        daemon_cls=TrainingContextDaemon,
    )
