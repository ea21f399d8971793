"""From a JSON document back to values; the counterpart of :mod:`agl_meta.encoding`.

Builtin types come back as they were. Classes of somebody's are not imported, let alone called: their
instances come back as :class:`SavedObject`, :class:`SavedEnum`, :class:`SavedArray` and the like, which say
what they were. A document is input from another machine: nothing in it is executed, no size in it is
believed, and what it takes to restore it grows with its length only.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from agl_meta.decoding_kinds import RESTORE, Restore
from agl_meta.decoding_tags import Tag
from agl_meta.decoding_values import (
    SavedArray,
    SavedConstant,
    SavedCut,
    SavedEnum,
    SavedFrame,
    SavedImage,
    SavedItems,
    SavedMoment,
    SavedObject,
    Unsaved,
)
from agl_meta.encoding_objects import TAG

__all__ = [
    "SavedArray",
    "SavedConstant",
    "SavedCut",
    "SavedEnum",
    "SavedFrame",
    "SavedImage",
    "SavedItems",
    "SavedMoment",
    "SavedObject",
    "Unsaved",
    "decode",
]

_MAX_REASON = 200
_TAKEN = object()


def decode(document: Any) -> Any:
    """Restore what :func:`agl_meta.encoding.encode` tagged, in a document that was parsed.

    Raises :class:`ValueError` for a damaged tag, and nothing else on account of the document. An unknown
    tag is given back as it stands.
    """
    try:
        root, tags = _opened(document)
        tag = Tag()
        while tags:
            tag.raw, tag.values, restore, target, key = tags.pop()
            try:
                target[key] = restore(tag)
            except MemoryError:
                raise
            except Exception as error:
                raise ValueError(f"a damaged {tag.kind!r}: {_reason(error)}") from error
    except RecursionError as error:
        raise ValueError("no stack is left to restore a document") from error
    return root[0]


_Opened = tuple[dict[str, Any], Any, Restore, Any, Any]
"""A tag, a copy of it for its restored values, what restores it, and the container and key to put that."""


def _opened(document: Any) -> tuple[list[Any], list[_Opened]]:
    """A copy of the document, and its tags, outer ones first, which have no place in the copy yet.

    Without recursion: documents are nested as deep as somebody likes.
    """
    root = [document]
    tags: list[_Opened] = []
    # A document in parts may stand within another, and its references are to its own parts.
    scopes: list[tuple[list[Any], list[Any]]] = [([root], [])]
    for level, parts in scopes:
        add = level.append
        for target in level:
            for key, item in enumerate(target) if type(target) is list else target.items():
                cls = type(item)
                if cls is list:
                    target[key] = item = item.copy()
                    if not _NESTS.isdisjoint(map(type, item)):
                        add(item)
                elif cls is dict:
                    kind = item.get(TAG)
                    if kind is None:
                        target[key] = item = item.copy()
                        add(item)
                        continue
                    restore = RESTORE.get(kind) if type(kind) is str else None
                    if restore is not None:
                        values: Any = item
                        held = item.get("v")
                        if type(held) is list and len(item) == 2:
                            if kind == "dict":
                                values = {"v": _flat(held)}
                            if not _NESTS.isdisjoint(map(type, values["v"])):
                                values = {"v": values["v"].copy()}
                                add(values["v"])
                        elif not _NESTS.isdisjoint(map(type, item.values())):
                            values = item.copy()
                            add(values)
                    elif kind == "part":
                        restore, values = _content, [_taken(parts, item.get("v"))]
                        add(values)
                    elif kind == "parts":
                        others = _parts(item)
                        restore, values = _content, [_taken(others, 0)]
                        scopes.append(([values], others))
                    else:
                        continue
                    tags.append((item, values, restore, target, key))
    return root, tags


_NESTS = frozenset({dict, list})
_LIST, _TWO = frozenset({list}), frozenset({2})


def _flat(pairs: list[Any]) -> list[Any]:
    """Keys and values in turns."""
    if not _LIST.issuperset(map(type, pairs)) or not _TWO.issuperset(map(len, pairs)):
        raise ValueError("a damaged 'dict': v is no list of pairs")
    return list(chain.from_iterable(pairs))


def _parts(tag: dict[str, Any]) -> list[Any]:
    found = tag.get("v")
    if type(found) is not list or not found:
        raise ValueError("a damaged 'parts': v is no list of parts")
    return found.copy()


def _taken(parts: list[Any], index: Any) -> Any:
    """A part, which is used once: a document whose parts were shared could unfold without end."""
    if type(index) is not int or not 0 <= index < len(parts) or parts[index] is _TAKEN:
        raise ValueError("a damaged 'part': there is none, or it stands elsewhere, too")
    part, parts[index] = parts[index], _TAKEN
    return part


def _content(tag: Tag) -> Any:
    return tag.values[0]


def _reason(error: Exception) -> str:
    try:
        return repr(error)[:_MAX_REASON]
    except Exception:  # it shows a number of more digits than Python likes to
        return type(error).__name__
