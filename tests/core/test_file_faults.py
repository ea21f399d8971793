"""Files that fail while rollouts save: what is lost is counted and named, and saving goes on afterwards.

The faults are the operating system's own, made in a forked child, so that they need no rights and nothing of
them is left.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import shutil
import socket
import stat
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

import agl_meta
from agl_meta import save_prediction, shards
from agl_meta.assembly import Queued, Result
from agl_meta.context import training_context_of
from agl_meta.faults import faults
from agl_meta.recorder import PassRecorder
from agl_meta.storage import OUTPUT_DIR_VARIABLE, create_pass
from tests.core.children import as_nobody, in_child, start_child
from tests.core.rollouts import stamp, v1

PASS = "global_step_1/val"
ABOUT = {"pass": PASS, "split": "val"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(OUTPUT_DIR_VARIABLE, raising=False)
    shards.shard_writers._writers.value.clear()
    yield
    shards.shard_writers._writers.value.clear()


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that every user can get at; those of pytest lie in one of the user who runs it."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "out")
        made.mkdir()
        yield made


# ------------------------------------------------------------------------------------------ faults


@contextmanager
def limited(which: int, to: int) -> Iterator[None]:
    limits = resource.getrlimit(which)
    resource.setrlimit(which, (to, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, limits)


def quota(root: Path) -> AbstractContextManager[None]:
    """A file takes no more than a part of a record."""
    return limited(resource.RLIMIT_FSIZE, 300)


@contextmanager
def device_full(root: Path) -> Iterator[None]:
    """The open file takes nothing more. Whatever is opened afterwards does."""
    (writer,) = shards.shard_writers._writers.value.values()
    full = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(full, writer._descriptor, inheritable=False)
    os.close(full)
    # It is to be taken for our own file.
    writer._identity = shards._identity(os.fstat(writer._descriptor))
    writer._flags = fcntl.fcntl(writer._descriptor, fcntl.F_GETFL)
    yield


def no_descriptors(root: Path) -> AbstractContextManager[None]:
    """The process has as many files open as it may."""
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    return limited(resource.RLIMIT_NOFILE, lowest)


def read_only(part: str) -> Callable[[Path], AbstractContextManager[None]]:
    @contextmanager
    def fault(root: Path) -> Iterator[None]:
        os.chmod(root / part, stat.S_IRUSR | stat.S_IXUSR)
        yield
        os.chmod(root / part, stat.S_IRWXU)

    return fault


def file_in_place_of(part: str) -> Callable[[Path], AbstractContextManager[None]]:
    @contextmanager
    def fault(root: Path) -> Iterator[None]:
        os.rename(root / part, root.parent / "aside")
        (root / part).touch()
        yield
        (root / part).unlink()
        os.rename(root.parent / "aside", root / part)

    return fault


@contextmanager
def moved_away(root: Path) -> Iterator[None]:
    """As a mount that went away and came back."""
    os.rename(root, root.parent / "aside")
    yield
    os.rename(root.parent / "aside", root)


@contextmanager
def path_too_long(root: Path) -> Iterator[None]:
    os.environ[OUTPUT_DIR_VARIABLE] = str(root) + "/x" * 3000
    yield
    del os.environ[OUTPUT_DIR_VARIABLE]


BEFORE = "had saved before"
FIRST = "had saved nothing before"
CASES: list[Any] = [
    (quota, BEFORE, errno.EFBIG, 2),
    (quota, FIRST, errno.EFBIG, 2),
    (device_full, BEFORE, errno.ENOSPC, 1),
    (no_descriptors, FIRST, errno.EMFILE, 2),
    (moved_away, FIRST, errno.ENOENT, 2),
    (path_too_long, BEFORE, errno.ENAMETOOLONG, 2),
    (path_too_long, FIRST, errno.ENAMETOOLONG, 2),
    *((read_only(part), FIRST, errno.EACCES, 2) for part in (f"{PASS}/shards",)),
    *(
        (file_in_place_of(part), FIRST, errno.ENOTDIR, 2)
        for part in ("", "global_step_1", PASS, f"{PASS}/shards")
    ),
]


class Agent(agl_meta.TrainingContextMixin):
    """Does what its task says."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        task(self)
        return 1.0


def metadata(root: Path) -> dict[str, Any]:
    return stamp(1, output_dir=str(root), is_recorded=True)


def run(root: Path, rollout_id: str, task: Callable[[Agent], None]) -> None:
    Agent().rollout(task, None, v1(metadata(root), rollout_id))


def assemble(root: Path, *names: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the rows say was saved, by rollout, and the summary."""
    recorder = PassRecorder(root / PASS, ABOUT)
    recorder.add(
        [Queued(rollout_id=name, metadata=metadata(root), input={}) for name in names],
        {
            name: [Result(status="succeeded", turns=(), reward=1.0, reward_used=1.0, attempt_id="at-1")]
            for name in names
        },
    )
    summary = recorder.close(len(names), {})
    saved = {str(row.context.rollout_id): row.predictions.get("prediction", []) for row in recorder.rows()}
    recorder.discard()
    return saved, summary


def read(root: Path) -> list[agl_meta.Prediction]:
    """What can be read; no more is damaged than lines that found no room."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = list(agl_meta.read_predictions(root))
    assert all("cut short" in str(each.message) for each in caught), [str(each.message) for each in caught]
    return found


@contextmanager
def logged() -> Iterator[list[str]]:
    """What is logged meanwhile, of causes that no test before has met."""
    faults._counts.clear()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("agl_meta").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("agl_meta").removeHandler(handler)


@pytest.mark.parametrize(("fault", "when", "cause", "times"), CASES)
def test_counted_named_and_resumed(root: Path, fault: Any, when: str, cause: int, times: int) -> None:
    """No rollout notices; each that was told of a file finds its record there."""
    create_pass(str(root), 1, "val", {})

    def work() -> Any:
        acknowledged: list[tuple[str, Any]] = []

        def save(agent: Agent, value: str) -> bool:
            path = agent.save_prediction({"value": value, "pad": "x" * 500})
            if path is not None:
                acknowledged.append((str(path), value))
            return path is not None

        def hit(agent: Agent) -> None:
            if when == BEFORE:
                assert save(agent, "before")
            with fault(root):
                assert [save(agent, f"in it {n}") for n in range(times)] == [False] * times
            assert save(agent, "after")

        with logged() as messages:
            run(root, "hit", hit)
            run(root, "later", lambda agent: [save(agent, f"later {n}") for n in range(3)] and None)
        return acknowledged, messages

    acknowledged, messages = as_nobody(root.parent, work)
    values = [value for _, value in acknowledged]
    assert values == [*(["before"] if when == BEFORE else []), "after", "later 0", "later 1", "later 2"]
    found = [(str(each.path), each.value["value"]) for each in read(root)]
    assert sorted(found) == sorted(acknowledged)
    assert [os.strerror(cause) in message for message in messages] == [True], messages
    saved, summary = assemble(root, "hit", "later")
    assert summary["lost"] == {f"saving a prediction: {os.strerror(cause)}": times}
    assert [each["value"] for name in ("hit", "later") for each in saved[name]] == values
    assert (summary["verdict"], summary["succeeded"]) == ("complete", 2)


@pytest.mark.parametrize(
    "fault", [no_descriptors, moved_away, read_only(f"{PASS}/shards"), read_only(""), file_in_place_of(PASS)]
)
def test_no_fault_for_a_file_that_is_open(root: Path, fault: Any) -> None:
    """What hinders opening only costs nothing where the file of the process is open already."""
    create_pass(str(root), 1, "val", {})

    def work() -> Any:
        def task(agent: Agent) -> None:
            assert agent.save_prediction(0)
            with fault(root):
                for n in range(1, 4):
                    assert agent.save_prediction(n)

        with logged() as messages:
            run(root, "one", task)
        return messages

    assert as_nobody(root.parent, work) == []
    assert [each.value for each in agl_meta.read_predictions(root, strict=True)] == [0, 1, 2, 3]
    assert assemble(root, "one")[1]["lost"] == {}


def test_root_deleted_under_the_writer(tmp_path: Path) -> None:
    """Deleted with all that is in it: then nothing is saved until there is a folder again."""
    root = tmp_path / "out"
    root.mkdir()
    create_pass(str(root), 1, "val", {})

    def work() -> Any:
        def task(agent: Agent) -> None:
            assert agent.save_prediction("deleted")
            shutil.rmtree(root)
            assert agent.save_prediction("lost") is None
            root.mkdir()
            assert agent.save_prediction("after")

        with logged() as messages:
            run(root, "one", task)
        return messages

    (message,) = in_child(work)
    assert os.strerror(errno.ENOENT) in message
    assert [each.value for each in agl_meta.read_predictions(root, strict=True)] == ["after"]
    assert assemble(root, "one")[1]["lost"] == {f"saving a prediction: {os.strerror(errno.ENOENT)}": 1}


@pytest.mark.parametrize("part", ["", "global_step_1", PASS])
def test_folder_renamed_under_the_writer(tmp_path: Path, part: str) -> None:
    """Somebody sets the folder aside: what is saved from then on is where the folder is."""
    root, aside = tmp_path / "out", tmp_path / "aside"
    root.mkdir()
    create_pass(str(root), 1, "val", {})
    (aside / part).parent.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        with training_context_of(v1(metadata(root))):
            assert save_prediction("before")
            os.rename(root / part, aside / part)
            assert save_prediction("afterwards")

    in_child(work)
    assert [each.value for each in agl_meta.read_predictions(aside, strict=True)] == ["before", "afterwards"]
    assert not list(root.rglob("*.jsonl"))


def test_many_writers_at_their_quota(tmp_path: Path) -> None:
    """Processes and threads that are cut short again and again: no record is glued to half of another."""
    create_pass(str(tmp_path), 1, "val", {})

    def work(who: int) -> list[list[int]]:
        acknowledged: list[list[int]] = []

        def save(thread: int) -> None:
            with training_context_of(v1(metadata(tmp_path), f"ro-{who}-{thread}")):
                for n in range(60):
                    if save_prediction({"who": [who, thread, n], "pad": "x" * (37 * n)}) is not None:
                        acknowledged.append([who, thread, n])

        with limited(resource.RLIMIT_FSIZE, 5000):
            threads = [threading.Thread(target=save, args=(thread,)) for thread in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return acknowledged

    waits = [start_child(lambda who=who: work(who)) for who in range(3)]  # type: ignore[misc]
    acknowledged = [each for wait in waits for each in wait()]
    assert 0 < len(acknowledged) < 3 * 3 * 60
    assert sorted(each.value["who"] for each in read(tmp_path)) == sorted(acknowledged)


# ----------------------------------------------------------------------------------- many processes


@pytest.mark.parametrize("hosts", [("node",), ("node-1", "node-2"), ("", "a/../b", "ä" * 100, "x" * 200)])
def test_same_pid_on_several_hosts(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    """Processes that look the same, as in containers, never share a file."""

    def work(host: str, who: int) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: host)
            patch.setattr(os, "getpid", lambda: 1)
            with training_context_of(v1(metadata(tmp_path), f"ro-{who}")):
                paths = {save_prediction([who, n, "x" * 5000]) for n in range(40)}
        (path,) = paths
        return str(path)

    waits = [
        start_child(lambda host=host, who=who: work(host, who))  # type: ignore[misc]
        for who, host in enumerate(hosts * 4)
    ]
    paths = [wait() for wait in waits]
    assert len(set(paths)) == len(paths) == len(os.listdir(tmp_path / PASS / "shards"))
    assert all(".1." in Path(path).name for path in paths)
    found = [each.value[:2] for each in agl_meta.read_predictions(tmp_path, strict=True)]
    assert sorted(found) == [[who, n] for who in range(len(paths)) for n in range(40)]


def test_fork_in_mid_write(tmp_path: Path) -> None:
    """Children that are forked while threads write neither wait for these nor write into their lines."""
    stop = threading.Event()
    big = "x" * 3_000_000
    acknowledged: list[str] = []

    def save(thread: int) -> None:
        with training_context_of(v1(metadata(tmp_path), f"ro-{thread}")):
            n = 0
            while not stop.is_set():
                assert save_prediction([f"{thread}.{n}", big]) is not None
                acknowledged.append(f"{thread}.{n}")
                n += 1

    def child(number: int) -> None:
        with training_context_of(v1(metadata(tmp_path), f"ro-child-{number}")):
            assert save_prediction([f"child.{number}", ""]) is not None

    threads = [threading.Thread(target=save, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(8):
            in_child(lambda number=number: child(number))  # type: ignore[misc]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    expected = [*acknowledged, *(f"child.{number}" for number in range(8))]
    found = list(agl_meta.read_predictions(tmp_path, strict=True))
    assert Counter(each.value[0] for each in found) == Counter(expected)
    assert len({each.path for each in found}) == 9
    shutil.rmtree(tmp_path / "global_step_1")


def test_records_larger_than_any_buffer(tmp_path: Path) -> None:
    """20 MB from four processes at once, small ones in between: each is whole, and in order."""
    part = "x" * 7_000_000

    def work(who: int) -> None:
        with training_context_of(v1(metadata(tmp_path), f"ro-{who}")):
            for n in range(6):
                assert save_prediction([who, n, [part] * 3 if n % 3 == 1 else []]) is not None

    for wait in [start_child(lambda who=who: work(who)) for who in range(4)]:  # type: ignore[misc]
        wait()
    found: dict[int, list[int]] = {}
    for each in agl_meta.read_predictions(tmp_path, strict=True):
        who, n, parts = each.value
        assert parts == ([part] * 3 if n % 3 == 1 else [])
        found.setdefault(who, []).append(n)
    assert found == {who: [*range(6)] for who in range(4)}
    shutil.rmtree(tmp_path / "global_step_1")
