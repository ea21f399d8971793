"""Open files of a process that other code closes, replaces or writes to: nothing of anybody's is harmed."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_meta import read_predictions, save_prediction, shards
from agl_meta.context import training_context_of
from agl_meta.faults import faults
from agl_meta.storage import OUTPUT_DIR_VARIABLE
from tests.core.rollouts import stamp, v1


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(OUTPUT_DIR_VARIABLE, raising=False)
    shards.shard_writers._writers.value.clear()
    yield
    shards.shard_writers._writers.value.clear()


def save(root: Path, value: Any, step: int = 1) -> None:
    with training_context_of(v1(stamp(step, output_dir=str(root)))):
        assert save_prediction(value) is not None


def values(root: Path) -> list[Any]:
    return sorted(p.value for p in read_predictions(root, strict=True))


def descriptors(root: Path) -> list[int]:
    """What this process has open below ``root``."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listdir used
            continue
        if target.startswith(str(root)) and ".jsonl" in target:
            found.append(int(name))
    return found


def replace(descriptor: int, other: int) -> tuple[int, os.stat_result]:
    """Give the number of an open file to another one, as closing it and opening that one may do."""
    os.dup2(other, descriptor, inheritable=False)
    os.close(other)
    return descriptor, os.fstat(descriptor)


def _file(tmp_path: Path, _: Path) -> int:
    return os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _same_flags(tmp_path: Path, _: Path) -> int:
    return os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)


def _memory(tmp_path: Path, _: Path) -> int:
    return os.memfd_create("x", os.MFD_CLOEXEC)


def _socket(tmp_path: Path, _: Path) -> int:
    return socket.socket().detach()


def _same_file(tmp_path: Path, shard: Path) -> int:
    # As after the number of a deleted file's inode was used again.
    return os.open(shard, os.O_RDWR | os.O_APPEND)


@pytest.mark.parametrize("kind", [_file, _same_flags, _memory, _socket, _same_file])
def test_number_used_for_another_file(tmp_path: Path, kind: Callable[[Path, Path], int]) -> None:
    """What has the number now is neither written nor closed, and the next record has a file of its own."""
    root = tmp_path / "root"
    root.mkdir()
    save(root, 1)
    (shard,) = root.rglob("*.jsonl")
    (ours,) = descriptors(root)
    foreign, before = replace(ours, kind(tmp_path, shard))
    try:
        save(root, 2)
        save(root, 3)
        after = os.fstat(foreign)
        assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    finally:
        os.close(foreign)
    assert values(root) == [1, 2, 3]
    assert len(list(root.rglob("*.jsonl"))) == 2


def test_closed_by_others(tmp_path: Path) -> None:
    """After all files of the process were closed, no record is lost, and no fault is counted."""
    before = faults.counts()
    for n in range(3):
        save(tmp_path, n)
        for descriptor in descriptors(tmp_path):
            os.close(descriptor)
    assert values(tmp_path) == [0, 1, 2]
    assert faults.counts() == before


def test_foreign_file_in_the_place_of_one_that_is_dropped(tmp_path: Path) -> None:
    """The least recently used writer is dropped without closing what has its number now."""
    root = tmp_path / "root"
    root.mkdir()
    save(root, 0, step=0)
    (ours,) = descriptors(root)
    foreign, before = replace(ours, _file(tmp_path, root))
    try:
        for step in range(1, 40):
            save(root, step, step=step)
        assert os.fstat(foreign) == before
    finally:
        os.close(foreign)
    assert values(root) == [*range(40)]
    assert len(descriptors(root)) <= shards._MAX_OPEN


def in_child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_daemon(tmp_path: Path) -> None:
    """Code that makes a daemon of the process closes all descriptors and takes their numbers."""
    root, logs = tmp_path / "root", tmp_path / "logs"
    root.mkdir()
    logs.mkdir()

    def work() -> None:
        save(root, 0)
        os.closerange(0, 256)
        mine = [os.open(logs / str(n), os.O_WRONLY | os.O_CREAT | os.O_APPEND) for n in range(64)]
        save(root, 1)
        for descriptor in mine:
            os.write(descriptor, b"mine")
            os.close(descriptor)
        save(root, 2)

    assert in_child(work) == 0
    assert values(root) == [0, 1, 2]
    assert {path.read_bytes() for path in logs.iterdir()} == {b"mine"}


def test_closed_standard_streams(tmp_path: Path) -> None:
    """Where the numbers 0 to 2 are free, no file of ours takes them: others print to them."""

    def work() -> None:
        os.closerange(0, 3)
        save(tmp_path, 0)
        for descriptor in range(3):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"printed")
        save(tmp_path, 1)

    assert in_child(work) == 0
    assert values(tmp_path) == [0, 1]


actions = st.sampled_from(["save", "close", "foreign", "same", "unlink", "fork"])


@given(st.lists(st.tuples(actions, st.integers(0, 2)), max_size=25))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
def test_any_sequence(tmp_path_factory: pytest.TempPathFactory, does: list[tuple[str, int]]) -> None:
    """Whatever others do with our files in between, each record is saved and nothing of theirs is touched."""
    tmp_path = tmp_path_factory.mktemp("any")
    root = tmp_path / "root"
    root.mkdir()
    foreign: dict[int, os.stat_result] = {}
    expected: Counter[int] = Counter()
    lost: Counter[int] = Counter()
    number = 0
    try:
        for action, which in does:
            ours = sorted(set(descriptors(root)) - set(foreign))
            target = ours[which % len(ours)] if ours else None
            if action == "save":
                number += 1
                save(root, number, step=which)
                expected[number] += 1
            elif action == "fork":
                number += 1
                assert in_child(lambda n=number, step=which: save(root, n, step)) == 0  # type: ignore[misc]
                expected[number] += 1
            elif target is None:
                continue
            elif action == "close":
                os.close(target)
            elif action == "foreign":
                log = os.open(tmp_path / f"log{len(foreign)}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                foreign.update([replace(target, log)])
            elif action == "same":
                path = os.readlink(f"/proc/self/fd/{target}")
                if not path.endswith("(deleted)"):
                    again = os.open(path, os.O_WRONLY | os.O_APPEND)
                    foreign[replace(target, again)[0]] = os.fstat(target)
            else:
                path = os.readlink(f"/proc/self/fd/{target}")
                if not path.endswith("(deleted)"):
                    lost.update(p.value for p in read_predictions(root) if str(p.path) == path)
                    os.unlink(path)
        found = Counter(p.value for p in read_predictions(root, strict=True))
        assert found == expected - lost
        assert [os.fstat(descriptor).st_size for descriptor in foreign] == [
            s.st_size for s in foreign.values()
        ]
    finally:
        for descriptor in {*foreign, *descriptors(root)}:
            os.close(descriptor)
        shards.shard_writers._writers.value.clear()


def test_closing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mount that tells of an error when a file is closed, it is counted and the next record is saved."""
    root = tmp_path / "root"
    root.mkdir()
    save(root, 0)
    (ours,) = descriptors(root)
    (shard,) = root.rglob("*.jsonl")
    shard.unlink()
    close, failed = os.close, []

    def fails(descriptor: int) -> None:
        close(descriptor)
        if descriptor == ours and not failed:
            failed.append(descriptor)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", fails)
    before = faults.counts()
    save(root, 1)
    monkeypatch.undo()
    ((cause, _),) = (Counter(faults.counts()) - Counter(before)).items()
    assert cause == f"closing a file of predictions: {os.strerror(errno.EDQUOT)}"
    assert values(root) == [1]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space"), KeyboardInterrupt(), RuntimeError("alarm")], ids=repr
)
def test_a_line_that_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """What ends a ``write`` in the middle of a line, also a signal handler, costs no other line."""
    write = os.write

    def cut(descriptor: int, content: bytes) -> int:
        write(descriptor, content[: len(content) // 2])
        raise error

    save(tmp_path, 0)
    with training_context_of(v1(stamp(1, output_dir=str(tmp_path)))), monkeypatch.context() as patch:
        patch.setattr(os, "write", cut)
        if isinstance(error, OSError):
            assert save_prediction(1) is None
        else:
            with pytest.raises(type(error)):
                save_prediction(1)
    save(tmp_path, 2)
    with pytest.warns(UserWarning, match="cut short"):
        assert sorted(p.value for p in read_predictions(tmp_path)) == [0, 2]
