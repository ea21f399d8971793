"""Encoding: strict JSON for any value, and what was encoded comes back."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import math
import pathlib
import re
import subprocess
import sys
import threading
import types
import uuid
import zoneinfo
from typing import Any, NamedTuple

import attrs
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_meta.decoding import SavedEnum, SavedObject, Unsaved, decode
from agl_meta.encoding import encode
from agl_meta.encoding_plain import encode_plain


def back(value: Any) -> Any:
    """Encode, check that it is one line of strict JSON, and decode."""
    content = encode(value)
    assert b"\n" not in content
    content.decode("utf-8")
    return decode(orjson.loads(content))


def same(first: Any, second: Any) -> bool:
    """Equal, of equal types throughout, nan included."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return first == second or (math.isnan(first) and math.isnan(second))
    if isinstance(first, complex):
        return same(first.real, second.real) and same(first.imag, second.imag)
    if isinstance(first, slice):
        return same((first.start, first.stop, first.step), (second.start, second.stop, second.step))
    if isinstance(first, (list, tuple, collections.deque)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return same(list(first.keys()), list(second.keys())) and same(
            list(first.values()), list(second.values())
        )
    return bool(first == second)


class Color(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Data:
    a: int
    b: Any = None


@attrs.define
class Slotted:
    a: int
    b: Any = None


class Plain:
    def __init__(self) -> None:
        self.a = 1
        self._private = [2]


class Text(str):
    pass


class HasMore(dict):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__(x=1)
        self.note = "kept"


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
RESTORED = [
    None,
    True,
    0,
    -(2**63),
    2**64 - 1,
    2**64,
    -(10**5000),
    1.5,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    complex(1, float("nan")),
    "",
    "line\u2028sep\x85\n\r\0\x1b[31m\u202e",
    "lone \ud800 surrogate",
    b"\xff\x00",
    bytearray(b"x"),
    (),
    (1, (2,), [3]),
    {1, 2},
    frozenset({"a"}),
    collections.deque([1, 2]),
    {"a": {"b": [None]}},
    {1: "int", "1": "str", None: 0, (1, 2): "tuple", 1.5: "float"},
    {"$agl": "tuple", "v": [1]},
    {"\ud800": 1},
    range(1, 10, 3),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    datetime.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
    datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))),
    datetime.date(1, 1, 1),
    datetime.time(23, 59, 59, 999999),
    datetime.timedelta(days=-1, microseconds=1),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=7),
    pathlib.Path("/a/b"),
    pathlib.PureWindowsPath("C:\\x"),
]


@pytest.mark.parametrize("value", RESTORED, ids=lambda value: type(value).__name__)
def test_comes_back(value: Any) -> None:
    """Values of builtin types come back equal and of the same type, alone and nested."""
    assert same(back(value), value)
    assert same(back({"deep": [value, {"x": value}]}), {"deep": [value, {"x": value}]})


def test_keys_never_merge() -> None:
    """Keys that JSON would write alike stay apart."""
    value = {1: "a", "1": "b", 1.5: "c", "1.5": "d", None: "e", "null": "f", b"1": "g"}
    assert same(back(value), value)


def test_missing_null_and_nan_stay_apart() -> None:
    """Three things that plain JSON libraries write alike."""
    found = back({"null": None, "nan": float("nan")})
    assert found["null"] is None
    assert math.isnan(found["nan"])
    assert "missing" not in found


@pytest.mark.parametrize("value", [Data(1, (2,)), Slotted(1, (2,))], ids=["dataclass", "attrs"])
def test_objects(value: Any) -> None:
    """An object comes back as its fields, and says of which class it was."""
    found = back(value)
    assert found == {"a": 1, "b": (2,)}
    assert isinstance(found, SavedObject)
    assert found.type == f"{__name__}.{type(value).__name__}"


def test_plain_object() -> None:
    """A plain object keeps its attributes, private ones too."""
    assert back(Plain()) == {"a": 1, "_private": [2]}


def test_enums() -> None:
    """An enum keeps class, name and value, also one that equals its value."""
    assert back(Color.RED) == SavedEnum(f"{__name__}.Color", "RED", "r")
    assert back([Level.LOW]) == [SavedEnum(f"{__name__}.Level", "LOW", 1)]


def test_namedtuple() -> None:
    """A namedtuple comes back equal, with the names of its fields."""
    found = back(Point(1, [2]))
    assert found == Point(1, [2])
    assert found._fields == ("x", "y")


@pytest.mark.parametrize(
    "value",
    [
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        Text("x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_subclasses_of_builtins(value: Any) -> None:
    """A subclass comes back as the builtin value; the document names the class."""
    assert back(value) == value
    assert type(value).__name__.encode() in encode(value)


def test_subclass_with_fields_of_its_own() -> None:
    """What a subclass's instance holds besides is kept."""
    assert back(HasMore()) == {"": {"x": 1}, "note": "kept"}


def test_exception() -> None:
    """An exception keeps its class, arguments, traceback and cause."""
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer", 2) from error
    except ValueError as error:
        found = back(error)
    assert found.type == "ValueError"
    assert found["args"] == ("outer", 2)
    assert "test_exception" in found["traceback"]
    assert found["__cause__"].type == "KeyError"


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        io.StringIO("x"),
        (n for n in [1]),
        iter([1]),
        len,
        lambda: 1,
        Plain,
        sys,
        types.SimpleNamespace().__repr__,
        object(),
        re.match("a", "a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_marked(value: Any) -> None:
    """Code and resources leave a marker that says what stood there."""
    found = back({"x": value})["x"]
    assert isinstance(found, Unsaved)
    assert found.why


def test_generator_is_not_consumed() -> None:
    """Saving has no effect on the value."""
    generator = (n for n in [1, 2])
    encode(generator)
    assert list(generator) == [1, 2]


def test_cycle() -> None:
    """A value that contains itself is cut where it does; one that is shared is written twice."""
    shared = [1]
    cyclic: dict[str, Any] = {"shared": [shared, shared]}
    cyclic["self"] = cyclic
    found = back(cyclic)
    assert found["shared"] == [[1], [1]]
    assert "cycle" in found["self"].why


@pytest.mark.parametrize("depth", [49, 50, 51, 200, 3000])
def test_deep_nesting(depth: int) -> None:
    """Nesting thousands deep comes back whole."""
    value: Any = "bottom"
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    found = back(value)
    for level in reversed(range(depth)):
        assert type(found) is (list if level % 2 else dict)
        found = found[0] if level % 2 else found["k"]
    assert found == "bottom"


def test_deep_cycle_ends() -> None:
    """A cycle longer than one part of a deep document is found, too."""
    first: list[Any] = []
    last = first
    for _ in range(170):
        last.append([])
        last = last[0]
    last.append(first)
    assert b"cycle" in encode(first)


def test_explosion_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small value that unfolds without end is cut, visibly."""
    monkeypatch.setattr("agl_meta.encoding.MAX_NODES", 10_000)
    value: Any = (0,)
    for _ in range(60):
        value = (value, value)
    content = encode(value)
    assert b"more than 10000 values" in content
    assert len(content) < 10_000_000


class Hostile:
    """Raises wherever it is asked."""

    def __init__(self) -> None:
        self.kept = 1

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError("hostile")

    __repr__ = __str__ = __eq__ = __hash__ = __bool__ = __len__ = _refuse  # type: ignore[assignment]
    __getattr__ = __dir__ = __reduce__ = __iter__ = _refuse  # type: ignore[assignment]
    __class__ = property(_refuse)  # type: ignore[assignment]
    field = property(_refuse)


class HostileDict(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError

    __iter__ = keys = values = __getitem__ = __contains__ = __len__ = items  # type: ignore[assignment]


class HostileText(str):
    def __str__(self) -> str:
        raise RuntimeError

    isascii = encode = __repr__ = __str__  # type: ignore[assignment]


def test_hostile_objects() -> None:
    """No code of the value's own is run, so that what it holds is saved."""
    assert back({"x": Hostile()})["x"] == {"kept": 1}
    assert back(HostileDict(a=1)) == {"a": 1}
    assert back([HostileText("t")]) == ["t"]


def test_value_changed_by_another_thread() -> None:
    """A value that is changed while it is encoded gives a document all the same."""
    value = {"list": [0], "dict": {}}
    stop = threading.Event()

    def change() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            value["dict"][n % 500] = n  # type: ignore[call-overload]
            value["dict"].pop((n * 7) % 500, None)  # type: ignore[attr-defined]
            value["list"].append(n)  # type: ignore[attr-defined]
            del value["list"][100:]  # type: ignore[arg-type]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            assert set(back(value)) == {"list", "dict"}
    finally:
        stop.set()
        thread.join()


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]))
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc))
    | st.timedeltas()
    | st.uuids()
    | st.complex_numbers()
    | st.fractions()
)
keys = st.text(st.characters(exclude_categories=[])) | st.integers() | st.none() | st.just("$agl")
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys | st.tuples(st.integers()), inner)
        | st.frozensets(st.integers() | st.text())
    ),
    max_leaves=30,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(values)
def test_any_mixture_comes_back(value: Any) -> None:
    """Whatever mixture of builtin values, it comes back equal and of the same types."""
    assert same(back(value), value)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(plain)
def test_fast_path_agrees_with_the_walk(value: Any) -> None:
    """Where the fast path takes a value, it gives what the walk would give."""
    from agl_meta.encoding import Encoder

    fast = encode_plain(value, 40)
    if fast is not None:
        assert fast.encoded == Encoder().document(value)


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["$agl", "v", "type", "dtype", "shape", "x"]), inner)
        | st.builds(
            lambda kind, v: {"$agl": kind, "v": v},
            st.sampled_from(["tuple", "int", "parts", "part", "ndarray", "path", "set", "dict"]),
            inner,
        )
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(documents)
def test_decoding_any_document(document: Any) -> None:
    """A damaged or hostile document gives a value or one of the documented errors."""
    try:
        decode(document)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        pass


def test_imports_nothing() -> None:
    """The encoder loads no package for a value that is not that package's."""
    code = (
        "import sys; from agl_meta.encoding import encode; "
        "encode({'x': (1, object(), b'')}); "
        "print([m for m in ('numpy', 'torch', 'pydantic', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_keys_that_can_not_be_compared() -> None:
    """Keys of equal hash whose comparison raises once they are in: told as pairs, all of them."""

    class Key:
        quiet = True

        def __init__(self, number: int) -> None:
            self.number = number

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            if not Key.quiet:
                raise ZeroDivisionError
            return self is other

    value = [{Key(1): "a"}, {Key(2): "b"}, {Key(3): "c"}]
    Key.quiet = False
    found = orjson.loads(encode(value))
    assert [pair[1] for each in found for pair in each["v"]] == ["a", "b", "c"]
    assert [pair[0]["v"] for each in found for pair in each["v"]] == [{"number": n} for n in (1, 2, 3)]
