"""Shorter pauses for dry runs: upstream looks at its queues every 5 s, which would dominate."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from typing import Any


class _ImpatientAsyncio:
    """Stands for the name ``asyncio`` in the module of a daemon: sleeps no longer than a limit."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def sleep(self, delay: float, *args: Any) -> Any:
        return asyncio.sleep(min(delay, self._limit), *args)


@contextlib.contextmanager
def fast_polling(daemon: Any, seconds: float = 0.05) -> Iterator[None]:
    """Limit the pause of a daemon's ``_async_run_until_finished`` while it waits.

    The pause is a literal in upstream's method, so the name that it is reached by is replaced, in the
    module that defines the method (a user's copy, perhaps), and put back afterwards.
    """
    names = type(daemon)._async_run_until_finished.__globals__
    found = names["asyncio"]
    names["asyncio"] = _ImpatientAsyncio(seconds)
    try:
        yield
    finally:
        names["asyncio"] = found


def make_runners_poll_fast(seconds: float = 0.1) -> None:
    """Limit the pauses of all v1 runners of this process and of those forked from it.

    ``agl.Trainer`` makes its runner, with a pause of 5 s, before the algorithm can say anything, and
    forks it before the algorithm runs: the class is the one place left. Repeating the call changes
    nothing more.
    """
    from agentlightning.runner import LitAgentRunner

    original = LitAgentRunner._sleep_until_next_poll
    if hasattr(original, "_agl_meta_limit"):
        return

    @functools.wraps(original)
    async def sleep_until_next_poll(self: Any, *args: Any, **kwargs: Any) -> None:
        self._poll_interval = min(self._poll_interval, seconds)
        self._interval_jitter = min(self._interval_jitter, seconds / 2)
        await original(self, *args, **kwargs)

    sleep_until_next_poll._agl_meta_limit = seconds  # type: ignore[attr-defined]
    LitAgentRunner._sleep_until_next_poll = sleep_until_next_poll
