"""Runs the real ``fit()`` in this process: what upstream's ``TaskRunner.run`` does, minus Ray.

Real are trainer, dataloader, checkpoints, GRPO, daemon, store or server, runner, tracer, adapter. The
worker group and the inference server are the dry run's stand-ins. In v1 :class:`DirectEndpoint` takes
the place of the LLM proxy, which costs seconds to start and has no part in what is tested here; the
tests that go through Ray use the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("AGENTOPS_LOG_LEVEL", "ERROR")

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.client import AgentLightningClient
from agentlightning.runner import LegacyAgentRunner, LitAgentRunner
from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.agentops import AgentOpsTracer
from agentlightning.verl.dataset import LoadedDataset
from omegaconf import OmegaConf
from openai import OpenAI
from verl.trainer.main_ppo import create_rl_sampler
from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tokenizer import hf_processor, hf_tokenizer

import agl_meta

STEPS_PER_EPOCH = 3
REPEATS = 2
TRAIN = [{"qid": f"t{i}", "question": f"Which of {i} and {i + 1}?"} for i in range(6)]
VAL = [{"qid": f"v{i}", "question": f"Which of {i} and {i + 5}?"} for i in range(2)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def overrides(folder: Path, **trainer: Any) -> dict[str, Any]:
    """A user's config: 2 epochs of 3 steps, an evaluation every second step, checkpoints each step."""
    return {
        "agentlightning": {"port": free_port()},
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 2, "max_prompt_length": 256, "max_response_length": 64},
        "actor_rollout_ref": {
            "model": {"path": "no/such-model"},
            "rollout": {"n": REPEATS, "name": "vllm", "log_prob_micro_batch_size_per_gpu": 1},
            "actor": {
                "ppo_mini_batch_size": 2,
                "ppo_micro_batch_size_per_gpu": 1,
                "use_kl_loss": False,
            },
            "ref": {"log_prob_micro_batch_size_per_gpu": 1},
        },
        "trainer": {
            "n_gpus_per_node": 1,
            "nnodes": 1,
            "logger": ["console"],
            "project_name": "tests",
            "experiment_name": "tests",
            "total_epochs": 2,
            "test_freq": 2,
            "save_freq": 1,
            "default_local_dir": str(folder / "checkpoints"),
            **trainer,
        },
        "ray_kwargs": {"ray_init": {"num_cpus": 2}},
    }


class DirectEndpoint:
    """Stands for the LLM proxy: agents talk to the inference server directly."""

    def __init__(self) -> None:
        self._models: list[dict[str, Any]] = []
        self._running = False

    def update_model_list(self, models: list[dict[str, Any]]) -> None:
        self._models = models

    async def restart(self) -> None:
        self._running = True

    def is_running(self) -> bool:
        return self._running

    def as_resource(self, sampling_parameters: Any = None, **_: Any) -> agl.LLM:
        model = self._models[0]
        return agl.LLM(
            endpoint=model["litellm_params"]["api_base"],
            model=model["model_name"],
            sampling_parameters=sampling_parameters or {},
        )


class SavingAgent(agl_meta.TrainingContextMixin, agl.LitAgent[Any]):
    """One turn; saves the four numbers that stand flat in the metadata, beside its context."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        answer = ask(resources["main_llm"], task["question"])
        metadata = rollout.metadata if self.is_v1(rollout) else rollout.task.metadata
        flat = {key: metadata[key] for key in ("epoch", "global_step", "batch_index", "is_train")}
        self.save_prediction({"qid": task["qid"], "answer": answer, "flat": flat})
        return float(len(answer) % 2)

    def is_v1(self, rollout: Any) -> bool:
        return isinstance(rollout, agl.Rollout)


def ask(llm: agl.LLM, question: str) -> str:
    client = OpenAI(base_url=llm.endpoint, api_key="none", max_retries=0)
    answer = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": question}])
    return answer.choices[0].message.content or ""


def compose(folder: Path, output_dir: Path | None, **trainer: Any) -> Any:
    """The whole config, as ``agl_meta.VERL`` makes it for a dry run."""
    algorithm = agl_meta.VERL(overrides(folder, **trainer), output_dir=output_dir, dry_run=True)
    OmegaConf.resolve(algorithm.config)
    return algorithm.config


def make_trainer(
    config: Any, store: Any, *, trainer_cls: Any, daemon_cls: Any, val: Any = VAL, **more: Any
) -> Any:
    """What ``TaskRunner.run`` does before ``fit()``."""
    path = config.actor_rollout_ref.model.path
    tokenizer = hf_tokenizer(path)
    train, val = LoadedDataset(TRAIN), LoadedDataset(val)
    trainer = trainer_cls(
        config=config,
        tokenizer=tokenizer,
        processor=hf_processor(path, use_fast=True),
        role_worker_mapping={Role.ActorRollout: object},
        resource_pool_manager=ResourcePoolManager({"pool": [1]}, {Role.ActorRollout: "pool"}),
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
        val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1),
        train_dataset=train,
        val_dataset=val,
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, train),
        store=store,
        llm_proxy=None if store is None else DirectEndpoint(),
        daemon_cls=daemon_cls,
        **{"adapter": None if store is None else TracerTraceToTriplet(), **more},
    )
    trainer.init_workers()
    return trainer


class _Stopped(BaseException):
    """Ends the loop of a legacy runner, which upstream ends by killing its process."""


class _StoppableClient(AgentLightningClient):
    stopped = False

    def poll_next_task(self) -> Any:
        while not self.stopped:
            task = self._request_json(f"{self.endpoint}/task")
            if task and task.get("is_available"):
                return agl.Task.model_validate(task["task"])
            threading.Event().wait(self.poll_interval)
        raise _Stopped


@contextlib.contextmanager
def v1_runner(store: Any, agent: Any, number: int = 0) -> Iterator[None]:
    """The real v1 runner, in a thread."""
    stop = threading.Event()

    async def iterate() -> None:
        runner: Any = LitAgentRunner(AgentOpsTracer(), poll_interval=0.05, interval_jitter=0.01)
        runner.init(agent=agent)
        runner.init_worker(number, store)
        try:
            await runner.iter(event=stop)
        finally:
            runner.teardown_worker(number)
            runner.teardown()

    thread = threading.Thread(target=lambda: asyncio.run(iterate()), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


@contextlib.contextmanager
def v0_runner(port: int, agent: Any, number: int = 0) -> Iterator[None]:
    """The real legacy runner, in a thread."""
    client = _StoppableClient(f"http://127.0.0.1:{port}", poll_interval=0.05)

    def iterate() -> None:
        tracer = AgentOpsTracer()
        tracer.init()
        tracer.init_worker(number)
        runner = LegacyAgentRunner(
            agent=agent, client=client, tracer=tracer, triplet_exporter=TracerTraceToTriplet()
        )
        try:
            with contextlib.suppress(_Stopped):
                runner.iter()
        finally:
            tracer.teardown_worker(number)

    thread = threading.Thread(target=iterate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        client.stopped = True
        thread.join(30)
    assert not thread.is_alive()


def work(mode: str, address: Any, agent: Any, number: int) -> None:
    """Runs a real runner in this process until it is killed."""
    if mode == "v0":
        with v0_runner(address, agent, number):
            threading.Event().wait()
    else:
        with v1_runner(LightningStoreClient(address), agent, number):
            threading.Event().wait()


@contextlib.contextmanager
def runner_processes(mode: str, address: Any, agent: Any, runners: int) -> Iterator[None]:
    """Runners in processes of their own, as in a real training: upstream's tracer belongs to a process."""
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=work, args=(mode, address, agent, number), daemon=True)
        for number in range(runners)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def store_server(store: Any) -> Iterator[Any]:
    """The real store server, for runners in other processes; to be used as the store here."""
    server = LightningStoreServer(store, "127.0.0.1", free_port())
    asyncio.run(server.start())
    try:
        yield server
    finally:
        asyncio.run(server.stop())


def fit(
    mode: str,
    folder: Path,
    output_dir: Path | None,
    *,
    agent: Any = None,
    trainer_cls: Any = None,
    daemon_cls: Any = None,
    config: Any = None,
    trainer: dict[str, Any] | None = None,
    store: Any = None,
    runners: int | None = None,
    **more: Any,
) -> Any:
    """One ``fit()`` in mode ``"v0"`` or ``"v1"``; gives the trainer back.

    With a number of ``runners`` they are processes, else one is a thread. Further arguments go to the
    trainer, ``val`` becomes its validation set.
    """
    from agl_meta.verl import TrainingContextDaemon, TrainingContextTrainer

    config = config if config is not None else compose(folder, output_dir, **(trainer or {}))
    if mode == "v1":
        store = store or InMemoryLightningStore(thread_safe=True)
    built = make_trainer(
        config,
        store,
        trainer_cls=trainer_cls or TrainingContextTrainer,
        daemon_cls=daemon_cls or TrainingContextDaemon,
        **more,
    )
    agent = agent or SavingAgent()
    try:
        with contextlib.ExitStack() as running:
            if runners is not None:
                address = config.agentlightning.port if mode == "v0" else store.endpoint
                running.enter_context(runner_processes(mode, address, agent, runners))
            elif mode == "v1":
                running.enter_context(v1_runner(store, agent))
            else:
                running.enter_context(v0_runner(config.agentlightning.port, agent))
            built.fit()
    finally:
        daemon = getattr(built, "__dict__", {}).get("_agl_daemon")
        if mode == "v0" and daemon is not None:
            daemon.server._uvicorn_server.should_exit = True
    return built
