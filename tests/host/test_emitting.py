"""What is emitted travels as spans through upstream's tracers, stores and adapters."""

from __future__ import annotations

import asyncio
import datetime
import math
from pathlib import Path
from typing import Any

import agentlightning as agl
import numpy as np
import pytest
from agentlightning.adapter import TracerTraceToTriplet, TraceToMessages
from agentlightning.adapter.triplet import LlmProxyTraceToTriplet, RewardMatchPolicy
from agentlightning.emitter import emit_reward
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.agentops import AgentOpsTracer
from agentlightning.tracer.otel import OtelTracer

import agl_meta
from agl_meta.emitting import SPAN_NAME, emitted_lines
from agl_meta.faults import faults
from tests.host.rollouts import NullTracer, run_v1, stamp
from tests.host.training import ask, compose, fit, store_server

CYCLE: list[Any] = []
CYCLE.append(CYCLE)
VALUES: dict[str, Any] = {
    "nan": math.nan,
    "inf": -math.inf,
    "surrogate": "a\ud800b",
    "nul": "a\0b",
    "separators": "a\u2028b\x85c\nd",
    "bytes": b"\x00\xff",
    "big integer": 1 << 200,
    "tuple": (1, (2,)),
    "set": frozenset({1, 2}),
    "keys": {1: "a", "1": "b", None: "c"},
    "date": datetime.datetime(2026, 12, 1, tzinfo=datetime.timezone.utc),
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "function": len,
    "cycle": CYCLE,
    "our tag": {"$agl": "tuple", "v": [1]},
    "megabytes": "ä" * 3_000_000,
}


class Emits(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    """Emits each value under its name, and saves it, too, where there is a folder."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        for name, value in VALUES.items():
            assert self.emit_prediction(value, name)
        return 1.0


def run_through(tracer: Any, agent: Any, n: int = 1) -> tuple[list[Any], Any]:
    return asyncio.run(run_v1(agent, [stamp(k, is_train=False) for k in range(n)], tracer=tracer))


@pytest.fixture(params=[AgentOpsTracer, OtelTracer])
def tracer(request: pytest.FixtureRequest) -> Any:
    made = request.param()
    made.init()
    yield made
    made.teardown()


def test_any_value(tracer: Any) -> None:
    """What comes back from the store is what a saved value comes back as."""
    tracer.init_worker(0)
    try:
        (rollout,), store = run_through(tracer, Emits())
        found = asyncio.run(agl_meta.collect_emitted(store, [rollout.rollout_id]))
    finally:
        tracer.teardown_worker(0)
    assert list(found) == [rollout.rollout_id]
    emitted = {prediction.name: prediction.value for prediction in found[rollout.rollout_id]}
    assert list(emitted) == list(VALUES)
    for name in set(VALUES) - {"nan", "function", "cycle", "array"}:
        assert emitted[name] == VALUES[name], name
        assert type(emitted[name]) is type(VALUES[name]), name
    assert math.isnan(emitted["nan"])
    assert np.array_equal(emitted["array"], VALUES["array"])
    assert emitted["function"].name.endswith("len")
    assert "cycle" in emitted["cycle"][0].why
    for prediction in found[rollout.rollout_id]:
        assert prediction.context.rollout_id == rollout.rollout_id
        assert prediction.context.attempt_id is not None
        assert prediction.context.sample_key == "key-0"


def test_upstream_raises_where_this_does_not() -> None:
    """The reason for this path: upstream's emit_object takes only what json does."""
    from agentlightning.emitter import emit_object

    with pytest.raises(RuntimeError):
        emit_object({1, 2}, propagate=False)


class Talks(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    """Emits around every call and every reward."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        for turn in range(3):
            self.emit_prediction({"before": turn})
            ask(resources["main_llm"], f"{task['question']} {turn}")
            self.emit_prediction({"between": turn}, name="other")
            # To a synchronous v0 agent upstream's emitters know no tracer, and raise.
            if turn == 0 and isinstance(rollout, agl.Rollout):
                emit_reward(0.25)
            self.emit_prediction({"after": turn})
        return 2.0


@pytest.fixture(scope="module", params=["v0", "v1"])
def talked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A validation with an agent that emits, and the store it went through (v1)."""
    folder = tmp_path_factory.mktemp(f"talk-{request.param}")
    store = InMemoryLightningStore(thread_safe=True) if request.param == "v1" else None
    fit(request.param, folder, folder / "out", agent=Talks(), store=store, trainer={"val_only": True})
    return store, folder


def test_rows_hold_what_was_emitted(talked: Any) -> None:
    """In both modes, by name and in order, beside turns and rewards as ever."""
    _, folder = talked
    rows = list(agl_meta.read_rows(folder / "out"))
    assert len(rows) == 2
    for row in rows:
        assert row.predictions == {
            "prediction": [{key: turn} for turn in range(3) for key in ("before", "after")],
            "other": [{"between": turn} for turn in range(3)],
        }
        assert len(row.turns) == 3
        assert row.reward == 2.0


@pytest.mark.parametrize(
    "adapter",
    [
        TracerTraceToTriplet(reward_match=RewardMatchPolicy.FIRST_OCCURRENCE),
        TracerTraceToTriplet(reward_match=RewardMatchPolicy.FIRST_SIBLING),
        LlmProxyTraceToTriplet(),
        TraceToMessages(),
    ],
    ids=["first_occurrence", "first_sibling", "llm_proxy", "messages"],
)
def test_adapters_ignore_it(talked: Any, adapter: Any) -> None:
    """Each adapter gives the same with the emitted spans and without."""
    store, folder = talked
    if store is None:
        return  # the same spans and adapters; v0 only carries them otherwise

    async def spans_of(rollout_id: str) -> list[Any]:
        return list(await store.query_spans(rollout_id))

    for row in agl_meta.read_rows(folder / "out"):
        spans = asyncio.run(spans_of(str(row.context.rollout_id)))
        others = [span for span in spans if span.name != SPAN_NAME]
        # As the LLM proxy would name and fill them, for the adapter that takes no others.
        for number, span in enumerate(span for span in others if "chat" in span.name):
            if isinstance(adapter, LlmProxyTraceToTriplet):
                span.name = "raw_gen_ai_request"
                span.attributes["llm.hosted_vllm.prompt_token_ids"] = "[1, 2]"
                span.attributes["llm.hosted_vllm.response_token_ids"] = f"[[3, {number}]]"
        assert len(spans) == len(others) + 9
        assert len(emitted_lines(spans)) == 9
        found = adapter.adapt(spans)
        assert found == adapter.adapt(others)
        assert len(found) >= 1


def test_collected_through_the_server(talked: Any) -> None:
    """The store's HTTP client gives the same, also for many rollouts."""
    store, folder = talked
    if store is None:
        return
    ids = [str(row.context.rollout_id) for row in agl_meta.read_rows(folder / "out")]
    direct = asyncio.run(agl_meta.collect_emitted(store, ids))
    with store_server(store) as server:

        async def collect() -> Any:
            client = LightningStoreClient(server.endpoint)
            try:
                return await agl_meta.collect_emitted(client, ids, attempt_id="latest")
            finally:
                await client.close()

        assert asyncio.run(collect()) == direct
    assert {len(predictions) for predictions in direct.values()} == {9}


def test_damaged_span_is_reported(talked: Any) -> None:
    """One that can't be read is named, and the others come."""
    store, folder = talked
    if store is None:
        return
    (rollout_id, *_) = [str(row.context.rollout_id) for row in agl_meta.read_rows(folder / "out")]

    async def damage() -> Any:
        span = next(span for span in await store.query_spans(rollout_id) if span.name == SPAN_NAME)
        broken = span.model_copy(update={"span_id": "f" * 16, "attributes": {SPAN_NAME: "no record"}})
        await store.add_span(broken)
        with pytest.warns(agl_meta.DamagedRecordWarning, match=rollout_id):
            return await agl_meta.collect_emitted(store, [rollout_id])

    assert len(asyncio.run(damage())[rollout_id]) == 9


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_transport_store(mode: str, tmp_path: Path) -> None:
    """save_prediction goes the same way where runners do not see the folder; errors do, too."""

    class Saves(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            ask(resources["main_llm"], task["question"])
            assert self.save_prediction({"answer", task["qid"]}) is None
            if task["qid"] == "v1":
                raise RuntimeError("after saving")
            return 1.0

    config = compose(tmp_path, tmp_path / "out", val_only=True)
    config.agl_meta.transport = "store"
    fit(mode, tmp_path, None, agent=Saves(), config=config)
    folder = tmp_path / "out" / "global_step_0" / "val"
    assert list((folder / "shards").iterdir()) == []
    saved, raised = agl_meta.read_rows(tmp_path / "out")
    assert saved.predictions == {"prediction": [{"answer", "v0"}]}
    assert raised.status == "failed"
    assert raised.error is not None and raised.error["message"] == "after saving"
    # After an exception upstream's v0 runner posts an empty rollout, without its spans.
    expected = {} if mode == "v0" else {"prediction": [{"answer", "v1"}]}
    assert raised.predictions == expected


def test_unknown_transport_is_refused(tmp_path: Path) -> None:
    with pytest.raises(agl_meta.ConfigurationError, match=r"'carrier pigeon'; expected one of files, store"):
        agl_meta.VERL({"agl_meta": {"transport": "carrier pigeon"}}, output_dir=tmp_path)


def test_without_a_tracer() -> None:
    """Counted, and the rollout goes on."""

    class Goes(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            assert self.emit_prediction("lost") is False
            return 1.0

    before = sum(faults.counts().values())
    (rollout,), _ = run_through(NullTracer(), Goes())
    assert rollout.status == "succeeded"
    assert sum(faults.counts().values()) == before + 1


def test_outside_a_rollout() -> None:
    with pytest.raises(agl_meta.NotInRolloutError):
        agl_meta.emit_prediction(1)
    with pytest.raises(agl_meta.NotInRolloutError):
        Emits().emit_prediction(1)
