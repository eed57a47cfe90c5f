"""Host overhead compared with torchao: tiny bfloat16 tensors, one thread, medians.

``python -m benchmarks.overhead [--json FILE] [--bursts N]`` prints a table and writes it as JSON
and Markdown. Without torchao (extra ``bench``) its column is empty, and the report says so.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qtensor
from benchmarks import cases, machine, report, settings, training
from benchmarks.peer import Job, Peer
from benchmarks.timer import Timing, measure, summary

SHAPE = (32, 64)
"""A shape that every format of both libraries takes, except blockwise FP8."""
BLOCKWISE_SHAPES = {1: (32, 128), 2: (128, 128)}
TOKENS = 8
DECODE = 24, 64
"""Layers, and their size: so small that host overhead is nearly all of their time."""
DECODE_LIMITS = {
    "eager": 15.0,
    "aot_eager": None,
    "compiled": 5.0,
    "compiled, cpp_wrapper": 5.0,
    "compiled, cpp_wrapper, no module guards": 5.0,
}
"""Ways to run them, and the most microseconds that a layer may take above its kernel, if any."""
_DECODE_WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "aot_eager": functools.partial(torch.compile, fullgraph=True, backend="aot_eager"),
    "compiled": functools.partial(torch.compile, fullgraph=True),
    # Inductor writes the calls of ops in C++: a call costs 1 us instead of 4.
    "compiled, cpp_wrapper": functools.partial(
        torch.compile, fullgraph=True, options={"cpp_wrapper": True}
    ),
    # Nor does Dynamo look at each weight again before a call. torch.compile takes the filter out of
    # the dict, so that each call needs its own.
    "compiled, cpp_wrapper, no module guards": lambda model: torch.compile(
        model,
        fullgraph=True,
        options={
            "cpp_wrapper": True,
            "guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe,
        },
    ),
}
DECODE_FORMATS = {True: ("mxfp4",), False: ("fp8", "mxfp8", "mxfp4", "nvfp4")}
"""By whether the run is quick."""
IMPORT_RUNS = {True: 2, False: 7}
"""Number of bursts, by whether the run is quick."""
BURSTS = {True: 20, False: 200}
LEFT_OUT = (
    "in a quick run: other recipes compiled, blocks, and seconds of compilation (see compile_time)"
)
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fp8", {}),
    ("fp8_delayed", {}),
    ("fp8_rowwise", {}),
    ("fp8_blockwise", {}),
    ("fp8_blockwise", {"block_scaling_dim": 2}),
    ("mxfp8", {}),
    ("mxfp8", {"scale_mode": "floor"}),
    ("mxfp6", {}),
    ("mxfp6", {"dtype": "e3m2"}),
    ("mxfp4", {}),
    ("nvfp4", {}),
)


@dataclass(frozen=True)
class Case:
    """One row: our call, torchao's, and the target."""

    group: str
    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any] | None = None
    limit_us: float | None = None
    """Absolute target in microseconds; None if the target is torchao's time."""
    has_target: bool = True
    plain: Callable[[], Any] | None = None
    """The same layer of torch in high precision, measured in the same run."""


@dataclass(frozen=True)
class Row:
    """A measured case, in microseconds (import: milliseconds)."""

    group: str
    name: str
    ours: float
    torchao: float | None
    ratio: float | None
    """Our time / torchao's; below 1 we are faster."""
    target: str
    met: bool | None
    """Whether the target is met; None for a row without a target."""
    spread: str
    """Quartiles of our time."""
    least: float
    """The shortest burst of our call."""
    plain: float | None = None
    """Time of ``nn.Linear``, measured in turns with ours."""
    plain_least: float | None = None


def wrapper_cases(x: Tensor, torchao: Peer | None) -> Iterator[Case]:
    """Yield cases for construction and dispatch of an existing tensor, MXFP8 in both libraries."""
    q = qtensor.quantize(x, "mxfp8")
    other = torchao.eager["mxfp8"].quantize(x) if torchao else None
    cls, shape, dtype, quantizer = type(q), q.shape, q.dtype, q.quantizer
    data, scale = q.buffers()

    def theirs(call: Callable[[Any], Callable[[], Any]]) -> Callable[[], Any] | None:
        return None if other is None else call(other)

    yield Case(
        "wrapper",
        "construct",
        lambda: cls(shape, dtype, quantizer, rowwise_data=data, rowwise_scale_inv=scale),
        theirs(torchao.construct) if torchao and torchao.construct else None,
        limit_us=2.5,
    )
    alias = torch.ops.aten.alias.default
    yield Case("wrapper", "detach()", q.detach, theirs(lambda o: o.detach), limit_us=6.0)
    yield Case(
        "wrapper", "alias", lambda: alias(q), theirs(lambda o: lambda: alias(o)), limit_us=8.0
    )
    yield Case("wrapper", "t()", q.t, theirs(lambda o: o.t), limit_us=8.0)
    yield Case("wrapper", "clone()", q.clone, theirs(lambda o: o.clone), has_target=False)
    decode = theirs(lambda o: o.dequantize)
    yield Case("wrapper", "dequantize()", q.dequantize, decode, has_target=False)


def format_cases(seed: torch.Generator, torchao: Peer | None) -> Iterator[Case]:
    """Yield cases for quantize and a weight-only linear, for each format."""
    linears = []
    for name, options in FORMATS:
        quantizer = qtensor.quantizer(name, **options)
        job = torchao.job(quantizer.canonical) if torchao else None
        shape = BLOCKWISE_SHAPES.get(getattr(quantizer, "block_scaling_dim", 0), SHAPE)
        weight = torch.randn(shape, generator=seed).bfloat16()
        x = torch.randn(TOKENS, shape[1], generator=seed).bfloat16()
        yield _quantize_case(weight, quantizer, job)
        if not quantizer.needs_scale:
            linears.append(_linear_case(x, weight, quantizer, job))
    yield from linears


def _quantize_case(x: Tensor, quantizer: Any, job: Job | None) -> Case:
    label = f"{quantizer.canonical} {cases.size_name(x.shape)}"
    call = cases.call_arguments(quantizer)
    theirs = (lambda: job.quantize(x)) if job else None
    return Case("quantize", label, lambda: quantizer(x, **call), theirs)


def _linear_case(x: Tensor, weight: Tensor, quantizer: Any, job: Job | None) -> Case:
    sizes = f"{cases.size_name(x.shape)} by {cases.size_name(weight.shape)}"
    label, ours = f"{quantizer.canonical} {sizes}", quantizer(weight)
    theirs = None
    if job and job.linear:
        other = job.quantize(weight)
        theirs = lambda: job.linear(x, other)  # noqa: E731 - None is the other choice
    return Case("F.linear, weight-only", label, lambda: F.linear(x, ours), theirs)


def decode_cases(quick: bool) -> Iterator[Case]:
    """Yield cases for one token through many small layers whose weights are quantized.

    The targets are per layer and above the time of the kernels.
    """
    layers, size = DECODE
    group = f"{layers} layers of nn.Linear({size}, {size}), 1 token"
    x = torch.randn(1, size).bfloat16()
    dense = [torch.nn.Linear(size, size, bias=False).bfloat16() for _ in range(layers)]
    plain = torch.nn.Sequential(*dense)
    for name in DECODE_FORMATS[quick]:
        model = copy.deepcopy(plain)
        for layer in model:
            weight = qtensor.quantize(layer.weight.detach(), name)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        kernels = layers * _kernel_us(name, size)
        for way, limit in DECODE_LIMITS.items():
            # Otherwise a call would first check the guards of the graphs of all other cases.
            torch.compiler.reset()
            yield Case(
                group,
                f"{name}, {way} (kernels: {kernels:.0f} us)",
                _without_gradients(_DECODE_WAYS[way](_apart(model)), x),
                limit_us=None if limit is None else round(limit * layers + kernels),
                plain=_without_gradients(_DECODE_WAYS[way](_apart(plain)), x),
            )


def _apart(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that shares no code object with another.

    Dynamo keeps the graphs of a code object together. Where guards are left out, it would run those
    of one model for another.
    """

    def call(x: Tensor) -> Tensor:
        return model(x)

    return types.FunctionType(call.__code__.replace(), globals(), closure=call.__closure__)


def _kernel_us(name: str, size: int) -> float:
    """Return the time of the kernel of one layer.

    It is the difference between all rows of the weight and four, whose time is that of the call.
    """
    x = torch.randn(1, size).bfloat16()
    sizes = {f"{n}": qtensor.quantize(torch.randn(n, size).bfloat16(), name) for n in (4, size)}
    calls = {n: _without_gradients(lambda x, w=w: F.linear(x, w), x) for n, w in sizes.items()}
    few, all_rows = (timing.least_us for timing in measure(calls, bursts=50).values())
    return (all_rows - few) * size / (size - 4)


def _without_gradients(model: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    @torch.inference_mode()
    def call() -> Tensor:
        return model(x)

    call()  # compiles
    return call


def training_cases(quick: bool) -> Iterator[Case]:
    """Yield cases for a tiny linear layer, forward and backward, with several recipes."""
    group = f"training, Linear({training.SIZE}, {training.SIZE}), {training.SIZE} tokens"
    for recipe, name, ours, theirs, plain, limit in training.jobs(quick):
        has_target = limit is not None
        yield Case(group, f"{recipe}, {name}", ours, theirs, limit, has_target, plain)


def block_cases() -> Iterator[Case]:
    """Yield cases for an MLP block, as a module and as a sequence of operations."""
    group = f"training, MLP block of {training.SIZE}, {training.SIZE} tokens"
    for label, name, ours in training.block_jobs():
        yield Case(group, f"{label}, {name}", ours, None, None, has_target=False)


def compile_rows(repeats: int) -> list[Row]:
    """Return rows of the cold seconds until a small MLP has run once, forward and backward."""
    medians: dict[str, tuple[Timing, Timing]] = {}
    for name, make in training.mlps().items():
        runs = [training.compile_seconds(make) for _ in range(repeats + 1)][1:]
        if None not in runs:
            medians[name] = tuple(summary([run[i] for run in runs]) for i in (0, 1))
    rows, group = [], "compile seconds, MLP of 2 layers, Float8CurrentScaling"
    for i, what in enumerate(("forward", "backward")):
        theirs = medians["torchao"][i] if "torchao" in medians else None
        for name in ("qtensor", "nn.Linear"):
            other = theirs if name == "qtensor" else None
            row = _row(group, f"{name} {what}", medians[name][i], other, None, "s")
            rows.append(dataclasses.replace(row, target="", met=None))
    return rows


def measure_case(case: Case, bursts: int, threads: int) -> Row:
    """Measure all calls in one run, burst by burst in turns."""
    calls = {"ours": case.ours, "theirs": case.theirs, "plain": case.plain}
    functions = {name: call for name, call in calls.items() if call is not None}
    timings = measure(functions, bursts, threads=threads)
    ours, theirs, plain = timings["ours"], timings.get("theirs"), timings.get("plain")
    row = _row(case.group, case.name, ours, theirs, case.limit_us, "us")
    if plain is not None:
        least = round(plain.least_us, 2)
        row = dataclasses.replace(row, plain=round(plain.median_us, 2), plain_least=least)
    return row if case.has_target else dataclasses.replace(row, target="", met=None)


def _row(
    group: str, name: str, ours: Timing, theirs: Timing | None, limit: float | None, unit: str
) -> Row:
    median, other = ours.median_us, theirs.median_us if theirs else None
    bound = limit if limit is not None else other
    target = f"<= {limit:g} {unit}" if limit is not None else "<= torchao" if other else ""
    return Row(
        group,
        name,
        round(median, 2),
        round(other, 2) if other else None,
        round(median / other, 3) if other else None,
        target,
        None if bound is None else median <= bound,
        f"{ours.low_us:.2f} to {ours.high_us:.2f}",
        round(ours.least_us, 2),
    )


def import_row(runs: int, torchao: bool) -> Row:
    """Return the row of import times: median ms after ``import torch``, in new processes."""
    code = (
        "import sys, time, torch; before = len(sys.modules); start = time.perf_counter(); import "
        "{0};"
        "print(time.perf_counter() - start, len(sys.modules) - before)"
    )
    samples: dict[str, list[float]] = {name: [] for name in ("qtensor", "torchao")[: 1 + torchao]}
    for _ in range(runs):
        for name, times in samples.items():
            command = [sys.executable, "-W", "ignore", "-c", code.format(name)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            times.append(1000 * float(done.stdout.split()[-2]))
    ours, *theirs = (summary(times) for times in samples.values())
    return _row(
        "import, after torch (ms)", "import", ours, theirs[0] if theirs else None, 150.0, "ms"
    )


def markdown(rows: list[Row], here: Mapping[str, Any], bursts: int, notes: Sequence[str]) -> str:
    """Return the table as a document."""
    met = [row.met for row in rows if row.met is not None]
    lines = [
        "# Host overhead on a CPU, compared with torchao",
        "",
        machine.sentence(here),
        "",
        f"Median microseconds a call over {bursts} bursts, the two libraries in turns within one "
        "run. "
        "Ratio: ours / torchao's, so below 1 is faster. *least*: the shortest burst, what the "
        "call takes where nothing else "
        "runs. *nn.Linear*: torch's own layer, in turns with ours: median (least). bfloat16 "
        "input, rowwise data, default "
        "options; training in float32.",
        "",
        "| | case | qtensor | least | quartiles | torchao | ratio | nn.Linear | target | met |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    group = ""
    for row in rows:
        head, group = ("" if row.group == group else row.group), row.group
        other = "" if row.torchao is None else f"{row.torchao:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        plain = "" if row.plain is None else f"{row.plain:.1f} ({row.plain_least:.1f})"
        verdict = {True: "yes", False: "**no**", None: ""}[row.met]
        lines.append(
            f"| {head} | `{row.name}` | {row.ours:.2f} | {row.least:.2f} | {row.spread} | {other} "
            f"| {ratio} | {plain} "
            f"| {row.target} | {verdict} |"
        )
    lines += ["", f"{sum(met)} of {len(met)} targets met.", ""]
    lines += ["Not measured, or measured with a substitute:", "", *(f"- {text}" for text in notes)]
    lines += ["", "Written by `python -m benchmarks.overhead`.", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the results."""
    parser = settings.parser("overhead", __doc__)
    parser.add_argument(
        "--json", type=Path, help="path of the JSON; the Markdown is written next to it"
    )
    parser.add_argument("--bursts", type=int, help="of each case (default: 200, quick: 20)")
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    chosen = settings.settings(options)
    bursts = options.bursts or BURSTS[chosen.quick]
    torchao = next((peer for peer in chosen.peers if peer.name == "torchao"), None)
    notes = [f"{name}, {reason}" for name, reason in chosen.absent_peers.items()]
    for other in chosen.peers:
        notes += other.notes if other is torchao else [f"{other.name} is not compared here"]
    seed = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=seed).bfloat16()
    measured = [
        *wrapper_cases(x, torchao),
        *format_cases(seed, torchao),
        *training_cases(chosen.quick),
    ]
    if chosen.quick:
        notes.append(LEFT_OUT)
    else:
        measured += block_cases()
    # The cases of decoding are last and not in a list: each one resets the compiler.
    rows = [
        measure_case(case, bursts, chosen.threads)
        for case in chain(measured, decode_cases(chosen.quick))
    ]
    rows += [] if chosen.quick else compile_rows(3)
    rows.append(import_row(IMPORT_RUNS[chosen.quick], torchao is not None))
    here = machine.environment(chosen.threads, {"torchao": torchao.version} if torchao else {})
    text = markdown(rows, here, bursts, notes)
    print(text)
    data = {"environment": here, "bursts": bursts, "not_on_cpu": notes}
    data["rows"] = [dataclasses.asdict(row) for row in rows]
    path = options.json or report.data_path(chosen.output, "overhead", chosen.quick, here)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
