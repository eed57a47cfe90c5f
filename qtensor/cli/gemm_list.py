"""``qtensor kernels`` for GPU GEMMs: progress of a build, and a table of the kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qtensor.cli.console import make_table
from qtensor.core.errors import BuildError
from qtensor.cutlass_gemm import library
from qtensor.cutlass_gemm.spec import KernelSpec


def build_gemms(console: Console, specs: Sequence[KernelSpec], jobs: int | None) -> None:
    """Build kernels; print a line for each that ends, and a progress bar."""
    began = time.monotonic()
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(specs))

        def ended(spec: KernelSpec, result: Path | BuildError) -> None:
            failed = isinstance(result, BuildError)
            state = "[red]failed[/]" if failed else "built"
            bar.console.print(f"{state} {escape(spec.name)}", soft_wrap=True)
            bar.advance(task)

        library.build_all(specs, jobs=jobs, progress=ended)
    seconds = time.monotonic() - began
    console.print(f"{len(specs)} kernels are built ({seconds:.0f} s)", soft_wrap=True)


def show_gemms(console: Console, specs: Sequence[KernelSpec]) -> None:
    """Print a table of kernels and whether they are built."""
    built = library.built_specs()
    table = make_table("kernel", "state", ">size")
    for spec in specs:
        path = built.get(spec.name)
        size = "" if path is None else f"{path.stat().st_size / 1e6:.1f} MB"
        table.add_row(spec.name, "built" if path else "not built", size)
    console.print(table)
    console.print(
        f"{sum(s.name in built for s in specs)} of {len(specs)} are built", soft_wrap=True
    )
