"""Values of the packages that agents use: numpy, torch, pandas, Pillow, pydantic, LangChain, OpenAI."""

from __future__ import annotations

import collections
import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import orjson
import pandas as pd
import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Interrupt, Send
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from PIL import Image
from pydantic import v1 as pydantic_v1

import agl_meta
from agl_meta.context import losses, training_context_of
from agl_meta.decoding import (
    SavedArray,
    SavedConstant,
    SavedFrame,
    SavedImage,
    SavedObject,
    Unsaved,
    decode,
)
from agl_meta.encoding import encode
from agl_meta.encoding_arrays import HEAD, MAX_ELEMENTS
from agl_meta.faults import faults
from agl_meta.sample_keys import content_key
from tests.core.rollouts import stamp, v1


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
        np.datetime64("2024-01-01T00:00:00.123456789"),
        np.datetime64(3, "25s"),
        np.timedelta64(5, "D"),
        np.timedelta64(-(2**40), "ns"),
        np.timedelta64(5),
        np.longdouble("1.1"),
        np.clongdouble(1 + 2j),
        np.bytes_(b"x\xff"),
    ],
    ids=lambda value: str(value.dtype),
)
def test_numpy_scalars(value: Any) -> None:
    """A numpy scalar comes back equal; a number keeps its dtype: int64 3 is no "3"."""
    found = back({"x": value})["x"]
    assert found == value
    if value.dtype.kind in "biufcmM":
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
        np.array([1, "NaT", -3], dtype="m8[25s]"),
        np.array(["NaT", "2024"], dtype="M8[ns]"),
        np.array([1.1], dtype=np.longdouble),
        np.array([1.1 + 2j], dtype=np.clongdouble),
        np.arange(3, dtype=">i4"),
        np.arange(10)[::-3],
        np.zeros((0, 3)),
        np.array([(1, 2.5)], dtype=[("i", "i4"), ("f", "f8")]),
        np.array([(1, "2024-01-01")], dtype=[("i", "i4"), ("d", "M8[D]")]),
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
    lists = np.empty(2, dtype=object)
    lists[0], lists[1] = [1], [2]
    assert back(lists).tolist() == [[1], [2]]
    assert back(np.array([(1, 2.5)], dtype=[("i", "i4"), ("f", "f8")])).tolist() == [(1, 2.5)]
    row = back(np.array([(1, 2.5)], dtype=[("i", "i4"), ("f", "f8")])[0])
    assert (row["i"], row["f"]) == (1, 2.5)


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


def test_numpy_not_a_time() -> None:
    """A missing duration or moment stays missing."""
    for value in (np.timedelta64("NaT", "s"), np.datetime64("NaT", "s")):
        found = back(value)
        assert np.isnat(found)
        assert found.dtype == value.dtype


def test_masked_arrays() -> None:
    """The mask is kept, and what is under it."""
    value = np.ma.array([1, 2, 3], mask=[0, 1, 0])
    found = back(value)
    assert found.mask.tolist() == [False, True, False]
    assert found.data.tolist() == [1, 2, 3]
    assert back(np.ma.masked).mask
    large = back(np.ma.zeros(MAX_ELEMENTS + 1))
    assert large.type == "numpy.ma.MaskedArray"
    assert large["mask"].is_cut


class Hostile(np.ndarray):  # type: ignore[type-arg]
    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError

    __getitem__ = reshape = tolist = astype = view = _refuse  # type: ignore[assignment]
    shape = dtype = flat = property(_refuse)  # type: ignore[assignment]


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError


def test_overridden_methods_are_not_called() -> None:
    """Subclasses of arrays and tensors are read past what they override."""
    assert back(np.ones(2).view(Hostile)).tolist() == [1.0, 1.0]
    assert back(torch.ones(2).as_subclass(HostileTensor)).elements == [1.0, 1.0]


def test_the_first_elements_are_the_first() -> None:
    """Of a large array in any memory layout, without a copy of the whole of it."""
    wide = np.broadcast_to(np.arange(10), (10**6, 10**6 // 10, 10))
    assert back(wide).elements == list(range(10)) * 10
    turned = torch.arange(400_000).reshape(2_000, 200).t()
    assert back(turned).elements == turned.reshape(-1)[:HEAD].tolist()
    assert back(torch.ones(1).expand(10**12)).shape == (10**12,)


@settings(deadline=None, max_examples=200)
@given(
    npst.arrays(
        npst.boolean_dtypes()
        | npst.integer_dtypes()
        | npst.unsigned_integer_dtypes()
        | npst.floating_dtypes()
        | npst.complex_number_dtypes()
        | npst.datetime64_dtypes()
        | npst.timedelta64_dtypes(),
        npst.array_shapes(min_dims=0, min_side=0),
    )
)
def test_any_array(value: Any) -> None:
    """Arrays of every number dtype come back, and so do their elements as scalars."""
    found = back(value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(found, value)
    for scalar in value.reshape(-1)[:2]:
        assert back(scalar).dtype == scalar.dtype
        np.testing.assert_array_equal(back(scalar), scalar)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.uint8, torch.uint64, torch.float8_e4m3fn, torch.int8], ids=str
)
def test_more_tensors(dtype: torch.dtype) -> None:
    """Further dtypes of tensors."""
    value = torch.ones(2).to(dtype)
    assert back(value) == SavedArray(str(dtype), (2,), value.tolist())


def test_tensors_that_are_no_plain_arrays() -> None:
    """Sparse and quantized tensors come back as what they are made of, one without data says so."""
    sparse = back(torch.eye(3).to_sparse())
    assert sparse["indices"].elements == [0, 1, 2, 0, 1, 2]
    assert (sparse["shape"], sparse["values"].elements) == ((3, 3), [1.0, 1.0, 1.0])
    rows = back(torch.eye(3).to_sparse_csr())
    assert rows["crow_indices"].elements == [0, 1, 2, 3]
    quantized = back(torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8))
    assert (quantized["integers"].elements, quantized["scale"]) == ([2, 2], 0.5)
    meta = back(torch.empty(10**9, device="meta"))
    assert (meta["shape"], meta["dtype"], meta["device"]) == ((10**9,), "torch.float32", "meta")
    assert isinstance(meta["elements"], Unsaved)


def test_what_describes_data() -> None:
    """Dtypes and devices leave their names."""
    assert [back(value).name for value in (np.dtype("i4"), torch.bfloat16, torch.device("cpu"))] == [
        "int32",
        "torch.bfloat16",
        "cpu",
    ]


# ------------------------------------------------------------------------------------------- pandas


def test_frames() -> None:
    """Values, labels and dtypes of a DataFrame are kept, also where labels are equal or no text."""
    value = pd.DataFrame([[1, "x"], [2, None]], columns=pd.Index(["a", "a"]), index=[(1, 2), "r"])
    value[3] = pd.Categorical(["u", "v"])
    value["t"] = pd.to_datetime(["2024-01-01", None])
    found = back(value)
    assert isinstance(found, SavedFrame)
    assert (found.type, found.shape, found.is_cut) == ("pandas.DataFrame", (2, 4), False)
    assert (found.columns, found.index) == (["a", "a", 3, "t"], [(1, 2), "r"])
    assert found.data[0] == [1, 2]
    assert found.data[1][0] == "x"
    assert found.data[2] == ["u", "v"]
    assert found.data[3] == [pd.Timestamp("2024-01-01").to_pydatetime(), SavedConstant("pandas.NaT")]
    assert found.dtypes[2] == "category"


def test_series_and_indexes() -> None:
    """A Series keeps name and index, an index its labels."""
    levels = pd.MultiIndex.from_tuples([(1, "a"), (2, "b")], names=["n", None])
    found = back(pd.Series([1.5, float("nan")], name="s", index=levels))
    assert (found.columns, found.index, found.names) == (["s"], [(1, "a"), (2, "b")], ["n", None])
    assert found.data[0][0] == 1.5
    assert math.isnan(found.data[0][1])
    assert back(levels).elements == [(1, "a"), (2, "b")]
    assert back(pd.array([1, None], dtype="Int64")).elements == [1, SavedConstant("pandas.NA")]
    assert back(pd.Categorical(["b", "a", "b"])).elements == ["b", "a", "b"]


@pytest.mark.parametrize("shape", [(MAX_ELEMENTS + 1, 1), (1, MAX_ELEMENTS + 1), (5_000, 20)])
def test_large_frames_are_summarised(shape: tuple[int, int]) -> None:
    """A large frame keeps its shape and its first rows and columns."""
    found = back(pd.DataFrame(np.arange(shape[0] * shape[1]).reshape(shape)))
    assert found.is_cut
    assert found.shape == shape
    assert found.data[0][0] == 0
    assert len(found.columns) == len(found.data) == len(found.dtypes)
    assert {len(column) for column in found.data} == {len(found.index)}
    assert len(found.data) * len(found.index) == HEAD
    series = back(pd.Series(range(MAX_ELEMENTS + 1)))
    assert (series.shape, series.is_cut, series.data) == ((MAX_ELEMENTS + 1,), True, [list(range(HEAD))])


def test_pandas_scalars() -> None:
    """Timestamps and durations to the nanosecond, and the missing ones apart from nan and null."""
    zoned = pd.Timestamp("2024-07-27 02:30", tz="Europe/Berlin")
    assert back(zoned) == zoned
    assert back(pd.Timestamp("2024-01-01T00:00:00.123456789"))["nanosecond"] == 789
    assert back(pd.Timedelta("1d")) == pd.Timedelta("1d")
    assert back(pd.Timedelta("1d 5ns"))["nanosecond"] == 5
    missing = back([pd.NaT, pd.NA, None, float("nan")])
    assert missing[:3] == [SavedConstant("pandas.NaT"), SavedConstant("pandas.NA"), None]
    assert math.isnan(missing[3])
    assert back(pd.Interval(1, 2)) == {"left": 1, "right": 2, "closed": "right"}
    assert back(pd.Period("2024-01", "M"))["freqstr"] == "M"


# ------------------------------------------------------------------------------------------- images


def in_rollout(root: Path) -> Any:
    return training_context_of(v1(stamp(1, output_dir=str(root)), "ro-1"))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F", "CMYK"])
def test_images_become_files(tmp_path: Path, mode: str) -> None:
    """An image lies in the rollout's own folder, pixel by pixel, and the record says where."""
    image = Image.new(mode, (3, 2))
    image.putpixel(
        (1, 1), Image.new(mode, (1, 1), "white" if mode in ("RGB", "RGBA") else 1).getpixel((0, 0))
    )
    with in_rollout(tmp_path):
        path = agl_meta.save_prediction({"before": [image], "again": image})
    assert path is not None
    (found,) = agl_meta.read_predictions(tmp_path, strict=True)
    saved = found.value["again"]
    assert found.value == {"before": [saved], "again": saved}
    assert (saved.mode, saved.size) == (mode, (3, 2))
    assert saved.path.startswith("files/ro-1/image-")
    with Image.open(path.parent.parent / saved.path) as read:
        assert (read.mode, read.size) == (mode, (3, 2))
        assert read.tobytes() == image.tobytes()
    assert len(list((path.parent.parent / "files/ro-1").iterdir())) == 1


def test_images_without_a_folder(tmp_path: Path) -> None:
    """Where there is no folder, size and mode are kept, and whether two images were the same."""
    first, second = Image.new("RGB", (3, 2)), Image.new("RGB", (3, 2), "red")
    found = back([first, second, first.copy()])
    assert (found[0].mode, found[0].size, found[0].path) == ("RGB", (3, 2), None)
    assert found[0] == found[2] != found[1]
    assert content_key({"image": first}) != content_key({"image": second})


def test_images_that_cannot_be_written(tmp_path: Path) -> None:
    """A record is written whatever becomes of its image, and the rollout's loss is counted."""
    (tmp_path / "global_step_1/val").mkdir(parents=True)
    (tmp_path / "global_step_1/val/files").write_text("a file in the way")
    with in_rollout(tmp_path):
        assert agl_meta.save_prediction([Image.new("L", (3, 2)), 5]) is not None
        assert losses() == {"saving an image: Not a directory": 1}
    (found,) = agl_meta.read_predictions(tmp_path, strict=True)
    assert isinstance(found.value[0], SavedImage)
    assert (found.value[0].path, found.value[1]) == (None, 5)
    assert "saving an image: Not a directory" in faults.counts()


def test_images_of_other_modes_and_from_files(tmp_path: Path) -> None:
    """A mode that no format of these holds says so; an opened file is read; a closed one is marked."""
    with in_rollout(tmp_path):
        agl_meta.save_prediction(Image.new("HSV", (3, 2)))
    (found,) = agl_meta.read_predictions(tmp_path, strict=True)
    assert found.value.path is None
    assert "raised" in found.value.why
    content = io.BytesIO()
    Image.new("L", (3, 2), 7).save(content, "PNG")
    assert back(Image.open(content)).size == (3, 2)
    closed = Image.open(content)
    closed.fp.close()
    assert isinstance(back(closed), Unsaved)


# ------------------------------------------------------------------------------------------- models


class Careful(pydantic.BaseModel):
    """Has all that a model may have besides fields."""

    a: int = 1
    token: pydantic.SecretStr = pydantic.SecretStr("hush")
    url: pydantic.AnyUrl = pydantic.AnyUrl("http://a/b")
    _private: list[int] = pydantic.PrivateAttr(default_factory=lambda: [2])

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def computed(self) -> int:
        raise RuntimeError

    def __repr__(self) -> str:  # for hypothesis, since pydantic's own runs it
        return "Careful()"


def test_pydantic_beside_fields() -> None:
    """Private attributes are kept, computed fields not run, secrets not written."""
    content = encode(Careful())
    assert b"hush" not in content
    found = decode(orjson.loads(content))
    assert isinstance(found.pop("token"), Unsaved)
    assert found == {"a": 1, "url": "http://a/b", "_private": [2]}


def test_pydantic_errors() -> None:
    """A validation error keeps what it found."""
    with pytest.raises(pydantic.ValidationError) as caught:
        Careful(a="x")
    found = back(caught.value)
    assert found["title"] == "Careful"
    assert (found["errors"][0]["loc"], found["errors"][0]["type"]) == (("a",), "int_parsing")


def _answer(_: Any) -> Any:
    return {"messages": [AIMessage("yes")]}


def test_langgraph() -> None:
    """A state, interrupts and commands come back with what they hold; the graph itself is no data."""
    builder = StateGraph(MessagesState)
    builder.add_node("answer", _answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    graph = builder.compile()
    question: AnyMessage = HumanMessage("well?")
    found = back(graph.invoke({"messages": [question]}))
    assert [message["content"] for message in found["messages"]] == ["well?", "yes"]
    assert back(Interrupt(value={"q": (1,)}, id="i"))["value"] == {"q": (1,)}
    command = back(Command(update={"a": 1}, goto=[Send("n", {"x": 1})]))
    assert (command["update"], command["goto"][0]["node"]) == ({"a": 1}, "n")
    assert isinstance(back(graph), Unsaved)


def test_openai() -> None:
    """Responses keep all that the server sent, also what this client does not know; a client is no data."""
    message = {"role": "assistant", "content": "hi", "reasoning_content": "because"}
    completion = ChatCompletion.construct(
        id="c", model="m", choices=[{"index": 0, "finish_reason": "stop", "message": message}], extra=[1]
    )
    found = back(completion)
    assert found["extra"] == [1]
    assert found["choices"][0]["message"]["reasoning_content"] == "because"
    text = {"type": "output_text", "text": "hi", "annotations": []}
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    response = back(Response.construct(id="r", model="m", output=[item]))
    assert response["output"][0]["content"][0]["text"] == "hi"
    client = openai.OpenAI(api_key="hush")
    content = encode(client)
    assert b"hush" not in content
    assert isinstance(decode(orjson.loads(content)), Unsaved)


def test_state_that_is_hidden_is_marked() -> None:
    """An object whose state is C's own is no empty one."""
    assert isinstance(back(torch.ones(2).untyped_storage()), Unsaved)


def test_nothing_is_imported() -> None:
    """None of these packages is loaded for a value that isn't theirs."""
    code = (
        "import sys; from agl_meta.encoding import encode; from types import SimpleNamespace;"
        "encode((SimpleNamespace(a=1), object(), 1j));"
        "print([m for m in ('numpy', 'torch', 'pandas', 'PIL', 'pydantic', 'langgraph') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("as_scalar", [False, True])
def test_cut_structures_can_be_read(as_scalar: bool) -> None:
    """Wherever a record ends within a structured array, what was kept comes back."""
    value = np.array([(1, 2.5), (3, 4.5)], dtype=[("i", "i4"), ("f", "f8")])
    for limit in range(1, 100):
        back_again = encode(value[0] if as_scalar else value, max_record_bytes=limit)
        assert decode(orjson.loads(back_again)) is not None


things = st.sampled_from(
    [
        np.float32(1.5),
        np.timedelta64(1, "s"),
        np.ma.array([1, 2], mask=[0, 1]),
        np.array([(1, 2.5), (3, 4.5)], dtype=[("i", "i4"), ("f", "f8")]),
        np.array([(1, 2.5)], dtype=[("i", "i4"), ("f", "f8")])[0],
        np.array([[1], None], dtype=object),
        torch.ones(2, 2),
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        pd.DataFrame({"a": [1, None]}),
        pd.Series([pd.NaT]),
        pd.NA,
        Image.new("RGB", (1, 1)),
        Careful(),
        HumanMessage("hi"),
        Interrupt(value=1, id="i"),
    ]
)


@settings(deadline=None)
@given(
    st.recursive(
        things | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.lists(inner).map(collections.deque)
            | st.dictionaries(st.text() | st.tuples(st.integers()), inner)
            | st.builds(lambda item: Derived(a=1, b=item), inner)
        ),
        max_leaves=20,
    ),
    st.sampled_from([None, 20, 500]),
)
def test_any_mixture_gives_a_document(value: Any, record: int | None) -> None:
    """Nested in each other and cut anywhere, they give one line of JSON that is read, the same each time."""
    content = encode(value, max_record_bytes=record)
    assert b"\n" not in content
    assert content == encode(value, max_record_bytes=record)
    decode(orjson.loads(content))
