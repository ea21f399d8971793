"""Values of the packages that agents use: numpy, torch, pydantic, LangChain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import pydantic
import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import v1 as pydantic_v1

from agl_meta.decoding import SavedArray, SavedObject, decode
from agl_meta.encoding import encode
from agl_meta.encoding_arrays import HEAD, MAX_ELEMENTS


def back(value: Any) -> Any:
    return decode(orjson.loads(encode(value)))


@pytest.mark.parametrize(
    "value",
    [
        np.bool_(True),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.float16(0.1),
        np.float32(0.1),
        np.float64(0.1),
        np.float32("inf"),
        np.complex64(1 + 2j),
        np.str_("x"),
        np.datetime64("2024-01-01T00:00:00", "s"),
    ],
    ids=lambda value: str(value.dtype),
)
def test_numpy_scalars(value: Any) -> None:
    """A numpy scalar comes back equal; a number keeps its dtype: int64 3 is no "3"."""
    found = back({"x": value})["x"]
    assert found == value
    if value.dtype.kind in "biufc":
        assert found.dtype == value.dtype


def test_numpy_nan() -> None:
    """nan of any width stays nan."""
    assert math.isnan(back(np.float16("nan")))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array([0.1, np.nan, -np.inf], dtype=np.float32),
        np.array([], dtype=np.float64),
        np.array(3),
        np.array([True, False]),
        np.array(["a", "bcd"]),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.array([1 + 2j]),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}",
)
def test_numpy_arrays(value: Any) -> None:
    """An array comes back with its shape and dtype."""
    found = back(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    np.testing.assert_array_equal(found, value)


def test_object_and_structured_arrays() -> None:
    """What such arrays hold is kept."""
    found = back(np.array([{"a": 1}, None, (2,)], dtype=object))
    assert found.tolist() == [{"a": 1}, None, (2,)]
    assert back(np.array([(1, 2.5)], dtype=[("i", "i4"), ("f", "f8")])).tolist() == [(1, 2.5)]


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_large_arrays_are_summarised(make: Any) -> None:
    """A large array keeps shape, dtype and its first elements, and says that it was cut."""
    found = back(make((MAX_ELEMENTS + 1, 2)))
    assert isinstance(found, SavedArray)
    assert found.shape == (MAX_ELEMENTS + 1, 2)
    assert len(found.elements) == HEAD
    assert found.is_cut


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool],
    ids=str,
)
def test_tensors(dtype: torch.dtype) -> None:
    """A tensor keeps its dtype, shape and elements, whether it needs a gradient or not."""
    value = torch.tensor([[0.5, 1.0]], dtype=dtype)
    if dtype.is_floating_point:
        value.requires_grad_()
    found = back(value)
    assert found == SavedArray(str(dtype), (1, 2), value.detach().reshape(-1).tolist())
    assert back(value.detach().sum()).shape == ()


class Base(pydantic.BaseModel):
    a: int


class Derived(Base):
    model_config = pydantic.ConfigDict(extra="allow")
    b: Any = None


class Holder(pydantic.BaseModel):
    item: Base


class OldModel(pydantic_v1.BaseModel):
    a: int
    b: Any = None


def test_pydantic_2() -> None:
    """A model in a field declared as its base keeps its own and its extra fields."""
    found = back(Holder(item=Derived(a=1, b=(2,), more="x")))
    assert found == {"item": {"a": 1, "b": (2,), "more": "x"}}
    assert found["item"].type.endswith("Derived")


def test_pydantic_1() -> None:
    """A model of pydantic 1 comes back as its fields."""
    found = back(OldModel(a=1, b=b"x"))
    assert found == {"a": 1, "b": b"x"}
    assert isinstance(found, SavedObject)


def test_langchain_messages() -> None:
    """A conversation keeps types, content, tool calls and ids."""
    call = {"name": "sql", "args": {"q": "select 1"}, "id": "c1", "type": "tool_call"}
    messages = [
        HumanMessage("hi"),
        AIMessage(content="", tool_calls=[call], usage_metadata=None),
        ToolMessage(content="1", tool_call_id="c1"),
    ]
    found = back({"messages": messages})["messages"]
    assert [message.type.rpartition(".")[2] for message in found] == [
        "HumanMessage",
        "AIMessage",
        "ToolMessage",
    ]
    assert found[0]["content"] == "hi"
    assert found[1]["tool_calls"] == [call]
    assert found[2]["tool_call_id"] == "c1"


def test_classes_that_claim_to_be_theirs() -> None:
    """What a class calls its module makes it no tensor."""
    fake = type("Tensor", (), {"__module__": "torch"})()
    fake.x = 1
    assert back(fake) == {"x": 1}
