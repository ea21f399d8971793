"""The training context: read from a rollout, refused when damaged, current where the rollout runs."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_meta
from agl_meta import NotInRolloutError, StampError, TrainingContext, current_training_context
from agl_meta.context import enter, is_current, leave_rollout, training_context_of
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


ODD_IDS: dict[str, list[Any]] = {
    "data_id": [5, b"x", ["x"]],
    "rollout_id": [5, b"x", ["x"]],
    "attempt_id": [5, b"x", ["x"]],
    "attempt_number": ["1", 1.0, True, [1]],
}


def with_id(name: str, value: Any, metadata: dict[str, Any]) -> Any:
    """A rollout of v1 that has this value for an id."""
    rollout = v1(metadata)
    if name == "data_id":
        metadata[name] = value
    elif name == "rollout_id":
        rollout.rollout_id = value
    else:
        setattr(rollout.attempt, "sequence_id" if name == "attempt_number" else name, value)
    return rollout


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in ODD_IDS for value in ODD_IDS[name]])
def test_damaged_id(name: str, value: Any) -> None:
    """What is stamped is refused by name, where it is asked for; else the id is none, and no error."""
    with pytest.raises(StampError, match=f"holds {name}="):
        TrainingContext.from_rollout(with_id(name, value, stamp()))
    with training_context_of(with_id(name, value, stamp())), pytest.raises(StampError):
        current_training_context()
    context = TrainingContext.from_rollout(with_id(name, value, {"data_id": "d"}))
    assert not context.is_stamped
    assert getattr(context, name) is None
    others = {"data_id": "d", "rollout_id": "ro-1", "attempt_id": "at-1", "attempt_number": 1}
    assert {other: getattr(context, other) for other in others if other != name} == {
        other: value for other, value in others.items() if other != name
    }


@pytest.mark.parametrize("name", ODD_IDS)
def test_absent_id(name: str) -> None:
    """v0 knows no attempts, and a copied-out daemon may name no sample."""
    assert getattr(TrainingContext.from_rollout(with_id(name, None, stamp())), name) is None


class Refuses:
    """Raises at everything that reading or describing a value may do with it."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(self)

    __repr__ = __str__ = __eq__ = __ne__ = __hash__ = __bool__ = __len__ = __iter__ = _refuse  # type: ignore[assignment]
    __contains__ = __getitem__ = __getattr__ = __format__ = _refuse  # type: ignore[assignment]


class RefusingMapping(Refuses, Mapping):  # type: ignore[type-arg, misc]
    """A mapping that can't be read."""


class HasNoTruth:
    """Compares as an array does."""

    def __eq__(self, other: object) -> Any:
        return Refuses()

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]


class RefusingDict(dict):  # type: ignore[type-arg]
    """A dict whose own code fails."""

    __repr__ = get = __getitem__ = Refuses._refuse  # type: ignore[assignment]


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


DEEP = nested(100_000)
# repr() of the first two raises ValueError and RecursionError.
ODD: dict[str, Callable[[], Any]] = {
    "int": lambda: 10**10_000,
    "deep": lambda: DEEP,
    "refuses": Refuses,
    "mapping": RefusingMapping,
    "array": HasNoTruth,
    "dict": lambda: RefusingDict(a=1),
    "long": lambda: "x" * 10**6,
}
odd = st.sampled_from([*ODD]).map(lambda name: ODD[name]())
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
anything = st.recursive(
    json | odd, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=3
)
ENTRY = stamp()["agl_meta"]


@given(
    anything,
    st.dictionaries(st.sampled_from([*stamp()]), anything),
    st.dictionaries(st.sampled_from([*ENTRY]), anything),
)
def test_any_metadata(value: Any, flat: dict[str, Any], entry: dict[str, Any]) -> None:
    """Whatever stands in the metadata, of this world or not: a context, or a StampError to be read."""
    stamps = (
        value,
        {**stamp(), **flat},
        {**flat, "agl_meta": value},
        {**stamp(), "agl_meta": {**ENTRY, **entry}},
        {**stamp(), "agl_meta": RefusingDict(ENTRY)},
    )
    for metadata in stamps:
        for kind in (v0, v1):
            try:
                found: Any = TrainingContext.from_rollout(kind(metadata))
            except StampError as error:
                found = error
            assert isinstance(found, TrainingContext) or len(str(found)) < 1000


@pytest.mark.parametrize("name", ["schema", "reason", "run_id", "output_dir", "pass_path", "is_train"])
@pytest.mark.parametrize("value", ["int", "deep", "refuses", "array", "dict"])
def test_odd_values_are_described(name: str, value: str) -> None:
    """The error says which value it is about, though the value can't be shown as it is."""
    metadata = stamp()
    (metadata if name == "is_train" else metadata["agl_meta"])[name] = ODD[value]()
    with pytest.raises(StampError, match="with schema " if name == "schema" else f"holds {name}="):
        TrainingContext.from_rollout(v1(metadata))


def test_a_rollout_that_can_not_be_read() -> None:
    """Neither does entering it stop the agent, nor leaving it."""
    for odd_rollout in (Refuses(), RefusingMapping(), v1(RefusingMapping()), v0(RefusingMapping())):
        with training_context_of(odd_rollout), pytest.raises(StampError, match="can't be read: RuntimeError"):
            current_training_context()
        with pytest.raises(NotInRolloutError):
            current_training_context()


@pytest.mark.parametrize("odd", ["refuses", "array", "class"])
def test_ids_that_can_not_be_compared(odd: str) -> None:
    """Rollouts with such ids, of whatever making, are entered and left, each for itself."""

    class HasNoClass:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("no class")

    def make() -> Any:
        return v1({}, rollout_id={"class": HasNoClass, "refuses": Refuses, "array": HasNoTruth}[odd]())

    outer, inner = make(), make()
    enter(outer)
    enter(inner)
    assert current_training_context().rollout_id is None
    assert not is_current(make())
    leave_rollout(make())  # of none that was entered
    assert current_training_context().rollout_id is None
    leave_rollout(inner)
    leave_rollout(outer)
    with pytest.raises(NotInRolloutError):
        current_training_context()


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


def test_asking_again_for_what_can_not_be_read() -> None:
    """Each time the same error, which does not grow: it would keep the frames of all that asked."""

    def frames() -> int:
        with pytest.raises(StampError) as caught:
            current_training_context()
        return len(caught.traceback)

    with training_context_of(v1(stamp(schema=2))):
        assert [frames() for _ in range(5)] == [frames()] * 5


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
