"""``self.training_context`` in upstream's real v1 runner: each sentence of the promise is a test."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import multiprocessing
import pickle
import threading
import time
import traceback
import warnings
from typing import Any

import agentlightning as agl
import pytest
from agentlightning.tracer.otel import OtelTracer
from ray import cloudpickle

import agl_meta
from agl_meta import TrainingContext, TrainingContextMixin, current_training_context
from tests.host.rollouts import run_v1, stamp

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    SEEN.clear()


def saw(context: TrainingContext) -> None:
    SEEN.append((context.global_step, context.epoch, context.batch_index, context.sample_key))


def expected(*steps: int) -> list[Any]:
    return [(n, n % 7, n % 5, f"key-{n}") for n in steps]


def run(agent: Any, *steps: int, mode: str = "train", **more: Any) -> list[Any]:
    metadata = [stamp(n, mode == "train") for n in steps]
    return asyncio.run(run_v1(agent, metadata, mode=mode, **more))[0]


# ------------------------------------------------------------------------------ where it is defined


class Sync(TrainingContextMixin, agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        saw(self.training_context)
        return 1.0


class Async(TrainingContextMixin, agl.LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        await asyncio.sleep(0)
        saw(self.training_context)
        return 1.0


class Both(TrainingContextMixin, agl.LitAgent[Any]):
    def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        SEEN.append("training")
        saw(self.training_context)
        return 1.0

    def validation_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        SEEN.append("validation")
        saw(self.training_context)
        return 1.0


class BothAsync(TrainingContextMixin, agl.LitAgent[Any]):
    async def training_rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        SEEN.append("training")
        saw(self.training_context)
        return 1.0

    async def validation_rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        SEEN.append("validation")
        saw(self.training_context)
        return 1.0


class Base(agl.LitAgent[Any]):
    """Knows no mixin; what it sees comes through current_training_context()."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        saw(current_training_context())
        return 1.0


class MixinFirst(TrainingContextMixin, Base):
    pass


class MixinLast(Base, TrainingContextMixin):
    pass


class Grandchild(MixinFirst):
    pass


class Sibling(agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        SEEN.append("sibling")
        saw(current_training_context())
        return 1.0


class AbstractAgent(TrainingContextMixin, agl.LitAgent[Any]):
    pass


class FromSibling(AbstractAgent, Sibling):
    pass


class CallsSuper(MixinFirst):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        saw(self.training_context)
        return super().rollout(task, resources, rollout)


class OddNames(TrainingContextMixin, agl.LitAgent[Any]):
    def rollout(self, t: Any, r: Any, ro: Any) -> float:  # type: ignore[override]
        saw(self.training_context)
        return 1.0


class Variadic(TrainingContextMixin, agl.LitAgent[Any]):
    def training_rollout(self, *args: Any, **kwargs: Any) -> float:  # type: ignore[override]
        saw(self.training_context)
        return 1.0


class Static(TrainingContextMixin, agl.LitAgent[Any]):
    @staticmethod
    def rollout(task: Any, resources: Any, rollout: Any) -> float:  # type: ignore[override]
        saw(current_training_context())
        return 1.0


class ByClass(TrainingContextMixin, agl.LitAgent[Any]):
    @classmethod
    def rollout(cls, task: Any, resources: Any, rollout: Any) -> float:  # type: ignore[override]
        saw(current_training_context())
        return 1.0


@pytest.mark.parametrize(
    "cls",
    [
        Sync,
        Async,
        MixinFirst,
        MixinLast,
        Grandchild,
        OddNames,
        Variadic,
        Static,
        ByClass,
    ],
)
def test_wherever_the_method_is_defined(cls: Any) -> None:
    """The context is right in a rollout method of any class in the tree, of any signature."""
    done = run(cls(), 3, 8)
    assert expected(3, 8) == SEEN
    assert [rollout.status for rollout in done] == ["succeeded"] * 2


@pytest.mark.parametrize("cls", [Both, BothAsync])
@pytest.mark.parametrize("mode", ["train", "val"])
def test_training_and_validation_methods(cls: Any, mode: str) -> None:
    """Both specialised methods know their context, and upstream chooses between them as ever."""
    run(cls(), 4, mode=mode)
    assert ["training" if mode == "train" else "validation", *expected(4)] == SEEN


def test_method_of_a_sibling() -> None:
    """A method that comes in between two classes of the tree is wrapped, too."""
    run(FromSibling(), 5)
    assert ["sibling", *expected(5)] == SEEN


def test_super_sees_the_same() -> None:
    """A method and the one it overrides see one context."""
    run(CallsSuper(), 6)
    assert expected(6, 6) == SEEN


# ------------------------------------------------------------------------------------- concurrency


class Slow(TrainingContextMixin, agl.LitAgent[Any]):
    """Looks several times while others run on the same instance."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        for _ in range(5):
            assert self.training_context.rollout_id == rollout.rollout_id
            assert self.training_context.sample_key == f"key-{task['n']}"
            await asyncio.sleep(0.001 * (task["n"] % 3))
        inner = await asyncio.gather(self.tool(), asyncio.to_thread(current_training_context))
        assert {context.rollout_id for context in inner} == {rollout.rollout_id}
        saw(self.training_context)
        return 1.0

    async def tool(self) -> TrainingContext:
        await asyncio.sleep(0)
        return current_training_context()


def test_fifty_tasks_on_one_agent() -> None:
    """Fifty concurrent rollouts on one instance each see their own values, across awaits."""
    done = run(Slow(), *range(50), runners=50)
    assert {rollout.status for rollout in done} == {"succeeded"}
    assert sorted(SEEN) == expected(*range(50))


def test_fifty_threads_on_one_agent() -> None:
    """The same in threads, as with strategy ``shm``."""
    barrier = threading.Barrier(50)

    class Meeting(TrainingContextMixin, agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            barrier.wait(30)
            saw(self.training_context)
            time.sleep(0.001)
            return float(self.training_context.global_step or 0)

    agent, results = Meeting(), {}

    def work(n: int) -> None:
        rollout = agl.AttemptedRollout(
            rollout_id=f"ro-{n}",
            input={"n": n},
            start_time=0.0,
            metadata=stamp(n),
            attempt=agl.Attempt(rollout_id=f"ro-{n}", attempt_id="a", sequence_id=1, start_time=0.0),
        )
        results[n] = agent.training_rollout({"n": n}, resources={}, rollout=rollout)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: float(n) for n in range(50)}
    assert sorted(SEEN) == expected(*range(50))


class StartsThreads(TrainingContextMixin, agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        def look(name: str) -> None:
            try:
                SEEN.append((name, self.training_context.rollout_id == rollout.rollout_id))
            except agl_meta.NotInRolloutError as error:
                SEEN.append((name, "copy_context" in str(error)))

        plain = threading.Thread(target=look, args=("error",))
        copied = contextvars.copy_context()
        helped = threading.Thread(target=copied.run, args=(look, "own"))
        for thread in (plain, helped):
            thread.start()
            thread.join()
        return 1.0


def test_threads_of_the_user() -> None:
    """A thread sees this rollout's context if it was copied, and else an error that says how."""
    run(StartsThreads(), 1)
    assert SEEN == [("error", True), ("own", True)]


def test_outside_a_rollout() -> None:
    """Before and after rollouts there is no context, on this instance or another."""
    agent = Sync()
    for _ in range(2):
        with pytest.raises(agl_meta.NotInRolloutError, match="No rollout is running here"):
            _ = agent.training_context
        run(agent, 1)


def test_a_call_of_ones_own() -> None:
    """A rollout method that is called without a rollout stays outside, and runs."""

    class Quiet(TrainingContextMixin, agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any = None, rollout: Any = None) -> Any:
            return task * 2

    assert Quiet().rollout(2) == 4


class Refuses:
    """A value of a user's that can't be asked for anything."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("no")

    __eq__ = __ne__ = __hash__ = __bool__ = __getattr__ = _refuse  # type: ignore[assignment]


class HasNoClass(Refuses):
    """``isinstance()`` raises for it."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")


@pytest.mark.parametrize("odd", [Refuses, HasNoClass])
@pytest.mark.parametrize("mixin", [(TrainingContextMixin,), ()], ids=["mixin", "alone"])
def test_a_call_with_values_that_can_not_be_asked(odd: type, mixin: tuple[type, ...]) -> None:
    """Whatever stands for an argument, the method gets it as it does without the mixin."""

    class Takes(*mixin, agl.LitAgent[Any]):  # type: ignore[misc]
        def rollout(
            self, task: Any, resources: Any = None, rollout: Any = None, rollout_id: Any = None
        ) -> Any:
            return [type(each) for each in (task, resources, rollout, rollout_id)]

    none = type(None)
    value = odd()
    assert Takes().rollout(value) == [odd, none, none, none]
    assert Takes().rollout(1, resources=value) == [int, odd, none, none]
    assert Takes().rollout(1, rollout=value) == [int, none, odd, none]
    assert Takes().rollout(1, rollout_id=value) == [int, none, none, odd]
    with pytest.raises(agl_meta.NotInRolloutError):
        current_training_context()


def test_rollout_behind_a_value_that_can_not_be_asked() -> None:
    """It is found all the same."""

    class Takes(TrainingContextMixin, agl.LitAgent[Any]):
        def rollout(self, task: Any, first: Any, *others: Any) -> Any:
            return self.training_context.global_step

    rollout = agl.AttemptedRollout(
        rollout_id="ro",
        input=1,
        start_time=0.0,
        metadata=stamp(3),
        attempt=agl.Attempt(rollout_id="ro", attempt_id="at", sequence_id=1, start_time=0.0),
    )
    assert Takes().rollout(1, HasNoClass(), rollout) == 3


# ----------------------------------------------------------------------------- without stamps, bad ones


class Tells(TrainingContextMixin, agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        SEEN.append(self.training_context)
        return 1.0


def test_without_stamps() -> None:
    """An unstamped rollout runs on with numbers that are None; one warning says what to pass."""
    agl_meta.context._warned = False  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done, _ = asyncio.run(run_v1(Tells(), [None, {"data_id": "d"}]))
    assert [rollout.status for rollout in done] == ["succeeded"] * 2
    assert [context.is_stamped for context in SEEN] == [False, False]
    assert [context.global_step for context in SEEN] == [None, None]
    ours = [w for w in caught if issubclass(w.category, agl_meta.UnstampedRolloutWarning)]
    assert len(ours) == 1
    assert "agl_meta.VERL" in str(ours[0].message)


class CatchesStampError(TrainingContextMixin, agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        try:
            _ = self.training_context
        except agl_meta.StampError as error:
            SEEN.append(str(error))
        return 1.0


def test_unknown_schema() -> None:
    """A stamp of another version is refused by name where it is read, and the rollout goes on."""
    done, _ = asyncio.run(run_v1(CatchesStampError(), [stamp(1, schema=99)]))
    assert done[0].status == "succeeded"
    assert "schema 99; this agl_meta reads schema 1. Install the same" in SEEN[0]


# ---------------------------------------------------------------------------- upstream is unchanged


class Failure(Exception):
    pass


class Raises(TrainingContextMixin, agl.LitAgent[Any]):
    error = Failure("mine")

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        raise self.error


def test_exceptions_reach_the_runner_unchanged() -> None:
    """The runner gets the very exception, with the user's frame as the last one."""
    from agentlightning.runner import LitAgentRunner
    from agentlightning.store.memory import InMemoryLightningStore

    from tests.host.rollouts import RESOURCES, NullTracer

    async def step() -> None:
        runner: Any = LitAgentRunner(NullTracer())
        runner.init(agent=Raises())
        runner.init_worker(0, InMemoryLightningStore())
        await runner.step({"n": 1}, resources=RESOURCES)

    with warnings.catch_warnings(), pytest.raises(Failure) as caught:
        warnings.simplefilter("ignore")
        asyncio.run(step())
    assert caught.value is Raises.error
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert (frames[-1].name, frames[-1].filename) == ("rollout", __file__)


def test_current_context_is_left_after_an_exception() -> None:
    """A rollout that raised leaves no context behind."""
    done = run(Raises(), 1)
    assert done[0].status == "failed"
    with pytest.raises(agl_meta.NotInRolloutError):
        current_training_context()


class SyncAlone(agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return 0.5 if task["n"] % 2 else None  # type: ignore[return-value]


class AsyncAlone(agl.LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
        if task["n"] == 2:
            raise Failure
        return [] if task["n"] % 2 else 0.25


def spans_of(agent: Any) -> list[Any]:
    async def collect() -> list[Any]:
        done, store = await run_v1(agent, [stamp(n) for n in range(4)], tracer=OtelTracer())
        result = []
        for rollout in done:
            spans = await store.query_spans(rollout.rollout_id)
            result.append((rollout.status, [(span.name, span.attributes) for span in spans]))
        return result

    return asyncio.run(collect())


@pytest.mark.parametrize("alone", [SyncAlone, AsyncAlone])
def test_same_as_an_agent_without_the_mixin(alone: Any) -> None:
    """Statuses, spans and rewards are those of the same agent without the mixin."""
    mixed = type("Mixed", (TrainingContextMixin, alone), {})
    found = spans_of(mixed())
    assert found == spans_of(alone())
    assert any(spans for _, spans in found)


NAMES = ("rollout", "training_rollout", "validation_rollout")
ALL_NAMES = (*NAMES, *(f"{name}_async" for name in NAMES))


@pytest.mark.parametrize("defined", [(), *((name,) for name in ALL_NAMES), ALL_NAMES], ids=str)
@pytest.mark.parametrize("order", ["first", "last", "below"])
def test_is_async_and_signatures(defined: tuple[str, ...], order: str) -> None:
    """``is_async()`` and each method's signature are those of the agent without the mixin."""

    def sync(self: Any, task: Any, resources: Any, *, rollout: Any = None) -> Any:
        """Doc."""

    async def coroutine(self: Any, task: Any, resources: Any, *, rollout: Any = None) -> Any:
        """Doc."""

    body = {name: coroutine if name.endswith("_async") else sync for name in defined}
    alone = type("Agent", (agl.LitAgent,), dict(body))
    if order == "below":
        mixed = type("Agent", (TrainingContextMixin, alone), {})
    else:
        bases = (TrainingContextMixin, agl.LitAgent)
        mixed = type("Agent", bases if order == "first" else bases[::-1], dict(body))
    assert mixed().is_async() == alone().is_async()
    for name in ALL_NAMES:
        ours, theirs = getattr(mixed(), name), getattr(alone(), name)
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)
        assert (ours.__name__, ours.__doc__) == (theirs.__name__, theirs.__doc__)


# ---------------------------------------------------------------------------- pickling, forking, order


@pytest.mark.parametrize(
    "through",
    [
        lambda agent: pickle.loads(pickle.dumps(agent)),
        lambda agent: cloudpickle.loads(cloudpickle.dumps(agent)),
        copy.copy,
        copy.deepcopy,
    ],
    ids=["pickle", "cloudpickle", "copy", "deepcopy"],
)
def test_copies(through: Any) -> None:
    """A pickled or copied agent works as the original does."""
    agent = Sync()
    agent.note = "kept"  # type: ignore[attr-defined]
    twin = through(agent)
    assert twin.note == "kept"
    run(twin, 2)
    assert expected(2) == SEEN
    assert pickle.loads(pickle.dumps(agent.rollout)).__name__ == "rollout"


def test_class_pickled_by_value() -> None:
    """A class of the user's script, which cloudpickle sends by value, works on the other side."""

    class Local(TrainingContextMixin, agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return float(self.training_context.global_step or 0)

    sent = cloudpickle.dumps(Local())
    code = f"""
import asyncio, sys
from ray import cloudpickle
from tests.host.rollouts import run_v1, stamp
agent = cloudpickle.loads({sent!r})
done, _ = asyncio.run(run_v1(agent, [stamp(9)]))
assert done[0].status == "succeeded", done
"""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def _child(agent: Any, queue: Any) -> None:
    SEEN.clear()
    run(agent, 7)
    queue.put(list(SEEN))


def test_fork() -> None:
    """An agent forked into a runner, as strategy ``cs`` does, knows its context there."""
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    process = fork.Process(target=_child, args=(Sync(), queue))
    process.start()
    assert queue.get(timeout=60) == expected(7)
    process.join(30)


def test_another_base_hides_the_mixin() -> None:
    """A base that hides what the mixin gives is refused, with the order that works."""

    class Hides(agl.LitAgent[Any]):
        step_dir = "mine"

    with pytest.raises(agl_meta.ConfigurationError, match="Hides stands before .*'step_dir'"):
        type("Agent", (Hides, TrainingContextMixin), {})
    assert type("Agent", (TrainingContextMixin, Hides), {})


def test_a_base_that_does_not_pass_on() -> None:
    """Where a base's __init_subclass__ keeps the mixin from working, the first use says so."""

    class Selfish(agl.LitAgent[Any]):
        def __init_subclass__(cls) -> None:
            pass

    class Agent(Selfish, TrainingContextMixin):
        pass

    with pytest.raises(agl_meta.ConfigurationError, match=r"Put agl_meta.TrainingContextMixin first"):
        _ = Agent().training_context


# --------------------------------------------------------------------------------- decorated agents


@agl.rollout
def decorated(task: Any, llm: agl.LLM) -> float:
    saw(current_training_context())
    return 1.0


@agl.llm_rollout
async def decorated_async(task: Any, llm: agl.LLM, rollout: Any) -> float:
    await asyncio.sleep(0)
    assert current_training_context() == TrainingContext.from_rollout(rollout)
    saw(current_training_context())
    return 1.0


@pytest.mark.parametrize("agent", [decorated, decorated_async], ids=["sync", "async"])
@pytest.mark.parametrize("runners", [1, 10])
def test_decorated_agents(agent: Any, runners: int) -> None:
    """With the hook, a decorated function knows its context, and none is left behind."""
    hook = agl_meta.TrainingContextHook()
    assert agl.Trainer(hooks=hook, n_runners=1).hooks == (hook,)
    done = run(agent, *range(10), runners=runners, hooks=[hook])
    assert {rollout.status for rollout in done} == {"succeeded"}
    assert sorted(SEEN) == expected(*range(10))


def test_decorated_without_the_hook() -> None:
    """Without the hook there is an error that names it, never another rollout's values."""
    done = run(decorated, 1)
    assert done[0].status == "failed"
    with pytest.raises(agl_meta.NotInRolloutError, match="TrainingContextHook"):
        current_training_context()


class Looks(agl.Hook):
    """Stands before and behind ours, and tells what is current outside of a rollout."""

    async def on_rollout_start(self, **_: Any) -> None:
        SEEN.append(("start", current()))

    async def on_rollout_end(self, **_: Any) -> None:
        SEEN.append(("end", current()))


def current() -> Any:
    try:
        return current_training_context().rollout_id
    except agl_meta.AglMetaError as error:
        return type(error)


@agl.rollout
def asks(task: Any, llm: agl.LLM) -> float:
    SEEN.append(current())
    return 1.0


@pytest.mark.parametrize(
    ("metadata", "inside"),
    [(stamp(1), "own"), (None, "own"), (stamp(1, schema=99), agl_meta.StampError)],
    ids=["stamped", "unstamped", "unreadable"],
)
@pytest.mark.filterwarnings("ignore::agl_meta.UnstampedRolloutWarning")
def test_hook_leaves_nothing_behind(metadata: Any, inside: Any) -> None:
    """Whatever a rollout's stamp is like, what runs behind it sees neither its values nor its error."""
    hook = agl_meta.TrainingContextHook()
    done = run_hooked(asks, [metadata, metadata], [Looks(), hook, Looks()])
    outside = agl_meta.NotInRolloutError
    expected = []
    for rollout in done:
        own = rollout.rollout_id if inside == "own" else inside
        expected += [("start", outside), ("start", own), own, ("end", own), ("end", outside)]
    assert expected == SEEN


def run_hooked(agent: Any, metadata: list[Any], hooks: list[Any]) -> list[Any]:
    done, _ = asyncio.run(run_v1(agent, metadata, hooks=hooks))
    return list(done)


@pytest.mark.parametrize("inner", [stamp(2), stamp(2, schema=99)], ids=["readable", "unreadable"])
@pytest.mark.parametrize("outer", [stamp(1), stamp(1, schema=99)], ids=["readable", "unreadable"])
def test_hook_of_a_rollout_inside_another(outer: Any, inner: Any) -> None:
    """A runner that runs inside a rollout, in its task, leaves the outer one's context as it was."""
    hook = agl_meta.TrainingContextHook()

    @agl.rollout
    async def starts_another(task: Any, llm: agl.LLM) -> float:
        SEEN.append(current())
        await run_v1(asks, [inner, inner], hooks=[hook])
        SEEN.append(current())
        return 1.0

    (done,) = run_hooked(starts_another, [outer], [hook])
    assert done.status == "succeeded"
    assert len(SEEN) == 4
    seen = agl_meta.StampError if outer["agl_meta"]["schema"] == 99 else done.rollout_id
    assert SEEN[0] == SEEN[3] == seen
    assert done.rollout_id not in SEEN[1:3]


def test_hook_out_of_step() -> None:
    """An end without a start changes nothing; one of an outer rollout leaves the inner one, too."""
    hook: Any = agl_meta.TrainingContextHook()
    outer, inner, other = (
        agl.AttemptedRollout(
            rollout_id=name,
            input={},
            start_time=0.0,
            metadata=stamp(1),
            attempt=agl.Attempt(rollout_id=name, attempt_id="a", sequence_id=1, start_time=0.0),
        )
        for name in ("outer", "inner", "other")
    )

    async def main() -> list[Any]:
        seen = []
        steps = [
            ("start", outer),
            ("end", other),
            ("start", inner),
            ("end", other),
            ("end", outer),
            ("end", inner),
        ]
        for what, rollout in steps:
            method = hook.on_rollout_start if what == "start" else hook.on_rollout_end
            more = {} if what == "start" else {"spans": []}
            await method(agent=None, runner=None, rollout=rollout, **more)
            seen.append(current())
        return seen

    none = agl_meta.NotInRolloutError
    assert asyncio.run(main()) == ["outer", "outer", "inner", "inner", none, none]


def test_hook_and_mixin() -> None:
    """With both, each rollout sees its own, and nothing is left behind it."""

    class Mixed(TrainingContextMixin, agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            SEEN.append(current())
            return 1.0

    metadata = [stamp(1), stamp(1, schema=99), stamp(2)]
    done = run_hooked(Mixed(), metadata, [agl_meta.TrainingContextHook(), Looks()])
    expected = []
    for rollout, unreadable in zip(done, (False, True, False), strict=True):
        own = agl_meta.StampError if unreadable else rollout.rollout_id
        expected += [("start", own), own, ("end", agl_meta.NotInRolloutError)]
    assert expected == SEEN
