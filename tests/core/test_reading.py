"""Reading back: step order, newest pass, damaged files reported with file and line."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agl_meta
from agl_meta.context import TrainingContext
from agl_meta.records import record_line
from tests.core.children import as_nobody


def context(step: int = 1, split: str = "val", **more: Any) -> TrainingContext:
    values: dict[str, Any] = {
        "epoch": 0,
        "global_step": step,
        "batch_index": 0,
        "is_train": split == "train",
        "reason": "periodic",
        "sample_index": 0,
        "sample_key": "k",
        "repeat_index": 0,
        "data_id": "d",
        "rollout_id": "ro-1",
        "attempt_id": "at-1",
        "attempt_number": 1,
        "run_id": "run",
        "pass_path": f"global_step_{step}/{split}",
        "is_stamped": True,
    }
    return TrainingContext(**{**values, **more})


def write(root: Path, folder: str, *lines: bytes, shard: str = "a.jsonl") -> Path:
    path = root / folder / "shards" / shard
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))
    return path


def line(value: object, step: int = 1, split: str = "val", **more: Any) -> bytes:
    return record_line(context(step, split, **more), "prediction", "prediction", value)


def test_step_order_and_context(tmp_path: Path) -> None:
    """Records come in numeric order of steps, with the context they were saved under."""
    for step in (100, 3, 20, 0):
        write(tmp_path, f"global_step_{step}/val", line({"at": step}, step))
    found = list(agl_meta.read_predictions(tmp_path))
    assert [p.value["at"] for p in found] == [0, 3, 20, 100]
    assert [p.context for p in found] == [context(step) for step in (0, 3, 20, 100)]
    assert found[0].line == 1 and found[0].name == "prediction"


@pytest.mark.parametrize(
    ("choice", "seen"),
    [
        ({}, ["t1", "v1", "v2"]),
        ({"steps": 1}, ["t1", "v1"]),
        ({"steps": [2, 7]}, ["v2"]),
        ({"steps": []}, []),
        ({"split": "val"}, ["v1", "v2"]),
        ({"split": "train", "steps": range(3)}, ["t1"]),
    ],
)
def test_choice(tmp_path: Path, choice: dict[str, Any], seen: list[str]) -> None:
    """Steps and split choose what is read."""
    write(tmp_path, "global_step_1/train", line("t1", 1, "train"))
    write(tmp_path, "global_step_1/val", line("v1", 1))
    write(tmp_path, "global_step_2/val", line("v2", 2))
    assert [p.value for p in agl_meta.read_predictions(tmp_path, **choice)] == seen


def test_newest_pass_of_a_step(tmp_path: Path) -> None:
    """Of several passes at a step the newest is read, unless all are asked for."""
    for end in ("", ".2", ".10"):
        write(tmp_path, f"global_step_1/val{end}", line(end))
    assert [p.value for p in agl_meta.read_predictions(tmp_path)] == [".10"]
    every = agl_meta.read_predictions(tmp_path, all_passes=True)
    assert [p.value for p in every] == ["", ".2", ".10"]


def test_unstamped(tmp_path: Path) -> None:
    """What rollouts without stamps saved comes last, unless a step or split is asked for."""
    write(tmp_path, "global_step_1/val", line("stamped"))
    write(tmp_path, "unstamped", record_line(TrainingContext(), "prediction", "p", "unstamped"))
    assert [p.value for p in agl_meta.read_predictions(tmp_path)] == ["stamped", "unstamped"]
    assert [p.value for p in agl_meta.read_predictions(tmp_path, split="val")] == ["stamped"]


GOOD = line("good")
DAMAGED = [
    pytest.param(b"\n", id="empty line"),
    pytest.param(b"\xff\xfe\x00junk\n", id="junk"),
    pytest.param(GOOD[:-1] + GOOD, id="two records on one line"),
    pytest.param(b'{"a": 1}\n', id="another tool"),
    pytest.param(b"[1]\n", id="no object"),
    pytest.param(GOOD.replace(b'"schema":1', b'"schema":99'), id="another schema"),
    pytest.param(b'{"schema":' + b"[" * 1010 + b"]" * 1010 + b"}\n", id="a schema that can't be shown"),
    pytest.param(GOOD.replace(b'"is_train":false', b'"is_train":true'), id="contradiction"),
    pytest.param(GOOD.replace(b'"name":"prediction",', b""), id="missing field"),
    pytest.param(GOOD.replace(b'"saved_at":', b'"saved_at":1e300,"x":'), id="impossible time"),
    pytest.param(b"[" * 100_000 + b"\n", id="hostile nesting"),
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_line_is_reported(tmp_path: Path, damage: bytes) -> None:
    """A line that is no record costs that line only, and is reported with file and line."""
    path = write(tmp_path, "global_step_1/val", GOOD, damage, line("good"))
    with pytest.warns(agl_meta.DamagedRecordWarning, match=f"{path}, line 2: "):
        found = list(agl_meta.read_predictions(tmp_path))
    assert [p.line for p in found] == [1, 3]
    with pytest.raises(agl_meta.RecordError, match=f"{path}, line 2: "):
        list(agl_meta.read_predictions(tmp_path, strict=True))


def test_torn_end(tmp_path: Path) -> None:
    """A record cut short by a killed process is reported, and all before it is read."""
    write(tmp_path, "global_step_1/val", GOOD, GOOD[:-20])
    with pytest.warns(agl_meta.DamagedRecordWarning, match="line 2: the record was cut short"):
        assert len(list(agl_meta.read_predictions(tmp_path))) == 1


def test_record_of_another_kind_is_left_out(tmp_path: Path) -> None:
    """A later version may write further kinds of records; they are no damage."""
    write(tmp_path, "global_step_1/val", GOOD.replace(b'"prediction"', b'"other"', 1), GOOD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [p.line for p in agl_meta.read_predictions(tmp_path)] == [2]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.binary() | st.sampled_from([GOOD, b"\n", b'{"schema":1}'])))
def test_any_bytes(tmp_path: Path, pieces: list[bytes]) -> None:
    """Whatever bytes stand in a shard, reading gives records and warnings, and nothing else."""
    write(tmp_path, "global_step_1/val", *pieces)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", agl_meta.DamagedRecordWarning)
        assert all(p.value == "good" for p in agl_meta.read_predictions(tmp_path))


def test_bad_arguments(tmp_path: Path) -> None:
    """A wrong folder or split is an error at the call, not at the first record."""
    with pytest.raises(agl_meta.OutputDirError, match="is not a folder"):
        agl_meta.read_predictions(tmp_path / "missing")
    with pytest.raises(ValueError, match="expected 'train', 'val' or None"):
        agl_meta.read_predictions(tmp_path, split="test")


@pytest.mark.parametrize("content", [None, b"{", b"[]", orjson.dumps({"schema": 2}), b"\xff"], ids=repr)
def test_pass_file(tmp_path: Path, content: bytes | None) -> None:
    """A pass.json that is missing, damaged or of another version is refused by name."""
    if content is not None:
        (tmp_path / "pass.json").write_bytes(content)
    with pytest.raises(agl_meta.RecordError, match="pass.json"):
        agl_meta.read_pass(tmp_path)


class TestFoldersThatCanNotBeRead:
    """One folder that can't be looked at is reported by name, and costs no other one."""

    def check(self, root: Path, bad: str, expected: list[Any]) -> None:
        with pytest.warns(agl_meta.DamagedRecordWarning, match=f"{bad}: can't be read") as caught:
            found = [p.value for p in agl_meta.read_predictions(root)]
        assert (found, len(caught)) == (expected, 1)
        with pytest.raises(agl_meta.RecordError, match=f"{bad}: can't be read"):
            list(agl_meta.read_predictions(root, strict=True))
        with pytest.raises(agl_meta.RecordError, match=f"{bad}: can't be read"):
            list(agl_meta.read_rows(root, strict=True))
        # Who asks for other steps is not concerned.
        assert [p.value for p in agl_meta.read_predictions(root, 3, strict=True)] == ["three"]

    @pytest.mark.parametrize("bad", ["global_step_2", "global_step_1/val.2"])
    def test_link_in_a_circle(self, tmp_path: Path, bad: str) -> None:
        """Such an entry is no folder."""
        write(tmp_path, "global_step_1/val", line("one"))
        write(tmp_path, "global_step_3/val", line("three", 3))
        (tmp_path / bad).symlink_to(tmp_path / bad)
        assert [p.value for p in agl_meta.read_predictions(tmp_path, strict=True)] == ["one", "three"]

    def test_no_rights(self, tmp_path: Path) -> None:
        """A step of another user's."""
        for step, name in enumerate(("zero", "one", "two", "three")):
            write(tmp_path, f"global_step_{step}/val", line(name, step))

        def read() -> None:
            os.chmod("global_step_2", 0)
            try:
                self.check(Path(), "global_step_2", ["zero", "one", "three"])
            finally:
                os.chmod("global_step_2", 0o755)

        as_nobody(tmp_path, read)

    def test_gone_in_between(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody deletes a step while the folders are listed."""
        for step, name in ((1, "one"), (2, "two"), (3, "three")):
            write(tmp_path, f"global_step_{step}/val", line(name, step))
        scandir = os.scandir

        def removes(path: Any) -> Any:
            if str(path).endswith("global_step_2"):
                shutil.rmtree(path)
            return scandir(path)

        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patch.setattr(os, "scandir", removes)
            assert [p.value for p in agl_meta.read_predictions(tmp_path)] == ["one", "three"]
        assert ["global_step_2: can't be read (No such file" in str(each.message) for each in caught] == [
            True
        ]

    def test_root(self, tmp_path: Path) -> None:
        """Without the root there is nothing to read."""
        (tmp_path / "root").mkdir()
        predictions = agl_meta.read_predictions(tmp_path / "root")
        (tmp_path / "root").rmdir()
        with pytest.raises(FileNotFoundError):
            list(predictions)
