"""How the benchmarks measure: the ways to compare take turns in one run, and the best of each counts."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable


def machine() -> str:
    """One line that says what the figures were measured on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores, {memory:.0f} GiB"
    )


def take_turns(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each way; the order changes from round to round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        names = list(ways) if number % 2 else list(reversed(ways))
        for name in names:
            gc.collect()
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], way: str, base: str) -> float:
    """Median over the rounds of the ratio within a round: drift of the machine cancels out."""
    pairs = zip(seconds[way], seconds[base], strict=True)
    return statistics.median(one / other for one, other in pairs)
