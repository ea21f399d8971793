"""How an attempt went, from its own side: what it raised, which no one else of upstream's records.

Kept where the rows of its pass are assembled, by :attr:`TrainingContext.is_recorded`.
"""

from __future__ import annotations

import contextvars
import time
import traceback
from typing import Any

import orjson

from agl_meta.context import STAMP_KEY, TrainingContext, current_training_context, losses
from agl_meta.emitting import emit_record
from agl_meta.encoding import encode
from agl_meta.encoding_objects import type_name
from agl_meta.errors import AglMetaError
from agl_meta.faults import faults
from agl_meta.records import OUTCOME
from agl_meta.saving import save_record

ATTEMPT_KEY = "attempt_number"
"""Beside :data:`OUTCOME`, under :data:`STAMP_KEY` in the metadata of what a v0 runner posts."""

_MAX_TEXT = 20_000
_MAX_RETURNED = 1_000
"""Bytes of an encoded value that is kept; upstream's lists of spans are not."""

# The v0 runner posts an empty rollout after an exception; on_rollout_end, which it calls in the same thread
# or asyncio task, adds what is known.
_latest: contextvars.ContextVar[tuple[str | None, dict[str, Any]] | None] = contextvars.ContextVar(
    "agl_meta_latest_outcome", default=None
)


def record_outcome(error: BaseException | None, returned: object, began: float) -> None:
    """Keep how the rollout went that runs here; raises nothing.

    Args:
        error: what it raised.
        returned: what it returned, if it did.
        began: when it was called, as ``time.time()``.
    """
    try:
        context = current_training_context()
    except AglMetaError:  # a stamp that can't be read
        return
    if not context.is_recorded:
        return
    with faults.guard("recording the outcome of a rollout"):
        outcome = {
            "error": None if error is None else error_fields(error),
            "returned": _small(returned),
            "returned_type": None if error is not None else type_name(type(returned)),
            "seconds": time.time() - began,
            "lost": losses(),
        }
        _latest.set((context.rollout_id, outcome))
        is_saved = context.pass_path is not None and save_record(context, OUTCOME, OUTCOME, outcome)
        if not is_saved and context.transport != "store":
            # No folder, or a disk that takes nothing: the trainer is to know all the same.
            emit_record(context, OUTCOME, OUTCOME, outcome)


def note_outcome(task: Any, rollout: Any) -> None:
    """Add the attempt and how it went to what a v0 runner is going to post."""
    with faults.guard("noting the outcome of a rollout"):
        context = TrainingContext.from_rollout(task)
        if not context.is_recorded:
            return
        note: dict[str, Any] = {ATTEMPT_KEY: context.attempt_number}
        latest = _latest.get()
        if latest is not None and latest[0] == context.rollout_id:
            note[OUTCOME] = orjson.loads(encode(latest[1]))
        rollout.metadata = {**rollout.metadata, STAMP_KEY: note}


def error_fields(error: BaseException) -> dict[str, str | None]:
    """An exception as ``type``, ``message`` and ``traceback``."""
    return {
        "type": type_name(type(error)),
        "message": _text(lambda: str(error)),
        "traceback": _text(lambda: "".join(traceback.format_exception(error))),
    }


def _small(returned: object) -> object:
    """A returned value as a reward may be one: upstream drops what is no float, and says so nowhere."""
    if isinstance(returned, (list, tuple, dict)) or len(encode(returned)) > _MAX_RETURNED:
        return None
    return returned


def _text(make: Any) -> str | None:
    try:
        text = make()
    except Exception:  # the exception's own code
        return None
    if len(text) > _MAX_TEXT:
        # Both ends say something: where it began, and what was raised.
        text = f"{text[: _MAX_TEXT // 2]}\n… {len(text) - _MAX_TEXT} characters …\n{text[-_MAX_TEXT // 2 :]}"
    # It travels as JSON in v0, and upstream's client can't send lone surrogates.
    return str(text.encode("utf-8", "backslashreplace").decode())
