"""Text about values and errors of unknown origin, for messages: short, and never an error of its own."""

from __future__ import annotations

import reprlib

from agl_meta.encoding_objects import type_name

# Cuts what is long or deep before it is formatted.
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200


# What a terminal would obey, or show in another order than it stands: C0 and C1 without line break and tab,
# DEL, and the marks that override or isolate a direction.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(code) not in "\n\t"
}


def for_terminal(text: str) -> str:
    """Text of unknown origin as a terminal may show it: control characters are written as escapes."""
    return text.translate(_CONTROLS)


def describe(value: object, limit: int = 80) -> str:
    """``repr(value)``, cut to ``limit`` characters, or its type where that raises.

    Among plain data that is an integer of thousands of digits, or lists nested by the thousand.
    """
    try:
        text = _short.repr(value)
    except Exception:
        text = f"<{type_name(type(value))} that can't be shown>"
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def describe_error(error: BaseException) -> str:
    """Type and message of an exception, which may hold what an agent or a model said."""
    try:
        text = str(error)
    except Exception:
        text = "<its message can't be shown>"
    return f"{type(error).__name__}: {for_terminal(text)}"
