"""Eight writers that are killed and restarted at random: every acknowledged record is read back, none twice.

    python benchmarks/soak.py --seconds 600

A record counts as acknowledged when ``save_prediction`` has returned. Records are 100 bytes to 30 KB, some
hundred a second and writer. What was being written when a writer was killed may be there or not; a line that
was cut short is reported by the reader.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from side_by_side import machine

import agl_meta
from agl_meta.context import training_context_of

WRITERS = 8


def rollout(name: str, root: str) -> Any:
    entry = {
        "schema": 1,
        "reason": "periodic",
        "sample_index": 0,
        "sample_key": "key",
        "repeat_index": 0,
        "run_id": "soak",
        "output_dir": root,
        "pass_path": "global_step_1/val",
    }
    numbers = {"epoch": 0, "global_step": 1, "batch_index": 0, "is_train": False}
    return SimpleNamespace(rollout_id=name, metadata={"data_id": "d", **numbers, "agl_meta": entry})


def write(name: str, root: str, acknowledged: str) -> None:
    """Save until killed; each record that was saved is noted in a file of its own, by one small write."""
    descriptor = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    chance = random.Random(name)
    with training_context_of(rollout(name, root)):
        for number in itertools.count():
            text = chr(chance.randrange(0x61, 0x2FFF)) * int(10 ** chance.uniform(2, 4))
            if agl_meta.save_prediction({"name": name, "number": number, "text": text}) is not None:
                os.write(descriptor, b"%d\n" % number)
            time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    seconds = parser.parse_args().seconds
    print(machine())
    root = tempfile.mkdtemp()
    (Path(root, "acknowledged")).mkdir()
    fork = multiprocessing.get_context("fork")
    names = (f"writer-{number}" for number in itertools.count())
    running: dict[str, Any] = {}
    kills = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        while len(running) < WRITERS:
            name = next(names)
            running[name] = fork.Process(target=write, args=(name, root, f"{root}/acknowledged/{name}"))
            running[name].start()
        time.sleep(random.uniform(0, 0.4))
        name = random.choice(list(running))
        process = running.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    for process in running.values():
        process.kill()
        process.join()
    report(root, kills)
    shutil.rmtree(root)


def report(root: str, kills: int) -> None:
    acknowledged = {
        (path.name, int(line))
        for path in Path(root, "acknowledged").iterdir()
        for line in path.read_bytes().split(b"\n")[:-1]
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = Counter(
            (prediction.value["name"], prediction.value["number"])
            for prediction in agl_meta.read_predictions(root)
        )
    missing = acknowledged - set(found)
    twice = [key for key, times in found.items() if times > 1]
    print(
        f"{kills} kills, {len(acknowledged)} records acknowledged, {len(found)} read back, "
        f"{len(missing)} missing, {len(twice)} twice, {len(caught)} lines cut short"
    )
    assert not missing and not twice and len(caught) <= kills + WRITERS


if __name__ == "__main__":
    main()
