"""``self.training_context`` in upstream's real legacy runner and server, in both its signatures."""

from __future__ import annotations

from typing import Any

import agentlightning as agl
import pytest

import agl_meta
from agl_meta import TrainingContext, TrainingContextMixin
from tests.host.rollouts import run_v0, stamp

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    SEEN.clear()


def expected(*steps: int) -> list[Any]:
    return [(n, n % 7, n % 5, f"key-{n}") for n in steps]


def saw(context: TrainingContext) -> float:
    SEEN.append((context.global_step, context.epoch, context.batch_index, context.sample_key))
    return float(context.global_step or 0)


class Sync(TrainingContextMixin, agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return saw(self.training_context)


class Async(TrainingContextMixin, agl.LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        return saw(self.training_context)


class Old(TrainingContextMixin, agl.LitAgent[Any]):
    """The signature of v0.1, which is given no metadata."""

    def training_rollout(self, task: Any, rollout_id: str, resources: Any) -> float:  # type: ignore[override]
        assert self.training_context.rollout_id == rollout_id
        return saw(self.training_context)

    validation_rollout = training_rollout


class OldAsync(TrainingContextMixin, agl.LitAgent[Any]):
    async def training_rollout_async(  # type: ignore[override]
        self, task: Any, rollout_id: str, resources: Any
    ) -> float:
        return saw(self.training_context)


class OldBase(agl.LitAgent[Any]):
    def training_rollout(self, task: Any, rollout_id: str, resources: Any) -> float:  # type: ignore[override]
        return saw(agl_meta.current_training_context())

    def on_rollout_start(self, task: Any, runner: Any, tracer: Any) -> None:
        SEEN.append("started")


class OldAbove(TrainingContextMixin, OldBase):
    pass


class OldBelow(OldBase, TrainingContextMixin):
    pass


@pytest.mark.parametrize("cls", [Sync, Async, Old, OldAsync])
def test_context(cls: Any) -> None:
    """The context is right, sync and async, also where upstream hands over an id only."""
    done = run_v0(cls(), [stamp(n) for n in (3, 8)])
    assert expected(3, 8) == SEEN
    assert [rollout.final_reward for rollout in done] == [3.0, 8.0]


@pytest.mark.parametrize("cls", [OldAbove, OldBelow])
def test_own_on_rollout_start(cls: Any) -> None:
    """An agent's own on_rollout_start is called, and needs no super() for the mixin's sake."""
    run_v0(cls(), [stamp(1), stamp(2)])
    assert ["started", *expected(1), "started", *expected(2)] == SEEN


def test_validation() -> None:
    """Validation tasks say so."""

    class Agent(TrainingContextMixin, agl.LitAgent[Any]):
        def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            SEEN.append((self.training_context.is_train, self.training_context.split))
            return 1.0

    run_v0(Agent(), [stamp(1, is_train=False)], mode="val")
    assert SEEN == [(False, "val")]


def test_attempt_number_counts_claims() -> None:
    """v0 has no attempts; a task that was handed out again says how often."""
    task = agl.Task(rollout_id="r", input={}, num_claims=2, metadata=stamp(1))
    rollout = agl.RolloutLegacy(rollout_id="r", task=task)
    for given in (task, rollout):
        context = TrainingContext.from_rollout(given)
        assert (context.attempt_number, context.rollout_id) == (2, "r")
        assert (context.global_step, context.data_id) == (1, "data-1")


def test_failure_is_posted_as_upstream_does() -> None:
    """A rollout that raises is posted empty, and the next one has its own context."""

    class Agent(TrainingContextMixin, agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            if task["n"] == 0:
                raise RuntimeError("mine")
            return saw(self.training_context)

    done = run_v0(Agent(), [stamp(1), stamp(2)])
    assert [rollout.final_reward for rollout in done] == [None, 2.0]
    assert expected(2) == SEEN


def test_another_rollouts_announcement_is_not_taken() -> None:
    """The v0.1 signature takes the task announced for its id, never another one's."""
    agent = Old()
    agent.on_rollout_start(agl.Task(rollout_id="a", input={}, metadata=stamp(1)), None, None)  # type: ignore[arg-type]
    with pytest.raises(agl_meta.NotInRolloutError):
        agent.training_rollout({}, rollout_id="b", resources={})
    assert agent.training_rollout({}, rollout_id="a", resources={}) == 1.0
