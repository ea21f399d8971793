"""Callbacks: a user's code that is called while a training goes on, in the trainer's process.

The names are Lightning's. One event a call, frozen (after inspect_ai's hooks, which get one data object
each, so that a new field breaks no signature).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from agl_meta.faults import faults
from agl_meta.files import AnyPath
from agl_meta.rows import Row


@attrs.frozen(kw_only=True)
class FitEvent:
    """A ``fit()`` that starts or ends."""

    run_id: str
    """Name of this ``fit()``; a resumed training has a new one."""
    output_dir: AnyPath | None
    """The output folder, a ``Path`` or, of a remote store, a ``UPath``; ``None`` for a training that only
    stamps."""
    trainer: Any = attrs.field(repr=False)
    """The trainer; verl's own attributes are there (``global_steps``, ``config``, …)."""


@attrs.frozen(kw_only=True)
class PassEvent:
    """A pass (an evaluation, or the rollouts of a training step) that starts or ends."""

    run_id: str
    """Name of this ``fit()``."""
    global_step: int
    """verl's step; see :class:`agl_meta.TrainingContext`."""
    epoch: int
    """0-based pass over the training data."""
    split: str
    """``"train"`` or ``"val"``."""
    reason: str
    """train, before_training, after_resume, periodic or final."""
    folder: AnyPath | None
    """Folder of the pass, ``…/global_step_40/val``, a ``Path`` or, of a remote store, a ``UPath``; ``None``
    before its first task is enqueued, and for a training that only stamps."""
    metrics: Mapping[str, Any]
    """What upstream returned for the pass; empty when it starts."""
    rows: Sequence[Row] = attrs.field(default=())
    """One row a rollout, sorted by sample and repeat, read from disk as they are asked for. Of a training
    step only with ``record_train=True``; empty when a pass starts. After an evaluation that has no folder
    they can be read until ``on_validation_end`` returns."""
    summary: Mapping[str, Any] | None = attrs.field(default=None, repr=False)
    """What ``summary.json`` holds: counts, verdict, metrics; of an evaluation that ended."""
    trainer: Any = attrs.field(repr=False)
    """The trainer."""


class Callback:
    """Override what you need; each method gets one event.

    Instances live in the trainer's process, a Ray actor: they are pickled on their way there, and what
    they change in themselves is not seen in the driver. An exception is logged with the callback's
    name and counted, and training goes on.
    """

    def on_fit_start(self, event: FitEvent) -> None:
        """Before anything is loaded or validated."""

    def on_fit_end(self, event: FitEvent) -> None:
        """After training, also when it ended with an exception."""

    def on_validation_start(self, event: PassEvent) -> None:
        """Before the tasks of an evaluation are enqueued."""

    def on_validation_end(self, event: PassEvent) -> Mapping[str, Any] | None:
        """After an evaluation; a mapping that is returned is logged with upstream's metrics."""
        return None

    def on_train_batch_end(self, event: PassEvent) -> None:
        """After a training step; ``event.metrics`` are the step's."""


class CallbackList:
    """Calls each callback in order; none of them can stop the training or hinder another."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def call(self, hook: str, event: FitEvent | PassEvent) -> list[tuple[Callback, Any]]:
        """Call one hook of all; returns what the ones that did not fail returned."""
        results = []
        for callback in self._callbacks:
            method: Callable[[Any], Any] = getattr(callback, hook)
            try:
                results.append((callback, method(event)))
            except Exception as error:
                faults.record(f"{type(callback).__qualname__}.{hook}", error)
        return results

    def metrics(self, event: PassEvent) -> dict[str, Any]:
        """Call ``on_validation_end`` of all; returns the union of the mappings they gave."""
        merged: dict[str, Any] = {}
        for callback, result in self.call("on_validation_end", event):
            if isinstance(result, Mapping):
                merged.update(result)
            elif result is not None:
                faults.record(
                    f"{type(callback).__qualname__}.on_validation_end",
                    f"it returned {type(result).__name__}; expected a mapping of metrics or None",
                )
        return merged
