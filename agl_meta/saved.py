"""What the rollouts of one pass saved: an index of records by rollout; the values stay where they are.

A pass of any number of rollouts is joined with what they saved by reading each shard once; a value is read
again when its row is written, as the bytes it was saved in.
"""

from __future__ import annotations

import collections
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import attrs
import orjson

from agl_meta.decoding import decode
from agl_meta.describing import describe_error
from agl_meta.errors import RecordError
from agl_meta.files import (
    MAX_REPORTED,
    AnyPath,
    Entry,
    Line,
    list_folder,
    open_descriptor,
    open_files,
    read_lines,
)
from agl_meta.records import DAMAGE, OUTCOME, PREDICTION, may_be_tagged, parse_record
from agl_meta.shards import SHARD_SUFFIX

Attempt = str | int | None
"""What tells the attempts of a rollout apart: upstream's ``attempt_id`` (v1), the number of claims (v0)."""

_MAX_OPEN = 64


@attrs.frozen
class SavedRecord:
    """One record of a rollout."""

    kind: str
    name: str
    sequence: int
    attempt_id: str | None
    attempt_number: int | None
    saved_at: float
    size: int
    """Bytes of its encoded value."""
    _value: bytes | int
    _source: _Source | None

    @property
    def attempt(self) -> Attempt:
        """The attempt that saved it."""
        return self.attempt_id if self.attempt_id is not None else self.attempt_number

    def is_same(self, other: SavedRecord) -> bool:
        """Whether one call wrote both."""
        return self.saved_at == other.saved_at and self.sequence == other.sequence

    def value(self) -> bytes:
        """The encoded value. Raises :class:`OSError`."""
        if isinstance(self._value, bytes):
            return self._value
        assert self._source is not None
        return self._source.read(self._value, self.size)


class _Source(Protocol):
    """Where values stand until they are needed."""

    def read(self, begin: int, size: int) -> bytes:
        """A part of it. Raises :class:`OSError`."""


class _Shard:
    """A local file of records, and how far it was read."""

    def __init__(self, path: Path, files: _OpenFiles) -> None:
        self.path = path
        self.lines = 0
        self.end = 0
        """Where the last whole line ends that was read."""
        self.damaged = 0
        self._files = files

    def read(self, begin: int, size: int) -> bytes:
        content = os.pread(self._files.descriptor(self.path), size, begin)
        if len(content) != size:
            raise OSError(f"{self.path} was cut short while it was read")
        return content


class _OpenFiles:
    """Descriptors of the files that are read again and again; a process may have few."""

    def __init__(self) -> None:
        self._open: collections.OrderedDict[Path, int] = collections.OrderedDict()

    def descriptor(self, path: Path) -> int:
        """Open a file, or find it open. Raises :class:`OSError`."""
        found = self._open.get(path)
        if found is None:
            # Nobody plants a link to have another file read into a row.
            found = self._open[path] = open_descriptor(path, os.O_NOFOLLOW)
            if len(self._open) > _MAX_OPEN:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(path)
        return found

    def close(self) -> None:
        """Close all."""
        while self._open:
            os.close(self._open.popitem()[1])


class _Spool:
    """Values of remote records in a temporary file, since each would have to be fetched again."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def add(self, value: bytes) -> int:
        """Where it stands from now on. Raises :class:`OSError`."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        begin = self._file.seek(0, os.SEEK_END)
        self._file.write(value)
        return begin

    def read(self, begin: int, size: int) -> bytes:
        assert self._file is not None
        self._file.seek(begin)
        return self._file.read(size)

    def close(self) -> None:
        """Delete it."""
        if self._file is not None:
            self._file.close()


class SavedRecords:
    """The records in the shards of a pass, by rollout; a context manager, which holds files open.

    Args:
        shards: the folder of the shards; ``None`` if there is none.
    """

    def __init__(self, shards: AnyPath | None) -> None:
        self._folder = shards
        self._by_rollout: dict[str | None, list[SavedRecord]] = {}
        self._shards: dict[str, _Shard] = {}
        self._fetched: set[str] = set()
        self._files = _OpenFiles()
        self._spool = _Spool()
        self._unreadable: list[dict[str, Any]] = []
        self._for_now: list[dict[str, Any]] = []

    def __enter__(self) -> SavedRecords:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; values that were not asked for are lost."""
        self._files.close()
        self._spool.close()

    @property
    def unreadable(self) -> list[dict[str, Any]]:
        """File, line and cause of each record that could not be read."""
        further = [
            _report(
                shard.path, None, f"{shard.damaged - MAX_REPORTED} further lines of this file are no records"
            )
            for shard in self._shards.values()
            if shard.damaged > MAX_REPORTED
        ]
        return [*self._unreadable, *self._for_now, *further]

    def of(self, rollout_id: str) -> list[SavedRecord]:
        """What a rollout saved in all its attempts, in the order of its shards."""
        return self._by_rollout.get(rollout_id, [])

    def add_lines(self, lines: Iterable[bytes], source: str) -> None:
        """Add records that came another way than in a shard. ``source`` names it in a report."""
        for number, line in enumerate(lines, 1):
            try:
                self._add(Line(number, 0, len(line), line), Path(source), None)
            except RecordError as error:
                self._unreadable.append(_report(source, number, error))

    def look(self) -> None:
        """Read what was written to the shards since the last call."""
        self._for_now = []
        if self._folder is None:
            return
        try:
            entries = [each for each in list_folder(self._folder) if each.name.endswith(SHARD_SUFFIX)]
        except OSError as error:
            self._for_now.append(_report(self._folder, None, error))
            return
        if isinstance(self._folder, Path):
            for entry in entries:
                self._look_at(entry.name, self._folder / entry.name)
        else:
            self._fetch([entry for entry in entries if entry.name not in self._fetched])

    def _look_at(self, name: str, path: Path) -> None:
        shard = self._shards.setdefault(name, _Shard(path, self._files))
        try:
            with open(os.dup(self._files.descriptor(path)), "rb") as file:
                file.seek(shard.end)
                for line in read_lines(file, shard.lines, shard.end):
                    if line.content is not None and not line.content.endswith(b"\n"):
                        why = f"{path}, line {line.number}: the record was cut short, or is being written."
                        self._for_now.append(_report(path, line.number, why))
                        break
                    shard.lines, shard.end = line.number, line.end
                    self._add_or_report(line, path, shard)
        except OSError as error:
            self._for_now.append(_report(path, None, error))

    def _fetch(self, entries: list[Entry]) -> None:
        try:
            for entry, file in open_files(entries):
                if isinstance(file, Exception):
                    self._for_now.append(_report(entry.path, None, file))
                    continue
                with file:
                    for line in read_lines(file):
                        self._add_or_report(line, entry.path, None)
                self._fetched.add(entry.name)
        except OSError as error:
            assert self._folder is not None
            self._for_now.append(_report(self._folder, None, error))

    def _add_or_report(self, line: Line, path: AnyPath, shard: _Shard | None) -> None:
        try:
            self._add(line, path, shard)
        except RecordError as error:
            if shard is not None:
                shard.damaged += 1
            if shard is None or shard.damaged <= MAX_REPORTED:
                self._unreadable.append(_report(path, line.number, error))

    def _add(self, line: Line, path: AnyPath, shard: _Shard | None) -> None:
        head, value, span = parse_record(line.content, path, line.number)
        if head["kind"] not in (PREDICTION, OUTCOME):
            return
        assert line.content is not None
        _check(value, line.content, f"{path}, line {line.number}")
        content = orjson.dumps(value) if span is None else line.content[span[0] : span[1]]
        place: bytes | int = content
        source: _Source | None = shard
        if shard is not None and span is not None:
            place = line.begin + span[0]
        elif not isinstance(path, Path):
            place, source = self._spool.add(content), self._spool
        records = self._by_rollout.setdefault(head["rollout_id"], [])
        record = SavedRecord(
            head["kind"],
            head["name"],
            head["sequence"],
            head["attempt_id"],
            head["attempt_number"],
            head["saved_at"],
            len(content),
            place,
            source,
        )
        # One call wrote both: somebody copied its file.
        if any(record.is_same(each) for each in records):
            raise RecordError(f"{path}, line {line.number}: this record stands in another place, too.")
        records.append(record)


def _check(document: Any, line: bytes, where: str) -> None:
    """Raise :class:`RecordError` for a value that would make the row unreadable that it becomes part of."""
    try:
        orjson.dumps(document)  # raises for a nesting that our own encoder never makes
        if may_be_tagged(line):
            decode(document)
    except DAMAGE as error:
        raise RecordError(
            f"{where}: a record with damaged content ({describe_error(error):.200})."
        ) from error


def _report(file: object, line: int | None, why: object) -> dict[str, Any]:
    return {"file": str(file), "line": line, "why": str(why)}


def load_value(record: SavedRecord) -> Any:
    """The value as a JSON document, not yet decoded. Raises :class:`ValueError` and :class:`OSError`."""
    return orjson.loads(record.value())
