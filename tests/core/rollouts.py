"""Objects with the attributes of upstream's rollouts, for tests that run without agentlightning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def stamp(n: int = 1, is_train: bool = False, **entry: Any) -> dict[str, Any]:
    """Metadata as the daemon enqueues it."""
    return {
        "data_id": f"data-{n}",
        "is_train": is_train,
        "epoch": 0,
        "global_step": n,
        "batch_index": 0,
        "agl_meta": {
            "schema": 1,
            "reason": "train" if is_train else "periodic",
            "sample_index": 0,
            "sample_key": "key",
            "repeat_index": 0,
            "run_id": "run",
            "output_dir": None,
            "pass_path": f"global_step_{n}/{'train' if is_train else 'val'}",
            **entry,
        },
    }


def v1(metadata: Any, rollout_id: str = "ro-1", attempt: int = 1) -> Any:
    """Like an ``AttemptedRollout``."""
    return SimpleNamespace(
        rollout_id=rollout_id,
        metadata=metadata,
        attempt=SimpleNamespace(attempt_id=f"at-{attempt}", sequence_id=attempt),
    )


def v0(metadata: Any, rollout_id: str = "ro-1") -> Any:
    """Like a ``RolloutLegacy``, whose own metadata is empty."""
    task = SimpleNamespace(rollout_id=rollout_id, metadata=metadata, num_claims=1)
    return SimpleNamespace(rollout_id=rollout_id, metadata={}, task=task)
