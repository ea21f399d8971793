"""What went wrong on our side without stopping the training: counted, and logged once a cause."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Iterator

from agl_meta.describing import describe_error
from agl_meta.forks import PerProcess

logger = logging.getLogger("agl_meta")


def is_of_system(error: OSError) -> bool:
    """Whether the operating system raised an error, and not a signal handler of the user's.

    One that interrupts a rollout that takes too long raises :class:`TimeoutError`, say, which is an OSError,
    too, and is meant for the rollout. Only those of the system have a number.
    """
    return error.errno is not None


class FaultCounter:
    """Counts faults by what was being done and by cause; the first of each is logged.

    Thread-safe. One instance serves a process (:data:`faults`).
    """

    def __init__(self) -> None:
        self._lock = PerProcess(threading.RLock)  # a signal handler may interrupt one call by another
        self._counts: collections.Counter[str] = collections.Counter()

    def record(self, doing: str, cause: BaseException | str) -> str:
        """Count one fault; log it if this activity has not failed of this cause before.

        Returns the name under which it is counted.
        """
        text = cause if isinstance(cause, str) else describe_error(cause)
        # The path makes each failing file a cause of its own: the errno names the cause.
        if isinstance(cause, OSError) and cause.strerror is not None:
            key = f"{doing}: {cause.strerror}"
        else:
            key = f"{doing}: {text}"
        with self._lock.value:
            self._counts[key] += 1
            first = self._counts[key] == 1
        if first:
            logger.error("%s failed, training goes on: %s (further cases are counted)", doing, text)
        return key

    @contextlib.contextmanager
    def guard(self, doing: str) -> Iterator[None]:
        """Run a block of ours whose failure must not stop the training."""
        try:
            yield
        except Exception as error:
            self.record(doing, error)

    def counts(self) -> dict[str, int]:
        """How often each fault happened in this process, by activity and cause."""
        with self._lock.value:
            return dict(self._counts)

    def log_summary(self) -> None:
        """Log all counts, if there are any."""
        for key, count in self.counts().items():
            logger.warning("%d × %s", count, key)


faults = FaultCounter()
"""The counter of this process."""
