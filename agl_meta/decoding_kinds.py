"""How each kind of tag is restored; the counterpart of :mod:`agl_meta.encoding_kinds`.

What a function here is given may be anything that JSON can hold, and it may raise anything but
:class:`MemoryError`. What it does must take time and memory in proportion to what it is given.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import fractions
import functools
import keyword
import pathlib
import re
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

from agl_meta import decoding_arrays as arrays
from agl_meta.decoding_bounds import MAX_CLASSES
from agl_meta.decoding_tags import Tag
from agl_meta.decoding_values import (
    SavedConstant,
    SavedCut,
    SavedEnum,
    SavedFrame,
    SavedImage,
    SavedItems,
    SavedMoment,
    SavedObject,
    Unsaved,
)

Restore = Callable[[Tag], Any]

_MAX_BITS = 2**14
"""Of numbers that are divided by each other: that takes the product of their lengths."""
_MAX_FIELDS = 256
_MAX_NAME = 200
_FLOATS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented}
# What hashing and comparing raise: for what can't be hashed, such as a signaling nan, or not compared.
_NO_MEMBER = (TypeError, ValueError, ArithmeticError)


# ------------------------------------------------------------------------------------------- leaves


def _base64(tag: Tag) -> bytes:
    return base64.b64decode(tag.text(), validate=True)


def _bytes(tag: Tag) -> Any:
    content = _base64(tag)
    return bytearray(content) if tag.text_or_none("type") == "bytearray" else content


def _complex(tag: Tag) -> complex:
    real, imaginary = tag.items(length=2)
    if not {int, float}.issuperset((type(real), type(imaginary))):
        raise TypeError("a part is no number")
    return complex(real, imaginary)


def _constant(tag: Tag) -> Any:
    return _CONSTANTS.get(tag.text(), SavedConstant(tag.text()))


def _fraction(tag: Tag) -> Any:
    numerator, denominator = tag.whole(length=2)
    if min(numerator.bit_length(), denominator.bit_length()) > _MAX_BITS:
        return SavedObject("fractions.Fraction", {"numerator": numerator, "denominator": denominator})
    return fractions.Fraction(numerator, denominator)


def _range(tag: Tag) -> Any:
    start, stop, step = numbers = tag.whole(length=3)
    if max(map(int.bit_length, numbers)) > _MAX_BITS:
        return SavedObject("range", {"start": start, "stop": stop, "step": step})
    return range(start, stop, step)


def _path(tag: Tag) -> pathlib.PurePath:
    name, text = tag.text("type"), tag.any_text()
    if name.startswith("Pure") or name != type(pathlib.Path()).__name__:
        windows = "Windows" in name
        return (pathlib.PureWindowsPath if windows else pathlib.PurePosixPath)(text)
    return pathlib.Path(text)


def _unsaved(tag: Tag) -> Unsaved:
    return Unsaved(tag.text("type"), tag.text("why"), tag.text_or_none("name"))


def _image(tag: Tag) -> SavedImage:
    path = tag.text_or_none("path")
    if path is not None and (path.startswith("/") or ".." in path.split("/")):
        raise ValueError("path leads out of the folder of the pass")
    why, digest = tag.text_or_none("why"), tag.text("digest")
    return SavedImage(tag.text("type"), tag.text("mode"), tag.shape("size"), digest, path, why)


# -------------------------------------------------------------------------------------------- times


def _moment(cls: Any) -> Restore:
    def restore(tag: Tag) -> Any:
        moment = cls.fromisoformat(tag.text())
        if tag.has("fold"):
            moment = moment.replace(fold=tag.number("fold"))
        name = tag.text_or_none("zone")
        zone = None if name is None else _zone(name)
        if zone is not None:
            named = moment.replace(tzinfo=zone)
            # Where this machine knows the zone by other rules, the offset says which moment it was.
            if named.utcoffset() == moment.utcoffset():
                moment = named
        return SavedMoment(moment, tag.text("lost")) if tag.has("lost") else moment

    return restore


def _named_zone(tag: Tag) -> Any:
    name = None if tag.values["v"] is None else tag.any_text()
    found = None if name is None else _zone(name)
    return SavedConstant(f"zoneinfo.ZoneInfo({name!r})") if found is None else found


def _zone(name: str) -> zoneinfo.ZoneInfo | None:
    # Not asked for others: a name is a path, and looking for one that there is not takes long.
    plain = name.removeprefix("posix/").removeprefix("right/")
    return _known_zone(name) if plain in _zone_names() else None


@functools.cache
def _zone_names() -> set[str]:
    return zoneinfo.available_timezones()


@functools.cache
def _known_zone(name: str) -> zoneinfo.ZoneInfo | None:
    try:
        return zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        return None  # not known on this machine


def _timedelta(tag: Tag) -> datetime.timedelta:
    days, seconds, microseconds = tag.whole(length=3)
    return datetime.timedelta(days, seconds, microseconds)


# --------------------------------------------------------------------------------------- containers


def _set(kind: Any) -> Restore:
    def restore(tag: Tag) -> Any:
        items = tag.items()
        try:
            found = tag.bounds.build(kind, items, items)
        except _NO_MEMBER:
            found = None
        return SavedItems(kind.__name__, items) if found is None or len(found) != len(items) else found

    return restore


def _dict(tag: Tag) -> Any:
    items = tag.items()  # keys and values in turns
    keys = items[::2]
    pairs = list(zip(keys, items[1::2], strict=True))
    found: dict[Any, Any] | None
    try:
        found = tag.bounds.build(dict, pairs, keys)
    except _NO_MEMBER:
        found = None
    return SavedItems("dict", pairs) if found is None or len(found) != len(pairs) else found


def _deque(tag: Tag) -> Any:
    items, most = tag.items(), tag.number("maxlen") if tag.has("maxlen") else None
    if most is not None and len(items) > most:
        raise ValueError("more items than maxlen")
    depth = tag.bounds.depth(items)
    if depth is None:
        return SavedItems("deque", items)
    found = collections.deque(items, most)
    tag.bounds.note_depth(found, depth)
    return found


def _slice(tag: Tag) -> Any:
    items = tag.items(length=3)
    depth = tag.bounds.depth(items)
    if depth is None:
        return SavedItems("slice", items)
    found = slice(*items)
    tag.bounds.note_depth(found, depth)
    return found


def _namedtuple(tag: Tag) -> Any:
    fields, items = tuple(tag.texts("fields")), tag.items()
    name = re.sub(r"\W", "_", tag.text("type").rpartition(".")[2][:_MAX_NAME], flags=re.ASCII)
    name = name if name.isidentifier() and not keyword.iskeyword(name) else f"_{name}"
    classes = tag.bounds.classes
    if (
        len(fields) > _MAX_FIELDS
        or max(map(len, fields), default=0) > _MAX_NAME
        or (len(classes) >= MAX_CLASSES and (name, fields) not in classes)
    ):
        return SavedItems("namedtuple", list(zip(fields, items, strict=True)))
    classes.add((name, fields))
    return _namedtuple_class(name, fields)(*items)


@functools.lru_cache(maxsize=MAX_CLASSES)
def _namedtuple_class(name: str, fields: tuple[str, ...]) -> Any:
    # rename: field names come from a file; odd ones are replaced, never executed.
    return collections.namedtuple(name, fields, rename=True)  # type: ignore[misc]


def _subclass(tag: Tag) -> Any:
    held = tag.values["v"]
    return SavedObject(tag.text("type"), {"": held, **tag.fields("fields")}) if tag.has("fields") else held


def _frame(tag: Tag) -> SavedFrame:
    return SavedFrame(
        tag.text("type"),
        tag.shape(),
        tag.items("columns"),
        tag.items("index"),
        tag.items("names"),
        tag.texts("dtypes"),
        tag.rows(),
        tag.is_set("cut"),
    )


def _enum(tag: Tag) -> SavedEnum:
    name = None if tag.values["name"] is None else tag.any_text("name")
    return SavedEnum(tag.text("type"), name, tag.values["v"])


RESTORE: dict[str, Restore] = {
    "int": lambda tag: int(tag.text(), 16),
    "float": lambda tag: _FLOATS[tag.text()],
    "complex": _complex,
    "text": lambda tag: _base64(tag).decode("utf-8", "surrogatepass"),
    "bytes": _bytes,
    "tuple": lambda tag: tuple(tag.items()),
    "set": _set(set),
    "frozenset": _set(frozenset),
    "deque": _deque,
    "dict": _dict,
    "slice": _slice,
    "constant": _constant,
    "timezone": lambda tag: datetime.timezone(_timedelta(tag)),
    "zone": _named_zone,
    "cut": lambda tag: SavedCut(tag.text("type"), tag.values["v"], tag.number("length")),
    "file": _image,
    "image": _image,
    "frame": _frame,
    "range": _range,
    "datetime": _moment(datetime.datetime),
    "time": _moment(datetime.time),
    "date": lambda tag: datetime.date.fromisoformat(tag.text()),
    "timedelta": _timedelta,
    "decimal": lambda tag: decimal.Decimal(tag.text()),
    "fraction": _fraction,
    "uuid": lambda tag: uuid.UUID(tag.text()),
    "path": _path,
    "enum": _enum,
    "namedtuple": _namedtuple,
    "subclass": _subclass,
    "object": lambda tag: SavedObject(tag.text("type"), tag.fields()),
    "npscalar": arrays.numpy_scalar,
    "ndarray": arrays.numpy_array,
    "masked": arrays.masked,
    "array": arrays.std_array,
    "tensor": arrays.tensor,
    "column": arrays.tensor,
    "unsaved": _unsaved,
}
"""From the kind of a tag to what restores its value."""
