"""Text of unknown origin in messages."""

from __future__ import annotations

import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_meta.describing import describe, describe_error, for_terminal
from agl_meta.faults import FaultCounter


@given(st.text(st.characters()))
def test_no_control_reaches_a_terminal(text: str) -> None:
    """Nothing but line breaks and tabs is left of what a terminal obeys, and plain text stays as it is."""
    for shown in (for_terminal(text), describe_error(ValueError(text)), describe(text)):
        kinds = {unicodedata.category(character) for character in shown if character not in "\n\t"}
        assert "Cc" not in kinds
        assert not any("\u202a" <= character <= "\u202e" for character in shown)
    if text.isascii() and text.isprintable():
        assert for_terminal(text) == text


def test_a_fault_is_logged_without_escapes(caplog: pytest.LogCaptureFixture) -> None:
    """An exception whose message holds what a model said does not paint the screen."""
    with caplog.at_level(logging.ERROR):
        FaultCounter().record("doing this", RuntimeError("\x1b]0;title\x07\x1b[2J\u202egnp.exe"))
    assert "\x1b" not in caplog.text and "\u202e" not in caplog.text
    assert r"\x1b[2J\u202egnp.exe" in caplog.text


class Hostile:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "value",
    [Hostile(), 10**5000, [[[[[[[[]]]]]]]] * 1000, "x" * 10**6, b"\x1b[2J"],
    ids=["hostile", "int", "nested", "long", "bytes"],
)
def test_describe_is_short_and_raises_nothing(value: object) -> None:
    assert 0 < len(describe(value)) <= 80
    assert "\x1b" not in describe(value)
