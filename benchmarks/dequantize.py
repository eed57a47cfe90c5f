"""Benchmark of dequantize: every format to bfloat16 and float32, with a copy and with peers.

``python -m benchmarks.dequantize [--quick] [--peers NAMES] [--sizes SIZES] [--threads N]
[--output DIR]``
"""

from __future__ import annotations

import inspect
import sys

import torch
from torch import Tensor

import qtensor
from benchmarks import cases, floor, suite
from benchmarks.cases import Spec
from benchmarks.peer import Job
from benchmarks.settings import Settings, parse
from benchmarks.suite import COPY, Call, Cell

TITLE = "Dequantizing on a CPU"
TEXT = (
    "Median microseconds a call, all functions of a row in turns; the tables are by the dtype of "
    "the result. "
    "*fresh*: `qtensor.dequantize(q, dtype)`; *reused*: `qtensor.dequantize(q, out=y)`. *copy*: "
    "GB/s, read and "
    "written, of `Tensor.copy_` between buffers of the result's size, in turns with the row; "
    "*output*: GB/s of "
    "the result, reused. *share*: time of reading the codes and factors and writing the result at "
    "that bandwidth "
    "/ time taken, reused outputs. *x peer*: the peer's time / ours, both with fresh outputs: "
    "above 1 we are "
    "faster. A copy of 16x32 values is all call, and one of 1024x1024 stays in the cache: shares "
    "compare with that. Quartiles are in the JSON."
)
HAS_OUT = "out" in inspect.signature(qtensor.dequantize).parameters


def plan(quick: bool) -> list[Spec]:
    """Return the rows of quantizers with one direction: decoding reads only one."""
    return [spec for spec in cases.grid(quick) if not (_both(spec) or _random(spec))]


def _both(spec: Spec) -> bool:
    return spec.quantizer.rowwise and spec.quantizer.columnwise


def _random(spec: Spec) -> bool:
    """Return True for stochastic rounding, which does not change decoding."""
    return spec.quantizer.stochastic_rounding


def build(spec: Spec, settings: Settings) -> Cell:
    """Return the calls of a row: copy, fresh, reused, and peers, for values that were bfloat16."""
    x = cases.random_input(spec.shape, torch.bfloat16)
    q = qtensor.quantize(x, spec.quantizer, **cases.call_arguments(spec.quantizer))
    y = qtensor.dequantize(q, spec.dtype)
    functions = {COPY: floor.copy_call(y), "fresh": lambda: qtensor.dequantize(q, spec.dtype)}
    if HAS_OUT:
        functions["reused"] = lambda: qtensor.dequantize(q, out=y)
    cell = Cell(suite.labels(spec), functions, y, floor.dequantize_traffic(q, spec.dtype))
    suite.add_peers(cell, spec, settings, lambda job, c: _call(job, c, x, spec.dtype))
    return cell


def _call(job: Job, compiled: bool, x: Tensor, dtype: torch.dtype) -> Call | str:
    if job.dequantize is None:
        return "no dequantize"
    function = suite.compile_static(job.dequantize) if compiled else job.dequantize
    q = job.quantize(x)
    return lambda: function(q, dtype)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results."""
    settings = parse("dequantize", __doc__, arguments)
    results = suite.collect(
        plan(settings.quick),
        build,
        lambda cell, timings: suite.bounded(cell, timings, settings),
        settings,
    )
    columns = suite.bounded_columns(settings, "output GB/s")
    columns = [column for column in columns if column.key != "share_one_read"]
    return suite.finish(
        suite.report("dequantize", (TITLE, TEXT), columns, results, settings), settings
    )


if __name__ == "__main__":
    sys.exit(main())
