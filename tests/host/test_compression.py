"""Rows compressed with zstd: written when a pass ends, read as any others, and bounded."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import zstandard

import agl_meta
from agl_meta import files
from agl_meta.assembly import Queued
from agl_meta.recorder import PassRecorder
from tests.core.test_files import READ_ALL, in_little_memory
from tests.core.test_reading import line, write
from tests.core.test_recorder import ABOUT, metadata, result
from tests.host.training import VAL, compose, fit

PASS = "global_step_3/val"


def compressed_pass(root: Path, rows: int = 50) -> Path:
    folder = root / PASS
    (folder / "shards").mkdir(parents=True)
    recorder = PassRecorder(folder, ABOUT, is_compressed=True)
    queued = [Queued(rollout_id=f"r{n}", metadata=metadata(n), input={"n": n}) for n in range(rows)]
    recorder.add(queued, {task.rollout_id: [result(1)] for task in queued})
    recorder.close(rows, {})
    open_rows, outer = recorder.rows(), list(recorder.rows())
    recorder.discard()
    assert list(open_rows) == outer and open_rows[rows - 1] == outer[-1] and open_rows[3] == outer[3]
    return folder / "predictions.jsonl.zst"


def test_read_as_any_other(tmp_path: Path) -> None:
    """One file, smaller, with the rights of the umask; any program can decompress it."""
    path = compressed_pass(tmp_path)
    rows = list(agl_meta.read_rows(tmp_path, strict=True))
    assert [row.input for row in rows] == [{"n": n} for n in range(50)]
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "predictions.jsonl.zst",
        "shards",
        "summary.json",
    ]
    with path.open("rb") as file:
        plain = zstandard.ZstdDecompressor().stream_reader(file).read()
    assert plain.count(b"\n") == 50 and len(plain) > 3 * path.stat().st_size
    assert path.stat().st_mode == (path.parent / "summary.json").stat().st_mode


def test_both_are_one(tmp_path: Path) -> None:
    """Where somebody decompressed it beside itself, its rows are not given twice."""
    path = compressed_pass(tmp_path)
    with path.open("rb") as file:
        path.with_suffix("").write_bytes(zstandard.ZstdDecompressor().stream_reader(file).read())
    assert len(list(agl_meta.read_rows(tmp_path, strict=True))) == 50


def test_shards_compressed_by_hand(tmp_path: Path) -> None:
    """A user who runs ``zstd --rm`` over old shards loses nothing."""
    shard = write(tmp_path, PASS, line("a", 3), line("b", 3))
    (shard.parent / "a.jsonl.zst").write_bytes(zstandard.compress(shard.read_bytes()))
    shard.unlink()
    assert [(p.value, p.line) for p in agl_meta.read_predictions(tmp_path, strict=True)] == [
        ("a", 1),
        ("b", 2),
    ]


@pytest.mark.parametrize("damage", ["cut", "changed", "junk", "empty"])
def test_damaged(tmp_path: Path, damage: str) -> None:
    """What can be decompressed is read, the rest is reported with the file."""
    path = compressed_pass(tmp_path, rows=5000)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "changed":
        content[len(content) // 2] ^= 255
    else:
        content = bytearray(b"junk" if damage == "junk" else b"")
    path.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = list(agl_meta.read_rows(tmp_path))
    assert len(rows) < 5000
    assert damage == "empty" or any(str(path) in str(each.message) for each in caught)


@pytest.mark.parametrize("content", [b"", b"\n"])
def test_bomb(tmp_path: Path, content: bytes) -> None:
    """A small file of gigabytes costs neither memory nor hours."""
    folder = tmp_path / PASS
    folder.mkdir(parents=True)
    compressor = zstandard.ZstdCompressor()
    path = folder / "predictions.jsonl.zst"
    with path.open("wb") as file, compressor.stream_writer(file) as writer:
        for _ in range(3 if content else 6 * 2**10):
            writer.write((content or b"x") * 2**20)
    assert path.stat().st_size < 2**20
    printed = in_little_memory(READ_ALL, tmp_path).splitlines()
    assert printed[:2] == ["[]", "[]"]
    said = "and the rest was left out" if content else "is longer than"
    assert said in printed[-1]


def test_package_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused at the start, and named by a reader, which must not take it for damage."""
    compressed_pass(tmp_path)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(agl_meta.ConfigurationError, match=r"Install agl_meta\[zstd\]"):
        list(agl_meta.read_rows(tmp_path))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"compression": "gzip"}, "compression is 'gzip'; expected None, or 'zstd'"),
        ({"durability": "forever"}, "durability is 'forever'; expected one of process, fsync"),
    ],
)
def test_refused(tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(agl_meta.ConfigurationError, match=match):
        agl_meta.VERL({}, output_dir=tmp_path, **settings)


class Counts(agl_meta.Callback):
    """Reads the rows of each evaluation while it is open."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_validation_end(self, event: agl_meta.PassEvent) -> None:
        self.seen.append(len([row for row in event.rows if row.predictions["prediction"]]))


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_fit(mode: str, tmp_path: Path) -> None:
    """A real ``fit()`` with both settings: what is saved and read is as ever."""
    config = compose(tmp_path, tmp_path / "out")
    config.agl_meta.compression = "zstd"
    config.agl_meta.durability = "fsync"
    callback = Counts()
    fit(mode, tmp_path, tmp_path / "out", config=config, callbacks=[callback])
    rows = list(agl_meta.read_rows(tmp_path / "out", strict=True))
    assert [row.context.global_step for row in rows] == [n for n in (0, 2, 4, 6) for _ in VAL]
    assert callback.seen == [len(VAL)] * 4
    assert all(len(row.predictions["prediction"]) == 1 for row in rows)
    assert not list((tmp_path / "out").rglob("predictions.jsonl"))
    assert len(list((tmp_path / "out").rglob("predictions.jsonl.zst"))) == 4
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_limits_are_sane() -> None:
    """What the trainer may write, a reader takes."""
    from agl_meta.encoding import MAX_NODES, MAX_RECORD_BYTES

    assert files.MAX_LINE_BYTES >= 2 * MAX_RECORD_BYTES and files.MAX_VALUES >= 2 * MAX_NODES
