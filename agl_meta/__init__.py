"""agl_meta: where in training an agent stands, and what it predicted there.

For people who train LLM agents with agentlightning and verl. Importing this package imports neither
of them; names that need them are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_meta.agent import TrainingContextMixin
from agl_meta.callbacks import Callback, FitEvent, PassEvent
from agl_meta.context import TrainingContext, current_training_context
from agl_meta.emitting import collect_emitted, emit_prediction
from agl_meta.errors import (
    AglMetaError,
    AglMetaWarning,
    ConfigurationError,
    DamagedRecordWarning,
    NotInRolloutError,
    OutputDirError,
    RecordError,
    StampError,
    UnstampedRolloutWarning,
)
from agl_meta.lazy import loaded_on_use
from agl_meta.reading import read_pass, read_predictions, read_rows, read_summary
from agl_meta.records import Prediction
from agl_meta.rows import Row, Rows, Turn
from agl_meta.saving import current_rollout_dir, current_step_dir, save_prediction

if TYPE_CHECKING:
    from agl_meta.hook import TrainingContextHook
    from agl_meta.verl.algorithm import VERL

__version__ = "0.1.0"

__all__ = [
    "VERL",
    "AglMetaError",
    "AglMetaWarning",
    "Callback",
    "ConfigurationError",
    "DamagedRecordWarning",
    "FitEvent",
    "NotInRolloutError",
    "OutputDirError",
    "PassEvent",
    "Prediction",
    "RecordError",
    "Row",
    "Rows",
    "StampError",
    "TrainingContext",
    "TrainingContextHook",
    "TrainingContextMixin",
    "Turn",
    "UnstampedRolloutWarning",
    "collect_emitted",
    "current_rollout_dir",
    "current_step_dir",
    "current_training_context",
    "emit_prediction",
    "read_pass",
    "read_predictions",
    "read_rows",
    "read_summary",
    "save_prediction",
]

# Each of these imports agentlightning, and VERL also verl, torch and ray.
__getattr__ = loaded_on_use(
    __name__, {"VERL": "agl_meta.verl.algorithm", "TrainingContextHook": "agl_meta.hook"}
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
