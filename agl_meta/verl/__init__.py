"""The trainer's side, for agentlightning's verl integration; mirrors ``agentlightning.verl``.

With the thin agent side this is the only part of agl_meta that imports agentlightning or verl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_meta.lazy import loaded_on_use

if TYPE_CHECKING:
    from agl_meta.verl.algorithm import VERL
    from agl_meta.verl.daemon import TrainingContextDaemon
    from agl_meta.verl.daemon_mixin import TrainingContextDaemonMixin
    from agl_meta.verl.trainer import TrainingContextTrainer
    from agl_meta.verl.trainer_mixin import TrainingContextTrainerMixin

__all__ = [
    "VERL",
    "TrainingContextDaemon",
    "TrainingContextDaemonMixin",
    "TrainingContextTrainer",
    "TrainingContextTrainerMixin",
]

# The mixins alone need neither torch nor verl to be imported.
__getattr__ = loaded_on_use(
    __name__,
    {
        "VERL": "agl_meta.verl.algorithm",
        "TrainingContextDaemon": "agl_meta.verl.daemon",
        "TrainingContextDaemonMixin": "agl_meta.verl.daemon_mixin",
        "TrainingContextTrainer": "agl_meta.verl.trainer",
        "TrainingContextTrainerMixin": "agl_meta.verl.trainer_mixin",
    },
)
