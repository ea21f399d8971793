"""What a forked child must not take over from its parent: locks that may be held, files that are open."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_all: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()


class PerProcess(Generic[T]):
    """A value that each process makes for itself: a forked child starts with a new one.

    So is every lock of this library made, and used as ``with lock.value:``. The thread that held the lock
    while the parent forked does not exist in the child, and would never release it there.
    """

    __slots__ = ("__weakref__", "_make", "value")

    value: T
    """The value of this process."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Make the value anew, as in a forked child."""
        # A new lock, not a released one: a fork from inside the ``with`` block (a signal handler, a
        # finalizer) releases in the child the one that it took.
        self.value = self._make()


def _renew_all() -> None:
    for each in _all:
        each.renew()


os.register_at_fork(after_in_child=_renew_all)
