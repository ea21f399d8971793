"""The end of a pass, in real ``fit()`` runs of both modes: rows, verdict, callbacks, verl's dumps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import agentlightning as agl
import numpy as np
import orjson
import pytest
import torch

import agl_meta
from agl_meta.verl import TrainingContextDaemon
from tests.host.training import ask, compose, fit

VAL_ONLY = {"val_only": True}
KINDS = (
    "well",
    "two_turns",
    "raises_first",
    "raises_last",
    "none",
    "nan",
    "text",
    "tensor",
    "numpy",
    "no_model",
    "odd_sample",
)
VAL = [
    {
        "qid": kind,
        "question": f"What about {kind}?",
        "data_source": "odd" if kind in ("nan", "none") else "even",
        "reward_model": {"ground_truth": f"truth of {kind}", "style": "rule"},
        # Names of our own and of verl's in a sample.
        **dict.fromkeys(("step", "reward", "epoch", "score", "input"), f"mine, {kind}"),
    }
    for kind in KINDS
]


class Unlucky(Exception):
    pass


class ManyKinds(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    """Does what the sample says."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        kind = task["qid"]
        if kind == "raises_first":
            raise Unlucky("before anything")
        answer = "made up" if kind == "no_model" else ask(resources["main_llm"], task["question"])
        if kind == "two_turns":
            answer = ask(resources["main_llm"], "And then?")
        self.save_prediction({"qid": kind, "answer": answer})
        self.save_prediction(len(answer), name="length")
        (self.rollout_dir / "own.txt").write_text(answer)
        if kind == "raises_last":
            raise Unlucky("after saving")
        return {
            "none": None,
            # In v0 upstream's client can't post NaN, and its runner ends.
            "nan": math.nan if isinstance(rollout, agl.Rollout) else None,
            "text": "1.0",
            "tensor": torch.tensor(1.0),
            "numpy": np.float64(0.25),
        }.get(kind, 0.5)


class Recording(agl_meta.Callback):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.rows: list[list[Any]] = []

    def on_validation_end(self, event: Any) -> Mapping[str, Any]:
        self.events.append(event)
        self.rows.append(list(event.rows))
        return {"val/mine": len(event.rows)}


@pytest.fixture(scope="module", params=["v0", "v1"])
def evaluated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One evaluation of all kinds of rollouts."""
    folder = tmp_path_factory.mktemp(request.param)
    callback = Recording()
    fit(
        request.param,
        folder,
        folder / "out",
        agent=ManyKinds(),
        val=VAL,
        callbacks=[callback],
        trainer={**VAL_ONLY, "validation_data_dir": str(folder / "verl")},
    )
    return request.param, folder, callback


def by_kind(rows: Any) -> dict[str, agl_meta.Row]:
    return {row.input["qid"]: row for row in rows}


class TestRows:
    """One row a rollout, whatever became of it."""

    def test_one_each_in_order(self, evaluated: Any) -> None:
        """Sorted by sample, with the place in training and ids."""
        mode, folder, _ = evaluated
        rows = list(agl_meta.read_rows(folder / "out"))
        assert [row.input["qid"] for row in rows] == list(KINDS)
        assert [row.context.sample_index for row in rows] == list(range(len(KINDS)))
        assert len({row.context.rollout_id for row in rows}) == len(KINDS)
        for row in rows:
            assert (row.context.global_step, row.context.split, row.context.repeat_index) == (0, "val", 0)
            assert row.context.reason == "before_training"
            assert row.input["reward"].startswith("mine, ")
            assert not row.late and not row.superseded
            if mode == "v1":
                assert row.context.attempt_id is not None
            assert row.context.attempt_number == row.attempts == 1

    def test_status_and_error(self, evaluated: Any) -> None:
        """Only what upstream takes for failed is failed, with what was raised."""
        mode, folder, _ = evaluated
        rows = by_kind(agl_meta.read_rows(folder / "out"))
        failed = {kind for kind, row in rows.items() if row.status == "failed"}
        # v1 refuses returns that are none of upstream's; v0 takes them for no reward.
        assert failed == {"raises_first", "raises_last"} | ({"text", "tensor"} if mode == "v1" else set())
        for kind in ("raises_first", "raises_last"):
            error = rows[kind].error
            assert error is not None
            assert error["type"].endswith("Unlucky")
            assert error["message"] in ("before anything", "after saving")
            assert "raise Unlucky" in error["traceback"]
        assert all(row.error is None for kind, row in rows.items() if kind not in failed)
        if mode == "v1":
            assert rows["text"].error is not None
            assert "str" in rows["text"].error["message"]

    def test_what_was_saved(self, evaluated: Any) -> None:
        """By name, also of a rollout that raised afterwards; and the folder of its files."""
        _, folder, _ = evaluated
        for kind, row in by_kind(agl_meta.read_rows(folder / "out")).items():
            if kind == "raises_first":
                assert row.predictions == {}
                assert row.files is None
                continue
            (saved,) = row.predictions["prediction"]
            assert saved["qid"] == kind
            assert row.predictions["length"] == [len(saved["answer"])]
            assert row.files is not None
            own = folder / "out" / "global_step_0" / "val" / row.files / "own.txt"
            assert own.read_text() == saved["answer"]

    def test_turns(self, evaluated: Any) -> None:
        """Decoded text and token counts of each call."""
        mode, folder, _ = evaluated
        rows = by_kind(agl_meta.read_rows(folder / "out"))
        counts = {kind: len(row.turns) for kind, row in rows.items()}
        expected = dict.fromkeys(KINDS, 1) | {"two_turns": 2, "raises_first": 0, "no_model": 0}
        if mode == "v0":
            expected["raises_last"] = 0  # upstream posts an empty rollout
        assert counts == expected
        assert "What about well?" in (rows["well"].turns[0].prompt or "")
        assert rows["two_turns"].output == rows["two_turns"].turns[1].response
        assert "And then?" in (rows["two_turns"].turns[1].prompt or "")
        for row in rows.values():
            for turn in row.turns:
                assert turn.prompt_tokens > 0 and turn.response_tokens > 0
                assert "<" not in (turn.prompt or "")  # special tokens are stripped

    def test_rewards(self, evaluated: Any) -> None:
        """Raw, and as the metrics took it."""
        mode, folder, _ = evaluated
        rows = by_kind(agl_meta.read_rows(folder / "out"))
        assert (rows["well"].reward, rows["well"].reward_used) == (0.5, 0.5)
        assert (rows["none"].reward, rows["none"].reward_used) == (None, 0.0)
        assert (rows["numpy"].reward, rows["numpy"].reward_used) == (0.25, 0.25)
        if mode == "v1":
            assert math.isnan(rows["nan"].reward) and math.isnan(rows["nan"].reward_used)
        # What upstream drops is there all the same: no float, or no turn to assign it to.
        assert (rows["text"].reward, rows["text"].reward_used) == ("1.0", 0.0)
        assert (rows["tensor"].reward.elements, rows["tensor"].reward_used) == ([1.0], 0.0)
        assert (rows["no_model"].reward, rows["no_model"].reward_used) == (0.5, 0.5 if mode == "v0" else 0.0)


class TestSummary:
    """The verdict."""

    def test_verdict(self, evaluated: Any) -> None:
        """Complete: something came of every rollout. Who did not succeed is named, with the cause."""
        mode, folder, _ = evaluated
        summary = agl_meta.read_summary(folder / "out" / "global_step_0" / "val")
        assert summary["verdict"] == "complete"
        assert summary["incomplete_because"] == []
        failed = 4 if mode == "v1" else 2
        assert (summary["expected"], summary["succeeded"]) == (len(KINDS), len(KINDS) - failed)
        assert (summary["failed"], summary["timeout"], summary["missing"]) == (failed, 0, 0)
        whys = [entry["why"] for entry in summary["not_succeeded"]]
        assert len(whys) == failed
        assert any(why.endswith("Unlucky: after saving") for why in whys)
        assert summary["faults"] == {} and summary["unreadable"] == []

    def test_metrics(self, evaluated: Any) -> None:
        """What upstream logged, which is what the rows say."""
        mode, folder, callback = evaluated
        summary = agl_meta.read_summary(folder / "out" / "global_step_0" / "val")
        assert summary["differences"] == []
        (event,) = callback.events
        assert set(summary["metrics"]) == set(event.metrics)
        assert summary["metrics"]["val/even/n_rollouts"] == event.metrics["val/even/n_rollouts"] > 0
        if mode == "v1":
            assert math.isnan(summary["metrics"]["val/reward"])
            assert math.isnan(event.metrics["val/odd/reward"])
            assert summary["reward"]["nan"] == 1
        # text and tensor; in v1 also the one without a traced call.
        assert summary["reward"]["dropped"] == (3 if mode == "v1" else 2)


class TestCallback:
    def test_event(self, evaluated: Any) -> None:
        """The event has rows, summary, folder and position."""
        _, folder, callback = evaluated
        (event,) = callback.events
        # As text, in which NaN equals NaN.
        assert repr(callback.rows[0]) == repr(list(agl_meta.read_rows(folder / "out")))
        assert event.rows[-1].input["qid"] == KINDS[-1]
        assert [row.input["qid"] for row in event.rows[1:3]] == list(KINDS[1:3])
        assert repr(event.summary) == repr(agl_meta.read_summary(event.folder))
        assert (event.global_step, event.split, event.reason) == (0, "val", "before_training")


class TestVerlDump:
    def test_validation_data_dir(self, evaluated: Any) -> None:
        """One line a rollout with verl's keys."""
        _, folder, _ = evaluated
        lines = (folder / "verl" / "0.jsonl").read_bytes().splitlines()
        entries = [orjson.loads(line) for line in lines]
        rows = list(agl_meta.read_rows(folder / "out"))
        assert [entry["rollout_id"] for entry in entries] == [row.context.rollout_id for row in rows]
        for entry, row in zip(entries, rows, strict=True):
            kind = row.input["qid"]
            assert entry["gts"] == f"truth of {kind}"
            assert entry["step"] == 0
            assert entry["uid"] == row.context.data_id
            assert entry["data_source"] == row.data_source
            assert entry["output"] == (row.output or "")
            assert (isinstance(entry["input"], str) and f"What about {kind}?" in entry["input"]) or row.turns
            assert entry["score"] == (None if math.isnan(row.reward_used) else row.reward_used)


class TestTraining:
    """Training passes, which are assembled when that is asked for."""

    @pytest.fixture(scope="class", params=["v0", "v1"])
    def trained(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
        folder = tmp_path_factory.mktemp(f"train-{request.param}")
        config = compose(folder, folder / "out", total_training_steps=3, save_freq=-1, test_freq=3)
        config.agl_meta.record_train = True
        config.agl_meta.keep_special_tokens = True
        config.trainer.rollout_data_dir = str(folder / "verl")
        callback = RecordingSteps()
        trainer = fit(request.param, folder, None, config=config, callbacks=[callback])
        return folder, callback, trainer

    def test_rows(self, trained: Any) -> None:
        """Sorted by sample and repeat, with special tokens where they are wanted."""
        folder, _, _ = trained
        for step in (1, 2, 3):
            rows = list(agl_meta.read_rows(folder / "out", step, "train"))
            places = [(row.context.sample_index, row.context.repeat_index) for row in rows]
            assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
            keys = [row.context.sample_key for row in rows]
            assert keys[0] == keys[1] != keys[2] == keys[3]
            assert {row.context.global_step for row in rows} == {step}
            for row in rows:
                assert "<|im_start|>" in (row.turns[0].prompt or "")
                (saved,) = row.predictions["prediction"]
                assert saved["qid"] == row.input["qid"]

    def test_summary(self, trained: Any) -> None:
        """The metrics of the step, and what the rows say of them."""
        folder, callback, _ = trained
        for step, event in enumerate(callback.events, 1):
            summary = agl_meta.read_summary(folder / "out" / f"global_step_{step}" / "train")
            assert (summary["verdict"], summary["expected"], summary["succeeded"]) == ("complete", 4, 4)
            assert summary["differences"] == []
            assert summary["metrics"]["training/reward"] == event.metrics["training/reward"]
            assert summary["reward"]["mean_used"] == pytest.approx(event.metrics["training/reward"])

    def test_callback_has_the_rows(self, trained: Any) -> None:
        """on_train_batch_end gets the rows of its step."""
        folder, callback, _ = trained
        assert [event.global_step for event in callback.events] == [1, 2, 3]
        for step, rows in enumerate(callback.rows, 1):
            assert rows == list(agl_meta.read_rows(folder / "out", step, "train"))

    def test_rollout_data_dir(self, trained: Any) -> None:
        """verl's switch works, where upstream's call raises with verl 0.6."""
        folder, _, _ = trained
        for step in (1, 2, 3):
            lines = (folder / "verl" / f"{step}.jsonl").read_bytes().splitlines()
            rows = list(agl_meta.read_rows(folder / "out", step, "train"))
            assert [orjson.loads(line)["rollout_id"] for line in lines] == [
                row.context.rollout_id for row in rows
            ]

    def test_not_asked_for(self, tmp_path: Path) -> None:
        """Without record_train a training pass holds what was saved, and no rows."""
        fit(
            "v1",
            tmp_path,
            tmp_path / "out",
            trainer={"total_training_steps": 1, "val_before_train": False, "test_freq": -1, "save_freq": -1},
        )
        folder = tmp_path / "out" / "global_step_1" / "train"
        assert sorted(path.name for path in folder.iterdir()) == ["pass.json", "shards"]
        assert len(list(agl_meta.read_predictions(tmp_path / "out"))) == 4
        (shard,) = (folder / "shards").iterdir()
        assert {orjson.loads(line)["kind"] for line in shard.read_bytes().splitlines()} == {"prediction"}


class RecordingSteps(agl_meta.Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.rows: list[list[Any]] = []

    def on_train_batch_end(self, event: Any) -> None:
        self.events.append(event)
        self.rows.append(list(event.rows))


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_tokenizer_that_fails(mode: str, tmp_path: Path) -> None:
    """Text that can't be decoded is missing from its turn; counts, rewards and the other rows are there."""

    class Refuses:
        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def decode(self, ids: Any, **more: Any) -> Any:
            text = self._tokenizer.decode(ids, **more)
            if "0 and 5" in text:
                raise OverflowError("out of range integral type conversion attempted")
            return text

    class Daemon(TrainingContextDaemon):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tokenizer = Refuses(self.tokenizer)

    fit(mode, tmp_path, tmp_path / "out", daemon_cls=Daemon, trainer=VAL_ONLY)
    first, second = agl_meta.read_rows(tmp_path / "out")
    assert first.turns[0].prompt is None and first.turns[0].prompt_tokens > 0
    assert first.output == first.predictions["prediction"][0]["answer"]
    assert "1 and 6" in (second.turns[0].prompt or "")
    summary = agl_meta.read_summary(tmp_path / "out" / "global_step_0" / "val")
    (fault,) = summary["faults"]
    assert "decoding the tokens of a turn: OverflowError" in fault
    assert summary["verdict"] == "complete"


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_nothing_works_and_nothing_is_there(mode: str, tmp_path: Path) -> None:
    """An evaluation in which everything fails gives a calm summary, and training goes on."""

    class Fails(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            if not self.training_context.is_train:
                raise Unlucky("always")
            ask(resources["main_llm"], task["question"])
            return 1.0

    fit(
        mode,
        tmp_path,
        tmp_path / "out",
        agent=Fails(),
        trainer={"total_training_steps": 1, "save_freq": -1},
    )
    for step in (0, 1):
        summary = agl_meta.read_summary(tmp_path / "out" / f"global_step_{step}" / "val")
        assert (summary["verdict"], summary["failed"], summary["succeeded"]) == ("complete", 2, 0)
        assert summary["differences"] == [] and summary["faults"] == {}
        assert math.isnan(summary["metrics"]["val/turn_count"])
        assert summary["reward"]["mean_used"] == 0.0
