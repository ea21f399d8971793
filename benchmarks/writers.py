"""Many writers at once: processes that save 16 KB records, beside processes that only write the same bytes.

    python benchmarks/writers.py

Every process has a file of its own in both ways, so that nothing but the disk and the cores is shared. Given
are the records a second of all processes together.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
from save import record, rollout
from side_by_side import machine

import agl_meta
from agl_meta.context import training_context_of

RECORDS = 32_000
"""Of all processes together."""
ROUNDS = 2


def save(root: str, count: int) -> Iterator[None]:
    values = [record(n) for n in range(20)]
    with training_context_of(rollout(os.getpid(), root)):
        agl_meta.save_prediction("opens the shard")
        yield
        for n in range(count):
            agl_meta.save_prediction(values[n % 20])
        yield


def write(root: str, count: int) -> Iterator[None]:
    values = [record(n) for n in range(20)]
    descriptor = os.open(Path(root, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    yield
    for n in range(count):
        os.write(descriptor, orjson.dumps(values[n % 20], option=orjson.OPT_APPEND_NEWLINE))
    yield


def work(way: Callable[[str, int], Iterator[None]], root: str, count: int, barrier: Any, times: Any) -> None:
    """Run in a process: notes when it began and ended."""
    steps = way(root, count)
    next(steps)
    number = barrier.wait()
    times[2 * number] = time.monotonic()
    next(steps)
    times[2 * number + 1] = time.monotonic()


def rate(way: Callable[[str, int], Iterator[None]], writers: int) -> float:
    """Records a second of so many processes, from the first one's beginning to the last one's end."""
    root = tempfile.mkdtemp()
    fork = multiprocessing.get_context("fork")
    barrier, times = fork.Barrier(writers), fork.Array("d", 2 * writers)
    arguments = (way, root, RECORDS // writers, barrier, times)
    processes = [fork.Process(target=work, args=arguments) for _ in range(writers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    shutil.rmtree(root)
    return RECORDS / (max(times[1::2]) - min(times[::2]))


def main() -> None:
    print(machine())
    for writers in (1, 2, 4, 16):
        ours, plain = 0.0, 0.0
        for _ in range(ROUNDS):
            ours = max(ours, rate(save, writers))
            plain = max(plain, rate(write, writers))
        print(
            f"{writers} writers: save_prediction {ours:.0f} records/s, "
            f"orjson.dumps and os.write {plain:.0f} records/s"
        )


if __name__ == "__main__":
    main()
