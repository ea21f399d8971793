"""The share of an evaluation's wall time that recording it takes, in a dry run.

    python benchmarks/recording_share.py

A whole training as a user starts it, through Ray, with two runners; 200 rollouts with two short turns each
that save 16 KB. Counted is what the trainer's process does at the end of the evaluation: decoding, joining,
checking, writing, fsync. Left out is what saving costs in the runners (benchmarks/save.py). The model is a
stand-in that answers at once, so that the share with a real one is smaller.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import agentlightning as agl
from openai import OpenAI
from side_by_side import machine

import agl_meta

SAMPLES = 200


class Agent(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    """Two turns, and a conversation of 16 KB to save."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"].with_attempted_rollout(rollout)
        client = OpenAI(base_url=llm.endpoint, api_key="none")
        for turn in range(2):
            question = [{"role": "user", "content": f"{task['question']} {turn}"}]
            client.chat.completions.create(model=llm.model, messages=question)
        messages = [{"role": "user", "content": f"{n} " + "lorem ipsum dolor " * 27} for n in range(30)]
        self.save_prediction({"messages": messages})
        return 1.0


class Clock(agl_meta.Callback):
    """Wall time of each evaluation, up to the moment at which it has been recorded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = 0.0

    def on_validation_start(self, event: Any) -> None:
        self.began = time.perf_counter()

    def on_validation_end(self, event: Any) -> None:
        wall = time.perf_counter() - self.began
        took = event.summary["recording_seconds"]
        with self.path.open("a") as file:
            file.write(
                f"step {event.global_step}: {len(event.rows)} rollouts in {wall:.1f} s, "
                f"recorded in {took * 1e3:.0f} ms: {took / wall:.2%}\n"
            )


def config(folder: Path) -> dict[str, Any]:
    return {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 2, "max_prompt_length": 512, "max_response_length": 64},
        "actor_rollout_ref": {
            "model": {"path": "no/such-model"},
            "rollout": {"name": "vllm", "n": 2, "log_prob_micro_batch_size_per_gpu": 1},
            "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 1, "use_kl_loss": False},
            "ref": {"log_prob_micro_batch_size_per_gpu": 1},
        },
        "trainer": {
            "total_epochs": 1,
            "test_freq": 1,
            "save_freq": -1,
            "logger": ["console"],
            "default_local_dir": str(folder / "checkpoints"),
        },
    }


def main() -> None:
    logging.disable(logging.INFO)
    folder = Path(tempfile.mkdtemp())
    algorithm = agl_meta.VERL(
        config(folder), output_dir=folder / "out", callbacks=[Clock(folder / "clock")], dry_run=True
    )
    samples = [{"question": f"Which of {n} and {n + 1}?"} for n in range(SAMPLES)]
    agl.Trainer(algorithm=algorithm, n_runners=2).fit(Agent(), samples[:2], val_dataset=samples)
    print(machine())
    print((folder / "clock").read_text())


if __name__ == "__main__":
    main()
