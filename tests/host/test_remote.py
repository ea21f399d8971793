"""Output folders in remote stores: a real server that speaks S3 (moto's), and fsspec's memory.

moto stands for AWS: a server that is asked over HTTP by the real s3fs, and keeps its objects in memory.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy
import pytest
import upath
from moto.server import ThreadedMotoServer
from PIL import Image

import agl_meta
from agl_meta.assembly import Queued
from agl_meta.context import losses, training_context_of
from agl_meta.errors import OutputDirError
from agl_meta.faults import faults
from agl_meta.recorder import PassRecorder
from agl_meta.remote import file_system
from agl_meta.rows import Rows
from agl_meta.storage import OUTPUT_DIR_VARIABLE, create_pass, find_root, publish
from tests.core.rollouts import stamp, v1
from tests.core.test_recorder import ABOUT, metadata, result
from tests.host.training import VAL, fit, store_server

PASS = "global_step_1/val"


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedMotoServer]:
    """The server, on a port of its own choice; credentials as AWS's own variables."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="runs")
        yield running
    running.stop()


@pytest.fixture(params=["s3", "memory"])
def root(request: pytest.FixtureRequest, server: ThreadedMotoServer) -> str:
    """A new folder in a store."""
    return f"{request.param}://runs/{secrets.token_hex(4)}"


@pytest.fixture
def s3(server: ThreadedMotoServer) -> str:
    return f"s3://runs/{secrets.token_hex(4)}"


def rollout(root: str, name: str = "ro-1", attempt: int = 1) -> Any:
    return training_context_of(v1(stamp(1, output_dir=root), name, attempt))


def objects(root: str) -> list[str]:
    fs, path = file_system(root)
    return sorted(each.removeprefix(path).lstrip("/") for each in fs.find(path))


def test_saved_and_read(root: str) -> None:
    """Values come back, with their context and the object that holds them; images stand beside."""
    values = [{"a": (1, float("nan"))}, "x" * 200_000, numpy.arange(3), Image.new("RGB", (2, 2))]
    with rollout(root):
        paths = [agl_meta.save_prediction(value, name="v") for value in values]
        (agl_meta.current_rollout_dir() / "own.txt").write_text("mine")
        assert str(agl_meta.current_step_dir()) == f"{root}/{PASS}"
    found = list(agl_meta.read_predictions(root, strict=True))
    assert [p.path for p in found] == paths and all(isinstance(p.path, upath.UPath) for p in found)
    assert found[0].value["a"][0] == 1 and found[0].value["a"][1] != found[0].value["a"][1]
    assert found[1].value == values[1] and found[2].value.tolist() == [0, 1, 2]
    assert found[0].context.global_step == 1 and found[0].context.rollout_id == "ro-1"
    folder = upath.UPath(f"{root}/{PASS}")
    assert Image.open((folder / found[3].value.path).open("rb")).size == (2, 2)
    assert (folder / "files/ro-1/own.txt").read_text() == "mine"


def test_passes(root: str) -> None:
    """Each call gets a folder of its own, also at once; nothing is replaced."""
    assert find_root(root) == (root, root)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: create_pass(root, 1, "val", {"n": n}), range(8)))
    assert Counter(made) == Counter([PASS, *[f"{PASS}.{n}" for n in range(2, 9)]])
    assert sorted(agl_meta.read_pass(f"{root}/{each}")["n"] for each in made) == list(range(8))
    with pytest.raises(FileExistsError):
        publish(upath.UPath(f"{root}/{PASS}/pass.json"), b"{}")
    assert objects(root) == sorted(f"{each}/pass.json" for each in made)  # no trace of the check, either


def test_a_request_that_is_sent_again(s3: str) -> None:
    """Its first answer got lost: it meets its own object, which is no other's."""
    fs, path = file_system(f"{s3}/x")
    real = fs.pipe_file

    def twice(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, "pipe_file", twice)
        publish(upath.UPath(f"{s3}/x"), b"ours")
    assert fs.cat_file(path) == b"ours"


@pytest.mark.parametrize("is_compressed", [False, True])
def test_assembled(root: str, is_compressed: bool) -> None:
    """Rows and summary appear in the store; what came meanwhile is seen by a further batch."""
    folder = upath.UPath(root) / create_pass(root, 3, "val", {})
    recorder = PassRecorder(folder, ABOUT, is_compressed=is_compressed)
    for batch in range(2):
        tasks = [
            Queued(rollout_id=f"r{batch}{n}", metadata=metadata(n, batch=batch), input={}) for n in range(3)
        ]
        for task in tasks:
            entry = {
                **task.metadata["agl_meta"],
                "output_dir": root,
                "pass_path": folder.parent.name + "/val",
            }
            with training_context_of(v1({**task.metadata, "agl_meta": entry}, task.rollout_id)):
                agl_meta.save_prediction({"of": task.rollout_id})
        rows = recorder.add(tasks, {task.rollout_id: [result("at-1")] for task in tasks})
        assert [row.predictions for row in rows] == [{"prediction": [{"of": t.rollout_id}]} for t in tasks]
    summary = recorder.close(6, {})
    before = [row.context.rollout_id for row in recorder.rows()]
    all_rows: Rows = recorder.rows()
    recorder.discard()
    assert (summary["verdict"], summary["succeeded"]) == ("complete", 6)
    assert agl_meta.read_summary(str(folder)) == summary
    assert [row.context.rollout_id for row in agl_meta.read_rows(root, strict=True)] == before
    assert all_rows[4].context.rollout_id == before[4]  # from the store now
    names = {each.rpartition("/")[2] for each in objects(root)}
    assert {"summary.json", "predictions.jsonl" + ".zst" * is_compressed} <= names


def test_existing_rows_are_not_replaced(root: str) -> None:
    """The rows then stay on this machine, and the summary says where."""
    folder = upath.UPath(root) / create_pass(root, 3, "val", {})
    (folder / "predictions.jsonl").write_bytes(b"somebody's\n")
    recorder = PassRecorder(folder, ABOUT)
    recorder.add([Queued(rollout_id="r", metadata=metadata(0), input={})], {"r": [result("at-1")]})
    reasons = recorder.close(1, {})["incomplete_because"]
    recorder.discard()
    assert (folder / "predictions.jsonl").read_bytes() == b"somebody's\n"
    left = Path(reasons[1].removeprefix("the rows were left in "))
    assert b'"rollout_id":"r"' in left.read_bytes()
    left.unlink()


def save_many(root: str, name: str, records: int, acknowledged: Any = None) -> None:
    with rollout(root, name):
        for n in range(records):
            path = agl_meta.save_prediction([name, n])
            if acknowledged is not None and path is not None:
                acknowledged.send(n)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_many_writers(s3: str, method: str) -> None:
    """Processes, forked from one that writes too, and threads: all is there, once."""
    save_many(s3, "parent", 2)
    context = multiprocessing.get_context(method)
    writers: list[Any] = [context.Process(target=save_many, args=(s3, f"p{n}", 10)) for n in range(3)]
    writers += [threading.Thread(target=save_many, args=(s3, f"t{n}", 10)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [w.exitcode for w in writers if not isinstance(w, threading.Thread)] == [0, 0, 0]
    found = Counter(tuple(p.value) for p in agl_meta.read_predictions(s3, strict=True))
    expected = [("parent", n) for n in range(2)]
    expected += [(f"{kind}{w}", n) for kind in "pt" for w in range(3) for n in range(10)]
    assert found == Counter(expected)


def test_killed_writer(s3: str) -> None:
    """All that was acknowledged can be read."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    writer = multiprocessing.get_context("spawn").Process(target=save_many, args=(s3, "w", 10_000, theirs))
    writer.start()
    theirs.close()
    last = -1
    while last < 20:
        last = ours.recv()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    while ours.poll():
        try:
            last = ours.recv()
        except EOFError:
            break
    found = [p.value[1] for p in agl_meta.read_predictions(s3, strict=True)]
    assert found[: last + 1] == list(range(last + 1)) and len(found) <= last + 2


def test_store_that_goes_away(
    s3: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rollout goes on, the loss is counted and named once; saving resumes when the store is back."""
    fs, _ = file_system(s3)
    with rollout(s3):
        assert agl_meta.save_prediction("before") is not None
        before = faults.counts()
        with monkeypatch.context() as patch:
            patch.setattr(fs, "_call_s3", broken)
            assert [agl_meta.save_prediction("lost") for _ in range(3)] == [None] * 3
            agl_meta.save_prediction(Image.new("RGB", (2, 2)))
        assert agl_meta.save_prediction("behind") is not None
    lost = {name: n - before.get(name, 0) for name, n in faults.counts().items() if n > before.get(name, 0)}
    assert sum(lost.values()) == 5 and all("ConnectionError: no route" in name for name in lost)
    assert [p.value for p in agl_meta.read_predictions(s3, strict=True)] == ["before", "behind"]


async def broken(*_: Any, **__: Any) -> None:
    raise ConnectionError("no route to the store")


@pytest.mark.parametrize(
    "error", [OSError("no number"), TimeoutError(), FileNotFoundError("bucket"), KeyError(1)]
)
def test_errors_of_a_store(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Stores raise OSErrors without a number: such a loss is counted, and no rollout notices."""
    root = f"memory://runs/{secrets.token_hex(4)}"

    def fails(*_: Any, **__: Any) -> None:
        raise error

    with training_context_of(v1(stamp(1, output_dir=root))):
        with monkeypatch.context() as patch:
            patch.setattr(type(file_system(root)[0]), "pipe_file", fails)
            assert agl_meta.save_prediction(1) is None
        assert sum(losses().values()) == 1
        assert agl_meta.save_prediction(2) is not None
    assert [p.value for p in agl_meta.read_predictions(root, strict=True)] == [2]


def test_nobody_listens(server: ThreadedMotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that is wrong is refused at the start, with what to do."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    code = "from agl_meta.storage import find_root; find_root('s3://runs/x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "output_dir is 's3://runs/x', which can't be written" in done.stderr
    assert "endpoint, credentials and rights" in done.stderr


def test_missing_bucket(server: ThreadedMotoServer) -> None:
    """It is refused, and not created."""
    with pytest.raises(OutputDirError, match="can't be written: .*in a bucket that exists"):
        find_root("s3://no-such-bucket/runs")
    assert [each["Name"] for each in boto3.client("s3").list_buckets()["Buckets"]] == ["runs"]


def test_pinned(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose variable names a store writes there, whatever the stamp names, and likewise back."""
    monkeypatch.setenv(OUTPUT_DIR_VARIABLE, s3)
    with rollout(str(tmp_path / "stamped")):
        agl_meta.save_prediction("pinned")
    monkeypatch.setenv(OUTPUT_DIR_VARIABLE, str(tmp_path / "here"))
    with rollout(s3):
        agl_meta.save_prediction("local")
    assert [p.value for p in agl_meta.read_predictions(s3)] == ["pinned"]
    assert [p.value for p in agl_meta.read_predictions(tmp_path / "here")] == ["local"]
    assert not (tmp_path / "stamped").exists()


def test_foreign_objects(root: str) -> None:
    """What is no record is reported with its place; the rest is read."""
    with rollout(root):
        agl_meta.save_prediction("good")
    fs, path = file_system(f"{root}/{PASS}/shards")
    fs.pipe_file(f"{path}/a.jsonl", b"\xff\n")
    fs.pipe_file(f"{path}/b.txt", b"not asked for")
    fs.pipe_file(f"{path}/sub/c.jsonl", b"not asked for")
    fs.pipe_file(f"{file_system(root)[1]}/notes/x", b"")
    with pytest.warns(agl_meta.DamagedRecordWarning, match=f"{root}/{PASS}/shards/a.jsonl, line 1: not JSON"):
        assert [p.value for p in agl_meta.read_predictions(root)] == ["good"]
    with pytest.raises(agl_meta.RecordError, match=r"summary\.json: can't be read"):
        agl_meta.read_summary(f"{root}/{PASS}")


def test_no_such_folder(root: str) -> None:
    with pytest.raises(OutputDirError, match="is not a folder"):
        agl_meta.read_predictions(root)


def test_path_objects(s3: str) -> None:
    """A path of universal_pathlib is as good as its text, but its options don't travel."""
    with rollout(s3):
        agl_meta.save_prediction(1)
    assert [p.value for p in agl_meta.read_predictions(upath.UPath(s3))] == [1]
    assert find_root(upath.UPath(s3)) == (s3, s3)  # type: ignore[arg-type]
    with pytest.raises(OutputDirError, match="storage options"):
        find_root(upath.UPath(s3, anon=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_fit(mode: str, s3: str, tmp_path: Path) -> None:
    """A whole real ``fit()``, with runner processes, leaves all its evaluations in the store."""
    if mode == "v1":
        from agentlightning.store.memory import InMemoryLightningStore

        with store_server(InMemoryLightningStore(thread_safe=True)) as store:
            fit(mode, tmp_path, s3, store=store, runners=2)  # type: ignore[arg-type]
    else:
        fit(mode, tmp_path, s3, runners=2)  # type: ignore[arg-type]
    rows = list(agl_meta.read_rows(s3, split="val", strict=True))
    assert Counter(row.context.global_step for row in rows) == dict.fromkeys((0, 2, 4, 6), len(VAL))
    saved = Counter(p.context.split for p in agl_meta.read_predictions(s3, strict=True))
    assert saved == {"train": 6 * 2 * 2, "val": 4 * len(VAL)}
    for row in rows:
        (value,) = row.predictions["prediction"]
        assert value["qid"] == row.input["qid"] and value["flat"]["global_step"] == row.context.global_step
    for step in (0, 2, 4, 6):
        summary = agl_meta.read_summary(f"{s3}/global_step_{step}/val")
        assert summary["verdict"] == "complete" and summary["differences"] == [] and summary["faults"] == {}
    assert not [each for each in tmp_path.rglob("*") if each.name.startswith("s3:")]
