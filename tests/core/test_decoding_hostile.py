"""Decoding documents that somebody made to do harm: a value or a ValueError, and no more than they hold."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import os
import random
import subprocess
import sys
import uuid
import zoneinfo
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_meta.decoding import SavedArray, SavedConstant, SavedItems, SavedObject, decode
from agl_meta.decoding_bounds import MAX_CLASSES, MAX_DEPTH, MAX_EQUAL
from agl_meta.decoding_kinds import RESTORE
from agl_meta.encoding import encode
from agl_meta.encoding_objects import TAG
from tests.core.test_encoding import back, same

ROOT = Path(__file__).parent.parent.parent
PRIME = 2**61 - 1
"""Integers that differ by a multiple of it have one hash."""


def tag(kind: str, held: Any, **fields: Any) -> dict[str, Any]:
    return {TAG: kind, **fields, "v": held}


def whole(number: int) -> dict[str, Any]:
    return tag("int", hex(number))


def equal_hashes(count: int) -> list[Any]:
    return [whole(1 + n * PRIME) for n in range(1, count + 1)]


def chain(kind: Callable[[Any], Any], count: int = 200_000, last: Any = None) -> Any:
    """Values within each other, by way of parts."""
    return tag("parts", [*(kind(tag("part", n)) for n in range(1, count + 1)), last])


def array(dtype: str, shape: list[int], held: Any, **fields: Any) -> Any:
    return tag("ndarray", held, dtype=dtype, shape=shape, **fields)


def nested_sets(depth: int, width: int, first: int = 1) -> Any:
    """Sets of sets, all of one hash and none equal to another."""
    if not depth:
        return whole(1 + first * PRIME)
    return tag("frozenset", [nested_sets(depth - 1, width, first * width + n) for n in range(width)])


# What took the process down, or would have; each with the type that it comes back as, or ValueError.
HARMFUL: dict[str, tuple[Callable[[], Any], str]] = {
    "a tuple of an endless range": (lambda: tag("tuple", tag("range", [0, 10**12, 1])), "ValueError"),
    "a set of an endless range": (lambda: tag("set", tag("range", [0, 10**12, 1])), "ValueError"),
    "a deque of an endless range": (lambda: tag("deque", tag("range", [0, 10**12, 1])), "ValueError"),
    "an array of an endless range": (
        lambda: tag("array", tag("range", [0, 10**12, 1]), dtype="q", shape=[1]),
        "ValueError",
    ),
    "a tensor of an endless range": (
        lambda: tag("tensor", tag("range", [0, 10**12, 1]), dtype="x", shape=[1]),
        "ValueError",
    ),
    "a fraction with an exponent": (lambda: tag("fraction", ["1e1000000000"]), "ValueError"),
    "a fraction of long numbers": (
        lambda: tag("fraction", [whole(3**2_000_000), whole(5**1_500_000)]),
        "SavedObject",
    ),
    "a range of long numbers": (
        lambda: tag("range", [0, whole(3**2_000_000), whole(5**1_000_000)]),
        "SavedObject",
    ),
    "a decimal of a long number": (lambda: tag("decimal", whole(16**2_000_000 - 1)), "ValueError"),
    "a decimal beside a long number of its hash": (
        lambda: tag("set", [whole(16**4_000_000 - 1), tag("decimal", str(hash(16**4_000_000 - 1)))]),
        "SavedItems",
    ),
    "shared parts": (
        lambda: tag(
            "parts",
            [
                tag("set", [tag("part", 1)]),
                *(tag("tuple", [tag("part", n), tag("part", n)]) for n in range(2, 62)),
                tag("tuple", []),
            ],
        ),
        "ValueError",
    ),
    "parts that lead back": (
        lambda: tag(
            "parts", [tag("part", 1), tag("tuple", [tag("part", 2)]), tag("tuple", [tag("part", 1)])]
        ),
        "ValueError",
    ),
    "a long chain of tuples to hash": (
        lambda: tag("set", [chain(lambda part: tag("tuple", [part]))]),
        "SavedItems",
    ),
    "a long chain of enums to hash": (
        lambda: tag("set", [chain(lambda part: tag("enum", part, type="a.B", name="C"))]),
        "SavedItems",
    ),
    "a long chain of cuts as a key": (
        lambda: tag("dict", [[chain(lambda part: tag("cut", part, type="a", length=1)), 1]]),
        "SavedItems",
    ),
    "a long chain of sets": (lambda: chain(lambda part: tag("frozenset", [part])), "SavedItems"),
    "a long chain of deques": (lambda: chain(lambda part: tag("deque", [part])), "SavedItems"),
    "a long chain of deques and lists": (lambda: chain(lambda part: [tag("deque", [part])]), "list"),
    "a long chain of slices": (lambda: chain(lambda part: tag("slice", [part, None, 1])), "SavedItems"),
    "a long chain of tags": (
        lambda: functools.reduce(lambda inner, _: tag("subclass", [inner], type="a"), range(200_000), None),
        "list",
    ),
    "members of one hash": (lambda: tag("set", equal_hashes(60_000)), "SavedItems"),
    "keys of one hash": (lambda: tag("dict", [[key, 0] for key in equal_hashes(60_000)]), "SavedItems"),
    "decimals of one hash": (
        lambda: tag("set", [tag("decimal", str(1 + n * PRIME)) for n in range(60_000)]),
        "SavedItems",
    ),
    "fractions of one hash": (
        lambda: tag("set", [tag("fraction", [whole(1 + n * PRIME), 1]) for n in range(60_000)]),
        "SavedItems",
    ),
    "ids of one hash": (
        lambda: tag("set", [tag("uuid", f"{1 + n * PRIME:032x}") for n in range(60_000)]),
        "SavedItems",
    ),
    "tuples of one hash": (
        lambda: tag("set", [tag("tuple", [-1 - (n >> bit & 1) for bit in range(16)]) for n in range(60_000)]),
        "SavedItems",
    ),
    "sets of one hash in each other": (
        lambda: tag("set", [nested_sets(2, 60, n) for n in range(1, 41)]),
        "SavedItems",
    ),
    "a tuple of very many names": (
        lambda: tag("namedtuple", [0] * 300_000, type="N", fields=[f"f{n}" for n in range(300_000)]),
        "SavedItems",
    ),
    "very many kinds of namedtuples": (
        lambda: [tag("namedtuple", [1], type=f"N{n}", fields=["a"]) for n in range(100_000)],
        "list",
    ),
    "very many zones": (lambda: [tag("zone", f"Area/Town{n}") for n in range(100_000)], "list"),
    "an array without end": (lambda: array("<f8", [2**62] * 100_000, []), "ValueError"),
    "nesting of lists": (lambda: functools.reduce(lambda inner, _: [inner], range(100_000), 1), "list"),
}
HARMFUL_WITH_NUMPY: dict[str, tuple[Callable[[], Any], str]] = {
    "an ndarray of an endless range": (
        lambda: array("<i8", [1], tag("range", [0, 10**10, 1])),
        "ValueError",
    ),
    "one long text among short ones": (
        lambda: array("<U1", [20_000], ["x" * 1_000_000, *[""] * 19_999]),
        "SavedArray",
    ),
    "a number for all fields of a row": (
        lambda: array(
            "|V8", [100_000], [1] * 100_000, names=[f"f{n}" for n in range(5_000)], formats=["<c16"] * 5_000
        ),
        "SavedArray",
    ),
    "a long chain of object arrays": (lambda: chain(lambda part: array("|O", [1], [part])), "SavedArray"),
    "a masked endless range": (
        lambda: tag("masked", tag("range", [0, 10**12, 1]), mask=array("|b1", [1], [False])),
        "ValueError",
    ),
    "an array too large to be addressed": (lambda: array("<f8", [0, 2**62, 2**62], []), "ValueError"),
}


def run(name: str) -> None:
    """Decode one of these and free what came of it; runs in a process of its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
    make, _ = {**HARMFUL, **HARMFUL_WITH_NUMPY}[name]
    document = make()
    try:
        found = type(decode(document)).__name__  # and frees it
    except Exception as error:
        found = type(error).__name__
    print(found)


def outcome(name: str) -> str:
    code = f"from {__name__} import run; run({name!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.stdout.strip() or f"exit {done.returncode}: {done.stderr[-300:]}"


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful(name: str) -> None:
    """None of these hangs, takes gigabytes or ends the process."""
    assert outcome(name) == HARMFUL[name][1]


@pytest.mark.parametrize("name", HARMFUL_WITH_NUMPY)
def test_harmful_arrays(name: str) -> None:
    """The same of arrays of numpy."""
    pytest.importorskip("numpy")
    assert outcome(name) == HARMFUL_WITH_NUMPY[name][1]


DAMAGED: list[Any] = [
    {TAG: "tuple"},
    tag("tuple", tag("subclass", [1], type="a")),
    tag("tuple", "text"),
    tag("int", 1),
    tag("int", "x"),
    tag("int", tag("text", "MQ==")),
    tag("float", "1e5"),
    tag("float", 1.5),
    tag("complex", [1.0]),
    tag("complex", [whole(16**400), 1.0]),
    tag("complex", ["1", "2"]),
    tag("text", "é"),
    tag("text", "/w=="),
    tag("bytes", [1], type="bytes"),
    tag("bytes", "AA==", type=["bytes"]),
    tag("deque", [1], maxlen=-1),
    tag("deque", [1], maxlen=True),
    tag("deque", [1], maxlen=2**63),
    tag("deque", [1, 2], maxlen=1),
    tag("dict", [[1, 2, 3]]),
    tag("dict", ["ab"]),
    tag("dict", [tag("tuple", [1, 2])]),
    tag("dict", {"a": 1}),
    tag("slice", [1]),
    tag("range", [1, 2, 0]),
    tag("range", [1, True, 2]),
    tag("range", [1, 2.0, 3]),
    tag("constant", ["Ellipsis"]),
    tag("timezone", [1, 0, 0]),
    tag("timezone", [0.5, 0, 0]),
    tag("timedelta", [10**10, 0, 0]),
    tag("timedelta", [2**62, 0, 0]),
    tag("timedelta", [None, 0, 0]),
    tag("zone", 5),
    tag("datetime", "2024"[:3]),
    tag("datetime", 5),
    tag("datetime", "2024-01-01T00:00:00", fold=2),
    tag("datetime", "2024-01-01T00:00:00", zone=["Europe/Berlin"]),
    tag("date", "2024-13-01"),
    tag("decimal", "1.2.3"),
    tag("decimal", [0, [1], 2]),
    tag("decimal", "1e9999999999999999999999"),
    tag("fraction", [1, 0]),
    tag("fraction", [1.5, 1]),
    tag("fraction", ["1", 1]),
    tag("fraction", [1, True]),
    tag("uuid", 5),
    tag("uuid", "x"),
    tag("path", ["a"], type="PosixPath"),
    tag("path", "a", type=None),
    tag("enum", 1, type=1, name="A"),
    tag("enum", 1, type="a.B", name=[1]),
    tag("namedtuple", [1], type="a.B", fields=["a", "b"]),
    tag("namedtuple", [1], type="a.B", fields="a"),
    tag("namedtuple", [1], type="a.B", fields=[1]),
    tag("subclass", 1, type="a.B", fields=[1]),
    tag("object", [1], type="a.B"),
    tag("object", tag("dict", [[1, 2]]), type="a.B"),
    tag("object", {"a": 1}, type=tag("tuple", [])),
    tag("cut", 1, type="a", length="1"),
    tag("frame", [1], type="a", shape=[1, 1], columns=[1], index=[1], names=[1], dtypes=["x"]),
    tag("frame", [[1]], type="a", shape=[1, -1], columns=[1], index=[1], names=[1], dtypes=["x"]),
    tag("image", None, type="a", mode="L", size=[1.5, 1], digest="d"),
    tag("file", None, type="a", mode="L", size=[1, 1], digest="d", path="../../secret"),
    tag("file", None, type="a", mode="L", size=[1, 1], digest="d", path="/etc/passwd"),
    tag("tensor", [1], dtype="x", shape=[True]),
    tag("tensor", [1], dtype="x", shape=[1] * 65),
    tag("tensor", [1], dtype=["x"], shape=[1]),
    tag("column", 5, dtype="x", shape=[1]),
    tag("array", ["a"], dtype="q", shape=[1]),
    tag("array", [2**63], dtype="q", shape=[1]),
    tag("unsaved", None, type="a"),
    tag("unsaved", None, type="a", why=[1]),
    tag("part", 1),
    tag("parts", []),
    tag("parts", "ab"),
    tag("parts", [tag("part", 0)]),
    tag("parts", [tag("part", 5), 1]),
    tag("parts", [tag("part", True), 1]),
    tag("parts", [[tag("part", 1), tag("part", 1)], 1]),
]


@pytest.mark.parametrize("document", DAMAGED, ids=lambda document: orjson.dumps(document)[:60].decode())
def test_damaged(document: Any) -> None:
    """A tag with a field that the encoder doesn't write there raises ValueError, which names its kind."""
    with pytest.raises(ValueError, match=f"a damaged '{document[TAG]}|a damaged 'part'"):
        decode([document])


@pytest.mark.parametrize(
    "document",
    [
        array("<f8", [2], [1.0]),
        array("<f8", [-1, -1], [1.0]),
        array("<f8", [1.0], [1.0]),
        array("<f8", [True], [1.0]),
        array("<f8", [2**63], [1.0]),
        array("<f8", [1], [[1.0]]),
        array("<f8", [1], [tag("tuple", [1])]),
        array("<f9", [1], ["x"], names=["a"]),
        array("<i1", [1], ["x"]),
        array("<U1", [1], [1]),
        array("|V8", [1], [tag("tuple", [1])], names=["a"], formats=["<i4", "<i4"]),
        tag("npscalar", [1], dtype="int64"),
        tag("npscalar", 1, dtype=["int64"]),
        tag("masked", [1], mask=[1]),
        tag("masked", array("<f8", [2], [1.0, 2.0]), mask=array("|b1", [1], [True])),
    ],
    ids=lambda document: orjson.dumps(document)[:60].decode(),
)
def test_damaged_arrays(document: Any) -> None:
    """The same of numpy's."""
    pytest.importorskip("numpy")
    with pytest.raises(ValueError, match="a damaged"):
        decode(document)


@pytest.mark.parametrize(
    "document",
    [tag("unknown", [1]), {TAG: 5}, {TAG: ["tuple"], "v": [1]}, {TAG: None, "v": [1]}, tag("Tuple", [1])],
    ids=str,
)
def test_unknown_tags(document: Any) -> None:
    """A tag of no known kind is given back as it stands."""
    assert decode([document]) == [document]


def test_arrays_within_bounds() -> None:
    """Texts of an array come back as one where they are about as long as each other, or few."""
    numpy = pytest.importorskip("numpy")
    for value in (["a", "bcd"], ["x" * 100, *[""] * 100], ["word"] * 5_000):
        found = back(numpy.array(value))
        assert isinstance(found, numpy.ndarray)
        assert found.tolist() == value
    found = decode(array("<U1", [1_000], ["x" * 10_000, *["y"] * 999]))
    assert isinstance(found, SavedArray)
    assert found.elements[0] == "x" * 10_000


def test_few_equal_hashes() -> None:
    """A set whose members have one hash, but not too many of them, is a set; beyond that all are kept."""
    few = {n * PRIME for n in range(1, MAX_EQUAL)}
    assert same(back(few), few)
    assert same(back({frozenset(few): 1}), {frozenset(few): 1})
    corners = {(x, y, z) for x in (-1, -2) for y in (-1, -2) for z in (-1, -2)}
    assert same(back(corners), corners)
    many = decode(tag("set", equal_hashes(MAX_EQUAL + 20)))
    assert isinstance(many, SavedItems)
    assert many == [1 + n * PRIME for n in range(1, MAX_EQUAL + 21)]
    large = set(range(100_000))
    assert same(back(large), large)


def in_the_way(bits: int) -> list[int]:
    """Keys of different hashes that fill the way of those after them through a table of so many bits."""
    mask, way = 2**bits - 1, [0]
    while len(way) < 2**bits // 3:
        way.append((way[-1] * 5 + 1) & mask)
    places = {slot: n for n, slot in enumerate(way)}
    choose, found = random.Random(1), set()
    while len(found) < len(way) // 4:
        key = choose.randrange(2**bits, 2 ** (bits + 6))
        slot, perturb, steps = key & mask, key, 0
        while slot in places and steps < 6:
            perturb >>= 5
            slot, steps = (slot * 5 + perturb + 1) & mask, steps + 1
        if places.get(slot, len(way)) < len(way) // 3:
            found.add(key)
    return [*way, *found]


def test_keys_in_the_way_of_each_other() -> None:
    """Keys whose hashes differ, but not the places where a dict looks for them; others are a dict."""
    keys = in_the_way(14)
    assert len(set(keys)) == len(keys)
    found = decode(tag("dict", [[key, 0] for key in keys]))
    assert isinstance(found, SavedItems)
    assert found == [(key, 0) for key in keys]
    assert isinstance(decode(tag("set", keys)), SavedItems)
    choose = random.Random(2)
    for most in (2**16, 2**40, 2**63):
        value: Any = dict.fromkeys([choose.randrange(-most, most) for _ in range(9_000)], 0)
        assert same(back(value), value)
    for value in ({n << 40 for n in range(9_000)}, {n / 8 for n in range(9_000)}):
        assert same(back(value), value)
    value = dict.fromkeys([(n // 100, n % 100) for n in range(9_000)], 0)
    assert same(back(value), value)


def test_deep_members() -> None:
    """A nested tuple is a key up to a depth, and kept beyond it."""
    value: Any = ()
    for depth in range(1, MAX_DEPTH + 20):
        found = back({value: depth})
        assert type(found) is (dict if depth <= MAX_DEPTH else SavedItems)
        assert next(iter(found)) in (value, (value, depth))
        value = (value,)


def test_deep_deques_and_slices() -> None:
    """Of a long chain nothing is lost where it is no deque or slice any more."""
    document = chain(lambda part: tag("deque", [part]), 1_000, "bottom")
    found, kinds = decode(document), collections.Counter[str]()
    while found != "bottom":
        kinds[type(found).__name__] += 1
        [found] = found
    assert kinds["deque"] > 900
    assert kinds["deque"] + kinds["SavedItems"] == 1_000
    assert kinds["SavedItems"] > 5


def test_wide_namedtuples() -> None:
    """Of one with too many names these are kept as pairs."""
    names = [f"f{n}" for n in range(300)]
    found = decode(tag("namedtuple", names, type="a.Wide", fields=names))
    assert isinstance(found, SavedItems)
    assert (found.type, found) == ("namedtuple", [(name, name) for name in names])


def test_kinds_of_namedtuples() -> None:
    """Of very many kinds the first ones are restored, and each kind is one class."""
    documents = [tag("namedtuple", [n], type=f"a.N{n}", fields=["x"]) for n in range(MAX_CLASSES + 5)]
    found = decode(documents * 2)
    assert sum(isinstance(each, tuple) for each in found) == 2 * MAX_CLASSES
    assert sum(isinstance(each, SavedItems) for each in found) == 10
    restored = [each for each in found if isinstance(each, tuple)]
    assert len(set(map(type, restored))) == MAX_CLASSES
    named = decode(tag("namedtuple", [1, 2], type="a.class", fields=["def", "x"]))
    assert named == (1, 2)
    assert named.x == 2


def test_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is no zone's is never looked for: that reads files, and takes long."""
    assert decode(tag("zone", "Europe/Berlin")) is zoneinfo.ZoneInfo("Europe/Berlin")
    monkeypatch.setattr("agl_meta.decoding_kinds._known_zone", pytest.fail)
    names = ["../../etc/passwd", "/etc/passwd", "", ".", "Europe", "Europe/", "\0", "x" * 5_000, "UTC\n"]
    for name in names:
        assert decode(tag("zone", name)) == SavedConstant(f"zoneinfo.ZoneInfo({name!r})")
        assert decode(tag("datetime", "2024-01-01T00:00:00", zone=name)) == datetime.datetime(2024, 1, 1)
    assert decode(tag("zone", None)) == SavedConstant("zoneinfo.ZoneInfo(None)")


def test_long_numbers_are_kept() -> None:
    """A fraction and a range of numbers that take too long to divide keep these."""
    value = fractions.Fraction(3**20_000, 5**15_000)
    found = back(value)
    assert isinstance(found, SavedObject)
    assert found == {"numerator": value.numerator, "denominator": value.denominator}
    assert back(fractions.Fraction(3**20_000, 5)) == fractions.Fraction(3**20_000, 5)
    assert back(range(0, 10**40, 3)) == range(0, 10**40, 3)
    assert back(range(2**20_000)) == {"start": 0, "stop": 2**20_000, "step": 1}


def test_parts_within_parts() -> None:
    """References are to the parts of the document that they stand in, and parts that none uses are left."""
    inner = tag("parts", [[tag("part", 1)], "inner"])
    outer = tag("parts", [[inner, tag("part", 1), inner], ["outer", tag("part", 2)], "last", tag("part", 9)])
    assert decode({"a": outer, "b": inner}) == {
        "a": [["inner"], ["outer", "last"], ["inner"]],
        "b": ["inner"],
    }


def test_with_half_a_stack() -> None:
    """What the encoder nests deepest comes back where the caller has used up half of the stack."""
    value: Any = "bottom"
    for level in range(2_000):
        value = {level: (value,)} if level % 3 else [value]
    document = orjson.loads(encode(value))

    def fall(depth: int) -> Any:
        return fall(depth - 1) if depth else decode(document)

    found = fall(sys.getrecursionlimit() // 2)
    for level in reversed(range(2_000)):
        found = found[level][0] if level % 3 else found[0]
    assert found == "bottom"


def test_with_no_stack() -> None:
    """Where none is left, that is a ValueError, too."""
    document = [tag("enum", tag("set", [tag("decimal", "1")]), type="a", name="b")]
    outcomes = []

    def fall() -> None:
        try:
            return fall()
        except RecursionError:
            pass
        try:
            outcomes.append(type(decode(document)).__name__)
        except ValueError:
            outcomes.append("ValueError")
            raise RecursionError from None
        except RecursionError as error:
            # There was no room for the call itself, or to make another error.
            trace = error.__traceback__
            while trace is not None:
                outcomes.append(trace.tb_frame.f_code.co_name)
                trace = trace.tb_next
            raise

    fall()
    assert {"ValueError", "list"} <= set(outcomes) <= {"fall", "decode", "ValueError", "list"}


# ------------------------------------------------------------------------------------------ fuzzing


def extent(value: Any) -> int:
    """About how much a value holds: what is in it, counted in values and characters."""
    found, left = 0, [value]
    while left:
        item = left.pop()
        found += 1
        if isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
            left += item
        elif isinstance(item, (str, bytes, bytearray)):
            found += len(item)
        elif hasattr(item, "nbytes"):
            found += item.nbytes // 8
            if item.dtype == object:
                left += item.reshape(-1).tolist()
        elif isinstance(item, slice):
            left += [item.start, item.stop, item.step]
        elif hasattr(type(item), "__attrs_attrs__"):
            left += [getattr(item, field.name) for field in type(item).__attrs_attrs__]
    return found


def decodes_or_refuses(document: Any) -> bool:
    """Whether the document is restored; what comes of it is no more than what stands in it."""
    content = orjson.dumps(document)
    try:
        found = decode(document)
    except ValueError as error:
        if "a damaged" not in str(error):
            raise
        return False
    assert extent(found) <= 64 * len(content) + 1_000
    assert orjson.dumps(document) == content, "the document was changed"
    return True


KINDS = sorted([*RESTORE, "parts", "part", "unknown"])
NAMES = [
    *("v", "type", "fields", "name", "names", "formats", "dtype", "shape", "cut", "mask", "maxlen", "fold"),
    *("zone", "lost", "length", "size", "mode", "digest", "path", "why", "columns", "index", "dtypes", "x"),
]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0, 1, 10**6, -(2**63), 2**64 - 1, PRIME, 1.5, -0.0, 1e300])
    | st.text(max_size=3)
    | st.sampled_from(
        [
            *("nan", "-inf", "0x1f", "-0x1", "AA==", "1.10", "1e999999", "sNaN", "Ellipsis", "a.B", "class"),
            *("2024-01-01", "2024-01-01T00:00:00+01:00", "23:59", "9999-12-31T23:59:59", "Europe/Berlin"),
            *("<f8", "|O", "<U1", "|S1", "<M8[s]", "<m8[D]", "|b1", "|V8", "int8", "float16", "d", "u", "M8"),
            *("PosixPath", "PureWindowsPath", "bytearray", "0" * 32, "../x", "files/a"),
        ]
    )
)
tagged = lambda inner: st.builds(  # noqa: E731
    lambda kind, fields: {TAG: kind, **fields},
    st.sampled_from(KINDS),
    st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
)
# Fields that fit each other more often than chance has it.
likely = lambda inner: st.builds(  # noqa: E731
    lambda kind, held, dtype, shape, mask: {
        TAG: kind,
        "v": held,
        "dtype": dtype,
        "shape": shape,
        "mask": mask,
        "type": "a.B",
        "name": "n",
        "length": 3,
    },
    st.sampled_from(KINDS),
    st.lists(inner, max_size=4) | inner,
    st.sampled_from(["<f8", "|O", "<U1", "|S1", "<M8[s]", "<m8", "q", "|V8", "int8", "float32"]),
    st.lists(st.integers(0, 3), max_size=2),
    inner,
)
documents = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
        | tagged(inner)
        | likely(inner)
    ),
    max_leaves=25,
)
quietly = pytest.mark.filterwarnings("ignore")


@quietly
@settings(deadline=None, max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(documents)
def test_any_document(document: Any) -> None:
    """Any tags with any fields: a value that is no larger than the document, or ValueError."""
    decodes_or_refuses(document)


class Pair(NamedTuple):
    a: Any
    b: Any


def mixture() -> list[Any]:
    """One value of each kind that needs no other package, nested."""
    deep: Any = {"end": (1,)}
    for n in range(90):
        deep = (deep, n) if n % 2 else [deep]
    values: list[Any] = [
        {1: "a", (1, 2): {"x": [None]}, frozenset([1, "b"]): 2.5},
        {1, 2**70, fractions.Fraction(1, 3), decimal.Decimal("1.5"), float("inf")},
        collections.deque([1, [2]], 5),
        slice(1, None, (2,)),
        range(1, 10, 3),
        datetime.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        datetime.time(1, 2, fold=1),
        datetime.timedelta(1, 2, 3),
        datetime.timezone.utc,
        uuid.UUID(int=5),
        Path("a/b"),
        Pair(1, Pair({2}, b"x")),
        complex(1, float("nan")),
        "\ud800",
        ...,
        collections.Counter("aab"),
        ValueError("x", (1,)),
        len,
        deep,
    ]
    try:
        import numpy
    except ImportError:
        return values
    return [
        *values,
        numpy.arange(6, dtype="i2").reshape(2, 3),
        numpy.array(["a", "bcd"]),
        numpy.array([(1, 2.5)], dtype=[("i", "i4"), ("f", "f8")]),
        numpy.ma.array([1, 2], mask=[0, 1]),
        numpy.array([1, None, (2,)], dtype=object),
        numpy.timedelta64(5, "s"),
        numpy.zeros((200, 200)),
    ]


MIXTURE = encode(mixture())


def places(document: Any) -> list[tuple[Any, Any]]:
    """All containers and keys of a document."""
    found, left = [], [document]
    while left:
        item = left.pop()
        pairs = list(enumerate(item) if type(item) is list else item.items())
        found += [(item, key) for key, _ in pairs]
        left += [each for _, each in pairs if type(each) in (list, dict)]
    return found


def mutate(document: Any, choose: random.Random) -> None:
    """Change, remove, double, move or wrap something somewhere."""
    target, key = choose.choice(places(document))
    other, name = choose.choice(places(document))
    copy = orjson.loads(orjson.dumps(other[name]))
    way = choose.randrange(7)
    if way == 0:
        target[key] = copy
    elif way == 1:
        del target[key]
    elif way == 2 and type(target) is list:
        target.insert(key, copy)
    elif way == 3:
        target[key] = {TAG: choose.choice(KINDS), "v": target[key]}
    elif way == 4:
        target[key] = choose.choice([None, True, -1, 10**6, 2**63, 0.5, "", "x" * 100, [], {}, [[]]])
    elif way == 5 and type(target) is dict:
        target[choose.choice([TAG, *NAMES])] = copy
    elif type(target[key]) is list:
        target[key] = target[key] * 2


@quietly
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_any_mutation(choose: random.Random, count: int) -> None:
    """A real document that was changed at random places: a value, or ValueError."""
    document = orjson.loads(MIXTURE)
    for _ in range(count):
        if places(document):
            mutate(document, choose)
    # What the changes doubled stands in the document, and so do its bounds.
    decodes_or_refuses(orjson.loads(orjson.dumps(document)))


def test_the_mixture_itself() -> None:
    """What is changed there comes back without a change."""
    assert decodes_or_refuses(orjson.loads(MIXTURE))
    found = decode(orjson.loads(MIXTURE))
    assert all(map(same, found[:11], mixture()[:11]))
    assert found[11] == Pair(1, Pair({2}, b"x"))
    assert found[18] == mixture()[18]
