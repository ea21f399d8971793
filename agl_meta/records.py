"""The record: one saved prediction, as a line of JSON and as a value.

The write side and the read side of this library meet here and in the folder layout, nowhere else.
A line is a JSON object with the schema version, the names of
:class:`~agl_meta.context.TrainingContext`, and ``kind``, ``name``, ``sequence``, ``saved_at`` and
``value``; the value is written by :mod:`agl_meta.encoding`, which tags what JSON lacks.
"""

from __future__ import annotations

import datetime
import itertools
import operator
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson

from agl_meta.context import TrainingContext, split_name
from agl_meta.decoding import decode
from agl_meta.describing import describe
from agl_meta.encoding import encode
from agl_meta.errors import RecordError

RECORD_SCHEMA = 1
"""Version of the record. A reader refuses any other by name."""

PREDICTION = "prediction"

_CONTEXT_FIELDS = tuple(field.name for field in attrs.fields(TrainingContext) if field.name != "output_dir")
# What decoding and checking raise for a record that somebody has damaged, or nested without end.
_DAMAGE = (
    KeyError,
    TypeError,
    ValueError,
    ArithmeticError,
    IndexError,
    AttributeError,
    OSError,
    RecursionError,
)
_context_values = operator.attrgetter(*_CONTEXT_FIELDS)
_sequence = itertools.count()


@attrs.frozen(kw_only=True)
class Prediction:
    """One value that a rollout saved, with the place in training that it belongs to."""

    value: Any
    """What was saved, decoded: see :func:`agl_meta.decoding.decode`."""
    name: str
    """The name it was saved under; ``"prediction"`` unless another was given."""
    context: TrainingContext
    """Where in training the rollout stood that saved it."""
    sequence: int
    """Grows with each record of one process: the order in which a rollout saved."""
    saved_at: datetime.datetime
    """Time of the call, UTC."""
    path: Path
    """File that holds the record."""
    line: int
    """1-based line in that file."""


def prediction_line(context: TrainingContext, name: str, value: object) -> bytes:
    """One line, with its newline, that holds ``value`` as it is now."""
    record = {
        "schema": RECORD_SCHEMA,
        "kind": PREDICTION,
        **dict(zip(_CONTEXT_FIELDS, _context_values(context), strict=True)),
        "split": context.split,
        "name": name,
        "sequence": next(_sequence),
        "saved_at": time.time(),
    }
    try:
        head = orjson.dumps(record)
    except TypeError:  # ids and names come from elsewhere: they may hold what JSON can't
        head = encode(record)
    return b'%b,"value":%b}\n' % (head[:-1], encode(value))


def parse_prediction(line: bytes, path: Path, number: int) -> Prediction | None:
    """Read one line back; ``None`` for a record of a kind that this version does not know.

    Raises :class:`RecordError` that names ``path`` and ``number`` for anything else than a record.
    """
    where = f"{path}, line {number}"
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"{where}: not JSON ({error}); expected one record.") from error
    if not isinstance(record, dict) or "schema" not in record:
        raise RecordError(f"{where}: found {type(record).__name__}; expected a record of agl_meta.")
    if record["schema"] != RECORD_SCHEMA:
        raise RecordError(
            f"{where}: found schema {describe(record['schema'])}; this agl_meta reads schema "
            f"{RECORD_SCHEMA}. Read it with the version that wrote it."
        )
    if record.get("kind") != PREDICTION:
        return None
    try:
        record = decode(record)
        return Prediction(
            value=record["value"],
            name=_of_type(record, "name", str),
            context=_context(record),
            sequence=_of_type(record, "sequence", int),
            saved_at=datetime.datetime.fromtimestamp(
                _of_type(record, "saved_at", float), datetime.timezone.utc
            ),
            path=path,
            line=number,
        )
    except _DAMAGE as error:
        raise RecordError(f"{where}: a record with damaged content ({error!r}).") from error


def _context(record: Mapping[str, Any]) -> TrainingContext:
    context = TrainingContext(**{field: record[field] for field in _CONTEXT_FIELDS})
    if context.is_stamped and record["split"] != split_name(bool(context.is_train)):
        raise ValueError(f"split {record['split']!r} and is_train {context.is_train!r} differ")
    return context


def _of_type(record: Mapping[str, Any], key: str, expected: type) -> Any:
    value = record[key]
    if not isinstance(value, expected):
        raise TypeError(f"{key} is {describe(value)}")
    return value
