"""What the rollouts of one pass saved: an index of records by rollout; the values stay where they are.

A pass of ten thousand rollouts is joined with what they saved by reading each shard once; a value is read
again when its row is written, as the bytes it was saved in.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import orjson

from agl_meta.decoding import decode
from agl_meta.errors import RecordError
from agl_meta.records import DAMAGE, OUTCOME, PREDICTION, may_be_tagged, parse_head
from agl_meta.shards import SHARD_SUFFIX

Attempt = str | int | None
"""What tells the attempts of a rollout apart: upstream's ``attempt_id`` (v1), the number of claims (v0)."""

_VALUE = b',"value":'
_END = b"}\n"
_MAX_REPORTED = 100
"""Lines of one file that are reported one by one; a foreign file may have any number."""


@attrs.frozen
class SavedRecord:
    """One record of a rollout."""

    kind: str
    name: str
    sequence: int
    attempt_id: str | None
    attempt_number: int | None
    _value: bytes | tuple[int, int, int]

    @property
    def attempt(self) -> Attempt:
        """The attempt that saved it."""
        return self.attempt_id if self.attempt_id is not None else self.attempt_number

    def value(self) -> bytes:
        """The encoded value. Raises :class:`OSError`."""
        if isinstance(self._value, bytes):
            return self._value
        descriptor, begin, size = self._value
        return os.pread(descriptor, size, begin)


class SavedRecords:
    """The records in the shards of a pass, by rollout; a context manager, which holds the shards open."""

    def __init__(self, shards: Path | None) -> None:
        self.files: set[str] = set()
        """The shards that were looked at."""
        self.unreadable: list[dict[str, Any]] = []
        """File, line and cause of each record that could not be read."""
        self._by_rollout: dict[str | None, list[SavedRecord]] = {}
        self._descriptors: list[int] = []
        if shards is None:
            return
        try:
            paths = sorted(path for path in shards.iterdir() if path.suffix == SHARD_SUFFIX)
        except OSError as error:
            self._report(shards, None, error)
            return
        for path in paths:
            self._read_shard(path)

    def __enter__(self) -> SavedRecords:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def of(self, rollout_id: str) -> list[SavedRecord]:
        """What a rollout saved in all its attempts, in the order of its shards."""
        return self._by_rollout.get(rollout_id, [])

    def add_lines(self, lines: Iterable[bytes], source: str) -> None:
        """Add records that came another way than in a shard. ``source`` names it in a report."""
        for number, line in enumerate(lines, 1):
            try:
                self._add(line, Path(source), number, None)
            except RecordError as error:
                self._report(source, number, error)

    def _read_shard(self, path: Path) -> None:
        self.files.add(str(path))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            self._report(path, None, error)
            return
        self._descriptors.append(descriptor)
        damaged = 0
        for number, begin, line in _lines(descriptor):
            try:
                self._add(line, path, number, (descriptor, begin))
            except RecordError as error:
                damaged += 1
                if damaged <= _MAX_REPORTED:
                    self._report(path, number, error)
        if damaged > _MAX_REPORTED:
            self._report(path, None, f"{damaged - _MAX_REPORTED} further lines of this file are no records")

    def _report(self, file: Path | str, line: int | None, why: object) -> None:
        self.unreadable.append({"file": str(file), "line": line, "why": str(why)})

    def _add(self, line: bytes, path: Path, number: int, place: tuple[int, int] | None) -> None:
        head = parse_head(line, path, number)
        if head["kind"] not in (PREDICTION, OUTCOME):
            return
        begin = line.find(_VALUE) + len(_VALUE)
        size = len(line) - begin - len(_END)
        if begin < len(_VALUE) or not line.endswith(_END):
            raise RecordError(f"{path}, line {number}: the record has no value at its end.")
        content = line[begin : begin + size]
        _check(content, line, f"{path}, line {number}")
        value = content if place is None else (place[0], place[1] + begin, size)
        record = SavedRecord(
            head["kind"],
            head["name"],
            head["sequence"],
            head["attempt_id"],
            head["attempt_number"],
            value,
        )
        self._by_rollout.setdefault(head["rollout_id"], []).append(record)


def _check(content: bytes, line: bytes, where: str) -> None:
    """Raise :class:`RecordError` for a value that would make the row unreadable that it becomes part of."""
    try:
        document = orjson.loads(content)  # raises unless the value is the last member
        orjson.dumps(document)  # raises for a nesting that our own encoder never makes
        if may_be_tagged(line):
            decode(document)
    except DAMAGE as error:
        raise RecordError(f"{where}: a record with damaged content ({error!r}).") from error


def _lines(descriptor: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and content of each line."""
    begin = 0
    with open(descriptor, "rb", closefd=False) as file:
        for number, line in enumerate(file, 1):
            yield number, begin, line
            begin += len(line)


def load_value(record: SavedRecord) -> Any:
    """The value as a JSON document, not yet decoded. Raises :class:`ValueError` and :class:`OSError`."""
    return orjson.loads(record.value())
