"""The parts of a dry run, each by itself; whole dry runs are in test_numbers and test_ray."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import torch
from agentlightning.algorithm.verl import VERL
from agentlightning.runner import LitAgentRunner
from agentlightning.types import RolloutLegacy
from agentlightning.verl import daemon as upstream_daemon
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoConfig
from verl import DataProto
from verl.utils.config import validate_config
from verl.utils.metric import reduce_metrics
from verl.utils.tokenizer import hf_processor, hf_tokenizer

from agl_meta.verl.dry_run import (
    fast_polling,
    init_workers,
    make_runners_poll_fast,
    prepare_config,
    restore_runner_polling,
)
from agl_meta.verl.dry_run.inference import StandInInferenceServer
from agl_meta.verl.dry_run.tokenizer import can_be_loaded, temporary_tokenizer
from agl_meta.verl.dry_run.workers import StandInWorkerGroup

ROOT = Path(__file__).parents[2]
MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
QUESTION = "Which is larger, 3 or 8?"
WORDS = {"Which", "is", "larger", "3", "or", "8"}
ENVIRONMENT = (
    "LITELLM_LOCAL_MODEL_COST_MAP",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM",
)

# The example in the docstring of agentlightning's VERL, on two nodes of eight GPUs.
GPU_USER: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 32, "max_prompt_length": 4096, "max_response_length": 2048},
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 4,
            "n": 4,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
            "name": "vllm",
            "gpu_memory_utilization": 0.6,
        },
        "actor": {
            "ppo_mini_batch_size": 32,
            "ppo_micro_batch_size_per_gpu": 4,
            "ulysses_sequence_parallel_size": 2,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {
            "log_prob_micro_batch_size_per_gpu": 8,
            "fsdp_config": {"param_offload": True},
        },
        "model": {
            "path": MODEL,
            "use_remove_padding": True,
            "enable_gradient_checkpointing": True,
        },
    },
    "trainer": {
        "n_gpus_per_node": 8,
        "val_before_train": True,
        "critic_warmup": 0,
        "logger": ["console", "wandb"],
        "project_name": "AgentLightning",
        "experiment_name": "calc_x",
        "nnodes": 2,
        "save_freq": 64,
        "test_freq": 32,
        "total_epochs": 2,
    },
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what prepare_config sets, which it must not leave to other tests either."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


# ------------------------------------------------------------------------------------------- config


def compose(overrides: dict[str, Any]) -> Any:
    return VERL(copy.deepcopy(overrides)).config


def flat(config: Any) -> dict[str, Any]:
    """Every leaf by its path, resolved."""

    def walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                yield from walk(value, f"{path}.{key}" if path else str(key))
        else:
            yield path, node

    return dict(walk(OmegaConf.to_container(config, resolve=True), ""))


def validate(config: Any) -> None:
    """What verl checks: in 0.5 when a trainer is made, later in its own main program."""
    validate_config(
        config,
        use_reference_policy=config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward,
        use_critic=config.algorithm.adv_estimator == "gae",
    )


def test_config_of_a_gpu_user() -> None:
    """Only what a CPU needs is changed; all else, so batch sizes and frequencies, stays."""
    config = compose(GPU_USER)
    before = flat(config)
    prepare_config(config)
    after = flat(config)
    assert after.keys() == before.keys()
    model = after["actor_rollout_ref.model.path"]
    # The reward model's and the critic's paths follow the actor's in verl's own config.
    changed = {path: value for path, value in after.items() if before[path] not in (value, MODEL)}
    assert changed == {
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.device": "cpu",
        "trainer.logger": ["console"],
        "trainer.default_local_dir": "checkpoints/AgentLightning/calc_x-dry-run",
        "data.dataloader_num_workers": 0,
        "data.max_prompt_length": 4 * 4096,
        "actor_rollout_ref.rollout.prompt_length": 4 * 4096,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size": 1,
        "agentlightning.trace_aggregator.trajectory_max_prompt_length": 4 * 2048,
    }
    assert {after[path] for path, value in before.items() if value == MODEL} == {model}
    assert can_be_loaded(model)
    validate(config)


def test_config_of_many_parts() -> None:
    """Critic, reference, reward model, Megatron: verl's validation, which refused, accepts."""
    overrides = copy.deepcopy(GPU_USER)
    overrides["algorithm"] = {"adv_estimator": "gae", "use_kl_in_reward": True}
    overrides["data"]["val_batch_size"] = 64
    overrides["actor_rollout_ref"]["actor"].update(
        strategy="megatron", use_kl_loss=True, ppo_micro_batch_size_per_gpu=None
    )
    overrides["actor_rollout_ref"]["ref"].update(log_prob_micro_batch_size_per_gpu=None)
    overrides["actor_rollout_ref"]["rollout"].update(
        mode="sync",
        data_parallel_size=2,
        expert_parallel_size=8,
        log_prob_micro_batch_size_per_gpu=None,
    )
    overrides["critic"] = {"strategy": "megatron", "ulysses_sequence_parallel_size": 2}
    overrides["reward_model"] = {"enable": True, "strategy": "megatron"}
    config = compose(overrides)
    with pytest.raises(Exception, match=r"megatron|micro_batch_size"):
        validate(compose(overrides))
    prepare_config(config)
    validate(config)
    assert {config.actor_rollout_ref.actor.strategy, config.critic.strategy} == {"fsdp"}
    assert {config.actor_rollout_ref.ref.strategy, config.reward_model.strategy} == {"fsdp"}
    assert can_be_loaded(config.critic.model.path)
    assert config.data.val_batch_size is None
    assert config.actor_rollout_ref.rollout.mode == "async"
    assert config.actor_rollout_ref.rollout.expert_parallel_size == 1


def test_no_micro_batch_size_for_what_is_not_used() -> None:
    """A config that verl accepts gets none."""
    config = compose(GPU_USER)
    prepare_config(config)
    assert config.critic.ppo_micro_batch_size_per_gpu is None
    assert config.reward_model.micro_batch_size_per_gpu is None


def test_second_time_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the config nor the log."""
    config = compose({"ray_kwargs": {"ray_init": {"num_cpus": 10_000}}})
    prepare_config(config)
    once = OmegaConf.to_yaml(config)
    assert len(caplog.records) == 1
    prepare_config(config)
    assert OmegaConf.to_yaml(config) == once
    assert len(caplog.records) == 1


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    """One message: what was changed from what to what, and what a real training lacks."""
    overrides = copy.deepcopy(GPU_USER)
    del overrides["actor_rollout_ref"]["actor"]["ppo_micro_batch_size_per_gpu"]
    prepare_config(compose(overrides))
    (record,) = caplog.records
    changed, _, added = record.getMessage().partition("DRY RUN: added")
    assert "DRY RUN" in changed
    assert "trainer.logger: ['console', 'wandb'] -> ['console']" in changed
    assert f"actor_rollout_ref.model.path: {MODEL!r} -> " in changed
    assert "trainer.nnodes: 2 -> 1" in changed
    assert "val_batch_size" not in changed  # was None
    assert "actor.ppo_micro_batch_size_per_gpu: None -> 1" in added
    assert "wandb" not in added


@pytest.mark.parametrize(("given", "expected"), [(None, None), (0, 1), (1, 1), (10_000, os.cpu_count())])
@pytest.mark.parametrize("section", ["ray_kwargs", None], ids=["verl-0.6", "verl-0.5"])
def test_ray_cpus(given: int | None, expected: int | None, section: str | None) -> None:
    """The trainer's actor fits, and Ray starts no more processes than there are CPUs."""
    ray_init = {"ray_init": {"num_cpus": given}}
    config = OmegaConf.create({section: ray_init} if section else ray_init)
    prepare_config(config)
    assert (config[section] if section else config).ray_init.num_cpus == expected


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"trainer": None, "data": 3, "critic": [1], "actor_rollout_ref": "${nowhere}"},
        {"trainer": {"default_local_dir": "${trainer.nothing}/x", "nnodes": "???"}},
        {"trainer": {"default_local_dir": None}, "actor_rollout_ref": {"model": {"path": None}}},
    ],
    ids=["empty", "other-types", "unresolvable", "none"],
)
def test_unusual_config(content: dict[str, Any]) -> None:
    """No config makes it raise, and sections that are not there are not made up."""
    config = OmegaConf.create(content)
    prepare_config(config)
    assert config.keys() == content.keys()


def test_readonly_config() -> None:
    """A config that was closed is changed all the same, and is closed afterwards."""
    config = OmegaConf.create({"trainer": {"nnodes": 4}})
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config, True)
    prepare_config(config)
    assert (config.trainer.nnodes, config.trainer.device) == (1, "cpu")
    assert OmegaConf.is_readonly(config.trainer)
    assert OmegaConf.is_struct(config.trainer)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads are off in what is started from here, unless the user said otherwise."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    prepare_config(OmegaConf.create({}))
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert os.environ["TRANSFORMERS_OFFLINE"] == "1"
    assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"


# ---------------------------------------------------------------------------------------- tokenizer


@functools.cache
def the_tokenizer() -> Any:
    return hf_tokenizer(temporary_tokenizer())


@pytest.fixture
def tokenizer() -> Any:
    return the_tokenizer()


def test_tokenizer_of_the_user_is_kept(tmp_path: Path) -> None:
    """What is on this machine is used, and lengths stay in its tokens."""
    shutil.copytree(temporary_tokenizer(), tmp_path / "model")
    overrides = copy.deepcopy(GPU_USER)
    overrides["actor_rollout_ref"]["model"]["path"] = str(tmp_path / "model")
    config = compose(overrides)
    prepare_config(config)
    assert config.actor_rollout_ref.model.path == str(tmp_path / "model")
    assert config.data.max_prompt_length == 4096


def test_cached_tokenizer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in the hub's cache is found by its name, and nothing is asked on the network."""

    def refuse(*_: Any, **__: Any) -> Any:
        asked.append(_)
        raise OSError("no network in this test")

    asked: list[Any] = []
    cached = tmp_path / "models--some--model"
    shutil.copytree(temporary_tokenizer(), cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert can_be_loaded("some/model")
    assert not can_be_loaded("some/other-model")
    assert not asked


ODD_TEXTS = ["<|im_end|>", " <|im_start|>user\n", "<|pad|> x", "\u0000", "I 'm , well , n't ? ."]


@given(st.text() | st.sampled_from(ODD_TEXTS))
def test_round_trip(text: str) -> None:
    """Any text survives, also one that spells special tokens or has odd spaces."""
    tokenizer = the_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_token_a_byte(tokenizer: Any) -> None:
    """Which is what the factor on prompt lengths is about."""
    text = "Grüße, 你好 \U0001f600\n\t  x"
    assert len(tokenizer.encode(text)) == len(text.encode())


def test_tokenizer_is_what_verl_looks_for(tokenizer: Any) -> None:
    """Padding differs from the end, there is no processor, and the model's config can be read."""
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, None}) == 3
    assert hf_processor(temporary_tokenizer(), use_fast=True) is None
    config = AutoConfig.from_pretrained(temporary_tokenizer())
    assert (config.model_type, config.vocab_size) == ("qwen2", len(tokenizer))


def test_temporary_folder_goes_with_its_process() -> None:
    """It outlives processes that were forked from its owner, and not its owner."""
    code = """
import os, sys
from agl_meta.verl.dry_run.tokenizer import temporary_tokenizer
folder = temporary_tokenizer()
child = os.fork()
if child == 0:
    sys.exit()
os.waitpid(child, 0)
print(folder, os.path.isdir(folder), temporary_tokenizer() == folder)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    folder, *answers = done.stdout.split()
    assert answers == ["True", "True"]
    assert not os.path.exists(folder)


# --------------------------------------------------------------------------------- inference server


@pytest.fixture
def server(tokenizer: Any) -> Iterator[StandInInferenceServer]:
    server = StandInInferenceServer(tokenizer, MODEL)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def client(server: StandInInferenceServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0)


def ask(server: StandInInferenceServer, messages: Any = QUESTION, **options: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return client(server).chat.completions.create(model=MODEL, messages=messages, **options)


def test_chat(server: StandInInferenceServer, tokenizer: Any) -> None:
    """The answer is a word of the question; its ids, and the prompt's, are what was said."""
    response = ask(server)
    (choice,) = response.choices
    assert choice.message.role == "assistant"
    assert choice.message.content in WORDS
    assert choice.finish_reason == "stop"
    assert response.model == MODEL
    assert tokenizer.decode(choice.token_ids) == choice.message.content + tokenizer.eos_token
    assert response.response_token_ids == [choice.token_ids]
    assert tokenizer.decode(response.prompt_token_ids) == (
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    usage = response.usage
    assert usage.prompt_tokens == len(response.prompt_token_ids)
    assert usage.completion_tokens == len(choice.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_turns_continue_each_other(server: StandInInferenceServer) -> None:
    """A second turn's prompt begins with the first turn, as trajectory aggregation needs it."""
    messages = [{"role": "user", "content": QUESTION}]
    first = ask(server, messages)
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    second = ask(server, [*messages, {"role": "user", "content": "Sure?"}])
    said = first.prompt_token_ids + first.choices[0].token_ids
    assert second.prompt_token_ids[: len(said)] == said


def test_stream(server: StandInInferenceServer, tokenizer: Any) -> None:
    """A stream says what a whole response says."""
    chunks = list(ask(server, stream=True, n=2))
    for index in (0, 1):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        text = "".join(part.delta.content or "" for part in parts)
        ids = [id for part in parts for id in getattr(part, "token_ids", None) or ()]
        assert text in WORDS
        assert tokenizer.decode(ids) == text + tokenizer.eos_token
        assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
    assert QUESTION in tokenizer.decode(chunks[0].prompt_token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("include_usage", [False, True])
def test_usage_of_a_stream(server: StandInInferenceServer, include_usage: bool) -> None:
    """A stream gives the usage if it is asked for."""
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "stream_options": {"include_usage": include_usage},
    }
    # Not by openai's client: a tracer that an earlier test has started makes that ask in any case.
    url = f"http://{server.address}/v1/chat/completions"
    body = requests.post(url, json=request, timeout=30).text
    assert body.endswith("data: [DONE]\n\n")
    assert ('"usage"' in body) == include_usage


@pytest.mark.parametrize(
    ("prompt", "count"),
    [(QUESTION, 1), ([QUESTION, QUESTION], 2), ([104, 105], 1), ([[104, 105], [104]], 2)],
    ids=["text", "texts", "ids", "lists-of-ids"],
)
def test_text_completion(server: StandInInferenceServer, tokenizer: Any, prompt: Any, count: int) -> None:
    """Prompts in all of the protocol's forms, each with its choices."""
    response = client(server).completions.create(model=MODEL, prompt=prompt, n=2)
    assert [choice.index for choice in response.choices] == list(range(2 * count))
    for choice in response.choices:
        assert choice.text
        assert choice.text in tokenizer.decode(choice.prompt_token_ids)
        assert tokenizer.decode(choice.token_ids) == choice.text + tokenizer.eos_token


def test_streamed_text_completion(server: StandInInferenceServer, tokenizer: Any) -> None:
    """As for chats."""
    chunks = client(server).completions.create(model=MODEL, prompt=QUESTION, stream=True)
    (first, end) = [choice for chunk in chunks for choice in chunk.choices]
    assert tokenizer.decode(first.token_ids) == first.text + tokenizer.eos_token
    assert (end.text, end.finish_reason) == ("", "stop")


def test_same_requests_same_answers(tokenizer: Any) -> None:
    """Repeats of a question differ; a second server, as of a second training, repeats them all."""
    runs = []
    for _ in range(2):
        server = StandInInferenceServer(tokenizer)
        server.start()
        try:
            runs.append([ask(server).choices[0].message.content for _ in range(12)])
        finally:
            server.stop()
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 2


def test_many_at_once(server: StandInInferenceServer, tokenizer: Any) -> None:
    """Concurrent repeats get, together, the answers that they would get one after the other."""
    count = 64
    barrier = threading.Barrier(count)

    def one(_: int) -> str:
        barrier.wait(60)
        return str(ask(server).choices[0].message.content)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(one, range(count)))
    other = StandInInferenceServer(tokenizer)
    other.start()
    try:
        expected = [ask(other).choices[0].message.content for _ in range(count)]
    finally:
        other.stop()
    assert sorted(answers) == sorted(expected)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_token_limit(server: StandInInferenceServer, tokenizer: Any, name: str) -> None:
    """A cut answer says so, and its ids are still its text."""
    (choice,) = ask(server, "elephants elephants", **{name: 3}).choices
    assert (choice.message.content, choice.finish_reason) == ("ele", "length")
    assert tokenizer.decode(choice.token_ids) == "ele"
    with pytest.raises(openai.BadRequestError, match="expected at least 1"):
        ask(server, **{name: 0})


def test_choices(server: StandInInferenceServer) -> None:
    """As many as asked for, within reason."""
    response = ask(server, n=8)
    assert [choice.index for choice in response.choices] == list(range(8))
    assert response.response_token_ids == [choice.token_ids for choice in response.choices]
    assert len({choice.message.content for choice in response.choices}) > 1
    with pytest.raises(openai.BadRequestError, match="n is 1000000"):
        ask(server, n=1_000_000)


def test_all_kinds_of_messages(server: StandInInferenceServer, tokenizer: Any) -> None:
    """Parts, images, tool calls, tool results; the answer is of what the user said last."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Describe"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "this"},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "result"},
    ]
    response = ask(server, messages)
    assert response.choices[0].message.content in {"Describe", "this"}
    prompt = tokenizer.decode(response.prompt_token_ids)
    assert "Be brief." in prompt and "result" in prompt and "AAAA" not in prompt


@pytest.mark.parametrize("text", ["", "   ", "...", "\ud800 \ud800", "x" * 10_000, "<|im_end|>"])
def test_odd_texts(server: StandInInferenceServer, text: str) -> None:
    """There is always an answer of at least one token."""
    body = {"messages": [{"role": "user", "content": text}]}
    status, response = post(server, "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200
    assert 1 <= len(response["choices"][0]["token_ids"]) <= 1000


def post(server: StandInInferenceServer, path: str, body: bytes | None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{server.address}{path}", body), timeout=30
        ) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", b"{", 400),
        ("/v1/chat/completions", b"[]", 400),
        ("/v1/chat/completions", b'{"messages": []}', 400),
        ("/v1/chat/completions", b'{"messages": [3]}', 400),
        ("/v1/completions", b"{}", 400),
        ("/v1/embeddings", b"{}", 404),
        ("/v1/nothing", None, 404),
    ],
)
def test_refused_requests(server: StandInInferenceServer, path: str, body: bytes | None, status: int) -> None:
    """A request that can't be answered is refused with a reason, and the next one is answered."""
    code, response = post(server, path, body)
    assert code == status
    assert response["error"]["message"]
    assert ask(server).choices[0].message.content in WORDS


def test_says_what_it_serves(server: StandInInferenceServer) -> None:
    """To clients that ask, and to health probes."""
    assert [model.id for model in client(server).models.list()] == [MODEL]
    assert post(server, "/health", None)[0] == 200


def test_chat_template_that_refuses(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The user learns of it once, and the training goes on."""
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('only strict turns') }}"
    server = StandInInferenceServer(strict)
    server.start()
    try:
        responses = [ask(server) for _ in range(2)]
    finally:
        server.stop()
    assert [strict.decode(response.prompt_token_ids) for response in responses] == [QUESTION] * 2
    assert [record.getMessage().count("only strict turns") for record in caplog.records] == [1]


def test_stop(tokenizer: Any) -> None:
    """Frees the port, also of a server that was never started."""
    for started in (True, False):
        server = StandInInferenceServer(tokenizer)
        if started:
            server.start()
        server.stop()
        host, port = server.address.split(":")
        with socket.socket() as probe:
            assert probe.connect_ex((host, int(port))) != 0


def test_through_the_real_llm_proxy() -> None:
    """In a process of its own: what agentlightning's proxy makes of the answers, and its spans."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.host.test_dry_run_parts"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers["texts"]) == 2  # one of them streamed
    assert set(answers["texts"]) <= WORDS
    assert answers["prompts"] == 2 * [f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"]
    assert answers["responses"] == [f"{text}<|im_end|>" for text in answers["texts"]]


def ask_through_the_real_llm_proxy() -> dict[str, Any]:
    """As upstream's daemon sets it up in v1; what came back, and what the adapter finds in spans."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    from agentlightning.adapter import LlmProxyTraceToTriplet
    from agentlightning.llm_proxy import LLMProxy
    from agentlightning.store.client_server import LightningStoreServer
    from agentlightning.store.memory import InMemoryLightningStore

    from tests.host.training import free_port

    model = temporary_tokenizer()
    tokenizer = hf_tokenizer(model)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def wait(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    server = StandInInferenceServer(tokenizer, model)
    server.start()
    store = LightningStoreServer(InMemoryLightningStore(thread_safe=True), host="127.0.0.1", port=free_port())
    proxy = LLMProxy(store=store, host="127.0.0.1", port=free_port(), model_list=[], launch_mode="mp")
    try:
        wait(store.start())
        backend = {"model": f"hosted_vllm/{model}", "api_base": f"http://{server.address}/v1/"}
        proxy.update_model_list([{"model_name": model, "litellm_params": backend}])
        wait(proxy.restart())
        rollout = wait(store.start_rollout(input={}))
        llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
        chat = openai.OpenAI(base_url=llm.endpoint, api_key="none", max_retries=0).chat
        messages: Any = [{"role": "user", "content": QUESTION}]
        whole = chat.completions.create(model=llm.model, messages=messages)
        stream = chat.completions.create(model=llm.model, messages=messages, stream=True)
        parts = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
        texts = [whole.choices[0].message.content, "".join(parts)]
        triplets: list[Any] = []
        for _ in range(100):  # spans arrive after the answer
            triplets = LlmProxyTraceToTriplet().adapt(wait(store.query_spans(rollout.rollout_id)))
            if len(triplets) == len(texts):
                break
            threading.Event().wait(0.1)
    finally:
        wait(proxy.stop())
        wait(store.stop())
        server.stop()
    return {
        "texts": texts,
        "prompts": [tokenizer.decode(triplet.prompt["token_ids"]) for triplet in triplets],
        "responses": [tokenizer.decode(triplet.response["token_ids"]) for triplet in triplets],
    }


# ------------------------------------------------------------------------------------------ workers


@pytest.fixture
def batch() -> DataProto:
    return DataProto.from_dict(
        tensors={"responses": torch.zeros((3, 5), dtype=torch.long), "x": torch.zeros((3, 9))}
    )


def test_per_token_results(batch: DataProto) -> None:
    """One number for each token of each response, which joins the batch as verl joins it."""
    group = StandInWorkerGroup()
    for method, names in {
        "compute_log_prob": ["entropys", "old_log_probs"],
        "compute_ref_log_prob": ["ref_log_prob"],
        "compute_values": ["values"],
        "compute_rm_score": ["rm_scores"],
    }.items():
        result = getattr(group, method)(batch)
        assert sorted(result.batch.keys()) == names
        for name in names:
            assert result.batch[name].shape == (3, 5)
            assert result.batch[name].dtype == torch.float32
        batch = batch.union(result)
    assert torch.equal(batch.batch["old_log_probs"], batch.batch["ref_log_prob"])


def test_updates(batch: DataProto) -> None:
    """Metrics are named after the worker, and are what verl can reduce."""
    group = StandInWorkerGroup()
    actor = reduce_metrics(group.update_actor(batch).meta_info["metrics"])
    critic = reduce_metrics(group.update_critic(batch).meta_info["metrics"])
    assert actor["actor/pg_loss"] == 0
    assert critic["critic/vf_loss"] == 0
    assert set(actor.values()) | set(critic.values()) == {0.0}


def test_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says that it holds no weights, and is read as verl reads it."""
    group = StandInWorkerGroup()
    folder = tmp_path / "global_step_3" / "actor"
    group.save_checkpoint(str(folder), None, 3, max_ckpt_to_keep=1)
    (file,) = folder.iterdir()
    assert json.loads(file.read_text()) == {
        "global_step": 3,
        "weights": "none: written in a dry run",
    }
    group.load_checkpoint(None)
    group.load_checkpoint(str(folder), del_local_after_load=True)
    assert file.exists()
    assert not caplog.records


def test_real_checkpoint_survives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also if verl is told to delete what it loaded."""
    weights = tmp_path / "model_world_size_8_rank_0.pt"
    weights.write_bytes(b"weights")
    StandInWorkerGroup().load_checkpoint(str(tmp_path), del_local_after_load=True)
    assert weights.read_bytes() == b"weights"
    assert str(tmp_path) in caplog.text
    assert "not loaded" in caplog.text


@pytest.mark.parametrize("everything", [False, True])
def test_init_workers(tokenizer: Any, everything: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A trainer gets all that upstream's uses, a server that answers, and a word about it."""
    trainer = types.SimpleNamespace(
        tokenizer=tokenizer,
        config=OmegaConf.create({"actor_rollout_ref": {"model": {"path": MODEL}}}),
        use_critic=everything,
        use_rm=everything,
    )
    init_workers(trainer)
    manager = trainer.async_rollout_manager
    try:
        assert "DRY RUN" in caplog.text
        assert trainer.actor_rollout_wg.world_size == 1
        assert trainer.ref_policy_wg is not None
        assert hasattr(trainer, "critic_wg") == everything
        assert (trainer.rm_wg is not None) == everything
        assert trainer.async_rollout_mode is True
        manager.wake_up()
        manager.sleep()
        (address,) = manager.server_addresses
        assert address == manager.server.address
        assert [model.id for model in client(manager.server).models.list()] == [MODEL]
    finally:
        manager.server.stop()


# ------------------------------------------------------------------------------------------ polling


class Clock:
    """Stands for ``asyncio`` in a module: writes down how long somebody wants to sleep."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.run_coroutine_threadsafe = asyncio.run_coroutine_threadsafe

    async def sleep(self, delay: float, result: Any = None) -> Any:
        self.asked.append(delay)
        return result


COPIED = """
class CopiedDaemon:
    async def _async_run_until_finished(self, verbose=True):
        await asyncio.sleep(5)
        return await asyncio.sleep(0.01, "result")
"""


def copied_daemon() -> tuple[Any, Clock, dict[str, Any]]:
    """An instance of a daemon in a module of the user's, with a clock for its asyncio."""
    clock = Clock()
    names: dict[str, Any] = {"asyncio": clock, "__name__": "users_module"}
    exec(COPIED, names)
    return names["CopiedDaemon"](), clock, names


def test_fast_polling_of_a_copied_daemon() -> None:
    """Long pauses are limited, short ones and results are not touched, and all is put back."""
    daemon, clock, names = copied_daemon()
    with fast_polling(daemon, 0.02):
        assert names["asyncio"] is not clock
        assert names["asyncio"].run_coroutine_threadsafe is asyncio.run_coroutine_threadsafe
        assert asyncio.run(daemon._async_run_until_finished()) == "result"
    assert clock.asked == [0.02, 0.01]
    assert names["asyncio"] is clock


def test_fast_polling_of_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's own method, in which 5 s is a literal, sleeps less while it is on."""

    class Daemon(upstream_daemon.AgentModeDaemon):
        def __init__(self) -> None:
            self.mode = "v0"
            self._completed_rollouts_v0 = {}
            self._task_id_to_original_sample = {"a": {}}
            self._total_tasks_queued = 1
            self.server = self

        async def retrieve_completed_rollouts(self) -> list[RolloutLegacy]:
            return [RolloutLegacy(rollout_id="a", final_reward=1.0, triplets=[])]

    clock = Clock()
    monkeypatch.setattr(upstream_daemon, "asyncio", clock)
    asyncio.run(Daemon()._async_run_until_finished())
    with fast_polling(Daemon()):
        asyncio.run(Daemon()._async_run_until_finished())
    assert clock.asked == [5, 0.05]
    assert upstream_daemon.asyncio is clock


def test_fast_polling_of_an_override() -> None:
    """An override in a second module that calls the first one's method: both are limited."""
    daemon, clock, names = copied_daemon()
    other = Clock()
    more: dict[str, Any] = {"asyncio": other, "Base": type(daemon), "__name__": "more"}
    exec(
        "class Override(Base):\n"
        "    async def _async_run_until_finished(self, verbose=True):\n"
        "        await asyncio.sleep(7)\n"
        "        await super()._async_run_until_finished(verbose)\n",
        more,
    )
    override = more["Override"]()
    with fast_polling(override, 0.02):
        asyncio.run(override._async_run_until_finished())
    assert (other.asked, clock.asked) == ([0.02], [0.02, 0.01])
    assert (more["asyncio"], names["asyncio"]) == (other, clock)


def test_fast_polling_ends_with_an_exception() -> None:
    """As it ends without one."""
    daemon, clock, names = copied_daemon()
    with pytest.raises(KeyError), fast_polling(daemon):
        raise KeyError
    assert names["asyncio"] is clock


def test_fast_polling_within_itself() -> None:
    """Uses that nest, and uses that overlap as those of two threads do, leave nothing behind."""
    daemon, clock, names = copied_daemon()
    with fast_polling(daemon, 0.5):
        with fast_polling(daemon, 0.3):
            asyncio.run(daemon._async_run_until_finished())
        asyncio.run(daemon._async_run_until_finished())
    assert clock.asked == [0.3, 0.01, 0.5, 0.01]
    assert names["asyncio"] is clock
    clock.asked.clear()

    first, second = fast_polling(daemon, 0.5), fast_polling(daemon, 0.3)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    asyncio.run(daemon._async_run_until_finished())
    assert clock.asked == [0.3, 0.01]
    second.__exit__(None, None, None)
    assert names["asyncio"] is clock


def test_fast_polling_of_a_daemon_without_asyncio() -> None:
    """One that sleeps in another way is left as it is."""

    class Daemon:
        _async_run_until_finished = len

    with fast_polling(Daemon()):
        pass
    with fast_polling(object()):
        pass


@pytest.fixture
def runner_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("agentlightning.runner.agent.asyncio", clock)
    restore_runner_polling()  # another test may have made runners fast
    try:
        yield clock
    finally:
        restore_runner_polling()


def runner(**intervals: float) -> Any:
    tracer: Any = None  # not used while it pauses
    return LitAgentRunner(tracer, **intervals)


def test_runners_poll_fast(runner_clock: Clock) -> None:
    """Also a runner that was made before; its pause never exceeds the limit and half of it again."""
    made_before = runner()
    asyncio.run(made_before._sleep_until_next_poll())
    make_runners_poll_fast(0.1)
    for one in (made_before, runner()):
        asyncio.run(one._sleep_until_next_poll())
    before, *after = runner_clock.asked
    assert before > 1
    assert all(0.05 <= pause <= 0.15 for pause in after)
    assert len(after) == 2


def test_patient_runners_are_left_alone(runner_clock: Clock) -> None:
    """A pause that is shorter already stays as it is."""
    make_runners_poll_fast(0.1)
    quick = runner(poll_interval=0.03, interval_jitter=0.0)
    asyncio.run(quick._sleep_until_next_poll())
    assert runner_clock.asked == [0.03]


def test_restoring_runners(runner_clock: Clock) -> None:
    """However often it was asked for, once is enough to take it back."""
    original = LitAgentRunner._sleep_until_next_poll
    make_runners_poll_fast()
    fast = LitAgentRunner._sleep_until_next_poll
    make_runners_poll_fast()
    assert LitAgentRunner._sleep_until_next_poll is fast is not original
    restore_runner_polling()
    assert LitAgentRunner._sleep_until_next_poll is original
    restore_runner_polling()
    assert LitAgentRunner._sleep_until_next_poll is original


if __name__ == "__main__":
    print(json.dumps(ask_through_the_real_llm_proxy()))
