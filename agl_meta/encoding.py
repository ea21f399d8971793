"""From any Python value to one JSON document that keeps what the value holds.

Plain data (``dict`` with string keys, ``list``, ``str``, ``int``, ``float``, ``bool``, ``None``) stands as
plain JSON. What JSON lacks is tagged, as an object with the key ``$agl`` that names its kind; a user's own
mapping with that key is tagged too, so the two can't be mixed up (inspect_ai and TypedJSON do alike)::

    {"$agl": "tuple", "v": [1, 2]}                 set, frozenset likewise
    {"$agl": "dict", "v": [[1, "a"], ["1", "b"]]}  a mapping whose keys are not all plain strings
    {"$agl": "float", "v": "nan"}                  nan, inf, -inf
    {"$agl": "int", "v": "0x1…"}                   beyond 64 bits
    {"$agl": "bytes", "v": "base64"}               bytearray, memoryview likewise, by "type"
    {"$agl": "text", "v": "base64"}                a str with lone surrogates, as UTF-8/surrogatepass
    {"$agl": "object", "type": "module.Class", "v": {…}}   an object's fields
    {"$agl": "subclass", "type": …, "v": …}        of a builtin type, as the builtin
    {"$agl": "unsaved", "type": …, "why": …}       what could not be saved
    {"$agl": "parts", "v": [root, …]}              deep nesting, cut into parts …
    {"$agl": "part", "v": 1}                       … and the place of one

and so on: see the functions below and :mod:`agl_meta.decoding`, which restores them. Encoding runs no code
of the value's own: neither ``repr``, ``==``, properties nor iterators. It imports nothing; packages are
looked up among what is loaded.
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
from collections.abc import Callable, Iterable
from itertools import chain
from math import isfinite
from typing import Any

import orjson

TAG = "$agl"

MAX_NODES = 1_000_000
"""Values in one document; what comes after is marked as unsaved. Bounds shared references, too."""
MAX_ELEMENTS = 10_000
"""Elements of an array or tensor that is saved whole; of a larger one the first :data:`HEAD` are."""
HEAD = 100
_MAX_TRACEBACK = 20_000

# orjson takes 254 levels of JSON; one level of a value becomes up to four.
_MAX_DEPTH = 50

_STR = frozenset({str})
_PLAIN = frozenset({str, int, float, bool, type(None), dict, list})
# A cyclic value, or one whose shared parts unfold, is left to the walk after so many.
_MAX_PLAIN = 200_000


def encode(value: object) -> bytes:
    """Encode any value as strict JSON: UTF-8, one line. Raises nothing on account of the value."""
    plain = _encode_plain(value)
    return _Encoder().document(value) if plain is None else plain


def _encode_plain(value: object) -> bytes | None:
    """The value as JSON if it is plain data, else ``None``; no Python call is made for each value.

    orjson alone is lossy in silence: nan becomes null, a tuple a list, an Enum or UUID its value; and
    where parts are shared it may write without end. So each container is looked at first, at C speed.
    """
    if type(value) is not str and not _is_plain(value):
        return None
    try:
        return orjson.dumps(value)
    except TypeError:  # lone surrogates, integers beyond 64 bits, nesting deeper than orjson goes
        return None


def _is_plain(value: object) -> bool:
    """Looks at all containers of one depth at once, which is what makes it cheap."""
    items: list[Any] = [value]
    kinds = {type(value)}
    if dict not in kinds and list not in kinds:
        return False
    seen = 0
    while dict in kinds or list in kinds:
        dicts = [item for item in items if type(item) is dict] if dict in kinds else ()
        lists = [item for item in items if type(item) is list] if list in kinds else ()
        keys = set(chain.from_iterable(dicts))
        items = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, dicts))]
        kinds = set(map(type, items))
        seen += len(items)
        # Of keys that are equal the set holds one; orjson refuses any other that is no exact str.
        if TAG in keys or not _STR.issuperset(map(type, keys)):
            return False
        if not _PLAIN.issuperset(kinds) or seen > _MAX_PLAIN:
            return False
        if float in kinds and not all(map(isfinite, [i for i in items if type(i) is float])):
            return False
    return True


class _Encoder:
    """Encodes one value: walks it, and keeps what the walk must know."""

    def __init__(self) -> None:
        self._nodes = 0
        self._path: set[int] = set()
        self._parts: list[Any] = []
        self._deep: collections.deque[tuple[int, Any, frozenset[int]]] = collections.deque()

    def document(self, value: object) -> bytes:
        # Deep nesting is cut into parts that are walked one after another: neither Python's stack nor
        # a JSON parser's is exhausted by it.
        self._put_off(value)
        while self._deep:
            index, deep, path = self._deep.popleft()
            self._path = set(path)
            self._parts[index] = self.value(deep, 0)
        root = self._parts[0] if len(self._parts) == 1 else {TAG: "parts", "v": self._parts}
        return orjson.dumps(root)

    def _put_off(self, value: object) -> int:
        self._parts.append(None)
        self._deep.append((len(self._parts) - 1, value, frozenset(self._path)))
        return len(self._parts) - 1

    def value(self, value: Any, depth: int) -> Any:
        """The value as what orjson writes as it is."""
        self._nodes += 1
        if self._nodes > MAX_NODES:
            return unsaved(type(value), f"the record holds more than {MAX_NODES} values")
        handler = _EXACT.get(type(value))
        if handler is None:
            handler = _handler(type(value))
        if handler in _LEAVES:
            return self._guarded(handler, value, depth)
        if depth >= _MAX_DEPTH:
            return {TAG: "part", "v": self._put_off(value)}
        if id(value) in self._path:
            return unsaved(type(value), "a cycle: it contains itself")
        self._path.add(id(value))
        try:
            return self._guarded(handler, value, depth)
        finally:
            self._path.discard(id(value))

    def _guarded(self, handler: _Handler, value: Any, depth: int) -> Any:
        try:
            return handler(self, value, depth)
        except Exception as error:
            return unsaved(type(value), f"encoding it raised {type(error).__name__}")

    def values(self, values: Iterable[Any], depth: int) -> list[Any]:
        """Each of the values, one level deeper."""
        return [self.value(item, depth + 1) for item in values]

    def mapping(self, value: dict[Any, Any], depth: int) -> Any:
        """A JSON object where all keys are plain, else tagged pairs, so that no two keys merge."""
        items = _snapshot(value)
        if all(type(key) is str and _is_text(key) for key, _ in items) and TAG not in value:
            return {key: self.value(item, depth + 1) for key, item in items}
        pairs = [[self.value(key, depth + 1), self.value(item, depth + 1)] for key, item in items]
        return {TAG: "dict", "v": pairs}

    def fields(self, value: Any, depth: int) -> dict[str, Any]:
        """The fields of an object as JSON; names are identifiers nearly always, and text always."""
        found = _fields_of(value)
        return {
            name if _is_text(name) else ascii(name): self.value(item, depth + 1)
            for name, item in found.items()
        }


_Handler = Callable[[_Encoder, Any, int], Any]


def unsaved(cls: type, why: str, **more: Any) -> dict[str, Any]:
    """The marker for what can't be saved; ``why`` says it to a reader."""
    return {TAG: "unsaved", "type": type_name(cls), "why": why, **more}


def type_name(cls: type) -> str:
    """``module.Class``; ASCII, whatever the class calls itself."""
    module, name = (
        type.__getattribute__(cls, "__module__"),
        type.__getattribute__(cls, "__qualname__"),
    )
    text = name if module == "builtins" else f"{module}.{name}"
    return text if _is_text(text) else ascii(text)


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _snapshot(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    # Of an exact dict this is one step for the interpreter; another thread may change a subclass.
    for _ in range(3):
        try:
            return list(dict.items(value))
        except RuntimeError:
            continue
    return list(dict(value).items())


# ------------------------------------------------------------------------------------------- values


def _same(_: _Encoder, value: Any, __: int) -> Any:
    return value


def _int(_: _Encoder, value: int, __: int) -> Any:
    # int() of a long decimal text is limited and slow; of a hexadecimal one it is neither.
    return value if -(2**63) <= value < 2**64 else {TAG: "int", "v": hex(value)}


def _float(_: _Encoder, value: float, __: int) -> Any:
    return value if isfinite(value) else {TAG: "float", "v": float.__repr__(value)}


def _str(_: _Encoder, value: str, __: int) -> Any:
    if _is_text(value):
        return value
    return {TAG: "text", "v": _base64(value.encode("utf-8", "surrogatepass"))}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _bytes(_: _Encoder, value: Any, __: int) -> Any:
    return {TAG: "bytes", "type": type(value).__name__, "v": _base64(bytes(value))}


def _complex(encoder: _Encoder, value: complex, depth: int) -> Any:
    return {TAG: "complex", "v": encoder.values((value.real, value.imag), depth)}


def _list(encoder: _Encoder, value: list[Any], depth: int) -> Any:
    return encoder.values(list(value), depth)


def _dict(encoder: _Encoder, value: dict[Any, Any], depth: int) -> Any:
    return encoder.mapping(value, depth)


def _sequence(kind: str) -> _Handler:
    def handler(encoder: _Encoder, value: Any, depth: int) -> Any:
        return {TAG: kind, "v": encoder.values(list(value), depth)}

    return handler


def _text_of(kind: str, text: Callable[[Any], str]) -> _Handler:
    return lambda _, value, __: {TAG: kind, "v": text(value)}


def _moment(kind: str) -> _Handler:
    def handler(_: _Encoder, value: Any, __: int) -> Any:
        tag = {TAG: kind, "v": value.isoformat()}
        zone = getattr(value.tzinfo, "key", None)  # of a zoneinfo; others keep their offset only
        if type(zone) is str:
            tag["zone"] = zone
        if value.fold:
            tag["fold"] = 1
        return tag

    return handler


def _fraction(encoder: _Encoder, value: fractions.Fraction, depth: int) -> Any:
    return {TAG: "fraction", "v": encoder.values((value.numerator, value.denominator), depth)}


def _timedelta(_: _Encoder, value: datetime.timedelta, __: int) -> Any:
    return {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}


def _range(encoder: _Encoder, value: range, depth: int) -> Any:
    return {TAG: "range", "v": encoder.values((value.start, value.stop, value.step), depth)}


def _path(encoder: _Encoder, value: pathlib.PurePath, depth: int) -> Any:
    text = encoder.value(str(value), depth + 1)
    return {TAG: "path", "type": type(value).__name__, "v": text}


def _enum(encoder: _Encoder, value: enum.Enum, depth: int) -> Any:
    name = encoder.value(value._name_, depth + 1)
    held = encoder.value(value._value_, depth + 1)
    return {TAG: "enum", "type": type_name(type(value)), "name": name, "v": held}


def _exception(encoder: _Encoder, value: BaseException, depth: int) -> Any:
    lines = traceback.format_tb(value.__traceback__)
    text = "".join(lines)[-_MAX_TRACEBACK:].encode("utf-8", "backslashreplace").decode()
    fields = {"args": encoder.value(value.args, depth + 1), "traceback": text}
    for name in ("__cause__", "__context__"):
        other = getattr(value, name)
        if other is not None:
            fields[name] = encoder.value(other, depth + 1)
    fields.update(encoder.fields(value, depth))
    return {TAG: "object", "type": type_name(type(value)), "v": fields}


def _named(_: _Encoder, value: Any, __: int) -> Any:
    # Functions, classes and modules hold nothing to save, but their name tells which one it was.
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    text = f"{module}.{name}" if isinstance(module, str) else f"{name}"
    text = text if _is_text(text) else ascii(text)
    return unsaved(type(value), "it is code, not data", name=text)


def _namedtuple(encoder: _Encoder, value: Any, depth: int) -> Any:
    names = encoder.values(type(value)._fields, depth)
    items = encoder.values(tuple.__iter__(value), depth)
    return {TAG: "namedtuple", "type": type_name(type(value)), "fields": names, "v": items}


def _subclass(base: type) -> _Handler:
    """A subclass of a builtin type: as the builtin, with the fields that instances have besides."""

    def handler(encoder: _Encoder, value: Any, depth: int) -> Any:
        # The type's own methods, not the subclass's: those are the user's code.
        held: Any
        if base is dict:
            held = encoder.mapping(value, depth)
        elif base in (list, tuple, set, frozenset, collections.deque):
            plain: Any = list(base.__iter__(value))  # type: ignore[attr-defined]
            held = _EXACT[base](encoder, plain, depth)
        elif base is str:
            held = _str(encoder, str.__str__(value), depth)
        elif base in (int, float, complex):
            held = _EXACT[base](encoder, _NUMBERS[base](value), depth)
        else:
            held = _EXACT[base](encoder, base(value), depth)
        tag = {TAG: "subclass", "type": type_name(type(value)), "v": held}
        more = encoder.fields(value, depth)
        return {**tag, "fields": more} if more else tag

    return handler


_NUMBERS: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
}


def _object(encoder: _Encoder, value: Any, depth: int) -> Any:
    fields = encoder.fields(value, depth)
    return {TAG: "object", "type": type_name(type(value)), "v": fields}


def _opaque(_: _Encoder, value: Any, __: int) -> Any:
    return unsaved(type(value), "it is a resource or a computation, not data")


def _fields_of(value: Any) -> dict[str, Any]:
    """What an instance holds: its ``__dict__``, its slots, and the extra fields of a pydantic model.

    Read past ``__getattr__`` and properties. One way for dataclasses, attrs, pydantic 1 and 2 (and so
    LangChain's messages and OpenAI's responses) and plain classes; a field whose declared type is a
    base class keeps all that the instance has, unlike with pydantic's own dump.
    """
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name.startswith("__") and not name.endswith("__"):  # as the compiler mangles it
                name = f"_{cls.__name__.lstrip('_')}{name}"
            member = cls.__dict__.get(name)
            if type(member) is types.MemberDescriptorType and name not in _HIDDEN:
                try:
                    found[name] = member.__get__(value)
                except AttributeError:
                    continue  # not set
    try:
        found.update(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        pass
    try:
        extra = object.__getattribute__(value, "__pydantic_extra__")
    except AttributeError:
        extra = None
    if type(extra) is dict:
        found.update(extra)
    return {name: item for name, item in found.items() if type(name) is str}


# Bookkeeping of attrs and pydantic that an instance holds beside its fields.
_HIDDEN = frozenset(
    {
        "__weakref__",
        "__dict__",
        "__pydantic_fields_set__",
        "__pydantic_extra__",
        "__pydantic_private__",
        "__fields_set__",
        "__attrs_cached_hash",
    }
)


# ------------------------------------------------------------------------------- numpy and torch


def _numpy_scalar(encoder: _Encoder, value: Any, depth: int) -> Any:
    item: Any = str(value) if value.dtype.kind in "Mm" else value.item()
    if type(item) is type(value):  # longdouble has no Python counterpart
        item = str(value)
    held = encoder.value(item, depth + 1)
    return {TAG: "npscalar", "dtype": str(value.dtype), "v": held}


def _numpy_array(encoder: _Encoder, value: Any, depth: int) -> Any:
    import numpy as np

    flat = np.asarray(value).reshape(-1)
    tag: dict[str, Any] = {TAG: "ndarray", "dtype": value.dtype.str, "shape": list(value.shape)}
    if flat.size > MAX_ELEMENTS:
        flat = flat[:HEAD]
        tag["cut"] = True
    if value.dtype.kind in "Mm" or value.dtype == np.longdouble:
        flat = flat.astype(str)
    return {**tag, "v": _elements(encoder, flat.tolist(), depth)}


def _tensor(encoder: _Encoder, value: Any, depth: int) -> Any:
    flat = value.detach().reshape(-1)
    tag: dict[str, Any] = {TAG: "tensor", "dtype": str(value.dtype), "shape": list(value.shape)}
    if flat.numel() > MAX_ELEMENTS:
        flat = flat[:HEAD]
        tag["cut"] = True
    return {**tag, "v": _elements(encoder, flat.cpu().tolist(), depth)}


def _elements(encoder: _Encoder, elements: list[Any], depth: int) -> list[Any]:
    plain = all(map(isfinite, elements)) if set(map(type, elements)) <= {float} else False
    return elements if plain else encoder.values(elements, depth)


# ----------------------------------------------------------------------------------- which handler

_EXACT: dict[type, _Handler] = {
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

_LEAVES = {
    _same,
    _int,
    _float,
    _str,
    _bytes,
    _named,
    _opaque,
}
"""Handlers of what contains nothing: no depth, no cycle."""

_BASES: list[tuple[type, _Handler]] = [
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


def _handler(cls: type) -> _Handler:
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
