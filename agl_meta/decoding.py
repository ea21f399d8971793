"""From a JSON document back to values; the counterpart of :mod:`agl_meta.encoding`.

Builtin types come back as they were. Classes of somebody's are not imported, let alone called: their
instances come back as :class:`SavedObject`, :class:`SavedEnum`, :class:`SavedArray` and the like, which say
what they were. A document is input from another machine: nothing in it is executed, and no size in it is
believed.
"""

from __future__ import annotations

import array
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


@attrs.frozen
class SavedCut:
    """The first part of a value that was too large for its record."""

    type: str
    """Name of the builtin type: ``str``, ``bytes``, ``list``, ``dict`` …"""
    head: Any
    """What was kept."""
    length: int
    """``len()`` of the whole value."""


class SavedItems(list[Any]):
    """The items of a set, or the pairs of a mapping, some of which can be no members or keys any more.

    Objects come back as :class:`SavedObject`, which can't be hashed, and what could not be saved as
    :class:`Unsaved`, of which two may be equal: no two are merged.
    """

    def __init__(self, type: str, items: list[Any]) -> None:
        super().__init__(items)
        self.type = type
        """``set``, ``frozenset`` or ``dict``."""

    def __repr__(self) -> str:
        return f"<{self.type} {list(self)!r}>"


@attrs.frozen
class SavedConstant:
    """A value that is the only one of its kind, such as ``pandas.NA``."""

    name: str


@attrs.frozen
class SavedImage:
    """An image of Pillow."""

    type: str
    """``module.Class``."""
    mode: str
    size: tuple[int, ...]
    """Width and height."""
    digest: str
    """A hash of its pixels."""
    path: str | None = None
    """Its file, below the folder of the pass; ``None`` if it was not written."""
    why: str | None = None
    """Why it was not written."""


@attrs.frozen
class SavedFrame:
    """A DataFrame, or a Series as its only column."""

    type: str
    """``module.Class``."""
    shape: tuple[int, ...]
    columns: list[Any]
    """Labels of the columns."""
    index: list[Any]
    """Labels of the rows; tuples, if there are several levels."""
    names: list[Any]
    """Names of the levels of the index."""
    dtypes: list[str]
    data: list[list[Any]]
    """The columns."""
    is_cut: bool = False
    """Whether only the first rows and columns were saved."""


@attrs.frozen
class SavedMoment:
    """A datetime or time whose own ``tzinfo`` did not tell its offset."""

    local: datetime.datetime | datetime.time
    why: str


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
        if values.get("fold"):
            moment = moment.replace(fold=1)
        zone = _zone(values["zone"]) if "zone" in values else None
        if zone is not None:
            named = moment.replace(tzinfo=zone)
            # Where this machine knows the zone by other rules, the offset says which moment it was.
            if named.utcoffset() == moment.utcoffset():
                moment = named
        return SavedMoment(moment, values["lost"]) if "lost" in values else moment

    return restore


def _zone(name: Any) -> zoneinfo.ZoneInfo | None:
    try:
        return zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        return None  # not known on this machine


def _set(kind: Any) -> Callable[[dict[str, Any]], Any]:
    def restore(values: dict[str, Any]) -> Any:
        items = list(values["v"])
        try:
            found = kind(items)
        except (TypeError, ArithmeticError):  # not hashable, as a signaling nan is not
            found = ()
        return found if len(found) == len(items) else SavedItems(kind.__name__, items)

    return restore


def _dict(values: dict[str, Any]) -> Any:
    pairs = [(key, item) for key, item in values["v"]]
    try:
        found = dict(pairs)
    except (TypeError, ArithmeticError):
        found = {}
    return found if len(found) == len(pairs) else SavedItems("dict", pairs)


def _array(values: dict[str, Any]) -> Any:
    if values.get("cut") or values["dtype"] not in set(array.typecodes):
        return _tensor(values)
    return array.array(values["dtype"], values["v"])


def _constant(values: dict[str, Any]) -> Any:
    return {"Ellipsis": ..., "NotImplemented": NotImplemented}.get(values["v"], SavedConstant(values["v"]))


def _timezone(values: dict[str, Any]) -> Any:
    return datetime.timezone(datetime.timedelta(*values["v"]))


def _image(values: dict[str, Any]) -> SavedImage:
    return SavedImage(
        values["type"],
        values["mode"],
        tuple(values["size"]),
        values["digest"],
        values.get("path"),
        values.get("why"),
    )


def _frame(values: dict[str, Any]) -> SavedFrame:
    return SavedFrame(
        values["type"],
        tuple(values["shape"]),
        values["columns"],
        values["index"],
        values["names"],
        values["dtypes"],
        values["v"],
        bool(values.get("cut")),
    )


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
    if numpy is None:
        return held
    dtype = _structure(values) or values["dtype"]
    if isinstance(dtype, str) and not _NUMBER_DTYPE.fullmatch(dtype):
        return held
    try:
        # Of a datetime the type alone has no unit.
        return _elements(numpy, [held], dtype)[0]
    except (TypeError, ValueError):
        if isinstance(dtype, str):
            raise
        return held  # part of it was cut


def _elements(numpy: Any, held: list[Any], dtype: Any) -> Any:
    if isinstance(dtype, str) and numpy.dtype(dtype).kind == "m":
        held = ["NaT" if item is None else item for item in held]
    return numpy.array(held, dtype=dtype)


def _structure(values: dict[str, Any]) -> list[tuple[str, str]] | None:
    """The dtype of a structured array, if numbers are all it holds."""
    names, formats = values.get("names"), values.get("formats")
    if not names or not formats or not all(_NUMBER_DTYPE.fullmatch(each) for each in formats):
        return None
    return list(zip(names, formats, strict=True))


def _ndarray(values: dict[str, Any]) -> Any:
    numpy, shape = _numpy(), tuple(values["shape"])
    if numpy is None or values.get("cut"):
        return SavedArray(values["dtype"], shape, values["v"], bool(values.get("cut")))
    structure = _structure(values)
    if structure is not None:
        try:
            found = _elements(numpy, values["v"], structure)
        except (TypeError, ValueError):  # one of them was cut
            return SavedArray(values["dtype"], shape, values["v"], True)
    elif _NUMBER_DTYPE.fullmatch(values["dtype"]):
        found = _elements(numpy, values["v"], values["dtype"])
    elif values["dtype"][1:2] in ("U", "S"):
        found = numpy.array(values["v"]) if values["v"] else numpy.array([], values["dtype"][:2])
    else:
        found = numpy.empty(len(values["v"]), dtype=object)
        # One by one: lists of equal length would be taken for a second dimension.
        for index, item in enumerate(values["v"]):
            found[index] = item
    return found.reshape(shape)


def _masked(values: dict[str, Any]) -> Any:
    numpy, data, mask = _numpy(), values["v"], values["mask"]
    if numpy is None or isinstance(data, SavedArray) or isinstance(mask, SavedArray):
        return SavedObject("numpy.ma.MaskedArray", {"data": data, "mask": mask})
    return numpy.ma.MaskedArray(data, mask)


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
    "set": _set(set),
    "frozenset": _set(frozenset),
    "deque": lambda values: collections.deque(values["v"], values.get("maxlen")),
    "dict": _dict,
    "slice": lambda values: slice(*values["v"]),
    "constant": _constant,
    "timezone": _timezone,
    "zone": lambda values: _zone(values["v"]) or SavedConstant(f"zoneinfo.ZoneInfo({values['v']!r})"),
    "cut": lambda values: SavedCut(values["type"], values["v"], values["length"]),
    "file": _image,
    "image": _image,
    "frame": _frame,
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
    "masked": _masked,
    "array": _array,
    "tensor": _tensor,
    "column": _tensor,
    "unsaved": lambda values: Unsaved(values["type"], values["why"], values.get("name")),
}
