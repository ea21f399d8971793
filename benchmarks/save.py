"""Saving 16 KB records: ``save_prediction``, orjson alone, ``json.dump`` into a file each, verl's dump.

    python benchmarks/save.py

Then a state of 30 LangChain messages, beside ``json.dumps`` of their ``model_dump``. One process, one thread,
a local file system, without fsync in any of them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
from langchain_core.messages import AIMessage, HumanMessage
from side_by_side import machine, ratio, take_turns
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

import agl_meta
from agl_meta.context import training_context_of

RECORDS = 1_000
ROUNDS = 15


def record(n: int) -> dict[str, Any]:
    """A conversation of 30 messages, 16 KB as JSON."""
    messages = [
        {"role": ("user", "assistant")[m % 2], "content": f"{n}.{m} " + "lorem ipsum dolor " * 27}
        for m in range(30)
    ]
    return {"messages": messages, "answer": str(n), "reward": n / 7}


def rollout(n: int, root: str) -> Any:
    entry = {
        "schema": 1,
        "reason": "periodic",
        "sample_index": n,
        "sample_key": f"key-{n}",
        "repeat_index": 0,
        "run_id": "bench",
        "output_dir": root,
        "pass_path": "global_step_1/val",
    }
    numbers = {"epoch": 0, "global_step": 1, "batch_index": 0, "is_train": False}
    metadata = {"data_id": f"d{n}", **numbers, "agl_meta": entry}
    return SimpleNamespace(rollout_id=f"ro-{n}", metadata=metadata)


def main() -> None:
    print(machine())
    records = [record(n) for n in range(RECORDS)]
    print(f"{RECORDS} records of {len(json.dumps(records[0])) / 1000:.1f} KB")
    root = tempfile.mkdtemp()
    folder, dump = Path(root, "files"), Path(root, "verl")

    def save_prediction() -> None:
        for value in records:
            agl_meta.save_prediction(value)

    def json_dump() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for n, value in enumerate(records):
            with open(folder / f"{n}.json", "w") as file:
                json.dump(value, file)

    def verl_dump() -> None:
        # The same content in the columns that verl has; it writes all at once, at the end.
        texts = [json.dumps(value["messages"], ensure_ascii=False) for value in records]
        RayPPOTrainer._dump_generations(
            SimpleNamespace(global_steps=1),  # type: ignore[arg-type]
            inputs=texts,
            outputs=[value["answer"] for value in records],
            gts=[None] * RECORDS,
            scores=[value["reward"] for value in records],
            reward_extra_infos_dict={},
            dump_path=str(dump),
        )

    plain = os.open(Path(root, "plain"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def orjson_write() -> None:
        for value in records:
            os.write(plain, orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE))

    states = [{"messages": messages(n), "answer": str(n)} for n in range(RECORDS // 10)]

    def save_state() -> None:
        for state in states:
            agl_meta.save_prediction(state, name="state")

    def dump_state() -> None:
        for state in states:
            dumped = {**state, "messages": [message.model_dump() for message in state["messages"]]}
            os.write(plain, json.dumps(dumped, default=str).encode())

    ways = {
        "save_prediction": save_prediction,
        "orjson.dumps and os.write": orjson_write,
        "json.dump": json_dump,
        "verl": verl_dump,
    }
    state_ways = {"save_prediction": save_state, "json.dumps of model_dump": dump_state}
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # verl prints a line for each dump
    try:
        with training_context_of(rollout(1, root)):
            seconds = take_turns(ways, ROUNDS)
            state_seconds = take_turns(state_ways, ROUNDS)
    finally:
        os.dup2(out, 1)
        shutil.rmtree(root)
    show(seconds, RECORDS)
    print(f"{len(states)} states of 30 messages")
    show(state_seconds, len(states))


def show(seconds: dict[str, list[float]], records: int) -> None:
    for name, values in seconds.items():
        print(
            f"{name}: {min(values) / records * 1e6:.0f} µs a record, "
            f"{ratio(seconds, name, 'save_prediction'):.2f} times save_prediction"
        )


def messages(n: int) -> list[Any]:
    """A conversation of 30 messages as LangChain's objects."""
    return [
        (AIMessage if m % 2 else HumanMessage)(content=f"{n}.{m} " + "lorem ipsum dolor " * 27)
        for m in range(30)
    ]


if __name__ == "__main__":
    main()
