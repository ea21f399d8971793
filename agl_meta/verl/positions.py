"""Where the trainer stands: a dataloader that counts, and what it is asked for at each enqueue."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

logger = logging.getLogger(__name__)

STATE_KEY = "agl_meta"
"""Our key in the dataloader's state, which verl saves as ``data.pt``; upstream alone ignores it."""

_STATE_SCHEMA = 1


@attrs.frozen(kw_only=True)
class Position:
    """A trainer's position, told to the daemon before a batch is enqueued."""

    global_step: int
    epoch: int
    batch_index: int
    is_train: bool
    reason: str


class CountingDataLoader:
    """verl's train dataloader, which also knows the position of the batch it gave last.

    Passes everything else through to the loader behind it. The position goes into the state that
    checkpoints save, so that it is right after any number of resumes: ``fit()``'s own epoch counter,
    and with it the logged ``training/epoch``, starts at 0 again after each.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.restart()

    def restart(self) -> None:
        """Count from the beginning, for a new ``fit()``."""
        self.epoch = 0
        self.batch_index = -1
        """Position in the epoch of the last batch; -1 before the first one."""
        self._continues = False
        self._foreign_state: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if not self._continues:
            self._begin_epoch()
        self._continues = False
        for batch in self._loader:
            # Restored from a checkpoint on the border, where the old epoch has no batch left.
            if self.batch_index + 1 >= len(self._loader):
                self._begin_epoch()
            self.batch_index += 1
            yield batch

    def _begin_epoch(self) -> None:
        if self.batch_index >= 0:
            self.epoch += 1
            self.batch_index = -1

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # not there yet while being unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state and the position of the last batch."""
        position = {
            "schema": _STATE_SCHEMA,
            "epoch": self.epoch,
            "batch_index": self.batch_index,
        }
        return {**self._loader.state_dict(), STATE_KEY: position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both; a state without a position is settled by :meth:`resume_at`."""
        rest = dict(state)
        position = rest.pop(STATE_KEY, None)
        self._loader.load_state_dict(rest)
        self._continues = True
        if isinstance(position, Mapping) and position.get("schema") == _STATE_SCHEMA:
            self.epoch, self.batch_index = position["epoch"], position["batch_index"]
            self._foreign_state = None
        else:
            self._foreign_state = rest

    def resume_at(self, global_step: int) -> None:
        """Take the position from the step, where the checkpoint did not hold it.

        Called after a checkpoint was looked for. Right for one batch a step, which is upstream's way;
        where the loader's own count says otherwise, that count is taken and a warning logged.
        """
        if self._continues and self._foreign_state is None:
            return
        if global_step > 0:
            self.epoch, self.batch_index = divmod(global_step - 1, len(self._loader))
            self._settle_with(self._foreign_state)
        self._foreign_state = None

    def _settle_with(self, state: Mapping[str, Any] | None) -> None:
        given = None if state is None else _batches_given(state)
        if given is not None and given != self.batch_index + 1:
            logger.warning(
                "The checkpoint was written without agl_meta, and its dataloader had given %d batches "
                "of the epoch where the step says %d. batch_index follows the dataloader; epoch is "
                "%d, counted from the step.",
                given,
                self.batch_index + 1,
                self.epoch,
            )
            self.batch_index = given - 1


def _batches_given(state: Mapping[str, Any]) -> int | None:
    """torchdata's own count of batches in the epoch, in a StatefulDataLoader's state."""
    given = state.get("_num_yielded")  # dataloader_num_workers=0
    if given is None and "_snapshot" in state:
        given = state["_snapshot"].get("_snapshot_step", 0) + state.get("_steps_since_snapshot", 0)
    return given if isinstance(given, int) else None
