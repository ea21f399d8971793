"""Records that travel as spans, through upstream's tracer and store, where no folder is shared.

A record is one attribute of a span that no adapter of upstream's looks at. In v0 spans come with the rollout
that the runner posts, which is empty after an exception: what such a rollout emitted is lost there.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from warnings import warn

from agl_meta.context import TrainingContext, current_training_context, note_loss
from agl_meta.describing import describe
from agl_meta.errors import DamagedRecordWarning, RecordError
from agl_meta.faults import faults
from agl_meta.records import PREDICTION, Prediction, parse_prediction, record_line

SPAN_NAME = "agl_meta.record"
"""Name of the spans, and of the attribute that holds the record's line."""

_NO_TRACER = (
    "no tracer of agentlightning is active here: its runner traces while it runs a rollout, unless its "
    "tracer is a dummy. What was emitted is lost"
)


# Upstream makes its tracer known to code inside a rollout in v1 and in asynchronous v0 agents only; to a
# synchronous v0 agent its runner gives it in on_rollout_start.
_announced_tracer: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "agl_meta_announced_tracer", default=None
)


def announce_tracer(tracer: Any) -> None:
    """Take this tracer, in this thread or asyncio task, where upstream makes none known."""
    _announced_tracer.set(tracer)


def emit_prediction(value: object, name: str = "prediction") -> bool:
    """Put ``value`` as it is now into a span of the rollout that runs here, for the store.

    Any value can be emitted, as with :func:`agl_meta.save_prediction`; upstream's ``emit_object`` raises for
    what ``json`` can't write. Returns whether the tracer took it; where it did not, that is logged and
    counted, and the rollout goes on. Raises :class:`NotInRolloutError` outside a rollout and
    :class:`StampError` if the rollout's stamp can't be read.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {describe(name)} ({type(name).__name__}); expected a str.")
    return emit_record(current_training_context(), PREDICTION, name, value)


def emit_record(context: TrainingContext, kind: str, name: str, value: object) -> bool:
    """Emit a record of any kind, as :func:`emit_prediction` does."""
    try:
        # Here, since importing agl_meta stays light; in a runner they are loaded.
        from agentlightning.tracer.base import get_active_tracer
        from agentlightning.tracer.dummy import DummyTracer
        from agentlightning.types import TraceStatus

        tracer = get_active_tracer() or _announced_tracer.get()
        if tracer is None or isinstance(tracer, DummyTracer):
            note_loss(faults.record(f"emitting a {kind}", _NO_TRACER))
            return False
        line = record_line(context, kind, name, value)
        tracer.create_span(
            SPAN_NAME, attributes={SPAN_NAME: line.decode()}, status=TraceStatus(status_code="OK")
        )
    except Exception as error:  # a user's own tracer may raise anything
        note_loss(faults.record(f"emitting a {kind}", error))
        return False
    return True


def emitted_lines(spans: Iterable[Any]) -> list[bytes]:
    """The record lines in spans: upstream's ``Span`` objects, or dicts as in ``RolloutLegacy.trace``."""
    lines = []
    for span in spans:
        attributes = (
            span.get("attributes") if isinstance(span, Mapping) else getattr(span, "attributes", None)
        )
        text = attributes.get(SPAN_NAME) if isinstance(attributes, Mapping) else None
        if isinstance(text, str):
            lines.append(text.encode("utf-8", "surrogatepass"))
    return lines


async def collect_emitted(
    store: Any, rollout_ids: Iterable[str], attempt_id: str | None = None
) -> dict[str, list[Prediction]]:
    """What rollouts emitted, fetched from a ``LightningStore``: by rollout id, in order.

    Args:
        store: the store or a client of it, such as ``event.trainer.store`` in a callback.
        rollout_ids: as in ``row.context.rollout_id``.
        attempt_id: of one attempt, or ``"latest"``; ``None`` for all, told apart by
            ``context.attempt_id``.

    A coroutine, as the store's methods are. A record that can't be read is left out, with a
    :class:`DamagedRecordWarning`.
    """
    found: dict[str, list[Prediction]] = {}
    for rollout_id in rollout_ids:
        spans = await store.query_spans(rollout_id, attempt_id=attempt_id, name=SPAN_NAME)
        found[rollout_id] = sorted(_predictions(rollout_id, spans), key=lambda each: each.sequence)
    return found


def _predictions(rollout_id: str, spans: Iterable[Any]) -> list[Prediction]:
    found = []
    for number, line in enumerate(emitted_lines(spans), 1):
        try:
            prediction = parse_prediction(line, Path(f"spans of {rollout_id}"), number)
        except RecordError as error:
            warn(str(error), DamagedRecordWarning, stacklevel=3)
            continue
        if prediction is not None:
            found.append(prediction)
    return found
