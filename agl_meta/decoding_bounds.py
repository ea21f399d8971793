"""What one document may cost that is restored: work and memory that its length does not bound."""

from __future__ import annotations

import collections
import fractions
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from agl_meta.decoding_values import SavedCut, SavedEnum

MAX_DEPTH = 100
"""Levels that are hashed, or freed, at once: both recurse in C, where too many levels end the process."""
MAX_NESTED = 5_000
"""Deques, slices and arrays in one document that hold more than scalars."""
MAX_EQUAL = 100
"""Members of one hash, on average: each of them is compared with all others."""
MAX_CLASSES = 100
"""Kinds of namedtuples in one document: for each a class is made."""

# Many equal hashes can't be made of these: those of text and bytes are salted, and of numbers that are no
# longer than this there are some dozens at most.
_BITS = 64
_MAX_INT = 2**_BITS - 1
_SALTED = frozenset({str, bytes})
_HARMLESS = _SALTED | {float, bool, type(None)}
# Comparing two of these takes no longer than reading them.
_QUICK = _HARMLESS | {int, complex}
# Fewer members than these may be in each other's way. The most steps for a place, on average: after 13 no
# bit of a hash is left that was not looked at.
_MANY = 4096
_MAX_STEPS = 20

_Found = TypeVar("_Found")


class _Hashed(NamedTuple):
    """What it takes to hash values and to tell them apart."""

    depth: int
    size: int
    """Values in them, and words of large numbers."""
    work: int
    """How many of these telling them apart may look at."""


class Bounds:
    """What one document may cost; kept while it is restored."""

    def __init__(self) -> None:
        self.classes: set[tuple[str, tuple[str, ...]]] = set()
        """Names and fields of its namedtuples."""
        self._nested = 0
        self._freed_deeply: set[type] = {collections.deque, slice}
        # By id, with the value itself, so that nothing else gets its id.
        self._sets: dict[int, tuple[Any, _Hashed]] = {}
        self._depths: dict[int, tuple[Any, int]] = {}

    def build(
        self, kind: Callable[[list[Any]], _Found], items: list[Any], members: list[Any]
    ) -> _Found | None:
        """A set or dict of the items; ``None`` if telling its members or keys apart takes too much.

        Raises :class:`TypeError` where one can't be hashed.
        """
        if len(members) <= MAX_EQUAL and kind is not frozenset:
            # The usual: few, and flat.
            if _QUICK.issuperset(map(type, members)):
                return kind(items)
            parts = [item if type(item) is tuple else (item,) for item in members]
            if _QUICK.issuperset(map(type, itertools.chain.from_iterable(parts))):
                return kind(items)
        cost = None
        if not _are_harmless(members):
            cost = self._cost(members)
            if cost is None:
                return None
        is_many = len(members) > _MANY and not _SALTED.issuperset(map(type, members))
        if is_many and _are_in_the_way(list(map(hash, members))):
            return None
        found = kind(items)
        if cost is not None and type(found) is frozenset:
            self._sets[id(found)] = found, cost
        return found

    def _cost(self, members: list[Any]) -> _Hashed | None:
        cost = self._measured(members)
        if cost is None:
            return None
        hashes = list(map(hash, members))
        if len(set(hashes)) == len(members):
            return cost
        # Each of a hash is compared with all others of it.
        counts, work = collections.Counter(hashes), 0
        for item, key in zip(members, hashes, strict=True):
            one = self._measured([item])
            work += counts[key] * (cost if one is None else one).work
        return None if work - cost.work > (MAX_EQUAL - 1) * cost.size else cost._replace(work=work)

    def _measured(self, level: Iterable[Any]) -> _Hashed | None:
        """What it takes for items of different hashes; walks them level by level, down to known sets."""
        depth = below = size = more = 0
        while level:
            depth += 1
            deeper: list[Any] = []
            for item in level:
                cls = type(item)
                size += 1
                if cls in _HARMLESS:
                    continue
                if cls is tuple:
                    deeper += item
                elif cls is int or cls is fractions.Fraction:
                    words = _words(item)
                    # Comparing a large number with one of another type takes the square of its length.
                    size, more = size + words, more + words * (words - 1)
                elif cls is frozenset and id(item) in self._sets:
                    known = self._sets[id(item)][1]
                    size, more = size + known.size, more + known.work - known.size
                    below = max(below, depth + known.depth)
                else:
                    deeper += _parts(item)
            if max(depth, below) > MAX_DEPTH:
                return None
            level = deeper
        return _Hashed(max(depth, below), size, size + more)

    def depth(self, items: list[Any]) -> int | None:
        """How deep a value of these items is nested, if it is one that CPython frees by recursion: a deque,
        slice or array; ``None`` if that is too deep.

        (What is nested in lists, tuples, dicts, sets and classes it frees one after another, from Python 3.13
        on thousands at once: so there may not be any number of the others in between, either.)
        """
        if _HARMLESS.issuperset(map(type, items)):
            return 1
        self._nested += 1
        if self._nested > MAX_NESTED:
            return None
        if self._freed_deeply.isdisjoint(map(type, items)):
            return 1
        noted = [self._depths.get(id(item)) for item in items]
        depth = 1 + max([1, *(each[1] for each in noted if each is not None)])
        return depth if depth <= MAX_DEPTH else None

    def note_depth(self, found: Any, depth: int) -> None:
        """Note how deep such a value is nested."""
        self._freed_deeply.add(type(found))
        if depth > 1:
            self._depths[id(found)] = found, depth


def _are_harmless(values: list[Any]) -> bool:
    """Whether these are scalars of which no great number can have one hash."""
    kinds = set(map(type, values))
    if int in kinds:
        numbers = values if len(kinds) == 1 else [value for value in values if type(value) is int]
        if min(numbers) < -_MAX_INT or max(numbers) > _MAX_INT:
            return False
        kinds.discard(int)
    return kinds <= _HARMLESS


def _are_in_the_way(hashes: list[int]) -> bool:
    """Whether values of different hashes were chosen so that a table looks long for the place of each.

    Puts them into tables of the sizes that one has while it grows, as CPython's dict does. (A set looks at
    the neighbours of the same places.)
    """
    for bits in range(_MANY.bit_length() - 1, len(hashes).bit_length() + 3):
        mask = (1 << bits) - 1
        some = hashes[: 2 * mask // 3]
        if min(some) >= 0 and max(some) <= mask:
            continue  # each has a place of its own
        taken, left = bytearray(mask + 1), _MAX_STEPS * len(some)
        for key in some:
            slot, perturb = key & mask, key & _MAX_INT
            while taken[slot]:
                perturb >>= 5
                slot = (slot * 5 + perturb + 1) & mask
                left -= 1
                if not left:
                    return True
            taken[slot] = 1
    return False


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
