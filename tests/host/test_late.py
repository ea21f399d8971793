"""Time-outs, retries and stragglers in real ``fit()`` runs of both modes, with two runners."""

from __future__ import annotations

import contextlib
import functools
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agentlightning as agl
import orjson
import pytest
from agentlightning.store.memory import InMemoryLightningStore

import agl_meta
from agl_meta.faults import faults
from agl_meta.recorder import PassRecorder
from agl_meta.storage import LATE_FILE, PREDICTIONS_FILE, SHARDS
from agl_meta.verl import TrainingContextDaemon
from agl_meta.verl.late import LateResults
from agl_meta.verl.results import Texts, result_v0
from tests.core.test_recorder import ABOUT, queued
from tests.host.training import ask, fit, store_server

VAL = [{"qid": name, "question": f"What about {name}?"} for name in ("quick", "slow", "other")]
WAIT_SECONDS = 60


class Straggler(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    """The first attempt of one sample ends only when it is let go, after the validation was over."""

    def __init__(self, let_go: Path) -> None:
        super().__init__()
        self.let_go = let_go

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        attempt = self.training_context.attempt_number
        if task["qid"] == "slow" and attempt == 1:
            self.save_prediction("began", name="progress")
            deadline = time.monotonic() + WAIT_SECONDS
            while not self.let_go.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert self.let_go.exists()
        ask(resources["main_llm"], task["question"])
        self.save_prediction(f"attempt {attempt}")
        return float(attempt or 0)


class LetGo(agl_meta.Callback):
    """Lets the straggler go at the end of the first training step."""

    def __init__(self, agent: Straggler) -> None:
        self.agent = agent

    def on_train_batch_end(self, event: Any) -> None:
        self.agent.let_go.touch()


class RetryingStore(InMemoryLightningStore):
    """As a user sets it up who wants retries: upstream's daemon asks for one attempt."""

    async def enqueue_many_rollouts(self, rollouts: Sequence[Any]) -> Any:
        for request in rollouts:
            request.config.max_attempts = 2
            request.config.retry_condition = ["timeout", "failed"]
        return await super().enqueue_many_rollouts(rollouts)


def run(mode: str, folder: Path, store: Any = None) -> list[agl_meta.Row]:
    """Validation, then three training steps while the straggler ends; gives the rows of the validation."""
    agent = Straggler(folder / "let_go")
    with contextlib.nullcontext() if store is None else store_server(store) as server:
        fit(
            mode,
            folder,
            folder / "out",
            agent=agent,
            store=server,
            runners=2,
            val=VAL,
            daemon_cls=functools.partial(TrainingContextDaemon, llm_timeout_seconds=4.0),
            callbacks=[LetGo(agent)],
            trainer={"test_freq": -1, "save_freq": -1, "total_training_steps": 4},
        )
    return list(agl_meta.read_rows(folder / "out", split="val"))


def check_late(rows: list[agl_meta.Row]) -> None:
    """The straggler's row: of the pass that it belongs to, with what it saved before and after."""
    *_, late = rows
    assert [row.late for row in rows] == [False, False, False, True]
    assert late.input["qid"] == "slow"
    assert (late.status, late.reward, late.reward_used) == ("succeeded", 1.0, None)
    assert late.predictions == {"progress": ["began"], "prediction": ["attempt 1"]}
    assert (late.context.attempt_number, late.context.global_step) == (1, 0)
    assert len(late.turns) == 1
    canonical = next(row for row in rows if row.input["qid"] == "slow" and not row.late)
    assert canonical.context.rollout_id == late.context.rollout_id


def check_train_untouched(out: Path) -> None:
    """No training step has anything of the straggler, and each has all of its own."""
    for step in range(1, 5):
        saved = list(agl_meta.read_predictions(out, step, "train"))
        assert len(saved) == 4
        assert {prediction.context.global_step for prediction in saved} == {step}
        assert {prediction.value for prediction in saved} == {"attempt 1"}


def test_v0_requeued(tmp_path: Path) -> None:
    """v0 hands the task to the second runner; its result counts, and the first one's comes late."""
    rows = run("v0", tmp_path)
    check_late(rows)
    row = rows[1]
    assert (row.input["qid"], row.status, row.reward_used) == ("slow", "succeeded", 2.0)
    assert row.context.attempt_number == row.attempts == 2
    assert row.predictions == {"prediction": ["attempt 2"]}
    (first,) = row.superseded
    assert first["attempt_number"] == 1
    assert (first["status"], first["predictions"]) == ("missing", {"progress": ["began"]})
    check_train_untouched(tmp_path / "out")
    summary = agl_meta.read_summary(tmp_path / "out" / "global_step_0" / "val")
    assert (summary["verdict"], summary["succeeded"], summary["superseded"]) == ("complete", 3, 1)


def test_v1_timeout(tmp_path: Path) -> None:
    """v1 marks it as timed out and goes on; when it ends after all, its result is added."""
    rows = run("v1", tmp_path, InMemoryLightningStore(thread_safe=True))
    check_late(rows)
    row = rows[1]
    assert (row.input["qid"], row.status, row.reward, row.reward_used) == ("slow", "timeout", None, 0.0)
    assert row.error is not None and "timeout" in row.error["message"]
    assert row.predictions == {"progress": ["began"]}
    assert (row.context.attempt_number, row.attempts, row.superseded) == (1, 1, ())
    check_train_untouched(tmp_path / "out")
    summary = agl_meta.read_summary(tmp_path / "out" / "global_step_0" / "val")
    assert (summary["verdict"], summary["succeeded"], summary["timeout"]) == ("complete", 2, 1)
    (entry,) = summary["not_succeeded"]
    assert entry["rollout_id"] == row.context.rollout_id and "timeout" in entry["why"]


def test_v1_retried(tmp_path: Path) -> None:
    """v1 with retries: the second attempt counts, the first is superseded, and comes late."""
    rows = run("v1", tmp_path, RetryingStore(thread_safe=True))
    check_late(rows)
    row = rows[1]
    assert (row.input["qid"], row.status, row.reward_used) == ("slow", "succeeded", 2.0)
    assert (row.context.attempt_number, row.attempts) == (2, 2)
    assert row.predictions == {"prediction": ["attempt 2"]}
    (first,) = row.superseded
    assert (first["attempt_number"], first["status"]) == (1, "timeout")
    assert first["attempt_id"] != row.context.attempt_id
    assert first["predictions"] == {"progress": ["began"]}
    check_train_untouched(tmp_path / "out")


class RaisesOnce(Straggler):
    """The first attempt of one sample raises after it has saved."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        attempt = self.training_context.attempt_number
        ask(resources["main_llm"], task["question"])
        self.save_prediction(f"attempt {attempt}")
        if task["qid"] == "slow" and attempt == 1:
            raise RuntimeError("only once")
        return 1.0


def test_v1_raised_then_retried(tmp_path: Path) -> None:
    """The attempt that raised is superseded, with its error, its turn and what it saved."""
    fit(
        "v1",
        tmp_path,
        tmp_path / "out",
        agent=RaisesOnce(tmp_path),
        store=RetryingStore(thread_safe=True),
        val=VAL,
        trainer={"val_only": True},
    )
    row = list(agl_meta.read_rows(tmp_path / "out"))[1]
    assert (row.status, row.error, row.context.attempt_number) == ("succeeded", None, 2)
    (first,) = row.superseded
    assert (first["status"], first["error"]["message"]) == ("failed", "only once")
    assert first["predictions"] == {"prediction": ["attempt 1"]}
    assert len(first["turns"]) == 1


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_interrupted(mode: str, tmp_path: Path) -> None:
    """A wait that is broken off leaves rows of what had come, and says who is missing."""

    class Broken(TrainingContextDaemon):
        def get_test_metrics(self) -> Any:
            raise AssertionError("never reached")

        def run_until_all_finished(self, *_: Any, **__: Any) -> None:
            raise InterruptedError("the connection is gone")

    with pytest.raises(InterruptedError):
        fit(
            mode,
            tmp_path,
            tmp_path / "out",
            agent=RaisesOnce(tmp_path),
            daemon_cls=Broken,
            val=VAL,
            trainer={"val_only": True},
        )
    summary = agl_meta.read_summary(tmp_path / "out" / "global_step_0" / "val")
    assert (summary["verdict"], summary["missing"]) == ("incomplete", 3)
    assert "interrupted" in summary["incomplete_because"][0]
    rows = list(agl_meta.read_rows(tmp_path / "out"))
    assert [(row.input["qid"], row.status) for row in rows] == [
        ("quick", "missing"),
        ("slow", "missing"),
        ("other", "missing"),
    ]


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_killed_and_run_again(mode: str, tmp_path: Path) -> None:
    """What a killed trainer leaves is kept, is not complete, and blends into no later evaluation."""
    command = [sys.executable, "-m", "tests.host.killed", mode, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    out = tmp_path / "out"
    left = out / "global_step_0" / "val"
    assert (left / "pass.json").is_file()
    with pytest.raises(agl_meta.RecordError, match=r"summary\.json"):
        agl_meta.read_summary(left)
    values = [prediction.value for prediction in agl_meta.read_predictions(out)]
    assert len(values) == 2 and all(value.startswith("before the end") for value in values)
    assert list(agl_meta.read_rows(out)) == []

    before = {path: path.read_bytes() for path in left.rglob("*") if path.is_file()}
    fit(mode, tmp_path, out, trainer={"val_only": True})
    assert {path: path.read_bytes() for path in left.rglob("*") if path.is_file()} == before
    rows = list(agl_meta.read_rows(out))
    assert len(rows) == 2 and {row.context.pass_path for row in rows} == {"global_step_0/val.2"}
    assert agl_meta.read_summary(out / "global_step_0" / "val.2")["verdict"] == "complete"
    assert [prediction.value["qid"] for prediction in agl_meta.read_predictions(out)] == ["v0", "v1"]
    assert len(list(agl_meta.read_predictions(out, all_passes=True))) == 4
    assert len(list(agl_meta.read_rows(out, all_passes=True))) == 2


def test_newest_complete_one(tmp_path: Path) -> None:
    """An evaluation that was interrupted later does not take the place of the complete one."""

    class Broken(TrainingContextDaemon):
        def run_until_all_finished(self, *_: Any, **__: Any) -> None:
            raise InterruptedError("the connection is gone")

    fit("v1", tmp_path, tmp_path / "out", trainer={"val_only": True})
    with pytest.raises(InterruptedError):
        fit("v1", tmp_path, tmp_path / "out", daemon_cls=Broken, trainer={"val_only": True})
    assert sorted(path.name for path in (tmp_path / "out" / "global_step_0").iterdir()) == ["val", "val.2"]
    rows = list(agl_meta.read_rows(tmp_path / "out"))
    assert [row.status for row in rows] == ["succeeded", "succeeded"]
    every = list(agl_meta.read_rows(tmp_path / "out", all_passes=True))
    assert [row.status for row in every] == ["succeeded", "succeeded", "missing", "missing"]


class FillsUp(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    """The disk takes nothing more while the last sample runs."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        ask(resources["main_llm"], task["question"])
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if task["qid"] == "other":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            self.save_prediction("one")
            self.save_prediction("two")
            if task["qid"] == "other":
                raise RuntimeError("an error of its own")
        finally:
            # Not before the runner has recorded how it went.
            threading.Timer(0.3, resource.setrlimit, (resource.RLIMIT_FSIZE, limits)).start()
        return 1.0


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_losses_reach_the_summary(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a runner could not save is counted in the trainer's summary, although nothing could be written."""
    store = InMemoryLightningStore(thread_safe=True) if mode == "v1" else None
    with contextlib.nullcontext() if store is None else store_server(store) as server:
        fit(
            mode,
            tmp_path,
            tmp_path / "out",
            agent=FillsUp(),
            store=server,
            runners=1,
            val=VAL,
            trainer={"val_only": True},
        )
    summary = agl_meta.read_summary(tmp_path / "out" / "global_step_0" / "val")
    assert (summary["verdict"], summary["failed"]) == ("complete", 1)
    assert summary["lost"] == {"saving a prediction: File too large": 2}
    assert "File too large" in caplog.text
    rows = {row.input["qid"]: row for row in agl_meta.read_rows(tmp_path / "out")}
    assert rows["other"].error is not None and rows["other"].error["message"] == "an error of its own"
    assert (rows["other"].lost, rows["other"].predictions) == (summary["lost"], {})
    assert (rows["quick"].lost, rows["quick"].predictions) == ({}, {"prediction": ["one", "two"]})


def test_late_one_that_fails_costs_no_other(tmp_path: Path) -> None:
    """Each late rollout is filed for itself, and what failed is counted."""
    folder = tmp_path / "global_step_3" / "val"
    (folder / SHARDS).mkdir(parents=True)
    recorder = PassRecorder(folder, ABOUT)
    recorder.add([queued("a"), queued("b", 1), queued("c", 2)], {})
    recorder.close(3, {})
    recorder.discard()
    rows = folder / PREDICTIONS_FILE
    # Somebody damaged the first one's row.
    first, *others = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(first.replace(b'"schema":1', b'"schema":') + b"".join(others))
    late = LateResults(str(tmp_path), keep_special_tokens=False)
    late.watch("global_step_3/val", ["a", "b", "c"], {})
    for name in ("a", "b", "gone", "c"):
        late.posted(agl.RolloutLegacy(rollout_id=name, final_reward=1.0, triplets=[], metadata={}))
    before = faults.counts()
    late.flush(SimpleNamespace(tokenizer=None, mode="v0"))
    counted = Counter(faults.counts()) - Counter(before)
    assert [key.partition(":")[0] for key in counted] == ["filing a late rollout"]
    lines = (folder / LATE_FILE).read_bytes().splitlines()
    assert [orjson.loads(line)["rollout_id"] for line in lines] == ["b", "c"]


@pytest.mark.parametrize("number", ["x", [1], 1.5, True, None, {"a": 1}])
def test_attempt_number_of_another_machine(number: Any) -> None:
    """What is no number is taken for none: upstream's v0 server takes any JSON."""
    rollout = agl.RolloutLegacy(
        rollout_id="a", final_reward=1.0, triplets=[], metadata={"agl_meta": {"attempt_number": number}}
    )
    found = result_v0(rollout, 1.0, Texts(None, False)).attempt_number
    assert found is None or type(found) is int
