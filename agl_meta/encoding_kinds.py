"""How each kind of value is written: a table from types to handlers.

A handler gives what orjson writes as it is. It looks at types and reads fields; it runs no code of a user's
class, and imports no package that the value does not come from.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import traceback
import types
import uuid
from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

from agl_meta.encoding_objects import TAG, fields_of, is_text, remembered, type_name, unsaved

if TYPE_CHECKING:
    from agl_meta.encoding import Encoder

Handler = Callable[["Encoder", Any, int], Any]
"""From the encoder, a value and its depth to JSON."""

MAX_ELEMENTS = 10_000
"""Elements of an array or tensor that is saved whole; of a larger one the first :data:`HEAD` are."""
HEAD = 100
_MAX_TRACEBACK = 20_000


# ------------------------------------------------------------------------------------------- values


def _same(_: Encoder, value: Any, __: int) -> Any:
    return value


def _int(_: Encoder, value: int, __: int) -> Any:
    # int() of a long decimal text is limited and slow; of a hexadecimal one it is neither.
    return value if -(2**63) <= value < 2**64 else {TAG: "int", "v": hex(value)}


def _float(_: Encoder, value: float, __: int) -> Any:
    return value if isfinite(value) else {TAG: "float", "v": float.__repr__(value)}


def _str(_: Encoder, value: str, __: int) -> Any:
    if is_text(value):
        return value
    return {TAG: "text", "v": _base64(value.encode("utf-8", "surrogatepass"))}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _bytes(_: Encoder, value: Any, __: int) -> Any:
    return {TAG: "bytes", "type": type(value).__name__, "v": _base64(bytes(value))}


def _complex(encoder: Encoder, value: complex, depth: int) -> Any:
    return {TAG: "complex", "v": encoder.values((value.real, value.imag), depth)}


def _list(encoder: Encoder, value: list[Any], depth: int) -> Any:
    return encoder.values(list(value), depth)


def _dict(encoder: Encoder, value: dict[Any, Any], depth: int) -> Any:
    return encoder.mapping(value, depth)


def _sequence(kind: str) -> Handler:
    def handler(encoder: Encoder, value: Any, depth: int) -> Any:
        return {TAG: kind, "v": encoder.values(list(value), depth)}

    return handler


def _text_of(kind: str, text: Callable[[Any], str]) -> Handler:
    return lambda _, value, __: {TAG: kind, "v": text(value)}


def _moment(kind: str) -> Handler:
    def handler(_: Encoder, value: Any, __: int) -> Any:
        tag = {TAG: kind, "v": value.isoformat()}
        zone = getattr(value.tzinfo, "key", None)  # of a zoneinfo; others keep their offset only
        if type(zone) is str:
            tag["zone"] = zone
        if value.fold:
            tag["fold"] = 1
        return tag

    return handler


def _fraction(encoder: Encoder, value: fractions.Fraction, depth: int) -> Any:
    return {TAG: "fraction", "v": encoder.values((value.numerator, value.denominator), depth)}


def _timedelta(_: Encoder, value: datetime.timedelta, __: int) -> Any:
    return {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}


def _range(encoder: Encoder, value: range, depth: int) -> Any:
    return {TAG: "range", "v": encoder.values((value.start, value.stop, value.step), depth)}


def _path(encoder: Encoder, value: pathlib.PurePath, depth: int) -> Any:
    text = encoder.value(str(value), depth + 1)
    return {TAG: "path", "type": type(value).__name__, "v": text}


def _enum(encoder: Encoder, value: enum.Enum, depth: int) -> Any:
    name = encoder.value(value._name_, depth + 1)
    held = encoder.value(value._value_, depth + 1)
    return {TAG: "enum", "type": type_name(type(value)), "name": name, "v": held}


def _exception(encoder: Encoder, value: BaseException, depth: int) -> Any:
    lines = traceback.format_tb(value.__traceback__)
    text = "".join(lines)[-_MAX_TRACEBACK:].encode("utf-8", "backslashreplace").decode()
    fields = {"args": encoder.value(value.args, depth + 1), "traceback": text}
    for name in ("__cause__", "__context__"):
        other = getattr(value, name)
        if other is not None:
            fields[name] = encoder.value(other, depth + 1)
    fields.update(encoder.fields(value, depth))
    return {TAG: "object", "type": type_name(type(value)), "v": fields}


def _named(_: Encoder, value: Any, __: int) -> Any:
    # Functions, classes and modules hold nothing to save, but their name tells which one it was.
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    text = f"{module}.{name}" if isinstance(module, str) else f"{name}"
    text = text if is_text(text) else ascii(text)
    return unsaved(type(value), "it is code, not data", name=text)


def _namedtuple(encoder: Encoder, value: Any, depth: int) -> Any:
    names = encoder.values(type(value)._fields, depth)
    items = encoder.values(tuple.__iter__(value), depth)
    return {TAG: "namedtuple", "type": type_name(type(value)), "fields": names, "v": items}


def _subclass(base: type) -> Handler:
    """A subclass of a builtin type: as the builtin, with the fields that instances have besides."""

    def handler(encoder: Encoder, value: Any, depth: int) -> Any:
        # The type's own methods, not the subclass's: those are the user's code.
        held: Any
        if base is dict:
            held = encoder.mapping(value, depth)
        elif base in (list, tuple, set, frozenset, collections.deque):
            plain: Any = list(base.__iter__(value))  # type: ignore[attr-defined]
            held = EXACT[base](encoder, plain, depth)
        elif base is str:
            held = _str(encoder, str.__str__(value), depth)
        elif base in (int, float, complex):
            held = EXACT[base](encoder, _NUMBERS[base](value), depth)
        else:
            held = EXACT[base](encoder, base(value), depth)
        tag = {TAG: "subclass", "type": type_name(type(value)), "v": held}
        more = encoder.fields(value, depth)
        return {**tag, "fields": more} if more else tag

    return handler


_NUMBERS: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
}


def _object(encoder: Encoder, value: Any, depth: int) -> Any:
    found = fields_of(value)
    fields = encoder.plain(found)
    if fields is None:
        fields = encoder.named(found, depth)
    return {TAG: "object", "type": type_name(type(value)), "v": fields}


def _opaque(_: Encoder, value: Any, __: int) -> Any:
    return unsaved(type(value), "it is a resource or a computation, not data")


# ------------------------------------------------------------------------------- numpy and torch


def _numpy_scalar(encoder: Encoder, value: Any, depth: int) -> Any:
    item: Any = str(value) if value.dtype.kind in "Mm" else value.item()
    if type(item) is type(value):  # longdouble has no Python counterpart
        item = str(value)
    held = encoder.value(item, depth + 1)
    return {TAG: "npscalar", "dtype": str(value.dtype), "v": held}


def _numpy_array(encoder: Encoder, value: Any, depth: int) -> Any:
    import numpy as np

    flat = np.asarray(value).reshape(-1)
    tag: dict[str, Any] = {TAG: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape)}
    if flat.size > MAX_ELEMENTS:
        flat = flat[:HEAD]
        tag["cut"] = True
    if value.dtype.kind in "Mm" or value.dtype == np.longdouble:
        flat = flat.astype(str)
    return {**tag, "v": _elements(encoder, flat.tolist(), depth)}


def _tensor(encoder: Encoder, value: Any, depth: int) -> Any:
    flat = value.detach().reshape(-1)
    tag: dict[str, Any] = {TAG: "tensor", "dtype": str(value.dtype), "shape": list(value.shape)}
    if flat.numel() > MAX_ELEMENTS:
        flat = flat[:HEAD]
        tag["cut"] = True
    return {**tag, "v": _elements(encoder, flat.cpu().tolist(), depth)}


def _elements(encoder: Encoder, elements: list[Any], depth: int) -> list[Any]:
    plain = all(map(isfinite, elements)) if set(map(type, elements)) <= {float} else False
    return elements if plain else encoder.values(elements, depth)


# ----------------------------------------------------------------------------------- which handler

EXACT: dict[type, Handler] = {
    type(None): _same,
    bool: _same,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    list: _list,
    tuple: _sequence("tuple"),
    set: _sequence("set"),
    frozenset: _sequence("frozenset"),
    collections.deque: _sequence("deque"),
    dict: _dict,
    range: _range,
    datetime.datetime: _moment("datetime"),
    datetime.time: _moment("time"),
    datetime.date: _text_of("date", datetime.date.isoformat),
    datetime.timedelta: _timedelta,
    decimal.Decimal: _text_of("decimal", decimal.Decimal.__str__),
    fractions.Fraction: _fraction,
    uuid.UUID: _text_of("uuid", lambda value: value.hex),
    types.FunctionType: _named,
    types.BuiltinFunctionType: _named,
    types.MethodType: _named,
    types.ModuleType: _named,
    type: _named,
}

LEAVES = {
    _same,
    _int,
    _float,
    _str,
    _bytes,
    _named,
    _opaque,
}
"""Handlers of what contains nothing: no depth, no cycle."""

_BASES: list[tuple[type, Handler]] = [
    (enum.Enum, _enum),
    (BaseException, _exception),
    (pathlib.PurePath, _path),
    (type, _named),
    (types.ModuleType, _named),
    *(
        (base, _subclass(base))
        for base in (
            dict,
            list,
            tuple,
            set,
            frozenset,
            collections.deque,
            str,
            bytes,
            bytearray,
            int,
            float,
            complex,
        )
    ),
    (datetime.datetime, _moment("datetime")),
    (datetime.date, _text_of("date", datetime.date.isoformat)),
]

# What has one of these holds a resource or is a computation: nothing to walk into.
_RESOURCE_METHODS = (
    "__enter__",
    "__aenter__",
    "__next__",
    "__anext__",
    "__await__",
    "__call__",
    "acquire",
    "fileno",
    "close",
    "aclose",
)


@remembered
def handler_of(cls: type) -> Handler:
    """The handler of a type that has none of its own; looks at the type, never at the instance."""
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        # Before the builtin bases: numpy.float64 is a float, too.
        if _inherits(cls, numpy, "generic"):
            return _numpy_scalar
        if _inherits(cls, numpy, "ndarray"):
            return _numpy_array
    if _inherits(cls, sys.modules.get("torch"), "Tensor"):
        return _tensor
    if issubclass(cls, tuple) and isinstance(cls.__dict__.get("_fields"), tuple):
        return _namedtuple
    for base, handler in _BASES:
        if issubclass(cls, base):
            return handler
    if not _is_data_class(cls) and any(_defines(cls, name) for name in _RESOURCE_METHODS):
        return _opaque
    if _holds_fields(cls):
        return _object
    return _opaque


def _inherits(cls: type, module: Any, name: str) -> bool:
    base = getattr(module, name, None)
    return isinstance(base, type) and issubclass(cls, base)


def _is_data_class(cls: type) -> bool:
    marks = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__", "__fields__")
    return any(_defines(cls, name) for name in marks)


def _defines(cls: type, name: str) -> bool:
    return any(name in base.__dict__ for base in cls.__mro__)


def _holds_fields(cls: type) -> bool:
    # An instance of a class written in Python has a __dict__ or slots; one of C's holds what it hides.
    return cls.__dictoffset__ != 0 or any("__slots__" in base.__dict__ for base in cls.__mro__)
