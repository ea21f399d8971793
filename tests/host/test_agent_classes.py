"""Agents whose class is made anew by a decorator (attrs, dataclasses), in upstream's real runners."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import agentlightning as agl
import attr
import attrs
import pytest
from ray import cloudpickle

import agl_meta
from agl_meta import TrainingContextMixin, current_training_context
from tests.host.rollouts import run_v0, run_v1, stamp

SEEN: list[Any] = []
METHODS = ("rollout", "training_rollout", "validation_rollout")
ALL_METHODS = (*METHODS, *(f"{name}_async" for name in METHODS))


@pytest.fixture(autouse=True)
def _empty() -> None:
    SEEN.clear()


def _copied(cls: type) -> type:
    """A class of the same name, bases and content, as six.add_metaclass and others make it."""
    left_out = ("__dict__", "__weakref__")
    return type(cls)(cls.__name__, cls.__bases__, {k: v for k, v in vars(cls).items() if k not in left_out})


DECORATORS: dict[str, Callable[[type], type]] = {
    "attrs.define": attrs.define,
    "attrs.frozen": attrs.frozen,
    "attrs.define(slots=False)": attrs.define(slots=False),
    "attr.s(slots=True)": attr.s(slots=True, auto_attribs=True),
    "dataclass": dataclasses.dataclass,
    "dataclass(slots=True)": dataclasses.dataclass(slots=True),
    "dataclass(slots=True, frozen=True)": dataclasses.dataclass(slots=True, frozen=True),
    "copied": _copied,
}
# These leave the first class in the cell that super() reads, with the mixin or without.
LOSE_SUPER = (
    "copied",
    *(name for name in DECORATORS if "dataclass(slots" in name and sys.version_info < (3, 14)),
)


def rollout_of(n: int) -> Any:
    return agl.AttemptedRollout(
        rollout_id=f"ro-{n}",
        input={"n": n},
        start_time=0.0,
        metadata=stamp(n),
        attempt=agl.Attempt(rollout_id=f"ro-{n}", attempt_id="a", sequence_id=1, start_time=0.0),
    )


def _step() -> Any:
    return current_training_context().global_step


def family(name: str, bases: tuple[type, ...], decorators: Any, first: Any = ()) -> tuple[type, type, type]:
    """Parent, child that inherits and child that overrides, each through its decorator.

    ``first`` are bases that the children have before their parent.
    """
    is_async = name.endswith("_async")
    for_parent, for_child = decorators

    class Parent(*bases):  # type: ignore[misc]
        label: str = "label"

        if is_async:

            async def method(self, task: Any, resources: Any, *, rollout: Any) -> Any:
                """Doc."""
                await asyncio.sleep(0)
                SEEN.append(_step())
                return ["parent"]

        else:

            def method(self, task: Any, resources: Any, *, rollout: Any) -> Any:
                """Doc."""
                SEEN.append(_step())
                return ["parent"]

        vars()[name] = method
        del method

    parent = for_parent(Parent)

    class Inherits(*first, parent):  # type: ignore[misc]
        more: str = "more"

    class Overrides(*first, parent):  # type: ignore[misc]
        more: str = "more"

        if is_async:

            async def method(self, task: Any, resources: Any, *, rollout: Any) -> Any:
                """Doc."""
                SEEN.append(_step())
                above = await getattr(super(), name)(task, resources, rollout=rollout)
                return [*above, "child", __class__ is type(self)]  # type: ignore[name-defined]

        else:

            def method(self, task: Any, resources: Any, *, rollout: Any) -> Any:
                """Doc."""
                SEEN.append(_step())
                above = getattr(super(), name)(task, resources, rollout=rollout)
                return [*above, "child", __class__ is type(self)]  # type: ignore[name-defined]

        vars()[name] = method
        del method

    return parent, for_child(Inherits), for_child(Overrides)


def call(agent: Any, name: str, n: int) -> Any:
    result = getattr(agent, name)({"n": n}, {}, rollout=rollout_of(n))
    return asyncio.run(result) if name.endswith("_async") else result


@pytest.mark.parametrize("name", ALL_METHODS)
@pytest.mark.parametrize("made_anew", ["parent", "child", "both"])
@pytest.mark.parametrize("mixin", ["above", "below"])
@pytest.mark.parametrize("decorator", DECORATORS)
def test_every_method(decorator: str, mixin: str, made_anew: str, name: str) -> None:
    """Own and inherited, sync and async, wherever in the tree a class is made anew."""
    decorate = DECORATORS[decorator]
    decorators = tuple(
        decorate if made_anew in (who, "both") else lambda cls: cls for who in ("parent", "child")
    )
    mixed = (TrainingContextMixin,)
    bases = (*mixed, agl.LitAgent) if mixin == "above" else (agl.LitAgent,)
    parent, inherits, overrides = family(name, bases, decorators, () if mixin == "above" else mixed)
    alone = family(name, (agl.LitAgent,), decorators)
    if mixin == "above":
        assert call(parent(), name, 3) == ["parent"]
        assert SEEN == [3]
    SEEN.clear()
    assert call(inherits(), name, 4) == ["parent"]
    assert SEEN == [4]
    SEEN.clear()
    if decorator in LOSE_SUPER and made_anew != "parent":
        with pytest.raises(TypeError, match="super"):
            call(overrides(), name, 5)
        with agl_meta.context.training_context_of(rollout_of(5)), pytest.raises(TypeError, match="super"):
            call(alone[2](), name, 5)
    else:
        assert call(overrides(), name, 5) == ["parent", "child", True]
        assert SEEN == [5, 5]
    with pytest.raises(agl_meta.NotInRolloutError):
        current_training_context()
    for ours, theirs in zip((parent, inherits, overrides), alone, strict=True):
        assert ours().is_async() == theirs().is_async() == name.endswith("_async")
        for each in ALL_METHODS:
            one, other = getattr(ours(), each), getattr(theirs(), each)
            assert inspect.signature(one) == inspect.signature(other)
            assert inspect.iscoroutinefunction(one) == inspect.iscoroutinefunction(other)
            assert (one.__name__, one.__doc__) == (other.__name__, other.__doc__)


def test_two_classes_with_the_same_content() -> None:
    """Where both classes are used, or one stands below the other, each goes on to its own bases."""

    class Base(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            return [_step()]

    class Other(agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            return ["other", _step()]

    class Agent(TrainingContextMixin, Base):
        pass

    content = {name: value for name, value in vars(Agent).items() if name not in ("__dict__", "__weakref__")}
    twin = type("Twin", (TrainingContextMixin, Other), content)
    below = type("Below", (Agent,), content)
    for cls, expected in ((Agent, [1]), (twin, ["other", 1]), (below, [1])):
        assert call(cls(), "rollout", 1) == expected


def test_a_decorator_below_another() -> None:
    """A class that is made anew twice works as after once."""

    @attrs.define
    @_copied
    class Agent(TrainingContextMixin, agl.LitAgent[Any]):
        label: str = "kept"

        def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
            return [self.label, _step()]

    assert call(Agent(), "training_rollout", 2) == ["kept", 2]


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_other_kinds_of_methods(kind: Any) -> None:
    """Static and class methods, with what ``super()`` reads in the latter."""

    class Base(agl.LitAgent[Any]):
        @classmethod
        def above(cls) -> str:
            return "above"

    @attrs.define
    class Agent(TrainingContextMixin, Base):
        if kind is staticmethod:

            @staticmethod
            def rollout(task: Any, resources: Any, rollout: Any) -> Any:  # type: ignore[override]
                return ["above", _step()]

        else:

            @classmethod
            def rollout(cls, task: Any, resources: Any, rollout: Any) -> Any:  # type: ignore[override]
                return [super().above(), _step()]

    assert call(Agent(), "rollout", 2) == ["above", 2]


# ------------------------------------------------------------------------------- upstream's runners


class Sees(agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        SEEN.append(_step())
        return 1.0


class SeesAsync(agl.LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        SEEN.append(_step())
        return 1.0


@attrs.define
class Defined(TrainingContextMixin, Sees):
    label: str = "kept"

    def __attrs_pre_init__(self) -> None:
        super().__init__()


@attrs.define
class DefinedAsync(TrainingContextMixin, SeesAsync):
    def __attrs_pre_init__(self) -> None:
        super().__init__()

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        assert self.training_context.rollout_id == rollout.rollout_id
        return await super().rollout_async(task, resources, rollout)


@dataclasses.dataclass(slots=True)
class Data(TrainingContextMixin, Sees):
    label: str = "kept"

    def __post_init__(self) -> None:
        agl.LitAgent.__init__(self)


@attrs.define
class Old(TrainingContextMixin, agl.LitAgent[Any]):
    """The signature of v0.1, whose task is announced by an inherited on_rollout_start."""

    def __attrs_pre_init__(self) -> None:
        super().__init__()

    def training_rollout(self, task: Any, rollout_id: str, resources: Any) -> float:  # type: ignore[override]
        SEEN.append(self.training_context.global_step)
        return 1.0


@attrs.define
class OldWithItsOwn(Old):
    def on_rollout_start(self, task: Any, runner: Any, tracer: Any) -> None:
        SEEN.append("started")
        super().on_rollout_start(task, runner, tracer)


@pytest.mark.parametrize("cls", [Defined, DefinedAsync, Data])
def test_v1_runner(cls: Any) -> None:
    """Such an agent runs in the v1 runner."""
    done, _ = asyncio.run(run_v1(cls(), [stamp(3), stamp(8)]))
    assert [rollout.status for rollout in done] == ["succeeded"] * 2
    assert SEEN == [3, 8]


@pytest.mark.parametrize("cls", [Defined, DefinedAsync, Data, Old, OldWithItsOwn])
def test_v0_runner(cls: Any) -> None:
    """It runs in the legacy runner, too, in both its signatures."""
    done = run_v0(cls(), [stamp(3), stamp(8)])
    assert [rollout.final_reward for rollout in done] == [1.0, 1.0]
    expected = ["started", 3, "started", 8] if cls is OldWithItsOwn else [3, 8]
    assert expected == SEEN


@pytest.mark.parametrize("cls", [Defined, Data])
@pytest.mark.parametrize("by", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_pickled(cls: Any, by: Any) -> None:
    """A pickled instance works as the original does."""
    twin = by.loads(by.dumps(cls("other")))
    assert twin.label == "other"
    assert call(twin, "rollout", 2) == 1.0
    assert SEEN == [2]


def test_class_pickled_by_value() -> None:
    """A class of the user's script works on the other side."""

    @attrs.define
    class Local(TrainingContextMixin, Sees):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return super().rollout(task, resources, rollout) * float(self.training_context.global_step or 0)

    code = f"""
from ray import cloudpickle
from tests.host.test_agent_classes import call
agent = cloudpickle.loads({cloudpickle.dumps(Local())!r})
assert call(agent, "rollout", 9) == call(agent, "training_rollout", 9) == 9.0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
