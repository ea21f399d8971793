"""Sample keys: stable over evaluations, runs and processes, and distinct within a pass."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_meta.sample_keys import SampleNamer, content_key

SAMPLE = {"question": "1 + 1?", "meta": {"b": [1, 2.5, None], "a": "x"}}
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def test_upstream_fields_do_not_count() -> None:
    """``data_id`` is new at each evaluation, so the key must not depend on it."""
    for extra in ({"data_id": "x"}, {"index": 3}, {"fake_ids": [1]}):
        assert content_key({**SAMPLE, **extra}) == content_key(SAMPLE)


def test_order_of_fields_does_not_count() -> None:
    """Two mappings with the same content have the same key."""
    assert content_key(dict(reversed(SAMPLE.items()))) == content_key(SAMPLE)


def test_same_key_in_another_process() -> None:
    """Hash randomisation of the interpreter does not reach the key."""
    code = f"from agl_meta.sample_keys import content_key; print(content_key({SAMPLE!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == content_key(SAMPLE)


@given(plain, plain)
def test_content_tells_samples_apart(first: Any, second: Any) -> None:
    """Different content has different keys, and equal content equal ones."""
    same = repr(first) == repr(second)
    if same:
        assert content_key({"x": first}) == content_key({"x": second})
    elif first != second:
        assert content_key({"x": first}) != content_key({"x": second})


@pytest.mark.parametrize("odd", [{1: "a", "1": "b"}, {1, 2}, b"\xff", 2**80, object, "\ud800"])
def test_odd_content_has_a_key(odd: Any) -> None:
    """Content that is no JSON is named too, and the same way twice."""
    assert content_key({"x": odd}) == content_key({"x": odd}) != content_key({"x": None})


def test_equal_samples_are_told_apart() -> None:
    """The second of two equal samples gets an occurrence number, the same in each pass."""
    first, second = SampleNamer(), SampleNamer()
    names = [first.name(SAMPLE) for _ in range(3)]
    assert len(set(names)) == 3
    assert names == [second.name({**SAMPLE, "data_id": str(n)}) for n in range(3)]


def test_a_field_may_name_the_sample() -> None:
    """The user's field is taken as it is; where it repeats, the occurrence is added."""
    namer = SampleNamer("qid")
    assert [namer.name({"qid": q}) for q in ("a", 7, "a")] == ["a", "7", "a#2"]
