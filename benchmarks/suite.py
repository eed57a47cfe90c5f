"""Shared parts of the benchmarks: measuring row after row with a copy, collecting missing cases."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import cases, floor, machine
from benchmarks.cases import Spec
from benchmarks.floor import Traffic
from benchmarks.peer import Job, Peer
from benchmarks.report import Column, Report, Row, write
from benchmarks.settings import Settings
from benchmarks.timer import Timing, measure

COPY = "copy"
QUICK_COMPILE = (cases.MIDDLE, torch.bfloat16)
"""Sizes of the rows for which a quick run compiles the peers."""
Call = Callable[[], Any]
NO_TRAFFIC = Traffic(0, 0)


@dataclass
class Cell:
    """One row, ready to be measured."""

    values: Row
    """Values of the row that are known before measuring."""
    functions: dict[str, Call]
    """Name -> call: ``copy``, our functions, ``<peer> eager`` and ``<peer> compiled``."""
    copied: Tensor
    """The tensor that ``copy`` copies."""
    traffic: Traffic = NO_TRAFFIC
    """The bytes that our function must move."""
    absent: dict[str, str] = field(default_factory=dict)
    """Name of a missing function of a peer -> the reason."""


@dataclass
class Results:
    """The measured rows, and the missing cases."""

    rows: list[Row] = field(default_factory=list)
    missing: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Reason -> the missing cases, each with its sizes and dtypes."""

    def note(self, reason: str, labels: Row) -> None:
        """Note another row that lacks a case for this reason."""
        where = f"{labels['size']} {labels['dtype']}"
        self.missing.setdefault(reason, {}).setdefault(labels["case"], []).append(where)

    def lines(self) -> list[str]:
        """Return (reason, cases, rows) for the report; cases of the same rows share a line."""
        lines = []
        for reason, cases_of in self.missing.items():
            shared: dict[str, list[str]] = {}
            for case, places in cases_of.items():
                shared.setdefault(", ".join(places), []).append(f"`{case}`")
            entries = [f"{', '.join(names)} ({places})" for places, names in shared.items()]
            lines.append(f"{reason}: {'; '.join(entries)}")
        return lines


def collect(
    plan: Iterable[Spec],
    build: Callable[[Any, Settings], Cell],
    ratios: Callable[[Cell, dict[str, Timing]], Row],
    settings: Settings,
) -> Results:
    """Build, measure and drop one row after the other.

    Args:
        plan: rows to measure.
        build: returns the functions of a row.
        ratios: returns the values that follow from a row's timings.
        settings: threads, repeats, time limit.
    """
    results = Results()
    for spec in plan:
        if settings.sizes and spec.size not in settings.sizes:
            continue
        if settings.out_of_time():
            results.note(f"out of time after {settings.seconds:g} s", labels(spec))
            continue
        cell = build(spec, settings)
        for name, reason in cell.absent.items():
            results.note(f"{name} {reason}", cell.values)
        with silent():
            timings = measure(
                cell.functions,
                settings.bursts,
                threads=settings.threads,
                seconds=settings.function_seconds,
            )
        values = cell.values | ratios(cell, timings)
        values["copy_gbs"] = floor.copy_gbs(cell.copied, timings[COPY].median_us)
        values |= {key(name, "us"): timing.median_us for name, timing in timings.items()}
        values["quartiles_us"] = {n: [t.low_us, t.high_us] for n, t in timings.items()}
        values["bursts"] = {name: timing.bursts for name, timing in timings.items()}
        results.rows.append(values)
    return results


def key(name: str, unit: str) -> str:
    """Return the key of a function's time: ``torchao eager`` gives ``torchao_eager_us``."""
    return f"{name.replace(' ', '_').replace('-', '_')}_{unit}"


def peer_names(peer: Peer) -> tuple[str, str]:
    """Return the names of a peer's eager and compiled function."""
    return f"{peer.name} eager", f"{peer.name} compiled"


def add_peers(
    cell: Cell, spec: Spec, settings: Settings, make: Callable[[Job, bool], Call | str]
) -> None:
    """Add the functions of all peers that can run.

    Args:
        cell: row to extend; a missing function is noted with the reason.
        spec: description of the row.
        settings: names the peers; a quick run skips them in large rows.
        make: takes the peer's job and whether to compile it; returns the call, or the reason why
            there is none.
    """
    forget_compiled()
    for peer in settings.peers:
        if peer.job(spec.quantizer.canonical) is None:
            cell.absent[peer.name] = "has no such format or option"
            continue
        if settings.quick and math.prod(spec.shape) > math.prod(cases.MIDDLE):
            cell.absent[peer.name] = "is left out of large rows of a quick run"
            continue
        for compiled, name in enumerate(peer_names(peer)):
            if compiled and settings.quick and (spec.shape, spec.dtype) != QUICK_COMPILE:
                cell.absent[name] = "is left out of most rows of a quick run"
                continue
            call = _try(peer, spec, bool(compiled), make)
            (cell.absent if isinstance(call, str) else cell.functions)[name] = call


def _try(peer: Peer, spec: Spec, compiled: bool, make: Callable[[Job, bool], Call | str]) -> Any:
    job = peer.job(spec.quantizer.canonical, compiled)
    try:
        with silent():
            call = make(job, compiled)
            if not isinstance(call, str):
                call()
    except Exception as error:  # noqa: BLE001 - a foreign library may fail in any way; the reason is reported
        return f"fails with {first_line(error)}"
    return call


def first_line(error: BaseException) -> str:
    """Return the type and the message of an error, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def compile_static(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for the sizes of the call, which is a compiler's best case."""
    return torch.compile(function, dynamic=False)


def forget_compiled() -> None:
    """Reset the compiler, so that graphs of another row do not count against its limits."""
    torch._dynamo.reset()


@contextmanager
def silent() -> Iterator[None]:
    """Suppress warnings of libraries and the compiler's log of failures."""
    loggers = [logging.getLogger(name) for name in ("torch._inductor", "torch._dynamo")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def faster(timings: dict[str, Timing], ours: str, settings: Settings) -> Row:
    """Return how many times faster our function is than each peer's."""
    mine = timings[ours].median_us
    names = [name for peer in settings.peers for name in peer_names(peer) if name in timings]
    return {key(name, "ratio"): timings[name].median_us / mine for name in names}


def bounded(cell: Cell, timings: dict[str, Timing], settings: Settings) -> Row:
    """Return throughput, shares of the lower bound and ratios, for quantize and dequantize."""
    bandwidth = floor.copy_gbs(cell.copied, timings[COPY].median_us)
    us = timings["reused" if "reused" in timings else "fresh"].median_us
    return {
        "throughput_gbs": floor.gbs(cell.copied.nbytes, us),
        "floor_gbs": cell.copied.nbytes / cell.traffic.moved * bandwidth,
        "share": floor.share(cell.traffic.moved, us, bandwidth),
        "share_one_read": floor.share(cell.traffic.moved_once, us, bandwidth),
        "moved_bytes": cell.traffic.moved,
        **faster(timings, "fresh", settings),
    }


def bounded_columns(settings: Settings, throughput: str) -> list[Column]:
    """Return the columns of such rows; ratios come last."""
    return [
        Column("case", "case"),
        Column("copy_gbs", "copy GB/s", 1),
        Column("fresh_us", "fresh us", 1),
        Column("reused_us", "reused us", 1),
        *peer_columns(settings, "us", "{} us", 1),
        Column("throughput_gbs", throughput, 2),
        Column("share", "share", 0, percent=True),
        Column("share_one_read", "share, 1 read", 0, percent=True),
        *peer_columns(settings, "ratio", "x {}", 2),
    ]


def labels(spec: Spec) -> Row:
    """Return the columns that name a row."""
    return {
        "size": spec.size,
        "dtype": cases.dtype_name(spec.dtype),
        "case": spec.quantizer.canonical,
    }


def peer_columns(settings: Settings, unit: str, title: str, digits: int) -> list[Column]:
    """Return a column for each function of each peer; ``{}`` in ``title`` becomes its name."""
    names = [name for peer in settings.peers for name in peer_names(peer)]
    return [Column(key(name, unit), title.format(name), digits) for name in names]


def report(
    name: str, texts: tuple[str, str], columns: list[Column], results: Results, settings: Settings
) -> Report:
    """Return a report of results; ``texts`` are its title and the explanation of the table."""
    absent = [f"{name}, {reason}" for name, reason in settings.absent_peers.items()]
    absent += [f"{peer.name}: {note}" for peer in settings.peers for note in peer.notes]
    mode = " Quick run: few repeats, for orientation only." if settings.quick else ""
    return Report(
        name,
        texts[0],
        texts[1] + mode,
        machine.environment(settings.threads, {peer.name: peer.version for peer in settings.peers}),
        tuple(columns),
        ("size", "dtype"),
        tuple(sorted(results.rows, key=_elements)),
        tuple(absent + results.lines()),
    )


def _elements(row: Row) -> int:
    return math.prod(int(n) for n in row["size"].split("x"))


def finish(document: Report, settings: Settings) -> int:
    """Write the report and print its path."""
    print(write(document, settings.output, settings.quick))
    return 0
