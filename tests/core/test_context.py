"""The training context: read from a rollout, refused when damaged, current where the rollout runs."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_meta
from agl_meta import NotInRolloutError, StampError, TrainingContext, current_training_context
from agl_meta.context import training_context_of
from tests.core.rollouts import stamp, v0, v1


@pytest.mark.parametrize("kind", [v0, v1, lambda metadata: v0(metadata).task])
def test_from_rollout(kind: Any) -> None:
    """All that was stamped is there, from a rollout of either mode and from a v0 task."""
    context = TrainingContext.from_rollout(kind(stamp(7, output_dir="/runs")))
    assert context.is_stamped
    assert (context.epoch, context.global_step, context.batch_index) == (0, 7, 0)
    assert (context.is_train, context.split, context.reason) == (False, "val", "periodic")
    assert (context.data_id, context.rollout_id) == ("data-7", "ro-1")
    assert (context.output_dir, context.pass_path) == ("/runs", "global_step_7/val")
    assert context.attempt_number == 1


def test_attempts() -> None:
    """In v1 the attempt is named and counted."""
    context = TrainingContext.from_rollout(v1(stamp(), attempt=3))
    assert (context.attempt_id, context.attempt_number) == ("at-3", 3)


@pytest.mark.parametrize("metadata", [None, {}, {"data_id": "x", "is_train": True}])
def test_unstamped(metadata: Any) -> None:
    """Without our entry nothing is guessed from what else stands there."""
    context = TrainingContext.from_rollout(v1(metadata))
    assert not context.is_stamped
    assert (context.epoch, context.global_step, context.is_train, context.split) == (None,) * 4


def test_frozen() -> None:
    """Nobody can change where a rollout stands."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        TrainingContext().epoch = 1  # type: ignore[misc]


@pytest.mark.parametrize("schema", [0, 2, "1", None, True, 1.5])
def test_unknown_schema(schema: Any) -> None:
    """Another version is refused by name."""
    with pytest.raises(StampError, match="this agl_meta reads schema 1. Install the same"):
        TrainingContext.from_rollout(v1(stamp(schema=schema)))


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("flat", "epoch", "0"),
        ("flat", "global_step", None),
        ("flat", "global_step", True),
        ("flat", "is_train", 1),
        ("entry", "sample_key", 3),
        ("entry", "pass_path", 3),
        ("entry", "run_id", None),
    ],
)
def test_damaged(where: str, name: str, value: Any) -> None:
    """A value of the wrong type is refused by name."""
    metadata = stamp()
    (metadata if where == "flat" else metadata["agl_meta"])[name] = value
    with pytest.raises(StampError, match=f"holds {name}="):
        TrainingContext.from_rollout(v1(metadata))


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json, st.dictionaries(st.sampled_from([*stamp(), *stamp()["agl_meta"]]), json))
def test_any_metadata(entry: Any, flat: dict[str, Any]) -> None:
    """Whatever stands in the metadata: a context, or a StampError."""
    for metadata in (entry, {**stamp(), **flat}, {**flat, "agl_meta": entry}):
        try:
            assert isinstance(TrainingContext.from_rollout(v1(metadata)), TrainingContext)
        except StampError:
            pass


def test_current_is_restored() -> None:
    """Nested rollouts see their own context, and the outer one its own again."""
    with training_context_of(v1(stamp(1))):
        with training_context_of(v1(stamp(2))):
            assert current_training_context().global_step == 2
        assert current_training_context().global_step == 1
    with pytest.raises(NotInRolloutError, match=r"contextvars.copy_context\(\).run"):
        current_training_context()


def test_a_stamp_that_can_not_be_read_is_an_error_on_access() -> None:
    """Entering is no error, so that an agent that never asks runs on."""
    with training_context_of(v1(stamp(schema=2))), pytest.raises(StampError, match="schema 2"):
        current_training_context()


def test_tasks_and_threads() -> None:
    """Tasks and to_thread inherit; a bare thread does not, unless the context is copied."""

    def look() -> Any:
        try:
            return current_training_context().global_step
        except NotInRolloutError:
            return "none"

    async def main() -> list[Any]:
        async def task() -> Any:
            return look()

        with training_context_of(v1(stamp(5))):
            return [*await asyncio.gather(task(), asyncio.to_thread(look))]

    assert asyncio.run(main()) == [5, 5]
    seen: list[Any] = []
    with training_context_of(v1(stamp(6))):
        copied = contextvars.copy_context()
        for target in (lambda: seen.append(look()), lambda: seen.append(copied.run(look))):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == ["none", 6]


def test_one_warning_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first unstamped rollout warns, and also where warnings are errors the code runs on."""
    monkeypatch.setattr("agl_meta.context._warned", False)
    with pytest.warns(agl_meta.UnstampedRolloutWarning) as caught:
        for _ in range(3):
            with training_context_of(v1({})):
                assert not current_training_context().is_stamped
    assert len(caught) == 1
    monkeypatch.setattr("agl_meta.context._warned", False)
    with training_context_of(v1({})):  # the test run turns our warnings into errors
        assert not current_training_context().is_stamped
