"""The one timer: medians of many short bursts, one thread, what is compared measured in turns."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

BURST_US = 300.0
"""Length of a burst: long against the clock's 0.05 us, short against a time slice of the scheduler."""
MAX_CALLS = 2000
WARM_UP_CALLS = 20


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


def measure(functions: Mapping[str, Callable[[], Any]], bursts: int = 200) -> dict[str, Timing]:
    """Time functions against each other.

    Each round runs one burst of every function, so that a slow phase of the machine falls on all of
    them; a burst that another process interrupts is an outlier, which the median drops.

    Args:
        functions: name to a call without arguments.
        bursts: of each function.
    """
    with _quiet():
        counts = {name: _calibrate(function) for name, function in functions.items()}
        samples: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(bursts):
            for name, function in functions.items():
                samples[name].append(_burst(function, counts[name]))
    return {name: _summary(samples[name], counts[name]) for name in functions}


@contextmanager
def _quiet() -> Any:
    """One thread, no garbage collection."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def _calibrate(function: Callable[[], Any]) -> int:
    for _ in range(WARM_UP_CALLS):
        function()
    once = min(_burst(function, 3) for _ in range(5))
    return max(1, min(MAX_CALLS, int(BURST_US / max(once, 0.01))))


def _burst(function: Callable[[], Any], calls: int) -> float:
    """Microseconds a call."""
    start = perf_counter_ns()
    for _ in range(calls):
        function()
    return (perf_counter_ns() - start) / calls / 1000


def _summary(samples: list[float], calls: int) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(median, low, high, len(samples), calls)
