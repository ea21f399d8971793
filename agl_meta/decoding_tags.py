"""One tag of a document that is being restored, and its fields, checked."""

from __future__ import annotations

from typing import Any, TypeVar

from agl_meta.decoding_bounds import Bounds
from agl_meta.encoding_objects import TAG

_MAX_DIMENSIONS = 64
"""As numpy and torch have it."""
_Type = TypeVar("_Type")


class Tag:
    """An object with the key :data:`TAG`, whose values are restored before itself.

    Its methods give a field of the expected type, and raise :class:`TypeError` for any other. (One serves
    for all tags of a document, one after another.)
    """

    __slots__ = ("bounds", "raw", "values")

    def __init__(self) -> None:
        self.bounds = Bounds()
        self.raw: dict[str, Any] = {}
        """The fields as they stand in the document."""
        self.values: Any = {}
        """The fields, restored."""

    @property
    def kind(self) -> str:
        return str(self.raw[TAG])

    def text(self, name: str = "v") -> str:
        """A text that stands in the document as it is."""
        return _checked(self.raw[name], str, name)

    def text_or_none(self, name: str) -> str | None:
        value = self.raw.get(name)
        return None if value is None else _checked(value, str, name)

    def any_text(self, name: str = "v") -> str:
        """A text that may have been tagged itself, for lone surrogates."""
        return _checked(self.values[name], str, name)

    def items(self, name: str = "v", length: int | None = None) -> list[Any]:
        """A list that stands in the document as one: what is tagged may be endless, or a list of its own."""
        if type(self.raw[name]) is not list:
            raise TypeError(f"{name} is {_named(self.raw[name])}, not list")
        found: list[Any] = self.values[name]
        if length is not None and len(found) != length:
            raise ValueError(f"{name} has {len(found)} items, not {length}")
        return found

    def rows(self, name: str = "v") -> list[list[Any]]:
        """A list of lists."""
        found = self.items(name)
        for row in self.raw[name]:
            _checked(row, list, name)
        return found

    def texts(self, name: str) -> list[str]:
        return [_checked(item, str, name) for item in self.items(name)]

    def whole(self, name: str = "v", length: int | None = None) -> list[int]:
        """A list of whole numbers, of any size."""
        return [_checked(item, int, name) for item in self.items(name, length)]

    def shape(self, name: str = "shape") -> tuple[int, ...]:
        found = self.whole(name)
        if len(found) > _MAX_DIMENSIONS or min(found, default=0) < 0:
            raise ValueError(f"{name} is that of no array")
        return tuple(found)

    def number(self, name: str) -> int:
        return _checked(self.raw[name], int, name)

    def fields(self, name: str = "v") -> dict[str, Any]:
        """The fields of an object."""
        if TAG in _checked(self.raw[name], dict, name):
            raise TypeError(f"{name} is tagged")
        found: dict[str, Any] = self.values[name]
        return found

    def is_set(self, name: str) -> bool:
        return self.raw.get(name) is True

    def has(self, name: str) -> bool:
        return name in self.raw


def _checked(value: Any, cls: type[_Type], name: str) -> _Type:
    # The exact type: a bool is no number, and what a tag was restored to may be of a subclass.
    if type(value) is not cls:
        raise TypeError(f"{name} is {_named(value)}, not {cls.__name__}")
    found: _Type = value
    return found


def _named(value: Any) -> str:
    return type(value).__name__
