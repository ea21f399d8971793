"""verl's own switches for generations, which upstream ignores or passes on wrongly.

``trainer.validation_data_dir`` and ``trainer.rollout_data_dir`` name folders for ``<step>.jsonl`` with the
keys of verl's ``RayPPOTrainer._dump_generations``, as verl's ``scripts/rollout_viewer.py`` reads them;
``trainer.log_val_generations`` is how many evaluated samples verl's validation logger is given.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agl_meta.encoding import encode
from agl_meta.rows import Row, members
from agl_meta.storage import publish_file
from agl_meta.verdict import number


def dump_generations(folder: str | os.PathLike[str], step: int, rows: Iterable[Row]) -> Path:
    """Write one line a rollout to ``<folder>/<step>.jsonl``; gives the file.

    A further evaluation at the same step goes to ``<folder>/pass_2/<step>.jsonl`` and so on, where verl
    would overwrite the first. Raises :class:`OSError`.
    """
    temporary = Path(folder, f"{step}.{secrets.token_hex(6)}.tmp")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("xb") as file:
            file.writelines(b"{%b}\n" % members(generation(row, step), {}) for row in rows)
        number_of_pass = 1
        while True:
            part = () if number_of_pass == 1 else (f"pass_{number_of_pass}",)
            path = Path(folder, *part, f"{step}.jsonl")
            path.parent.mkdir(exist_ok=True)
            try:
                publish_file(str(temporary), str(path))
                return path
            except FileExistsError:
                number_of_pass += 1
    finally:
        temporary.unlink(missing_ok=True)


def generation(row: Row, step: int) -> dict[str, Any]:
    """verl's keys, then ours. ``score`` is what the metrics used, or null if that is no finite number."""
    return {
        "input": input_text(row),
        "output": row.output or "",
        "gts": ground_truth(row.input),
        "score": score(row),
        "step": step,
        "uid": row.context.data_id,
        "data_source": row.data_source,
        "rollout_id": row.context.rollout_id,
        "sample_key": row.context.sample_key,
        "repeat_index": row.context.repeat_index,
        "status": row.status,
        "reward": row.reward,
        "n_turns": len(row.turns),
    }


def input_text(row: Row) -> str:
    """The prompt that the output answers; of a rollout without turns its sample as JSON."""
    if row.turns and row.turns[-1].prompt is not None:
        return row.turns[-1].prompt
    return encode(row.input).decode()


def ground_truth(sample: Any) -> Any:
    """Where verl's datasets keep it: ``reward_model.ground_truth``."""
    entry = sample.get("reward_model") if isinstance(sample, Mapping) else None
    return entry.get("ground_truth") if isinstance(entry, Mapping) else None


def score(row: Row) -> float | None:
    """The reward that the metrics used, if it is a finite number."""
    value = number(row.reward_used)
    return value if math.isfinite(value) else None


def log_generations(trainer: Any, rows: Iterable[Row]) -> None:
    """Give the evaluated samples to verl's validation logger, as verl's own trainer does."""
    samples = [(input_text(row), row.output or "", score(row)) for row in rows]
    if samples:
        inputs, outputs, scores = map(list, zip(*samples, strict=True))
        trainer._maybe_log_val_generations(inputs=inputs, outputs=outputs, scores=scores)
