"""How the values of pandas are written: as plain columns, and the missing ones told apart."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from agl_meta.encoding_arrays import HEAD, elements, is_large
from agl_meta.encoding_objects import TAG, type_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from agl_meta.encoding import Encoder


def frame(encoder: Encoder, value: Any, depth: int) -> Any:
    """A DataFrame column by column, since each has its own dtype; or a Series as its only column."""
    is_series = value.ndim == 1
    rows, columns = value.shape[0], 1 if is_series else value.shape[1]
    kept_rows, kept_columns = rows, columns
    if is_large(encoder, rows * columns):
        kept_columns = min(columns, HEAD)
        kept_rows = min(rows, max(HEAD // kept_columns, 1))
    data, dtypes = [], []
    for position in range(kept_columns):
        # By position: labels may be equal to each other, and need not be text.
        column = value if is_series else value.iloc[:, position]
        dtypes.append(str(column.dtype))
        data.append(_items(encoder, column.iloc[:kept_rows], depth + 1))
    labels = [value.name] if is_series else value.columns[:kept_columns].tolist()
    tag: dict[str, Any] = {
        TAG: "frame",
        "type": type_name(type(value)),
        "shape": list(value.shape),
        "columns": encoder.values(labels, depth),
        "index": _items(encoder, value.index[:kept_rows], depth + 1),
        "names": encoder.values(list(value.index.names), depth),
        "dtypes": dtypes,
        "v": data,
    }
    if (kept_rows, kept_columns) != (rows, columns) or any(len(column) < kept_rows for column in data):
        tag["cut"] = True
    return tag


def column(encoder: Encoder, value: Any, depth: int) -> Any:
    """An index, or an array of an extension type such as a Categorical."""
    tag: dict[str, Any] = {TAG: "column", "dtype": str(value.dtype), "shape": [len(value)]}
    if is_large(encoder, len(value)):
        value = value[:HEAD]
        tag["cut"] = True
    return {**tag, "v": _items(encoder, value, depth)}


def _items(encoder: Encoder, values: Any, depth: int) -> list[Any]:
    return elements(encoder, list(values.tolist()), depth)


def timestamp(encoder: Encoder, value: Any, depth: int) -> Any:
    held = encoder.value(value.to_pydatetime(warn=False), depth + 1)
    return _with_nanoseconds(value, held, value.nanosecond)


def timedelta(encoder: Encoder, value: Any, depth: int) -> Any:
    return _with_nanoseconds(value, encoder.value(value.to_pytimedelta(), depth + 1), value.nanoseconds)


def _with_nanoseconds(value: Any, held: Any, nanoseconds: int) -> Any:
    tag = {TAG: "subclass", "type": type_name(type(value)), "v": held}
    return {**tag, "fields": {"nanosecond": nanoseconds}} if nanoseconds else tag


def _constant(name: str) -> Callable[[Encoder, Any, int], Any]:
    return lambda _, __, ___: {TAG: "constant", "v": name}


def _attributes(*names: str) -> Callable[[Encoder, Any, int], Any]:
    def handler(encoder: Encoder, value: Any, depth: int) -> Any:
        fields = {name: encoder.value(getattr(value, name), depth + 1) for name in names}
        return {TAG: "object", "type": type_name(type(value)), "v": fields}

    return handler


def handler_of(cls: type) -> Any:
    """The handler of a class of pandas, if it is one."""
    pandas = sys.modules.get("pandas")
    for name, handler in _HANDLERS:
        known = pandas
        for part in name.split("."):
            known = getattr(known, part, None)
        if isinstance(known, type):
            if issubclass(cls, known):
                return handler
        elif known is not None and cls is type(known):
            return handler
    return None


_HANDLERS: list[tuple[str, Any]] = [
    # The missing ones first: NaT is a datetime, too.
    ("NaT", _constant("pandas.NaT")),
    ("NA", _constant("pandas.NA")),
    ("DataFrame", frame),
    ("Series", frame),
    ("Index", column),
    ("api.extensions.ExtensionArray", column),
    ("Timestamp", timestamp),
    ("Timedelta", timedelta),
    ("Interval", _attributes("left", "right", "closed")),
    ("Period", _attributes("ordinal", "freqstr", "start_time")),
]
