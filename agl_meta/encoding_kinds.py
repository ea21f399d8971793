"""How each kind of value is written: a table from types to handlers.

A handler gives what orjson writes as it is. It looks at types and reads fields; it runs no code of a user's
class, and imports no package that the value does not come from.
"""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import gc
import pathlib
import re
import sys
import traceback
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from agl_meta import encoding_arrays as arrays
from agl_meta import encoding_images as images
from agl_meta import encoding_leaves as leaves
from agl_meta import encoding_tables as tables
from agl_meta import encoding_times as times
from agl_meta.encoding_objects import (
    TAG,
    fields_of,
    hides_state,
    instance_dict,
    is_text,
    namespaces,
    remembered,
    type_name,
    unsaved,
)

if TYPE_CHECKING:
    from agl_meta.encoding import Encoder

Handler = Callable[["Encoder", Any, int], Any]
"""From the encoder, a value and its depth to JSON."""

_MAX_TRACEBACK = 20_000


# ------------------------------------------------------------------------------------------- values


def _same(_: Encoder, value: Any, __: int) -> Any:
    return value


def _int(encoder: Encoder, value: int, __: int) -> Any:
    size = value.bit_length() // 4
    if size > encoder.room():
        return unsaved(int, f"it has {value.bit_length()} bits, more than the record has room for")
    encoder.take(size)
    return leaves.integer(value)


def _float(_: Encoder, value: float, __: int) -> Any:
    return leaves.number(value)


def _str(encoder: Encoder, value: str, __: int) -> Any:
    head = leaves.text_head(value, encoder.room())
    if head is None:
        encoder.take(len(value))
        return leaves.text(value)
    encoder.take(len(head))
    return leaves.cut("str", len(value), leaves.text(head))


def _bytes(encoder: Encoder, value: Any, _: int) -> Any:
    kind = type(value).__name__
    size = value.nbytes if kind == "memoryview" else len(value)
    if size <= encoder.room():
        encoder.take(size * 4 // 3)
        return leaves.binary(value, kind)
    content = bytes(value)[: encoder.room()]
    encoder.take(len(content) * 4 // 3)
    return leaves.cut(kind, size, leaves.binary(content, kind))


def _complex(_: Encoder, value: complex, __: int) -> Any:
    return leaves.complex_number(value)


def _list(encoder: Encoder, value: list[Any], depth: int) -> Any:
    return encoder.sequence(None, list(value), depth)


def _dict(encoder: Encoder, value: dict[Any, Any], depth: int) -> Any:
    return encoder.mapping(value, depth)


def _sequence(kind: str) -> Handler:
    return lambda encoder, value, depth: encoder.sequence(kind, list(value), depth)


def _deque(encoder: Encoder, value: collections.deque[Any], depth: int) -> Any:
    held = encoder.sequence("deque", list(collections.deque.__iter__(value)), depth)
    length = _MAXLEN(value)
    return held if length is None or held[TAG] != "deque" else {**held, "maxlen": length}


_MAXLEN = collections.deque.__dict__["maxlen"].__get__


def _view(kind: str) -> Handler:
    """A view of a mapping: its values as they are now."""

    def handler(encoder: Encoder, value: Any, depth: int) -> Any:
        return {TAG: "subclass", "type": kind, "v": encoder.sequence(None, list(value), depth)}

    return handler


def _proxy(encoder: Encoder, value: Any, depth: int) -> Any:
    # What it stands for, without a call of its methods.
    [held] = gc.get_referents(value)
    return {TAG: "subclass", "type": "mappingproxy", "v": encoder.value(held, depth + 1)}


def _text_of(kind: str, text: Callable[[Any], str]) -> Handler:
    return lambda _, value, __: {TAG: kind, "v": text(value)}


def _constant(_: Encoder, value: Any, __: int) -> Any:
    return {TAG: "constant", "v": repr(value)}


def _fraction(_: Encoder, value: fractions.Fraction, __: int) -> Any:
    return {TAG: "fraction", "v": list(map(leaves.integer, (value._numerator, value._denominator)))}  # type: ignore[attr-defined]


def _range(_: Encoder, value: range, __: int) -> Any:
    return {TAG: "range", "v": list(map(leaves.integer, (value.start, value.stop, value.step)))}


def _slice(encoder: Encoder, value: slice, depth: int) -> Any:
    return {
        TAG: "slice",
        "v": [encoder.value(item, depth + 1) for item in (value.start, value.stop, value.step)],
    }


def _path(_: Encoder, value: pathlib.PurePath, __: int) -> Any:
    text = leaves.text(pathlib.PurePath.__str__(value))
    return {TAG: "path", "type": type(value).__name__, "v": text}


def _pattern(encoder: Encoder, value: Any, depth: int) -> Any:
    fields = {"pattern": encoder.value(value.pattern, depth + 1), "flags": value.flags}
    return {TAG: "object", "type": "re.Pattern", "v": fields}


def _partial(encoder: Encoder, value: Any, depth: int) -> Any:
    members = {name: functools.partial.__dict__[name].__get__(value) for name in ("func", "args", "keywords")}
    fields = {name: encoder.value(item, depth + 1) for name, item in members.items()}
    fields.update(encoder.fields(value, depth))
    return {TAG: "object", "type": type_name(type(value)), "v": fields}


def _enum(encoder: Encoder, value: enum.Enum, depth: int) -> Any:
    name = object.__getattribute__(value, "_name_")
    held = encoder.value(object.__getattribute__(value, "_value_"), depth + 1)
    name = leaves.text(name) if type(name) is str else None
    return {TAG: "enum", "type": type_name(type(value)), "name": name, "v": held}


def _exception(encoder: Encoder, value: BaseException, depth: int) -> Any:
    # By the descriptors of the builtin classes, which a subclass may have hidden under its own.
    got = {name: get(value) for name, get in _EXCEPTION.items()}
    lines = traceback.format_tb(got["__traceback__"])
    text = "".join(lines)[-_MAX_TRACEBACK:].encode("utf-8", "backslashreplace").decode()
    fields = {"args": encoder.value(got["args"], depth + 1), "traceback": text}
    for name in ("__cause__", "__context__"):
        if got[name] is not None:
            fields[name] = encoder.value(got[name], depth + 1)
    for base, names in _EXCEPTION_FIELDS:
        for name in names if issubclass(type(value), base) else ():
            item = base.__dict__[name].__get__(value)
            if item is not None:
                fields[name] = encoder.value(item, depth + 1)
    if inherits(type(value), "pydantic_core", "ValidationError"):
        # It holds them where Python can't look, and has no args.
        fields["title"] = encoder.value(value.title, depth + 1)  # type: ignore[attr-defined]
        fields["errors"] = encoder.value(value.errors(include_url=False), depth + 1)  # type: ignore[attr-defined]
    fields.update(encoder.fields(value, depth))
    return {TAG: "object", "type": type_name(type(value)), "v": fields}


_EXCEPTION = {
    name: BaseException.__dict__[name].__get__
    for name in ("args", "__traceback__", "__cause__", "__context__")
}
_EXCEPTION_FIELDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (OSError, ("filename", "filename2")),
    (ImportError, ("name", "path")),
    (NameError, ("name",)),
    (AttributeError, ("name",)),
)


def _named(_: Encoder, value: Any, __: int) -> Any:
    # Functions, classes and modules hold nothing to save, but their name tells which one it was.
    if isinstance(type(value), type) and issubclass(type(value), type):
        text = type_name(value)
    else:
        module = getattr(value, "__module__", None)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        text = f"{module}.{name}" if isinstance(module, str) else f"{name}"
    text = text if is_text(text) else ascii(text)
    return unsaved(type(value), "it is code, not data", name=text)


def _logger(_: Encoder, value: Any, __: int) -> Any:
    name = instance_dict(value).get("name")
    text = leaves.text(name) if type(name) is str else None
    return unsaved(type(value), "it is a resource, not data", name=text if type(text) is str else None)


def _secret(_: Encoder, value: Any, __: int) -> Any:
    return unsaved(type(value), "it is a secret")


def _url(_: Encoder, value: Any, __: int) -> Any:
    return {TAG: "subclass", "type": type_name(type(value)), "v": leaves.text(str(value))}


def _names_of(cls: type) -> Any:
    return next((names["_fields"] for names in namespaces(cls) if "_fields" in names), None)


def _tuple(encoder: Encoder, value: Any, depth: int) -> Any:
    """A subclass of tuple: a namedtuple with the names of its fields."""
    names, items = _names_of(type(value)), list(tuple.__iter__(value))
    if type(names) is not tuple or len(names) != len(items) or not {str}.issuperset(map(type, names)):
        return _AS_TUPLE(encoder, value, depth)
    held = [encoder.value(item, depth + 1) for item in items]
    texts = [name if is_text(name) else ascii(name) for name in names]
    tag = {TAG: "namedtuple", "type": type_name(type(value)), "fields": texts, "v": held}
    more = encoder.fields(value, depth)
    return {TAG: "subclass", "type": type_name(type(value)), "v": tag, "fields": more} if more else tag


def _subclass(base: type) -> Handler:
    """A subclass of a builtin type: as the builtin, with the fields that instances have besides."""
    # The type's own methods, not the subclass's: those are the user's code.
    plain = _AS_BUILTIN.get(base)

    def handler(encoder: Encoder, value: Any, depth: int) -> Any:
        held: Any
        if base is dict:
            held = encoder.mapping(value, depth)
        elif plain is not None:
            held = EXACT[base](encoder, plain(value), depth)
        elif base in (list, tuple, set, frozenset):
            held = EXACT[base](encoder, list(base.__iter__(value)), depth)  # type: ignore[attr-defined]
        else:
            held = EXACT[base](encoder, value, depth)
        tag = {TAG: "subclass", "type": type_name(type(value)), "v": held}
        more = encoder.fields(value, depth, base)
        return {**tag, "fields": more} if more else tag

    return handler


_AS_BUILTIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    bytearray: lambda value: bytearray.__getitem__(value, slice(None)),
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
}
_AS_TUPLE = _subclass(tuple)


def _object(encoder: Encoder, value: Any, depth: int) -> Any:
    found = fields_of(value)
    fields = encoder.plain(found, depth)
    if fields is None:
        fields = encoder.named(found, depth)
    if not found and hides_state(type(value)):
        return unsaved(type(value), "its state is held where Python can't look")
    return {TAG: "object", "type": type_name(type(value)), "v": fields}


def _opaque(_: Encoder, value: Any, __: int) -> Any:
    return unsaved(type(value), "it is a resource or a computation, not data")


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
    collections.deque: _deque,
    dict: _dict,
    types.MappingProxyType: _proxy,
    range: _range,
    slice: _slice,
    type(...): _constant,
    type(NotImplemented): _constant,
    datetime.datetime: times.moment,
    datetime.time: times.moment,
    datetime.date: times.date,
    datetime.timedelta: times.timedelta,
    datetime.timezone: times.timezone,
    zoneinfo.ZoneInfo: times.zone,
    decimal.Decimal: _text_of("decimal", decimal.Decimal.__str__),
    fractions.Fraction: _fraction,
    uuid.UUID: _text_of("uuid", lambda value: format(object.__getattribute__(value, "int"), "032x")),
    re.Pattern: _pattern,
    array.array: arrays.std_array,
    functools.partial: _partial,
    types.FunctionType: _named,
    types.BuiltinFunctionType: _named,
    types.MethodType: _named,
    types.ModuleType: _named,
    type: _named,
}
_MAPPINGS: tuple[dict[Any, Any], ...] = ({}, collections.OrderedDict())
for _mapping in _MAPPINGS:
    for _of in (_mapping.keys(), _mapping.values(), _mapping.items()):
        EXACT[type(_of)] = _view(type(_of).__name__)

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
    (tuple, _tuple),
    (functools.partial, _partial),
    *(
        (base, _subclass(base))
        for base in (
            dict,
            list,
            set,
            frozenset,
            collections.deque,
            str,
            bytes,
            bytearray,
            int,
            float,
            complex,
            datetime.datetime,
            datetime.date,
            datetime.time,
            datetime.timedelta,
            decimal.Decimal,
            fractions.Fraction,
            uuid.UUID,
            array.array,
        )
    ),
]

# By module and name, since none of these is imported for a value that isn't theirs; the first that fits.
_ELSEWHERE: list[tuple[str, str, Handler]] = [
    # Before the builtin bases: numpy.float64 is a float, too.
    ("numpy", "generic", arrays.numpy_scalar),
    ("numpy", "ndarray", arrays.numpy_array),
    ("numpy", "dtype", arrays.described),
    ("numpy", "ufunc", _named),
    ("torch", "Tensor", arrays.tensor),
    ("torch", "dtype", arrays.described),
    ("torch", "device", arrays.described),
    ("PIL.Image", "Image", images.image),
    ("pydantic.types", "SecretStr", _secret),
    ("pydantic.types", "SecretBytes", _secret),
    ("pydantic.types", "Secret", _secret),
    ("pydantic.v1.types", "SecretStr", _secret),
    ("pydantic.v1.types", "SecretBytes", _secret),
    ("pydantic_core", "Url", _url),
    ("pydantic_core", "MultiHostUrl", _url),
    ("pydantic.networks", "_BaseUrl", _url),
    ("logging", "Logger", _logger),
    # What these hold is machinery: locks, threads, settings, clients.
    ("logging", "Handler", _opaque),
    ("threading", "Thread", _opaque),
    ("threading", "Event", _opaque),
    ("threading", "Barrier", _opaque),
    ("queue", "Queue", _opaque),
    ("asyncio", "Queue", _opaque),
    ("asyncio", "Event", _opaque),
    ("unittest.mock", "NonCallableMock", _opaque),
    ("langgraph.pregel.main", "Pregel", _opaque),
    ("langchain_core.language_models.base", "BaseLanguageModel", _opaque),
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
    for module, name, handler in _ELSEWHERE:
        if inherits(cls, module, name):
            return handler
    if "pandas" in sys.modules:
        found: Handler | None = tables.handler_of(cls)
        if found is not None:
            return found
    for base, handler in _BASES:
        if issubclass(cls, base):
            return handler
    if not _is_data_class(cls) and any(_defines(cls, name) for name in _RESOURCE_METHODS):
        return _opaque
    if _holds_fields(cls):
        return _object
    return _opaque


def is_written_by_fields(cls: type) -> bool:
    """Whether instances of a type are written as their fields, and nothing else."""
    return cls not in EXACT and handler_of(cls) is _object


def inherits(cls: type, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    base = None if loaded is None else getattr(loaded, name, None)
    # type's own check: that of somebody's metaclass may claim anything.
    return isinstance(base, type) and type.__subclasscheck__(base, cls)


def _is_data_class(cls: type) -> bool:
    marks = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields__", "__fields__")
    return any(_defines(cls, name) for name in marks)


def _defines(cls: type, name: str) -> bool:
    return any(name in names for names in namespaces(cls))


def _holds_fields(cls: type) -> bool:
    # An instance of a class written in Python has a __dict__ or slots; one of C's holds what it hides.
    offset: int = type.__dict__["__dictoffset__"].__get__(cls)
    return offset != 0 or any("__slots__" in names for names in namespaces(cls))
