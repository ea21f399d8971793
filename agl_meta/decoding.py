"""From a JSON document back to values; the counterpart of :mod:`agl_meta.encoding`.

Builtin types come back as they were. Classes of somebody's are not imported, let alone called: their
instances come back as :class:`SavedObject`, :class:`SavedEnum` and :class:`SavedArray`, which say what they
were. A document is input from another machine: nothing in it is executed, and no size in it is believed.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import pathlib
import re
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import attrs

from agl_meta.encoding_objects import TAG


class SavedObject(dict[str, Any]):
    """An object's fields as a dict, and the name of its class.

    Equal to a plain dict with the same fields.
    """

    def __init__(self, type: str, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.type = type
        """``module.Class``."""

    def __repr__(self) -> str:
        return f"<{self.type} {dict(self)!r}>"


@attrs.frozen
class SavedEnum:
    """A member of an enumeration."""

    type: str
    """``module.Class``."""
    name: str | None
    """Name of the member; ``None`` for a combination of flags without one."""
    value: Any
    """What the member stands for."""


@attrs.frozen
class SavedArray:
    """A tensor, or an array where numpy is not installed or only the first elements were saved."""

    dtype: str
    shape: tuple[int, ...]
    elements: list[Any]
    """All elements in C order, or the first ones if :attr:`is_cut`."""
    is_cut: bool = False


@attrs.frozen
class Unsaved:
    """What could not be saved."""

    type: str
    """``module.Class``."""
    why: str
    name: str | None = None
    """Qualified name of a function, class or module."""


def decode(document: Any) -> Any:
    """Restore what :func:`agl_meta.encoding.encode` tagged, in a document that was parsed.

    Raises :class:`ValueError`, :class:`TypeError` or :class:`KeyError` for a damaged tag. An unknown
    one is given back as it stands.
    """
    return _decode(document, {})


def _decode(document: Any, parts: dict[int, Any]) -> Any:
    if type(document) is list:
        return [_decode(item, parts) for item in document]
    if type(document) is not dict:
        return document
    kind = document.get(TAG)
    if kind is None:
        return {key: _decode(item, parts) for key, item in document.items()}
    if kind == "parts":
        return _parts(document["v"])
    if kind == "part":
        # Parts lead to later ones only: one that does not is no work of the encoder.
        return parts[document["v"]]
    restore = _RESTORE.get(kind) if isinstance(kind, str) else None
    if restore is None:
        return document
    values = {key: _decode(item, parts) for key, item in document.items() if key != TAG}
    return restore(values)


def _parts(documents: list[Any]) -> Any:
    done: dict[int, Any] = {}
    for index in reversed(range(len(documents))):
        done[index] = _decode(documents[index], done)
    return done[0]


def _bytes(values: dict[str, Any]) -> Any:
    content = base64.b64decode(values["v"], validate=True)
    return bytearray(content) if values.get("type") == "bytearray" else content


def _moment(cls: Any) -> Callable[[dict[str, Any]], Any]:
    def restore(values: dict[str, Any]) -> Any:
        moment = cls.fromisoformat(values["v"])
        if "zone" in values:
            try:
                moment = moment.replace(tzinfo=zoneinfo.ZoneInfo(values["zone"]))
            except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
                pass  # a machine without that zone keeps the offset
        return moment.replace(fold=1) if values.get("fold") else moment

    return restore


def _path(values: dict[str, Any]) -> pathlib.PurePath:
    name = values["type"]
    if name.startswith("Pure") or name != type(pathlib.Path()).__name__:
        windows = "Windows" in name
        return (pathlib.PureWindowsPath if windows else pathlib.PurePosixPath)(values["v"])
    return pathlib.Path(values["v"])


def _namedtuple(values: dict[str, Any]) -> Any:
    name = re.sub(r"\W", "_", values["type"].rpartition(".")[2], flags=re.ASCII)
    name = name if name.isidentifier() else f"_{name}"
    # rename: field names come from a file; odd ones are replaced, never executed.
    cls = collections.namedtuple(name, values["fields"], rename=True)  # type: ignore[misc]
    return cls(*values["v"])


def _subclass(values: dict[str, Any]) -> Any:
    held = values["v"]
    if "fields" in values:
        return SavedObject(values["type"], {"": held, **values["fields"]})
    return held


def _numpy_scalar(values: dict[str, Any]) -> Any:
    numpy, held = _numpy(), values["v"]
    if numpy is None or not _NUMBER_DTYPE.fullmatch(values["dtype"]):
        return held
    return numpy.dtype(values["dtype"]).type(held)


def _ndarray(values: dict[str, Any]) -> Any:
    numpy, shape = _numpy(), tuple(values["shape"])
    if numpy is None or values.get("cut"):
        return SavedArray(values["dtype"], shape, values["v"], bool(values.get("cut")))
    if _NUMBER_DTYPE.fullmatch(values["dtype"]):
        array = numpy.array(values["v"], dtype=values["dtype"])
    elif values["dtype"][1:2] in ("U", "S"):
        array = numpy.array(values["v"]) if values["v"] else numpy.array([], values["dtype"][:2])
    else:
        array = numpy.empty(len(values["v"]), dtype=object)
        array[:] = values["v"]
    return array.reshape(shape)


def _tensor(values: dict[str, Any]) -> SavedArray:
    return SavedArray(values["dtype"], tuple(values["shape"]), values["v"], bool(values.get("cut")))


# A dtype from a file may name a size of its own; these can't.
_NUMBER_DTYPE = re.compile(
    r"[<>|=]?[biufc](1|2|4|8|16|32)|[<>]?[mM]8(\[\w{1,6}\])?|bool|u?int(8|16|32|64)"
    r"|float(16|32|64|128)|complex(64|128|256)|(datetime|timedelta)64(\[\w{1,6}\])?",
    re.ASCII,
)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


_RESTORE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda values: int(values["v"], 16),
    "float": lambda values: float(values["v"]),
    "complex": lambda values: complex(*values["v"]),
    "text": lambda values: base64.b64decode(values["v"], validate=True).decode("utf-8", "surrogatepass"),
    "bytes": _bytes,
    "tuple": lambda values: tuple(values["v"]),
    "set": lambda values: set(values["v"]),
    "frozenset": lambda values: frozenset(values["v"]),
    "deque": lambda values: collections.deque(values["v"]),
    "dict": lambda values: dict(values["v"]),
    "range": lambda values: range(*values["v"]),
    "datetime": _moment(datetime.datetime),
    "time": _moment(datetime.time),
    "date": lambda values: datetime.date.fromisoformat(values["v"]),
    "timedelta": lambda values: datetime.timedelta(*values["v"]),
    "decimal": lambda values: decimal.Decimal(values["v"]),
    "fraction": lambda values: fractions.Fraction(*values["v"]),
    "uuid": lambda values: uuid.UUID(values["v"]),
    "path": _path,
    "enum": lambda values: SavedEnum(values["type"], values["name"], values["v"]),
    "namedtuple": _namedtuple,
    "subclass": _subclass,
    "object": lambda values: SavedObject(values["type"], values["v"]),
    "npscalar": _numpy_scalar,
    "ndarray": _ndarray,
    "tensor": _tensor,
    "unsaved": lambda values: Unsaved(values["type"], values["why"], values.get("name")),
}
