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
    {"$agl": "cut", "type": "str", "length": n, "v": …}    the first part of what was too large
    {"$agl": "file", "type": "PIL.Image.Image", "path": "files/…"}   an image, beside the record
    {"$agl": "unsaved", "type": …, "why": …}       what could not be saved
    {"$agl": "parts", "v": [root, …]}              deep nesting, cut into parts …
    {"$agl": "part", "v": 1}                       … and the place of one

and so on: :mod:`agl_meta.encoding_kinds` writes them, :mod:`agl_meta.decoding` restores them. Encoding runs
no code of the value's own: neither ``repr``, ``==``, properties nor iterators; only a ``tzinfo`` is asked
for its offset, and pandas and Pillow for what they hold.
"""

from __future__ import annotations

import collections
import fractions
import sys
import uuid
from collections.abc import Iterable
from typing import Any

import orjson

from agl_meta.encoding_images import Attach
from agl_meta.encoding_kinds import EXACT, LEAVES, Handler, handler_of
from agl_meta.encoding_leaves import cut
from agl_meta.encoding_objects import TAG, fields_of, is_text, unsaved
from agl_meta.encoding_plain import encode_plain, has_long_text

MAX_NODES = 1_000_000
"""Values in one document; what comes after is cut. Bounds shared references, too."""
MAX_FIELD_BYTES = 8 * 2**20
"""Bytes of one text, as UTF-8, or bytes value; a longer one is cut there."""
MAX_RECORD_BYTES = 64 * 2**20
"""About the bytes of one document; what comes after is cut or marked as unsaved."""

# orjson takes 254 levels of JSON; one level of a value becomes up to six: of a cut subclass of dict.
_MAX_DEPTH = 40


def encode(
    value: object,
    *,
    attach: Attach | None = None,
    max_field_bytes: int | None = MAX_FIELD_BYTES,
    max_record_bytes: int | None = MAX_RECORD_BYTES,
) -> bytes:
    """Encode any value as strict JSON: UTF-8, one line. Raises nothing on account of the value.

    Args:
        attach: writes a file beside the document, for images; ``None`` where there is no place for one.
        max_field_bytes: longer texts and bytes are cut there, visibly. ``None``: none is, and large arrays
            are written whole, too.
        max_record_bytes: about so long gets the document. ``None``: as long as it takes.
    """
    most_field = sys.maxsize if max_field_bytes is None else max_field_bytes
    most_record = sys.maxsize if max_record_bytes is None else max_record_bytes
    try:
        # A text alone is measured first, since it may be larger than what memory is left.
        is_long = type(value) is str and len(value) > most_field
        plain = None if is_long else encode_plain(value, _MAX_DEPTH)
        # A document that is not longer than a field may be needs no look at each.
        if plain is not None and (
            len(plain.encoded) <= min(most_field, most_record)
            or (
                len(plain.encoded) <= most_record
                and not plain.objects
                and not has_long_text(value, most_field // 4)
            )
        ):
            return plain.encoded
    except Exception:  # another thread changes a dict
        pass
    encoder = Encoder(attach, most_field, most_record, max_field_bytes is not None)
    try:
        return encoder.document(value)
    except Exception as error:  # the stack of the caller, or the memory, is used up
        return orjson.dumps(unsaved(type(value), f"encoding it raised {type(error).__name__}"))


class Encoder:
    """Encodes one value: walks it, and keeps what the walk must know."""

    def __init__(
        self,
        attach: Attach | None = None,
        max_field_bytes: int = MAX_FIELD_BYTES,
        max_record_bytes: int = MAX_RECORD_BYTES,
        summarises: bool = True,
    ) -> None:
        self.attach = attach
        self.summarises = summarises
        """Whether large arrays are summarised."""
        self._max_field = max_field_bytes
        self._max_record = max_record_bytes
        self._left = max_record_bytes
        self._nodes = 0
        self._path: set[int] = set()
        self._parts: list[Any] = []
        self._deep: collections.deque[tuple[int, Any, frozenset[int]]] = collections.deque()

    def take(self, size: int) -> None:
        """Count bytes of the document."""
        self._left -= size

    def room(self) -> int:
        """Bytes that one text may still have."""
        return max(0, min(self._max_field, self._left))

    def _why_full(self) -> str | None:
        if self._nodes > MAX_NODES:
            return f"the record holds more than {MAX_NODES} values"
        if self._left <= 0:
            return f"the record holds more than {self._max_record} bytes"
        return None

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
        self._left -= 4
        cls = type(value)
        full = self._why_full()
        if full is not None:
            return unsaved(cls, full)
        # A metaclass of somebody's may raise where a class is hashed.
        handler = EXACT.get(cls) if type(cls) is type else None
        if handler is None:
            try:
                handler = handler_of(cls)
            except Exception as error:
                return unsaved(cls, f"looking at its class raised {type(error).__name__}")
        if handler in LEAVES:
            return self._guarded(handler, value, depth)
        if depth >= _MAX_DEPTH:
            return {TAG: "part", "v": self._put_off(value)}
        if id(value) in self._path:
            return unsaved(cls, "a cycle: it contains itself")
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
        """Each of the values, one level deeper; the first ones, if the record is full before the end."""
        found = []
        for item in values:
            if self._why_full() is not None:
                break
            found.append(self.value(item, depth + 1))
        return found

    def sequence(self, kind: str | None, values: list[Any], depth: int) -> Any:
        """A JSON list, tagged unless it stands for one; marked where the record is full before its end."""
        found = self.values(values, depth)
        if kind in ("set", "frozenset"):
            # Their order differs between processes, which a hash of the document must not.
            found.sort(key=orjson.dumps)
        held = found if kind is None else {TAG: kind, "v": found}
        return held if len(found) == len(values) else cut(kind or "list", len(values), held)

    def mapping(self, value: dict[Any, Any], depth: int) -> Any:
        """A JSON object where all keys are plain, else tagged pairs, so that no two keys merge."""
        items = snapshot(value)
        most = self._max_field // 4
        is_plain = all(
            type(key) is str and is_text(key) and key != TAG and len(key) <= most for key, _ in items
        )
        pairs = []
        for key, item in items:
            if self._why_full() is not None:
                break
            name = key
            if is_plain:
                self.take(len(key))
            else:
                name = self.value(key, depth + 1)
                if self._why_full() is not None:  # it may not have been saved
                    break
            pairs.append([name, self.value(item, depth + 1)])
        held = dict(pairs) if is_plain else {TAG: "dict", "v": pairs}
        return held if len(pairs) == len(items) else cut("dict", len(items), held)

    def plain(self, found: dict[str, Any], depth: int) -> Any | None:
        """Fields that are plain data all through, encoded in one go; else ``None``."""
        plain = encode_plain(found, _MAX_DEPTH - depth)
        # Where a cap may be met, the walk looks at each value.
        if plain is None or len(plain.encoded) > self.room() or self._nodes + plain.values > MAX_NODES:
            return None
        self._nodes += plain.values
        self.take(len(plain.encoded))
        return orjson.Fragment(plain.encoded)

    def fields(self, value: Any, depth: int, base: type = object) -> dict[str, Any]:
        """The fields of an object as JSON; names are identifiers nearly always, and text always."""
        found = fields_of(value)
        if base is uuid.UUID:  # written in Python: these make up the value itself
            found = {name: item for name, item in found.items() if name not in ("int", "is_safe")}
        elif base is fractions.Fraction:
            found = {n: item for n, item in found.items() if n not in ("_numerator", "_denominator")}
        return self.named(found, depth)

    def named(self, found: dict[str, Any], depth: int) -> dict[str, Any]:
        """Values by their names, each one level deeper."""
        return {
            name if is_text(name) and name != TAG else ascii(name): self.value(item, depth + 1)
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
