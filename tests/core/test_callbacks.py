"""Callbacks and the fault counter: a user's error, or one of ours, never stops the training."""

from __future__ import annotations

from typing import Any

import pytest

from agl_meta import Callback, PassEvent
from agl_meta.callbacks import CallbackList
from agl_meta.faults import FaultCounter, faults


def event() -> PassEvent:
    return PassEvent(
        run_id="r",
        global_step=2,
        epoch=0,
        split="val",
        reason="periodic",
        folder=None,
        metrics={"val/reward": 0.5},
        trainer=None,
    )


class Raising(Callback):
    def on_validation_end(self, event: PassEvent) -> None:
        raise RuntimeError("boom")


class Adding(Callback):
    def on_validation_end(self, event: PassEvent) -> dict[str, Any]:
        return {"val/double": 2 * event.metrics["val/reward"]}


class Confused(Callback):
    def on_validation_end(self, event: PassEvent) -> Any:
        return 3.0


def test_metrics_of_all_and_faults_of_some(caplog: pytest.LogCaptureFixture) -> None:
    """A callback that raises, or returns nonsense, is counted by name; the others are heard."""
    before = faults.counts()
    assert CallbackList([Raising(), Confused(), Adding()]).metrics(event()) == {"val/double": 1.0}
    new = {key for key, count in faults.counts().items() if count > before.get(key, 0)}
    assert any("Raising.on_validation_end" in key and "boom" in key for key in new)
    assert any("Confused.on_validation_end" in key and "float" in key for key in new)
    assert "Raising.on_validation_end" in caplog.text


def test_event_is_frozen() -> None:
    """A callback can't change what the next one sees."""
    with pytest.raises(AttributeError):
        event().global_step = 3  # type: ignore[misc]


class TestFaultCounter:
    """Counts every fault, logs each cause once."""

    def test_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """The second case of a cause is counted only; another cause is logged, too."""
        counter = FaultCounter()
        for path in ("/a", "/b"):
            counter.record("saving", OSError(28, "No space left on device", path))
        counter.record("saving", ValueError("other"))
        assert counter.counts() == {
            "saving: No space left on device": 2,
            "saving: ValueError: other": 1,
        }
        assert caplog.text.count("No space left") == 1

    def test_error_that_can_not_be_shown(self) -> None:
        """An exception whose text raises is counted like any other."""

        class Hostile(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        counter = FaultCounter()
        counter.record("saving", Hostile())
        assert sum(counter.counts().values()) == 1
