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
from typing import Any

import attrs
import orjson

from agl_meta.context import TrainingContext, split_name
from agl_meta.decoding import decode
from agl_meta.describing import describe, describe_error
from agl_meta.encoding import encode
from agl_meta.encoding_images import Attach
from agl_meta.errors import RecordError
from agl_meta.files import MAX_VALUES, AnyPath, load_json

RECORD_SCHEMA = 1
"""Version of the record. A reader refuses any other by name."""

PREDICTION = "prediction"
OUTCOME = "outcome"
"""Kind of the record that an attempt of a recorded pass leaves at its end: how it went, from its own side."""

# The root may have moved when the record is read, and how the pass was run is said in pass.json.
_NOT_SAVED = frozenset({"output_dir", "is_recorded", "transport", "durability"})
CONTEXT_FIELDS = tuple(field.name for field in attrs.fields(TrainingContext) if field.name not in _NOT_SAVED)
# What decoding and checking raise for a record that somebody has damaged, or nested without end.
DAMAGE = (
    KeyError,
    TypeError,
    ValueError,
    ArithmeticError,
    IndexError,
    AttributeError,
    OSError,
    RecursionError,
)
context_values = operator.attrgetter(*CONTEXT_FIELDS)
_context_items = operator.itemgetter(*CONTEXT_FIELDS)
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
    path: AnyPath
    """File that holds the record; of an emitted one a name for the spans of its rollout."""
    line: int
    """1-based line in that file, or number of the span."""


def record_line(
    context: TrainingContext, kind: str, name: str, value: object, attach: Attach | None = None
) -> bytes:
    """One line, with its newline, that holds ``value`` as it is now.

    ``attach`` writes images beside it; ``None`` where there is no folder for them.
    """
    record = {
        "schema": RECORD_SCHEMA,
        "kind": kind,
        **dict(zip(CONTEXT_FIELDS, context_values(context), strict=True)),
        "split": context.split,
        "name": name,
        "sequence": next(_sequence),
        "saved_at": time.time(),
    }
    return b'%b,"value":%b}\n' % (plain_object(record)[:-1], encode(value, attach=attach))


def plain_object(fields: dict[str, Any]) -> bytes:
    """A JSON object of values that are plain, save for ids and names, which come from elsewhere."""
    try:
        return orjson.dumps(fields)
    except TypeError:
        return encode(fields)


ParsedRecord = tuple[dict[str, Any], Any, "tuple[int, int] | None"]
"""A line whose names and ids are checked; its value, a JSON document that is not yet decoded; and where that
begins and ends in the line, or ``None`` if another program wrote the line anew."""


def parse_record(line: bytes | None, path: AnyPath, number: int) -> ParsedRecord:
    """Read one line. Raises :class:`RecordError` that names ``path`` and ``number`` for anything else."""
    if line is not None and len(line) <= MAX_VALUES:
        found = _as_written(line)
        if found is not None and tuple(map(type, found[0].values())) in _known_types:
            return found
    return _checked(line, f"{path}, line {number}")


def _as_written(line: bytes) -> ParsedRecord | None:
    """A line as this version writes it; only its layout is checked."""
    # A text can't hold these bytes, and nothing but numbers and texts stands before the value: so this is
    # where it begins, if both parts are JSON by themselves.
    end = line.find(_VALUE)
    if end < 0 or line[-2:] != _END:
        return None
    begin = end + len(_VALUE)
    try:
        head, value = orjson.loads(line[:end] + b"}"), orjson.loads(line[begin:-2])
    except (ValueError, RecursionError):
        return None
    if type(head) is not dict or tuple(head) != _HEAD_KEYS or head["schema"] != RECORD_SCHEMA:
        return None
    return head, value, (begin, len(line) - 2)


def _checked(line: bytes | None, where: str) -> ParsedRecord:
    if line is not None and not line.endswith(b"\n"):
        raise RecordError(f"{where}: the record was cut short after {len(line)} bytes, or is being written.")
    record = load_json(line, where, "one record")
    assert line is not None
    if not isinstance(record, dict) or "schema" not in record:
        raise RecordError(f"{where}: found {type(record).__name__}; expected a record of agl_meta.")
    if record["schema"] != RECORD_SCHEMA:
        raise RecordError(
            f"{where}: found schema {describe(record['schema'])}; this agl_meta reads schema "
            f"{RECORD_SCHEMA}. Read it with the version that wrote it."
        )
    try:
        value = record.pop("value")
        head = decode(record)
        for name, expected in _HEAD_TYPES.items():
            _of_type(head, name, expected)
    except DAMAGE as error:
        why = describe_error(error)
        raise RecordError(f"{where}: a record with damaged content ({why:.200}).") from error
    written = _as_written(line)
    if written is None:  # by another program, which may order names as it likes
        return head, value, None
    types = tuple(map(type, written[0].values()))
    if _PLAIN.issuperset(types) and len(_known_types) < _MAX_KNOWN_TYPES:
        _known_types.add(types)
    return head, value, written[2]


def may_be_tagged(content: bytes) -> bool:
    """Whether JSON may hold a tag of :mod:`agl_meta.encoding`; most holds none, and needs no decoding."""
    return b"$" in content


_VALUE = b',"value":'
_END = b"}\n"
_HEAD_KEYS = ("schema", "kind", *CONTEXT_FIELDS, "split", "name", "sequence", "saved_at")
_HEAD_TYPES: dict[str, Any] = {
    "kind": str,
    "name": str,
    "sequence": int,
    "rollout_id": (str, type(None)),
    "attempt_id": (str, type(None)),
    "attempt_number": (int, type(None)),
    "saved_at": float,
}
_PLAIN = frozenset({str, int, float, bool, type(None)})
# Heads of these types were checked; there are few, since a run's records are alike.
_known_types: set[tuple[type, ...]] = set()
_MAX_KNOWN_TYPES = 1_000


def parse_prediction(line: bytes | None, path: AnyPath, number: int) -> Prediction | None:
    """Read one line back; ``None`` for a record of another kind.

    Raises :class:`RecordError` that names ``path`` and ``number`` for anything else than a record.
    """
    head, value, _ = parse_record(line, path, number)
    if head["kind"] != PREDICTION:
        return None
    try:
        return Prediction(
            value=decode(value) if line is None or may_be_tagged(line) else value,
            name=head["name"],
            context=context_in(head),
            sequence=head["sequence"],
            saved_at=datetime.datetime.fromtimestamp(head["saved_at"], datetime.timezone.utc),
            path=path,
            line=number,
        )
    except DAMAGE as error:
        why = describe_error(error)
        raise RecordError(f"{path}, line {number}: a record with damaged content ({why:.200}).") from error


def context_in(record: Mapping[str, Any]) -> TrainingContext:
    """The context in a decoded record. Raises :class:`KeyError` and :class:`ValueError`."""
    context = TrainingContext(**dict(zip(CONTEXT_FIELDS, _context_items(record))))  # noqa: B905  twice as fast
    if context.is_stamped and record["split"] != split_name(bool(context.is_train)):
        raise ValueError(f"split {record['split']!r} and is_train {context.is_train!r} differ")
    return context


def _of_type(record: Mapping[str, Any], key: str, expected: Any) -> None:
    value = record[key]
    if not isinstance(value, expected):
        raise TypeError(f"{key} is {describe(value)}")
