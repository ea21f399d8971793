"""How arrays, tensors and their scalars are restored; the counterpart of :mod:`agl_meta.encoding_arrays`."""

from __future__ import annotations

import array
import datetime
import math
import re
from typing import Any

from agl_meta.decoding_tags import Tag
from agl_meta.decoding_values import SavedArray, SavedObject

# A dtype from a file may name a size of its own; these can't.
_NUMBER_DTYPE = re.compile(
    r"[<>|=]?[biufc](1|2|4|8|16|32)|[<>]?[mM]8(\[(?!0)\w{1,6}\])?|bool|u?int(8|16|32|64)"
    r"|float(16|32|64|128)|complex(64|128|256)|(datetime|timedelta)64(\[(?!0)\w{1,6}\])?",
    re.ASCII,
)
# As a number's text (of a long double), or of a moment; None is a missing duration.
_NUMBERS = frozenset({bool, int, float, complex, str, type(None)})
# In a row of a structured array moments stand as what Python has for them.
_IN_ROWS = _NUMBERS | {datetime.date, datetime.datetime, datetime.timedelta}

# numpy gives each text the room of the longest: of characters, so many for each that there is.
_MAX_PADDING = 16
_FREE_PADDING = 2**14


def tensor(tag: Tag) -> SavedArray:
    return SavedArray(tag.text("dtype"), tag.shape(), tag.items(), tag.is_set("cut"))


def std_array(tag: Tag) -> Any:
    dtype = tag.text("dtype")
    if tag.is_set("cut") or dtype not in set(array.typecodes):
        return tensor(tag)
    return array.array(dtype, tag.items())


def numpy_scalar(tag: Tag) -> Any:
    numpy, held, dtype = _numpy(), tag.values["v"], tag.text("dtype")
    if numpy is None:
        return held
    structure = _structure(tag)
    if structure is not None:
        try:
            return _structured(numpy, [held], structure)[0]
        except (TypeError, ValueError):
            return held  # part of it was cut
    if not _NUMBER_DTYPE.fullmatch(dtype):
        return held
    # Of a datetime the type alone has no unit.
    return _numbers(numpy, [held], dtype)[0]


def numpy_array(tag: Tag) -> Any:
    numpy, dtype, shape, held = _numpy(), tag.text("dtype"), tag.shape(), tag.items()
    as_it_was = SavedArray(dtype, shape, held, tag.is_set("cut"))
    if numpy is None or as_it_was.is_cut:
        return as_it_was
    if math.prod(shape) != len(held):
        raise ValueError(f"an array of shape {shape} has not {len(held)} elements")
    structure = _structure(tag)
    if structure is not None:
        try:
            return _structured(numpy, held, structure).reshape(shape)
        except (TypeError, ValueError):  # one of them was cut
            return SavedArray(dtype, shape, held, True)
    if _NUMBER_DTYPE.fullmatch(dtype):
        return _numbers(numpy, held, dtype).reshape(shape)
    if dtype[1:2] in ("U", "S"):
        return _texts(numpy, held, dtype, shape) if _is_level(held, dtype) else as_it_was
    depth = tag.bounds.depth(held)
    if depth is None:
        return as_it_was
    found = numpy.empty(len(held), dtype=object)
    # One by one: lists of equal length would be taken for a second dimension.
    for index, item in enumerate(held):
        found[index] = item
    found = found.reshape(shape)
    tag.bounds.note_depth(found, depth)
    return found


def masked(tag: Tag) -> Any:
    numpy, data, mask = _numpy(), tag.values["v"], tag.values["mask"]
    if isinstance(data, SavedArray) or isinstance(mask, SavedArray):
        return SavedObject("numpy.ma.MaskedArray", {"data": data, "mask": mask})
    # Of a mask of another shape numpy makes one that fits.
    if not isinstance(data, numpy.ndarray) or not isinstance(mask, numpy.ndarray) or data.shape != mask.shape:
        raise TypeError("v and mask are no arrays of one shape")
    return numpy.ma.MaskedArray(data, mask)


def _numbers(numpy: Any, held: list[Any], dtype: str) -> Any:
    if not _NUMBERS.issuperset(map(type, held)):
        raise TypeError(f"an element of {dtype} is no number")
    if numpy.dtype(dtype).kind == "m":
        held = ["NaT" if item is None else item for item in held]
    return numpy.array(held, dtype=dtype)


def _structure(tag: Tag) -> list[tuple[str, str]] | None:
    """The dtype of a structured array, if numbers are all it holds."""
    if not tag.has("names"):
        return None
    names, formats = tag.texts("names"), tag.texts("formats")
    if not names or not all(_NUMBER_DTYPE.fullmatch(each) for each in formats):
        return None
    return list(zip(names, formats, strict=True))


def _structured(numpy: Any, held: list[Any], structure: list[tuple[str, str]]) -> Any:
    for row in held:
        # A number alone would become all fields of its row.
        if type(row) is not tuple or len(row) != len(structure) or not _IN_ROWS.issuperset(map(type, row)):
            raise TypeError("an element is no row of numbers")
    return numpy.array(held, dtype=structure)


def _is_level(held: list[Any], dtype: str) -> bool:
    """Whether the longest text is not so much longer than the others that padding would multiply them."""
    kind = str if dtype[1] == "U" else bytes
    if not {kind}.issuperset(map(type, held)):
        raise TypeError(f"an element of {dtype} is no {kind.__name__}")
    padded = len(held) * max(map(len, held), default=0)
    return padded <= max(_FREE_PADDING, _MAX_PADDING * (len(held) + sum(map(len, held))))


def _texts(numpy: Any, held: list[Any], dtype: str, shape: tuple[int, ...]) -> Any:
    found = numpy.array(held) if held else numpy.array([], dtype[:2])
    return found.reshape(shape)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
