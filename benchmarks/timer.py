"""The timer of all benchmarks: medians of many short bursts, measured in turns."""

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
"""Length of a burst: long compared with the clock's 0.05 us, short compared with a time slice."""
SLOW_US = 20_000.0
"""A call of this length is a burst of its own and needs no warm-up of caches."""
FIRST_US = 100_000.0
"""A first call of this length, loading and page faults included, counts as slow at once."""
MAX_CALLS = 2000
WARM_UP_CALLS = 20
MIN_BURSTS = 3
"""Smallest number of bursts of each function; two if the limit is below ``HASTE`` seconds."""
HASTE = 0.1


@dataclass(frozen=True)
class Timing:
    """Median microseconds a call, over all bursts."""

    median_us: float
    low_us: float
    """First quartile of the bursts: near the median on a quieter machine."""
    high_us: float
    """Third quartile of the bursts."""
    bursts: int
    calls: int
    """Calls in each burst."""
    least_us: float
    """The shortest burst: the time when nothing else runs."""


def measure(
    functions: Mapping[str, Callable[[], Any]],
    bursts: int = 200,
    *,
    threads: int = 1,
    seconds: float | None = None,
) -> dict[str, Timing]:
    """Time several functions in turns.

    Each round runs one burst of every function, so that a slow phase of the machine affects all of
    them. A burst that another process interrupts is an outlier, which the median ignores. A burst
    of fast calls starts with one call that is not counted, so that the caches hold the function's
    own data and not that of the function before it.

    Args:
        functions: name -> a call without arguments.
        bursts: largest number of bursts of each function.
        threads: number of torch threads during the measurement.
        seconds: average time for each function. After it no new round begins, except for the first
            ``MIN_BURSTS``.
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
    """Set the number of threads and turn off garbage collection inside the block."""
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
    """Return median and quartiles; a single sample stands for all three."""
    low, median, high = statistics.quantiles(samples * (1 + (len(samples) == 1)), n=4)
    return Timing(median, low, high, len(samples), calls, min(samples))


def _calibrate(function: Callable[[], Any]) -> int:
    """Return the calls in a burst; 0 means a single call without a warm-up."""
    if _burst(function, 0) > FIRST_US or (once := _burst(function, 0)) > SLOW_US:
        return 0
    for _ in range(min(WARM_UP_CALLS, int(5 * SLOW_US / max(once, 0.01)))):
        function()
    once = min(_burst(function, 3) for _ in range(5 if once < BURST_US else 1))
    return max(1, min(MAX_CALLS, int(BURST_US / max(once, 0.01))))


def _burst(function: Callable[[], Any], calls: int) -> float:
    """Run a burst and return the microseconds a call."""
    if calls:
        function()
    else:
        calls = 1
    start = perf_counter_ns()
    for _ in range(calls):
        function()
    return (perf_counter_ns() - start) / calls / 1000
