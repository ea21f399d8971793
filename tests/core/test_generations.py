"""verl's dumps of generations: whole, with verl's keys, and nothing overwritten."""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_meta.context import TrainingContext
from agl_meta.rows import Row, Turn
from agl_meta.verl.generations import dump_generations, generation, log_generations
from tests.core.children import as_nobody, in_child

VERLS_KEYS = ("input", "output", "gts", "score", "step")
"""Of verl 0.6.1's ``RayPPOTrainer._dump_generations``."""


def row(number: int = 0, **more: Any) -> Row:
    place: dict[str, Any] = {
        "epoch": 0,
        "global_step": 3,
        "batch_index": 0,
        "is_train": False,
        "rollout_id": f"ro-{number}",
        "data_id": f"data-{number}",
        "sample_key": f"key-{number}",
        "repeat_index": number,
        "is_stamped": True,
    }
    values: dict[str, Any] = {
        "context": TrainingContext(**place),
        "status": "succeeded",
        "error": None,
        "data_source": "source",
        "input": {"question": "q", "reward_model": {"ground_truth": "truth"}},
        "turns": (Turn(prompt="first", response="a"), Turn(prompt="second", response="b")),
        "output": "b",
        "reward": 1.0,
        "reward_used": 1.0,
        "attempts": 1,
        "predictions": {},
        "lost": {},
        "files": None,
        "late": False,
        "superseded": (),
    }
    return Row(**{**values, **more})


def lines(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    assert content.endswith(b"\n") or not content
    return [orjson.loads(line) for line in content.splitlines()]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_a_line_holds(tmp_path: Path) -> None:
    """verl's keys first, in verl's order, then what tells rollouts apart; one line a rollout, in order."""
    path = dump_generations(tmp_path / "new" / "dump", 3, map(row, range(3)))
    assert path == tmp_path / "new" / "dump" / "3.jsonl"
    found = lines(path)
    assert [tuple(line)[:5] for line in found] == [VERLS_KEYS] * 3
    assert [tuple(line.values()) for line in found] == [
        ("second", "b", "truth", 1.0, 3, f"data-{n}", "source", f"ro-{n}", f"key-{n}", n, "succeeded", 1.0, 2)
        for n in range(3)
    ]


def test_rollout_without_turns(tmp_path: Path) -> None:
    """Its sample stands for the prompt, and its output is text all the same: verl's viewer joins texts."""
    bare = row(
        turns=(), output=None, input={"question": "q"}, status="missing", reward=None, reward_used=None
    )
    blank = row(turns=(Turn(prompt=None, response=None),), output=None)
    first, second = lines(dump_generations(tmp_path, 0, [bare, blank]))
    assert orjson.loads(first["input"]) == {"question": "q"}
    assert (first["output"], first["gts"], first["score"], first["n_turns"]) == ("", None, None, 0)
    assert orjson.loads(second["input"])["question"] == "q"
    assert (second["output"], second["n_turns"]) == ("", 1)


class Hostile:
    def _refuse(self, *_: Any) -> Any:
        raise ZeroDivisionError("never")

    __float__ = __repr__ = __str__ = __eq__ = __hash__ = __format__ = _refuse  # type: ignore[assignment]


def nested(depth: int) -> Any:
    value: Any = (1,)
    for _ in range(depth):
        value = [value]
    return value


ODD = (Hostile(), math.nan, math.inf, 1 << 2000, b"x", {1: 2}, "a\ud800", {"$agl": "x"})
anything: st.SearchStrategy[Any] = st.integers(0, len(ODD) - 1).map(ODD.__getitem__)
anything |= st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(), max_size=5)
anything |= st.integers(0, 1500).map(nested)
samples = anything | st.dictionaries(
    st.sampled_from(["data_source", "reward_model", "input", "step", "x"]),
    anything | st.fixed_dictionaries({"ground_truth": anything}),
)


@settings(deadline=None)
@given(st.lists(st.tuples(samples, anything, anything, anything), max_size=4))
def test_hostile_values(
    tmp_path_factory: pytest.TempPathFactory, values: list[tuple[Any, Any, Any, Any]]
) -> None:
    """Whatever stands in a row: each line is one JSON object, and all have the same keys in one order."""
    made = [
        row(n, input=sample, reward=reward, reward_used=used, data_source=source)
        for n, (sample, reward, used, source) in enumerate(values)
    ]
    folder = tmp_path_factory.mktemp("dump")
    found = lines(dump_generations(folder, 3, [row(99), *made]))
    assert len({tuple(line) for line in found}) == 1
    assert [line["rollout_id"] for line in found] == ["ro-99", *(f"ro-{n}" for n in range(len(made)))]
    assert all(type(line["score"]) is float or line["score"] is None for line in found)
    assert files(folder) == ["3.jsonl"]


@pytest.mark.parametrize(
    ("used", "score"),
    [(1, 1.0), (True, 1.0), ("0.5", 0.5), (math.nan, None), (-math.inf, None), (None, None), ([1], None)],
)
def test_score(used: Any, score: float | None) -> None:
    """A number that JSON and the viewer can take, or null."""
    found = generation(row(reward_used=used), 1)["score"]
    assert found == score and (found is None or type(found) is float)


def test_further_evaluations(tmp_path: Path) -> None:
    """Each further one of a step stands in a folder of its own, and what stands somewhere stays."""
    paths = [dump_generations(tmp_path, 3, [row(n)]) for n in range(3)]
    other = dump_generations(tmp_path, 4, [row(9)])
    again = dump_generations(tmp_path, 4, [row(10)])
    assert [str(path.relative_to(tmp_path)) for path in [*paths, other, again]] == [
        "3.jsonl",
        "pass_2/3.jsonl",
        "pass_3/3.jsonl",
        "4.jsonl",
        "pass_2/4.jsonl",
    ]
    assert [lines(path)[0]["rollout_id"] for path in [*paths, other, again]] == [
        "ro-0",
        "ro-1",
        "ro-2",
        "ro-9",
        "ro-10",
    ]
    assert len(files(tmp_path)) == 5


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On mounts that know none, the promises are the same."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    self_made = tmp_path / "3.jsonl"
    self_made.write_bytes(b"of verl's\n")
    assert dump_generations(tmp_path, 3, [row()]) == tmp_path / "pass_2" / "3.jsonl"
    assert self_made.read_bytes() == b"of verl's\n"
    assert files(tmp_path) == ["3.jsonl", "pass_2/3.jsonl"]


@pytest.mark.parametrize("error", [OSError("rows are gone"), KeyboardInterrupt()], ids=repr)
def test_rows_that_can_not_be_read(tmp_path: Path, error: BaseException) -> None:
    """Nothing half-written is left, under no name."""

    def some() -> Iterator[Row]:
        yield row()
        raise error

    with pytest.raises(type(error)):
        dump_generations(tmp_path, 3, some())
    assert list(tmp_path.iterdir()) == []


def test_full_disk(tmp_path: Path) -> None:
    """Nothing is left of what found no room, and the next dump is whole."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(OSError, match="too large"):
            dump_generations(tmp_path, 3, [row(output="x" * 200_000)])
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    in_child(work)
    assert list(tmp_path.iterdir()) == []
    assert len(lines(dump_generations(tmp_path, 3, [row(output="x" * 200_000)]))) == 1


def test_read_only_folder(tmp_path: Path) -> None:
    """The caller is told."""
    folder = tmp_path / "dump"
    folder.mkdir()

    def work() -> None:
        os.chmod("dump", 0o500)
        with pytest.raises(PermissionError):
            dump_generations("dump", 3, [row()])

    as_nobody(tmp_path, work)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["dump", "dump/pass_2"])
def test_file_where_a_folder_should_be(tmp_path: Path, name: str) -> None:
    """The caller is told, the file stays as it is, and nothing is left."""
    dump_generations(tmp_path / "other", 3, [row()])
    if name != "dump":
        (tmp_path / "dump").mkdir()
        (tmp_path / "dump" / "3.jsonl").touch()
    (tmp_path / name).write_bytes(b"mine")
    before = files(tmp_path)
    with pytest.raises((FileExistsError, NotADirectoryError)):
        dump_generations(tmp_path / "dump", 3, [row()])
    assert files(tmp_path) == before
    assert (tmp_path / name).read_bytes() == b"mine"


def test_logger_of_verl() -> None:
    """It gets texts and numbers side by side; and nothing where there is nothing."""
    calls: list[dict[str, Any]] = []
    trainer = SimpleNamespace(_maybe_log_val_generations=lambda **given: calls.append(given))
    log_generations(trainer, [])
    assert calls == []
    log_generations(trainer, [row(0), row(1, output=None, reward_used=math.nan)])
    assert calls == [{"inputs": ["second", "second"], "outputs": ["b", ""], "scores": [1.0, None]}]
