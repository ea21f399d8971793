"""The trainer's part: knows the position in training, tells it to the daemon, and calls callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from agl_meta.callbacks import Callback, CallbackList, FitEvent, PassEvent
from agl_meta.context import split_name
from agl_meta.errors import ConfigurationError
from agl_meta.faults import faults
from agl_meta.files import any_path
from agl_meta.rows import Rows
from agl_meta.storage import find_root
from agl_meta.verl.batches import Batch
from agl_meta.verl.daemon_mixin import TrainingContextDaemonMixin
from agl_meta.verl.generations import dump_generations, log_generations
from agl_meta.verl.passes import Run, check_sample_key
from agl_meta.verl.positions import CountingDataLoader, Position
from agl_meta.verl.settings import Settings
from agl_meta.verl.versions import check_versions

_DRY_RUN_POLL_SECONDS = 0.05
# Of verl's _dump_generations since 0.6: inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path.
_DUMP_ARGUMENTS = 6


class TrainingContextTrainerMixin:
    """Makes an ``AgentLightningTrainer`` know its position and tell it to its daemon.

    For upstream's class see :class:`agl_meta.verl.TrainingContextTrainer`; for one that you copied
    out::

        class MyTrainer(TrainingContextTrainerMixin, MyCopiedTrainer): ...

    The copy must keep upstream's names: ``global_steps``, ``train_dataloader``,
    ``agent_mode_daemon``, ``fit``, ``_validate``. Settings come from the config's ``agl_meta`` node.

    Args:
        callbacks: instances of :class:`agl_meta.Callback`.
        *args, **kwargs: upstream's.
    """

    config: Any
    daemon_cls: Any
    global_steps: int
    total_training_steps: int

    def __init__(self, *args: Any, callbacks: Iterable[Callback] = (), **kwargs: Any) -> None:
        check_versions()
        super().__init__(*args, **kwargs)
        settings = Settings.from_config(self.config)
        self._agl_root, output_dir = find_root(settings.output_dir)
        settings = attrs.evolve(settings, output_dir=output_dir)
        check_daemon_class(self.daemon_cls)
        self._agl_settings = settings
        self._agl_callbacks = CallbackList(callbacks)
        self._agl_run = self._agl_new_run()

    # What upstream assigns, this class watches: composition where there is no other seam.

    @property
    def train_dataloader(self) -> CountingDataLoader:
        """verl's train dataloader, which counts the batches that it gives."""
        loader: CountingDataLoader = self.__dict__["_agl_train_dataloader"]
        return loader

    @train_dataloader.setter
    def train_dataloader(self, loader: Any) -> None:
        if not isinstance(loader, CountingDataLoader):
            loader = CountingDataLoader(loader)
        self.__dict__["_agl_train_dataloader"] = loader

    @property
    def agent_mode_daemon(self) -> Any:
        """The daemon that ``fit()`` made; it is told this trainer's position from then on."""
        return self.__dict__["_agl_daemon"]

    @agent_mode_daemon.setter
    def agent_mode_daemon(self, daemon: Any) -> None:
        check_daemon_class(type(daemon))
        daemon.follow(
            self._agl_begin_batch,
            poll_seconds=_DRY_RUN_POLL_SECONDS if self._agl_settings.dry_run else None,
            progress=self._agl_settings.progress,
        )
        self.__dict__["_agl_daemon"] = daemon

    # ------------------------------------------------------------------------- upstream's methods

    def init_workers(self) -> None:
        """Make the worker groups, or in a dry run the CPU stand-ins."""
        if not self._agl_settings.dry_run:
            super().init_workers()  # type: ignore[misc]
            return
        from agl_meta.verl.dry_run import init_workers

        init_workers(self)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train as upstream does, as a new run."""
        run = self._agl_run = self._agl_new_run()
        self.train_dataloader.restart()
        event = FitEvent(
            run_id=run.run_id,
            output_dir=None if self._agl_root is None else any_path(self._agl_root),
            trainer=self,
        )
        self._agl_callbacks.call("on_fit_start", event)
        try:
            return super().fit(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._agl_close_pass()
            run.finish(self.__dict__.get("_agl_daemon"))
            self._agl_callbacks.call("on_fit_end", event)
            faults.log_summary()

    def _load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self.train_dataloader.resume_at(self.global_steps)
        return result

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        self._agl_close_pass()
        self._agl_validation_batches = 0
        self._agl_callbacks.call("on_validation_start", self._agl_event(False, {}))
        try:
            metrics = super()._validate(*args, **kwargs)  # type: ignore[misc]
            run = self._agl_run
            if run.open_pass is not None:
                run.open_pass.metrics = metrics
            rows = run.assemble(self.agent_mode_daemon)
            self._agl_show_generations(rows)
            added = self._agl_callbacks.metrics(self._agl_event(False, metrics, rows))
        finally:
            self._agl_close_pass()
        return {**metrics, **added} if added else metrics

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        metrics = super()._train_step(*args, **kwargs)  # type: ignore[misc]
        run = self._agl_run
        if run.open_pass is not None:
            run.open_pass.metrics = metrics
        self._agl_callbacks.call("on_train_batch_end", self._agl_event(True, metrics, run.batch_rows()))
        return metrics

    def _dump_generations(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's; for a call without ``gts``, which is upstream's, one row a rollout is written.

        Upstream would give it what dropping and shuffling left of the batch, and verl 0.6 raise.
        """
        if len(args) + len(kwargs) >= _DUMP_ARGUMENTS:
            return super()._dump_generations(*args, **kwargs)  # type: ignore[misc]
        with faults.guard("writing to trainer.rollout_data_dir"):
            folder = kwargs["dump_path"] if "dump_path" in kwargs else args[-1]
            dump_generations(folder, self.global_steps, self._agl_run.batch_rows())
        return None

    def _agl_show_generations(self, rows: Rows) -> None:
        settings = self.config.trainer
        folder = settings.get("validation_data_dir")
        if folder:
            with faults.guard("writing to trainer.validation_data_dir"):
                dump_generations(folder, self.global_steps, rows)
        if settings.get("log_val_generations", 0):
            with faults.guard("giving generations to verl's validation logger"):
                log_generations(self, rows)

    def _agl_wants_rows(self, is_train: bool) -> bool:
        settings = self.config.trainer
        if is_train:
            return bool(settings.get("rollout_data_dir"))
        return bool(
            len(self._agl_callbacks)
            or settings.get("validation_data_dir")
            or settings.get("log_val_generations", 0)
        )

    def _agl_close_pass(self) -> None:
        self._agl_run.close_pass(self.__dict__.get("_agl_daemon"))

    # ----------------------------------------------------------------------------------- position

    _agl_validation_batches = 0
    _agl_has_trained = False

    def _agl_new_run(self) -> Run:
        self._agl_has_trained = False
        stand_ins: tuple[str, ...] = ()
        if self._agl_settings.dry_run:
            from agl_meta.verl.dry_run import STAND_INS

            stand_ins = STAND_INS
        return Run(self._agl_settings, self._agl_root, stand_ins, self._agl_wants_rows)

    def _agl_begin_batch(self, data: Mapping[str, Any], is_train: bool, repeats: int, daemon: Any) -> Batch:
        check_sample_key(self._agl_settings, data)
        samples = len(next(iter(data.values()))) if data else 0
        if is_train:
            self._agl_has_trained = True
        position = self._agl_position(is_train)
        if not is_train:
            self._agl_validation_batches += 1
        return self._agl_run.begin_batch(position, samples, repeats, daemon)

    def _agl_position(self, is_train: bool) -> Position:
        loader = self.train_dataloader
        if is_train and loader.batch_index < 0:
            raise ConfigurationError(
                f"{type(self).__qualname__} enqueues a training batch that did not come from "
                "self.train_dataloader, so its position is unknown. Iterate self.train_dataloader in "
                "fit(), as upstream does."
            )
        return Position(
            global_step=self.global_steps,
            epoch=loader.epoch,
            batch_index=loader.batch_index if is_train else self._agl_validation_batches,
            is_train=is_train,
            reason="train" if is_train else self._agl_validation_reason(),
        )

    def _agl_validation_reason(self) -> str:
        if not self._agl_has_trained:
            return "after_resume" if self.global_steps > 0 else "before_training"
        return "final" if self.global_steps >= self.total_training_steps else "periodic"

    def _agl_event(self, is_train: bool, metrics: Mapping[str, Any], rows: Rows | None = None) -> PassEvent:
        run = self._agl_run
        position = run.open_pass.position if run.open_pass else self._agl_position(is_train)
        return PassEvent(
            run_id=run.run_id,
            global_step=position.global_step,
            epoch=position.epoch,
            split=split_name(is_train),
            reason=position.reason,
            folder=run.folder,
            metrics=metrics,
            rows=Rows() if rows is None else rows,
            summary=None if run.open_pass is None else run.open_pass.summary,
            trainer=self,
        )


def check_daemon_class(daemon_cls: Any) -> None:
    """Raise :class:`ConfigurationError` unless the class can be told a position."""
    # A functools.partial of a class is as good as the class, to upstream and so to us.
    cls = getattr(daemon_cls, "func", daemon_cls)
    if not (isinstance(cls, type) and issubclass(cls, TrainingContextDaemonMixin)):
        raise ConfigurationError(
            f"daemon_cls is {getattr(cls, '__qualname__', cls)!s}, which stamps no tasks; expected a "
            "class with agl_meta.verl.TrainingContextDaemonMixin. Pass "
            "daemon_cls=agl_meta.verl.TrainingContextDaemon, or for a daemon that you copied out: "
            "class MyDaemon(agl_meta.verl.TrainingContextDaemonMixin, MyCopiedDaemon)."
        )


def check_trainer_class(trainer_cls: Any) -> None:
    """Raise :class:`ConfigurationError` unless the class knows its position."""
    cls = getattr(trainer_cls, "func", trainer_cls)
    if not (isinstance(cls, type) and issubclass(cls, TrainingContextTrainerMixin)):
        raise ConfigurationError(
            f"trainer_cls is {getattr(cls, '__qualname__', cls)!s}, which tells no position; expected a "
            "class with agl_meta.verl.TrainingContextTrainerMixin. Leave trainer_cls out, or for a "
            "trainer that you copied out: "
            "class MyTrainer(agl_meta.verl.TrainingContextTrainerMixin, MyCopiedTrainer)."
        )
