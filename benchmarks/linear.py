"""Benchmark of linear layers on quantized weights, compared with bfloat16 ``nn.Linear``.

``python -m benchmarks.linear [--quick] [--peers NAMES] [--sizes SIZES] [--threads N]
[--output DIR]``
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qtensor
from benchmarks import cases, floor, memory, suite
from benchmarks.cases import Spec
from benchmarks.floor import Traffic
from benchmarks.peer import Job
from benchmarks.report import Column, Row
from benchmarks.settings import Settings, parse
from benchmarks.suite import COPY, Call, Cell
from benchmarks.timer import Timing

TITLE = "Linear layers on a CPU"
TEXT = (
    "Sizes are tokens x outputs x inputs, activations bfloat16. Median microseconds a call, all "
    "functions of a row "
    "in turns. *bf16*: `nn.Linear`; *weight-only*: `F.linear(x, q)`; *both*: `F.linear(xq, q)` "
    "with activations "
    "that are quantized already, in emulation: codes are decoded and multiplied in float32. "
    "*share*: time of "
    "moving activations, codes, factors and result once at the bandwidth of *copy* "
    "(`Tensor.copy_` of the bfloat16 "
    "weight, GB/s read and written) / time of weight-only: products of many tokens are bound by "
    "arithmetic instead. "
    "*extra MiB*: peak memory of one weight-only call minus what was there before it, in a "
    "process of its own "
    "(`benchmarks/memory.py`). *x*: the other's time / that of weight-only; above 1 we are "
    "faster; *x bf16, both*: "
    "against both quantized."
)
TINY = (16, 128, 128)
MIDDLE = (128, 1024, 1024)
LARGE = (512, 4096, 4096)


@dataclass(frozen=True)
class LinearSpec(Spec):
    """One row; ``shape`` is the shape of the weight."""

    tokens: int

    @property
    def size(self) -> str:
        """The name in the tables, with the number of tokens."""
        return cases.size_name((self.tokens, *self.shape))


QUICK_LARGE = ("fp8", "mxfp8", "nvfp4")
"""Formats of the large rows of a quick run, where one product takes up to a second."""


def plan(quick: bool) -> list[LinearSpec]:
    """Return sizes and weights.

    Quick: few large rows, and ``MIDDLE`` last, as in ``cases.grid``.
    """
    weights = cases.weight_quantizers(quick)
    if not quick:
        return [_spec(q, size) for size in (TINY, MIDDLE, LARGE) for q in weights]
    large = [_spec(q, LARGE) for q in weights if q.canonical in QUICK_LARGE]
    tiny, middle = ([_spec(q, size) for q in weights] for size in (TINY, MIDDLE))
    return [*tiny, *large, *middle]


def _spec(quantizer: Any, size: tuple[int, int, int]) -> LinearSpec:
    return LinearSpec(quantizer, size[1:], torch.bfloat16, size[0])


def build(spec: LinearSpec, settings: Settings) -> Cell:
    """Return the calls of a row: copy, nn.Linear, weight-only, both quantized, and peers."""
    quantizer, arguments = spec.quantizer, cases.call_arguments(spec.quantizer)
    weight = cases.random_input(spec.shape, spec.dtype)
    x = cases.random_input((spec.tokens, spec.shape[1]), spec.dtype)
    layer = torch.nn.Linear(spec.shape[1], spec.shape[0], bias=False, dtype=spec.dtype)
    q = qtensor.quantize(weight, quantizer, **arguments)
    activations = _activation_quantizer(quantizer)
    xq = qtensor.quantize(x, activations, **arguments)
    functions = {
        COPY: floor.copy_call(weight),
        "bf16": _no_grad(layer, x),
        "weight-only": lambda: F.linear(x, q),
        "both": lambda: F.linear(xq, q),
    }
    written = spec.tokens * spec.shape[0] * spec.dtype.itemsize
    cell = Cell(suite.labels(spec), functions, weight, Traffic(x.nbytes + q.nbytes, written))
    suite.add_peers(cell, spec, settings, lambda job, c: _call(job, c, x, weight))
    return cell


def _activation_quantizer(quantizer: Any) -> Any:
    """Return the quantizer of the activations: the same format without square blocks."""
    square = {"block_scaling_dim": 1, "with_2d_quantization": False}
    own = {name: square[name] for name in square if name in quantizer.option_names()}
    return qtensor.quantizer(quantizer, **own)


def _no_grad(layer: torch.nn.Linear, x: Tensor) -> Call:
    layer.requires_grad_(False)
    return lambda: layer(x)


def _call(job: Job, compiled: bool, x: Tensor, weight: Tensor) -> Call | str:
    if job.linear is None:
        return "has no linear"
    function = suite.compile_static(job.linear) if compiled else job.linear
    q = job.quantize(weight)
    return lambda: function(x, q)


def ratios(cell: Cell, timings: dict[str, Timing], settings: Settings) -> Row:
    """Return the share of the lower bound, and ratios to the time of weight-only."""
    us = timings["weight-only"].median_us
    bandwidth = floor.copy_gbs(cell.copied, timings[COPY].median_us)
    return {
        "share": floor.share(cell.traffic.moved, us, bandwidth),
        "bf16_ratio": timings["bf16"].median_us / us,
        "bf16_both_ratio": timings["bf16"].median_us / timings["both"].median_us,
        **suite.faster(timings, "weight-only", settings),
    }


def columns(settings: Settings) -> list[Column]:
    """Return the columns; ratios come last."""
    return [
        Column("case", "weight"),
        Column("copy_gbs", "copy GB/s", 1),
        Column("bf16_us", "bf16 us", 1),
        Column("weight_only_us", "weight-only us", 1),
        Column("both_us", "both us", 1),
        *suite.peer_columns(settings, "us", "{} us", 1),
        Column("extra_mib", "extra MiB", 1),
        Column("bf16_extra_mib", "bf16 extra MiB", 1),
        *(
            Column(suite.key(peer.name, "extra_mib"), f"{peer.name} extra MiB", 1)
            for peer in settings.peers
        ),
        Column("share", "share", 1, percent=True),
        Column("bf16_ratio", "x bf16", 2),
        Column("bf16_both_ratio", "x bf16, both", 2),
        *suite.peer_columns(settings, "ratio", "x {}", 2),
    ]


def add_memory(results: suite.Results, settings: Settings) -> None:
    """Add memory peaks to the large rows; one process measures all of them."""
    size = cases.size_name(LARGE)
    rows = [row for row in results.rows if row["size"] == size]
    peaks = {}
    if not settings.out_of_time():
        peers = [] if settings.quick else [peer.name for peer in settings.peers]
        peaks = memory.peaks(LARGE, [row["case"] for row in rows], peers)
    for row in rows:
        if row["case"] not in peaks:
            results.note("peak memory is not measured: out of time, or its process failed", row)
        row["bf16_extra_mib"] = peaks.get("bf16")
        row["extra_mib"] = peaks.get(row["case"])
        for peer in settings.peers:
            row[suite.key(peer.name, "extra_mib")] = peaks.get(f"{peer.name} {row['case']}")


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results."""
    settings = parse("linear", __doc__, arguments)
    results = suite.collect(
        plan(settings.quick), build, lambda c, t: ratios(c, t, settings), settings
    )
    add_memory(results, settings)
    document = suite.report("linear", (TITLE, TEXT), columns(settings), results, settings)
    return suite.finish(document, settings)


if __name__ == "__main__":
    sys.exit(main())
