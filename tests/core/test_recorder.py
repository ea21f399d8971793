"""Assembling a pass: rows from what was queued, what came of it and what was saved, and the summary."""

from __future__ import annotations

import math
import os
import resource
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agl_meta
from agl_meta import assembly
from agl_meta.assembly import Queued, Result, late_line
from agl_meta.context import TrainingContext
from agl_meta.faults import faults
from agl_meta.recorder import PassRecorder
from agl_meta.records import OUTCOME, PREDICTION, record_line
from agl_meta.rows import Turn, parse_row
from agl_meta.storage import PREDICTIONS_FILE, SHARDS, SUMMARY_FILE

ABOUT = {
    "pass": "global_step_3/val",
    "run_id": "run",
    "global_step": 3,
    "epoch": 0,
    "split": "val",
    "reason": "periodic",
}


def metadata(sample: int, repeat: int = 0, batch: int = 0) -> dict[str, Any]:
    return {
        "data_id": f"data-{sample}",
        "epoch": 0,
        "global_step": 3,
        "batch_index": batch,
        "is_train": False,
        "agl_meta": {
            "schema": 1,
            "reason": "periodic",
            "sample_index": sample,
            "sample_key": f"key-{sample}",
            "repeat_index": repeat,
            "run_id": "run",
            "output_dir": "/",
            "pass_path": "global_step_3/val",
        },
    }


def queued(name: str, sample: int = 0, repeat: int = 0, batch: int = 0, input: Any = None) -> Queued:
    return Queued(
        rollout_id=name,
        metadata=metadata(sample, repeat, batch),
        input={"n": sample} if input is None else input,
    )


def result(attempt: str | int | None = 1, status: str = "succeeded", **more: Any) -> Result:
    which = {"attempt_id": attempt} if isinstance(attempt, str) else {"attempt_number": attempt}
    values = {"turns": (), "reward": 1.0, "reward_used": 1.0, **which, **more}
    return Result(status=status, **values)


def saved_line(
    name: str, value: object, attempt: str | int | None = 1, key: str = "prediction", kind: str = PREDICTION
) -> bytes:
    which = (
        SimpleNamespace(attempt_id=attempt, sequence_id=None)
        if isinstance(attempt, str)
        else SimpleNamespace(attempt_id=None, sequence_id=attempt)
    )
    rollout = SimpleNamespace(rollout_id=name, metadata=metadata(0), attempt=which)
    return record_line(TrainingContext.from_rollout(rollout), kind, key, value)


def folder_of(root: Path, *shards: bytes) -> Path:
    folder = root / "global_step_3" / "val"
    (folder / SHARDS).mkdir(parents=True)
    for number, content in enumerate(shards):
        (folder / SHARDS / f"host.{number}.x.jsonl").write_bytes(content)
    return folder


def assemble(folder: Path | None, tasks: Any, results: Any, **more: Any) -> tuple[list[Any], dict[str, Any]]:
    """Rows and summary of a pass of one batch."""
    recorder = PassRecorder(folder, ABOUT, **more)
    recorder.add(tasks, results)
    summary = recorder.close(len(tasks), {})
    rows = list(recorder.rows())
    recorder.discard()
    return rows, summary


class TestJoin:
    def test_sorted_by_sample_and_repeat(self, tmp_path: Path) -> None:
        """Whatever the order in which they were queued and came."""
        tasks = [queued("d", 1, 1), queued("a", 0, 1), queued("c", 1, 0), queued("b", 0, 0)]
        rows, _ = assemble(folder_of(tmp_path), tasks, {task.rollout_id: [result()] for task in tasks})
        assert [row.context.rollout_id for row in rows] == ["b", "a", "c", "d"]
        assert [row.input for row in rows] == [{"n": 0}, {"n": 0}, {"n": 1}, {"n": 1}]

    def test_attempts_stay_apart(self, tmp_path: Path) -> None:
        """What each attempt saved stands with it, whichever of them was accepted."""
        lines = [saved_line("a", f"of {attempt}", attempt) for attempt in ("at-2", "at-1", "at-3")]
        rows, summary = assemble(
            folder_of(tmp_path, b"".join(lines)),
            [queued("a")],
            {"a": [result("at-2"), result("at-3", "failed", error={"message": "later", "type": None})]},
        )
        (row,) = rows
        assert (row.context.attempt_id, row.attempts) == ("at-2", 3)
        assert row.predictions == {"prediction": ["of at-2"]}
        found = {each["attempt_id"]: each for each in row.superseded}
        assert {key: each["predictions"] for key, each in found.items()} == {
            "at-1": {"prediction": ["of at-1"]},
            "at-3": {"prediction": ["of at-3"]},
        }
        assert (found["at-1"]["status"], found["at-3"]["status"]) == ("missing", "failed")
        assert found["at-3"]["error"]["message"] == "later"
        assert summary["superseded"] == 2

    def test_result_that_does_not_say_its_attempt(self, tmp_path: Path) -> None:
        """As of a v0 agent without the mixin's hook: the last attempt that saved is taken."""
        shard = saved_line("a", "first", 1) + saved_line("a", "second", 2)
        ((row,), _) = assemble(folder_of(tmp_path, shard), [queued("a")], {"a": [result(None)]})
        assert (row.context.attempt_number, row.attempts) == (2, 2)
        assert row.predictions == {"prediction": ["second"]}
        assert [each["attempt_number"] for each in row.superseded] == [1]

    def test_several_results_that_do_not_say_their_attempt(self, tmp_path: Path) -> None:
        """The one that counted has the row, and each other one stands with it."""
        results = [result(None, reward=float(number)) for number in range(3)]
        ((row,), summary) = assemble(folder_of(tmp_path), [queued("a")], {"a": results})
        assert (row.reward, row.attempts) == (0.0, 3)
        assert [each["reward"] for each in row.superseded] == [1.0, 2.0]
        assert summary["superseded"] == 2

    def test_result_that_does_not_say_its_attempt_beside_one_that_does(self, tmp_path: Path) -> None:
        """It is not of the attempt that has a result of its own."""
        shard = saved_line("a", "first", 1) + saved_line("a", "second", 2)
        ((row,), _) = assemble(
            folder_of(tmp_path, shard),
            [queued("a")],
            {"a": [result(None, reward=5.0), result(2, reward=7.0)]},
        )
        assert (row.reward, row.context.attempt_number) == (5.0, 1)
        assert row.predictions == {"prediction": ["first"]}
        (other,) = row.superseded
        assert (other["reward"], other["predictions"]) == (7.0, {"prediction": ["second"]})

    def test_others_are_not_taken(self, tmp_path: Path) -> None:
        """Records and results of rollouts that are not of this pass have no row, and harm none."""
        shard = saved_line("other", "x") + saved_line("a", "y")
        rows, summary = assemble(
            folder_of(tmp_path, shard), [queued("a")], {"a": [result()], "stranger": [result()]}
        )
        assert [row.context.rollout_id for row in rows] == ["a"]
        assert rows[0].predictions == {"prediction": ["y"]}
        assert summary["verdict"] == "complete"

    def test_emitted_and_saved_in_order(self, tmp_path: Path) -> None:
        """Both ways end in one list, in the order of the calls."""
        first, second, third = (saved_line("a", number) for number in range(3))
        ((row,), _) = assemble(
            folder_of(tmp_path, third + first), [queued("a")], {"a": [result(emitted=[second])]}
        )
        assert row.predictions == {"prediction": [0, 1, 2]}

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 3),
                st.integers(1, 3),
                st.text(st.characters(), max_size=6) | st.sampled_from(["$agl", "value", '","value":']),
                st.recursive(
                    st.none()
                    | st.booleans()
                    | st.integers()
                    | st.floats(allow_nan=False)
                    | st.text(max_size=8),
                    lambda inner: (
                        st.lists(inner, max_size=3)
                        | st.dictionaries(st.text(max_size=4) | st.just("$agl"), inner, max_size=3)
                        | st.tuples(inner, inner)
                    ),
                    max_leaves=8,
                ),
                st.integers(0, 2),
            ),
            max_size=12,
        )
    )
    def test_everything_saved_once(
        self, tmp_path_factory: pytest.TempPathFactory, saves: list[tuple[int, int, str, Any, int]]
    ) -> None:
        """Whatever was saved, by which attempt and into which shard: it stands once, with its rollout."""
        shards = [b"", b"", b""]
        expected: dict[tuple[str, int], dict[str, list[Any]]] = {}
        for rollout, attempt, key, value, shard in saves:
            shards[shard] += saved_line(f"ro-{rollout}", value, attempt, key)
            expected.setdefault((f"ro-{rollout}", attempt), {}).setdefault(key, []).append(value)
        folder = folder_of(tmp_path_factory.mktemp("pass"), *shards)
        tasks = [queued(f"ro-{number}", number) for number in range(4)]
        rows, summary = assemble(folder, tasks, {f"ro-{n}": [result(2)] for n in range(3)})
        found: dict[tuple[str, int], Any] = {}
        for row in rows:
            name = str(row.context.rollout_id)
            if row.status != "missing":
                found[name, 2] = row.predictions
            for each in row.superseded:
                found[name, each["attempt_number"]] = each["predictions"]
        assert {key: value for key, value in found.items() if value} == expected
        assert [row.context.rollout_id for row in rows] == [task.rollout_id for task in tasks]
        assert (summary["succeeded"], summary["missing"], summary["verdict"]) == (3, 1, "incomplete")
        assert summary["unreadable"] == []


class TestShards:
    """Any bytes may stand in a shard."""

    def test_damage_is_named_and_harms_nothing(self, tmp_path: Path) -> None:
        good = saved_line("a", "good")
        shard = b"".join(
            [
                good,
                b"no json\n",
                b"\xff\x00\xfe\n",
                b'{"schema":1}\n',
                b'{"schema":99,"kind":"prediction"}\n',
                good.replace(b'"sequence":', b'"sequence":"x","s":'),
                b"[]\n",
                b"\n",
                good[: len(good) // 2],
            ]
        )
        folder = folder_of(tmp_path, shard, b"\x80" * 100)
        (folder / SHARDS / "link.jsonl").symlink_to("/etc/hostname")
        ((row,), summary) = assemble(folder, [queued("a")], {"a": [result()]})
        assert row.predictions == {"prediction": ["good"]}
        named = Counter((Path(each["file"]).name, each["line"]) for each in summary["unreadable"])
        assert named == {
            **{("host.0.x.jsonl", number): 1 for number in range(2, 10)},
            ("host.1.x.jsonl", 1): 1,
            ("link.jsonl", None): 1,
        }
        assert all(each["why"] for each in summary["unreadable"])
        assert summary["verdict"] == "complete"

    def test_named_once_for_several_batches(self, tmp_path: Path) -> None:
        recorder = PassRecorder(folder_of(tmp_path, b"bad\n"), ABOUT)
        for batch in range(3):
            recorder.add([queued(f"a{batch}", batch=batch)], {})
        assert len(recorder.close(3, {})["unreadable"]) == 1

    def test_line_that_was_being_written(self, tmp_path: Path) -> None:
        """A later batch finds it whole: then there is nothing to report, else there is."""
        whole = saved_line("b", "value")
        for later, reported in ((whole, 0), (whole[:-3], 1)):
            folder = folder_of(tmp_path / str(reported), whole[:-5])
            recorder = PassRecorder(folder, ABOUT)
            recorder.add([queued("a")], {"a": [result()]})
            (folder / SHARDS / "host.0.x.jsonl").write_bytes(later)
            (row,) = recorder.add([queued("b", batch=1)], {"b": [result()]})
            summary = recorder.close(2, {})
            assert len(summary["unreadable"]) == reported
            assert row.predictions == ({} if reported else {"prediction": ["value"]})

    def test_report_stays_when_the_file_is_gone(self, tmp_path: Path) -> None:
        """What was found in a file that a later batch does not see is not forgotten."""
        folder = folder_of(tmp_path, b"bad\n")
        recorder = PassRecorder(folder, ABOUT)
        recorder.add([queued("a")], {})
        (folder / SHARDS / "host.0.x.jsonl").unlink()
        recorder.add([queued("b", batch=1)], {})
        assert [each["line"] for each in recorder.close(2, {})["unreadable"]] == [1]

    @pytest.mark.parametrize("is_file", [False, True])
    def test_folder_of_shards_that_can_not_be_listed(self, tmp_path: Path, is_file: bool) -> None:
        """It is named once, and the rows are there."""
        folder = folder_of(tmp_path)
        (folder / SHARDS).rmdir()
        if is_file:
            (folder / SHARDS).touch()
        recorder = PassRecorder(folder, ABOUT)
        for batch in range(2):
            recorder.add([queued(str(batch), batch=batch)], {str(batch): [result()]})
        summary = recorder.close(2, {})
        ((report),) = summary["unreadable"]
        assert (report["file"], report["line"]) == (str(folder / SHARDS), None)
        assert summary["succeeded"] == 2

    def test_deep_and_big_values(self, tmp_path: Path) -> None:
        deep: Any = "end"
        for _ in range(3000):
            deep = [deep]
        shard = saved_line("a", deep, key="deep") + saved_line("a", "ä" * 1_000_000, key="big")
        ((row,), _) = assemble(
            folder_of(tmp_path, shard), [queued("a", input={"deep": deep})], {"a": [result()]}
        )
        assert row.predictions["big"] == ["ä" * 1_000_000]
        for value in (row.predictions["deep"][0], row.input["deep"]):
            depth = 0
            while isinstance(value, list):
                value, depth = value[0], depth + 1
            assert (value, depth) == ("end", 3000)


class Hostile:
    def __float__(self) -> float:
        raise ZeroDivisionError("never")

    def __repr__(self) -> str:
        raise ZeroDivisionError("never")

    __str__ = __eq__ = __hash__ = __format__ = __repr__  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "1.0", None, b"x", [1], {"$agl": "tuple"}, 1 << 80, Hostile(), "a\ud800", True],
    ids=lambda value: type(value).__name__,
)
def test_any_reward_and_input(tmp_path: Path, value: Any) -> None:
    """A row is there whatever stands for reward, input or source; and so are the others."""
    tasks = [
        queued("a", 0, input={"data_source": value, "step": value, "reward": value, "$agl": value}),
        queued("b", 1, input=value if value is not None else 0),
        queued("c", 2),
    ]
    results = {
        "a": [result(reward=value, reward_used=value)],
        "b": [result(turns=[Turn(prompt=None, response=None, reward=value)])],
        "c": [result()],
    }
    rows, summary = assemble(folder_of(tmp_path), tasks, results)
    assert [row.context.rollout_id for row in rows] == ["a", "b", "c"]
    assert rows[2].reward == 1.0
    assert set(rows[0].input) == {"data_source", "step", "reward", "$agl"}
    assert (summary["verdict"], summary["succeeded"]) == ("complete", 3)
    orjson.loads((tmp_path / "global_step_3" / "val" / SUMMARY_FILE).read_bytes())


class TestOutcome:
    """What an attempt says of itself fills in what upstream does not say."""

    def test_error_and_reward(self, tmp_path: Path) -> None:
        raised = {"error": {"type": "m.E", "message": "why", "traceback": "at"}, "returned": None}
        gave = {"error": None, "returned": 0.75, "returned_type": "float"}
        odd = {"error": None, "returned": "yes", "returned_type": "str"}
        shard = b"".join(
            saved_line(name, outcome, kind=OUTCOME, key=OUTCOME)
            for name, outcome in (("raised", raised), ("gave", gave), ("odd", odd))
        )
        tasks = [queued(name, number) for number, name in enumerate(("raised", "gave", "odd", "silent"))]
        none = {"reward": None, "reward_used": 0.0}
        results = {
            "raised": [result(status="failed", **none)],
            "gave": [result(**none)],
            "odd": [result(status="failed", **none)],
            "silent": [result(status="failed", **none)],
        }
        rows, summary = assemble(folder_of(tmp_path, shard), tasks, results)
        by_name = {row.context.rollout_id: row for row in rows}
        assert by_name["raised"].error == raised["error"]
        assert (by_name["gave"].reward, by_name["gave"].reward_used) == (0.75, 0.0)
        assert by_name["odd"].reward == "yes"
        assert "returned, a str" in str(by_name["odd"].error)
        assert "no cause was recorded" in str(by_name["silent"].error)
        assert all(row.predictions == {} for row in rows)
        assert {each["rollout_id"]: each["why"] for each in summary["not_succeeded"]}["raised"] == "m.E: why"
        # Of the rewards that upstream has there is none.
        assert summary["reward"]["without_reward"] == 4

    def test_damaged_outcome(self, tmp_path: Path) -> None:
        """One that is no mapping is passed over."""
        shard = saved_line("a", [1, 2], kind=OUTCOME, key=OUTCOME)
        ((row,), _) = assemble(folder_of(tmp_path, shard), [queued("a")], {"a": [result(status="failed")]})
        assert row.error is not None


class TestFiles:
    def test_appears_whole_and_overwrites_nothing(self, tmp_path: Path) -> None:
        folder = folder_of(tmp_path)
        recorder = PassRecorder(folder, ABOUT)
        recorder.add([queued("a")], {"a": [result()]})
        assert not (folder / PREDICTIONS_FILE).exists()
        assert [row.context.rollout_id for row in recorder.rows()] == ["a"]
        recorder.close(1, {})
        assert sorted(path.name for path in folder.iterdir()) == [PREDICTIONS_FILE, SHARDS, SUMMARY_FILE]
        assert [row.context.rollout_id for row in recorder.rows()] == ["a"]
        before = (folder / PREDICTIONS_FILE).read_bytes()
        other = PassRecorder(folder, ABOUT)
        other.add([queued("b")], {})
        with pytest.raises(FileExistsError):
            other.close(1, {})
        assert (folder / PREDICTIONS_FILE).read_bytes() == before

    def test_not_published(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows can be read until they are discarded, and leave nothing."""
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        recorder = PassRecorder(None, ABOUT)
        recorder.add([queued("a"), queued("b", 1)], {"a": [result()]})
        summary = recorder.close(2, {})
        assert summary["missing"] == 1
        rows = recorder.rows()
        assert (len(rows), rows[-1].context.rollout_id) == (2, "b")
        assert [row.status for row in rows[::-1]] == ["missing", "succeeded"]
        recorder.discard()
        assert list(tmp_path.iterdir()) == []

    def test_several_batches(self, tmp_path: Path) -> None:
        """Each batch gives its own rows; the pass has all of them, batch by batch."""
        recorder = PassRecorder(folder_of(tmp_path), ABOUT)
        given = [
            recorder.add(
                [queued(f"{batch}{sample}", sample, batch=batch) for sample in (1, 0)],
                {},
            )
            for batch in range(3)
        ]
        assert [[row.context.rollout_id for row in rows] for rows in given] == [
            ["00", "01"],
            ["10", "11"],
            ["20", "21"],
        ]
        recorder.close(6, {})
        assert [row.context.rollout_id for row in recorder.rows()] == ["00", "01", "10", "11", "20", "21"]
        assert [row.context.rollout_id for row in given[1]] == ["10", "11"]

    def test_lines_of_a_later_batch(self, tmp_path: Path) -> None:
        """A row that somebody damaged is named by its line in the file, not in its batch."""
        folder = folder_of(tmp_path)
        recorder = PassRecorder(folder, ABOUT)
        recorder.add([queued("a"), queued("b", 1)], {})
        rows = recorder.add([queued("c", batch=1), queued("d", 1, batch=1)], {})
        recorder.close(4, {})
        path = folder / PREDICTIONS_FILE
        path.write_bytes(path.read_bytes()[:-3] + b"xx\n")
        for read in (lambda: rows[1], lambda: list(rows), lambda: recorder.rows()[3]):
            with pytest.raises(agl_meta.RecordError, match="line 4:"):
                read()
        assert rows[0].context.rollout_id == "c"

    def test_closed_again(self, tmp_path: Path) -> None:
        """Where a summary found no room, closing can be tried again: the rows are published once."""
        folder = folder_of(tmp_path)
        recorder = PassRecorder(folder, ABOUT)
        recorder.add([queued("a")], {"a": [result()]})
        (folder / SUMMARY_FILE).touch()
        with pytest.raises(FileExistsError):
            recorder.close(1, {})
        (folder / SUMMARY_FILE).unlink()
        summary = recorder.close(1, {})
        assert (summary["verdict"], summary["incomplete_because"]) == ("complete", [])
        assert agl_meta.read_summary(folder) == summary
        assert [row.context.rollout_id for row in agl_meta.read_rows(tmp_path, strict=True)] == ["a"]
        assert sorted(path.name for path in folder.iterdir()) == [PREDICTIONS_FILE, SHARDS, SUMMARY_FILE]

    def test_folder_deleted(self, tmp_path: Path) -> None:
        """The caller is told; recorder and training go on."""
        folder = folder_of(tmp_path)
        recorder = PassRecorder(folder, ABOUT)
        (folder / SHARDS).rmdir()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        recorder.add([queued("a")], {"a": [result()]})
        with pytest.raises(FileNotFoundError):
            recorder.close(1, {})
        recorder.discard()


class TestSummary:
    def test_nothing_queued(self, tmp_path: Path) -> None:
        rows, summary = assemble(folder_of(tmp_path), [], {})
        assert rows == []
        assert (summary["verdict"], summary["expected"], summary["not_succeeded"]) == ("complete", 0, [])
        assert math.isnan(summary["reward"]["mean"])

    def test_everything_failed(self, tmp_path: Path) -> None:
        tasks = [queued(str(number), number) for number in range(3)]
        failed = {"status": "failed", "reward": None, "reward_used": 0.0}
        _, summary = assemble(
            folder_of(tmp_path), tasks, {task.rollout_id: [result(**failed)] for task in tasks}
        )
        assert (summary["verdict"], summary["failed"], summary["reward"]["mean_used"]) == ("complete", 3, 0.0)
        assert len(summary["not_succeeded"]) == 3

    def test_reasons(self, tmp_path: Path) -> None:
        """Interrupted, missing, never queued: each is said."""
        recorder = PassRecorder(folder_of(tmp_path), ABOUT)
        recorder.add([queued("a"), queued("b", 1)], {"a": [result()]})
        summary = recorder.close(5, None)
        assert summary["verdict"] == "incomplete"
        text = "; ".join(summary["incomplete_because"])
        assert "interrupted" in text
        assert "1 rollouts were queued and never finished" in text
        assert "3 of 5 expected rollouts were never queued" in text
        assert summary["metrics"] is None

    def test_rows_that_could_not_be_written(self, tmp_path: Path) -> None:
        recorder = PassRecorder(folder_of(tmp_path), ABOUT)
        recorder.fail(OSError(28, "No space left on device"))
        summary = recorder.close(2, {})
        assert summary["incomplete_because"] == [
            "rows could not be written: OSError: [Errno 28] No space left on device"
        ]

    def test_one_failure_of_several_batches(self, tmp_path: Path) -> None:
        """Each cause is said once."""
        recorder = PassRecorder(folder_of(tmp_path), ABOUT)
        for cause in (
            OSError(28, "No space left on device"),
            OSError(28, "No space left on device"),
            OSError("x"),
        ):
            recorder.fail(cause)
        assert recorder.close(0, {})["incomplete_because"] == [
            "rows could not be written: OSError: [Errno 28] No space left on device",
            "rows could not be written: OSError: x",
        ]

    def test_rewards_that_overflow(self, tmp_path: Path) -> None:
        """Their mean is what upstream's is, and the summary is written."""
        tasks = [queued(str(number), number) for number in range(3)]
        results = {task.rollout_id: [result(reward=1.7e308, reward_used=1.7e308)] for task in tasks}
        rows, summary = assemble(folder_of(tmp_path), tasks, results)
        assert [row.reward for row in rows] == [1.7e308] * 3
        assert (summary["verdict"], summary["reward"]["mean"]) == ("complete", math.inf)

    @pytest.mark.parametrize(("first", "other"), [(1, 1.0), (1, "1"), (None, "None"), (None, 1)])
    def test_sources_as_upstream_groups_them(self, tmp_path: Path, first: Any, other: Any) -> None:
        """Whatever stands for a source: no difference is made up, and a real one is seen."""
        recorder = PassRecorder(folder_of(tmp_path), ABOUT)
        turns = [Turn(prompt="p", response="r", response_tokens=1)]
        recorder.add(
            [queued(str(n), n, input={"data_source": source}) for n, source in enumerate((first, other))],
            {str(n): [result(turns=turns)] for n in range(2)},
        )
        logged: dict[Any, int] = {}
        for source in (first, other):
            logged[source] = logged.get(source, 0) + 1
        recorder.check({f"val/{source}/n_rollouts": size for source, size in logged.items()})
        assert recorder.close(2, {})["differences"] == []

    @pytest.mark.parametrize("source", [None, 1, "a"])
    def test_difference_in_one_source(self, tmp_path: Path, source: Any) -> None:
        """It is seen, also of samples whose source is None."""
        recorder = PassRecorder(folder_of(tmp_path), ABOUT)
        turns = [Turn(prompt="p", response="r", response_tokens=1)]
        recorder.add([queued("a", input={"data_source": source})], {"a": [result(turns=turns)]})
        recorder.check({f"val/{source}/reward": 0.5, "val/reward": 1.0})
        (found,) = recorder.close(1, {})["differences"]
        assert found["metric"] == f"val/{source}/reward"

    def test_planted_difference(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A metric that is not what the rows say is reported, and logged."""
        recorder = PassRecorder(folder_of(tmp_path), ABOUT)
        recorder.add([queued("a")], {"a": [result()]})
        recorder.check({"val/reward": 0.5, "val/n_rollouts": 1, "val/of_mine": 3})
        summary = recorder.close(1, {"val/reward": 0.5})
        assert summary["differences"] == [{"metric": "val/reward", "logged": 0.5, "from_rows": 1.0}]
        assert "val/reward" in caplog.text

    def test_faults_of_this_pass_only(self, tmp_path: Path) -> None:
        faults.record("something before", "cause")
        recorder = PassRecorder(folder_of(tmp_path), ABOUT)
        faults.record("something in it", "cause")
        assert recorder.close(0, {})["faults"] == {"something in it: cause": 1}


def test_late_line(tmp_path: Path) -> None:
    """The late row keeps place and input, and has the late attempt's own status, turns and records."""
    shard = saved_line("a", "late", 1) + saved_line("a", "on time", 2)
    folder = folder_of(tmp_path, shard)
    assemble(folder, [queued("a", 4, input={"x": (1, 2)})], {"a": [result(2, reward=0.5)]})
    (line,) = (folder / PREDICTIONS_FILE).read_bytes().splitlines(keepends=True)
    turns = [Turn(prompt="p", response="r", prompt_tokens=1, response_tokens=2)]
    row = parse_row(
        late_line(line, result(1, turns=turns, reward=2.0, reward_used=None), folder), Path("x"), 1
    )
    assert row.late and row.superseded == ()
    assert (row.input, row.context.sample_index, row.context.attempt_number) == ({"x": (1, 2)}, 4, 1)
    assert (row.reward, row.reward_used, row.output) == (2.0, None, "r")
    assert row.predictions == {"prediction": ["late"]}


def test_read_rows_reports_damage(tmp_path: Path) -> None:
    """A row that can't be read is named with file and line; the others come."""
    folder = folder_of(tmp_path)
    assemble(folder, [queued("a"), queued("b", 1)], {})
    path = folder / PREDICTIONS_FILE
    first, second = path.read_bytes().splitlines(keepends=True)
    bad = [b"x\n", first.replace(b'"schema":1', b'"schema":7'), first.replace(b'"missing"', b'"lost"')]
    path.write_bytes(b"".join([first, *bad, second[:-30]]))
    with pytest.warns(agl_meta.DamagedRecordWarning) as caught:
        rows = list(agl_meta.read_rows(tmp_path))
    assert [row.context.rollout_id for row in rows] == ["a"]
    assert [f"{path}, line {number}" in str(each.message) for number, each in enumerate(caught, 2)] == [
        True
    ] * 4
    with pytest.raises(agl_meta.RecordError, match="line 2"):
        list(agl_meta.read_rows(tmp_path, strict=True))


@pytest.mark.parametrize(
    "summary",
    [None, b"", b"{}", b"[]", b'{"schema":9}', b'{"schema":1,"verdict":"incomplete"}', b"\xff"],
    ids=["none", "empty", "no schema", "list", "newer", "incomplete", "binary"],
)
def test_newest_complete_pass(tmp_path: Path, summary: bytes | None) -> None:
    """A newer evaluation without a good summary does not take the place of a complete one."""
    step = tmp_path / "global_step_3"
    for name, label in (("val", "old"), ("val.2", "new")):
        folder = step / name
        (folder / SHARDS).mkdir(parents=True)
        (folder / SHARDS / "h.1.x.jsonl").write_bytes(saved_line("a", label))
    (step / "val" / SUMMARY_FILE).write_bytes(b'{"schema":1,"verdict":"complete"}')
    if summary is not None:
        (step / "val.2" / SUMMARY_FILE).write_bytes(summary)
    assert [each.value for each in agl_meta.read_predictions(tmp_path)] == ["old"]
    assert [each.value for each in agl_meta.read_predictions(tmp_path, all_passes=True)] == ["old", "new"]
    (step / "val" / SUMMARY_FILE).unlink()
    assert [each.value for each in agl_meta.read_predictions(tmp_path)] == ["new"]


def test_descriptors_are_closed(tmp_path: Path) -> None:
    """Also after many passes."""
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        assemble(folder_of(tmp_path / str(number), saved_line("a", 1)), [queued("a")], {"a": [result()]})
    assert len(os.listdir("/proc/self/fd")) <= before


def test_value_that_would_spoil_its_row(tmp_path: Path) -> None:
    """A shard of somebody else's making: its records are named, and the row can be read."""
    good = saved_line("a", "good")
    bad = [
        b'{"$agl":"tuple"}',
        b'{"$agl":"bytes","type":"bytes","v":"%"}',
        b'{"$agl":"int","v":"zz"}',
        b'{"$agl":"part","v":1}',
        b"[" * 600 + b"]" * 600,
    ]
    shard = b"".join(good.replace(b'"value":"good"', b'"value":' + value) for value in bad) + good
    ((row,), summary) = assemble(folder_of(tmp_path, shard), [queued("a")], {"a": [result()]})
    assert row.predictions == {"prediction": ["good"]}
    assert [each["line"] for each in summary["unreadable"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("value", [b'1,"x":2', b'1,"value":2'])
def test_value_that_is_not_last_or_stands_twice(tmp_path: Path, value: bytes) -> None:
    """Whatever is made of it, its row can be read and other records are there."""
    odd = saved_line("a", "odd").replace(b'"value":"odd"', b'"value":' + value)
    shard = odd + saved_line("a", "good")
    ((row,), summary) = assemble(folder_of(tmp_path, shard), [queued("a")], {"a": [result()]})
    assert row.predictions["prediction"][-1] == "good"
    assert len(row.predictions["prediction"]) + len(summary["unreadable"]) == 2


def test_name_of_the_value_in_an_id(tmp_path: Path) -> None:
    """An id that is no text may hold what looks like the record's value, which is then not taken for it."""
    good = saved_line("a", "good")
    odd = good.replace(b'"data_id":"data-0"', b'"data_id":{"a":1,"value":2}')
    assert odd != good
    ((row,), summary) = assemble(folder_of(tmp_path, odd + good), [queued("a")], {"a": [result()]})
    assert row.predictions["prediction"] in (["good"], ["good", "good"])
    assert len(row.predictions["prediction"]) + len(summary["unreadable"]) == 2


@pytest.mark.parametrize(("limit", "kept"), [("MAX_SAVED_BYTES", 4), ("MAX_SAVED_VALUES", 9)])
def test_more_than_a_row_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, kept: int
) -> None:
    """What has no room stands in the shards; the row says so, and can be read."""
    monkeypatch.setattr(assembly, limit, 1000)
    lines = [saved_line("r", [n] * 110) for n in range(12)] + [saved_line("r", [5] * 110, attempt=2)]
    rows, _ = assemble(folder_of(tmp_path, *lines), [queued("r")], {"r": [result(1)]})
    saved = [*rows[0].predictions["prediction"], *rows[0].superseded[0]["predictions"]["prediction"]]
    assert saved[:kept] == [[n] * 110 for n in range(kept)]
    assert [value.why[:12] for value in saved[kept:]] == ["the row has "] * (13 - kept)
    found = [p.value for p in agl_meta.read_predictions(tmp_path)]
    assert sorted(found) == sorted([[n] * 110 for n in [*range(12), 5]])


def test_a_foreign_file_is_reported_in_short(tmp_path: Path) -> None:
    """Thousands of lines that are no records don't fill the summary."""
    _, summary = assemble(folder_of(tmp_path, b"x\n" * 5000), [], {})
    assert len(summary["unreadable"]) == 101
    assert summary["unreadable"][-1]["why"] == "4900 further lines of this file are no records"


def test_disk_full_in_the_middle_of_a_row(tmp_path: Path) -> None:
    """The rows before stay whole and are published; the summary says what happened."""
    folder = folder_of(tmp_path)
    recorder = PassRecorder(folder, ABOUT)
    recorder.add([queued("a")], {"a": [result()]})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            recorder.add([queued("b", 1, input="x" * 10_000)], {"b": [result()]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    recorder.fail(caught.value)
    recorder.add([queued("c", 2)], {"c": [result()]})
    summary = recorder.close(3, {})
    assert summary["verdict"] == "incomplete"
    assert "File too large" in summary["incomplete_because"][0]
    assert [row.context.rollout_id for row in agl_meta.read_rows(tmp_path, strict=True)] == ["a", "c"]


@pytest.mark.parametrize(
    "error", ["text", ["list"], 1, {"type": 1, "message": {"x": 1}}, {"other": "x"}, Hostile()]
)
def test_error_from_another_machine(tmp_path: Path, error: Any) -> None:
    """Whatever stands for an error in what a v0 runner posted becomes texts."""
    failed = result(status="failed", outcome={"error": error, "lost": {"x": "many", "y": 2}})
    ((row,), summary) = assemble(folder_of(tmp_path), [queued("a")], {"a": [failed]})
    assert row.error is not None and set(row.error) == {"type", "message", "traceback"}
    assert all(value is None or isinstance(value, str) for value in row.error.values())
    assert summary["lost"] == {"y": 2}


def test_late_line_of_a_deep_sample(tmp_path: Path) -> None:
    deep: Any = "end"
    for _ in range(1000):
        deep = [deep]
    folder = folder_of(tmp_path)
    assemble(folder, [queued("a", input={"deep": deep})], {"a": [result(2)]})
    line = (folder / PREDICTIONS_FILE).read_bytes()
    row = parse_row(late_line(line, result(1), folder), Path("x"), 1)
    assert row.late and row.context.attempt_number == 1
    found, depth = row.input["deep"], 0
    while isinstance(found, list):
        found, depth = found[0], depth + 1
    assert (found, depth) == ("end", 1000)


def test_unpublished_rows_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder for temporary files only their owner may read them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    recorder = PassRecorder(None, ABOUT)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    recorder.discard()


@pytest.mark.parametrize(
    "change",
    [
        (b'"predictions":{}', b'"predictions":5'),
        (b'"schema":1', b'"schema":' + b"[" * 1010 + b"]" * 1010),
        (b'"status":"missing"', b'"status":' + b"[" * 500 + b"]" * 500),
    ],
    ids=["predictions", "schema", "status"],
)
def test_row_of_somebody_elses_making(tmp_path: Path, change: tuple[bytes, bytes]) -> None:
    """It is refused by file and line, in a message that can be printed."""
    folder = folder_of(tmp_path)
    assemble(folder, [queued("a")], {})
    line = (folder / PREDICTIONS_FILE).read_bytes()
    assert change[0] in line
    with pytest.raises(agl_meta.RecordError, match="x, line 1:") as caught:
        parse_row(line.replace(*change), Path("x"), 1)
    assert len(str(caught.value)) < 1000


def test_sample_whose_code_fails(tmp_path: Path) -> None:
    """A mapping of the user's that can't be asked costs no row."""

    class Refuses(dict):  # type: ignore[type-arg]
        def get(self, *_: Any) -> Any:
            raise RuntimeError("no")

        __contains__ = get

    rows, _ = assemble(
        folder_of(tmp_path), [queued("a", input=Refuses(x=1)), queued("b", 1)], {"a": [result()]}
    )
    assert [row.context.rollout_id for row in rows] == ["a", "b"]
