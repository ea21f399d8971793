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
from agl_meta.frozen import maker

RECORD_SCHEMA = 1
"""Version of the record. A reader refuses any other by name."""

PREDICTION = "prediction"
OUTCOME = "outcome"
"""Kind of the record that an attempt of a recorded pass leaves at its end: how it went, from its own side."""

# The root may have moved when the record is read, and how the pass was run is said in pass.json.
_NOT_SAVED = ("output_dir", "transport", "durability", "is_recorded")
CONTEXT_FIELDS = tuple(field.name for field in attrs.fields(TrainingContext))[: -len(_NOT_SAVED)]
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


@attrs.frozen(kw_only=True, weakref_slot=False)  # see agl_meta.frozen
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
    return b'%b,"name":%b,"sequence":%d,"saved_at":%b,"value":%b}\n' % (
        _head(context, kind),
        _plain_text(name),
        next(_sequence),
        orjson.dumps(time.time()),
        encode(value, attach=attach),
    )


def _head(context: TrainingContext, kind: str) -> bytes:
    """What the records of one rollout have in common, without the closing brace."""
    # By id: to hash a context takes longer. The context that is kept with it keeps its id.
    key = id(context), kind
    known = _heads.get(key)
    if known is not None:
        return known[1]
    fields = {
        "schema": RECORD_SCHEMA,
        "kind": kind,
        **dict(zip(CONTEXT_FIELDS, context_values(context), strict=True)),
        "split": context.split,
    }
    head = plain_object(fields)[:-1]
    if len(_heads) >= _MAX_HEADS:
        _heads.clear()
    _heads[key] = context, head
    return head


_heads: dict[tuple[int, str], tuple[TrainingContext, bytes]] = {}
_MAX_HEADS = 256


def _plain_text(text: str) -> bytes:
    try:
        return orjson.dumps(text)
    except TypeError:  # a lone surrogate, or of a subclass
        return encode(text)


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
    found = _as_written(line)
    if found is not None and tuple(map(type, found[0].values())) in _known_types:
        return found
    return _checked(line, f"{path}, line {number}")


def _as_written(line: bytes | None) -> ParsedRecord | None:
    """A line as this version writes it; only its layout is checked."""
    if line is None or len(line) > MAX_VALUES or line[-2:] != _END:
        return None
    # A text can't hold these bytes, and nothing but numbers and texts stands before the value: so this is
    # where it begins, if both parts are JSON by themselves.
    end = line.find(_VALUE)
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
_CONTEXT_BEGIN = _HEAD_KEYS.index(CONTEXT_FIELDS[0])
_CONTEXT_END = _CONTEXT_BEGIN + len(CONTEXT_FIELDS)
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
    head, value, span = parse_record(line, path, number)
    if head["kind"] != PREDICTION:
        return None
    try:
        if line is None or may_be_tagged(line):
            value = decode(value)
        # With a span, the head has the layout that is written.
        context = context_in(head) if span is None else _context_as_written(head)
        saved_at = datetime.datetime.fromtimestamp(head["saved_at"], datetime.timezone.utc)
        return _make_prediction(value, head["name"], context, head["sequence"], saved_at, path, number)
    except DAMAGE as error:
        why = describe_error(error)
        raise RecordError(f"{path}, line {number}: a record with damaged content ({why:.200}).") from error


_make_context = maker(TrainingContext)
_NOT_SAVED_VALUES = tuple(getattr(TrainingContext(), name) for name in _NOT_SAVED)
_make_prediction = maker(Prediction)


def context_in(record: Mapping[str, Any]) -> TrainingContext:
    """The context in a decoded record. Raises :class:`KeyError` and :class:`ValueError`."""
    return _checked_context(record, _context_items(record))


def _context_as_written(head: dict[str, Any]) -> TrainingContext:
    return _checked_context(head, tuple(head.values())[_CONTEXT_BEGIN:_CONTEXT_END])


def _checked_context(record: Mapping[str, Any], values: tuple[Any, ...]) -> TrainingContext:
    context = _make_context(*values, *_NOT_SAVED_VALUES)
    if context.is_stamped and record["split"] != split_name(bool(context.is_train)):
        raise ValueError(f"split {record['split']!r} and is_train {context.is_train!r} differ")
    return context


def _of_type(record: Mapping[str, Any], key: str, expected: Any) -> None:
    value = record[key]
    if not isinstance(value, expected):
        raise TypeError(f"{key} is {describe(value)}")
