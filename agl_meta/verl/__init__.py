"""The trainer's side, for agentlightning's verl integration; mirrors ``agentlightning.verl``.

With the thin agent side this is the only part of agl_meta that imports agentlightning or verl.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

# Loaded on use: the mixins alone need neither torch nor verl to be imported.
_MODULES = {
    "VERL": "algorithm",
    "TrainingContextDaemon": "daemon",
    "TrainingContextDaemonMixin": "daemon_mixin",
    "TrainingContextTrainer": "trainer",
    "TrainingContextTrainerMixin": "trainer_mixin",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
