"""Benchmark of quantize: every format and its main options, with a copy and with peers.

``python -m benchmarks.quantize [--quick] [--peers NAMES] [--sizes SIZES] [--threads N]
[--output DIR]``
"""

from __future__ import annotations

import sys

from torch import Tensor

import qtensor
from benchmarks import cases, floor, suite
from benchmarks.cases import Spec
from benchmarks.peer import Job
from benchmarks.settings import Settings, parse
from benchmarks.suite import COPY, Call, Cell

TITLE = "Quantizing on a CPU"
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
    "charges one (`benchmarks/floor.py`). *x peer*: the peer's time / ours, both with fresh "
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
    cell = Cell(suite.labels(spec), functions, x, floor.quantize_traffic(x, q))
    suite.add_peers(cell, spec, settings, lambda job, compiled: _call(job, compiled, x))
    return cell


def _call(job: Job, compiled: bool, x: Tensor) -> Call:
    function = suite.compile_static(job.quantize) if compiled else job.quantize
    return lambda: function(x)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results."""
    settings = parse("quantize", __doc__, arguments)
    plan = cases.grid(settings.quick)
    results = suite.collect(
        plan, build, lambda cell, timings: suite.bounded(cell, timings, settings), settings
    )
    columns = suite.bounded_columns(settings, "input GB/s")
    return suite.finish(
        suite.report("quantize", (TITLE, TEXT), columns, results, settings), settings
    )


if __name__ == "__main__":
    sys.exit(main())
