"""verl's own ``scripts/rollout_viewer.py`` on what ``trainer.validation_data_dir`` and its kin hold."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import ProgressBar

import agl_meta
from agl_meta.verl.generations import dump_generations
from tests.host.training import compose, fit


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """verl's script, which its wheel leaves out and its source archive has."""
    folder = tmp_path_factory.mktemp("verl")
    version = metadata.version("verl")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--no-binary=:all:", f"verl=={version}", "--dest", str(folder)], check=True, timeout=300
    )
    (archive,) = folder.glob("verl-*.tar.gz")
    with tarfile.open(archive) as files:
        script = files.extractfile(f"verl-{version}/scripts/rollout_viewer.py")
        assert script is not None
        (folder / "rollout_viewer.py").write_bytes(script.read())
    spec = importlib.util.spec_from_file_location("rollout_viewer", folder / "rollout_viewer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_viewer_shows_the_dump(viewer: Any, tmp_path: Path) -> None:
    """It loads every step, and shows input, output and score of a rollout; keys move to the next one."""
    dump = tmp_path / "dump"
    fit(
        "v1",
        tmp_path,
        tmp_path / "out",
        trainer={"total_training_steps": 2, "save_freq": -1, "validation_data_dir": str(dump)},
    )
    # A second evaluation of a step stands apart, where the viewer does not stumble over it.
    rows = list(agl_meta.read_rows(tmp_path / "out", 2, "val"))
    assert dump_generations(dump, 2, rows) == dump / "pass_2" / "2.jsonl"
    assert sorted(path.name for path in dump.iterdir()) == ["0.jsonl", "2.jsonl", "pass_2"]

    async def look() -> list[str]:
        data: dict[int, Any] = {}
        bar = ProgressBar(total=2)
        await viewer.load_path(dump / "0.jsonl", data, "", 0, bar)
        app = viewer.JsonLineViewer(step_num=2, data=data, pbar=bar)
        shown = []
        async with app.run_test(size=(200, 80)) as pilot:
            await viewer.load_dir(dump, data, bar)
            for key in ("N", "n"):
                await pilot.press(key)
                await pilot.pause()
                shown.append(str(app.content_display.render()))
        assert sorted(data) == [0, 1]
        return shown

    first, second = asyncio.run(look())
    for row, shown in zip(rows, (first, second), strict=True):
        assert row.turns[0].prompt is not None and row.output is not None
        assert row.turns[0].prompt.splitlines()[1] in shown
        assert row.output in shown
        assert str(row.context.rollout_id) in shown
        assert " score " in shown and " gts " in shown


def test_tensorboard_gets_generations(tmp_path: Path) -> None:
    """trainer.log_val_generations reaches verl's validation logger, here with its real TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = compose(tmp_path, tmp_path / "out", val_only=True, log_val_generations=1)
    config.trainer.logger = ["tensorboard"]  # a dry run logs to the console only
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
        fit("v1", tmp_path, None, config=config)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    texts = [tag for tag in events.Tags()["tensors"] if "val" in tag]
    assert texts, events.Tags()
    content = events.Tensors(texts[0])[0].tensor_proto.string_val[0].decode()
    assert "Which of" in content
