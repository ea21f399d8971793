"""Text about values and errors of unknown origin, for messages: short, and never an error of its own."""

from __future__ import annotations

import reprlib

from agl_meta.encoding_objects import type_name

# Cuts what is long or deep before it is formatted.
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200


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
    """Type and message of an exception."""
    try:
        text = str(error)
    except Exception:
        text = "<its message can't be shown>"
    return f"{type(error).__name__}: {text}"
