"""Where in training a rollout stands: the frozen :class:`TrainingContext` and how code gets at it.

The context of the running rollout lives in one :class:`contextvars.ContextVar`, so that each thread
and each asyncio task sees its own (after structlog's ``contextvars`` module). Only the agent side of
this library sets it; user code reads it.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from agl_meta.describing import describe, describe_error
from agl_meta.encoding_objects import type_name
from agl_meta.errors import NotInRolloutError, StampError, UnstampedRolloutWarning
from agl_meta.forks import PerProcess

STAMP_KEY = "agl_meta"
"""Metadata key of the entry that holds all that does not stand flat."""

STAMP_SCHEMA = 1
"""Version of that entry. A reader refuses any other."""

FSYNC = "fsync"
"""A value of :attr:`TrainingContext.durability`."""

FLAT_KEYS = ("epoch", "global_step", "batch_index", "is_train")
"""The four names that stand flat in a task's metadata, beside upstream's ``data_id``."""


@attrs.frozen(kw_only=True, weakref_slot=False)  # see agl_meta.frozen
class TrainingContext:
    """The place in training that a rollout belongs to, as stamped when its task was enqueued.

    Numbers are ``None`` where :attr:`is_stamped` is ``False``. The meaning of ``global_step`` is
    verl's (``trainer.global_steps``); ``epoch`` is 0-based and right after a resume, unlike the
    counter that verl logs.
    """

    epoch: int | None = None
    """0-based pass over the training data; a validation has the epoch of the step it follows."""
    global_step: int | None = None
    """verl's step: 0 before any training, N in training step N and the validation after it."""
    batch_index: int | None = None
    """0-based position of the batch in the current pass of its own dataloader."""
    is_train: bool | None = None
    """``True`` in a training rollout, ``False`` in a validation rollout."""
    reason: str | None = None
    """Why the pass runs: train, before_training, after_resume, periodic or final."""
    sample_index: int | None = None
    """Position of the sample in its batch."""
    sample_key: str | None = None
    """Stable name of the sample, the same in every evaluation, run and process."""
    repeat_index: int | None = None
    """0 … n-1: which rollout of this sample."""
    data_id: str | None = None
    """Upstream's id of the sample in this batch; a new one each time."""
    rollout_id: str | None = None
    """Upstream's id of the rollout."""
    attempt_id: str | None = None
    """Upstream's id of the attempt; ``None`` in v0, which has no attempts."""
    attempt_number: int | None = None
    """1 for the first try of the rollout: upstream's ``attempt.sequence_id`` (v1) or
    ``task.num_claims`` (v0)."""
    run_id: str | None = None
    """One for each ``fit()``; a resumed training has a new one."""
    pass_path: str | None = None
    """Folder of the pass below :attr:`output_dir`, such as ``global_step_40/val``."""
    is_stamped: bool = False
    """Whether the task was enqueued through agl_meta."""
    # What stands from here on is of use while the rollout runs, and not saved.
    output_dir: str | None = None
    """The output folder as the trainer names it."""
    transport: str = "files"
    """How what the rollout saves travels: ``"files"``, or ``"store"`` as spans."""
    durability: str = "process"
    """What a saved record outlives: the ``"process"`` that wrote it, or (``"fsync"``) a power loss, too."""
    is_recorded: bool = False
    """Whether the rollouts of the pass are assembled to rows when it ends."""

    @property
    def split(self) -> str | None:
        """``"train"``, ``"val"``, or ``None`` for a rollout without stamps."""
        return None if self.is_train is None else split_name(self.is_train)

    @classmethod
    def from_rollout(cls, rollout: Any) -> TrainingContext:
        """Read the context from what a rollout method receives.

        Takes an ``AttemptedRollout`` or ``Rollout`` (v1), a ``RolloutLegacy`` or ``Task`` (v0), or
        anything with the same attributes. Raises :class:`StampError` for an entry of an unknown
        schema version or one whose values have the wrong type, and for metadata that can't be read. Of a
        rollout that nobody stamped only ids are taken, and one of the wrong type is ``None``.
        """
        try:
            return cls._read(rollout)
        except StampError:
            raise
        except Exception as error:  # of the metadata's own code: it may hold any object
            raise StampError(
                f"The metadata of the rollout can't be read: {describe_error(error):.200}; expected plain "
                "data. Something between trainer and runner changed the metadata."
            ) from error

    @classmethod
    def _read(cls, rollout: Any) -> TrainingContext:
        metadata = getattr(rollout, "metadata", None)
        task = getattr(rollout, "task", None)
        if not _is_stamp_holder(metadata) and task is not None:
            metadata = getattr(task, "metadata", None)
        metadata = metadata if isinstance(metadata, Mapping) else {}
        attempt = getattr(rollout, "attempt", None)
        claims = getattr(rollout if task is None else task, "num_claims", None)
        ids: dict[str, Any] = {
            "data_id": metadata.get("data_id"),
            "rollout_id": getattr(rollout, "rollout_id", None),
            "attempt_id": getattr(attempt, "attempt_id", None),
            "attempt_number": getattr(attempt, "sequence_id", claims),
        }
        if STAMP_KEY not in metadata:
            # Nothing is checked of what nobody stamped: an odd id is none, and the agent's code runs on.
            plain: dict[str, Any] = {name: ids[name] for name in ids if _is_of_type(name, ids[name])}
            return cls(**plain)
        entry = metadata[STAMP_KEY]
        _check_schema(entry)
        values: dict[str, Any] = {key: metadata.get(key) for key in FLAT_KEYS}
        values.update({name: entry.get(name) for name in _ENTRY_FIELDS})
        values["is_recorded"] = entry.get("is_recorded", False)
        values["transport"] = entry.get("transport", "files")
        values["durability"] = entry.get("durability", "process")
        values.update(ids)
        for name, value in values.items():
            _check_type(name, value)
        return cls(**values, is_stamped=True)


_ENTRY_FIELDS = (
    "reason",
    "sample_index",
    "sample_key",
    "repeat_index",
    "run_id",
    "output_dir",
    "pass_path",
    "is_recorded",
    "transport",
    "durability",
)
_INTEGERS = frozenset(
    {"epoch", "global_step", "batch_index", "sample_index", "repeat_index", "attempt_number"}
)
_BOOLEANS = frozenset({"is_train", "is_recorded"})
_OPTIONAL = frozenset({"output_dir", "pass_path", "data_id", "rollout_id", "attempt_id", "attempt_number"})


def split_name(is_train: bool) -> str:
    """``"train"`` or ``"val"``, the names that verl and agentlightning use."""
    return "train" if is_train else "val"


def _is_stamp_holder(metadata: Any) -> bool:
    return isinstance(metadata, Mapping) and STAMP_KEY in metadata


def _check_schema(entry: Any) -> None:
    schema = entry.get("schema") if isinstance(entry, Mapping) else None
    if type(schema) is not int or schema != STAMP_SCHEMA:
        found = f"schema {describe(schema)}" if isinstance(entry, Mapping) else type_name(type(entry))
        raise StampError(
            f"The task's metadata holds an {STAMP_KEY!r} entry with {found}; this agl_meta reads "
            f"schema {STAMP_SCHEMA}. Install the same agl_meta version where the trainer runs and "
            "where the runners run."
        )


def _check_type(name: str, value: Any) -> None:
    # The stamp came over the network: a damaged one is named here, not met later as a TypeError.
    if not _is_of_type(name, value):
        raise StampError(
            f"The task's metadata holds {name}={describe(value)} ({type_name(type(value))}); expected "
            f"{_type_of(name).__name__}. Something between trainer and runner changed the metadata."
        )


def _type_of(name: str) -> type:
    return int if name in _INTEGERS else bool if name in _BOOLEANS else str


def _is_of_type(name: str, value: Any) -> bool:
    if value is None:
        return name in _OPTIONAL
    expected, found = _type_of(name), type(value)  # isinstance() would run code of the value
    return issubclass(found, expected) and (found is not bool or expected is bool)


@attrs.frozen
class _Running:
    """A rollout that was entered: what its stamp says, and the rollout around it."""

    value: TrainingContext | StampError
    ids: tuple[Any, Any]
    outer: _Running | None
    losses: dict[str, int] = attrs.field(factory=dict)


_current: contextvars.ContextVar[_Running | None] = contextvars.ContextVar(
    "agl_meta_training_context", default=None
)

_NOT_IN_ROLLOUT = (
    "No rollout is running here. The training context exists inside the rollout methods of an agent "
    "with agl_meta.TrainingContextMixin, or of any agent when agl_meta.TrainingContextHook() is in "
    "Trainer(hooks=…), and in the asyncio tasks and asyncio.to_thread calls that they start. A thread "
    "of your own starts without it: start it with contextvars.copy_context().run(function, …), or "
    "with ThreadPoolExecutor.submit(contextvars.copy_context().run, function, …), or read the value "
    "before and pass it on."
)


def current_training_context() -> TrainingContext:
    """The context of the rollout that runs here, for code that has no ``self`` of the agent.

    Raises :class:`NotInRolloutError` outside a rollout and in a thread that was started without the
    rollout's context, and :class:`StampError` if the rollout's stamp can't be read.
    """
    running = _current.get()
    if running is None:
        raise NotInRolloutError(_NOT_IN_ROLLOUT)
    if isinstance(running.value, StampError):
        # Each raise adds to the traceback of an error, and so keeps frames alive.
        raise running.value.with_traceback(None)
    return running.value


def enter(rollout: Any) -> contextvars.Token[_Running | None]:
    """Make the context of ``rollout`` the current one; for this library's own agent side.

    A stamp that can't be read does not stop the rollout: the error is raised where the context is
    asked for.
    """
    value: TrainingContext | StampError
    try:
        value = TrainingContext.from_rollout(rollout)
    except StampError as error:
        value = error.with_traceback(None)
    else:
        if not value.is_stamped:
            _warn_unstamped_once()
    return _current.set(_Running(value, _ids(rollout), _current.get()))


def note_loss(cause: str) -> None:
    """Count something that the rollout that runs here wanted to save and that is lost."""
    running = _current.get()
    if running is not None:
        running.losses[cause] = running.losses.get(cause, 0) + 1


def losses() -> dict[str, int]:
    """What the rollout that runs here has lost so far: how often, by cause."""
    running = _current.get()
    return {} if running is None else dict(running.losses)


def is_current(rollout: Any) -> bool:
    """Whether the current context is that of ``rollout``, in the same attempt."""
    running = _current.get()
    ids = _ids(rollout)
    return running is not None and ids[0] is not None and _is_equal(running.ids, ids)


def leave(token: contextvars.Token[_Running | None]) -> None:
    """Restore what was current before :func:`enter`."""
    # A coroutine that is closed by another task than it ran in has another Context; what it set
    # there is gone with that Context, so there is nothing to restore.
    with contextlib.suppress(ValueError):
        _current.reset(token)


def leave_rollout(rollout: Any) -> None:
    """Restore what was current before ``rollout`` was entered, where no token could be kept.

    For the runner's hooks. Rollouts inside it that nobody left are left with it; a rollout that was
    never entered changes nothing.
    """
    ids = _ids(rollout)
    running = _current.get()
    while running is not None:
        if _is_equal(running.ids, ids):
            _current.set(running.outer)
            return
        running = running.outer


def _ids(rollout: Any) -> tuple[Any, Any]:
    """Rollout and attempt, as upstream names them."""
    try:
        attempt = getattr(rollout, "attempt", None)
        return getattr(rollout, "rollout_id", None), getattr(attempt, "attempt_id", None)
    except Exception:  # from_rollout tells of it
        return None, None


def _is_equal(ids: tuple[Any, Any], others: tuple[Any, Any]) -> bool:
    try:
        return ids == others
    except Exception:  # of ids that are no text
        return False


@contextlib.contextmanager
def training_context_of(rollout: Any) -> Iterator[None]:
    """Run the block inside the context of ``rollout``, then restore the former one."""
    token = enter(rollout)
    try:
        yield
    finally:
        leave(token)


_warned = False
_warn_lock = PerProcess(threading.RLock)


def _warn_unstamped_once() -> None:
    global _warned
    with _warn_lock.value:
        if _warned:
            return
        _warned = True
    # Also under ``-W error`` the agent's code must run on, hence the suppress.
    with contextlib.suppress(UnstampedRolloutWarning):
        warnings.warn(
            "This rollout was enqueued without agl_meta, so epoch, global_step, batch_index and "
            "is_train are None. To have them, train with "
            "agl_meta.VERL(config, output_dir=…) as Trainer(algorithm=…).",
            UnstampedRolloutWarning,
            stacklevel=4,
        )
