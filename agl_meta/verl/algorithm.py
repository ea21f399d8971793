"""The algorithm: what a user puts into ``agl.Trainer(algorithm=…)``."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from agentlightning.algorithm.verl import VERL as UpstreamVERL
from agentlightning.client import AgentLightningClient
from omegaconf import OmegaConf

from agl_meta.callbacks import Callback
from agl_meta.describing import describe, describe_error
from agl_meta.errors import ConfigurationError
from agl_meta.ports import check_v0_port
from agl_meta.remote import path_text
from agl_meta.storage import find_root
from agl_meta.verl.daemon import TrainingContextDaemon
from agl_meta.verl.progress import stderr_is_terminal
from agl_meta.verl.settings import NODE, Settings
from agl_meta.verl.trainer import TrainingContextTrainer
from agl_meta.verl.trainer_mixin import check_daemon_class, check_trainer_class
from agl_meta.verl.versions import check_versions


class VERL(UpstreamVERL):  # type: ignore[misc]
    """``agentlightning.algorithm.verl.VERL``, whose agents know where in training they are.

    Args:
        config: upstream's: overrides of verl's config. A node ``agl_meta`` in it may hold the settings
            below, too; an argument wins.
        trainer_cls: a trainer with :class:`agl_meta.verl.TrainingContextTrainerMixin`.
        daemon_cls: a daemon with :class:`agl_meta.verl.TrainingContextDaemonMixin`.
        output_dir: folder for what rollouts save, on a file system that the runners share, or the URL of one
            in a remote store (``s3://bucket/runs/sql``), which needs ``agl_meta[remote]``. A relative
            path is taken from the current directory. ``None``: what ``AGL_META_OUTPUT_DIR`` names, or else
            tasks are stamped and nothing is saved.
        callbacks: called in the trainer's process, a Ray actor, while the training goes on.
        sample_key: a field of the samples that names them in every evaluation; ``None``: a hash of
            their content.
        transport: how what rollouts save travels: ``"files"``, which runners write into ``output_dir``, or
            ``"store"``, as spans through upstream's store (v0: with the posted rollout), for runners that
            do not see that folder; it then stands in the rows of assembled passes.
        durability: what a saved record outlives: ``"process"``, the death of the process that wrote it at any
            moment, or ``"fsync"``, a power loss, too; then saving waits for the disk each time.
        compression: ``"zstd"`` for ``predictions.jsonl.zst`` instead of ``predictions.jsonl``, which readers
            read alike; needs ``agl_meta[zstd]``.
        record_train: assemble ``predictions.jsonl`` and ``summary.json`` of training passes, too, and not
            only of evaluations.
        keep_special_tokens: show the tokenizer's special tokens in the text of turns.
        dry_run: run this very script without GPUs: all is real but the worker group and the inference
            server, which are CPU stand-ins and say so in the log and in ``pass.json``. Needs no
            download; checkpoints go to ``trainer.default_local_dir`` with ``-dry-run`` behind it.
        progress: whether a bar shows how far an evaluation or a training step is with its rollouts;
            ``None``: if stderr is a terminal. A warning that no runner takes them comes either way.

    Raises :class:`~agl_meta.errors.ConfigurationError` for what can't work: unsupported versions, an
    output folder that can't be used, classes without the mixins, callbacks that can't be pickled.
    """

    trainer_cls: Any

    def __init__(
        self,
        config: dict[str, Any],
        trainer_cls: Any = None,
        daemon_cls: Any = None,
        *,
        output_dir: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Callback] = (),
        sample_key: str | None = None,
        transport: str | None = None,
        durability: str | None = None,
        compression: str | None = None,
        record_train: bool = False,
        keep_special_tokens: bool = False,
        dry_run: bool = False,
        progress: bool | None = None,
    ) -> None:
        check_versions()
        trainer_cls = trainer_cls or TrainingContextTrainer
        daemon_cls = daemon_cls or TrainingContextDaemon
        check_trainer_class(trainer_cls)
        check_daemon_class(daemon_cls)
        check_callbacks(callbacks)
        super().__init__(config, trainer_cls, daemon_cls)
        self.callbacks = tuple(callbacks)
        given = {
            "output_dir": None if output_dir is None else path_text(output_dir, "output_dir"),
            "sample_key": sample_key,
            "transport": transport,
            "durability": durability,
            "compression": compression,
            "record_train": record_train or None,
            "keep_special_tokens": keep_special_tokens or None,
            "dry_run": dry_run or None,
            "progress": progress,
        }
        for name, value in given.items():
            if value is not None:
                OmegaConf.update(self.config, f"{NODE}.{name}", value, force_add=True)
        settle_config(self.config)
        if Settings.from_config(self.config).dry_run:
            from agl_meta.verl.dry_run import make_runners_poll_fast

            make_runners_poll_fast()

    def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Train as upstream does; called by ``agl.Trainer``."""
        if not self.has_store():
            check_v0_port(self.config.agentlightning.port)
        trainer_cls = self.trainer_cls
        # The one way to the actor for what the config can't hold: upstream only calls the class.
        self.trainer_cls = functools.partial(trainer_cls, callbacks=self.callbacks)
        try:
            super().run(train_dataset=train_dataset, val_dataset=val_dataset)
        finally:
            self.trainer_cls = trainer_cls

    def has_store(self) -> bool:
        """Whether this is a v1 training: as upstream, one that was given a store."""
        try:
            self.get_store()
        except Exception:
            return False
        return True

    def get_client(self) -> AgentLightningClient:
        """Upstream's client of the v0 server; in a dry run one that looks for tasks more often."""
        client = super().get_client()
        if not Settings.from_config(self.config).dry_run:
            return client
        return AgentLightningClient(client.endpoint, poll_interval=0.1)


def settle_config(config: Any) -> None:
    """Check the ``agl_meta`` node of a config, settle what only this process knows, prepare a dry run."""
    settings = Settings.from_config(config)
    _, output_dir = find_root(settings.output_dir)
    if output_dir is not None:
        # The trainer runs in another process, whose current directory is another one.
        OmegaConf.update(config, f"{NODE}.output_dir", output_dir, force_add=True)
    if settings.progress is None and stderr_is_terminal():
        # Only this process knows: the trainer's stderr is a file, so there None means no bar.
        OmegaConf.update(config, f"{NODE}.progress", True, force_add=True)
    if settings.dry_run:
        from agl_meta.verl.dry_run import prepare_config

        prepare_config(config)


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise :class:`ConfigurationError` for a callback that is none or can't be sent to the actor."""
    from ray import cloudpickle

    for callback in callbacks:
        name = type(callback).__qualname__
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks holds {describe(callback, 200)}; expected instances of agl_meta.Callback."
            )
        try:
            cloudpickle.dumps(callback)
        except Exception as error:
            raise ConfigurationError(
                f"The callback {name} can't be pickled ({describe_error(error)}); expected one "
                "that can be sent to the trainer's process, a Ray actor. Open files, clients and "
                "locks in on_fit_start instead of in __init__."
            ) from error
