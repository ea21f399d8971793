"""What the README says: its code blocks run, and its figures come from the benchmarks that it names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import agl_meta
from tests.host import training

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.rst").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^\.\. code-block:: python\n\n((?:    .*\n|\n)+)", README, re.MULTILINE)


def block(words: str) -> str:
    (found,) = [text for text in BLOCKS if words in text]
    return re.sub(r"^    ", "", found, flags=re.MULTILINE)


def test_first_block_and_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first example trains, in dry run, and the second one prints what was saved."""
    import agentlightning as agl

    seen: dict[str, Any] = {}

    class Trainer:
        """Takes the example's call and runs it here, without Ray."""

        def __init__(self, algorithm: Any, **_: Any) -> None:
            seen["algorithm"] = algorithm

        def fit(self, agent: Any, train: Any, val_dataset: Any) -> None:
            assert isinstance(seen["algorithm"], agl_meta.VERL)
            assert str(seen["algorithm"].config.agl_meta.output_dir) == str(tmp_path / "runs" / "sql")
            config = training.compose(
                tmp_path, tmp_path / "runs" / "sql", total_training_steps=1, save_freq=-1
            )
            training.fit("v1", tmp_path, None, agent=agent, config=config)

    def run_my_graph(task: Any, resources: Any) -> Any:
        return {"answer": training.ask(resources["main_llm"], task["question"])}

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(agl, "Trainer", Trainer)
        names = {
            "config": training.overrides(tmp_path),
            "train": training.TRAIN,
            "val": training.VAL,
            "run_my_graph": run_my_graph,
            "reward": lambda state: float(len(state["answer"])),
        }
        exec(block("class SqlAgent"), names)
        capsys.readouterr()
        exec(block("row.context.sample_key"), names)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "0", "1", "1"]
    assert all("answer" in line for line in lines)


def test_decorated_block() -> None:
    """The example of a decorated agent makes an agent and a trainer with the hook."""
    import agentlightning as agl

    names: dict[str, Any] = {"agl": agl, "agl_meta": agl_meta, "algorithm": None}
    exec(block("@agl.rollout"), names)
    (hook,) = names["trainer"].hooks
    assert isinstance(hook, agl_meta.TrainingContextHook)
    assert not names["my_agent"].is_async()


def test_callback_block(tmp_path: Path) -> None:
    """The example of a callback writes its file, and its metric is returned."""
    names: dict[str, Any] = {
        "agl_meta": agl_meta,
        "config": training.overrides(tmp_path),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(block("class WhenEvaluated"), names)
    (callback,) = names["algorithm"].callbacks
    logged: list[tuple[int, int]] = []

    class Check(agl_meta.Callback):
        def on_validation_end(self, event: agl_meta.PassEvent) -> None:
            wrong = sum(row.reward != 1.0 for row in event.rows)
            logged.append((callback.on_validation_end(event)["val/wrong"], wrong))
            assert len((event.folder / "wrong.txt").read_text().splitlines()) == wrong

    training.fit(
        "v1",
        tmp_path,
        tmp_path / "out",
        trainer={"total_training_steps": 1, "save_freq": -1},
        callbacks=[Check()],
    )
    assert len(logged) == 2
    assert all(given == expected for given, expected in logged)


def test_summary_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of a summary prints the verdict, and who did not succeed."""

    class Fails(training.SavingAgent):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            if task["qid"] == "v1":
                raise RuntimeError("no luck")
            return super().rollout(task, resources, rollout)

    out = tmp_path / "runs" / "sql"
    training.fit("v1", tmp_path, out, agent=Fails(), trainer={"val_only": True})
    (out / "global_step_0").rename(out / "global_step_40")
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(block("agl_meta.read_summary"), {"agl_meta": agl_meta})
    verdict, failed = capsys.readouterr().out.splitlines()
    assert verdict == "complete 1 1 0 0"
    assert failed.endswith("failed RuntimeError: no luck")


def test_own_classes_block(tmp_path: Path) -> None:
    """The example of copied-out classes is accepted."""
    from agentlightning.verl.daemon import AgentModeDaemon
    from agentlightning.verl.trainer import AgentLightningTrainer

    names: dict[str, Any] = {
        "agl_meta": agl_meta,
        "config": training.overrides(tmp_path),
        "MyCopiedDaemon": AgentModeDaemon,
        "MyCopiedTrainer": AgentLightningTrainer,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        exec(block("class MyDaemon"), names)
    assert names["algorithm"].trainer_cls.__name__ == "MyTrainer"


def test_every_block_is_tested() -> None:
    """A new example needs a test."""
    assert len(BLOCKS) == 6


@pytest.mark.parametrize("name", ["tests", "quickstart"])
def test_commands(name: str) -> None:
    """The two commands are one line each, make their own environment, and name files that exist."""
    found = re.search(rf"\.\. command: {name}\n\n\.\. code-block:: bash\n\n    (.+)\n\n", README)
    assert found is not None
    assert found[1].startswith("python3 -m venv .venv && .venv/bin/pip install")
    for word in found[1].split():
        if word.endswith((".py", ".txt")):
            assert (ROOT / word).is_file()
    assert sys.version_info >= (3, 10)


def test_layout_is_the_one_on_disk(tmp_path: Path) -> None:
    """The names in the README's tree are those that the library uses."""
    from agl_meta import storage

    files = (storage.PASS_FILE, storage.PREDICTIONS_FILE, storage.SUMMARY_FILE, storage.LATE_FILE)
    for name in (*files, f"{storage.SHARDS}/", f"{storage.FILES}/<rollout>/"):
        assert name in README
    assert storage.OUTPUT_DIR_VARIABLE in README


def test_benchmarks_named_exist() -> None:
    """Each figure stands beside a command that can be run again."""
    named = set(re.findall(r"benchmarks/\w+\.py", README))
    assert named == {
        str(path.relative_to(ROOT))
        for path in (ROOT / "benchmarks").glob("*.py")
        if path.name != "side_by_side.py"
    }
