"""What one document may cost that is restored: work and memory that its length does not bound."""

from __future__ import annotations

import collections
import fractions
from collections.abc import Iterable
from typing import Any, NamedTuple

from agl_meta.decoding_values import SavedCut, SavedEnum

MAX_DEPTH = 100
"""Levels that are hashed, or freed, at once: both recurse in C, where too many levels end the process."""
MAX_EQUAL = 100
"""Members of one hash, on average: each of them is compared with all others."""
MAX_CLASSES = 100
"""Kinds of namedtuples in one document: for each a class is made."""

# Many equal hashes can't be made of these: those of text and bytes are salted, and of numbers that are no
# longer than this there are some dozens at most.
_BITS = 64
_HARMLESS = frozenset({str, bytes, float, bool, type(None)})


class Hashed(NamedTuple):
    """What it takes to hash values and to tell them apart."""

    depth: int
    size: int
    """Values in them, and words of large numbers."""
    work: int
    """How many of these telling them apart may look at."""
    harmless: int
    """Values that can't be made to have equal hashes."""


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
        found = _measured(items, self._sets)
        if found is None or found.size == found.harmless:
            return found
        hashes = list(map(hash, items))
        counts = collections.Counter(hashes)
        if len(counts) == len(items):
            return found
        # Each of a hash is compared with all others of it.
        work = 0
        for item, key in zip(items, hashes, strict=True):
            one = _measured([item], self._sets)
            work += counts[key] * (1 if one is None else one.work)
        if work - found.work > (MAX_EQUAL - 1) * found.size:
            return None
        return found._replace(work=work)

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


def _measured(level: Iterable[Any], sets: dict[int, Hashed]) -> Hashed | None:
    """What it takes to hash the items, none of which is equal to another; walks them level by level."""
    depth = below = size = more = harmless = 0
    while level:
        depth += 1
        deeper: list[Any] = []
        for item in level:
            cls = type(item)
            size += 1
            if cls in _HARMLESS:
                harmless += 1
            elif cls is tuple:
                deeper += item
            elif cls is int or cls is fractions.Fraction:
                words = _words(item)
                harmless += 0 if words else 1
                # Comparing a large number with one of another type takes the square of its length.
                size, more = size + words, more + words * words
            elif cls is frozenset and id(item) in sets:
                known = sets[id(item)]
                size, more = size + known.size, more + known.work - known.size
                below = max(below, depth + known.depth)
            else:
                deeper += _parts(item)
        if max(depth, below) > MAX_DEPTH:
            return None
        level = deeper
    return Hashed(max(depth, below), size, size + more, harmless)


def _words(number: Any) -> int:
    if type(number) is fractions.Fraction:
        return _words(number.numerator) + _words(number.denominator)
    return int(number.bit_length()) // _BITS


def _parts(value: Any) -> Iterable[Any]:
    """What is hashed with a value."""
    if isinstance(value, (tuple, frozenset)):
        return value
    if type(value) is SavedEnum:
        return (value.value,)
    if type(value) is SavedCut:
        return (value.head,)
    if type(value) is slice:  # can be hashed from Python 3.12 on
        return (value.start, value.stop, value.step)
    return ()
