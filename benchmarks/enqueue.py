"""Enqueueing 20,000 tasks through the real daemon's path, with and without stamping.

    python benchmarks/enqueue.py

Real: ``AgentModeDaemon.set_up_data_and_server`` with the v1 in-memory store, and with the v0 server.
Left out: the LLM proxy (v1), which a placeholder stands for; the folder of the pass, one a batch; and
Python's garbage collector, which is off.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import agentlightning as agl
import numpy as np
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.verl.daemon import AgentModeDaemon
from side_by_side import machine, ratio, take_turns

from agl_meta.verl import TrainingContextDaemon
from agl_meta.verl.passes import Run
from agl_meta.verl.positions import Position
from agl_meta.verl.settings import Settings

TASKS = 20_000
REPEATS = 4
ROUNDS = 7


class NoProxy:
    """Stands for the LLM proxy, which has no part in enqueueing."""

    def is_running(self) -> bool:
        return True

    def as_resource(self, **_: Any) -> agl.LLM:
        return agl.LLM(endpoint="http://localhost", model="none")


def samples(count: int) -> dict[str, Any]:
    """Columns of a batch as verl gives them."""
    return {
        "question": np.array([f"What is {n} + {n}? " + "Think. " * 20 for n in range(count)], object),
        "answer": np.array([str(2 * n) for n in range(count)], object),
        "data_source": np.array(["bench"] * count, object),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def make_daemon(cls: Any, mode: str, store: Any) -> Any:
    daemon = cls(
        free_port(),
        REPEATS,
        train_information={"model": "none"},
        tokenizer=None,
        mini_batch_size=1,
        pad_token_id=0,
        mode=mode,
        store=store,
        llm_proxy=NoProxy() if mode == "v1" else None,
    )
    while mode == "v1" and daemon._internal_loop is None:
        pass
    daemon.start()
    if cls is TrainingContextDaemon:
        run = Run(Settings(), None, (), lambda is_train: False)
        place = Position(global_step=1, epoch=0, batch_index=0, is_train=True, reason="train")

        def begin(data: Any, is_train: bool, repeats: int, daemon: Any) -> Any:
            run.close_pass(daemon)
            return run.begin_batch(place, len(data["question"]), repeats, daemon)

        daemon.follow(begin)
    return daemon


def one_round(cls: Any, mode: str, data: Any, daemons: dict[Any, Any]) -> Any:
    def enqueue() -> None:
        daemons[cls, mode].set_up_data_and_server(data, [], is_train=True)

    return enqueue


def empty(daemon: Any, mode: str) -> None:
    """A new queue for each round, so that none is slowed by the tasks of the one before."""
    if mode == "v1":
        behind = getattr(daemon.store, "behind", None)
        store = InMemoryLightningStore(thread_safe=True)
        if behind is None:
            daemon.store = store
        else:
            daemon.store.behind = store
    else:
        while daemon.server._store._task_queue.qsize():
            daemon.server._store._task_queue.get_nowait()


def main() -> None:
    print(machine())
    # A full collection costs more than all that is measured, and falls into a round of the one way or the
    # other by chance.
    gc.disable()
    data = samples(TASKS // REPEATS)
    for mode in ("v1", "v0"):
        daemons = {}
        for cls in (AgentModeDaemon, TrainingContextDaemon):
            store = InMemoryLightningStore(thread_safe=True) if mode == "v1" else None
            daemons[cls, mode] = make_daemon(cls, mode, store)
        ways = {}
        for cls in (AgentModeDaemon, TrainingContextDaemon):
            enqueue = one_round(cls, mode, data, daemons)

            def way(enqueue: Any = enqueue) -> None:
                enqueue()

            ways[cls.__name__] = way
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for cls in (AgentModeDaemon, TrainingContextDaemon):
                empty(daemons[cls, mode], mode)
            for name, values in take_turns(ways, 1).items():
                seconds[name] += values
        plain, stamped = (min(values) for values in seconds.values())
        factor = ratio(seconds, "TrainingContextDaemon", "AgentModeDaemon")
        print(
            f"{mode}: {TASKS} tasks, upstream {plain:.3f} s, stamped {stamped:.3f} s, "
            f"{(stamped - plain) / TASKS * 1e6:.1f} µs a task, ratio {factor:.3f}"
        )


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    main()
