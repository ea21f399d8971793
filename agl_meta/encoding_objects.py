"""What an instance holds and what its class is called, read without running code of the class."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

TAG = "$agl"
"""Key of a JSON object that stands for what JSON lacks; its value names the kind."""


_MAX_REMEMBERED = 10_000
_Found = TypeVar("_Found")


def remembered(find: Callable[[type], _Found]) -> Callable[[type], _Found]:
    """Remember what a function found for a type.

    By the type's id, since a metaclass may have a hash of its own; the reference tells whether the id is
    still that of the same type.
    """
    known: dict[int, tuple[weakref.ref[type], _Found]] = {}

    def remembering(cls: type) -> _Found:
        entry = known.get(id(cls))
        if entry is not None and entry[0]() is cls:
            return entry[1]
        found = find(cls)
        if len(known) >= _MAX_REMEMBERED:  # types that are made anew for each rollout
            known.clear()
        known[id(cls)] = weakref.ref(cls), found
        return found

    return functools.update_wrapper(remembering, find)


def unsaved(cls: type, why: str, **more: Any) -> dict[str, Any]:
    """The marker for what can't be saved; ``why`` says it to a reader."""
    return {TAG: "unsaved", "type": type_name(cls), "why": why, **more}


def type_name(cls: type) -> str:
    """``module.Class``; ASCII, whatever the class calls itself."""
    # Past the metaclass, which may be somebody's.
    module, name = _MODULE(cls), _QUALNAME(cls)
    text = name if type(module) is not str or module == "builtins" else f"{module}.{name}"
    return text if is_text(text) else ascii(text)


_MODULE: Callable[[type], Any] = type.__dict__["__module__"].__get__
_QUALNAME: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_MRO: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_DICT: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__


def namespaces(cls: type) -> list[Mapping[str, Any]]:
    """The namespaces of a class and its bases, read past its metaclass."""
    return [_DICT(base) for base in _MRO(cls)]


def is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def fields_of(value: Any) -> dict[str, Any]:
    """What an instance holds: its ``__dict__``, its slots, a pydantic model's extra fields and private ones.

    Read past ``__getattr__`` and properties. One way for dataclasses, attrs, pydantic 1 and 2 (and so
    LangChain's messages and OpenAI's responses) and plain classes; a field whose declared type is a
    base class keeps all that the instance has, unlike with pydantic's own dump.
    """
    found: dict[str, Any] = {}
    for name, member in slots_of(type(value)).items():
        try:
            found[name] = member.__get__(value)
        except AttributeError:
            continue  # not set
    found.update(instance_dict(value))
    for name in ("__pydantic_extra__", "__pydantic_private__"):
        try:
            more = object.__getattribute__(value, name)
        except AttributeError:
            continue
        if type(more) is dict:
            found.update(more)
    others = {name: item for name, item in found.items() if type(name) is not str}
    if others:
        found = {name: item for name, item in found.items() if type(name) is str}
        found[""] = others
    return found


def fields_of_all(cls: type, values: list[Any]) -> list[dict[str, Any]]:
    """:func:`fields_of` of many instances of one type."""
    getters = _simple_getters(cls)
    if getters is None:
        return list(map(fields_of, values))
    get, extra, private = getters
    found = [{**get(value)} for value in values]
    if extra is not None:
        others = [*map(extra, values), *map(private, values)]
        if any(type(each) is dict and each for each in others):
            return list(map(fields_of, values))
    return found


@remembered
def _simple_getters(cls: type) -> tuple[Any, Any, Any] | None:
    """What gets the ``__dict__`` of an instance, and a pydantic model's other fields; ``None`` for a type
    whose instances hold more."""
    getter = _dict_of(cls)
    if getter is None or slots_of(cls):
        return None
    found: list[Any] = []
    for name in ("__pydantic_extra__", "__pydantic_private__"):
        members = [namespace[name] for namespace in namespaces(cls) if name in namespace]
        if any(type(member) is not types.MemberDescriptorType for member in members):
            return None
        found.append(members[0].__get__ if members else None)
    return (getter.__get__, *found) if (found[0] is None) == (found[1] is None) else None


@remembered
def slots_of(cls: type) -> dict[str, Any]:
    """Names and descriptors of the slots of a type that hold its instances' fields, in order."""
    found: dict[str, Any] = {}
    for namespace in namespaces(cls):
        if "__slots__" not in namespace:
            continue
        # The members themselves: __slots__ may be an iterator, which is empty by now.
        members = {name: item for name, item in namespace.items() if type(item) is types.MemberDescriptorType}
        for name in _in_order(members, namespace["__slots__"]):
            if name not in _HIDDEN:
                found.setdefault(name, members[name])
    return found


def instance_dict(value: Any) -> dict[Any, Any]:
    """The ``__dict__`` of an instance, whatever its class makes of that name."""
    getter = _dict_of(type(value))
    found = None if getter is None else getter.__get__(value)
    return dict(found) if isinstance(found, dict) else {}


@remembered
def _dict_of(cls: type) -> Any:
    # The interpreter's own descriptor stands in the first class whose instances have a dict; what a class
    # calls __dict__ besides is code of its own.
    for namespace in reversed(namespaces(cls)):
        getter = namespace.get("__dict__")
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return getter
    return None


def _in_order(members: dict[str, Any], slots: Any) -> list[str]:
    """The names of slots as they were declared; a class's namespace has them sorted."""
    declared = list(slots) if type(slots) in (tuple, list, dict) else []
    place = {name: index for index, name in enumerate(declared) if type(name) is str}
    # __x stands as _Class__x in the namespace.
    return sorted(members, key=lambda name: place.get(name, place.get("__" + name.partition("__")[2], 0)))


def hides_state(cls: type) -> bool:
    """Whether a base written in C keeps what neither a ``__dict__`` nor slots show."""
    for base in _MRO(cls):
        if base.__flags__ & _HEAP_TYPE and not base.__flags__ & _IMMUTABLE_TYPE:
            continue
        pointers = (base.__dictoffset__ != 0) + (base.__weakrefoffset__ != 0)
        if base.__basicsize__ > object.__basicsize__ + 8 * pointers or base.__itemsize__:
            return True
    return False


_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8


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
