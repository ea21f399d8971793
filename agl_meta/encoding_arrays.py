"""How arrays, tensors and their scalars are written: numpy's, torch's and the standard library's.

Large ones are summarised by shape, dtype and the first elements. Nothing is imported that the value does not
come from, and an overridden method of a subclass is not called.
"""

from __future__ import annotations

import array
import contextlib
import sys
from math import isfinite
from typing import TYPE_CHECKING, Any

from agl_meta.encoding_leaves import ELEMENTS
from agl_meta.encoding_objects import TAG, type_name, unsaved

if TYPE_CHECKING:
    from agl_meta.encoding import Encoder

MAX_ELEMENTS = 10_000
"""Elements of an array or tensor that is saved whole; of a larger one the first :data:`HEAD` are."""
HEAD = 100


def is_large(encoder: Encoder, size: int) -> bool:
    return size > MAX_ELEMENTS and encoder.summarises


def elements(encoder: Encoder, items: list[Any], depth: int) -> list[Any]:
    """The elements of an array; all of them, if they are numbers or text."""
    kinds = set(map(type, items))
    if kinds <= {float} and all(map(isfinite, items)):
        encoder.take(20 * len(items))
        return items
    if kinds <= ELEMENTS.keys():
        encoder.take(sum(20 if type(item) not in (str, bytes) else 8 + 2 * len(item) for item in items))
        return [ELEMENTS[type(item)](item) for item in items]
    return encoder.values(items, depth)


def std_array(encoder: Encoder, value: Any, depth: int) -> Any:
    size = array.array.__len__(value)
    tag: dict[str, Any] = {TAG: "array", "dtype": _typecode(value), "shape": [size]}
    if is_large(encoder, size):
        tag["cut"] = True
        return {**tag, "v": elements(encoder, list(array.array.__getitem__(value, slice(HEAD))), depth)}
    return {**tag, "v": elements(encoder, array.array.tolist(value), depth)}


def _typecode(value: Any) -> str:
    return str(array.array.__dict__["typecode"].__get__(value))


# ------------------------------------------------------------------------------------------- numpy


def numpy_scalar(encoder: Encoder, value: Any, depth: int) -> Any:
    import numpy as np

    plain = np.asarray(value)
    [item] = _numpy_items(plain.reshape(-1), plain.dtype)
    if type(item) is type(value):  # longdouble has no Python counterpart
        item = str(value)
    [held] = elements(encoder, [item], depth)
    return {TAG: "npscalar", "dtype": str(plain.dtype), **_columns(plain.dtype), "v": held}


def numpy_array(encoder: Encoder, value: Any, depth: int) -> Any:
    import numpy as np

    if issubclass(type(value), np.ma.MaskedArray):
        mask = np.ma.getmaskarray(value)  # type: ignore[no-untyped-call]
        data = np.ndarray.view(value, np.ndarray)
        return {TAG: "masked", "v": _array(encoder, data, depth), "mask": _array(encoder, mask, depth)}
    return _array(encoder, np.ndarray.view(value, np.ndarray), depth)


def _array(encoder: Encoder, plain: Any, depth: int) -> Any:
    dtype = plain.dtype
    tag: dict[str, Any] = {TAG: "ndarray", "dtype": dtype.str, "shape": list(plain.shape), **_columns(dtype)}
    if is_large(encoder, plain.size):
        flat = plain.flat[:HEAD]  # copies these only, whatever the strides are
        tag["cut"] = True
    else:
        flat = plain.reshape(-1)
    held = elements(encoder, _numpy_items(flat, dtype), depth)
    if len(held) < len(flat):
        tag["cut"] = True
    return {**tag, "v": held}


def _numpy_items(flat: Any, dtype: Any) -> list[Any]:
    if dtype.kind == "m":
        # As counts of the dtype's unit: numpy doesn't read the texts that it writes.
        counts = flat.astype(dtype.newbyteorder("=")).view("i8").tolist()
        return [None if missing else n for n, missing in zip(counts, flat != flat, strict=True)]
    if dtype.kind == "M" or dtype.char in "gG":
        return list(flat.astype(str).tolist())
    return list(flat.tolist())


def _columns(dtype: Any) -> dict[str, Any]:
    """Names and dtypes of the fields of a structured array."""
    if dtype.names is None:
        return {}
    return {"names": list(dtype.names), "formats": [dtype.fields[name][0].str for name in dtype.names]}


def described(_: Encoder, value: Any, __: int) -> Any:
    """A dtype or device: what describes data, by its name."""
    return unsaved(type(value), "it describes data", name=str(value))


# ------------------------------------------------------------------------------------------- torch


def tensor(encoder: Encoder, value: Any, depth: int) -> Any:
    torch = sys.modules["torch"]
    # The functions of the type itself, not what a subclass makes of them.
    off = getattr(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
    with off(), torch.no_grad():
        try:
            return _dense(encoder, value, depth) if _is_dense(torch, value) else _other(encoder, value, depth)
        except Exception as error:
            # A tensor without data (of the meta device, say) has a shape and a dtype all the same.
            why = f"reading its elements raised {type(error).__name__}"
            fields = {"dtype": str(value.dtype), "shape": tuple(value.shape), "device": str(value.device)}
            held = {name: encoder.value(item, depth + 1) for name, item in fields.items()}
            held["elements"] = unsaved(type(value), why)
            return {TAG: "object", "type": type_name(type(value)), "v": held}


def _is_dense(torch: Any, value: Any) -> bool:
    return value.layout is torch.strided and not value.is_quantized and not value.is_nested


def _dense(encoder: Encoder, value: Any, depth: int) -> Any:
    tag: dict[str, Any] = {TAG: "tensor", "dtype": str(value.dtype), "shape": list(value.shape)}
    plain = value.detach()
    if is_large(encoder, plain.numel()):
        # Goes down to the first rows that hold enough: reshaping would copy all where strides differ.
        while plain.dim() and plain[0].numel() >= HEAD:
            plain = plain[0]
        plain = plain[:HEAD].reshape(-1)[:HEAD]
        tag["cut"] = True
    return {**tag, "v": elements(encoder, plain.reshape(-1).cpu().tolist(), depth)}


_PARTS = (
    # Where a layout lacks one, its method raises.
    ("indices", "_indices"),
    ("values", "_values"),
    ("crow_indices", "crow_indices"),
    ("col_indices", "col_indices"),
    ("ccol_indices", "ccol_indices"),
    ("row_indices", "row_indices"),
    ("values", "values"),
    ("integers", "int_repr"),
    ("scale", "q_scale"),
    ("zero_point", "q_zero_point"),
    ("dense", "dequantize"),
    ("tensors", "unbind"),
)


def _other(encoder: Encoder, value: Any, depth: int) -> Any:
    """A sparse, quantized or nested tensor: as the tensors that it is made of."""
    fields: dict[str, Any] = {"dtype": str(value.dtype), "layout": str(value.layout)}
    if not value.is_nested:
        fields["shape"] = tuple(value.shape)
    for name, method in _PARTS:
        if name in fields or (method in ("dequantize", "unbind") and len(fields) > 3):
            continue
        try:
            fields[name] = getattr(value, method)()
        except Exception:
            continue
    held = {name: encoder.value(item, depth + 1) for name, item in fields.items()}
    return {TAG: "object", "type": type_name(type(value)), "v": held}
