"""Signal handlers that interrupt saving: they may save themselves, and what they raise reaches the agent."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import agl_meta
from agl_meta import save_prediction, shards
from agl_meta.context import losses, training_context_of
from agl_meta.faults import FaultCounter, faults
from agl_meta.forks import PerProcess
from agl_meta.storage import OUTPUT_DIR_VARIABLE
from tests.core.children import in_child
from tests.core.rollouts import stamp, v1


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OUTPUT_DIR_VARIABLE, raising=False)


@contextmanager
def rollout(root: Path) -> Iterator[None]:
    with training_context_of(v1(stamp(1, output_dir=str(root)))):
        yield


@contextmanager
def interrupted(where: str, how: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a signal handler run once, when saving has come to a certain function of the system."""
    real = getattr(os, where)
    left = [how]

    def function(*args: Any, **kwargs: Any) -> Any:
        if not left or threading.current_thread() is not threading.main_thread():
            return real(*args, **kwargs)
        if where == "write":
            descriptor, content = args
            half = real(descriptor, content[: len(content) // 2])
            signal.raise_signal(signal.SIGUSR1)
            return half
        found = real(*args, **kwargs)
        signal.raise_signal(signal.SIGUSR1)
        return found

    def handler(*_: Any) -> None:
        left.pop()()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, where, function)
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not left


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("where", ["write", "open", "fstat", "mkdir"])
def test_save_from_a_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, is_first: bool
) -> None:
    """Wherever it interrupts another save in the same thread: both records are whole."""

    def work() -> list[str]:
        paths: list[Any] = []
        shards.shard_writers._writers.renew()
        with rollout(tmp_path):
            if not is_first:
                assert save_prediction("before")
            if where in ("open", "mkdir"):  # a save into a file that is open opens none
                shards.shard_writers._writers.renew()
            if where == "mkdir" and not is_first:
                shutil.rmtree(tmp_path / "global_step_1")
            with interrupted(where, lambda: paths.append(save_prediction("inner")), monkeypatch):
                paths.append(save_prediction(["outer", "x" * 10_000]))
            assert save_prediction("after")
        return [str(path) for path in paths]

    inner, outer = in_child(work)
    assert inner != outer
    found = [(p.value, str(p.path)) for p in agl_meta.read_predictions(tmp_path, strict=True)]
    expected = [
        "inner",
        ["outer", "x" * 10_000],
        "after",
        *([] if is_first or where == "mkdir" else ["before"]),
    ]
    assert Counter(map(str, expected)) == Counter(str(value) for value, _ in found)
    assert ("inner", inner) in found and (["outer", "x" * 10_000], outer) in found


def test_saves_from_a_timer(tmp_path: Path) -> None:
    """A handler that saves again and again, between saves and in them: nothing hangs, nothing is torn."""

    def work() -> list[str]:
        acknowledged: list[str] = []

        def save(name: str, size: int) -> None:
            if save_prediction([name, "x" * size]) is not None:
                acknowledged.append(name)

        def handler(*_: Any) -> None:
            save(f"inner {len(acknowledged)}", 10)

        signal.signal(signal.SIGALRM, handler)
        with rollout(tmp_path):
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            deadline = time.monotonic() + 60
            n = 0
            # Until handlers have run within saves, too: those have files of their own.
            while len(os.listdir(tmp_path / "global_step_1/val/shards") if n else ()) < 20:
                assert time.monotonic() < deadline
                save(f"outer {n}", 1000)
                n += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
        return acknowledged

    acknowledged = in_child(work)
    found = [p.value[0] for p in agl_meta.read_predictions(tmp_path, strict=True)]
    assert Counter(found) == Counter(acknowledged)
    assert any(name.startswith("inner") for name in found)


def test_fault_in_a_handler() -> None:
    """A fault that is counted while another one is: neither waits for the other."""
    counter = FaultCounter()

    def work() -> dict[str, int]:
        with counter._lock.value:
            counter.record("saving", "cause")
        return counter.counts()

    assert in_child(work) == {"saving: cause": 1}


def test_locks_are_known() -> None:
    """What these tests rest on: a lock that its own thread can take again."""
    for lock in (shards.shard_writers._lock, faults._lock):
        assert isinstance(lock, PerProcess)
        with lock.value, lock.value:
            pass


class Deadline(Exception):
    """Of a user who knows what OSError is taken for."""


RAISED = [TimeoutError("too slow"), TimeoutError(), OSError("too slow"), ConnectionError("gone"), Deadline()]


@pytest.mark.parametrize("where", ["write", "open", "fstat", "mkdir"])
@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_error_of_a_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    """It is the agent's, whatever its class: no loss is counted, and the next record is saved."""

    def fails() -> None:
        raise error

    before = faults.counts()
    with rollout(tmp_path):
        shards.shard_writers._writers.renew()
        if where == "fstat":
            assert save_prediction("first")
        with interrupted(where, fails, monkeypatch), pytest.raises(type(error)) as caught:
            save_prediction(["cut", "x" * 1000])
        assert caught.value is error
        assert losses() == {}
        assert save_prediction("after")
    assert faults.counts() == before
    with warnings.catch_warnings(record=True) as damaged:
        warnings.simplefilter("always")
        values = [p.value for p in agl_meta.read_predictions(tmp_path)]
    assert sorted(values) == (["after", "first"] if where == "fstat" else ["after"])
    assert ["cut short" in str(each.message) for each in damaged] == ([True] if where == "write" else [])


def test_timeout_of_a_rollout(tmp_path: Path) -> None:
    """An agent that ends a rollout after a time, as with ``signal.setitimer``: each time-out reaches it."""

    def handler(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if Path(frame.f_code.co_filename).name.startswith("encoding"):
                # What is raised there is taken for an error of the value's own code, and leaves a marker.
                signal.setitimer(signal.ITIMER_REAL, 0.00005)
                return
            frame = frame.f_back
        raise TimeoutError("the rollout takes too long")

    def work() -> tuple[list[int], dict[str, int], int]:
        signal.signal(signal.SIGALRM, handler)
        faults._counts.clear()
        acknowledged: list[int] = []
        reached = 0
        with rollout(tmp_path):
            for n in range(200):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0001 + n * 0.000005)
                    for _ in range(20_000):
                        number = len(acknowledged)
                        if save_prediction(number) is not None:
                            acknowledged.append(number)
                    break  # the time-out did not reach it
                except TimeoutError:
                    reached += 1
            lost = losses()
        return acknowledged, {**lost, **faults.counts()}, reached

    acknowledged, lost, reached = in_child(work)
    assert (lost, reached) == ({}, 200)
    with warnings.catch_warnings(record=True) as damaged:
        warnings.simplefilter("always")
        found = [p.value for p in agl_meta.read_predictions(tmp_path)]
    # One that was interrupted when it was written already may be there without having been acknowledged.
    assert set(acknowledged) <= set(found)
    assert len(found) <= len(acknowledged) + reached
    assert all("cut short" in str(each.message) for each in damaged)
