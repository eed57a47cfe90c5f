"""Terminal output of the demo. This module prints results and computes nothing."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from qtensor.demo.report import (
    CompileResult,
    DemoReport,
    Environment,
    FormatResult,
    SentenceResult,
    Source,
)

_LOG_WIDTH = 110
"""Columns for output to a file or a pipe, which have no width of their own."""

_OTHER_COLUMNS = 58
"""Width of the first table without its column of layer names."""
_NARROWEST = 16


def make_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or ``_LOG_WIDTH`` columns without a terminal."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    return console


class View:
    """Prints the parts of a demo in the order in which they finish."""

    def __init__(self, console: Console) -> None:
        """Print everything on ``console``."""
        self._console = console

    def busy(self, what: str) -> AbstractContextManager[object]:
        """Return a context that shows a spinner with the text ``what``."""
        return self._console.status(f"{what} ...")

    @contextmanager
    def progress(self, steps: int) -> Iterator[Callable[[str], None]]:
        """Show a progress bar; the value is a function to call with a label after each step."""
        bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", style="dim"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        with bar:
            task = bar.add_task("", total=steps)
            yield lambda label: bar.update(task, advance=1, description=escape(label))

    def header(self, here: Environment, source: Source) -> None:
        """Print the weights and the environment."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim")
        rows.add_column()
        rows.add_row("weights", escape(source.name))
        others = f"; {source.skipped} others untouched" if source.skipped else ""
        rows.add_row(
            "",
            f"{source.matrices} matrices, {source.values:,} values, "
            f"{decimal(source.nbytes)}{others}",
        )
        threads = "1 thread" if here.threads == 1 else f"{here.threads} threads"
        rows.add_row("runs on", f"torch {here.torch}, Python {here.python}, {threads}")
        rows.add_row("", here.platform)
        title = f"[bold]qtensor[/] {here.qtensor}"
        self._console.print(Panel(rows, title=title, title_align="left", expand=False))

    def formats(self, results: tuple[FormatResult, ...], source: Source) -> None:
        """Print part 1: size and error of every format."""
        table = _table("1  Every matrix in every format")
        table.add_column("format", style="bold", no_wrap=True)
        for name in ("bits", "mean dB", "worst dB"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("worst layer", overflow="fold", style="dim")
        for name in ("bytes", "s"):
            table.add_column(name, justify="right", no_wrap=True)
        room = max(_NARROWEST, self._console.width - _OTHER_COLUMNS)
        bits = 8 * source.nbytes / source.values
        table.add_row(
            "(as loaded)", f"{bits:.2f}", "", "", "", decimal(source.nbytes), "", style="dim"
        )
        for result in results:
            table.add_row(
                result.format,
                f"{result.bits_per_value:.2f}",
                _decibel(result.sqnr_mean_db),
                _decibel(result.sqnr_worst_db),
                escape(_folded(result.worst_layer.removesuffix(".weight"), room)),
                decimal(result.nbytes),
                f"{result.seconds:.2f}",
            )
        notes = [
            "dB: signal to quantization noise (SQNR), higher is better; 6 dB are one bit.",
            "Bits per value and bytes count codes, scales and padding.",
        ]
        if any(result.format == "mxfp6" for result in results):
            notes.append("mxfp6 stores one code a byte by default; packed=True takes 6.25 bits.")
        self._show(table, "\n".join(notes))
        broken = sum(layer.not_finite for layer in results[0].layers)
        if broken:
            self._console.print(
                f"[yellow]{broken:,} values are NaN or infinite; no dB counts them.[/]"
            )

    def sentences(self, results: tuple[SentenceResult, ...], skipped: str | None) -> None:
        """Print part 2: the model's embeddings with quantized weights."""
        title = "2  The model with quantized weights"
        if skipped:
            return self._skipped(title, skipped)
        table = _table(title)
        table.add_column("format", style="bold", no_wrap=True)
        for name in ("cosine min", "cosine mean", "s"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("sentence of the min", style="dim", overflow="ellipsis", no_wrap=True)
        for result in results:
            cosines = (f"{result.cosine_min:.5f}", f"{result.cosine_mean:.5f}")
            seconds = f"{result.seconds:.2f}"
            table.add_row(result.format, *cosines, seconds, escape(result.worst_sentence))
        return self._show(
            table, "Cosine similarity of each sentence's embedding to float32; 1 is the same."
        )

    def compiled(self, results: tuple[CompileResult, ...], skipped: str | None) -> None:
        """Print part 3: the compile checks."""
        title = "3  In and out of torch.compile(fullgraph=True)"
        if skipped:
            return self._skipped(title, skipped)
        table = _table(title)
        table.add_column("format", style="bold", no_wrap=True)
        for name in ("graphs", "breaks", "bytes equal to eager", "s"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for result in results:
            verdict = Text("ok", style="green") if result.ok else Text("FAILED", style="bold red")
            table.add_row(
                result.format,
                str(result.graphs),
                str(result.graph_breaks),
                f"{result.bytes_equal:,} of {result.bytes_total:,}",
                f"{result.seconds:.2f}",
                verdict,
            )
        first = results[0]
        batches = ", ".join(map(str, first.batches))
        return self._show(
            table,
            f"In: {escape(first.matrix)}, quantized. Out: the same, and x @ weight.T quantized.\n"
            f"One compiled function for batches of {batches}; backend {first.backend}.",
        )

    def footer(self, report: DemoReport, json: Path | None) -> None:
        """Print where the data was written and which checks failed."""
        self._console.print()
        if json is not None:
            self._console.print(f"Written to {escape(str(json))}.", soft_wrap=True)
        failed = [result.format for result in report.compiled if not result.ok]
        if failed:
            names = ", ".join(failed)
            self._console.print(f"[bold red]The compile check failed for {names}.[/]")

    def _show(self, table: Table, note: str) -> None:
        self._console.print()
        self._console.print(table)
        self._console.print(f"[dim]{note}[/]")

    def _skipped(self, title: str, reason: str) -> None:
        self._console.print(f"\n[bold]{title}[/]: skipped, {reason}.")


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_style="bold",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _decibel(value: float) -> str:
    if math.isnan(value):
        return "nan"
    return "exact" if value == math.inf else f"{value:.1f}"


def _folded(name: str, room: int) -> str:
    """Fold a dotted name into lines of at most ``room`` columns, broken after dots."""
    lines = [""]
    for part in re.split(r"(?<=\.)", name):
        if lines[-1] and len(lines[-1]) + len(part) > room:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
