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

and so on: :mod:`agl_meta.encoding_kinds` writes them, :mod:`agl_meta.decoding` restores them. Encoding runs
no code of the value's own: neither ``repr``, ``==``, properties nor iterators.
"""

from __future__ import annotations

import collections
import gc
from collections.abc import Iterable
from math import isfinite
from typing import Any

import orjson

from agl_meta.encoding_kinds import EXACT, LEAVES, Handler, handler_of
from agl_meta.encoding_objects import TAG, fields_of, is_text, unsaved

MAX_NODES = 1_000_000
"""Values in one document; what comes after is marked as unsaved. Bounds shared references, too."""

# orjson takes 254 levels of JSON; one level of a value becomes up to four.
_MAX_DEPTH = 50

_PLAIN = frozenset({str, int, float, bool, type(None), dict, list})
_CONTAINERS = frozenset({dict, list})
# A cyclic value, or one whose shared parts unfold, is left to the walk after so many.
_MAX_PLAIN = 200_000


def encode(value: object) -> bytes:
    """Encode any value as strict JSON: UTF-8, one line. Raises nothing on account of the value."""
    plain, _ = _encode_plain(value)
    return Encoder().document(value) if plain is None else plain


def _encode_plain(value: object) -> tuple[bytes | None, int]:
    """The value as JSON if it is plain data, else ``None``; no Python call is made for each value.

    Also how many values it holds.

    orjson alone is lossy in silence: nan becomes null, a tuple a list, an Enum or UUID its value; and
    where parts are shared it may write without end. So each container is looked at first, at C speed.
    """
    try:
        size = 1 if type(value) is str else _plain_size(value)
    except Exception:  # keys of a class with an __eq__ of its own, or another thread changes a dict
        size = 0
    if not size:
        return None, 0
    try:
        return orjson.dumps(value), size
    except TypeError:  # lone surrogates, integers beyond 64 bits, keys that are no text, deep nesting
        return None, 0


def _plain_size(value: object) -> int:
    """How many values a list or dict of plain data holds, itself included; 0 for anything else.

    Looks at all containers of one depth at once, and the collector's own traversal finds what they hold:
    that makes it cheap. (It passes over keys that are plain text; orjson refuses all others.)
    """
    items: list[Any] = [value]
    kinds = {type(value)}
    if dict not in kinds and list not in kinds:
        return 0
    seen = 1
    while dict in kinds or list in kinds:
        if len(kinds) > 1:
            items = [item for item in items if type(item) in _CONTAINERS]
        if dict in kinds and TAG in set().union(*[item for item in items if type(item) is dict]):
            return 0
        items = gc.get_referents(*items)
        kinds = set(map(type, items))
        seen += len(items)
        if not _PLAIN.issuperset(kinds) or seen > _MAX_PLAIN:
            return 0
        if float in kinds and not all(map(isfinite, [i for i in items if type(i) is float])):
            return 0
    return seen


class Encoder:
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
        handler = EXACT.get(type(value))
        if handler is None:
            handler = handler_of(type(value))
        if handler in LEAVES:
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

    def _guarded(self, handler: Handler, value: Any, depth: int) -> Any:
        try:
            return handler(self, value, depth)
        except Exception as error:
            return unsaved(type(value), f"encoding it raised {type(error).__name__}")

    def values(self, values: Iterable[Any], depth: int) -> list[Any]:
        """Each of the values, one level deeper."""
        return [self.value(item, depth + 1) for item in values]

    def mapping(self, value: dict[Any, Any], depth: int) -> Any:
        """A JSON object where all keys are plain, else tagged pairs, so that no two keys merge."""
        items = snapshot(value)
        if all(type(key) is str and is_text(key) and key != TAG for key, _ in items):
            return {key: self.value(item, depth + 1) for key, item in items}
        pairs = [[self.value(key, depth + 1), self.value(item, depth + 1)] for key, item in items]
        return {TAG: "dict", "v": pairs}

    def plain(self, found: dict[str, Any]) -> Any | None:
        """Fields that are plain data all through, encoded in one go; else ``None``."""
        encoded, size = _encode_plain(found)
        if encoded is None or self._nodes + size > MAX_NODES:
            return None
        self._nodes += size
        return orjson.Fragment(encoded)

    def fields(self, value: Any, depth: int) -> dict[str, Any]:
        """The fields of an object as JSON; names are identifiers nearly always, and text always."""
        return self.named(fields_of(value), depth)

    def named(self, found: dict[str, Any], depth: int) -> dict[str, Any]:
        """Values by their names, each one level deeper."""
        return {
            name if is_text(name) else ascii(name): self.value(item, depth + 1)
            for name, item in found.items()
        }


def snapshot(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The items of a dict that another thread may be changing."""
    # Of an exact dict this is one step for the interpreter; another thread may change a subclass.
    for _ in range(3):
        try:
            return list(dict.items(value))
        except RuntimeError:
            continue
    return list(dict(value).items())
