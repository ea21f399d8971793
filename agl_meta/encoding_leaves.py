"""How values without parts are written, and where one that is too large is cut.

Each function here gives a whole document whatever the limits of the record are: what is built of leaves
(a range, a datetime, an array of numbers) could not be restored if one of them were a marker.
"""

from __future__ import annotations

import base64
from math import isfinite
from typing import Any

from agl_meta.encoding_objects import TAG, is_text


def integer(value: int) -> Any:
    # int() of a long decimal text is limited and slow; of a hexadecimal one it is neither.
    return value if -(2**63) <= value < 2**64 else {TAG: "int", "v": hex(value)}


def number(value: float) -> Any:
    return value if isfinite(value) else {TAG: "float", "v": float.__repr__(value)}


def text(value: str) -> Any:
    if is_text(value):
        return value
    return {TAG: "text", "v": base64_text(value.encode("utf-8", "surrogatepass"))}


def binary(value: Any, kind: str = "bytes") -> Any:
    return {TAG: "bytes", "type": kind, "v": base64_text(bytes(value))}


def base64_text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def complex_number(value: complex) -> Any:
    return {TAG: "complex", "v": [number(value.real), number(value.imag)]}


def cut(kind: str, length: int, head: Any) -> Any:
    """The marker for what was cut: its first part, and how long it was."""
    return {TAG: "cut", "type": kind, "length": length, "v": head}


def text_head(value: str, room: int) -> str | None:
    """The first ``room`` bytes of a text as UTF-8, to the last whole character; ``None`` if it fits."""
    if len(value) * 4 <= room:
        return None
    # Not more than can matter: a text may be larger than what memory is left.
    content = value[: room + 1].encode("utf-8", "surrogatepass")
    if len(content) <= room:
        return None
    while content[room] & 0xC0 == 0x80:
        room -= 1
    return content[:room].decode("utf-8", "surrogatepass")


ELEMENTS: dict[type, Any] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: integer,
    float: number,
    complex: complex_number,
    str: text,
    bytes: binary,
}
"""From the exact type of an array's element to its writer."""
