"""The other side of ``python -m agl_meta.verl``: an agent that connects to its v0 server.

python -m tests.host.v0_client PORT
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import agentlightning as agl
import requests
from agentlightning.client import AgentLightningClient

import agl_meta
from tests.host.training import ask


class Agent(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        self.save_prediction(task["qid"])
        return float(len(ask(resources["main_llm"], task["question"])) % 2)


class Note(agl_meta.Callback):
    def on_fit_end(self, event: agl_meta.FitEvent) -> None:
        Path(os.environ["NOTE"]).write_text("on_fit_end")


def main(port: str) -> None:
    endpoint = f"http://127.0.0.1:{port}"
    while True:  # until the training has started its server; the test ends this process
        try:
            requests.get(endpoint, timeout=1)
            break
        except requests.ConnectionError:
            time.sleep(0.2)
    trainer = agl.Trainer(n_workers=1)
    trainer.fit_v0(Agent(), AgentLightningClient(endpoint, poll_interval=0.1))


if __name__ == "__main__":
    main(sys.argv[1])
