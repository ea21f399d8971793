"""How dates, times and zones are written: the wall clock, the offset, and the zone's name if it has one."""

from __future__ import annotations

import datetime
import zoneinfo
from typing import TYPE_CHECKING, Any

from agl_meta.encoding_leaves import text
from agl_meta.encoding_objects import TAG, instance_dict, type_name

if TYPE_CHECKING:
    from agl_meta.encoding import Encoder

_KEY = zoneinfo.ZoneInfo.__dict__["key"]


def moment(_: Encoder, value: Any, __: int) -> Any:
    """A datetime or time, subclasses too, without the methods of those."""
    base: Any = datetime.datetime if issubclass(type(value), datetime.datetime) else datetime.time
    zone = base.__dict__["tzinfo"].__get__(value)
    tag: dict[str, Any] = {TAG: base.__name__}
    try:
        # The one place that runs a value's own code: only its tzinfo can tell the offset.
        tag["v"] = base.isoformat(value)
    except Exception as error:
        tag["v"] = base.isoformat(base.replace(_plain(base, value), tzinfo=None))
        tag["lost"] = f"its {type_name(type(zone))} raised {type(error).__name__}"
    name = _zone_name(zone)
    if name is not None:
        tag["zone"] = name
    if base.__dict__["fold"].__get__(value):
        tag["fold"] = 1
    return tag


def _plain(base: Any, value: Any) -> Any:
    """The value as its builtin type, with no zone."""
    names = ["hour", "minute", "second", "microsecond"]
    names = ["year", "month", "day", *names] if base is datetime.datetime else names
    # A datetime's date lies in the class above it.
    read = {**datetime.date.__dict__, **base.__dict__}
    return base(*(read[name].__get__(value) for name in names))


def _zone_name(zone: Any) -> str | None:
    name: Any = None
    if type(zone) is zoneinfo.ZoneInfo:
        name = _KEY.__get__(zone)
    elif zone is not None and type_name(type(zone)).startswith("pytz"):
        # pytz makes a class of each zone.
        name = instance_dict(zone).get("zone") or getattr(type(zone), "zone", None)
    return name if type(name) is str else None


def date(_: Encoder, value: datetime.date, __: int) -> Any:
    return {TAG: "date", "v": datetime.date.isoformat(value)}


def timedelta(_: Encoder, value: datetime.timedelta, __: int) -> Any:
    names = ("days", "seconds", "microseconds")
    return {TAG: "timedelta", "v": [datetime.timedelta.__dict__[name].__get__(value) for name in names]}


def timezone(encoder: Encoder, value: datetime.timezone, depth: int) -> Any:
    offset = value.utcoffset(None)
    return {TAG: "timezone", "v": timedelta(encoder, offset, depth)["v"], "name": text(value.tzname(None))}


def zone(_: Encoder, value: zoneinfo.ZoneInfo, __: int) -> Any:
    key = _KEY.__get__(value)  # none, if it was read from a file
    return {TAG: "zone", "v": text(key) if type(key) is str else None}
