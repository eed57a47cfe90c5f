"""Host overhead in instructions, counted by valgrind; the counts do not depend on machine load.

``python -m benchmarks.instructions [--output DIR]`` needs ``valgrind`` on the PATH and takes two
minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtensor
from benchmarks import machine, report, training
from benchmarks.report import Column, Report, Row
from benchmarks.settings import parser

CALLS = 20
"""Calls of each function; counts repeat to about one percent, as addresses and hashes vary."""
INSIDE = "QTENSOR_BENCHMARK_INSIDE_VALGRIND"
TITLE = "Host overhead in instructions on a CPU"
TEXT = (
    "Thousands of instructions a call, of Python, torch and kernels together, counted by "
    "`valgrind --tool=callgrind` over "
    "{calls} calls; one thread, eager code, float32, {tokens} tokens. valgrind does not support "
    "AVX-512: "
    "kernels run for AVX2. "
    "*ratio*: to the first row of the table in the same column."
)
COLUMNS = (
    Column("layer", "layer"),
    Column("no_grad", "no_grad", 0),
    Column("no_grad_ratio", "ratio", 3),
    Column("forward", "forward", 0),
    Column("forward_ratio", "ratio", 3),
    Column("both", "forward + backward", 0),
    Column("both_ratio", "ratio", 3),
)
KINDS = ("no_grad", "forward", "both")


def layers() -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """Yield (table, name, layer); the first one of a table is the reference of the others."""
    size = training.SIZE
    for recipe in training.RECIPES:
        region = qtensor.autocast(recipe=recipe)
        table = f"{type(recipe).__name__}, MLP block of {size}"
        for name, block in training.blocks().items():
            yield table, name, region(block)
    table = f"Linear({size}, {size})"
    yield table, "nn.Linear", nn.Linear(size, size)
    for recipe in training.RECIPES:
        yield table, type(recipe).__name__, qtensor.Linear(size, size, recipe=recipe)


def functions(layer: Callable[[Tensor], Tensor]) -> dict[str, Callable[[], Any]]:
    """Return the functions that are counted, by ``KINDS``."""
    x = torch.randn(training.SIZE, training.SIZE, requires_grad=True)
    dy = torch.ones(training.SIZE, training.SIZE)

    def without_gradients() -> None:
        with torch.no_grad():
            layer(x)

    calls = (without_gradients, lambda: layer(x), lambda: layer(x).backward(dy))
    return dict(zip(KINDS, calls, strict=True))


def _control(*words: str) -> None:
    command = ["callgrind_control", *words, str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_inside() -> None:
    """Call all functions; valgrind writes a file after each."""
    torch.set_num_threads(1)
    jobs = [functions(layer)[kind] for _, _, layer in layers() for kind in KINDS]
    jobs.insert(0, lambda: None)
    for job in jobs:
        for _ in range(4):
            job()
    _control("-i", "on")
    for job in jobs:
        job()
    for number, job in enumerate(jobs):
        _control("-z")
        for _ in range(CALLS):
            job()
        _control("-d", f"job {number}")


def count() -> list[float]:
    """Return thousands of instructions a call for each job, minus those of an empty call."""
    with tempfile.TemporaryDirectory(prefix="qtensor-instructions-") as folder:
        out = Path(folder) / "count"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet"]
        command += [f"--callgrind-out-file={out}", sys.executable, "-m", "benchmarks.instructions"]
        environment = {**os.environ, INSIDE: "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        subprocess.run(command, check=True, env=environment)
        counts = {}
        for path in Path(folder).glob("count.*"):
            text = path.read_text()
            job = re.search(r"^desc: Trigger: .*job (\d+)$", text, re.MULTILINE)
            total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
            if job and total:
                counts[int(job[1])] = int(total[1]) / CALLS / 1000
    return [counts[number] - counts[0] for number in range(1, len(counts))]


def rows(counts: Sequence[float]) -> Iterator[Row]:
    """Yield one row for each layer."""
    left = iter(counts)
    first: dict[str, dict[str, float]] = {}
    for table, name, _ in layers():
        values = {kind: next(left) for kind in KINDS}
        base = first.setdefault(table, values)
        ratios = {f"{kind}_ratio": values[kind] / base[kind] for kind in KINDS}
        yield {"table": table, "layer": name, **values, **ratios}


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print and write the results."""
    if os.environ.get(INSIDE):
        run_inside()
        return 0
    options = parser("instructions", __doc__).parse_args(arguments)
    if shutil.which("valgrind") is None:
        print("benchmarks.instructions needs valgrind: apt install valgrind", file=sys.stderr)
        return 1
    text = TEXT.format(calls=CALLS, tokens=training.SIZE)
    here = machine.environment(1, {}) | {"instructions": "AVX2"}
    table_rows = tuple(rows(count()))
    result = Report("instructions", TITLE, text, here, COLUMNS, ("table",), table_rows)
    report.write(result, options.output, quick=False)
    print(report.markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
