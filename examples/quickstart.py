"""Where is my agent in training, and what did it predict there? A whole training on a laptop.

The agent takes two turns: it answers a question, looks at its answer, and answers again. It is trained
for two epochs with agentlightning and verl, and evaluated before, during and at the end. What each
validation rollout produced is then found in a folder of its step.

It is a dry run: everything is real except the GPU worker group and the inference server. Their CPU
stand-ins learn nothing and answer with words of the question, so look at the folders, not at the rewards.
Without ``dry_run=True``, and with your model in the config, the same script trains on GPUs.
"""

from __future__ import annotations

import os
import pathlib
import time

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look-up on the network
os.environ.setdefault("AGENTOPS_LOG_LEVEL", "CRITICAL")  # nor a line for each rollout

import agentlightning as agl
from openai import OpenAI

import agl_meta

QUESTIONS = [
    {"question": f"Which is larger, {a} or {b}?", "answer": str(max(a, b))}
    for a, b in [(3, 8), (21, 12), (5, 50), (44, 4), (17, 71), (90, 9), (2, 1), (64, 46)]
]
TRAIN, VAL = QUESTIONS[:6], QUESTIONS[6:]


class TwoTurnAgent(agl_meta.TrainingContextMixin, agl.LitAgent):
    """Answers, reconsiders, and saves the conversation of each validation rollout."""

    def rollout(self, task, resources, rollout):
        llm = resources["main_llm"]
        if isinstance(llm, agl.ProxyLLM):
            llm = llm.with_attempted_rollout(rollout)
        client = OpenAI(base_url=llm.endpoint, api_key="none")
        messages = []
        for turn in (task["question"], f"Are you sure? Again: {task['question']}"):
            messages.append({"role": "user", "content": turn})
            reply = client.chat.completions.create(model=llm.model, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        answer = messages[-1]["content"]

        where = self.training_context
        print(f"epoch {where.epoch}, step {where.global_step}, {where.split}: {answer!r}")
        if not where.is_train:
            self.save_prediction({"messages": messages, "answer": answer, "gold": task["answer"]})
        return float(task["answer"] in answer)


def config():
    """The overrides that you would give to agentlightning's VERL."""
    return {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 2, "max_prompt_length": 512, "max_response_length": 64},
        "actor_rollout_ref": {
            "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
            "rollout": {"name": "vllm", "n": 2, "log_prob_micro_batch_size_per_gpu": 1},
            "actor": {
                "ppo_mini_batch_size": 2,
                "ppo_micro_batch_size_per_gpu": 1,
                "use_kl_loss": False,
            },
            "ref": {"log_prob_micro_batch_size_per_gpu": 1},
        },
        "trainer": {"total_epochs": 2, "test_freq": 3, "save_freq": -1, "logger": ["console"]},
    }


def show(output_dir):
    """Print the folders, the verdict on each evaluation, and what came of one sample."""
    print(f"\n{output_dir}/")
    for path in sorted(output_dir.rglob("*"), key=lambda p: [_number(part) for part in p.parts]):
        print("    " * len(path.relative_to(output_dir).parts) + path.name)
    print("\nThe first sample in each evaluation:")
    for row in agl_meta.read_rows(output_dir, split="val"):
        place = row.context
        if place.sample_index == 0:
            summary = agl_meta.read_summary(output_dir / place.pass_path)
            print(
                f"  step {place.global_step} ({place.reason}, epoch {place.epoch}):",
                f"{summary['succeeded']} of {summary['expected']} succeeded, {summary['verdict']},",
                f"mean reward {summary['reward']['mean']:.2f}; asked {row.input['question']!r},",
                f"answered {row.output!r} in {len(row.turns)} turns, reward {row.reward}",
            )


def _number(part):
    return (0, int(part[12:]), "") if part.startswith("global_step_") else (1, 0, part)


def main():
    output_dir = pathlib.Path("runs", time.strftime("quickstart-%Y%m%d-%H%M%S"))
    algorithm = agl_meta.VERL(config(), output_dir=output_dir, dry_run=True)
    trainer = agl.Trainer(algorithm=algorithm, n_runners=2)
    trainer.fit(TwoTurnAgent(), TRAIN, val_dataset=VAL)
    show(output_dir)


if __name__ == "__main__":
    main()
