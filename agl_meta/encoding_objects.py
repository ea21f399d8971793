"""What an instance holds and what its class is called, read without running code of the class."""

from __future__ import annotations

import types
from typing import Any

TAG = "$agl"
"""Key of a JSON object that stands for what JSON lacks; its value names the kind."""


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
