"""What saving and reading cost, in calls: a guard against what would make them slow, on any machine."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agl_meta
from agl_meta.context import training_context_of
from tests.core.rollouts import stamp, v1
from tests.core.test_encoding_plain import Plain


def calls(use: Callable[[], object]) -> Counter[str]:
    """Calls of functions while something is done, by ``"python"``, ``"c"``, and the name of a C function."""
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found["python"] += 1
        elif event == "c_call":
            found["c"] += 1
            found[argument.__name__] += 1

    use()  # what happens once a process, or once a file, is not counted
    gc.disable()  # others may have asked to be called when it collects
    sys.setprofile(count)
    try:
        use()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.fixture(autouse=True)
def _rollout(tmp_path: Path) -> Any:
    with training_context_of(v1(stamp(1, output_dir=str(tmp_path)))):
        yield


def conversation(messages: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"text {n}"} for n in range(messages)], "reward": 0.5}


def test_plain_data_costs_no_call_a_value() -> None:
    """As many calls for a record of thousands of values as for a small one, and one write."""
    small, large = (calls(lambda n=n: agl_meta.save_prediction(conversation(n))) for n in (3, 3_000))
    made = [calls(lambda n=n: conversation(n)) for n in (3, 3_000)]
    assert {each: small[each] - made[0][each] for each in ("python", "c")} == {
        each: large[each] - made[1][each] for each in ("python", "c")
    }
    assert small["write"] == large["write"] == 1
    assert small["fsync"] == 0
    assert small["python"] - made[0]["python"] <= 45
    assert small["c"] - made[0]["c"] <= 75


def test_objects_cost_a_few_calls_each() -> None:
    """A state of messages: its fields are read, not walked one by one."""
    state = {"messages": [Plain(content=f"{n}", kwargs={}, calls=[], name=None) for n in range(300)]}
    less = {"messages": state["messages"][:100]}
    many, few = (calls(lambda value=value: agl_meta.save_prediction(value)) for value in (state, less))
    assert many["python"] == few["python"]
    assert (many["c"] - few["c"]) / 200 <= 8
    assert many["write"] == 1


def test_reading_costs_the_same_whatever_was_saved(tmp_path: Path) -> None:
    """A few calls a record, and none more for a large value."""
    counts = []
    for messages in (1, 1_000):
        root = tmp_path / str(messages)
        root.mkdir()
        for n in range(20):
            with training_context_of(v1(stamp(1, output_dir=str(root)), f"ro-{n}")):
                agl_meta.save_prediction(conversation(messages))
        counts.append(calls(lambda root=root: list(agl_meta.read_predictions(root))))
    assert counts[0]["python"] == counts[1]["python"]
    records = calls(lambda: list(agl_meta.read_predictions(tmp_path / "1", steps=[])))
    assert (counts[0]["python"] - records["python"]) / 20 <= 20
