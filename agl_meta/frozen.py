"""Making many instances of a frozen attrs class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs

T = TypeVar("T")


def maker(cls: type[T]) -> Callable[..., T]:
    """A function that makes instances from the values of all fields, in order, a fifth as long as ``cls``.

    attrs sets each field of a frozen class with a call of ``object.__setattr__``. This makes an instance of a
    class with the same fields that is not frozen, and then gives it to ``cls``, which Python allows between
    classes of one layout (with ``weakref_slot=False``). Neither defaults, converters nor validators of
    ``cls`` are used.
    """
    names = [field.name for field in attrs.fields(cls)]  # type: ignore[arg-type]
    twin: Any = attrs.make_class(cls.__name__, names, slots=True, weakref_slot=False)

    def make(*values: object) -> Any:
        made = twin(*values)
        made.__class__ = cls
        return made

    return make
