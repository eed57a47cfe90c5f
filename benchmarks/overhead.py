"""Host overhead beside torchao: tiny bfloat16 tensors, one thread, medians.

``python -m benchmarks.overhead [--json FILE] [--bursts N]`` prints a table and writes it as JSON and
Markdown. It needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qtensor
from benchmarks import peer
from benchmarks.timer import Timing, measure

RESULTS = Path(__file__).parent / "results" / "overhead_cpu.json"
SHAPE = (32, 64)
"""Legal for every format of both libraries but blockwise FP8."""
BLOCKWISE_SHAPES = {1: (32, 128), 2: (128, 128)}
TOKENS = 8
IMPORT_RUNS = 7


@dataclass(frozen=True)
class Case:
    """One row: our call, torchao's, and what must hold."""

    group: str
    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any] | None = None
    limit_us: float | None = None
    """Absolute target; without one the target is torchao's time."""
    has_target: bool = True


@dataclass(frozen=True)
class Row:
    """A measured case, in microseconds (import: milliseconds)."""

    group: str
    name: str
    ours: float
    torchao: float | None
    ratio: float | None
    """Ours / torchao's: below 1 is faster than torchao."""
    target: str
    met: bool | None
    """None for a row without a target."""
    spread: str
    """Quartiles of ours."""


def wrapper_cases(x: Tensor) -> Iterator[Case]:
    """Construction and dispatch of a tensor that exists, MXFP8 for both libraries."""
    q = qtensor.quantize(x, "mxfp8")
    other = peer.quantizers()["mxfp8"](x)
    cls, shape, dtype, quantizer = type(q), q.shape, q.dtype, q.quantizer
    data, scale = q.buffers()
    yield Case(
        "wrapper",
        "construct",
        lambda: cls(shape, dtype, quantizer, rowwise_data=data, rowwise_scale_inv=scale),
        peer.construct(other),
        limit_us=2.5,
    )
    yield Case("wrapper", "detach()", q.detach, other.detach, limit_us=6.0)
    alias = torch.ops.aten.alias.default
    yield Case("wrapper", "alias", lambda: alias(q), lambda: alias(other), limit_us=8.0)
    yield Case("wrapper", "t()", q.t, other.t, limit_us=8.0)
    yield Case("wrapper", "clone()", q.clone, other.clone, has_target=False)
    yield Case("wrapper", "dequantize()", q.dequantize, other.dequantize, has_target=False)


def format_cases(seed: torch.Generator) -> Iterator[Case]:
    """Quantize, and a weight-only linear, for each format."""
    linears = []
    for canonical, their_quantize in peer.quantizers().items():
        quantizer = qtensor.quantizer(canonical.split("(")[0], **_options(canonical))
        shape = BLOCKWISE_SHAPES.get(getattr(quantizer, "block_scaling_dim", 0), SHAPE)
        weight = torch.randn(shape, generator=seed).bfloat16()
        x = torch.randn(TOKENS, shape[1], generator=seed).bfloat16()
        call = {"scale": torch.ones(1)} if quantizer.needs_scale else {}
        yield _quantize_case(canonical, weight, quantizer, call, their_quantize)
        if not quantizer.needs_scale:
            ours, theirs = quantizer(weight, **call), their_quantize(weight)
            linears.append(_linear_case(canonical, x, ours, theirs))
    yield from linears


def _options(canonical: str) -> dict[str, Any]:
    inside = canonical.partition("(")[2].rstrip(")")
    pairs = (item.split("=") for item in inside.split(",") if item)
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def _quantize_case(
    name: str, x: Tensor, quantizer: Any, call: dict[str, Tensor], theirs: Callable[[Tensor], Any]
) -> Case:
    label = f"{name} {x.shape[0]}x{x.shape[1]}"
    return Case("quantize", label, lambda: quantizer(x, **call), lambda: theirs(x))


def _linear_case(name: str, x: Tensor, ours: Any, theirs: Any) -> Case:
    label = f"{name} {x.shape[0]}x{x.shape[1]} by {ours.shape[0]}x{ours.shape[1]}"
    return Case("F.linear, weight-only", label, lambda: F.linear(x, ours), peer.linear(x, theirs))


def measure_case(case: Case, bursts: int) -> Row:
    """Both calls in one run, burst by burst in turns."""
    functions = {"ours": case.ours} | ({"theirs": case.theirs} if case.theirs else {})
    timings = measure(functions, bursts)
    ours, theirs = timings["ours"], timings.get("theirs")
    row = _row(case.group, case.name, ours, theirs, case.limit_us, "us")
    return row if case.has_target else dataclasses.replace(row, target="", met=None)


def _row(
    group: str, name: str, ours: Timing, theirs: Timing | None, limit: float | None, unit: str
) -> Row:
    median, other = ours.median_us, theirs.median_us if theirs else None
    target = f"<= {limit:g} {unit}" if limit is not None else "<= torchao"
    bound = limit if limit is not None else other
    return Row(
        group,
        name,
        round(median, 2),
        round(other, 2) if other else None,
        round(median / other, 3) if other else None,
        target,
        bound is None or median <= bound,
        f"{ours.low_us:.2f} to {ours.high_us:.2f}",
    )


def import_row() -> Row:
    """What each import adds to ``import torch``, in fresh processes: the median, in milliseconds."""
    code = (
        "import sys, time, torch; before = len(sys.modules); start = time.perf_counter(); import {0};"
        "print(time.perf_counter() - start, len(sys.modules) - before)"
    )
    samples: dict[str, list[float]] = {"qtensor": [], "torchao": []}
    for _ in range(IMPORT_RUNS):
        for name, times in samples.items():
            command = [sys.executable, "-W", "ignore", "-c", code.format(name)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            times.append(1000 * float(done.stdout.split()[-2]))
    ours, theirs = (_millis(samples[name]) for name in samples)
    return _row("import, after torch (ms)", "import", ours, theirs, 150.0, "ms")


def _millis(times: list[float]) -> Timing:
    times = sorted(times)
    quarter = len(times) // 4
    return Timing(times[len(times) // 2], times[quarter], times[-1 - quarter], len(times), 1)


def environment() -> dict[str, Any]:
    """What was measured on what."""
    return {
        "cpu": _cpu_name(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchao": peer.VERSION,
        "qtensor": qtensor.__version__,
        "threads": 1,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def markdown(rows: list[Row], here: dict[str, Any], bursts: int) -> str:
    """The table as a document."""
    met = [row.met for row in rows if row.met is not None]
    lines = [
        "# Host overhead on a CPU, beside torchao",
        "",
        f"{here['cpu']}, {here['system']} {here['machine']}, one thread; Python {here['python']}, "
        f"torch {here['torch']}, torchao {here['torchao']}, qtensor {here['qtensor']}.",
        "",
        f"Median microseconds a call over {bursts} bursts, the two libraries in turns within one run. "
        "Ratio: ours / torchao's, so below 1 is faster. bfloat16 input, rowwise data, default options.",
        "",
        "| | case | qtensor | quartiles | torchao | ratio | target | met |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    group = ""
    for row in rows:
        head, group = ("" if row.group == group else row.group), row.group
        other = "" if row.torchao is None else f"{row.torchao:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = {True: "yes", False: "**no**", None: ""}[row.met]
        lines.append(
            f"| {head} | `{row.name}` | {row.ours:.2f} | {row.spread} | {other} | {ratio} | {row.target} | {verdict} |"
        )
    lines += [
        "",
        f"{sum(met)} of {len(met)} targets met.",
        "",
        "What of torchao does not run here:",
        "",
    ]
    lines += [f"- {text}" for text in peer.NOT_ON_CPU]
    lines += ["", "Written by `python -m benchmarks.overhead`.", ""]
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where; Markdown beside it")
    parser.add_argument("--bursts", type=int, default=200, help="of each case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=seed).bfloat16()
    cases = [*wrapper_cases(x), *format_cases(seed)]
    rows = [measure_case(case, options.bursts) for case in cases] + [import_row()]
    here = environment()
    text = markdown(rows, here, options.bursts)
    print(text)
    data = {"environment": here, "bursts": options.bursts, "not_on_cpu": peer.NOT_ON_CPU}
    data["rows"] = [dataclasses.asdict(row) for row in rows]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(data, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
