"""The fast path gives what the walk gives, for plain data and objects among it, or leaves it to the walk."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import attrs
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_meta.decoding import SavedObject, decode
from agl_meta.encoding import Encoder, encode
from agl_meta.encoding_objects import TAG
from agl_meta.encoding_plain import encode_plain

DEPTH = 40


class Plain:
    """A class of somebody's."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@dataclasses.dataclass
class Data:
    a: Any
    b: Any = None


@attrs.define
class Slotted:
    a: Any
    b: Any = None


class Both(Plain):
    """Fields in slots and in a dict."""

    __slots__ = ("x",)


class Text(str):
    """No object to the encoder, but a subclass of a builtin."""


class Hostile(type):
    """Classes of this metaclass can't be hashed."""

    def __hash__(cls) -> int:
        raise RuntimeError


def both(**fields: Any) -> Both:
    found = Both(**fields)
    found.x = fields
    return found


leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5) | st.floats()
odd = st.sampled_from([(), (1, 2), {1}, b"x", 1j, Text("t"), TAG, Plain, object(), Ellipsis, "\ud800"])
names = st.sampled_from(["a", "b", "x", TAG, "", "__pydantic_extra__x", "\ud800"])


def containers(inner: Any) -> Any:
    fields = st.dictionaries(names, inner, max_size=3)
    return (
        st.lists(inner, max_size=4)
        | st.dictionaries(names | st.text(max_size=3), inner, max_size=4)
        | st.builds(lambda found: Plain(**found), fields)
        | st.builds(lambda found: both(**found), fields)
        | st.builds(Data, inner, inner)
        | st.builds(Slotted, inner, inner)
        | st.builds(lambda item, times: [item] * times, inner, st.integers(1, 3))  # shared
        | st.builds(lambda item: {"a": item, "b": [item, [item]]}, inner)  # at several depths
    )


values = st.recursive(leaves | leaves | leaves | odd, containers, max_leaves=20)
plain_values = st.recursive(leaves, containers, max_leaves=20)


@settings(deadline=None, max_examples=300)
@given(values | plain_values)
def test_agrees_with_the_walk(value: Any) -> None:
    """Whatever the fast path takes, its document is that of the walk, and the value stays as it was."""
    before = Encoder().document(value)
    fast = encode_plain(value, DEPTH)
    if fast is not None:
        assert fast.encoded == before
    assert encode(value) == before == Encoder().document(value)


MESSAGES = [Plain(content=f"{n}", tools=[], more={"n": n}) for n in range(5)]
TAKEN = {
    "objects in a list": {"messages": MESSAGES, "answer": "x"},
    "an object": Plain(a=1),
    "objects in objects": Plain(a=Data(Slotted([Plain(b={})]), [Data(1)]), b=[[Plain(c=0)]]),
    "slots": [Slotted(1, [2.5]), both(a=1)],
    "a text with the tag in it": {"a": f"x{TAG}", "b": [Plain(c=TAG + "x")]},
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    """These need no look at each value."""
    fast = encode_plain(TAKEN[name], DEPTH)
    assert fast is not None
    assert fast.encoded == Encoder().document(TAKEN[name])


def cycle() -> Any:
    found = Plain(a=[])
    found.a.append(found)  # type: ignore[attr-defined]
    return [found]


def cycle_of_containers() -> Any:
    found: list[Any] = [Plain(a=1)]
    found.append(found)
    return found


def unfolding() -> Any:
    found: Any = [Plain(a=1)]
    for _ in range(60):
        found = [found, found]
    return found


def unfolding_objects() -> Any:
    found = Plain(a=1)
    for _ in range(60):
        found = Plain(a=found, b=found)
    return found


def deep() -> Any:
    found: Any = Plain(a=1)
    for _ in range(DEPTH + 5):
        found = [found]
    return found


class Unhashable(metaclass=Hostile):
    pass


LEFT = {
    "a cycle": cycle,
    "a cycle of containers": cycle_of_containers,
    "unfolding": unfolding,
    "unfolding objects": unfolding_objects,
    "deep": deep,
    "nan in an object": lambda: [Plain(a=float("nan"))],
    "nan beside one": lambda: [Plain(a=1), float("inf")],
    "an object without fields": lambda: [Plain()],
    "a tuple in an object": lambda: [Plain(a=[(1,)])],
    "the tag as a key": lambda: {TAG: 1},
    "the tag as a field": lambda: [Plain(**{TAG: "int", "v": "0x1"})],
    "the tag as a text": lambda: [TAG],
    "a text like a tag": lambda: [f'"{TAG}', Plain(a=1)],
    "a key that is no text": lambda: [{1: Plain(a=1)}],
    "a field that is no text": lambda: [Plain(), *[p.__dict__.update({1: 2}) or p for p in [Plain(a=1)]]],
    "a class that can't be hashed": lambda: [Unhashable()],
    "a subclass of a builtin": lambda: [Text("a")],
}


@pytest.mark.parametrize("name", LEFT)
def test_left_to_the_walk(name: str) -> None:
    """What the fast way would lose, or would not end at, and what it gives then is the walk's."""
    value = LEFT[name]()
    assert encode_plain(value, DEPTH) is None
    if not name.startswith("unfolding"):
        assert encode(value) == Encoder().document(value)


def test_nothing_of_the_value_changes() -> None:
    value = {"messages": MESSAGES, "deep": [[Data({"a": Slotted(1)})]]}
    before = copy.deepcopy([vars(each) for each in MESSAGES])
    found = decode(orjson.loads(encode(value)))
    assert [vars(each) for each in MESSAGES] == before
    assert type(value["deep"][0][0]) is Data and type(value["deep"][0][0].a["a"]) is Slotted
    assert found["deep"][0][0]["a"]["a"] == SavedObject("Slotted", {"a": 1, "b": None})


def test_limits_hold() -> None:
    """A long text in an object is cut as anywhere."""
    value = [Plain(a="x" * 1000)]
    cut = decode(orjson.loads(encode(value, max_field_bytes=100)))[0]["a"]
    assert (cut.length, cut.head) == (1000, "x" * 100)
    assert encode(value, max_record_bytes=500) == Encoder(max_record_bytes=500).document(value)
