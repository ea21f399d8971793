"""Assembling a pass of 10,000 rollouts with 16 KB each, beside verl's dump of the same content.

    python benchmarks/assemble.py

Two kinds of content: "saved" is what 8 runner processes saved into shards, which is joined with a short turn
of each rollout; "turns" is the decoded text of the turns, as verl's trainer has it. verl is given text and
writes it without joining, checking or fsync. Decoding of tokens is left out on both sides. Peak memory is
that of a process of its own, above what it held before; Linux only. On a local file system. Then how
time and memory grow up to 100,000 rollouts, for which 4 GB of disk must be free.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from save import record
from side_by_side import machine, ratio, take_turns
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from agl_meta.assembly import Queued, Result
from agl_meta.context import TrainingContext
from agl_meta.recorder import PassRecorder
from agl_meta.records import PREDICTION, record_line
from agl_meta.rows import Turn
from agl_meta.storage import SHARDS
from agl_meta.verdict import COMPLETE

ROLLOUTS = 10_000
PROCESSES = 8
ROUNDS = 5
GROWTH = (10_000, 30_000, 100_000)
ABOUT = {
    "pass": "global_step_1/val",
    "run_id": "bench",
    "global_step": 1,
    "epoch": 0,
    "split": "val",
    "reason": "periodic",
}


def metadata(n: int) -> dict[str, Any]:
    entry = {
        "schema": 1,
        "reason": "periodic",
        "sample_index": n,
        "sample_key": f"key-{n}",
        "repeat_index": 0,
        "run_id": "bench",
        "output_dir": "/",
        "pass_path": "global_step_1/val",
    }
    numbers = {"epoch": 0, "global_step": 1, "batch_index": 0, "is_train": False}
    return {"data_id": f"d{n}", **numbers, "agl_meta": entry}


def write_shards(folder: Path, rollouts: int = ROLLOUTS) -> None:
    """What the runners would have saved; rollouts are spread over them as they come."""
    (folder / SHARDS).mkdir(parents=True)
    with contextlib.ExitStack() as files:
        shards = [
            files.enter_context((folder / SHARDS / f"host.{n}.x.jsonl").open("wb")) for n in range(PROCESSES)
        ]
        for n in range(rollouts):
            stamped = SimpleNamespace(rollout_id=f"ro-{n}", metadata=metadata(n))
            context = TrainingContext.from_rollout(stamped)
            shards[n * 7 % PROCESSES].write(record_line(context, PREDICTION, "prediction", record(n)))


class Ours:
    """The recorder, in folders of its own with links to the same shards."""

    def __init__(self, kind: str, shards: Path, root: Path, rollouts: int = ROLLOUTS) -> None:
        self._root = root
        self._rollouts = rollouts
        self._shards = shards if kind == "saved" else None
        self._queued = [
            Queued(rollout_id=f"ro-{n}", metadata=metadata(n), input={"question": f"What is {n}?"})
            for n in range(rollouts)
        ]
        text = [_text(n) if kind == "turns" else f"answer {n}" for n in range(rollouts)]
        self._results = {
            f"ro-{n}": [
                Result(
                    status="succeeded",
                    turns=[
                        Turn(prompt=f"What is {n}?", response=text[n], prompt_tokens=9, response_tokens=9)
                    ],
                    reward=n / 7,
                    reward_used=n / 7,
                    attempt_number=1,
                )
            ]
            for n in range(rollouts)
        }
        self._passes = 0

    def __call__(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        (self._root / SHARDS).mkdir(parents=True)
        if self._shards is not None:
            for path in self._shards.iterdir():
                os.link(path, self._root / SHARDS / path.name)
        recorder = PassRecorder(self._root, ABOUT)
        recorder.add(self._queued, self._results)
        summary = recorder.close(self._rollouts, {})
        recorder.discard()
        assert summary["verdict"] == COMPLETE and summary["unreadable"] == []


class Verls:
    """verl's ``_dump_generations``, which takes text."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._folder = folder
        self._columns: dict[str, Any] = {
            "inputs": [f"What is {n}?" for n in range(ROLLOUTS)],
            "outputs": [_text(n) for n in range(ROLLOUTS)],
            "gts": [None] * ROLLOUTS,
            "scores": [n / 7 for n in range(ROLLOUTS)],
        }

    def __call__(self) -> None:
        RayPPOTrainer._dump_generations(
            SimpleNamespace(global_steps=1),  # type: ignore[arg-type]
            **self._columns,
            reward_extra_infos_dict={},
            dump_path=str(self._folder),
        )


def _text(n: int) -> str:
    return json.dumps(record(n)["messages"], ensure_ascii=False)


def peak(way: Any) -> None:
    """Print how far a process grows, in MB, while it does this once."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    way()
    print(_status("VmHWM") - before, file=sys.stderr)


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(f"{name}:"))


def measure(kind: str, folder: Path) -> None:
    ways = {
        "agl_meta": Ours(kind, folder / SHARDS, folder / "pass"),
        "verl": Verls(kind, folder / "verl"),
    }
    seconds = take_turns(ways, ROUNDS)
    for name, values in seconds.items():
        child = [sys.executable, __file__, "--peak", kind, name, str(folder)]
        done = subprocess.run(child, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        each = min(values) / ROLLOUTS
        print(
            f"{kind}: {name} {1 / each:.0f} rows/s, {each * 1e6:.0f} µs a row, "
            f"{ratio(seconds, name, 'agl_meta'):.2f} times agl_meta, "
            f"peak {float(done.stderr.splitlines()[-1]):.0f} MB more",
            file=sys.stderr,
        )


def grow(folder: Path) -> None:
    """How time and memory grow with the number of rollouts, ten times as many of what they saved."""
    for rollouts in GROWTH:
        write_shards(folder, rollouts)
        child = [sys.executable, __file__, "--grow", str(rollouts), str(folder)]
        done = subprocess.run(child, check=True, stderr=subprocess.PIPE, text=True)
        memory, seconds = map(float, done.stderr.split()[-2:])
        print(
            f"{rollouts} rollouts: {seconds / rollouts * 1e6:.0f} µs a row, peak {memory:.0f} MB more, "
            f"{memory * 1e6 / rollouts:.0f} bytes a rollout",
            file=sys.stderr,
        )
        shutil.rmtree(folder / SHARDS)


def main() -> None:
    if "--grow" in sys.argv:
        folder = Path(sys.argv[3])
        way = Ours("saved", folder / SHARDS, folder / "pass", int(sys.argv[2]))
        began = time.perf_counter()
        peak(way)
        print(time.perf_counter() - began, file=sys.stderr)
        return
    if "--peak" in sys.argv:
        _, _, kind, name, text = sys.argv
        folder = Path(text)
        make = {
            "agl_meta": lambda: Ours(kind, folder / SHARDS, folder / "pass"),
            "verl": lambda: Verls(kind, folder / "verl"),
        }
        peak(make[name]())
        return
    print(machine(), file=sys.stderr)
    folder = Path(tempfile.mkdtemp())
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # verl prints a line for each dump
    try:
        write_shards(folder)
        for kind in ("saved", "turns"):
            measure(kind, folder)
        shutil.rmtree(folder / SHARDS)
        grow(folder)
    finally:
        os.dup2(out, 1)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
