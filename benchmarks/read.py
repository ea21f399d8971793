"""Reading a million saved records in a stream, beside ``pandas.read_json(lines=True)``.

    python benchmarks/read.py

Records of 460 bytes in ten shards, as ten runner processes leave them. ``read_predictions`` gives one object
a record and goes on; pandas builds one table of all and gives what stands in the lines, without joining or
checking. Each in a process of its own; peak memory above what it held before, Linux only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from assemble import metadata, peak
from side_by_side import machine

import agl_meta
from agl_meta.context import TrainingContext
from agl_meta.records import PREDICTION, record_line

RECORDS = 1_000_000
SHARDS = 10
ROUNDS = 2


def write(root: Path) -> None:
    folder = root / "global_step_1" / "val" / "shards"
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        with (folder / f"host.{shard}.x.jsonl").open("wb") as file:
            for n in range(shard, RECORDS, SHARDS):
                rollout = SimpleNamespace(rollout_id=f"ro-{n}", metadata=metadata(n))
                context = TrainingContext.from_rollout(rollout)
                value = {"answer": f"text {n}", "reward": n / 7, "steps": [1, 2, 3]}
                file.write(record_line(context, PREDICTION, "prediction", value))


def ours(root: Path) -> None:
    count = sum(1 for _ in agl_meta.read_predictions(root))
    assert count == RECORDS


def pandas(root: Path) -> None:
    import pandas

    shards = sorted((root / "global_step_1" / "val" / "shards").iterdir())
    table = pandas.concat(pandas.read_json(path, lines=True) for path in shards)
    assert len(table) == RECORDS


def main() -> None:
    if "--child" in sys.argv:
        way = {"agl_meta": ours, "pandas": pandas}[sys.argv[2]]
        began = time.perf_counter()
        peak(lambda: way(Path(sys.argv[3])))
        print(time.perf_counter() - began, file=sys.stderr)
        return
    print(machine())
    root = Path(tempfile.mkdtemp())
    try:
        write(root)
        best = {}
        for name in ("agl_meta", "pandas") * ROUNDS:
            child = [sys.executable, __file__, "--child", name, str(root)]
            done = subprocess.run(child, check=True, stderr=subprocess.PIPE, text=True)
            memory, seconds = map(float, done.stderr.split()[-2:])
            best[name] = min(best.get(name, (seconds, memory)), (seconds, memory))
        for name, (seconds, memory) in best.items():
            factor = seconds / best["agl_meta"][0]
            print(
                f"{name}: {RECORDS / seconds:.0f} records/s, {factor:.1f} times agl_meta's time, "
                f"peak {memory:.0f} MB more"
            )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
