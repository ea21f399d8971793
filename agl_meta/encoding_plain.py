"""The fast way to JSON: for plain data, and for objects that hold nothing but plain data and such objects.

No Python call is made for each value. orjson alone is lossy in silence: nan becomes null, a tuple a list, an
Enum or UUID its value; and where parts are shared it may write without end. So all values of one depth are
looked at together, and the collector's own traversal finds what they hold.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

import orjson

from agl_meta.encoding_kinds import is_written_by_fields
from agl_meta.encoding_objects import TAG, fields_of_all, type_name

_PLAIN = frozenset({str, int, float, bool, type(None), dict, list})
# A cyclic value, or one whose shared parts unfold, is left to the walk after so many.
_MAX_VALUES = 200_000
_TAG_SIGN = TAG[:1].encode()
_TAG_JSON = b'"%b"' % TAG.encode()


class Plain(NamedTuple):
    """JSON, and what it holds."""

    encoded: bytes
    values: int
    objects: int


def encode_plain(value: object, max_depth: int) -> Plain | None:
    """The JSON that the walk over each value would give; ``None`` for all that needs that walk.

    Args:
        value: any.
        max_depth: levels of a value with objects; the walk cuts a deeper one into parts.
    """
    try:
        found = _looked_at(value, max_depth)
        if found is None:
            return None
        document, values, objects = found
        encoded = orjson.dumps(document)
    # Lone surrogates, long integers, keys that are no text, deep nesting; types and keys of somebody's that
    # can't be hashed; or another thread changes a dict.
    except Exception:
        return None
    # A user's key or text of that name is for the walk. It is looked for last, since that takes longest.
    signs = encoded.count(_TAG_SIGN) if objects else _TAG_SIGN in encoded
    if signs != objects and encoded.count(_TAG_JSON) != objects:
        return None
    return Plain(encoded, values, objects)


def _looked_at(value: Any, max_depth: int) -> tuple[Any, int, int] | None:
    """The value with tagged fields in the place of objects, how many values it holds, how many objects."""
    levels: list[list[Any]] = []
    objects = _Objects()
    items: list[Any] = [value]
    seen = 0
    while items:
        kinds = set(map(type, items))
        if not _PLAIN.issuperset(kinds):
            added = objects.add(items, kinds - _PLAIN, len(levels))
            if added is None:
                return None
            items = added
        if float in kinds and not all(map(isfinite, [item for item in items if type(item) is float])):
            return None
        levels.append(items)
        seen += len(items)
        if seen > _MAX_VALUES or (objects.new and len(levels) > max_depth):
            return None
        # It passes over keys that are plain text; orjson refuses all others.
        items = gc.get_referents(*items)
    return objects.put_into(value, levels), seen, len(objects.new)


class _Objects:
    """The objects in a value, and what is written in their place."""

    def __init__(self) -> None:
        self.new: dict[int, Any] = {}
        """By id: their tagged fields, and copies of the containers that hold them."""
        self._held: list[Any] = []  # nothing else gets their ids
        self._own: set[int] = set()
        self._deepest = 0

    def add(self, items: list[Any], kinds: Iterable[type], level: int) -> list[Any] | None:
        """The items of a level with the fields of objects in their place; ``None`` if one has none."""
        self._deepest = level
        self._held.append(items)
        result = [item for item in items if type(item) in _PLAIN]
        for cls in kinds:
            if not is_written_by_fields(cls):
                return None
            name = type_name(cls)
            found = [item for item in items if type(item) is cls]
            for item, fields in zip(found, fields_of_all(cls, found), strict=True):
                # Met before: a cycle, or shared. One without fields may hide what it holds.
                if id(item) in self.new or not fields:
                    return None
                self.new[id(item)] = {TAG: "object", "type": name, "v": fields}
                self._own.add(id(fields))
                result.append(fields)
        return result

    def put_into(self, value: Any, levels: list[list[Any]]) -> Any:
        """The value with what is written in their place; nothing of it is changed."""
        new = dict(self.new)
        for items in reversed(levels[: self._deepest]):
            for item in items:
                if type(item) is list and not new.keys().isdisjoint(map(id, item)):
                    new[id(item)] = [new.get(id(each), each) for each in item]
                elif type(item) is dict and not new.keys().isdisjoint(map(id, item.values())):
                    changed = {name: new.get(id(each), each) for name, each in item.items()}
                    if id(item) in self._own:
                        item.update(changed)
                    else:
                        new[id(item)] = changed
        return new.get(id(value), value)


def has_long_text(value: object, most: int) -> bool:
    """Whether plain data holds a text of more characters; by depths, too."""
    items: list[Any] = [value]
    while items:
        if any(len(item) > most for item in items if type(item) is str):
            return True
        dicts = [item for item in items if type(item) is dict]
        lists = [item for item in items if type(item) is list]
        items = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, dicts))]
        if any(len(key) > most for key in chain.from_iterable(dicts)):
            return True
    return False
