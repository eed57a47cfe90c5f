"""What the benchmarks share: rows measured one by one beside a copy, what is absent gathered with its reason."""

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
"""The rows for which a quick run compiles the peers."""
Call = Callable[[], Any]
NO_TRAFFIC = Traffic(0, 0)


@dataclass
class Cell:
    """One row, ready to be measured."""

    values: Row
    """What is known before."""
    functions: dict[str, Call]
    """Name to call: ``copy``, ours, and ``<peer> eager``, ``<peer> compiled``."""
    copied: Tensor
    """What ``copy`` copies."""
    traffic: Traffic = NO_TRAFFIC
    """What ours has to move."""
    absent: dict[str, str] = field(default_factory=dict)
    """Name of a peer's function to the reason why it is not there."""


@dataclass
class Results:
    """Rows, and what is missing among them."""

    rows: list[Row] = field(default_factory=list)
    missing: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Reason to the cases that it concerns, each with its sizes and dtypes."""

    def note(self, reason: str, labels: Row) -> None:
        """One more row that lacks something for that reason."""
        where = f"{labels['size']} {labels['dtype']}"
        self.missing.setdefault(reason, {}).setdefault(labels["case"], []).append(where)

    def lines(self) -> list[str]:
        """For the end of a report: reason, cases, where; cases that share their places together."""
        lines = []
        for reason, cases_of in self.missing.items():
            shared: dict[str, list[str]] = {}
            for case, places in cases_of.items():
                shared.setdefault(", ".join(places), []).append(f"`{case}`")
            found = [f"{', '.join(names)} ({places})" for places, names in shared.items()]
            lines.append(f"{reason}: {'; '.join(found)}")
        return lines


def collect(
    plan: Iterable[Spec],
    build: Callable[[Any, Settings], Cell],
    ratios: Callable[[Cell, dict[str, Timing]], Row],
    settings: Settings,
) -> Results:
    """Build, measure and drop one row after the other.

    Args:
        plan: what to measure.
        build: the functions of an item.
        ratios: what follows from the timings of a row.
        settings: threads, repeats, time.
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
    """``torchao eager`` in ``us``: ``torchao_eager_us``."""
    return f"{name.replace(' ', '_').replace('-', '_')}_{unit}"


def peer_names(peer: Peer) -> tuple[str, str]:
    """Names of its two functions in a cell."""
    return f"{peer.name} eager", f"{peer.name} compiled"


def add_peers(
    cell: Cell, spec: Spec, settings: Settings, make: Callable[[Job, bool], Call | str]
) -> None:
    """The functions of every peer that run.

    Args:
        cell: to be extended; a function that is not there is noted with the reason.
        spec: of the row.
        settings: the peers; a quick run leaves them out of large rows.
        make: from the peer's job and whether to compile it: the call, or the reason why there is none.
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
    """Type and message, short."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def compile_static(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for the sizes of its call, the best case of a compiler."""
    return torch.compile(function, dynamic=False)


def forget_compiled() -> None:
    """No graph of another row counts against this one's limits."""
    torch._dynamo.reset()


@contextmanager
def silent() -> Iterator[None]:
    """Without warnings of libraries and the compiler's log of what it cannot compile."""
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
    """How many times faster our function is than each of the peers'."""
    mine = timings[ours].median_us
    names = [name for peer in settings.peers for name in peer_names(peer) if name in timings]
    return {key(name, "ratio"): timings[name].median_us / mine for name in names}


def bounded(cell: Cell, timings: dict[str, Timing], settings: Settings) -> Row:
    """Throughput of the high-precision side, shares of the floor, ratios: for quantize and dequantize."""
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
    """Of such rows, ratios last."""
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
    """What names a row."""
    return {
        "size": spec.size,
        "dtype": cases.dtype_name(spec.dtype),
        "case": spec.quantizer.canonical,
    }


def peer_columns(settings: Settings, unit: str, title: str, digits: int) -> list[Column]:
    """One column for each function of each peer; ``title`` has its name for ``{}``."""
    names = [name for peer in settings.peers for name in peer_names(peer)]
    return [Column(key(name, unit), title.format(name), digits) for name in names]


def report(
    name: str, texts: tuple[str, str], columns: list[Column], results: Results, settings: Settings
) -> Report:
    """Around results; ``texts`` are the title and what is to be said about the table."""
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


def finish(made: Report, settings: Settings) -> int:
    """Write, say where."""
    print(write(made, settings.output, settings.quick))
    return 0
