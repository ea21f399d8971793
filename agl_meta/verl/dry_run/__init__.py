"""A training without GPUs: CPU stand-ins for the worker group and the inference server.

All else of a dry run is real: Trainer, VERL, Ray actor, dataloader, checkpoints, GRPO, daemon,
store, runners, tracer, adapter, LLM proxy. The stand-ins learn nothing; they say so in the log and
in ``pass.json``. What a dry run can't tell: whether the model fits into memory, whether batch sizes
can be divided among the real number of GPUs, whether the agent copes with a real model's answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_meta.lazy import loaded_on_use

if TYPE_CHECKING:
    from agl_meta.verl.dry_run.config import prepare_config
    from agl_meta.verl.dry_run.polling import (
        fast_polling,
        make_runners_poll_fast,
        restore_runner_polling,
    )
    from agl_meta.verl.dry_run.workers import init_workers

STAND_INS: tuple[str, ...] = ("worker group", "inference server")
"""What is stood in for, as ``pass.json`` says it."""

__all__ = [
    "STAND_INS",
    "fast_polling",
    "init_workers",
    "make_runners_poll_fast",
    "prepare_config",
    "restore_runner_polling",
]

# Only init_workers needs torch and verl.
__getattr__ = loaded_on_use(
    __name__,
    {
        "fast_polling": "agl_meta.verl.dry_run.polling",
        "init_workers": "agl_meta.verl.dry_run.workers",
        "make_runners_poll_fast": "agl_meta.verl.dry_run.polling",
        "prepare_config": "agl_meta.verl.dry_run.config",
        "restore_runner_polling": "agl_meta.verl.dry_run.polling",
    },
)
