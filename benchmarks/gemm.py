"""Quantized GEMMs on a GPU: our kernels, torch's ``scaled_mm`` and bfloat16 ``torch.mm``.

``python -m benchmarks.gemm [--seconds N] [--output DIR] [--no-autotune]``

The shapes are the projections of Llama-3 8B and 70B (N, K) with M tokens. Each function is captured
in a CUDA graph of several calls over operands that the cache does not hold, so that the times are
those of the GPU and its memory; the host cost of a call is measured separately. The functions of a
shape take turns, and the median counts. The codes are random: zeros draw less power and run faster.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_mm

import qtensor
from benchmarks.machine import environment
from qtensor.cutlass_gemm import autotune, tuning
from qtensor.cutlass_gemm.device_timer import Call, copies_for, time_in_turns
from qtensor.cutlass_gemm.spec import ARCH_OF
from qtensor.cutlass_gemm.tuning import Want
from qtensor.kernels.products import choice
from qtensor.kernels.products.problem import Pair, Product
from qtensor.storage.ops.products import operand_of

TOKENS = (1, 16, 64, 128, 512, 2048, 8192, 16384)
PROJECTIONS = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
    (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672),
)  # fmt: skip
LARGE = (8192, 8192, 8192)
DENSE_PEAK = {(9, 0): 1979.0, (10, 0): 4500.0}
"""FP8 TFLOP/s without sparsity, from the vendor's data sheets (H100 and H200 SXM; B200)."""


def measure(functions: dict[str, list[Call]]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the milliseconds of a call of each function, and why others cannot run."""
    possible, errors = {}, {}
    for name, calls in functions.items():
        try:
            for call in calls:
                call()
            torch.cuda.synchronize()
            possible[name] = calls
        except (
            RuntimeError,
            ValueError,
        ) as error:  # torch refuses shapes, layouts and modes with these
            errors[name] = str(error).splitlines()[0][:200]
            torch.cuda.synchronize()
    device = torch.device("cuda", torch.cuda.current_device())
    return {name: us / 1000 for name, us in time_in_turns(possible, device).items()}, errors


def operand(name: str, rows: int, columns: int, **options: Any) -> Any:
    """Return a quantized random matrix."""
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return qtensor.quantize(x, name, **options)


def ours(a: Any, b: Any, out: Tensor, fast: bool = False) -> Call:
    """Return the call of our kernel."""
    pair = Pair(operand_of(a), operand_of(b))
    return lambda: choice.multiply_(out, Product(pair, "TN", None, "cutlass", fast))


def theirs(a: Any, b: Any, fast: bool = False) -> Call:
    """Return the call of torch's ``scaled_mm`` on the same codes."""
    arguments = a.scaled_mm_args("a", codes=True) | b.scaled_mm_args("b", codes=True)
    return lambda: scaled_mm(**arguments, use_fast_accum=fast)


def functions_of(m: int, n: int, k: int) -> dict[str, list[Call]]:
    """Return the functions that are compared for a shape, each over rotating operands."""
    device = torch.device("cuda", torch.cuda.current_device())
    sets = [calls_of(m, n, k) for _ in range(copies_for(k * (m + n), device))]
    return {name: [calls[name] for calls in sets] for name in sets[0]}


def calls_of(m: int, n: int, k: int) -> dict[str, Call]:
    """Return one call of each function, on operands of its own."""
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    a, b = operand("fp8", m, k), operand("fp8", n, k)
    rows_a, rows_b = operand("fp8_rowwise", m, k), operand("fp8_rowwise", n, k)
    blocks_a = operand("fp8_blockwise", m, k)
    blocks_b = operand("fp8_blockwise", n, k, block_scaling_dim=2)
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    return {
        "tensor": ours(a, b, out),
        "tensor scaled_mm": theirs(a, b),
        "tensor fast": ours(a, b, out, True),
        "tensor fast scaled_mm": theirs(a, b, True),
        "row": ours(rows_a, rows_b, out),
        "row scaled_mm": theirs(rows_a, rows_b),
        "block": ours(blocks_a, blocks_b, out),
        "block scaled_mm": theirs(blocks_a, blocks_b),
        "bf16 mm": lambda: torch.mm(x, w.t(), out=out),
    }


def host_microseconds(calls: int = 2000) -> dict[str, float]:
    """Return the host time of a call on an idle GPU.

    The host is too slow only if this exceeds the time of the kernel.
    """
    a, b = operand("fp8", 16, 128), operand("fp8", 64, 128)
    out = torch.empty(16, 64, device="cuda", dtype=torch.bfloat16)
    functions = {
        "kernel and choice (choice.multiply_)": ours(a, b, out),
        "qtensor.gemm": lambda: qtensor.gemm(a, b, "TN"),
        "torch's scaled_mm": theirs(a, b),
    }
    times = {}
    for name, call in functions.items():
        best = math.inf
        for _ in range(5):
            torch.cuda.synchronize()
            began = perf_counter()
            for _ in range(calls // 5):
                call()
            best = min(best, (perf_counter() - began) / (calls // 5) * 1e6)
        times[name] = best
    torch.cuda.synchronize()
    return times


def tune(arch: str, seconds: float) -> list[dict[str, Any]]:
    """Run autotune for the built kernels, until the time limit."""
    block = (1, 128, 128)
    wanted = [Want("fp8", arch, "e4m3", "e4m3", "bf16", fast=fast) for fast in (False, True)]
    wanted.append(Want("fp8_blockwise", arch, "e4m3", "e4m3", "bf16", block=block))
    device, end, rows = (
        torch.device("cuda", torch.cuda.current_device()),
        perf_counter() + seconds,
        [],
    )
    for n, k in PROJECTIONS:
        for m in TOKENS:
            if perf_counter() > end:
                return rows
            name = torch.cuda.get_device_name()
            for timed in autotune.autotune(wanted, [(m, n, k)], device, name=name):
                processors = torch.cuda.get_device_properties(device).multi_processor_count
                guess = sorted(
                    (spec for spec in tuning.candidates(timed.want) if spec.name in timed.times),
                    key=lambda spec: tuning.cost(spec, *timed.sizes, processors),
                )[0].name
                rows.append({
                    "sizes": timed.sizes,
                    "recipe": timed.want.recipe,
                    "fast": timed.want.fast,
                    "best": timed.best,
                    "guess": guess,
                    "lost": timed.times[guess] / timed.times[timed.best] - 1.0,
                    "microseconds": timed.times,
                })
    return rows


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean, or 0 for an empty list."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else 0.0


PAIRS = (
    ("tensor", "tensor scaled_mm"),
    ("tensor fast", "tensor fast scaled_mm"),
    ("row", "row scaled_mm"),
    ("block", "block scaled_mm"),
    ("tensor fast", "bf16 mm"),
)


def markdown(report: dict[str, Any]) -> str:
    """Return the report as text."""
    names = list(dict.fromkeys(name for row in report["rows"] for name in row["ms"]))
    peak = report["peak"]
    lines = [
        "# GEMMs on a GPU",
        "",
        report["device"],
        "",
        "TFLOP/s (share of the dense FP8 peak):",
        "",
    ]
    lines += [f"| M x N x K | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    for row in report["rows"]:
        m, n, k = row["sizes"]
        cells = []
        for name in names:
            if name not in row["ms"]:
                cells.append("n/a")
                continue
            speed = 2.0 * m * n * k / row["ms"][name] / 1e9
            share = f" ({speed / peak:.0%})" if peak else ""
            cells.append(f"{speed:.0f}{share}")
        lines.append(f"| {m} x {n} x {k} | {' | '.join(cells)} |")
    lines += ["", "Geometric means of the other's time / ours (above 1 we are faster):", ""]
    lines += [f"- {a} against {b}: {x:.3f} ({c} shapes)" for a, b, x, c in report["means"]]
    lines += ["", "Host microseconds a call:", ""]
    lines += [f"- {name}: {value:.1f}" for name, value in report["host_us"].items()]
    if report["errors"]:
        lines += [
            "",
            "Not run:",
            "",
            *(f"- {name}: {why}" for name, why in report["errors"].items()),
        ]
    return "\n".join(lines) + "\n"


def run(seconds: float, tuned: bool) -> dict[str, Any]:
    """Measure the shapes, the most important ones first, until the time limit."""
    capability = torch.cuda.get_device_capability()
    arch = ARCH_OF[capability]
    end = perf_counter() + seconds
    tuning_rows = tune(arch, seconds / 3) if tuned else []
    shapes = [LARGE, *((m, n, k) for n, k in PROJECTIONS for m in TOKENS)]
    rows, errors = [], {}
    for m, n, k in dict.fromkeys(shapes):
        if perf_counter() > end:
            errors["shapes"] = f"{len(dict.fromkeys(shapes)) - len(rows)} left out: time is over"
            break
        times, why = measure(functions_of(m, n, k))
        rows.append({"sizes": (m, n, k), "ms": times})
        errors |= why
    means = []
    for a, b in PAIRS:
        ratios = [r["ms"][b] / r["ms"][a] for r in rows if a in r["ms"] and b in r["ms"]]
        means.append((a, b, geometric_mean(ratios), len(ratios)))
    return {
        "device": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}",
        "peak": DENSE_PEAK.get(capability),
        "environment": environment(torch.get_num_threads(), {}),
        "rows": rows,
        "means": means,
        "host_us": host_microseconds(),
        "tuning": tuning_rows,
        "errors": errors,
    }


def main() -> int:
    """Measure, and write gemm_gpu.json and gemm_gpu.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="for all of it, about")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--no-autotune", dest="autotune", action="store_false")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gemm needs a CUDA device", file=sys.stderr)
        return 2
    report = run(options.seconds, options.autotune)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "gemm_gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report)
    (options.output / "gemm_gpu.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
