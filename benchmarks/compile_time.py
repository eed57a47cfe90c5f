"""Compile time of a linear that quantizes its result, and the speed of the compiled function.

``python -m benchmarks.compile_time [--quick] [--peers NAMES] [--threads N] [--output DIR]``
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import qtensor
from benchmarks import cases, floor, suite
from benchmarks.cases import Spec
from benchmarks.peer import Job
from benchmarks.report import Column, Row
from benchmarks.settings import Settings, parse
from benchmarks.suite import COPY, Call, Cell
from benchmarks.timer import Timing

TITLE = "Compile time on a CPU"
TEXT = (
    "`quantize(F.linear(x, weight))` with a quantized weight, {tokens} tokens, weight of the size "
    "that the heading "
    "names, inductor. *compile*: median seconds from the first call of a fresh `torch.compile(..., "
    "dynamic=False)` to its result, with an empty inductor cache in a temporary folder; the "
    "process has compiled "
    "another function before, which took {first:.1f} s (imports, compiler probes). *eager*, "
    "*compiled*: median "
    "microseconds of a call, in turns. *copy*: GB/s, read and written, of `Tensor.copy_` of the "
    "weight in bfloat16. "
    "*x eager*: eager / compiled, ours. *compile x peer*: the peer's seconds / ours; *x peer*: the "
    "peer's time / ours compiled; above 1 we are faster."
)
TOKENS = 128
REPEATS = {True: 1, False: 3}


def cold_seconds(
    function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int = 1
) -> float:
    """Return the median time of compiling, including the first call."""
    seconds = []
    for _ in range(repeats):
        with suite.silent(), fresh_cache():
            suite.forget_compiled()
            began = perf_counter()
            suite.compile_static(function)(*arguments)
            seconds.append(perf_counter() - began)
    return statistics.median(seconds)


def plan(quick: bool) -> list[Spec]:
    """Return weights in every format."""
    weights = cases.weight_quantizers(quick)
    return [Spec(quantizer, cases.MIDDLE, torch.bfloat16) for quantizer in weights]


def build(spec: Spec, settings: Settings) -> Cell:
    """Return the calls of a row: copy, eager, compiled, and both of each peer."""
    quantizer, arguments = spec.quantizer, cases.call_arguments(spec.quantizer)
    weight = cases.random_input(spec.shape, spec.dtype)
    x = cases.random_input((TOKENS, spec.shape[1]), spec.dtype)

    def ours(x: Tensor, weight: Any) -> Any:
        return qtensor.quantize(F.linear(x, weight), quantizer, **arguments)

    q = qtensor.quantize(weight, quantizer, **arguments)
    repeats = REPEATS[settings.quick]
    values = suite.labels(spec) | {"compile_s": cold_seconds(ours, (x, q), repeats)}
    for peer in settings.peers:
        job = peer.job(quantizer.canonical, compiled=True)
        if job is not None and job.linear is not None:
            seconds = _peer_seconds(job, x, weight, repeats)
            values[suite.key(peer.name, "compile_s")] = seconds
    compiled = suite.compile_static(ours)
    functions = {
        COPY: floor.copy_call(weight),
        "eager": lambda: ours(x, q),
        "compiled": lambda: compiled(x, q),
    }
    cell = Cell(values, functions, weight)
    suite.add_peers(cell, spec, settings, lambda job, compile_it: _call(job, compile_it, x, weight))
    return cell


def _peer_seconds(job: Job, x: Tensor, weight: Tensor, repeats: int) -> float | None:
    """Return the compile time, or None if it fails; the reason is noted when the call is tried."""
    try:
        return cold_seconds(_chain(job), (x, job.quantize(weight)), repeats)
    except Exception:  # noqa: BLE001 - a foreign library may fail in any way
        return None


def _call(job: Job, compiled: bool, x: Tensor, weight: Tensor) -> Call | str:
    if job.linear is None:
        return "has no linear"
    function = suite.compile_static(_chain(job)) if compiled else _chain(job)
    q = job.quantize(weight)
    return lambda: function(x, q)


def _chain(job: Job) -> Callable[[Tensor, Any], Any]:
    return lambda x, weight: job.quantize(job.linear(x, weight))


def ratios(cell: Cell, timings: dict[str, Timing], settings: Settings) -> Row:
    """Return the ratios: compiled to eager, and both times to those of the peers."""
    row = {"eager_ratio": timings["eager"].median_us / timings["compiled"].median_us}
    for peer in settings.peers:
        seconds = cell.values.get(suite.key(peer.name, "compile_s"))
        if seconds is not None:
            row[suite.key(peer.name, "compile_ratio")] = seconds / cell.values["compile_s"]
    return row | suite.faster(timings, "compiled", settings)


def columns(settings: Settings) -> list[Column]:
    """Return the columns; ratios come last."""
    names = [peer.name for peer in settings.peers]
    return [
        Column("case", "case"),
        Column("copy_gbs", "copy GB/s", 1),
        Column("compile_s", "compile s", 2),
        *(Column(suite.key(name, "compile_s"), f"{name} compile s", 2) for name in names),
        Column("eager_us", "eager us", 1),
        Column("compiled_us", "compiled us", 1),
        *suite.peer_columns(settings, "us", "{} us", 1),
        Column("eager_ratio", "x eager", 2),
        *(Column(suite.key(name, "compile_ratio"), f"compile x {name}", 2) for name in names),
        *suite.peer_columns(settings, "ratio", "x {}", 2),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results."""
    settings = parse("compile_time", __doc__, arguments)
    first = cold_seconds(lambda x: x + 1, (torch.zeros(4),))
    results = suite.collect(
        plan(settings.quick), build, lambda c, t: ratios(c, t, settings), settings
    )
    text = TEXT.format(tokens=TOKENS, first=first)
    document = suite.report("compile_time", (TITLE, text), columns(settings), results, settings)
    return suite.finish(document, settings)


if __name__ == "__main__":
    sys.exit(main())
