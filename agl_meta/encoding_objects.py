"""What an instance holds and what its class is called, read without running code of the class."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
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
    module, name = (
        type.__getattribute__(cls, "__module__"),
        type.__getattribute__(cls, "__qualname__"),
    )
    text = name if module == "builtins" else f"{module}.{name}"
    return text if is_text(text) else ascii(text)


def is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def fields_of(value: Any) -> dict[str, Any]:
    """What an instance holds: its ``__dict__``, its slots, and the extra fields of a pydantic model.

    Read past ``__getattr__`` and properties. One way for dataclasses, attrs, pydantic 1 and 2 (and so
    LangChain's messages and OpenAI's responses) and plain classes; a field whose declared type is a
    base class keeps all that the instance has, unlike with pydantic's own dump.
    """
    found: dict[str, Any] = {}
    for name, member in slots_of(type(value)):
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


@remembered
def slots_of(cls: type) -> list[tuple[str, Any]]:
    """Names and descriptors of the slots of a type that hold its instances' fields."""
    found = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name.startswith("__") and not name.endswith("__"):  # as the compiler mangles it
                name = f"_{base.__name__.lstrip('_')}{name}"
            member = base.__dict__.get(name)
            if type(member) is types.MemberDescriptorType and name not in _HIDDEN:
                found.append((name, member))
    return found


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
