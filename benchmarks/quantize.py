"""Benchmark of quantize: every format and its main options, with a copy and with peers.

``python -m benchmarks.quantize [--quick] [--peers NAMES] [--sizes SIZES] [--threads N]
[--output DIR]``
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import qtensor
from benchmarks import cases, floor, suite
from benchmarks.cases import Spec
from benchmarks.peer import Job
from benchmarks.report import Column, Row
from benchmarks.settings import Settings, parse
from benchmarks.suite import COPY, Call, Cell
from benchmarks.timer import Timing

TITLE = "Quantizing on a CPU"
IN_CACHE = "in cache"
CACHED_BYTES = 1 << 19
"""Bytes of the input that stays in the second cache level, together with its codes."""
CACHED_ROWS = 256
TEXT = (
    "Median microseconds a call, all functions of a row in turns. *fresh*: `qtensor.quantize(x, "
    "...)`, "
    "which allocates its outputs; *reused*: `quantizer.quantize(x, out=q)`. *copy*: GB/s, read "
    "and written, of "
    "`Tensor.copy_` between buffers of the input's size, in turns with the row; *input*: GB/s of "
    "input, reused. "
    "*share*: time of moving the bytes that must move at that bandwidth / time taken, reused "
    "outputs; formats "
    "with a maximum over the tensor (`fp8`, `nvfp4`) are charged two reads of the input, *share, "
    "1 read* "
    "charges one (`benchmarks/floor.py`). *limit*: the share that would be left if memory cost "
    "nothing: the time of as many values in tensors of half a MiB, which stay in the second cache "
    "level, on one thread, divided by the threads. A share near its limit is held down by "
    "instructions, not by memory. *x peer*: the peer's time / ours, both with fresh "
    "outputs: above 1 "
    "we are faster. A copy of 16x32 values is all call, and one of 1024x1024 stays in the cache: "
    "shares "
    "compare with that. Quartiles are in the JSON."
)


def build(spec: Spec, settings: Settings) -> Cell:
    """Return the calls of a row: copy, fresh, reused, and peers."""
    quantizer = spec.quantizer
    x = cases.random_input(spec.shape, spec.dtype)
    arguments = cases.call_arguments(quantizer)
    q = qtensor.quantize(x, quantizer, **arguments)
    functions = {
        COPY: floor.copy_call(x),
        "fresh": lambda: qtensor.quantize(x, quantizer, **arguments),
        "reused": lambda: quantizer.quantize(x, out=q, **arguments),
    }
    if x.nbytes > CACHED_BYTES:
        small = cases.random_input(_cached_shape(spec.dtype), spec.dtype)
        codes = qtensor.quantize(small, quantizer, **arguments)
        functions[IN_CACHE] = lambda: quantizer.quantize(small, out=codes, **arguments)
    cell = Cell(suite.labels(spec), functions, x, floor.quantize_traffic(x, q))
    suite.add_peers(cell, spec, settings, lambda job, compiled: _call(job, compiled, x))
    return cell


def _cached_shape(dtype: torch.dtype) -> tuple[int, int]:
    return CACHED_ROWS, CACHED_BYTES // (CACHED_ROWS * dtype.itemsize)


def values(cell: Cell, timings: dict[str, Timing], settings: Settings) -> Row:
    """Return the values that follow from a row's timings."""
    values = suite.bounded(cell, timings, settings)
    if IN_CACHE not in timings:
        return values | {"limit": None}
    calls = cell.copied.nbytes / CACHED_BYTES / settings.threads
    bandwidth = floor.copy_gbs(cell.copied, timings[COPY].median_us)
    us = timings[IN_CACHE].median_us * calls
    return values | {"limit": floor.share(cell.traffic.moved, us, bandwidth)}


def _columns(settings: Settings) -> list[Column]:
    columns = suite.bounded_columns(settings, "input GB/s")
    at = [column.key for column in columns].index("share") + 1
    return [*columns[:at], Column("limit", "limit", 0, percent=True), *columns[at:]]


def _call(job: Job, compiled: bool, x: Tensor) -> Call:
    function = suite.compile_static(job.quantize) if compiled else job.quantize
    return lambda: function(x)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results."""
    settings = parse("quantize", __doc__, arguments)
    plan = cases.grid(settings.quick)
    results = suite.collect(
        plan, build, lambda cell, timings: values(cell, timings, settings), settings
    )
    return suite.finish(
        suite.report("quantize", (TITLE, TEXT), _columns(settings), results, settings), settings
    )


if __name__ == "__main__":
    sys.exit(main())
