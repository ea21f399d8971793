"""What the options cost: ``durability="fsync"`` in saving, ``compression="zstd"`` in assembling.

    python benchmarks/options.py

Records of 16 KB on a local file system; how long ``fsync`` takes is the disk's own. Assembled is a pass of
10,000 rollouts, as in ``assemble.py``; its content is one text over and over, which compresses as no real one
does, so each message is made of words drawn at random instead.
"""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from assemble import ABOUT, ROLLOUTS, metadata
from save import rollout
from side_by_side import machine, ratio, take_turns

import agl_meta
from agl_meta.assembly import Queued, Result
from agl_meta.context import training_context_of
from agl_meta.recorder import PassRecorder
from agl_meta.rows import Turn

RECORDS = 200
ROUNDS = 5
WORDS = [f"{a}{b}{c}" for a in "bdfklmnprst" for b in "aeiou" for c in ("", "n", "rt", "sh", "lling", "ment")]


def text(n: int) -> str:
    words = random.Random(n).choices(WORDS, k=3_500)
    return " ".join(words)


def save(root: str, durability: str) -> None:
    Path(root).mkdir(exist_ok=True)
    stamped = rollout(1, root)
    stamped.metadata["agl_meta"]["durability"] = durability
    value = {"answer": text(1)}
    with training_context_of(stamped):
        for _ in range(RECORDS):
            assert agl_meta.save_prediction(value) is not None


def assemble(folder: Path, queued: list[Any], results: Any, is_compressed: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "shards").mkdir(parents=True)
    recorder = PassRecorder(folder, ABOUT, is_compressed=is_compressed)
    recorder.add(queued, results)
    assert recorder.close(ROLLOUTS, {})["verdict"] == "complete"
    recorder.discard()


def read(folder: Path) -> None:
    assert sum(1 for _ in agl_meta.read_rows(folder, strict=True)) == ROLLOUTS


def main() -> None:
    print(machine())
    root = Path(tempfile.mkdtemp())
    try:
        ways = {each: functools.partial(save, str(root / each), each) for each in ("process", "fsync")}
        seconds = take_turns(ways, ROUNDS)
        for name, values in seconds.items():
            print(
                f"durability={name}: {min(values) / RECORDS * 1e6:.0f} µs a record, "
                f"{ratio(seconds, name, 'process'):.1f} times"
            )
        queued = [Queued(rollout_id=f"r{n}", metadata=metadata(n), input={"n": n}) for n in range(ROLLOUTS)]
        results = {
            f"r{n}": [
                Result(
                    status="succeeded",
                    turns=[Turn(prompt="?", response=text(n), response_tokens=9)],
                    reward=1.0,
                    reward_used=1.0,
                    attempt_number=1,
                )
            ]
            for n in range(ROLLOUTS)
        }
        folders = {name: root / name / "global_step_1" / "val" for name in ("plain", "zstd")}
        for what, uses in {
            "assembling": {
                name: functools.partial(assemble, folder, queued, results, name == "zstd")
                for name, folder in folders.items()
            },
            "reading": {name: functools.partial(read, root / name) for name in folders},
        }.items():
            seconds = take_turns(uses, ROUNDS)
            for name, values in seconds.items():
                each = min(values) / ROLLOUTS * 1e6
                print(f"{what}, {name}: {each:.0f} µs a row, {ratio(seconds, name, 'plain'):.2f} times")
        sizes = {name: max(f.stat().st_size for f in each.iterdir()) for name, each in folders.items()}
        print(f"size: {sizes['plain'] / 1e6:.0f} MB, compressed {sizes['zstd'] / 1e6:.0f} MB")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
