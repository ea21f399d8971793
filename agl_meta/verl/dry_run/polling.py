"""Shorter pauses for dry runs: upstream looks at its queues every 5 s, which would dominate."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any

from agl_meta.forks import PerProcess

_WAITS = "_async_run_until_finished"
_LIMITED = "_agl_meta_limited"

_replacing = PerProcess(threading.Lock)


class _ImpatientAsyncio:
    """Stands for the name ``asyncio`` in the module of a daemon: sleeps no longer than a limit."""

    def __init__(self, behind: Any, limit: float) -> None:
        self.behind = behind
        self._limit = limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)

    def sleep(self, delay: float, *args: Any, **kwargs: Any) -> Any:
        return self.behind.sleep(min(delay, self._limit), *args, **kwargs)


@contextlib.contextmanager
def fast_polling(daemon: Any, seconds: float = 0.05) -> Iterator[None]:
    """Limit the pause of a daemon's ``_async_run_until_finished`` while it waits.

    The pause is a literal in upstream's method, so the name that it is reached by is replaced, in
    the modules that define the method for this daemon (a user's copy, perhaps), and put back
    afterwards. Uses may nest or overlap. A daemon that reaches ``sleep`` in another way keeps its
    own pause.
    """
    replaced = []
    with _replacing.value:
        for names in _namespaces(type(daemon)):
            names["asyncio"] = shim = _ImpatientAsyncio(names["asyncio"], seconds)
            replaced.append((names, shim))
    try:
        yield
    finally:
        with _replacing.value:
            for names, shim in replaced:
                _take_out(names, shim)


def _namespaces(cls: type) -> list[dict[str, Any]]:
    """The globals of every definition of the method: an override may call the overridden one."""
    methods = [vars(base)[_WAITS] for base in cls.__mro__ if _WAITS in vars(base)]
    found = {
        id(names): names
        for method in methods
        if "asyncio" in (names := getattr(inspect.unwrap(method), "__globals__", {}))
    }
    return list(found.values())


def _take_out(names: dict[str, Any], shim: _ImpatientAsyncio) -> None:
    """Remove a shim, which a later use that has not ended yet may stand in front of."""
    if names["asyncio"] is shim:
        names["asyncio"] = shim.behind
        return
    front = names["asyncio"]
    while isinstance(front, _ImpatientAsyncio):
        if front.behind is shim:
            front.behind = shim.behind
            return
        front = front.behind


def make_runners_poll_fast(seconds: float = 0.1) -> None:
    """Limit the pauses of all v1 runners of this process and of those forked from it.

    ``agl.Trainer`` makes its runner, with a pause of 5 s, before the algorithm can say anything,
    and forks it before the algorithm runs: the class is the one place left. Repeating the call
    changes nothing more; :func:`restore_runner_polling` takes it back.
    """
    from agentlightning.runner import LitAgentRunner

    original = LitAgentRunner._sleep_until_next_poll
    if hasattr(original, _LIMITED):
        return

    @functools.wraps(original)
    async def sleep_until_next_poll(self: Any, *args: Any, **kwargs: Any) -> None:
        self._poll_interval = min(self._poll_interval, seconds)
        # Upstream's jitter of 0.5 s would be most of a pause of 0.1 s.
        self._interval_jitter = min(self._interval_jitter, seconds / 2)
        await original(self, *args, **kwargs)

    setattr(sleep_until_next_poll, _LIMITED, seconds)
    LitAgentRunner._sleep_until_next_poll = sleep_until_next_poll


def restore_runner_polling() -> None:
    """Take :func:`make_runners_poll_fast` back; runners that have paused already stay fast."""
    from agentlightning.runner import LitAgentRunner

    current = LitAgentRunner._sleep_until_next_poll
    if hasattr(current, _LIMITED):
        LitAgentRunner._sleep_until_next_poll = current.__wrapped__
