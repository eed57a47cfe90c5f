"""Measure the first table of a GPU: ``python scripts/gpu/table.py OUTPUT_FOLDER [--seconds N]``.

Each cell is written as it comes, to table.md and table.json. Times are those of the device
(``qtensor.cutlass_gemm.device_timer``): CUDA graphs, operands that are not in its cache, functions
that take turns, medians. A copy on the same card in the same run is the yardstick of bandwidths. A
cell that fails says why below the table.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import place
import torch
from torch import Tensor

import qtensor
from qtensor.core.errors import UnsupportedError
from qtensor.cutlass_gemm.device_timer import copies_for, time_in_turns
from qtensor.kernels.products import choice
from qtensor.kernels.products.problem import Pair, Product
from qtensor.storage.ops.products import operand_of

SMALL = place.REHEARSAL
SQUARE = 64 if SMALL else 8192
DECODE = (16, 64, 128) if SMALL else (16, 4096, 14336)
LINEAR = (32, 64) if SMALL else (8192, 4096)
ROWS = (2, 32) if SMALL else (16, 8192)
HIDDEN = 128 if SMALL else 8192
HOST_CALLS = 20 if SMALL else 1000
TURNS = 1 if SMALL else 5
FORMATS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp8": ("fp8", {}, {}),
    "fp8 fast": ("fp8", {}, {}),
    "fp8_rowwise": ("fp8_rowwise", {}, {}),
    "fp8_blockwise": ("fp8_blockwise", {}, {"block_scaling_dim": 2}),
    "mxfp8": ("mxfp8", {"swizzled": True}, {"swizzled": True}),
    "nvfp4": ("nvfp4", {"swizzled": True}, {"swizzled": True}),
}
"""Row -> format, options of activations, options of weights."""
RECIPES: dict[str, Callable[[], Any]] = {
    "fp8": qtensor.recipes.Float8CurrentScaling,
    "fp8_blockwise": qtensor.recipes.Float8BlockScaling,
    "mxfp8": qtensor.recipes.MXFP8BlockScaling,
    "nvfp4": qtensor.recipes.NVFP4BlockScaling,
}
REFUSALS = ValueError if SMALL else UnsupportedError
"""What torch's product may raise: torch itself refuses blocks on a CPU, where a rehearsal runs."""
BACKENDS = {"ours": "auto", "torch": "scaled_mm"}
TITLES = {
    "quantize": f"quantize both directions {SQUARE}x{SQUARE}",
    "dequantize": "dequantize",
    "gemm": f"GEMM {SQUARE}^3: TFLOP/s ours / torch / bf16",
    "decode": "GEMM M={} N={} K={}: us (GB/s) ours / torch / bf16".format(*DECODE),
    "linear": "linear forward + backward M={} K=N={}: ms (of bf16)".format(*LINEAR),
    "host": "host us: product / quantization",
}


class Report:
    """The cells so far, written to files after each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells: dict[str, dict[str, str]] = {}
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []

    def add(self, row: str, column: str, text: str, **facts: float | str) -> None:
        """Add a cell."""
        self.cells.setdefault(row, {})[column] = text
        self.facts[f"{row}, {column}"] = facts
        print(f"{row}, {column}: {text}", flush=True)
        self.write()

    def note(self, text: str) -> None:
        """Add a line below the table."""
        self.notes.append(text)
        print(text, flush=True)
        self.write()

    def write(self) -> None:
        """Write both files."""
        lines = [f"| format | {' | '.join(TITLES.values())} |", "|---" * (len(TITLES) + 1) + "|"]
        others: list[str] = []
        for row, cells in self.cells.items():
            if cells.keys() <= TITLES.keys():
                given = (cells.get(column, "") for column in TITLES)
                lines.append(f"| {row} | {' | '.join(given)} |")
            else:
                others += [f"- {row}, {column}: {text}" for column, text in cells.items()]
        text = "\n".join([*lines, "", *others, "", *(f"- {note}" for note in self.notes)])
        (self.folder / "table.md").write_text(text + "\n")
        report = {"cells": self.facts, "notes": self.notes}
        (self.folder / "table.json").write_text(json.dumps(report, indent=1) + "\n")


def random(rows: int, columns: int, **options: Any) -> Tensor:
    """Return a random bfloat16 matrix on the device."""
    options.setdefault("dtype", torch.bfloat16)
    return torch.randn(rows, columns, device=place.device(), **options)


def rotating(make: Callable[[], Any], size: int) -> list[Any]:
    """Return copies of operands of ``size`` bytes that take more than the device's cache."""
    return [make() for _ in range(copies_for(size, place.device()))]


def time_each(
    functions: dict[str, list[Callable[[], Any]]], graphs: bool = True
) -> dict[str, float]:
    """Return the microseconds of a call of each function."""
    return time_in_turns(functions, place.device(), TURNS, graphs=graphs)


def bytes_of(*tensors: Any) -> int:
    """Return the bytes of tensors and of the buffers of quantized tensors."""
    flat = [t.buffers() if hasattr(t, "buffers") else [t] for t in tensors]
    return sum(t.numel() * t.itemsize for t in itertools.chain(*flat) if t is not None)


def gigabytes(size: int, microseconds: float) -> float:
    """Return GB/s."""
    return size / microseconds / 1e3


# ---- the cells


@functools.cache
def copy_speed() -> float:
    """Return the GB/s of a copy, bytes read and written."""
    sets = rotating(lambda: (random(SQUARE, SQUARE), random(SQUARE, SQUARE)), 4 * SQUARE * SQUARE)
    calls = [functools.partial(y.copy_, x) for x, y in sets]
    return gigabytes(4 * SQUARE * SQUARE, time_each({"copy": calls})["copy"])


def quantize_cell(report: Report, row: str) -> None:
    """Quantize a square matrix in both directions, and decode the rows."""
    name, options, _ = FORMATS[row]
    sets = rotating(lambda: random(SQUARE, SQUARE), 2 * SQUARE * SQUARE)
    codec = qtensor.quantizer(name, columnwise=True, **options)
    calls = [functools.partial(qtensor.quantize, x, codec) for x in sets]
    size = bytes_of(sets[0], qtensor.quantize(sets[0], codec))
    speed = gigabytes(size, time_each({row: calls})[row])
    report.add(
        row, "quantize", f"{speed:.0f} GB/s ({speed / copy_speed():.0%} of a copy)", gb=speed
    )
    stored = [qtensor.quantize(x, name, **options) for x in sets]
    calls = [functools.partial(q.dequantize, torch.bfloat16) for q in stored]
    speed = gigabytes(bytes_of(stored[0], sets[0]), time_each({row: calls})[row])
    report.add(row, "dequantize", f"{speed:.0f} GB/s ({speed / copy_speed():.0%})", gb=speed)


def products_of(row: str, m: int, n: int, k: int) -> dict[str, list[Callable[[], Any]]]:
    """Return the calls that compute a product: ours, torch's on the same codes, and bf16."""
    name, left, right = FORMATS[row]
    functions: dict[str, list[Callable[[], Any]]] = {"ours": [], "torch": [], "bf16": []}
    for x, w in rotating(lambda: (random(m, k), random(n, k)), 2 * k * (m + n)):
        out = torch.empty(m, n, device=x.device, dtype=torch.bfloat16)
        pair = Pair(
            *(
                operand_of(t)
                for t in (qtensor.quantize(x, name, **left), qtensor.quantize(w, name, **right))
            )
        )
        for who, backend in BACKENDS.items():
            product = Product(pair, "TN", None, backend, row.endswith("fast"))
            functions[who].append(functools.partial(choice.multiply_, out, product))
        functions["bf16"].append(functools.partial(torch.mm, x, w.t(), out=out))
    try:
        functions["torch"][0]()
    except REFUSALS:
        del functions["torch"]
    return functions


def gemm_cells(report: Report, row: str) -> None:
    """Multiply square matrices, and few rows by a weight."""
    for column, (m, n, k) in {"gemm": (SQUARE, SQUARE, SQUARE), "decode": DECODE}.items():
        functions = products_of(row, m, n, k)
        times = time_each(functions)
        if column == "gemm":
            said = {who: f"{2.0 * m * n * k / us / 1e6:.0f}" for who, us in times.items()}
        else:
            bits = {"bf16": 16, **dict.fromkeys(BACKENDS, 4 if row == "nvfp4" else 8)}
            said = {
                who: f"{us:.1f} ({gigabytes(n * k * bits[who] // 8, us):.0f})"
                for who, us in times.items()
            }
        report.add(
            row,
            column,
            " / ".join(said.get(who, "-") for who in ("ours", "torch", "bf16")),
            **times,
        )
    name, left, right = FORMATS[row]
    operands = (qtensor.quantize(random(64, 128), name, **o) for o in (left, right))
    found = qtensor.explain(*operands, dtype=torch.bfloat16)
    report.note(f"{row}: {found.backend} multiplies")


def linear_cell(report: Report, row: str) -> None:
    """Run a layer forward and backward with a recipe, beside bfloat16."""
    rows, width = LINEAR

    def step(layer: torch.nn.Module, recipe: Any, x: Tensor, dy: Tensor) -> None:
        with qtensor.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(dy)

    functions: dict[str, list[Callable[[], Any]]] = {}
    for who, make in {"ours": RECIPES[row], "bf16": lambda: None}.items():
        layer = qtensor.Linear(width, width, device=place.device(), params_dtype=torch.bfloat16)
        x, dy = random(rows, width).requires_grad_(), random(rows, width)
        functions[who] = [functools.partial(step, layer, make(), x, dy)]
    times = time_each(functions, graphs=False)
    text = f"{times['ours'] / 1e3:.2f} ({times['ours'] / times['bf16']:.0%})"
    report.add(row, "linear", text, **times)


def host_cell(report: Report, row: str) -> None:
    """Time the host alone: calls that no one waits for."""
    name, left, right = FORMATS[row]
    x = random(16, 128)
    a, b = qtensor.quantize(x, name, **left), qtensor.quantize(random(64, 128), name, **right)
    calls = {
        "product": lambda: qtensor.gemm(a, b, "TN", dtype=torch.bfloat16),
        "quantization": lambda: qtensor.quantize(x, name, **left),
    }
    best: dict[str, float] = {}
    for what, call in calls.items():
        for _ in range(5):
            wait()
            began = perf_counter()
            for _ in range(HOST_CALLS // 5):
                call()
            spent = (perf_counter() - began) / (HOST_CALLS // 5) * 1e6
            best[what] = min(best.get(what, spent), spent)
    wait()
    report.add(row, "host", f"{best['product']:.0f} / {best['quantization']:.0f}", **best)


def float_calls(rows: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Return norms and activations of so many rows: the bytes that they move, and the call."""
    x, wide = random(rows, HIDDEN), random(rows, 2 * HIDDEN)
    weight, ops = torch.ones(HIDDEN, device=x.device), torch.ops.qtensor
    _, mean, rstd = ops.norm(x, weight, None, "layernorm", 1e-5, False, x.dtype)
    codec, one = qtensor.quantizer("fp8").canonical, bytes_of(x)
    gradient = (x, x, weight, mean, rstd, "layernorm", False, True)
    quantized = (wide, "swiglu", codec, None, None, None)
    return {
        "RMSNorm": (2 * one, lambda: ops.norm(x, weight, None, "rmsnorm", 1e-5, False, x.dtype)),
        "LayerNorm backward": (3 * one, lambda: ops.norm_backward(*gradient)),
        "swiglu": (3 * one, lambda: ops.activation(wide, "swiglu")),
        "swiglu + quantize": (5 * one // 2, lambda: ops.activation_quantize(*quantized)),
    }


def float_cells(report: Report) -> None:
    """Measure norms and activations, in GB/s of what they read and write."""
    for rows in ROWS:
        for name, (size, call) in float_calls(rows).items():
            measure = functools.partial(float_cell, report, name, rows, size, call)
            with_reason(report, f"{name} M={rows}", measure)


def float_cell(report: Report, name: str, rows: int, size: int, call: Callable[[], Any]) -> None:
    """Measure one call; of few rows, the cache holds the operands, as in a model."""
    us = time_each({name: [call]})[name]
    report.add(name, f"M={rows} K={HIDDEN}", f"{us:.1f} us, {gigabytes(size, us):.0f} GB/s", us=us)


def wait() -> None:
    """Wait for the device."""
    if not SMALL:
        torch.cuda.synchronize()


def with_reason(report: Report, what: str, measure: Callable[[], None]) -> bool:
    """Measure; if that fails, note why and return False."""
    try:
        measure()
    except Exception as error:  # noqa: BLE001 - the next cells must be measured
        report.note(f"{what} FAILED: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
        return False
    return True


def measurements(report: Report) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what is measured, the most important first."""
    yield "copy", lambda: report.note(f"a copy: {copy_speed():.0f} GB/s")
    for row in FORMATS:
        yield f"{row} gemm", functools.partial(gemm_cells, report, row)
        yield f"{row} quantize", functools.partial(quantize_cell, report, row)
        if row in RECIPES:
            yield f"{row} linear", functools.partial(linear_cell, report, row)
        yield f"{row} host", functools.partial(host_cell, report, row)
    yield "norms and activations", functools.partial(float_cells, report)


def main() -> int:
    """Measure; the exit status is the number of cells that failed or were left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    place.prepare()
    report, end, failed = Report(options.output), perf_counter() + options.seconds, 0
    for what, measure in measurements(report):
        if perf_counter() > end:
            report.note(f"{what}: left out, the time is over")
            failed += 1
            continue
        failed += not with_reason(report, what, measure)
    return failed


if __name__ == "__main__":
    sys.exit(main())
