"""``python -m agl_meta.verl``: takes what ``python -m agentlightning.verl`` takes, and a node more.

The node is ``agl_meta``, with the settings of :class:`agl_meta.verl.VERL`::

    python -m agl_meta.verl data.train_files=train.parquet … agl_meta.output_dir=runs/sql
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import hydra
from agentlightning.verl.entrypoint import run_ppo

from agl_meta.ports import check_v0_port
from agl_meta.verl.algorithm import check_callbacks, settle_config
from agl_meta.verl.daemon import TrainingContextDaemon
from agl_meta.verl.settings import NODE
from agl_meta.verl.trainer import TrainingContextTrainer
from agl_meta.verl.versions import check_versions


def main(arguments: list[str] | None = None) -> None:
    """Train on the config's ``train_files`` in v0 mode, with the training context.

    Args:
        arguments: hydra's, as on the command line; ``None`` for the command line itself.
    """
    given = sys.argv[1:] if arguments is None else arguments
    # hydra takes a name that the config lacks only with a plus before it. A config of our own around
    # upstream's can't be: hydra allows a search path, which upstream's has, in the outermost one only.
    sys.argv[1:] = [f"++{text}" if text.startswith(f"{NODE}.") else text for text in given]
    _main()


@hydra.main(  # type: ignore[untyped-decorator]
    config_path="pkg://agentlightning/verl", config_name="config", version_base=None
)
def _main(config: Any) -> None:
    check_versions()
    settle_config(config)
    paths = (config.get(NODE) or {}).get("callbacks") or ()
    callbacks = [hydra.utils.get_object(path)() for path in paths]
    check_callbacks(callbacks)
    check_v0_port(config.agentlightning.port)
    run_ppo(
        config,
        train_dataset=None,
        val_dataset=None,
        store=None,
        llm_proxy=None,
        adapter=None,
        trainer_cls=functools.partial(TrainingContextTrainer, callbacks=callbacks),
        daemon_cls=TrainingContextDaemon,
    )
