"""The daemon's part: stamps every task with the position that the trainer tells."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl_meta.errors import ConfigurationError
from agl_meta.faults import faults
from agl_meta.ports import check_v0_port
from agl_meta.verl.batches import Batch
from agl_meta.verl.progress import watching
from agl_meta.verl.stamping import StampingServer, StampingStore

BatchSource = Callable[["Mapping[str, Any]", bool, int, Any], Batch]
"""What a trainer gives its daemon: from a batch's columns, ``is_train``, the repeats of a sample and
the daemon to what stamps the batch and sees what comes of it."""

_TOLD_NOTHING = (
    "This daemon was told no position in training, because its trainer does not know agl_meta: the "
    "trainer_cls is missing. Train with agl_meta.VERL(config, …); or pass "
    "trainer_cls=agl_meta.verl.TrainingContextTrainer beside daemon_cls; or, for a trainer that you "
    "copied out, class MyTrainer(agl_meta.verl.TrainingContextTrainerMixin, MyCopiedTrainer), which "
    "must keep its daemon in self.agent_mode_daemon."
)

_LOOP_TIMEOUT = 20.0


class TrainingContextDaemonMixin:
    """Adds the training context to what an ``AgentModeDaemon`` enqueues, in its v0 and v1 modes.

    For upstream's class see :class:`agl_meta.verl.TrainingContextDaemon`; for one that you copied out::

        class MyDaemon(TrainingContextDaemonMixin, MyCopiedDaemon): ...
    """

    _agl_batch_source: BatchSource | None = None
    _agl_poll_seconds: float | None = None
    _agl_batch: Batch | None = None
    _agl_progress: bool | None = None

    mode: str
    server: Any
    store: Any
    server_port: int
    train_rollout_n: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._agl_queue: StampingServer | StampingStore
        if self.mode == "v0":
            self._agl_queue = self.server = StampingServer(self.server, _NoBatch())
        else:
            self._agl_queue = self.store = StampingStore(self.store, _NoBatch())
            self._agl_wait_for_loop()

    def _agl_wait_for_loop(self) -> None:
        # Upstream's __init__ starts the thread of its loop and does not wait: a batch that follows at
        # once meets "Internal loop is not running".
        deadline = time.monotonic() + _LOOP_TIMEOUT
        while getattr(self, "_internal_loop", self) is None and time.monotonic() < deadline:
            time.sleep(0.001)

    def follow(
        self, source: BatchSource, *, poll_seconds: float | None = None, progress: bool | None = None
    ) -> None:
        """Take positions from ``source``, which the trainer mixin gives when it makes its daemon.

        Args:
            source: called once for each batch, before it is enqueued.
            poll_seconds: upper limit of upstream's pause of 5 s between looks at the queue; for dry
                runs. ``None`` leaves it alone.
            progress: whether a bar shows how far a pass is; ``None``: on a terminal.
        """
        self._agl_batch_source = source
        self._agl_poll_seconds = poll_seconds
        self._agl_progress = progress

    def start(self) -> None:
        """Start upstream's servers. Raises :class:`ConfigurationError` if v0's port is in use."""
        if self.mode == "v0":
            check_v0_port(self.server_port)
        super().start()  # type: ignore[misc]

    def set_up_data_and_server(
        self,
        data: Mapping[str, Any],
        server_addresses: list[str],
        is_train: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Enqueue a batch, stamped. Raises :class:`ConfigurationError` for a broken set-up."""
        if self._agl_batch_source is None:
            raise ConfigurationError(_TOLD_NOTHING)
        repeats = self.train_rollout_n if is_train else 1
        batch = self._agl_batch_source(data, is_train, repeats, self)
        self._agl_queue.batch = self._agl_batch = batch
        result = super().set_up_data_and_server(  # type: ignore[misc]
            data, server_addresses, is_train, *args, **kwargs
        )
        if batch.tasks == 0 and any(len(column) for column in data.values()):
            raise ConfigurationError(
                f"{type(self).__qualname__} enqueued a batch, but none of its tasks was stamped; "
                "expected it to enqueue with self.server.queue_task (v0), or with "
                "self.store.enqueue_many_rollouts or enqueue_rollout (v1), as upstream's does."
            )
        return result

    def run_until_all_finished(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the batch, as upstream does."""
        label = "pass" if self._agl_batch is None else self._agl_batch.label
        with watching(self, label, self._agl_progress), self._agl_polling():
            return super().run_until_all_finished(*args, **kwargs)  # type: ignore[misc]

    def get_test_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's; the rows of the validation are written first."""
        return self._agl_evaluate(super().get_test_metrics, lambda metrics: metrics, args, kwargs)  # type: ignore[misc]

    def get_train_data_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's; the rows of the training batch are written first, if they are wanted."""
        return self._agl_evaluate(
            super().get_train_data_batch,  # type: ignore[misc]
            lambda result: result[1],
            args,
            kwargs,
        )

    def clear_data_and_server(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's; rows that a copied-out trainer asked no metrics for are written first."""
        batch = self._agl_batch
        if batch is not None and batch.is_pending:
            batch.record(self)
        return super().clear_data_and_server(*args, **kwargs)  # type: ignore[misc]

    def _agl_evaluate(
        self, evaluate: Callable[..., Any], metrics_of: Callable[[Any], Any], args: Any, kwargs: Any
    ) -> Any:
        batch = self._agl_batch
        if batch is None:
            return evaluate(*args, **kwargs)
        # Before: upstream raises for a training batch in which nothing was traced.
        batch.record(self)
        result = evaluate(*args, **kwargs)
        with faults.guard("checking the metrics of a pass"):
            batch.check(metrics_of(result))
        return result

    def _agl_polling(self) -> contextlib.AbstractContextManager[Any]:
        if self._agl_poll_seconds is None:
            return contextlib.nullcontext()
        from agl_meta.verl.dry_run import fast_polling

        return fast_polling(self, self._agl_poll_seconds)


class _NoBatch:
    """Stands in the queue until the first batch: what is enqueued then would carry no stamp."""

    is_recorded = False

    def stamp(self, sample: Any, metadata: dict[str, Any]) -> None:
        raise ConfigurationError(_TOLD_NOTHING)

    def queued(self, rollout_id: str, metadata: Mapping[str, Any]) -> None: ...

    def posted(self, rollouts: Sequence[Any]) -> None: ...

    def finished(self, rollouts: Sequence[Any]) -> None: ...

    def spans_read(self, rollout_id: str, spans: Sequence[Any]) -> None: ...
