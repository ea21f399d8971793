"""Runs as a script: a training whose process is killed in the middle of its first evaluation.

python -m tests.host.killed MODE FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl

import agl_meta
from tests.host.training import ask, fit


class Kills(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    """Runs in the trainer's process, and ends it at the second sample."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        self.save_prediction(f"before the end: {ask(resources['main_llm'], task['question'])}")
        if task["qid"] == "v1":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0


if __name__ == "__main__":
    fit(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[2], "out"), agent=Kills())
