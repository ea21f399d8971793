"""A forked child finds every lock free, whoever held it in the parent."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agl_meta
from agl_meta import context, faults, save_prediction, shards
from agl_meta.context import training_context_of
from agl_meta.forks import PerProcess
from tests.core.rollouts import stamp, v1


def exit_code_of_child(work: Callable[[], object]) -> int:
    """Exit code of a forked child that does ``work``: 0, or the signal that ended its waiting."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that waits for a lock without end is ended by it
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork_while_held(lock: Any, work: Callable[[], object]) -> int:
    """Fork while another thread holds the lock, as a busy runner does."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        return exit_code_of_child(work)
    finally:
        done.set()
        thread.join()


def _warn() -> None:
    context._warned = False
    with training_context_of(v1({})):
        assert not agl_meta.current_training_context().is_stamped


def _save(root: Path) -> None:
    with training_context_of(v1(stamp(1, output_dir=str(root)))):
        assert save_prediction(1) is not None


def test_a_plain_lock_would_stay_held() -> None:
    """What these tests rest on: without our care, the child waits until the alarm."""
    lock = threading.Lock()

    def work() -> None:
        signal.alarm(1)
        with lock:
            pass

    assert fork_while_held(lock, work) == -signal.SIGALRM


def test_faults() -> None:
    """A child can count a fault while a thread of its parent counts one."""
    assert fork_while_held(faults.faults._lock.value, lambda: faults.faults.record("x", "y")) == 0


def test_warning() -> None:
    """A child can warn while a thread of its parent warns."""
    assert fork_while_held(context._warn_lock.value, _warn) == 0


def test_saving(tmp_path: Path) -> None:
    """A child can save while a thread of its parent saves, and into a file of its own."""
    _save(tmp_path)
    assert fork_while_held(shards.shard_writers._lock.value, lambda: _save(tmp_path)) == 0
    assert len(list(tmp_path.rglob("*.jsonl"))) == 2


def test_forked_while_another_thread_saves(tmp_path: Path) -> None:
    """The child's saves interrupt none of its own, and share a file as ever."""
    shards.shard_writers._is_busy.value = True
    try:
        assert exit_code_of_child(lambda: [_save(tmp_path) for _ in range(3)]) == 0
    finally:
        shards.shard_writers._is_busy.value = False
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


def test_fork_by_the_holder_itself() -> None:
    """A thread that forks while it holds a lock leaves its block in the child, too, and can take it anew."""
    lock = PerProcess(threading.Lock)
    code = 1
    try:
        with lock.value:
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
        with lock.value:
            code = 0
    finally:
        if pid == 0:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_every_lock_of_the_package() -> None:
    """No module makes a lock in another way."""
    bare = re.compile(r"(?<!PerProcess\()threading\.(?:Lock|RLock|Condition|Semaphore|BoundedSemaphore)\b")
    package = Path(agl_meta.__file__).parent
    assert [path for path in package.rglob("*.py") if bare.search(path.read_text())] == []


def test_nothing_is_kept_alive() -> None:
    """What has such a lock can be collected."""

    class Owner:
        def __init__(self) -> None:
            self.lock = PerProcess(threading.Lock)

    owner = Owner()
    gone = weakref.ref(owner.lock)
    del owner
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("depth", [1, 2])
def test_children_of_children(depth: int) -> None:
    """Each process has its own value, at any depth."""
    value = PerProcess(object)

    def work(level: int, above: object) -> None:
        assert value.value is not above
        own = value.value
        if level > 1:
            assert exit_code_of_child(lambda: work(level - 1, own)) == 0

    mine = value.value
    assert exit_code_of_child(lambda: work(depth, mine)) == 0
    assert value.value is mine
