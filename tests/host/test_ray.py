"""Whole trainings as users start them: ``agl.Trainer``, VERL, the Ray actor, runners in processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agl_meta
from tests.host.test_numbers import LAST, train_rows, val_row
from tests.host.training import REPEATS, free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["v0", "v1"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(f"ray-{request.param}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.host.scripts", request.param, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return request.param, folder, done.stdout + done.stderr


def test_every_rollout_is_filed(run: Any) -> None:
    """Each rollout's record lies in its step's folder, also of one that raised after saving."""
    _, folder, _ = run
    rows: dict[Any, list[Any]] = {}
    for prediction in agl_meta.read_predictions(folder / "out", strict=True):
        context = prediction.context
        assert f"global_step_{context.global_step}/{context.split}/" in str(prediction.path)
        assert context.sample_key == prediction.value["qid"]
        row = (
            context.split,
            context.global_step,
            context.epoch,
            context.batch_index,
            context.reason,
        )
        rows.setdefault(row, []).append((context.sample_key, context.repeat_index))
    assert sorted(rows) == sorted(
        [
            val_row(0, "before_training"),
            *train_rows(1, LAST),
            val_row(2, "periodic"),
            val_row(4, "periodic"),
            val_row(LAST, "final"),
        ]
    )
    for row, saved in rows.items():
        assert len(set(saved)) == len(saved) == (2 * REPEATS if row[0] == "train" else 2)


def test_several_processes_wrote(run: Any) -> None:
    """Two runners saved, each into shards of its own; their own files lie in their rollout's folder."""
    _, folder, _ = run
    shards = {path.name for path in (folder / "out").glob("*/*/shards/*.jsonl")}
    assert len({name.split(".")[-3] for name in shards}) == 2
    for prediction in agl_meta.read_predictions(folder / "out", split="val"):
        file = prediction.path.parents[1] / "files" / prediction.context.rollout_id / "answer.txt"
        assert file.read_text() == prediction.value["answer"]


def test_every_pass_is_assembled(run: Any) -> None:
    """Rows with turns, what was saved and what was emitted, of evaluations and of training steps."""
    mode, folder, _ = run
    rows = list(agl_meta.read_rows(folder / "out", strict=True))
    assert len(rows) == 4 * 2 + LAST * 2 * REPEATS
    for row in rows:
        assert (row.status == "failed") == (row.context.sample_key == "v1")
        (saved,) = row.predictions["prediction"]
        assert saved["qid"] == row.context.sample_key
        assert row.files is not None
        if row.status == "succeeded" or mode == "v1":
            assert row.predictions["emitted"] == [saved["answer"]]
            assert row.turns[0].response == saved["answer"]
            assert f"{saved['answer']} again?" in str(row.turns[1].prompt)
        if row.status == "failed":
            assert row.error is not None and row.error["message"] == "an agent's own failure"
    for path in (folder / "out").glob("*/*"):
        summary = agl_meta.read_summary(path)
        assert summary["verdict"] == "complete"
        assert (summary["differences"], summary["unreadable"]) == ([], [])
        assert all(fault.startswith("Watch.on_train_batch_end: ") for fault in summary["faults"])


def test_callbacks(run: Any) -> None:
    """Callbacks run in the trainer's process; what one returns is logged, what one raises is not fatal."""
    mode, folder, output = run
    calls = [json.loads(line) for line in (folder / "hooks.jsonl").read_text().splitlines()]
    assert {call["pid"] for call in calls}.isdisjoint({os.getpid()})
    assert [call["hook"] for call in calls] == [
        "on_fit_start",
        *["on_validation_start", "on_validation_end"],
        *["on_train_batch_end"] * 2,
        *["on_validation_start", "on_validation_end"],
        *["on_train_batch_end"] * 2,
        *["on_validation_start", "on_validation_end"],
        *["on_train_batch_end"] * 2,
        *["on_validation_start", "on_validation_end"],
        "on_fit_end",
    ]
    ends = [call for call in calls if call["hook"] == "on_validation_end"]
    assert [(call["step"], call["reason"]) for call in ends] == [
        (0, "before_training"),
        (2, "periodic"),
        (4, "periodic"),
        (6, "final"),
    ]
    assert all(call["rollouts"] == 2 and call["verdict"] == "complete" for call in ends)
    # After an exception v0 posts an empty rollout.
    failed = ["v1", "failed", 2 if mode == "v1" else 0]
    assert all(call["rows"] == [["v0", "succeeded", 2], failed] for call in ends)
    for call in ends:
        pass_info = agl_meta.read_pass(call["folder"])
        assert pass_info["global_step"] == call["step"]
        assert pass_info["run_id"] == calls[0]["run_id"]
    assert "val/mine:47.5" in output
    assert "Watch.on_train_batch_end failed, training goes on" in output


def test_says_what_is_stood_in_for(run: Any) -> None:
    """The log and pass.json name the stand-ins, and the log what the dry run changed."""
    _, folder, output = run
    assert "the worker group and the inference server are CPU stand-ins" in output
    assert "actor_rollout_ref.model.path: 'no/such-model' -> " in output
    info = agl_meta.read_pass(folder / "out" / "global_step_0" / "val")
    assert info["stand_ins"] == ["worker group", "inference server"]


def test_command(tmp_path: Path) -> None:
    """``python -m agl_meta.verl`` takes hydra's overrides and our node, and trains in v0 mode."""
    import pandas

    for name in ("train", "val"):
        rows = [{"question": f"Which of {n} and 1?", "qid": f"{name}{n}"} for n in range(2)]
        pandas.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")
    port = free_port()
    runner = subprocess.Popen(
        [sys.executable, "-m", "tests.host.v0_client", str(port)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        done = subprocess.run(
            [
                *[sys.executable, "-m", "agl_meta.verl"],
                f"agentlightning.port={port}",
                f"data.train_files={tmp_path}/train.parquet",
                f"data.val_files={tmp_path}/val.parquet",
                "data.train_batch_size=2",
                "data.max_prompt_length=256",
                "data.max_response_length=64",
                "actor_rollout_ref.model.path=no/such-model",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.n=2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "algorithm.adv_estimator=grpo",
                "trainer.total_epochs=1",
                "trainer.save_freq=-1",
                "trainer.test_freq=1",
                "ray_kwargs.ray_init.num_cpus=2",
                "hydra.run.dir=.",
                f"agl_meta.output_dir={tmp_path}/out",
                "agl_meta.dry_run=true",
                "agl_meta.callbacks=[tests.host.v0_client.Note]",
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NOTE": str(tmp_path / "note")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        runner.kill()
        runner.wait()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [
        (p.context.split, p.context.global_step, p.context.reason, p.value)
        for p in agl_meta.read_predictions(tmp_path / "out", split="val")
    ]
    assert sorted(found) == [
        ("val", step, reason, f"val{n}")
        for step, reason in ((0, "before_training"), (1, "final"))
        for n in range(2)
    ]
    assert (tmp_path / "note").read_text() == "on_fit_end"
