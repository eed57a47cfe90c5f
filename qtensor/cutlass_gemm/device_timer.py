"""Time calls on a device by its own clock, with operands that are not in its cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

Call = Callable[[], Any]

TURNS = 5
_BURST_US = 3000.0
_MOST_CALLS = 400
_MOST_COPIES = 64
_HOST_CACHE = 1 << 16


def copies_for(operand_bytes: int, device: torch.device) -> int:
    """Return how many copies of a call's operands a rotation needs.

    Together they take more than twice the cache of the device, so that no call finds its own there.
    """
    cache = _HOST_CACHE
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(_MOST_COPIES, 2 * cache // max(operand_bytes, 1) + 2)


def time_in_turns(
    functions: Mapping[str, Sequence[Call]],
    device: torch.device,
    turns: int = TURNS,
    *,
    graphs: bool = True,
) -> dict[str, float]:
    """Return the microseconds of one call of each function: the median of several turns.

    The functions take turns, since clocks and temperature change while they run. On a GPU the calls
    of a turn are a CUDA graph: its time holds nothing of the host, which may take longer for a
    small product than the device does.

    Args:
        functions: name -> the same call over different operands (``copies_for``), made in rotation.
        device: device of all operands.
        turns: turns that count; one more runs before them.
        graphs: False for calls that a CUDA graph cannot hold.
    """
    captures = graphs and device.type == "cuda"
    runs = {name: _run_of(calls, device, captures) for name, calls in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, (run, count) in runs.items():
            spent = _microseconds(run, device) / count
            if turn:
                samples[name].append(spent)
    return {name: statistics.median(times) for name, times in samples.items()}


def _run_of(calls: Sequence[Call], device: torch.device, captures: bool) -> tuple[Call, int]:
    """Return a function that makes calls for a few milliseconds, and how many it makes."""
    for call in calls:
        # The first call loads libraries and compiles, which a capture does not allow.
        call()
    rotation = _repeated(calls, 1, captures)
    _microseconds(rotation, device)
    once = _microseconds(rotation, device)
    rounds = int(_BURST_US / max(once, 1.0))
    rounds = max(1, min(rounds, _MOST_CALLS // len(calls)))
    return (rotation if rounds == 1 else _repeated(calls, rounds, captures)), rounds * len(calls)


def _repeated(calls: Sequence[Call], rounds: int, captures: bool) -> Call:
    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    if not captures:
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _microseconds(run: Call, device: torch.device) -> float:
    if device.type != "cuda":
        began = perf_counter()
        run()
        return (perf_counter() - began) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000.0
