"""One tag of a document that is being restored: its fields, checked, and what the document may cost."""

from __future__ import annotations

import collections
import fractions
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from agl_meta.decoding_values import SavedCut, SavedEnum
from agl_meta.encoding_objects import TAG

MAX_DEPTH = 100
"""Levels that are hashed, or freed, at once: both recurse in C, where too many levels end the process."""
MAX_EQUAL = 100
"""Members of one hash, on average: each of them is compared with all others."""
MAX_CLASSES = 100
"""Kinds of namedtuples in one document: for each a class is made."""
MAX_DIMENSIONS = 64
"""As numpy and torch have it."""

_MAX_WORD = 64
# Equal hashes can't be made of these, or not more than some dozens: those of text and bytes are salted.
_SALTED = frozenset({str, bytes, float, bool, type(None)})


@attrs.frozen
class Hashed:
    """What it takes to hash values and to tell them apart."""

    depth: int
    size: int
    """Values in them, and words of large numbers."""
    work: int
    """How many of these an equality may look at."""


class Bounds:
    """What one document may cost; kept while it is restored."""

    def __init__(self) -> None:
        self.classes: set[tuple[str, tuple[str, ...]]] = set()
        """Names and fields of its namedtuples."""
        # By id. Each frozenset is noted, so that an id that is used again has a new entry.
        self._sets: dict[int, Hashed] = {}
        self._depths: dict[int, int] = {}
        self._kept: list[Any] = []

    def hashed(self, items: list[Any]) -> Hashed | None:
        """What it takes to make members or keys of the items; ``None`` where it takes too much.

        Raises :class:`TypeError` where one can't be hashed.
        """
        kinds = set(map(type, items))
        numbers = [item for item in items if type(item) is int] if int in kinds else []
        if kinds - {int} <= _SALTED and max(map(int.bit_length, numbers), default=0) <= _MAX_WORD:
            return Hashed(1, len(items), len(items))
        found = [self._hashed(item) for item in items]
        if None in found:
            return None
        each = [one for one in found if one is not None]
        hashes = list(map(hash, items))
        counts = collections.Counter(hashes)
        size, work = sum(one.size for one in each), sum(one.work for one in each)
        if len(counts) < len(items):
            once = work
            work = sum(one.work * counts[key] for one, key in zip(each, hashes, strict=True))
            if work - once > (MAX_EQUAL - 1) * size:
                return None
        return Hashed(1 + max(one.depth for one in each), size, work)

    def _hashed(self, item: Any) -> Hashed | None:
        """The same of one item; walks it level by level."""
        depth = below = size = work = 0
        level = [item]
        while level:
            depth += 1
            deeper: list[Any] = []
            for each in level:
                known = self._sets.get(id(each)) if type(each) is frozenset else None
                if known is not None:
                    size, work = size + known.size, work + known.work
                    below = max(below, depth + known.depth)
                else:
                    words = _words(each)
                    # Comparing a large number with one of another type takes the square of its length.
                    size, work = size + 1 + words, work + 1 + words * words
                    deeper.extend(_parts(each))
            if max(depth, below) > MAX_DEPTH:
                return None
            level = deeper
        return Hashed(max(depth, below), size, work)

    def note_set(self, found: frozenset[Any], hashed: Hashed) -> None:
        self._sets[id(found)] = hashed

    def depth(self, items: Iterable[Any]) -> int:
        """How deep those of the items are nested that CPython frees by recursion: deques, slices and arrays.

        (What is nested in lists, tuples, dicts, sets and classes it frees one after another.)
        """
        if not self._depths:
            return 0
        noted = [self._depths.get(id(item)) for item in items]
        return max([depth for depth in noted if depth is not None], default=0)

    def note_depth(self, found: Any, depth: int) -> None:
        # Kept alive, so that nothing else gets its id.
        self._kept.append(found)
        self._depths[id(found)] = depth


def _words(value: Any) -> int:
    if type(value) is int:
        return value.bit_length() // _MAX_WORD
    if type(value) is fractions.Fraction:
        return _words(value.numerator) + _words(value.denominator)
    return 0


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, frozenset)):
        return value
    if type(value) is SavedEnum:
        return (value.value,)
    if type(value) is SavedCut:
        return (value.head,)
    if type(value) is slice:  # can be hashed from Python 3.12 on
        return (value.start, value.stop, value.step)
    return ()


class Tag:
    """An object with the key :data:`TAG`, whose values are restored before itself.

    Its methods give a field of the expected type, and raise :class:`TypeError` for any other.
    """

    __slots__ = ("_raw", "bounds", "key", "kind", "restore", "target", "values")

    def __init__(
        self,
        raw: dict[str, Any],
        restore: Callable[[Tag], Any],
        values: Any,
        place: tuple[Any, Any],
        bounds: Bounds,
    ) -> None:
        self._raw = raw
        self.kind: str = raw[TAG]
        self.restore = restore
        self.values = values
        """Its fields, restored."""
        self.target, self.key = place
        """Where its value belongs."""
        self.bounds = bounds

    def text(self, name: str = "v") -> str:
        """A text that stands in the document as it is."""
        return _checked(self._raw[name], str, name)

    def text_or_none(self, name: str) -> str | None:
        value = self._raw.get(name)
        return None if value is None else _checked(value, str, name)

    def any_text(self, name: str = "v") -> str:
        """A text that may have been tagged itself, for lone surrogates."""
        return _checked(self.values[name], str, name)

    def items(self, name: str = "v", length: int | None = None) -> list[Any]:
        """A list that stands in the document as one: what is tagged may be endless, or a list of its own."""
        _checked(self._raw[name], list, name)
        found: list[Any] = self.values[name]
        if length is not None and len(found) != length:
            raise ValueError(f"{name} has {len(found)} items, not {length}")
        return found

    def rows(self, name: str = "v", length: int | None = None) -> list[list[Any]]:
        """A list of lists."""
        found = self.items(name)
        for row in self._raw[name]:
            if type(row) is not list or (length is not None and len(row) != length):
                raise TypeError(f"an item of {name} is {_named(row)}")
        return found

    def texts(self, name: str) -> list[str]:
        return [_checked(item, str, name) for item in self.items(name)]

    def whole(self, name: str = "v", length: int | None = None) -> list[int]:
        """A list of whole numbers, of any size."""
        return [_checked(item, int, name) for item in self.items(name, length)]

    def shape(self, name: str = "shape") -> tuple[int, ...]:
        found = self.whole(name)
        if len(found) > MAX_DIMENSIONS or min(found, default=0) < 0:
            raise ValueError(f"{name} is that of no array")
        return tuple(found)

    def number(self, name: str) -> int:
        return _checked(self._raw[name], int, name)

    def fields(self, name: str = "v") -> dict[str, Any]:
        """The fields of an object."""
        if TAG in _checked(self._raw[name], dict, name):
            raise TypeError(f"{name} is tagged")
        found: dict[str, Any] = self.values[name]
        return found

    def is_set(self, name: str) -> bool:
        return self._raw.get(name) is True

    def has(self, name: str) -> bool:
        return name in self._raw


def _checked(value: Any, cls: type, name: str) -> Any:
    # The exact type: a bool is no number, and what a tag was restored to may be of a subclass.
    if type(value) is not cls:
        raise TypeError(f"{name} is {_named(value)}, not {cls.__name__}")
    return value


def _named(value: Any) -> str:
    return type(value).__name__
