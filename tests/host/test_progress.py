"""The bar while a pass waits, and the warning when nobody takes its rollouts, on real daemons and queues."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agentlightning as agl
import numpy as np
import pytest
from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.client import AgentLightningClient
from agentlightning.runner import LegacyAgentRunner, LitAgentRunner
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore

import agl_meta
from agl_meta.errors import ConfigurationError
from agl_meta.faults import faults
from agl_meta.verl import TrainingContextDaemon, progress, queues
from agl_meta.verl.passes import Run
from agl_meta.verl.positions import Position
from agl_meta.verl.progress import watching
from agl_meta.verl.queues import Counts, queue_of
from agl_meta.verl.settings import Settings
from tests.host.rollouts import NullTracer
from tests.host.training import DirectEndpoint, fit, free_port, overrides

SAMPLES = 4
PATIENCE = 60.0


class Agent(agl.LitAgent[Any]):
    """Fails at one sample of the batch."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        if task["n"] == 1:
            raise RuntimeError("an agent's own failure")
        return 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(queues, "QUERY_SECONDS", 0.02)


@contextlib.contextmanager
def daemon_of(mode: str, store: Any = None) -> Iterator[Any]:
    """A real daemon, with one validation batch of step 40 enqueued."""
    v1 = {"store": store, "llm_proxy": DirectEndpoint(), "adapter": TracerTraceToTriplet()}
    daemon = TrainingContextDaemon(
        free_port(),
        train_rollout_n=2,
        train_information={"model": "none"},
        tokenizer=None,
        mini_batch_size=1,
        pad_token_id=0,
        mode=mode,
        **(v1 if mode == "v1" else {}),
    )
    if mode == "v1":
        daemon.llm_proxy.update_model_list(
            [{"model_name": "none", "litellm_params": {"api_base": "http://x"}}]
        )
        daemon.llm_proxy._running = True
    run = Run(Settings(), None, (), lambda is_train: False)
    position = Position(global_step=40, epoch=0, batch_index=0, is_train=False, reason="periodic")
    daemon.follow(
        lambda data, is_train, repeats, daemon: run.begin_batch(position, SAMPLES, repeats, daemon),
        poll_seconds=0.05,
        progress=False,
    )
    daemon.start()
    try:
        daemon.set_up_data_and_server({"n": np.arange(SAMPLES)}, ["127.0.0.1:1"], is_train=False)
        yield daemon
    finally:
        if mode == "v0":
            daemon.server._uvicorn_server.should_exit = True


def work(daemon: Any, rollouts: int, worker: int = 0) -> None:
    """Let one of upstream's runners do so many rollouts."""
    runner: Any
    if daemon.mode == "v0":
        client = AgentLightningClient(f"http://127.0.0.1:{daemon.server_port}", poll_interval=0.05)
        runner = LegacyAgentRunner(
            agent=Agent(),
            client=client,
            tracer=NullTracer(),
            triplet_exporter=TracerTraceToTriplet(),
            max_tasks=rollouts,
        )
        runner.iter()
        return
    runner = LitAgentRunner(NullTracer(), max_rollouts=rollouts, poll_interval=0.05, heartbeat_interval=0.1)
    runner.init(agent=Agent())
    runner.init_worker(worker, daemon.store.behind)
    asyncio.run(runner.iter())


@contextlib.contextmanager
def waiting(daemon: Any) -> Iterator[threading.Thread]:
    """Let the daemon wait in a thread, as the trainer does; at the end it must have come back."""
    thread = threading.Thread(target=daemon.run_until_all_finished, args=(False,), daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not watchers()


def watchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("agl_meta ")]


def warnings(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == progress.__name__]


def until(condition: Callable[[], Any]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("did not happen")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Waits for so many further looks at the queue."""
    seen = []
    original = progress._Watch._warn_if_stalled

    def counting(self: Any, counts: Counts) -> None:
        original(self, counts)
        seen.append(counts)

    monkeypatch.setattr(progress._Watch, "_warn_if_stalled", counting)

    def more(number: int) -> None:
        goal = len(seen) + number
        until(lambda: len(seen) >= goal)

    return more


FIRST = {
    "v0": "No agent client asks this server (port ",
    "v1": "No runner has ever asked the store for work.",
}
SECOND = {
    "v0": "No agent client asks this server (port ",
    "v1": "No runner is alive: the last heartbeat of the 1 that the store knows was ",
}


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_nobody_takes_the_rollouts(
    mode: str, caplog: Any, looks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning for each stretch, with the likely cause; when a runner comes, the pass ends."""
    monkeypatch.setattr(queues, "ALIVE_SECONDS", 0.3)
    with daemon_of(mode, InMemoryLightningStore(thread_safe=True)) as daemon, waiting(daemon):
        until(lambda: warnings(caplog))
        looks(60)
        (first,) = warnings(caplog)
        assert first.startswith("val step 40 waits: 4 of its 4 rollouts are queued, none is running, and ")
        assert FIRST[mode] in first
        work(daemon, 2)
        until(lambda: len(warnings(caplog)) == 2)
        looks(60)
        _, second = warnings(caplog)
        assert second.startswith("val step 40 waits: 2 of its 4 rollouts are queued, none is running, and ")
        assert SECOND[mode] in second
        work(daemon, 2)
    assert len(daemon._completed_rollouts_v0) == SAMPLES
    assert len(warnings(caplog)) == 2


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_counts(mode: str) -> None:
    """Failed, running and queued rollouts are told apart while upstream waits."""
    with daemon_of(mode, InMemoryLightningStore(thread_safe=True)) as daemon, waiting(daemon):
        queue = queue_of(daemon)
        work(daemon, 2)  # the second one fails
        if mode == "v0":
            claim = daemon.server._store.get_next_task()
            task = asyncio.run_coroutine_threadsafe(claim, daemon.server.loop).result(PATIENCE)
        else:
            task = asyncio.run(daemon.store.dequeue_rollout(worker_id="claims"))
        half = Counts(completed=2, total=4, failed=1, running=1, queued=1)
        until(lambda: queue.look() == half)
        if mode == "v0":
            post = daemon.server._store.store_rollout(agl.RolloutLegacy(rollout_id=task.rollout_id))
            asyncio.run_coroutine_threadsafe(post, daemon.server.loop).result(PATIENCE)
        else:
            attempt = task.attempt.attempt_id
            asyncio.run(daemon.store.update_attempt(task.rollout_id, attempt, status="failed"))
        work(daemon, 1)
        until(lambda: queue.look() == Counts(completed=4, total=4, failed=2, running=0, queued=0))
        queue.close()


def test_claim_that_timed_out(caplog: Any) -> None:
    """v0 requeues a dead client's task only when another one asks: until then it waits like the others."""
    with daemon_of("v0") as daemon, waiting(daemon):
        daemon.server.behind._task_timeout_seconds = 0.2
        claim = daemon.server._store.get_next_task()
        asyncio.run_coroutine_threadsafe(claim, daemon.server.loop).result(PATIENCE)
        until(lambda: warnings(caplog))
        assert "4 of its 4 rollouts are queued, none is running" in warnings(caplog)[0]
        work(daemon, SAMPLES)


def test_runners_that_hang(caplog: Any) -> None:
    """Fresh heartbeats, and nothing taken: the warning does not say that they are dead."""
    store = InMemoryLightningStore(thread_safe=True)
    with daemon_of("v1", store) as daemon, waiting(daemon):
        asyncio.run(store.update_worker("worker-0"))
        until(lambda: warnings(caplog))
        assert "Runners are alive" in warnings(caplog)[0]
        assert "none of them has ever asked for work" in warnings(caplog)[0]
        assert "py-spy" in warnings(caplog)[0]
        work(daemon, SAMPLES)


def test_runner_that_died_with_a_rollout(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rollout stays claimed until upstream's timeout, of 20 minutes by default; the warning does not."""
    monkeypatch.setattr(queues, "ALIVE_SECONDS", 0.3)
    store = InMemoryLightningStore(thread_safe=True)
    with daemon_of("v1", store) as daemon, waiting(daemon):
        asyncio.run(store.update_worker("worker-0"))
        held = asyncio.run(store.dequeue_rollout(worker_id="worker-0"))
        until(lambda: warnings(caplog))
        assert "3 of its 4 rollouts are queued" in warnings(caplog)[0]
        assert "No runner is alive" in warnings(caplog)[0]
        assert "1 of them still held a rollout" in warnings(caplog)[0]
        asyncio.run(store.update_attempt(held.rollout_id, held.attempt.attempt_id, status="failed"))
        work(daemon, SAMPLES - 1)


def test_runner_without_a_name_is_seen(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that no worker stands for, as of a runner of the user's own, is found before a warning."""
    looked = []
    original = queues.V1Queue.why_stalled

    def why_stalled(self: Any) -> Any:
        if (found := original(self)) is not None:
            looked.append(found)
        return found

    monkeypatch.setattr(queues.V1Queue, "why_stalled", why_stalled)
    store = InMemoryLightningStore(thread_safe=True)
    with daemon_of("v1", store) as daemon, waiting(daemon):
        held = asyncio.run(store.dequeue_rollout())
        until(lambda: len(looked) >= 2)
        assert {(found.running, found.queued) for found in looked} == {(1, 3)}
        assert not warnings(caplog)
        asyncio.run(store.update_attempt(held.rollout_id, held.attempt.attempt_id, status="succeeded"))
        work(daemon, SAMPLES - 1)


def test_store_over_http(caplog: Any) -> None:
    """As in the Ray actor; the warning names the store's address."""
    port = free_port()
    server = LightningStoreServer(InMemoryLightningStore(thread_safe=True), "127.0.0.1", port)
    asyncio.run(server.start())
    try:
        client = LightningStoreClient(f"http://127.0.0.1:{port}")
        with daemon_of("v1", client) as daemon, waiting(daemon):
            until(lambda: warnings(caplog))
            assert f"No runner has ever asked the store at http://127.0.0.1:{port} for" in warnings(caplog)[0]
            work(daemon, SAMPLES)
        asyncio.run_coroutine_threadsafe(client.close(), daemon._internal_loop).result(PATIENCE)
    finally:
        asyncio.run(server.stop())


class BrokenStore(InMemoryLightningStore):
    async def query_workers(self, *_: Any, **__: Any) -> Any:
        raise OSError("no such question")


def test_store_that_can_not_be_asked(caplog: Any, looks: Any) -> None:
    """No harm to the pass, no guess at a cause; counted, and logged once."""
    doing = "asking the store about its runners: OSError: no such question"
    before = faults.counts().get(doing, 0)
    with daemon_of("v1", BrokenStore(thread_safe=True)) as daemon, waiting(daemon):
        until(lambda: faults.counts().get(doing, 0) >= before + 3)
        looks(60)
        assert not warnings(caplog)
        work(daemon, SAMPLES)
    assert len([record for record in caplog.records if "no such question" in record.getMessage()]) == 1


class BrokenServer:
    def __getattr__(self, name: str) -> Any:
        raise OSError("no such server")


def test_look_that_raises() -> None:
    """Each failed look is counted; the wait and its result are the caller's."""
    doing = "watching a pass: OSError: no such server"
    before = faults.counts().get(doing, 0)
    daemon = types.SimpleNamespace(mode="v0", server=BrokenServer())
    with watching(daemon, "val step 1", False):
        until(lambda: faults.counts().get(doing, 0) >= before + 2)
    assert not watchers()


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_daemon_without_upstreams_names(mode: str) -> None:
    """The bar of a copy that renamed everything shows the time."""
    with stderr_to(wide_terminal) as terminal, watching(types.SimpleNamespace(mode=mode), "val step 7", True):
        until(lambda: "val step 7" in terminal.text())
    assert "queued" not in terminal.text()
    assert queue_of(types.SimpleNamespace(mode=mode)).look() == Counts()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_wait_that_is_broken_off(error: type[BaseException]) -> None:
    """The error comes through, and the thread is gone."""
    with daemon_of("v1", InMemoryLightningStore(thread_safe=True)) as daemon:
        with pytest.raises(error), watching(daemon, "val step 40", False):
            (thread,) = (thread for thread in threading.enumerate() if thread.name in watchers())
            assert thread.daemon
            raise error
        assert not watchers()


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait goes on without a watch."""

    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    doing = "watching a pass: RuntimeError: can't start new thread"
    before = faults.counts().get(doing, 0)
    monkeypatch.setattr(progress._Watch, "start", start)
    with watching(types.SimpleNamespace(mode="v0"), "val step 40", False):
        pass
    assert faults.counts()[doing] == before + 1


# ------------------------------------------------------------------------------------------ the bar


class Reader:
    """What was written to a file descriptor, read in a thread so that no writer blocks."""

    def __init__(self, readable: int) -> None:
        self._readable = readable
        self._got = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self._readable, 4096):
                self._got += data

    def text(self) -> str:
        return self._got.decode(errors="replace")


def wide_terminal() -> tuple[int, int]:
    readable, writable = pty.openpty()
    fcntl.ioctl(writable, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    return readable, writable


@contextlib.contextmanager
def stderr_to(pair: Callable[[], tuple[int, int]]) -> Iterator[Reader]:
    readable, writable = pair()
    reader = Reader(readable)
    with os.fdopen(writable, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield reader
    reader._thread.join(PATIENCE)
    os.close(readable)


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_training_on_a_terminal(mode: str, tmp_path: Path) -> None:
    """Every pass has its bar, which ends full; nothing is printed where it was not asked for."""
    steps = {"total_epochs": 1, "test_freq": 3, "save_freq": -1}
    with stderr_to(wide_terminal) as terminal:
        fit(mode, tmp_path, tmp_path / "out", trainer=steps)
    for label, total in {"val step 0": 2, "train step 1": 4, "train step 3": 4, "val step 3": 2}.items():
        ends = [line for line in terminal.text().split("\r") if line.startswith(f"{label} (")]
        assert f"{label} (0 failed, 0 running, 0 queued): 100%" in ends[-1]
        assert f" {total}/{total} " in ends[-1]
    assert not watchers()


@pytest.mark.parametrize("pair", [os.pipe, wide_terminal])
def test_training_without_a_bar(pair: Callable[[], tuple[int, int]], tmp_path: Path) -> None:
    """Quiet in a pipe, and on a terminal when told so."""
    algorithm: dict[str, Any] = {"progress": False} if pair is wide_terminal else {}
    with stderr_to(pair) as reader:
        config = overrides(tmp_path, total_epochs=1, test_freq=-1, save_freq=-1)
        settled = agl_meta.VERL(config, output_dir=tmp_path / "out", dry_run=True, **algorithm).config
        assert not settled.agl_meta.get("progress")
        fit("v1", tmp_path, None, config=settled)
    assert "step 1" not in reader.text()


def test_failed_rollouts_are_shown() -> None:
    """The counts stand in the bar."""
    with (
        stderr_to(wide_terminal) as terminal,
        daemon_of("v1", InMemoryLightningStore(thread_safe=True)) as daemon,
    ):
        daemon._agl_progress = True
        with waiting(daemon):
            until(lambda: "val step 40 (0 failed, 0 running, 4 queued):   0%" in terminal.text())
            work(daemon, 2)
            until(lambda: "val step 40 (1 failed, 0 running, 2 queued):  50%" in terminal.text())
            assert " 2/4 [" in terminal.text()
            work(daemon, 2)
        until(lambda: "val step 40 (1 failed, 0 running, 0 queued): 100%" in terminal.text())


def test_bar_in_a_ray_actor(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """There it is what Ray's driver draws from: one line for each change, the last one closes it."""
    monkeypatch.setattr(progress, "_is_ray_actor", lambda: True)
    import ray

    monkeypatch.setattr(ray._private.worker.global_worker, "mode", ray.WORKER_MODE, raising=False)
    bar = progress._Bar("val step 40")
    for counts in (Counts(completed=0, total=4), Counts(completed=3, total=4), Counts(completed=3, total=4)):
        bar.draw(counts)
    bar.draw(Counts(completed=4, total=4), last=True)
    states = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(state["x"], state["total"], state["closed"]) for state in states] == [
        (0, 4, False),
        (3, 4, False),
        (4, 4, False),
        (4, 4, True),
    ]
    assert all(state["__magic_token__"] == "__ray_tqdm_magic_token__" for state in states)


@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_setting_of_another_kind(value: Any, tmp_path: Path) -> None:
    """Refused at the start, from argument and config alike."""
    with pytest.raises(ConfigurationError, match=r"progress is .*; expected True, False, or None"):
        agl_meta.VERL(overrides(tmp_path), progress=value)
    with pytest.raises(ConfigurationError, match="progress is"):
        agl_meta.VERL({**overrides(tmp_path), "agl_meta": {"progress": value}})


@pytest.mark.parametrize("value", [True, False])
def test_setting_wins_over_the_terminal(value: bool, tmp_path: Path) -> None:
    """The driver settles it before the config travels to the actor."""
    assert agl_meta.VERL(overrides(tmp_path), progress=value).config.agl_meta.progress is value
    config = {**overrides(tmp_path), "agl_meta": {"progress": value}}
    assert agl_meta.VERL(config).config.agl_meta.progress is value
    with stderr_to(wide_terminal):
        assert agl_meta.VERL(overrides(tmp_path)).config.agl_meta.progress is True
        assert agl_meta.VERL(config).config.agl_meta.progress is value
