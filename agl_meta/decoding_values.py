"""What a document is restored to where the value itself can't be: what it was, and what it held."""

from __future__ import annotations

import datetime
from typing import Any

import attrs


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
    :class:`Unsaved`, of which two may be equal: no two are merged. Also the items of what would do harm if
    it was built: many members of one hash, slices within slices by the hundred.
    """

    def __init__(self, type: str, items: list[Any]) -> None:
        super().__init__(items)
        self.type = type
        """``set``, ``frozenset``, ``dict``, ``deque``, ``slice`` or ``namedtuple``."""

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
