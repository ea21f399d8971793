"""The table of numbers: what rollouts are told, in real ``fit()`` runs of both modes, with resumes."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from agentlightning.verl import daemon as upstream_daemon
from agentlightning.verl import trainer as upstream_trainer
from agentlightning.verl.daemon import AgentModeDaemon
from agentlightning.verl.trainer import AgentLightningTrainer

import agl_meta
from agl_meta.verl import (
    TrainingContextDaemonMixin,
    TrainingContextTrainer,
    TrainingContextTrainerMixin,
)
from agl_meta.verl.dry_run import fast_polling, init_workers
from agl_meta.verl.positions import STATE_KEY
from tests.host import training
from tests.host.training import REPEATS, STEPS_PER_EPOCH, TRAIN, VAL, compose, fit

LAST = 2 * STEPS_PER_EPOCH
Row = tuple[str, int, int, int, str]
"""split, global_step, epoch, batch_index, reason"""


def train_rows(first: int, last: int) -> list[Row]:
    return [
        ("train", step, (step - 1) // STEPS_PER_EPOCH, (step - 1) % STEPS_PER_EPOCH, "train")
        for step in range(first, last + 1)
    ]


def val_row(step: int, reason: str) -> Row:
    return ("val", step, max(step - 1, 0) // STEPS_PER_EPOCH, 0, reason)


def rows(output_dir: Path) -> list[Row]:
    """What the rollouts saved, one row a pass and batch; checks what each of them must agree on."""
    seen: Counter[Row] = Counter()
    for prediction in agl_meta.read_predictions(output_dir, all_passes=True):
        context = prediction.context
        assert prediction.value["flat"] == {
            "epoch": context.epoch,
            "global_step": context.global_step,
            "batch_index": context.batch_index,
            "is_train": context.is_train,
        }
        assert f"/global_step_{context.global_step}/{context.split}" in str(prediction.path)
        seen[
            context.split,
            context.global_step,
            context.epoch,
            context.batch_index,
            context.reason,
        ] += 1
    for row, count in seen.items():
        assert count == (2 * REPEATS if row[0] == "train" else len(VAL)), row
    return sorted(seen)


def checkpoint(source: Path, target: Path, step: int) -> Path:
    """A training's folder as it was when it had saved ``step``, and no later one."""
    checkpoints = target / "checkpoints-dry-run"
    checkpoints.mkdir(parents=True)
    name = f"global_step_{step}"
    shutil.copytree(source / "checkpoints-dry-run" / name, checkpoints / name)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))
    return target


class UpstreamTrainer(AgentLightningTrainer):
    """Upstream's trainer without agl_meta, on the CPU stand-ins."""

    def init_workers(self) -> None:
        init_workers(self)


class UpstreamDaemon(AgentModeDaemon):
    """Upstream's daemon without agl_meta; only its pause of 5 s is shortened, and its loop awaited."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        while self.mode == "v1" and self._internal_loop is None:
            time.sleep(0.001)

    def run_until_all_finished(self, verbose: bool = True) -> None:
        with fast_polling(self):
            super().run_until_all_finished(verbose)


class PlainAgent(training.SavingAgent):
    """The same work without saving, for a training that stamps nothing."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return float(len(training.ask(resources["main_llm"], task["question"])) % 2)


@pytest.fixture(scope="module", params=["v0", "v1"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted training, with a checkpoint at each step."""
    folder = tmp_path_factory.mktemp(f"whole-{mode}")
    fit(mode, folder, folder / "out")
    return folder


def test_uninterrupted(whole: Path) -> None:
    """Validation before, during and at the end, and each step of two epochs, carry their numbers."""
    assert rows(whole / "out") == sorted(
        [
            val_row(0, "before_training"),
            *train_rows(1, LAST),
            val_row(2, "periodic"),
            val_row(4, "periodic"),
            val_row(LAST, "final"),
        ]
    )


def test_samples_and_repeats(whole: Path) -> None:
    """Samples have the same key in each evaluation and epoch; repeats count within a sample."""
    keys: dict[str, set[Any]] = {}
    repeats: dict[tuple[Any, ...], list[int]] = {}
    for prediction in agl_meta.read_predictions(whole / "out"):
        context = prediction.context
        keys.setdefault(prediction.value["qid"], set()).add(context.sample_key)
        place = (context.split, context.global_step, context.data_id, context.sample_index)
        repeats.setdefault(place, []).append(context.repeat_index)
    assert set(keys) == {sample["qid"] for sample in TRAIN + VAL}
    assert all(len(names) == 1 for names in keys.values())
    assert len({name for names in keys.values() for name in names}) == len(TRAIN + VAL)
    for place, numbers in repeats.items():
        assert sorted(numbers) == list(range(REPEATS if place[0] == "train" else 1)), place


def test_pass_files(whole: Path, mode: str) -> None:
    """Each pass folder says what it is, what is expected and what is stood in for."""
    found = agl_meta.read_pass(whole / "out" / "global_step_4" / "val")
    assert (found["reason"], found["epoch"], found["split"]) == ("periodic", 1, "val")
    assert found["mode"] == mode
    assert found["stand_ins"] == ["worker group", "inference server"]
    assert found["expected"] == {
        "batch_index": 0,
        "samples": len(VAL),
        "rollouts_per_sample": 1,
        "rollouts": len(VAL),
    }
    train = agl_meta.read_pass(whole / "out" / "global_step_4" / "train")
    assert train["expected"]["rollouts"] == 2 * REPEATS
    assert train["run_id"] == found["run_id"]
    assert train["versions"]["agentlightning"] and train["versions"]["verl"]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(2, id="mid-epoch"),
        pytest.param(STEPS_PER_EPOCH, id="border"),
        pytest.param(4, id="later-epoch"),
    ],
)
def test_resume(whole: Path, mode: str, step: int, tmp_path: Path) -> None:
    """A resumed training tells the numbers of an uninterrupted one, and says why it validates."""
    checkpoint(whole, tmp_path, step)
    fit(mode, tmp_path, tmp_path / "out")
    periodic = [val_row(n, "periodic") for n in (2, 4) if n > step]
    assert rows(tmp_path / "out") == sorted(
        [
            val_row(step, "after_resume"),
            *train_rows(step + 1, LAST),
            *periodic,
            val_row(LAST, "final"),
        ]
    )


def test_second_resume_in_the_same_epoch(whole: Path, mode: str, tmp_path: Path) -> None:
    """The second resume of an epoch still counts from the epoch's first batch."""
    first, second = tmp_path / "first", tmp_path / "second"
    checkpoint(whole, first, 4)
    fit(mode, first, first / "out", trainer={"total_training_steps": 5, "test_freq": -1})
    checkpoint(first, second, 5)
    fit(mode, second, second / "out", trainer={"test_freq": -1})
    assert rows(second / "out") == [*train_rows(6, 6), val_row(5, "after_resume")]


def test_resume_from_the_final_checkpoint(whole: Path, mode: str, tmp_path: Path) -> None:
    """Upstream trains one step more there: it belongs to a third pass over the data."""
    checkpoint(whole, tmp_path, LAST)
    fit(mode, tmp_path, tmp_path / "out")
    assert rows(tmp_path / "out") == [
        *train_rows(LAST + 1, LAST + 1),
        val_row(LAST, "after_resume"),
        val_row(LAST + 1, "final"),
    ]


def test_checkpoint_written_without_agl_meta(mode: str, tmp_path: Path) -> None:
    """A training begun with upstream alone goes on with agl_meta, with the right numbers."""
    config = compose(tmp_path, None, total_training_steps=4, val_before_train=False)
    fit(
        mode,
        tmp_path,
        None,
        agent=PlainAgent(),
        trainer_cls=UpstreamTrainer,
        daemon_cls=UpstreamDaemon,
        config=config,
    )
    data = tmp_path / "checkpoints-dry-run" / "global_step_4" / "data.pt"
    assert STATE_KEY not in torch.load(data, weights_only=False)
    fit(mode, tmp_path, tmp_path / "out", trainer={"test_freq": -1})
    assert rows(tmp_path / "out") == [*train_rows(5, 6), val_row(4, "after_resume")]


def test_upstream_alone_resumes_our_checkpoint(whole: Path, mode: str, tmp_path: Path) -> None:
    """A checkpoint written with agl_meta is loaded by upstream without it, which trains on."""
    checkpoint(whole, tmp_path, 4)
    data = tmp_path / "checkpoints-dry-run" / "global_step_4" / "data.pt"
    assert STATE_KEY in torch.load(data, weights_only=False)
    trainer = fit(
        mode,
        tmp_path,
        None,
        agent=PlainAgent(),
        trainer_cls=UpstreamTrainer,
        daemon_cls=UpstreamDaemon,
        config=compose(tmp_path, None, val_before_train=False, test_freq=-1),
    )
    assert trainer.global_steps == LAST


def copied_out(module: Any) -> Any:
    """Upstream's module a second time, under another name: what a user has who copied the file."""
    name = f"{module.__name__}_copied"
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def test_copied_out_classes(mode: str, tmp_path: Path) -> None:
    """The mixins do the same for a daemon and a trainer that were copied out."""
    copied_daemon = copied_out(upstream_daemon).AgentModeDaemon
    copied_trainer = copied_out(upstream_trainer).AgentLightningTrainer
    assert copied_daemon is not AgentModeDaemon

    class MyDaemon(TrainingContextDaemonMixin, copied_daemon):  # type: ignore[misc, valid-type]
        pass

    class MyTrainer(TrainingContextTrainerMixin, copied_trainer):  # type: ignore[misc, valid-type]
        pass

    fit(
        mode,
        tmp_path,
        tmp_path / "out",
        trainer_cls=MyTrainer,
        daemon_cls=MyDaemon,
        trainer={"total_training_steps": 2, "save_freq": -1},
    )
    assert rows(tmp_path / "out") == [
        *train_rows(1, 2),
        val_row(0, "before_training"),
        val_row(2, "final"),
    ]


class DynamicSamplingTrainer(TrainingContextTrainer):
    """Counts a step for every second generation batch only, as trainers with dynamic sampling do."""

    generated = 0

    def _train_step(self, batch_dict: dict[str, Any]) -> Any:
        metrics = super()._train_step(batch_dict)
        self.generated += 1
        if self.generated % 2:
            self.global_steps -= 1  # upstream's loop counts on by one after each batch
        return metrics


def test_several_generation_batches_in_a_step(mode: str, tmp_path: Path) -> None:
    """Batches of one step share its pass folder and differ in batch_index."""
    fit(
        mode,
        tmp_path,
        tmp_path / "out",
        trainer_cls=DynamicSamplingTrainer,
        trainer={
            "total_training_steps": 3,
            "val_before_train": False,
            "test_freq": -1,
            "save_freq": -1,
        },
    )
    assert rows(tmp_path / "out") == [
        ("train", 1, 0, 0, "train"),
        ("train", 1, 0, 1, "train"),
        ("train", 2, 0, 2, "train"),
        ("train", 2, 1, 0, "train"),
        ("train", 3, 1, 1, "train"),
    ]
    assert [path.name for path in (tmp_path / "out" / "global_step_2").iterdir()] == ["train"]
    further = (tmp_path / "out" / "global_step_2" / "train" / "batches" / "2.json").read_bytes()
    assert orjson.loads(further)["batch_index"] == 0


def test_second_run_in_the_same_folder(whole: Path, mode: str, tmp_path: Path) -> None:
    """A run over leftovers gets folders of its own; readers take the newest unless asked for all."""
    out = tmp_path / "out"
    shutil.copytree(whole / "out", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    checkpoint(whole, tmp_path, 4)
    fit(mode, tmp_path, out)
    assert all(path.read_bytes() == content for path, content in before.items())
    passes = sorted(path.name for path in (out / "global_step_6").iterdir())
    assert passes == ["train", "train.2", "val", "val.2"]
    newest = {p.context.run_id for p in agl_meta.read_predictions(out, steps=6)}
    every = {p.context.run_id for p in agl_meta.read_predictions(out, steps=6, all_passes=True)}
    assert len(newest) == 1 and len(every) == 2
    (resumed,) = {p.context.reason for p in agl_meta.read_predictions(out, steps=4, split="val")}
    assert resumed == "after_resume"
