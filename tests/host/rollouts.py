"""Stamped rollouts through upstream's real runners, without a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.client import AgentLightningClient
from agentlightning.runner import LegacyAgentRunner, LitAgentRunner
from agentlightning.server import AgentLightningServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.base import Tracer

from tests.host.training import free_port

RESOURCES = {"main_llm": agl.LLM(endpoint="http://localhost", model="none")}


class NullTracer(Tracer):
    """Records nothing: many rollouts at once need no spans here."""

    @contextlib.asynccontextmanager
    async def trace_context(self, *_: Any, **__: Any) -> Any:
        yield None

    @contextlib.contextmanager
    def _trace_context_sync(self, *_: Any, **__: Any) -> Any:
        yield None

    def get_last_trace(self) -> list[Any]:
        return []

    def init(self, *_: Any, **__: Any) -> None:
        pass

    def teardown(self, *_: Any, **__: Any) -> None:
        pass

    def teardown_worker(self, *_: Any, **__: Any) -> None:
        pass


def stamp(n: int, is_train: bool = True, **entry: Any) -> dict[str, Any]:
    """Metadata as the daemon enqueues it, with numbers that tell rollout ``n`` from others."""
    return {
        "data_id": f"data-{n}",
        "is_train": is_train,
        "epoch": n % 7,
        "global_step": n,
        "batch_index": n % 5,
        "agl_meta": {
            "schema": 1,
            "reason": "train" if is_train else "periodic",
            "sample_index": n,
            "sample_key": f"key-{n}",
            "repeat_index": 0,
            "run_id": "run",
            "output_dir": None,
            "pass_path": None,
            **entry,
        },
    }


async def run_v1(
    agent: Any,
    metadata: list[Any],
    *,
    mode: str = "train",
    runners: int = 1,
    hooks: Any = None,
    tracer: Any = None,
) -> tuple[list[Any], Any]:
    """Enqueue one rollout for each metadata and run all; gives the finished rollouts and the store."""
    store = InMemoryLightningStore(thread_safe=True)
    resources = await store.add_resources(RESOURCES)
    rollouts = [
        await store.enqueue_rollout(
            input={"n": n}, mode=mode, resources_id=resources.resources_id, metadata=data
        )
        for n, data in enumerate(metadata)
    ]

    async def work(worker: int) -> None:
        runner: Any = LitAgentRunner(tracer or NullTracer(), heartbeat_interval=0)
        runner.init(agent=agent, hooks=hooks)
        runner.init_worker(worker, store)
        while (attempted := await store.dequeue_rollout()) is not None:
            await runner._step_impl(attempted)

    if runners == 1:
        await work(0)  # in the caller's task
    else:
        await asyncio.gather(*(work(n) for n in range(runners)))
    done = [await store.get_rollout_by_id(rollout.rollout_id) for rollout in rollouts]
    return done, store


@contextlib.contextmanager
def v0_server() -> Iterator[tuple[Any, Any]]:
    """A real v0 server in a thread; gives server and client."""
    port = free_port()
    server = AgentLightningServer(host="127.0.0.1", port=port)
    thread = threading.Thread(target=lambda: asyncio.run(server.run_forever()), daemon=True)
    thread.start()
    assert server.startup_event.wait(20)
    try:
        yield server, AgentLightningClient(f"http://127.0.0.1:{port}", poll_interval=0.05)
    finally:
        server._uvicorn_server.should_exit = True
        thread.join(20)


def run_v0(agent: Any, metadata: list[Any], *, mode: str = "train") -> list[Any]:
    """Queue one task for each metadata and run all with the legacy runner; gives what was posted."""
    with v0_server() as (server, client):

        async def queue() -> list[str]:
            resources_id = await server.update_resources(RESOURCES)
            return [
                await server.queue_task(sample={"n": n}, mode=mode, resources_id=resources_id, metadata=data)
                for n, data in enumerate(metadata)
            ]

        ids = asyncio.run_coroutine_threadsafe(queue(), server.loop).result(30)
        runner = LegacyAgentRunner(
            agent=agent,
            client=client,
            tracer=NullTracer(),
            triplet_exporter=TracerTraceToTriplet(),
            max_tasks=len(metadata),
        )
        if agent.is_async():
            asyncio.run(runner.iter_async())
        else:
            runner.iter()

        async def fetch() -> list[Any]:
            return [await server.get_completed_rollout(name) for name in ids]

        return asyncio.run_coroutine_threadsafe(fetch(), server.loop).result(30)
