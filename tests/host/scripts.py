"""Runs as a script, the way a user's training does: through ``agl.Trainer``, VERL and Ray, in dry run.

    python -m tests.host.scripts MODE FOLDER

All is real but the worker group and the inference server, the LLM proxy included. v1 takes the adapter that
reads the proxy's spans, and aggregates trajectories.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.adapter.triplet import LlmProxyTraceToTriplet

import agl_meta
from tests.host.training import TRAIN, VAL, ask, free_port, overrides


class Agent(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    """Saves from its runner's process; one sample raises after it has saved."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"]
        if isinstance(llm, agl.ProxyLLM):
            llm = llm.with_attempted_rollout(rollout)
        answer = ask(llm, task["question"])
        self.save_prediction({"qid": task["qid"], "answer": answer})
        self.emit_prediction(answer, name="emitted")
        ask(llm, f"{answer} again?")
        (self.rollout_dir / "answer.txt").write_text(answer)
        if task["qid"] == "v1":
            raise RuntimeError("an agent's own failure")
        return float(len(answer) % 2)


class Watch(agl_meta.Callback):
    """Writes down what it is called for, from the trainer's process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, hook: str, **more: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"hook": hook, "pid": os.getpid(), **more}) + "\n")

    def on_fit_start(self, event: agl_meta.FitEvent) -> None:
        self.note("on_fit_start", run_id=event.run_id)

    def on_fit_end(self, event: agl_meta.FitEvent) -> None:
        self.note("on_fit_end", run_id=event.run_id)

    def on_validation_start(self, event: agl_meta.PassEvent) -> None:
        self.note("on_validation_start", step=event.global_step, reason=event.reason)

    def on_validation_end(self, event: agl_meta.PassEvent) -> dict[str, float]:
        self.note(
            "on_validation_end",
            step=event.global_step,
            reason=event.reason,
            folder=str(event.folder),
            rollouts=event.metrics["val/n_rollouts"],
            rows=[[row.input["qid"], row.status, len(row.turns)] for row in event.rows],
            verdict=(event.summary or {}).get("verdict"),
        )
        return {"val/mine": 41.5 + event.global_step}

    def on_train_batch_end(self, event: agl_meta.PassEvent) -> None:
        self.note("on_train_batch_end", step=event.global_step)
        raise RuntimeError("a callback's own failure")


def main(mode: str, folder: Path) -> None:
    config = overrides(folder, save_freq=-1)
    if mode == "v1":
        config["agentlightning"]["trace_aggregator"] = {
            "level": "trajectory",
            "trajectory_max_prompt_length": 256,
            "trajectory_max_response_length": 256,
        }
    algorithm = agl_meta.VERL(
        config,
        output_dir=folder / "out",
        callbacks=[Watch(folder / "hooks.jsonl")],
        sample_key="qid",
        record_train=True,
        dry_run=True,
    )
    if mode == "v0":
        trainer = agl.Trainer(algorithm=algorithm, n_workers=2)
        trainer.fit_v0(Agent(), TRAIN, val_data=VAL)
    else:
        trainer = agl.Trainer(
            algorithm=algorithm, n_runners=2, port=free_port(), adapter=LlmProxyTraceToTriplet()
        )
        trainer.fit(Agent(), TRAIN, val_dataset=VAL)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
