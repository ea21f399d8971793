"""Limits of one field and of one record: what is cut is marked, and says how long it was."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

import agl_meta.encoding
from agl_meta.decoding import SavedCut, Unsaved, decode
from agl_meta.encoding import MAX_FIELD_BYTES, encode


def back(value: Any, **limits: Any) -> Any:
    return decode(orjson.loads(encode(value, **limits)))


@pytest.mark.parametrize(
    ("value", "head"),
    [
        ("x" * 101, "x" * 100),
        ("é" * 51, "é" * 50),
        # Not in the midst of a character.
        ("x" + "é" * 50, "x" + "é" * 49),
        ("\ud800" * 40, "\ud800" * 33),
        (b"\xff" * 101, b"\xff" * 100),
        (bytearray(101), bytearray(100)),
        (memoryview(bytes(101)), bytes(100)),
    ],
    ids=["ascii", "utf-8", "odd", "surrogates", "bytes", "bytearray", "memoryview"],
)
def test_long_fields_are_cut(value: Any, head: Any) -> None:
    """A long text or bytes value keeps its first part and its length; its neighbours are whole."""
    kind = type(value).__name__
    found = back({"a": value, "b": [1, 2]}, max_field_bytes=100)
    assert found == {"a": SavedCut(kind, head, len(value)), "b": [1, 2]}
    assert type(found["a"].head) is type(head)


def test_what_fits_is_whole() -> None:
    """A field of just the limit, whatever else the record holds."""
    value = {"a": "é" * 50, "b": b"x" * 100, "c": ["y" * 100] * 5}
    assert back(value, max_field_bytes=100) == value


def test_the_default_limit() -> None:
    """A text beyond the default limit, which the fast way would have taken."""
    value = {"a": "x" * (MAX_FIELD_BYTES + 1), "b": ["y" * MAX_FIELD_BYTES]}
    found = back(value)
    assert found["a"].length == MAX_FIELD_BYTES + 1
    assert len(found["a"].head) == MAX_FIELD_BYTES
    assert found["b"] == value["b"]


def test_long_keys_are_cut() -> None:
    """A key is a text like others."""
    assert back({"k" * 101: 1}, max_field_bytes=100) == {SavedCut("str", "k" * 100, 101): 1}


def test_huge_integers() -> None:
    """An integer has no first part that means something."""
    found = back([1 << 10_000, 5], max_field_bytes=100)
    assert isinstance(found[0], Unsaved)
    assert "10001 bits" in found[0].why
    assert found[1] == 5


@pytest.mark.parametrize(
    "make",
    [list, tuple, set, lambda items: dict.fromkeys(map(str, items)), dict.fromkeys],
    ids=["list", "tuple", "set", "dict", "dict of numbers"],
)
def test_a_full_record_ends(make: Any) -> None:
    """What comes after the limit is left out, says so with its length, and takes no place."""
    value = make(range(100_000))
    content = encode({"first": 1, "many": value, "last": 2}, max_record_bytes=10_000)
    assert len(content) < 30_000
    found = decode(orjson.loads(content))
    document = found.head
    assert (found.type, found.length, document["first"]) == ("dict", 3, 1)
    many = document["many"]
    assert (many.type, many.length) == (type(value).__name__, 100_000)
    assert isinstance(many.head, type(value))
    assert 100 < len(many.head) < 10_000


def test_a_field_that_no_longer_fits() -> None:
    """The text that reaches the end of the record is cut there, and later ones are unsaved."""
    value = ["a" * 600, "b" * 600, "c" * 600]
    found = back(value, max_record_bytes=1_000)
    assert (found.type, found.length) == ("list", 3)
    assert found.head[0] == value[0]
    assert found.head[1].length == 600
    assert 300 < len(found.head[1].head) < 400


def test_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of values ends a record as that of bytes does: not with a marker for each one left."""
    monkeypatch.setattr(agl_meta.encoding, "MAX_NODES", 1_000)
    content = encode([(n,) for n in range(100_000)])
    assert len(content) < 50_000
    found = decode(orjson.loads(content))
    assert (found.type, found.length) == ("list", 100_000)
    assert found.head[0] == (0,)


def test_no_limits() -> None:
    """Without limits nothing is cut."""
    value = {"a": "x" * (MAX_FIELD_BYTES + 1), "b": (1,)}
    assert back(value, max_field_bytes=None, max_record_bytes=None) == value
