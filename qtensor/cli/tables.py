"""Print what the commands for checkpoints found. This module computes nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from qtensor.checkpoints import Comparison, ConversionReport, Summary, TensorSummary
from qtensor.checkpoints import Progress as State
from qtensor.checkpoints.conversion.conversion_report import error_words
from qtensor.checkpoints.inspection.compare import DIFFERENT
from qtensor.cli.console import make_console, make_table
from qtensor.cli.errors import in_options

FEW = 20
"""Tensors that a table shows without ``--all``."""


@contextmanager
def progress_bar(*, quiet: bool = False, counted: bool = False) -> Iterator[Any]:
    """Show a bar with the time left on stderr; the value is the callback.

    It takes the state of a conversion; with ``counted``, the numbers and the name of a report.
    """
    console = make_console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", style="dim"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, rate="")

        def count(done: int, total: int, name: str, rate: str = "") -> None:
            bar.update(task, completed=done, total=total, rate=rate, description=escape(name))

        def show(state: State) -> None:
            count(state.done, state.total, state.name, f"{decimal(int(state.rate))}/s")

        yield count if counted else show


@functools.singledispatch
def show(found: object, every: bool) -> None:
    """Print a result as a table; without ``every``, at most ``FEW`` tensors."""
    typer.echo(in_options(repr(found)))


@show.register
def _summary(summary: Summary, every: bool) -> None:
    """Print the description of a checkpoint."""
    console = make_console()
    _line(console, f"{summary.path}: layout {summary.layout}, {summary.container}")
    _line(
        console,
        f"{len(summary.rows)} tensors, {decimal(summary.nbytes)} in "
        f"{_count(len(summary.files), 'file')}",
    )
    table = make_table("kind", "stored as", ">tensors", ">values", ">bytes", ">bits a value")
    for kind in summary.kinds:
        bits = f"{kind.bits_per_value:.3f}" if kind.values else ""
        numbers = (f"{kind.tensors:,}", f"{kind.values:,}", f"{kind.nbytes:,}", bits)
        table.add_row(escape(kind.kind), escape(kind.note), *numbers)
    console.print(table)
    if every:
        _rows(console, summary)
    _listed(console, "odd", list(summary.odd.items()), every)


def _rows(console: Console, summary: Summary) -> None:
    table = make_table("name", "kind", ">shape", "dtype", ">bytes")
    for row in summary.rows:
        dtype = str(row.dtype).removeprefix("torch.")
        table.add_row(escape(row.name), row.kind, _shape(row.shape), dtype, f"{row.nbytes:,}")
    console.print(table)


@show.register
def _tensor(tensor: TensorSummary, every: bool) -> None:
    """Print the description of one tensor."""
    console = make_console()
    _line(console, f"{tensor.name}: {tensor.kind}, {_shape(tensor.shape)}, {tensor.dtype}")
    if tensor.why_dense:
        _line(console, f"no quantized tensor: {tensor.why_dense}")
    table = make_table("role", "stored tensor", "dtype", ">shape", ">bytes", ">offset", "file")
    for role, info in tensor.stored.items():
        file = info.file.rpartition("/")[2]
        shape, numbers = _shape(info.shape), (f"{info.nbytes:,}", f"{info.start:,}")
        table.add_row(role, escape(info.name), info.dtype, shape, *numbers, escape(file))
    console.print(table)
    _line(
        console,
        f"values {tensor.minimum:.6g} to {tensor.maximum:.6g}, rms {tensor.rms:.6g}, "
        f"{tensor.zeros:,} zeros, {tensor.nans:,} NaN, {tensor.infinities:,} infinite",
    )


@show.register
def _report(report: ConversionReport, every: bool) -> None:
    """Print what a conversion did; without ``every``, the changed tensors with the worst SQNR."""
    console = make_console()
    shown: Sequence[Any] = report.tensors
    if not every:
        changed = [tensor for tensor in report.tensors if tensor.sqnr_db is not None]
        changed.sort(key=lambda tensor: tensor.sqnr_db or 0.0)
        shown = changed[:FEW]
        if len(changed) > FEW:
            _line(console, f"the {FEW} of {len(changed)} with the lowest SQNR; --all lists all")
    if shown:
        table = make_table("name", "action", "before", "after", ">SQNR dB", ">max error")
        for tensor in shown:
            words = (tensor.name, tensor.action, tensor.before, tensor.after)
            errors = error_words(tensor.sqnr_db, tensor.max_abs_error)
            table.add_row(*map(escape, words), *errors)
        console.print(table)
    _listed(console, "not carried", list(report.not_carried.items()), every)
    for note in report.notes:
        _line(console, f"note: {in_options(note)}")
    if report.resumed_shards:
        _line(console, f"{_count(report.resumed_shards, 'file')} of an interrupted run kept")
    counts = ", ".join(f"{n:,} {action}" for action, n in report.counts().items())
    _line(
        console,
        f"{report.source_layout} -> {report.layout}: {counts or 'no tensors'}, "
        f"{decimal(report.nbytes)} in {report.seconds:.1f} s",
    )


@show.register
def _comparison(comparison: Comparison, every: bool) -> None:
    """Print how two checkpoints differ; without ``every``, the tensors that differ."""
    console = make_console()
    shown = [t for t in comparison.tensors if every or not t.result.startswith("equal")]
    if shown:
        table = make_table("name", "result", "a", "b", ">SQNR dB", ">max error")
        for t in shown if every else shown[:FEW]:
            style = "yellow" if t.result == DIFFERENT else None
            words = (t.name, t.result, t.a, t.b, *error_words(t.sqnr_db, t.max_abs_error))
            table.add_row(*map(escape, words), style=style)
        console.print(table)
        if len(shown) > FEW and not every:
            _line(console, f"{len(shown) - FEW} more; --all lists all")
    counts = ", ".join(f"{n:,} {result}" for result, n in comparison.counts().items())
    _line(console, counts or "no tensors")


def _listed(console: Console, word: str, pairs: list[tuple[str, str]], every: bool) -> None:
    for name, why in pairs if every else pairs[:FEW]:
        _line(console, f"{word}: {name}: {why}")
    if len(pairs) > FEW and not every:
        _line(console, f"{len(pairs) - FEW} more; --all lists all")


def _line(console: Console, text: str) -> None:
    console.print(escape(text), soft_wrap=True)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
