"""The row: one rollout of an assembled pass, as a line of ``predictions.jsonl`` and as a value.

A line is a JSON object with the schema version and the fields of :class:`Row`; values that JSON lacks are
tagged by :mod:`agl_meta.encoding`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, overload

import attrs

from agl_meta.context import TrainingContext
from agl_meta.decoding import decode
from agl_meta.describing import describe
from agl_meta.encoding import encode
from agl_meta.encoding_objects import TAG, is_text
from agl_meta.errors import RecordError
from agl_meta.files import AnyPath, load_json, open_file
from agl_meta.records import CONTEXT_FIELDS, DAMAGE, context_in, context_values, plain_object
from agl_meta.remote import store_errors

ROW_SCHEMA = 1
"""Version of the row. A reader refuses any other by name."""

SUCCEEDED = "succeeded"
FAILED = "failed"
TIMEOUT = "timeout"
MISSING = "missing"
STATUSES = (SUCCEEDED, FAILED, TIMEOUT, MISSING)


@attrs.frozen(kw_only=True)
class Turn:
    """One call of the model."""

    prompt: str | None
    """Decoded prompt; ``None`` if there are no tokens of it or they could not be decoded."""
    response: str | None
    """Decoded response, likewise."""
    prompt_tokens: int = 0
    """Number of tokens of the whole prompt."""
    response_tokens: int = 0
    """Number of tokens of the response."""
    reward: Any = None
    """Reward that the adapter assigned to this turn; ``None`` for most turns of most agents."""


@attrs.frozen(kw_only=True)
class Row:
    """What is known about one rollout when its pass was assembled."""

    context: TrainingContext
    """Where in training the rollout stood; attempt ids are those of the attempt that counted."""
    status: str
    """succeeded, failed, timeout, or missing: queued, and never finished."""
    error: Mapping[str, Any] | None
    """``type``, ``message`` and ``traceback`` of what went wrong; any of them may be ``None``."""
    data_source: Any
    """The sample's field of that name, by which upstream groups its metrics."""
    input: Any
    """The sample as the agent got it."""
    turns: tuple[Turn, ...]
    """The calls of the model, in order."""
    output: str | None
    """The last response."""
    reward: Any
    """The final reward as the agent gave it, also where upstream lost it; ``None`` if it gave none."""
    reward_used: Any
    """What the metrics took: the reward, or upstream's ``reward_fillna_value``."""
    attempts: int | None
    """How many attempts were made, as far as known."""
    predictions: Mapping[str, list[Any]]
    """What the rollout saved or emitted: by name, in order."""
    lost: Mapping[str, int]
    """What it wanted to save and could not: how often, by cause."""
    files: str | None
    """Folder with the rollout's own files, below the folder of the pass."""
    late: bool
    """Whether the rollout finished after its pass had been assembled; no metric holds it."""
    superseded: tuple[Mapping[str, Any], ...]
    """Other attempts of the rollout, whose results did not count; each with the fields above."""


_FIELDS = tuple(field.name for field in attrs.fields(Row) if field.name != "context")


def row_line(context: TrainingContext, fields: Mapping[str, object], **encoded: bytes) -> bytes:
    """One line, with its newline.

    Args:
        context: the place in training.
        fields: values, each encoded for itself: a deeply nested one becomes a document in parts.
        **encoded: fields that are JSON already.
    """
    head = {
        "schema": ROW_SCHEMA,
        **dict(zip(CONTEXT_FIELDS, context_values(context), strict=True)),
        "split": context.split,
    }
    return b"%b,%b}\n" % (plain_object(head)[:-1], members(fields, encoded))


def members(fields: Mapping[str, object], encoded: Mapping[str, bytes]) -> bytes:
    """The inside of a JSON object, from values and from what is JSON already."""
    parts = {**{name: encode(value) for name, value in fields.items()}, **encoded}
    return b",".join(b'"%b":%b' % (name.encode(), value) for name, value in parts.items())


def grouped(values: Iterable[tuple[str, bytes]]) -> bytes:
    """A JSON object from names, which are a user's, to the list of the values under each."""
    groups: dict[str, list[bytes]] = {}
    for name, value in values:
        groups.setdefault(name, []).append(value)
    pairs = [(encode(name), b"[%b]" % b",".join(group)) for name, group in groups.items()]
    if all(is_text(name) and name != TAG for name in groups):
        return b"{%b}" % b",".join(b"%b:%b" % pair for pair in pairs)
    return b'{"%b":"dict","v":[%b]}' % (TAG.encode(), b",".join(b"[%b,%b]" % pair for pair in pairs))


def parse_row(line: bytes | None, path: AnyPath, number: int) -> Row:
    """Read one line back. Raises :class:`RecordError` that names ``path`` and ``number``."""
    where = f"{path}, line {number}"
    record = load_json(line, where, "one row")
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != ROW_SCHEMA:
        raise RecordError(
            f"{where}: found schema {describe(schema)}; this agl_meta reads rows of schema {ROW_SCHEMA}. "
            "Read it with the version that wrote it."
        )
    try:
        record = decode(record)
        turns = tuple(Turn(**turn) for turn in record["turns"])
        if record["status"] not in STATUSES:
            raise ValueError(f"status is {describe(record['status'])}")
        if not isinstance(record["predictions"], Mapping):
            raise TypeError(f"predictions is {describe(record['predictions'])}")
        values = {name: record[name] for name in _FIELDS}
        values.update(turns=turns, superseded=tuple(record["superseded"]))
        return Row(context=context_in(record), **values)
    except DAMAGE as error:
        raise RecordError(f"{where}: a row with damaged content ({error!r}).") from error


class Rows(Sequence[Row]):
    """The rows of a pass, read from the file when they are asked for.

    Args:
        paths: where the rows stand; the first of these files that exists is read. (While a pass is
            open its rows stand in a temporary file.)
        offsets: where each row begins, and where the last one ends.
        first_line: 1-based line of the first row.
    """

    def __init__(
        self, paths: Sequence[AnyPath] = (), offsets: Sequence[int] = (0,), first_line: int = 1
    ) -> None:
        self._paths = tuple(paths)
        self._offsets = offsets
        self._first_line = first_line

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        path, file = self._open()
        with file, store_errors():
            file.seek(self._offsets[position])
            return self._read(file, path, position)

    def __iter__(self) -> Iterator[Row]:
        if not len(self):
            return
        path, file = self._open()
        with file, store_errors():
            file.seek(self._offsets[0])
            for position in range(len(self)):
                yield self._read(file, path, position)

    def __repr__(self) -> str:
        return f"<{len(self)} rows>"

    def _read(self, file: BinaryIO, path: AnyPath, position: int) -> Row:
        line = file.read(self._offsets[position + 1] - self._offsets[position])
        return parse_row(line, path, self._first_line + position)

    def _open(self) -> tuple[AnyPath, BinaryIO]:
        for path in self._paths[:-1]:
            with contextlib.suppress(FileNotFoundError):
                return path, open_file(path)
        return self._paths[-1], open_file(self._paths[-1])
