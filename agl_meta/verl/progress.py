"""A bar while a pass waits for its rollouts, and a warning when nobody works on them."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from agl_meta.faults import faults
from agl_meta.verl.queues import Counts, Queue, queue_of

logger = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""How long nothing may be claimed, run or finished before it is a warning."""
TICK_SECONDS = 1.0
"""Pause between two looks at the daemon."""
REFRESH_SECONDS = 5.0
"""How often the bar is drawn when nothing changed, for its clock; in a Ray actor each costs a log line."""
_JOIN_SECONDS = 2.0


def stderr_is_terminal() -> bool:
    """Whether somebody may be watching: decided in the driver, an actor's stderr is a file."""
    try:
        return sys.stderr.isatty()
    except Exception:  # None, closed, or somebody's own
        return False


@contextlib.contextmanager
def watching(daemon: Any, label: str, progress: bool | None) -> Iterator[None]:
    """Watch a daemon from a thread while the caller waits for it; no error of it reaches the caller.

    Args:
        daemon: an ``AgentModeDaemon`` or a copy; what it lacks is left out.
        label: name of the pass, such as ``val step 40``.
        progress: whether to draw a bar; ``None``: if this process's stderr is a terminal.
    """
    watch: _Watch | None = None
    try:
        try:
            watch = _Watch(daemon, label, stderr_is_terminal() if progress is None else progress)
            watch.start()
        except Exception as error:
            faults.record("watching a pass", error)
        yield
    finally:
        if watch is not None:
            watch.stop()


class _Watch:
    """The thread, and what it remembers between two looks."""

    def __init__(self, daemon: Any, label: str, shown: bool) -> None:
        self._queue: Queue = queue_of(daemon)
        self._label = label
        self._bar = _Bar(label) if shown else None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"agl_meta {label}", daemon=True)
        self._last: Counts | None = None
        self._progress_at = time.monotonic()
        self._warned = False

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        try:
            # Limited: a terminal that was paused with Ctrl-S blocks whoever writes to it.
            if self._thread.ident is not None:
                self._thread.join(_JOIN_SECONDS)
        except Exception as error:
            faults.record("watching a pass", error)

    def _run(self) -> None:
        while not self._stopped.wait(TICK_SECONDS):
            self._guarded(self._look)
        self._guarded(self._finish)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            faults.record("watching a pass", error)

    def _look(self) -> None:
        counts = self._queue.look()
        self._warn_if_stalled(counts)
        if self._bar is not None:
            self._bar.draw(counts)

    def _finish(self) -> None:
        self._queue.close()
        # A pass that was over before the first look needs no bar.
        if self._bar is not None and self._last is not None:
            self._bar.draw(self._queue.look(), last=True)

    def _warn_if_stalled(self, counts: Counts) -> None:
        now = time.monotonic()
        last, self._last = self._last, counts
        moved = last is not None and (counts.completed, counts.failed) != (last.completed, last.failed)
        if last is None or moved or counts.running:
            self._progress_at = now
            self._warned = False
            return
        if self._warned or now - self._progress_at < STALL_SECONDS:
            return
        found = self._queue.why_stalled()
        if found is None:
            return
        if found.running or not found.queued:
            # The queue itself knows better than the quick look.
            self._progress_at = now
            return
        self._warned = True
        waited = now - self._progress_at
        logger.warning(
            "%s waits: %d of its %s rollouts are queued, none is running, and none was claimed or "
            "finished since %s (%.0f s ago). %s",
            self._label,
            # A store that outlives a run may hold others' as well.
            found.queued if counts.total is None else min(found.queued, counts.total),
            "?" if counts.total is None else counts.total,
            time.strftime("%H:%M:%S", time.localtime(time.time() - waited)),
            waited,
            found.cause,
        )


class _Bar:
    """One bar of tqdm's, drawn by Ray's driver if this is an actor; made when first drawn."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Any = None
        self._drawn: Counts | None = None
        self._drawn_at = 0.0

    def draw(self, counts: Counts, *, last: bool = False) -> None:
        now = time.monotonic()
        if not last and counts == self._drawn and now - self._drawn_at < REFRESH_SECONDS:
            return
        if self._bar is None:
            self._bar = _make_bar(self._describe(counts), counts.total)
        self._drawn, self._drawn_at = counts, now
        # Ray's tqdm has no postfix, so the counts stand in the description; setting it draws the bar.
        self._bar.n = counts.completed or 0
        self._bar.set_description(self._describe(counts))
        if last:
            self._bar.close()

    def _describe(self, counts: Counts) -> str:
        parts = {"failed": counts.failed, "running": counts.running, "queued": counts.queued}
        text = ", ".join(f"{number} {name}" for name, number in parts.items() if number is not None)
        return f"{self._label} ({text})" if text else self._label


def _make_bar(description: str, total: int | None) -> Any:
    if _is_ray_actor():
        from ray.experimental import tqdm_ray

        return tqdm_ray.tqdm(desc=description, total=total, unit="rollout", flush_interval_s=0.0)
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc,type-arg]
        monitor_interval = 0  # no thread of tqdm's own

    return Bar(desc=description, total=total, unit="rollout", dynamic_ncols=True)


def _is_ray_actor() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
