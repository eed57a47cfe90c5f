"""The one timer: medians of many short bursts, what is compared measured in turns."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, perf_counter_ns
from typing import Any

import torch

BURST_US = 300.0
"""Length of a burst: long against the clock's 0.05 us, short against a time slice of the scheduler."""
SLOW_US = 20_000.0
"""A call this long is a burst of its own and needs no warm-up: what is in the caches does not count."""
FIRST_US = 100_000.0
"""A first call this long, loading and page faults included, is taken for slow at once."""
MAX_CALLS = 2000
WARM_UP_CALLS = 20
MIN_BURSTS = 3
"""Of each function, however slow; two with a limit below ``HASTE`` seconds."""
HASTE = 0.1


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, over all bursts."""

    median_us: float
    low_us: float
    """First quartile of the bursts: what the median would be on a quieter machine."""
    high_us: float
    """Third quartile."""
    bursts: int
    calls: int
    """In each burst."""
    least_us: float
    """The shortest burst: what the machine does where nothing else runs."""


def measure(
    functions: Mapping[str, Callable[[], Any]],
    bursts: int = 200,
    *,
    threads: int = 1,
    seconds: float | None = None,
) -> dict[str, Timing]:
    """Time functions against each other.

    Each round runs one burst of every function, so that a slow phase of the machine falls on all of
    them; a burst that another process interrupts is an outlier, which the median drops. A burst of
    fast calls begins with one that is not counted: the caches are then as the function itself leaves
    them, not as the one before it.

    Args:
        functions: name to a call without arguments.
        bursts: of each function, at most.
        threads: of torch, during the measurement.
        seconds: for each function, on average; no new round begins when they are over, after ``MIN_BURSTS``.
    """
    with quiet(threads):
        counts = {name: _calibrate(function) for name, function in functions.items()}
        samples: dict[str, list[float]] = {name: [] for name in functions}
        least = MIN_BURSTS if seconds is None or seconds >= HASTE else 2
        end = None if seconds is None else perf_counter() + seconds * len(functions)
        for done in range(bursts):
            if end is not None and done >= least and perf_counter() > end:
                break
            for name, function in functions.items():
                samples[name].append(_burst(function, counts[name]))
    return {name: summary(samples[name], max(1, counts[name])) for name in functions}


@contextmanager
def quiet(threads: int) -> Iterator[None]:
    """That many threads, no garbage collection."""
    before, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(threads)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


def summary(samples: list[float], calls: int = 1) -> Timing:
    """Median and quartiles; a single sample is all three."""
    low, median, high = statistics.quantiles(samples * (1 + (len(samples) == 1)), n=4)
    return Timing(median, low, high, len(samples), calls, min(samples))


def _calibrate(function: Callable[[], Any]) -> int:
    """Calls in a burst; 0 is a single one without another before it."""
    if _burst(function, 0) > FIRST_US or (once := _burst(function, 0)) > SLOW_US:
        return 0
    for _ in range(min(WARM_UP_CALLS, int(5 * SLOW_US / max(once, 0.01)))):
        function()
    once = min(_burst(function, 3) for _ in range(5 if once < BURST_US else 1))
    return max(1, min(MAX_CALLS, int(BURST_US / max(once, 0.01))))


def _burst(function: Callable[[], Any], calls: int) -> float:
    """Microseconds a call."""
    if calls:
        function()
    else:
        calls = 1
    start = perf_counter_ns()
    for _ in range(calls):
        function()
    return (perf_counter_ns() - start) / calls / 1000
