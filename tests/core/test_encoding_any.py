"""Encoding values of every kind: what comes back, what is marked, and what a hash of it may rely on."""

from __future__ import annotations

import array
import asyncio
import builtins
import collections
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import json
import logging
import math
import os
import pathlib
import queue
import re
import subprocess
import sys
import threading
import types
import uuid
import weakref
import zoneinfo
from typing import Any, NamedTuple
from unittest import mock

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_meta.decoding import SavedCut, SavedItems, SavedMoment, SavedObject, Unsaved, decode
from agl_meta.encoding import encode
from agl_meta.sample_keys import content_key
from tests.core.test_encoding import back, same


class Duration(datetime.timedelta):
    pass


class Price(decimal.Decimal):
    pass


class Ratio(fractions.Fraction):
    pass


class Moment(datetime.datetime):
    def isoformat(self, *_: Any) -> str:  # type: ignore[override]
        raise RuntimeError


class Id(uuid.UUID):
    pass


@pytest.mark.parametrize(
    ("value", "builtin"),
    [
        (Duration(1), datetime.timedelta(1)),
        (Price("1.10"), decimal.Decimal("1.10")),
        (Ratio(1, 3), fractions.Fraction(1, 3)),
        (Moment(2024, 1, 2, 3), datetime.datetime(2024, 1, 2, 3)),
        (Id(int=5), uuid.UUID(int=5)),
        (types.MappingProxyType({1: 2}), {1: 2}),
        ({1: 2}.keys(), [1]),
        ({1: 2}.values(), [2]),
        (collections.OrderedDict(a=1).items(), [("a", 1)]),
        (memoryview(b"abcdef")[::2], b"ace"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_as_a_builtin_value(value: Any, builtin: Any) -> None:
    """What has no document of its own comes back as the builtin that it is; the document names the class."""
    assert same(back([value]), [builtin])
    assert type(value).__name__.encode() in encode(value)


@pytest.mark.parametrize(
    "value",
    [
        slice(1, None, (2,)),
        ...,
        NotImplemented,
        datetime.timezone.utc,
        datetime.timezone(datetime.timedelta(hours=-3)),
        zoneinfo.ZoneInfo("Europe/Berlin"),
        array.array("d", [1.5, math.inf]),
        array.array("q", [-(2**63)]),
        collections.deque([1, 2], 5),
        # A gap in local time, and the last moment of all.
        datetime.datetime(2024, 3, 31, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1),
        datetime.datetime.max.replace(tzinfo=zoneinfo.ZoneInfo("Asia/Tokyo")),
        datetime.time(1, 2, tzinfo=datetime.timezone.utc, fold=1),
        datetime.time(1, 2, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        decimal.Decimal("-Infinity"),
        decimal.Decimal("1E+999999"),
        "x" * 3_000_000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_comes_back(value: Any) -> None:
    """These come back equal and of the same type."""
    assert same(back([value]), [value])
    assert getattr(back(value), "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(back(value), "fold", None) == getattr(value, "fold", None)


@pytest.mark.parametrize("text", ["NaN", "sNaN", "-NaN12"])
def test_decimal_nan(text: str) -> None:
    """Decimal's several nans stay what they are."""
    assert str(back(decimal.Decimal(text))) == text


class Zone(datetime.tzinfo):
    """Claims a name, and has an offset that the zone of that name never had."""

    key = "Europe/Berlin"

    def utcoffset(self, _: Any) -> datetime.timedelta:
        return datetime.timedelta(hours=7, seconds=1)


class BadZone(datetime.tzinfo):
    @property
    def key(self) -> str:
        raise RuntimeError

    def utcoffset(self, _: Any) -> datetime.timedelta:
        raise RuntimeError


def test_foreign_zones() -> None:
    """Of a custom tzinfo the offset is kept, or the wall clock where it raises."""
    found = back(datetime.datetime(2024, 1, 1, tzinfo=Zone()))
    assert found == datetime.datetime(2024, 1, 1, tzinfo=Zone())
    for value in (datetime.datetime(2024, 1, 1, 5, fold=1), datetime.time(5)):
        found = back(value.replace(tzinfo=BadZone()))
        assert isinstance(found, SavedMoment)
        assert found.local == value
        assert "BadZone raised RuntimeError" in found.why


class Key:
    """Equal to none but itself."""

    def __init__(self) -> None:
        self.a = 1


class Odd(str):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    "keys",
    [(Key(), Key()), (object(), object()), (Odd("a"), Odd("a")), (lambda: 1, lambda: 1)],
    ids=["objects", "unsaved", "text", "functions"],
)
def test_keys_that_can_be_none_any_more(keys: Any) -> None:
    """Mappings and sets stay readable, with all their items, where those can't be keys any more."""
    found = back({keys[0]: 1, keys[1]: 2})
    assert isinstance(found, SavedItems)
    assert (found.type, [item for _, item in found]) == ("dict", [1, 2])
    for kind in (set, frozenset):
        members = back(kind(keys))
        assert isinstance(members, SavedItems)
        assert (members.type, len(members)) == (kind.__name__, 2)
    assert len(back({frozenset(keys): 1, frozenset([1]): 2})) == 2


class A:
    __slots__ = ("x",)


class B(A):
    # An iterator is used up by the time that somebody looks.
    __slots__ = iter(["x", "__y"])

    def __init__(self) -> None:
        A.x.__set__(self, "hidden")  # type: ignore[attr-defined]
        self.x = "shown"
        self.__y = 2


class Claims:
    """Says that it is a dict with other content."""

    __slots__ = ("z",)
    __class__ = property(lambda self: dict)  # type: ignore[assignment]
    __dict__ = property(lambda self: {"fake": 1})  # type: ignore[assignment]

    def __init__(self) -> None:
        self.z = 1


def test_slots_and_lies() -> None:
    """The fields are those that the instance has, whatever its class says."""
    assert back(B()) == {"x": "shown", "_B__y": 2}
    assert back(Claims()) == {"z": 1}
    odd = Key()
    odd.__dict__[1] = 2
    assert back(odd) == {"a": 1, "": {1: 2}}
    setattr(odd, "$agl", "tuple")
    assert back(odd)["'$agl'"] == "tuple"


class Refuses(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError

    def __hash__(cls) -> int:
        raise RuntimeError

    __eq__ = __subclasscheck__ = __instancecheck__ = __getattribute__  # type: ignore[assignment]


class Refused(metaclass=Refuses):
    pass


class NoHash:
    hashable = True

    def __hash__(self) -> int:
        if not NoHash.hashable:
            raise RuntimeError
        return 1


def test_hostile_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A metaclass or a key that raises costs no more than its own value."""
    for value in (Refused(), Refused):
        assert isinstance(back([value])[0], Unsaved)
        assert back({"a": value, "b": 1})["b"] == 1
    keyed = {NoHash(): 1, "x": 2}
    monkeypatch.setattr(NoHash, "hashable", False)
    assert back(keyed)[1] == ("x", 2)


class Odds(NamedTuple):
    a: int
    b: int


class SubOdds(Odds):
    pass


class Lying(tuple):  # type: ignore[type-arg]
    _fields = ("a",)


def test_namedtuples() -> None:
    """A subclass of a namedtuple keeps the names; a tuple that claims others is a plain one."""
    found = back(SubOdds(1, 2))
    assert (found, found._fields) == ((1, 2), ("a", "b"))
    assert back(Lying((1, 2))) == (1, 2)


class Mode(enum.Flag):
    R = 1
    W = 2


def test_flags() -> None:
    """A combination of flags keeps its value, named or not."""
    assert back(Mode.R | Mode.W).value == 3
    assert back(Mode(0)).value == 0


class BadError(Exception):
    args = property(lambda self: 1 / 0)  # type: ignore[assignment]
    __cause__ = __traceback__ = args  # type: ignore[assignment]


def test_exceptions() -> None:
    """Notes, file names, members of a group, and an exception whose own attributes raise."""
    error = FileNotFoundError(2, "gone", "a.txt")
    error.__notes__ = ["note"]  # type: ignore[attr-defined]
    found = back(error)
    assert (found["filename"], found["__notes__"]) == ("a.txt", ["note"])
    assert back(ImportError("x", name="n"))["name"] == "n"
    assert back(BadError(1))["args"] == (1,)
    if sys.version_info >= (3, 11):
        group = back(builtins.ExceptionGroup("g", [ValueError("a")]))
        assert group["args"][1][0]["args"] == ("a",)


def test_partial_and_pattern() -> None:
    """What these were made of is kept."""
    found = back(functools.partial(max, 1, key=2))
    assert found["func"].name == "builtins.max"
    assert (found["args"], found["keywords"]) == ((1,), {"key": 2})
    assert back(re.compile("a.", re.DOTALL))["pattern"] == "a."


async def _task() -> Any:
    async def nothing() -> None:
        pass

    task = asyncio.create_task(nothing())
    try:
        return back([task, asyncio.Queue(), asyncio.Event()])
    finally:
        await task


def test_machinery_is_marked() -> None:
    """Threads, locks, queues, loggers, mocks, processes and the like leave a marker, and are not walked."""
    logger = logging.getLogger("tests.values")
    process = subprocess.Popen([sys.executable, "-c", ""])
    with open(os.devnull) as file:
        values = [
            file,
            process,
            logger,
            logging.StreamHandler(),
            threading.Thread(),
            threading.RLock(),
            threading.Event(),
            queue.Queue(),
            mock.MagicMock(),
            mock.NonCallableMock(),
            weakref.ref(logger),
            contextvars.ContextVar("x"),
            contextvars.copy_context(),
            (n for n in [1]),
        ]
        found = back(values)
    process.wait()
    found += asyncio.run(_task())
    assert [type(item) for item in found] == [Unsaved] * len(found)
    assert found[2].name == "tests.values"


class Deep(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("limit", [None, 4_000])
def test_deep_subclasses(limit: int | None) -> None:
    """The kind that takes the most levels of JSON, nested by the thousand, cut and whole."""
    value: Any = "bottom"
    for _ in range(1_000):
        value = Deep({1: value})
    found = decode(orjson.loads(encode(value, max_record_bytes=limit)))
    levels = 0
    while isinstance(found, dict):
        found, levels = found[1], levels + 1
        found = found.head if isinstance(found, SavedCut) and found.head else found
    if limit is None:
        assert (found, levels) == ("bottom", 1_000)
    else:
        assert isinstance(found, (Unsaved, SavedCut))
        assert 100 < levels < 1_000


def test_little_stack_is_left() -> None:
    """Where the caller has used up the stack, there is a document all the same."""

    def fall(depth: int) -> bytes:
        try:
            return fall(depth + 1)
        except RecursionError:
            return encode((1, (2,)))

    assert isinstance(decode(orjson.loads(fall(0))), (tuple, Unsaved))


def test_keys_do_not_depend_on_the_process() -> None:
    """A set's order differs between processes; the name of a sample does not."""
    code = (
        "from agl_meta.sample_keys import content_key;"
        "print(content_key({'a': {str(n) for n in range(50)}, 'b': {frozenset('xyz'), (1, 'x')}}))"
    )
    keys = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        keys.add(done.stdout)
    assert len(keys) == 1


def test_keys_see_past_cuts() -> None:
    """Samples that differ only behind the place where a record would be cut have different names."""
    long = "x" * (9 * 2**20)
    assert content_key({"a": (long + "1",)}) != content_key({"a": (long + "2",)})


class Holder:
    def __init__(self, a: Any) -> None:
        self.a = a


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(st.characters(exclude_categories=[]))
    | st.binary()
    | st.binary().map(bytearray)
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.complex_numbers()
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.times(timezones=st.none() | st.just(datetime.timezone.utc))
    | st.dates()
    | st.timedeltas()
    | st.uuids()
    | st.just(...)
    | st.builds(range, st.integers(), st.integers(), st.integers(min_value=1))
    | st.lists(st.floats(width=32, allow_nan=False)).map(lambda items: array.array("f", items))
    | st.lists(st.text("ab/.", min_size=1)).map(lambda parts: pathlib.PurePosixPath(*parts))
)
keys = (
    st.text(st.characters(exclude_categories=[]))
    | st.integers()
    | st.floats(allow_nan=False)
    | st.none()
    | st.binary()
    | st.uuids()
    | st.frozensets(st.integers())
    | st.tuples(st.integers(), st.text())
    | st.sampled_from(["$agl", "v", "type"])
)
marked = st.sampled_from([len, threading.Lock(), object(), Key(), mock.MagicMock(), BadError(1)])


def nested(inner: Any) -> Any:
    return (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(collections.deque)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(keys, inner)
        | st.builds(slice, inner, inner, inner)
    )


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.recursive(leaves | st.frozensets(keys) | st.sets(keys), nested, max_leaves=30))
def test_any_mixture_comes_back(value: Any) -> None:
    """Whatever mixture: it comes back equal and of the same types, and is encoded the same way again."""
    assert same(back(value), value)
    assert encode(value) == encode(value)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.recursive(
        leaves | marked,
        lambda inner: nested(inner) | st.dictionaries(keys | marked, inner) | st.builds(Holder, inner),
        max_leaves=30,
    ),
    st.sampled_from([None, 10, 100, 1_000]),
    st.sampled_from([None, 10, 200, 3_000]),
)
def test_any_mixture_gives_a_document(value: Any, field: int | None, record: int | None) -> None:
    """With what can't be saved, and cut anywhere: strict JSON on one line that can be read."""
    content = encode(value, max_field_bytes=field, max_record_bytes=record)
    assert b"\n" not in content

    def refuse(name: str) -> None:
        raise AssertionError(name)

    document = json.loads(content.decode("utf-8"), parse_constant=refuse)
    decode(document)
    if isinstance(value, Holder) and record is None:
        assert isinstance(decode(document), SavedObject)
