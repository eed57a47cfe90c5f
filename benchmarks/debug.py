"""Time a step of training that is not recorded, recorded, and after a recording.

``python -m benchmarks.debug`` prints a table. The steps alternate in one process; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import qtensor
from qtensor import recipes

WIDTH, ROWS, LAYERS = 512, 256, 4
ROUNDS = 40


def model() -> nn.Sequential:
    """Return linear layers under MXFP8."""
    torch.manual_seed(0)
    recipe = recipes.MXFP8BlockScaling()
    return nn.Sequential(*[qtensor.Linear(WIDTH, WIDTH, recipe=recipe) for _ in range(LAYERS)])


def step(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Return the seconds of a forward and a backward pass."""
    began = time.perf_counter()
    call(x).square().mean().backward()
    return time.perf_counter() - began


def main() -> None:
    """Measure eager and compiled steps, and print the medians in milliseconds."""
    x = torch.randn(ROWS, WIDTH)
    print(f"{LAYERS} layers of {WIDTH}x{WIDTH}, {ROWS} rows, MXFP8, medians of {ROUNDS} in ms")
    print(f"{'':<10} {'never':>8} {'off':>8} {'off/never':>9} {'on':>8} {'skipped':>8}")
    for name in ("eager", "aot_eager"):
        never, recorded = model(), model()
        calls = [
            m if name == "eager" else torch.compile(m, backend=name) for m in (never, recorded)
        ]
        with qtensor.debug.record(calls[1], count="manual"):
            for call in calls:
                step(call, x)
        for call in calls:
            step(call, x)
        times: dict[str, list[float]] = {key: [] for key in ("never", "off", "on", "sampled")}
        for round_ in range(ROUNDS):
            # Each of the two comes first in half of the rounds.
            for key in ("never", "off") if round_ % 2 else ("off", "never"):
                times[key].append(step(calls[key == "off"], x))
            with qtensor.debug.record(calls[1], count="manual"):
                times["on"].append(step(calls[1], x))
            with qtensor.debug.record(calls[1], count="manual", every=10) as log:
                log.step()
                times["sampled"].append(step(calls[1], x))
            step(calls[0], x)
        medians = {key: 1e3 * statistics.median(values) for key, values in times.items()}
        print(
            f"{name:<10} {medians['never']:>8.2f} {medians['off']:>8.2f} "
            f"{medians['off'] / medians['never']:>9.3f} {medians['on']:>8.2f} "
            f"{medians['sampled']:>8.2f}"
        )


if __name__ == "__main__":
    main()
