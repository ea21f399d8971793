"""Saving from rollouts: whole records from threads and processes, nothing outside the folder."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import resource
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_meta
from agl_meta import save_prediction, storage
from agl_meta.context import training_context_of
from agl_meta.faults import faults
from agl_meta.storage import OUTPUT_DIR_VARIABLE, find_root
from tests.core.rollouts import stamp, v0, v1

PASS = "global_step_1/val"
FOLDERS = (agl_meta.current_step_dir, agl_meta.current_rollout_dir)


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OUTPUT_DIR_VARIABLE, raising=False)
    storage._pinned_root.cache_clear()


@contextmanager
def rollout(root: Path | None, rollout_id: str = "ro-1", **more: Any) -> Iterator[None]:
    attempt = more.pop("attempt", 1)
    output_dir = None if root is None else str(root)
    metadata = stamp(1, **{"output_dir": output_dir, **more})
    with training_context_of(v1(metadata, rollout_id, attempt)):
        yield


def read(root: Path) -> list[agl_meta.Prediction]:
    return list(agl_meta.read_predictions(root, strict=True))


def test_filed_under_its_place(tmp_path: Path) -> None:
    """The record lies in the pass that the rollout is stamped with, with its whole context."""
    with rollout(tmp_path):
        context = agl_meta.current_training_context()
        path = save_prediction({"a": (1, 2)}, name="state")
    (found,) = read(tmp_path)
    assert found.path == path and path is not None
    assert path.parent == tmp_path / PASS / "shards"
    assert (found.value, found.name) == ({"a": (1, 2)}, "state")
    assert found.context == agl_meta.TrainingContext(
        **{
            name: getattr(context, name)
            for name in agl_meta.TrainingContext.__annotations__
            if name != "output_dir"
        }
    )


def test_value_at_the_time_of_the_call(tmp_path: Path) -> None:
    """What happens to the value afterwards is not saved; both calls are."""
    with rollout(tmp_path):
        value = {"messages": ["one"]}
        save_prediction(value)
        value["messages"].append("two")
        save_prediction(value)
    assert [len(p.value["messages"]) for p in read(tmp_path)] == [1, 2]
    assert [p.sequence for p in read(tmp_path)] == sorted({p.sequence for p in read(tmp_path)})


def test_durability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``fsync`` each record is on the disk before the call returns, and so is the name of its file."""
    synced: list[os.stat_result] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with rollout(tmp_path):
        save_prediction("not asked for")
    assert synced == []
    with rollout(tmp_path, durability="fsync"):
        for n in range(3):
            path = save_prediction(n)
            assert path is not None
            found = path.stat()
            assert (synced[-1].st_ino, synced[-1].st_size) == (found.st_ino, found.st_size)
    assert [each.st_ino for each in synced].count(path.parent.stat().st_ino) == 1
    assert len(synced) == 4
    assert [p.value for p in read(tmp_path)] in (["not asked for", 0, 1, 2], [0, 1, 2, "not asked for"])


def test_a_disk_that_fails_late_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``fsync`` refuses is not acknowledged."""

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with rollout(tmp_path, durability="fsync"):
        assert save_prediction(1) is not None
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            assert save_prediction(2) is None
        assert save_prediction(3) is not None
    assert {1, 3} <= {p.value for p in read(tmp_path)}


def test_names_of_any_kind(tmp_path: Path) -> None:
    """Any text is a name; what is no text is refused, since nothing could find it again."""
    names = ["", "a\nb", "\ud800", "x" * 5000, "$agl"]
    with rollout(tmp_path):
        for name in names:
            save_prediction(1, name)
        with pytest.raises(TypeError, match="expected a str"):
            save_prediction(1, 3)  # type: ignore[arg-type]
    assert [p.name for p in read(tmp_path)] == names


def test_threads_and_tasks(tmp_path: Path) -> None:
    """Concurrent rollouts of one process share a file, and no record is torn or misfiled."""

    async def one(n: int) -> None:
        with rollout(tmp_path, f"ro-{n}"):
            for part in range(3):
                await asyncio.sleep(0)
                save_prediction({"n": n, "part": part, "pad": "x" * 50_000})

    async def many(first: int) -> None:
        await asyncio.gather(*(one(n) for n in range(first, first + 10)))

    threads = [threading.Thread(target=asyncio.run, args=(many(n * 10),)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(tmp_path)
    assert sorted((p.value["n"], p.value["part"]) for p in found) == [
        (n, part) for n in range(50) for part in range(3)
    ]
    assert all(p.context.rollout_id == f"ro-{p.value['n']}" for p in found)
    assert len({p.path for p in found}) == 1


def _save_many(root: Path, who: int, barrier: Any) -> None:
    barrier.wait(60)
    with rollout(root, f"ro-{who}"):
        for n in range(50):
            save_prediction([who, n, "x" * 10_000])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(tmp_path: Path, method: str) -> None:
    """Each process, forked after its parent had saved or not, writes a file of its own."""
    with rollout(tmp_path, "ro-parent"):
        save_prediction(["parent", 0])
    start = multiprocessing.get_context(method)
    barrier = start.Barrier(4)
    processes = [start.Process(target=_save_many, args=(tmp_path, n, barrier)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    with rollout(tmp_path, "ro-parent"):
        save_prediction(["parent", 1])
    found = read(tmp_path)
    assert sorted(map(str, (p.value[:2] for p in found))) == sorted(
        [str([who, n]) for who in range(4) for n in range(50)] + [str(["parent", n]) for n in range(2)]
    )
    assert len({p.path for p in found}) == 5


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """A process killed at any moment loses at most the record that it was writing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with rollout(tmp_path):
            n = 0
            while True:
                save_prediction([n, "x" * 100_000])
                os.write(writer, b".")
                n += 1
    acknowledged = 0
    while acknowledged < 20:
        acknowledged += len(os.read(reader, 100))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(writer)
    while more := os.read(reader, 1000):
        acknowledged += len(more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of the torn record, if there is one
        found = list(agl_meta.read_predictions(tmp_path))
    assert [p.value[0] for p in found][:acknowledged] == list(range(acknowledged))


class TestOutputFolder:
    """Which root a record goes to."""

    def test_variable_moves_the_root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the variable is set, the stamp's own root is not touched."""
        monkeypatch.setenv(OUTPUT_DIR_VARIABLE, str(tmp_path / "here"))
        with rollout(tmp_path / "there"):
            save_prediction(1)
        assert [p.value for p in read(tmp_path / "here")] == [1]
        assert not (tmp_path / "there").exists()

    def test_no_root_at_all(self) -> None:
        """The error names the argument and the variable, for every way to save."""
        for use in (
            lambda: save_prediction(1),
            agl_meta.current_step_dir,
            agl_meta.current_rollout_dir,
        ):
            with (
                rollout(None),
                pytest.raises(agl_meta.OutputDirError, match="output_dir=.*AGL_META_OUTPUT_DIR"),
            ):
                use()

    def test_unstamped_without_a_root(self) -> None:
        """The agent's code runs on; what is lost is counted, and a folder is refused for the same cause."""
        before = sum(faults.counts().values())
        with training_context_of(v1({})):
            assert save_prediction(1) is None
            for use in FOLDERS:
                with pytest.raises(
                    agl_meta.OutputDirError, match="was enqueued without agl_meta.*is not set"
                ):
                    use()
        assert sum(faults.counts().values()) == before + 1

    def test_unstamped_with_a_root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the variable set, what an unstamped rollout saves has a place, too."""
        monkeypatch.setenv(OUTPUT_DIR_VARIABLE, str(tmp_path / "runs"))
        with training_context_of(v0({})):
            save_prediction("dev")
        assert [p.value for p in read(tmp_path / "runs")] == ["dev"]

    def test_outside_a_rollout(self) -> None:
        """There is no place to file it under."""
        with pytest.raises(agl_meta.NotInRolloutError):
            save_prediction(1)

    @pytest.mark.parametrize("path", ["../x", "/etc", "global_step_1/../../x", "global_step_1"])
    def test_stamp_that_leads_outside(self, tmp_path: Path, path: str) -> None:
        """Such a stamp is refused, and nothing is created."""
        with rollout(tmp_path / "root", pass_path=path), pytest.raises(agl_meta.StampError):
            save_prediction(1)
        assert list(tmp_path.iterdir()) == []

    def test_relative_root(self) -> None:
        """A stamp's root is absolute: another process's current directory means nothing here."""
        with rollout(Path("runs")), pytest.raises(agl_meta.StampError, match="absolute"):
            save_prediction(1)

    @pytest.mark.parametrize("root", ["/a\0b", "\0", "/runs/\ud800", "/\0" + "x" * 100_000])
    def test_stamped_root_that_is_no_path(self, root: str) -> None:
        """What the system does not take for a path is refused by name, in words that can be printed."""
        for use in (lambda: save_prediction(1), *FOLDERS):
            with (
                training_context_of(v1(stamp(1, output_dir=root))),
                pytest.raises(
                    agl_meta.StampError, match="stamped with the output folder.*absolute path"
                ) as caught,
            ):
                use()
            assert len(str(caught.value).encode()) < 500

    @given(st.text(st.characters(exclude_categories=[])), st.booleans())
    def test_any_stamped_root(self, text: str, is_below: bool) -> None:
        """Whatever root is stamped: a StampError, or a loss that is counted."""
        root = f"/proc/self/nowhere/{text}" if is_below else text.lstrip("/") or "x"
        with training_context_of(v1(stamp(1, output_dir=root))):
            try:
                assert save_prediction(1) is None
            except agl_meta.StampError:
                pass
            with pytest.raises((agl_meta.StampError, OSError)):
                agl_meta.current_step_dir()

    @pytest.mark.parametrize("link", ["global_step_1", PASS, f"{PASS}/shards", f"{PASS}/files"])
    def test_planted_link(self, tmp_path: Path, link: str) -> None:
        """No link that somebody planted in the folder is followed out of it."""
        root, outside = tmp_path / "root", tmp_path / "outside"
        outside.mkdir()
        (root / link).parent.mkdir(parents=True)
        (root / link).symlink_to(outside)
        with rollout(root), pytest.raises(agl_meta.StampError, match="is a link;"):
            if link.endswith("files"):
                agl_meta.current_rollout_dir()
            save_prediction(1)
        assert list(outside.iterdir()) == []


class TestFaults:
    """A record that can't be written is lost, counted and named, and saving goes on afterwards."""

    def lost(self, root: Path) -> None:
        before = sum(faults.counts().values())
        with rollout(root):
            assert save_prediction("lost" * 1000) is None
        assert sum(faults.counts().values()) == before + 1

    def saved(self, root: Path) -> None:
        with rollout(root):
            assert save_prediction("saved") is not None

    def test_root_is_gone(self, tmp_path: Path) -> None:
        """The root is not made anew: it may be a mount that went away."""
        root = tmp_path / "root"
        self.lost(root)
        root.mkdir()
        self.saved(root)

    def test_file_size_limit(self, tmp_path: Path) -> None:
        """A full disk or quota: the record that is cut short costs no other one."""
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.saved(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
        try:
            self.lost(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, handler)
        self.saved(tmp_path)
        with pytest.warns(agl_meta.DamagedRecordWarning, match="cut short"):
            found = list(agl_meta.read_predictions(tmp_path))
        assert [p.value for p in found] == ["saved", "saved"]

    def test_too_many_open_files(self, tmp_path: Path) -> None:
        """The next record after the cause has gone is written."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
        try:
            self.lost(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        self.saved(tmp_path)

    def test_folder_deleted_under_the_writer(self, tmp_path: Path) -> None:
        """What is saved after the folder was deleted goes to a new file, not into a deleted one."""
        self.saved(tmp_path)
        os.rename(tmp_path / "global_step_1", tmp_path / "moved")
        for path in (tmp_path / "moved").rglob("*.jsonl"):
            path.unlink()
        self.saved(tmp_path)
        assert [p.value for p in read(tmp_path)] == ["saved"]

    @pytest.mark.parametrize("pinned", [False, True])
    def test_pass_folder_that_could_not_be_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool
    ) -> None:
        """Where the trainer had no folder to stamp, the loss is counted, and a folder is refused."""
        if pinned:
            monkeypatch.setenv(OUTPUT_DIR_VARIABLE, str(tmp_path))
        before = faults.counts()
        with rollout(tmp_path, pass_path=None):
            assert save_prediction(1) is None
            for use in FOLDERS:
                with pytest.raises(agl_meta.OutputDirError, match="the trainer could not create the folder"):
                    use()
        ((cause, _),) = (Counter(faults.counts()) - Counter(before)).items()
        assert "the trainer could not create the folder" in cause


class TestVariable:
    """The environment variable names the same folder to runners as to the trainer, or none to both."""

    @pytest.mark.parametrize(
        "text", ["~/runs", "~", "~/a/../b/", "runs", "./x//y", "{tmp}/z/", "{tmp}/\udcff"]
    )
    def test_same_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        """What runners save lies in the folder that the trainer prepares."""
        (tmp_path / "home").mkdir()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv(OUTPUT_DIR_VARIABLE, text.format(tmp=tmp_path))
        with rollout(tmp_path / "there"):
            path = save_prediction(1)
        root, _ = find_root("/there")
        assert path is not None and root is not None
        assert path.parent == Path(root, PASS, "shards")
        assert [p.value for p in agl_meta.read_predictions(root)] == [1]

    def test_agent_that_changes_the_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A relative folder is where the process was before, for all that its rollouts save."""

        class Wanders(agl_meta.TrainingContextMixin):
            def rollout(self, task: Path, resources: Any, rollout: Any) -> None:
                os.chdir(task)
                self.save_prediction(task.name)
                self.save_prediction(str(self.rollout_dir))

        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv(OUTPUT_DIR_VARIABLE, "./runs")
        for name in ("a", "b"):
            Wanders().rollout(tmp_path / name, None, v1(stamp(1, output_dir="/there"), f"ro-{name}"))
        folders = [str(tmp_path / "runs" / PASS / "files" / f"ro-{name}") for name in ("a", "b")]
        assert [p.value for p in read(tmp_path / "runs")] == ["a", folders[0], "b", folders[1]]
        # A changed value is looked at anew, also if it is changed back.
        for value in ("other", "./runs"):
            monkeypatch.setenv(OUTPUT_DIR_VARIABLE, value)
            with rollout(tmp_path):
                assert agl_meta.current_step_dir() == tmp_path / "b" / value / PASS
        assert not list((tmp_path / "a").iterdir())

    def test_directory_that_is_gone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A relative folder below none is a loss like others, and is found again when it is set anew."""
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        monkeypatch.setenv(OUTPUT_DIR_VARIABLE, "runs")
        before = faults.counts()
        with rollout(tmp_path):
            assert save_prediction(1) is None
            os.chdir(tmp_path)
            assert save_prediction(2) is not None
        ((cause, times),) = (Counter(faults.counts()) - Counter(before)).items()
        assert (cause, times) == ("saving a prediction: No such file or directory", 1)
        assert [p.value for p in read(tmp_path / "runs")] == [2]

    @pytest.mark.parametrize("text", ["ftp://host/run", "~no-such-user-here/runs"])
    def test_no_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        """What names no folder is refused by the name of the variable, and nothing is created."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv(OUTPUT_DIR_VARIABLE, text)
        for stamped in (rollout(tmp_path), training_context_of(v1({}))):
            with stamped:
                for use in (lambda: save_prediction(1), *FOLDERS, lambda: find_root(None)):
                    with pytest.raises(agl_meta.OutputDirError, match=f"{OUTPUT_DIR_VARIABLE} is '{text}"):
                        use()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "text",
        [
            "/" + "x" * 300,
            "/" + "x/" * 3000,
            "/" + "x/" * 50_000,
            "/proc/self/x",
            "/dev/null/x",
            "/mnt/none/x",
        ],
    )
    def test_folder_that_can_not_be_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        """An overlong path, or one where nothing can be created: the loss is counted, the rollout goes on."""
        monkeypatch.setenv(OUTPUT_DIR_VARIABLE, text)
        before = sum(faults.counts().values())
        with rollout(tmp_path):
            assert save_prediction(1) is None
            for use in FOLDERS:
                with pytest.raises(OSError, match="Errno"):
                    use()
        assert sum(faults.counts().values()) == before + 1
        with pytest.raises(agl_meta.OutputDirError, match=OUTPUT_DIR_VARIABLE):
            find_root(None)

    def test_deep_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Many levels are no more than many levels."""
        top = tmp_path / "x"
        monkeypatch.setenv(OUTPUT_DIR_VARIABLE, str(top) + "/x" * 1500)
        with rollout(tmp_path / "there"):
            path = save_prediction(1)
        assert path is not None
        assert path.exists()
        shutil.rmtree(os.environ[OUTPUT_DIR_VARIABLE])
        (tmp_path / "stays").touch()
        os.removedirs(os.path.dirname(os.environ[OUTPUT_DIR_VARIABLE]))  # rmtree can't go that deep
        assert not top.exists()


class TestFolders:
    """``step_dir`` and ``rollout_dir``."""

    def test_made_on_first_use(self, tmp_path: Path) -> None:
        """They are there when they are asked for, and again the same."""
        with rollout(tmp_path):
            assert not (tmp_path / "global_step_1").exists()
            assert agl_meta.current_step_dir() == tmp_path / PASS
            assert agl_meta.current_rollout_dir() == tmp_path / PASS / "files" / "ro-1"
            (agl_meta.current_rollout_dir() / "x").write_text("kept")
            assert (agl_meta.current_rollout_dir() / "x").read_text() == "kept"

    def test_each_rollout_and_attempt_has_its_own(self, tmp_path: Path) -> None:
        """Ids that differ in case only, odd ids, and retries never share a folder."""
        folders = set()
        for rollout_id, attempt in [("ro-a", 1), ("ro-A", 1), ("../x", 1), ("", 1), ("ro-a", 2)]:
            with rollout(tmp_path, rollout_id, attempt=attempt):
                folder = agl_meta.current_rollout_dir()
                assert folder.parent == tmp_path / PASS / "files"
                folders.add(folder.name.lower())
        assert len(folders) == 5
        assert {"ro-a", "ro-a.2"} <= folders
