"""What each fast path of small CPU calls saves: one FP8 layer, an MLP of 24 layers, and decoding.

Each variant runs in fresh processes, in turns with the others. A variant leaves out one part:

| variant | leaves out |
|---|---|
| ``all parts`` | nothing |
| ``no small calls`` | the C++ answers: ``QTENSOR_SMALL_CALLS=0`` |
| ``no composite op`` | the op by which Dynamo sees a layer |
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import qtensor
from benchmarks import machine
from qtensor import recipes
from qtensor.functional.linear import one_op
from qtensor.modules import linear_module

SIZE, LAYERS = 32, 24
ALL = "all parts"
DECODING = f"decoding, {LAYERS} layers"
ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "small_calls_cpu.md"

VARIANTS: dict[str, Callable[[], None]] = {
    ALL: lambda: None,
    "no small calls": lambda: None,
    "no composite op": lambda: setattr(linear_module, "follows_calls", lambda: False),
}
"""Name -> what a process does before it builds its layers."""


def _lines(*parts: Any) -> int:
    """Return the number of lines of files, and of functions and classes."""
    texts = (p.read_text() if isinstance(p, Path) else inspect.getsource(p) for p in parts)
    return sum(len(text.splitlines()) for text in texts)


def lines_of_code() -> dict[str, int]:
    """Return the lines that each part costs, by variant."""
    cpu = ROOT / "qtensor" / "kernels" / "cpu"
    sources = [*(cpu / "small_calls").glob("*.py"), cpu / "src" / "program.cpp"]
    sources += [cpu / "src" / f"{name}_calls.cpp" for name in ("small", "delayed")]
    sources += [cpu / "src" / "small_calls.h"]
    composite = Path(inspect.getsourcefile(one_op) or "")
    in_one_op = linear_module.LinearModule._in_one_op
    return {
        "no small calls": _lines(*sources),
        "no composite op": _lines(composite, in_one_op),
    }


def models() -> dict[str, nn.Module]:
    """Return the measured models by name."""
    recipe = recipes.Float8CurrentScaling()
    layers = [qtensor.Linear(SIZE, SIZE, recipe=recipe) for _ in range(LAYERS)]
    mlp = nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))
    return {"Linear": qtensor.Linear(SIZE, SIZE, recipe=recipe), f"MLP of {LAYERS}": mlp}


def decoder() -> nn.Module:
    """Return layers of torch with MXFP8 weights, as a model that generates text has them."""
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))
    for layer in model:
        weight = qtensor.quantize(layer.weight.detach(), "mxfp8")
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return model.requires_grad_(requires_grad=False)


def _burst_us(call: Callable[[], Any], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        call()
    return 1e6 * (time.process_time() - began) / calls


def measure_here(bursts: int, compiled: bool) -> dict[str, list[float]]:
    """Return (minimum, median) microseconds of CPU time of each call, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    calls: dict[str, Callable[[], Any]] = {}
    for name, model in models().items():
        ways: dict[str, Any] = {"eager": model}
        if compiled:
            ways["compiled"] = torch.compile(model, dynamic=False)
        for way, function in ways.items():
            x = torch.randn(SIZE, SIZE, requires_grad=True)
            dy = torch.ones(SIZE, SIZE)
            calls[f"{name}, {way} forward"] = lambda f=function, x=x: f(x)
            both = lambda f=function, x=x, dy=dy: f(x).backward(dy)  # noqa: E731
            calls[f"{name}, {way} forward + backward"] = both
    decoding, token = decoder(), torch.randn(1, SIZE)
    for way in ("eager", "compiled")[: 1 + compiled]:
        run = torch.compile(decoding) if way == "compiled" else decoding
        calls[f"{DECODING}, {way} forward"] = torch.inference_mode()(lambda f=run: f(token))
    counts = {name: 100 if name.startswith("Linear") else 4 for name in calls}
    for call in calls.values():
        for _ in range(10):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(bursts):
        for name, call in calls.items():
            samples[name].append(_burst_us(call, counts[name]))
    return {name: [min(values), median(values)] for name, values in samples.items()}


def measure_in_process(variant: str, bursts: int, compiled: bool) -> dict[str, list[float]]:
    """Return what ``measure_here`` returns in a new process for a variant."""
    switch = "0" if variant == "no small calls" else "1"
    environment = os.environ | {
        "QTENSOR_SMALL_CALLS": switch,
        "OMP_NUM_THREADS": "1",
        # A program in the cache on disk has the parts of the process that compiled it.
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.small_calls"]
    command += ["--variant", variant, "--bursts", str(bursts)] + ["--eager"] * (not compiled)
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rounds: list[dict[str, dict[str, list[float]]]]) -> list[str]:
    """Return the lines of the table: the least over the rounds, and the median of medians."""
    lines = ["| call | " + " | ".join(VARIANTS) + " |", "|---|" + "---:|" * len(VARIANTS)]
    for call in rounds[0][ALL]:
        cells = []
        for variant in VARIANTS:
            runs = [found[variant][call] for found in rounds]
            least, middle = min(run[0] for run in runs), median(run[1] for run in runs)
            cells.append(f"{least:.1f} ({middle:.1f})")
        lines.append(f"| {call} | " + " | ".join(cells) + " |")
    return lines


def savings(rounds: list[dict[str, dict[str, list[float]]]]) -> list[str]:
    """Return one sentence for each part: what it saves a layer, and the lines that it costs."""
    sentences = []
    for variant, lines in lines_of_code().items():
        found = []
        for call in rounds[0][ALL]:
            if call.startswith("Linear"):
                continue
            with_it, without = (
                median(one[name][call][1] for one in rounds) for name in (ALL, variant)
            )
            name = call.removeprefix(f"MLP of {LAYERS}, ")
            found.append(f"{(without - with_it) / LAYERS:.1f} us ({name})")
        part = variant.removeprefix("no ").capitalize()
        sentences.append(f"- {part}, {lines} lines of code: {', '.join(found)}.")
    return sentences


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the variants in turns, print the table and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_calls", description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, help="measure one variant in this process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each variant")
    parser.add_argument("--bursts", type=int, default=40, help="of each call in a process")
    parser.add_argument("--eager", action="store_true", help="leave out compiled code")
    parser.add_argument("--output", type=Path, default=RESULT, help="path of the Markdown")
    options = parser.parse_args(arguments)
    compiled = not options.eager
    if options.variant:
        VARIANTS[options.variant]()
        print(json.dumps(measure_here(options.bursts, compiled)))
        return 0
    rounds = [
        {name: measure_in_process(name, options.bursts, compiled) for name in VARIANTS}
        for _ in range(options.rounds)
    ]
    lines = [
        "# What the fast paths of small CPU calls save",
        "",
        machine.sentence(machine.environment(1, {})),
        "",
        f"Microseconds of CPU time a call: the least burst (the median) over {options.rounds} "
        f"process{'es' * (options.rounds > 1)} of each variant, in turns. "
        f"Float8CurrentScaling, Linear({SIZE}, {SIZE}), {SIZE} tokens; "
        "for decoding MXFP8 weights and one token.",
        "",
        *table(rounds),
        "",
        "What each part saves for each layer of the MLP or of decoding (medians), and its lines "
        "of code:",
        "",
        *savings(rounds),
        "",
        "Written by `python -m benchmarks.small_calls`.",
        "",
    ]
    print("\n".join(lines))
    options.output.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
