"""Files that somebody else damaged, or that are none: bounded memory, no hang, file and line and cause."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agl_meta
from agl_meta import files
from agl_meta.assembly import Queued
from agl_meta.errors import RecordError
from agl_meta.files import any_path, load_json, open_file, read_lines
from agl_meta.recorder import PassRecorder
from tests.core.test_reading import line, write
from tests.core.test_recorder import ABOUT, metadata, result

VAL = "global_step_1/val"


def in_little_memory(code: str, *arguments: object) -> str:
    """What a script prints that may take 700 MB of address space, and one minute."""
    script = "import resource; resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))\n" + code
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


READ_ALL = """
import sys, warnings, agl_meta
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print([p.value for p in agl_meta.read_predictions(sys.argv[1])])
    print([row.output for row in agl_meta.read_rows(sys.argv[1])])
for each in caught:
    print(each.message)
"""


def test_a_line_of_gigabytes_costs_no_memory(tmp_path: Path) -> None:
    """It is reported with its number, and the lines behind it are read."""
    shard = write(tmp_path, VAL, line("before"))
    with shard.open("ab") as file:
        file.truncate(shard.stat().st_size + 2 * 2**30)  # a hole: it takes no disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line("behind"))
    (tmp_path / VAL / "predictions.jsonl").touch()
    os.truncate(tmp_path / VAL / "predictions.jsonl", 2 * 2**30)
    printed = in_little_memory(READ_ALL, tmp_path).splitlines()
    assert printed[:2] == ["['before', 'behind']", "[]"]
    assert f"{shard}, line 2: longer than" in printed[2]
    assert "predictions.jsonl, line 1: longer than" in printed[3]


def test_a_summary_of_gigabytes(tmp_path: Path) -> None:
    (tmp_path / "summary.json").touch()
    os.truncate(tmp_path / "summary.json", 2 * 2**30)
    code = """
import sys, agl_meta
try:
    agl_meta.read_summary(sys.argv[1])
except agl_meta.RecordError as error:
    print(error)
"""
    assert "summary.json: longer than" in in_little_memory(code, tmp_path)


def test_a_line_of_millions_of_values_costs_no_memory(tmp_path: Path) -> None:
    """Each takes two bytes in the file, and 56 as a list."""
    with write(tmp_path, VAL, line("before")).open("ab") as file:
        file.write(line("many").replace(b'"many"', b"[" + b"[]," * 30_000_000 + b"[]]") + line("behind"))
    printed = in_little_memory(READ_ALL, tmp_path).splitlines()
    assert printed[0] == "['before', 'behind']"
    assert "line 2: more than" in printed[2]


@pytest.mark.parametrize("mark", [",", "[", "{", '","'])
def test_texts_full_of_marks_are_no_values(monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    """A table as text, say, has a comma a value, and is one value."""
    monkeypatch.setattr(files, "MAX_VALUES", 1000)
    document = {"csv": mark * 5000, 'a "quoted" \\ key': ["\\", '\\"'] * 100}
    assert load_json(orjson.dumps(document), "here", "a record") == document
    with pytest.raises(RecordError, match="here: more than 1000 values; expected a record"):
        load_json(orjson.dumps({**document, "many": [1] * 2000}), "here", "a record")


@pytest.mark.parametrize("content", [b'"' * 5001, b'""' * 2500, b'"\\' * 2500, b"[" * 5000])
def test_junk_is_counted_without_end(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(files, "MAX_VALUES", 1000)
    with pytest.raises(RecordError, match="here: "):
        load_json(content, "here", "a record")


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("size", [99, 100, 101, 1000, 5000])
def test_lines_around_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, end: bytes
) -> None:
    """Numbers and offsets stay right behind a line that is too long."""
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(files, "_BUFFER", 64)
    pieces = [b"a\n", b"x" * (size - len(end)) + end]
    if end:
        pieces.append(b"c")
    (tmp_path / "f").write_bytes(b"".join(pieces))
    with open_file(tmp_path / "f") as file:
        found = list(read_lines(file))
    assert [each.number for each in found] == list(range(1, len(pieces) + 1))
    assert [each.content for each in found] == [p if len(p) <= 100 else None for p in pieces]
    begins = [sum(map(len, pieces[:n])) for n in range(len(pieces) + 1)]
    assert [each.begin for each in found] == begins[:-1] and [each.end for each in found] == begins[1:]


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link_to_endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize("make", [fifo, link_to_endless, loop])
def test_no_regular_files(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """What would block or never end is refused, and what stands beside it is read."""
    shard = write(tmp_path, VAL, line("good"))
    make(shard.with_name("b.jsonl"))
    for name in ("predictions.jsonl", "summary.json", "pass.json"):
        make(tmp_path / VAL / name)
    with pytest.warns(agl_meta.DamagedRecordWarning) as caught:
        assert [p.value for p in agl_meta.read_predictions(tmp_path)] == ["good"]
        assert list(agl_meta.read_rows(tmp_path)) == []
    assert ["b.jsonl: can't be read" in str(each.message) for each in caught] == [True, False]
    for read in (agl_meta.read_pass, agl_meta.read_summary):
        with pytest.raises(agl_meta.RecordError, match="can't be read"):
            read(tmp_path / VAL)
    with pytest.raises(agl_meta.RecordError, match="can't be read"):
        list(agl_meta.read_predictions(tmp_path, strict=True))


def test_folders_in_the_place_of_files(tmp_path: Path) -> None:
    """A folder named like a shard is none, and one named like a document is an error."""
    shard = write(tmp_path, VAL, line("good"))
    folder(shard.with_name("b.jsonl"))
    folder(tmp_path / VAL / "predictions.jsonl")
    folder(tmp_path / VAL / "summary.json")
    assert [p.value for p in agl_meta.read_predictions(tmp_path, strict=True)] == ["good"]
    assert list(agl_meta.read_rows(tmp_path, strict=True)) == []
    with pytest.raises(agl_meta.RecordError, match="can't be read"):
        agl_meta.read_summary(tmp_path / VAL)


def test_files_in_the_place_of_folders(tmp_path: Path) -> None:
    (tmp_path / "global_step_1").write_bytes(b"")
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2/val").write_bytes(b"")
    (tmp_path / "global_step_3/val").mkdir(parents=True)
    (tmp_path / "global_step_3/val/shards").write_bytes(b"")
    with pytest.warns(agl_meta.DamagedRecordWarning, match="shards: can't be read"):
        assert list(agl_meta.read_predictions(tmp_path)) == []
    assert list(agl_meta.read_rows(tmp_path, strict=True)) == []


def test_a_file_that_can_not_be_opened_costs_no_other(tmp_path: Path) -> None:
    """A shard that vanishes between listing and opening, or whose rights are gone."""
    write(tmp_path, VAL, line("one"))
    second = write(tmp_path, VAL, line("two"), shard="b.jsonl")
    write(tmp_path, VAL, line("three"), shard="c.jsonl")
    found = agl_meta.read_predictions(tmp_path)
    assert next(found).value == "one"
    second.unlink()
    with pytest.warns(agl_meta.DamagedRecordWarning, match=r"b\.jsonl: can't be read"):
        assert [p.value for p in found] == ["three"]


def test_a_foreign_file_is_reported_in_short(tmp_path: Path) -> None:
    """Thousands of lines that are no records don't fill the screen; each counts."""
    write(tmp_path, VAL, b"x\n" * 5000, line("good"))
    with pytest.warns(agl_meta.DamagedRecordWarning) as caught:
        assert [p.value for p in agl_meta.read_predictions(tmp_path)] == ["good"]
    assert len(caught) == files.MAX_REPORTED + 1
    assert "4900 further lines of it can't be read" in str(caught[-1].message)


def test_duplicate_records(tmp_path: Path) -> None:
    """A shard that somebody copied gives each of its records once, and says where the other is."""
    lines = [line(n) for n in range(3)]
    write(tmp_path, VAL, *lines)
    copy = write(tmp_path, VAL, lines[1], line("new"), shard="b.jsonl")
    with pytest.warns(agl_meta.DamagedRecordWarning, match=f"{copy}, line 1: this record stands in another"):
        assert [p.value for p in agl_meta.read_predictions(tmp_path)] == [0, 1, 2, "new"]
    with pytest.raises(agl_meta.RecordError, match="stands in another place"):
        list(agl_meta.read_predictions(tmp_path, strict=True))
    recorder = PassRecorder(tmp_path / VAL, ABOUT)
    rows = recorder.add(
        [Queued(rollout_id="ro-1", metadata=metadata(0), input={})], {"ro-1": [result("at-1")]}
    )
    assert rows[0].predictions == {"prediction": [0, 1, 2, "new"]}
    assert [(each["file"], each["line"]) for each in recorder.close(1, {})["unreadable"]] == [(str(copy), 1)]


def whole_pass(root: Path) -> dict[str, bytes]:
    """The files of a pass as they are written, by their path below the root."""
    shard = write(root, VAL, *[line({"n": n, "at": (n, float("nan"))}) for n in range(3)])
    recorder = PassRecorder(root / VAL, ABOUT)
    queued = [Queued(rollout_id="ro-1", metadata=metadata(0), input={"x": {1, 2}})]
    recorder.add(queued, {"ro-1": [result("at-1")]})
    recorder.close(1, {"val/reward": 1.0})
    recorder.discard()
    names = ["predictions.jsonl", "summary.json"]
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in (shard, *[root / VAL / name for name in names])
    }


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=300,
)
@given(st.data())
def test_damaged_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes of real files deleted, changed, doubled or moved: records, warnings, and nothing else."""
    if not _whole:
        _whole.update(whole_pass(tmp_path_factory.mktemp("whole")))
    root = tmp_path_factory.mktemp("damaged")
    for name, content in _whole.items():
        for _ in range(data.draw(st.integers(0, 3))):
            begin, end, where = sorted(data.draw(st.integers(0, len(content))) for _ in range(3))
            content = data.draw(
                st.sampled_from(
                    [
                        content[:begin] + content[end:],
                        content[:begin],
                        content[:begin] + data.draw(st.binary(max_size=9)) + content[begin:],
                        content[:begin] + data.draw(st.sampled_from(TOKENS)) + content[end:],
                        content[:where] + content[begin:end] + content[where:],
                        content + content[begin:],
                    ]
                )
            )
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", agl_meta.DamagedRecordWarning)
        predictions = list(agl_meta.read_predictions(root))
        rows = list(agl_meta.read_rows(root))
    assert all(isinstance(each, agl_meta.Prediction) for each in predictions)
    assert all(isinstance(each, agl_meta.Row) for each in rows)
    with contextlib.suppress(agl_meta.RecordError):
        assert agl_meta.read_summary(root / VAL)["schema"] == 1
    # The trainer reads shards, too, and what it makes of them can be read.
    recorder = PassRecorder(root / VAL, ABOUT, is_published=False)
    queued = [Queued(rollout_id="ro-1", metadata=metadata(0), input={})]
    assert len(list(recorder.add(queued, {"ro-1": [result("at-1")]}))) == 1
    recorder.discard()


_whole: dict[str, bytes] = {}
TOKENS = [
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\n", b"\\", b"null", b"NaN", b"1e999", b"-0", b"\xff"),
    *(b'"$agl"', b'{"$agl":"int","v":"0x1"}', b'{"$agl":"part","v":0}', b'{"$agl":"tuple","v":[1]}'),
    *(b'"value":', b',"value":1', b'"schema":1', b"[" * 2000, b'{"a":' * 300, b"9" * 5000, b'"\\ud800"'),
]


def test_paths_of_all_kinds(tmp_path: Path) -> None:
    assert any_path(str(tmp_path)) == any_path(tmp_path) == tmp_path
    write(tmp_path, VAL, line("good"))

    class Like:
        def __fspath__(self) -> str:
            return str(tmp_path)

    likes: list[Any] = [str(tmp_path), tmp_path, Like()]
    assert [[p.value for p in agl_meta.read_predictions(each)] for each in likes] == [["good"]] * 3
