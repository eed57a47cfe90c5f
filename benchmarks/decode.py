"""Benchmark of products of a few rows with a quantized weight: the decoding of text on a CPU.

``python -m benchmarks.decode [--quick] [--sizes 14336x4096] [--rows 1,4] [--output DIR]`` measures
every format for 1 to 512 rows with one thread and with all, compared with bfloat16 and with the
kernels of torch, onnxruntime and llama.cpp for 8, 6 and 4 bits. With ``--rows``, only tables of
these rows are measured, and the other tables of this machine stay in its file.
``benchmarks.generation`` measures whole models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qtensor
from benchmarks import bandwidth, cases, decode_peers, floor, machine, suite
from benchmarks.decode_peers import Way
from benchmarks.machine import last_cache_bytes
from benchmarks.report import Column, Report, Row, data_path, read
from benchmarks.settings import Settings, parser, peer_names
from benchmarks.settings import settings as settings_of
from benchmarks.suite import Call
from benchmarks.timer import Timing, measure

TITLE = "Few rows times a quantized weight on a CPU"
TEXT = (
    "`F.linear(x, w)` with x (M, K) in bfloat16 and a weight (N, K), as decoding text one token at "
    "a time computes it. The heading of a table names N x K, the threads and M. Each call takes "
    "the next of several weights, together {megabytes} MB or more.{cache} Median "
    "microseconds, all rows of a table in turns; a run may measure some tables alone. "
    "*read GB/s*: a loop that adds up the words of the same fp8 weights. *share*: the time of "
    "reading the codes and factors at that bandwidth / the time of the call. *x bf16* and others: "
    "the other's time / that of the row; above 1 the row is faster. *x in*: each call quantizes x "
    "to this format first. {peers}."
)
READ = "read"
BITS = {"fp8": 8, "fp8_rowwise": 8, "fp8_blockwise": 8, "mxfp8": 8, "mxfp6": 6, "mxfp4": 4}
SIZES = {False: ((14336, 4096), (4096, 4096)), True: ((1024, 1024),)}
"""(N, K), by whether the run is quick."""
ROWS = {False: (1, 2, 4, 8, 16, 32, 64, 128, 512), True: (1, 4)}
BOTH = (("mxfp8", "mxfp8"), ("nvfp4", "mxfp8"), ("mxfp4", "mxfp4"))
"""Formats of the weight and of x: 8 and 8 bits, 4 and 8, 4 and 4."""
COPIES_BYTES = {False: 256 << 20, True: 8 << 20}
"""Least bytes of all copies of a weight together."""
CACHES = 2
"""Last cache levels that other weights must fill before a copy is certain to have left them."""
COMPARED = ("torch", "qtensor", "peers", "variables")
"""Parts of the environment that are those of all tables of a file."""
SECONDS = {False: 0.2, True: 0.02}
"""For each function of a table."""


@dataclass(frozen=True)
class Table:
    """What is measured in turns."""

    shape: tuple[int, int]
    """(N, K) of the weights."""
    rows: int
    threads: int

    @property
    def labels(self) -> Row:
        """The columns that name the table."""
        plural = "" if self.threads == 1 else "s"
        return {
            "size": cases.size_name(self.shape),
            "threads": f"{self.threads} thread{plural}",
            "tokens": f"M = {self.rows}",
        }


@dataclass(frozen=True)
class Weights:
    """Copies of a weight in one format."""

    name: str
    bits: float
    """Bits of a code, without factors."""
    nbytes: int
    bind: Any
    """``bind(x, threads)`` returns the call that takes the next copy each time."""


def copies_count(nbytes: int, total: int) -> int:
    """Return the number of copies of a weight that are together ``total`` bytes; at least two."""
    return max(2, -(-total // nbytes))


def read_between(rows: Sequence[Row], total: int) -> int:
    """Return the least bytes that a table's calls read between two calls with one copy.

    Args:
        rows: measured rows; those of a table are measured in turns.
        total: bytes of all copies of a weight.
    """
    tables: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        tables.setdefault((row["size"], row["threads"], row["tokens"]), []).append(row["bytes"])
    return min(
        (sum(sizes) * copies_count(max(sizes), total) for sizes in tables.values()), default=0
    )


def cache_text(between: int, cache: int) -> str:
    """Return what the report says about the cache of ``cache`` bytes; 0 if unknown."""
    text = f" Between two calls with one weight, the other rows read {between >> 20} MB or more"
    if not cache:
        return f"{text}."
    left = "none is in it" if between >= CACHES * cache else "some may be in it"
    return f"{text}; the last cache level holds {cache >> 20} MB, so that {left}."


def quantizers(quick: bool) -> list[Any]:
    """Return the formats of weights; a delayed scale makes the same codes as ``fp8``."""
    found = [qtensor.quantizer(n) for n in qtensor.formats() if n != "fp8_delayed"]
    if quick:
        return found
    packed = qtensor.quantizer("mxfp6", packed=True)
    square = qtensor.quantizer("fp8_blockwise", block_scaling_dim=2)
    return [*found, packed, square]


def our_weights(
    quantizer: Any, shape: tuple[int, int], total: int, left: str = ""
) -> tuple[Weights, list[Tensor]]:
    """Return copies of a random weight in a format, and their codes.

    Args:
        quantizer: the format.
        shape: (N, K).
        total: bytes of all copies together; there are at least two.
        left: format to which each call quantizes x first; empty for a plain x.
    """
    dense = cases.random_input(shape, torch.bfloat16)
    first = qtensor.quantize(dense, quantizer)
    count = copies_count(first.nbytes, total)
    copies: list[Any] = [first, *(qtensor.quantize(dense, quantizer) for _ in range(count - 1))]

    both = qtensor.quantizer(left) if left else None

    def bind(x: Tensor, threads: int) -> Call:
        def multiply(q: Any) -> Tensor:
            return F.linear(x if both is None else both(x), q)

        return bandwidth.in_turn([partial(multiply, q) for q in copies])

    name = f"{quantizer.canonical}, x in {left}" if left else quantizer.canonical
    width = BITS.get(quantizer.format, 4)
    return Weights(name, width, first.nbytes, bind), [q.buffers()[0] for q in copies]


def peer_weights(way: Way, shape: tuple[int, int], total: int) -> Weights:
    """Return copies of a random weight of a peer; the arguments are those of ``our_weights``."""
    generator = torch.Generator().manual_seed(0)
    first = way.make(*shape, generator)
    count = copies_count(first.nbytes, total)
    copies = [first, *(way.make(*shape, generator) for _ in range(count - 1))]

    def bind(x: Tensor, threads: int) -> Call:
        return bandwidth.in_turn([weight.bind(x, threads) for weight in copies])

    return Weights(way.name, way.bits, first.nbytes, bind)


def tables(
    shape: tuple[int, int],
    settings: Settings,
    chosen: Sequence[int] = (),
    one_thread: bool = True,
) -> Iterator[Table]:
    """Yield the tables of a size.

    Args:
        shape: (N, K).
        settings: of the run.
        chosen: numbers of rows, instead of all.
        one_thread: whether tables with one thread come before those with all.
    """
    for threads in dict.fromkeys((1, settings.threads) if one_thread else (settings.threads,)):
        for rows in chosen or ROWS[settings.quick]:
            yield Table(shape, rows, threads)


def measure_table(table: Table, weights: Sequence[Weights], read: Call, quick: bool) -> list[Row]:
    """Measure all weights of a size in turns.

    Args:
        table: size, rows of x and threads.
        weights: of all formats and peers.
        read: reads codes of ``weights[0]``.
        quick: whether to take little time.

    Returns:
        One row for each of ``weights``.
    """
    x = cases.random_input((table.rows, table.shape[1]), torch.bfloat16)
    functions = {READ: read} | {w.name: w.bind(x, table.threads) for w in weights}
    with suite.silent(), torch.no_grad():
        timings = measure(functions, threads=table.threads, seconds=SECONDS[quick])
    return rows_of(table, weights, timings)


def rows_of(table: Table, weights: Sequence[Weights], timings: Mapping[str, Timing]) -> list[Row]:
    """Return the rows of a table from the timings of ``read`` and of all weights."""
    codes = table.shape[0] * table.shape[1]
    read_gbs = floor.gbs(codes, timings[READ].median_us)
    rows = []
    for w in weights:
        us = timings[w.name].median_us
        row = table.labels | {
            "case": w.name,
            "bits": 8 * w.nbytes / codes,
            "us": us,
            "quartiles_us": [timings[w.name].low_us, timings[w.name].high_us],
            "least_us": timings[w.name].least_us,
            "bytes": w.nbytes,
            "read_gbs": read_gbs,
            "gbs": floor.gbs(w.nbytes, us),
            "share": floor.share(w.nbytes, us, read_gbs),
        }
        for other in weights:
            comparable = other.name == "bf16" or other.bits == w.bits
            if other.name in _PEERS and comparable and other.name != w.name:
                row[suite.key(other.name, "ratio")] = timings[other.name].median_us / us
        rows.append(row)
    return rows


_PEERS = frozenset(way.name for way in decode_peers.WAYS)


def columns(peers: Sequence[Way]) -> list[Column]:
    """Return the columns; ratios come last."""
    return [
        Column("case", "weight"),
        Column("bits", "bits a value", 2),
        Column("us", "us", 0),
        Column("read_gbs", "read GB/s", 1),
        Column("gbs", "GB/s", 1),
        Column("share", "share", 0, percent=True),
        *(Column(suite.key(way.name, "ratio"), f"x {way.name}", 2) for way in peers),
    ]


def collect(
    settings: Settings,
    peers: Sequence[Way],
    chosen: Sequence[int] = (),
    one_thread: bool = True,
) -> list[Row]:
    """Measure all sizes; the weights of one size are in memory at a time."""
    rows = []
    total = COPIES_BYTES[settings.quick]
    for shape in SIZES[settings.quick]:
        if settings.sizes and cases.size_name(shape) not in settings.sizes:
            continue
        first, codes = our_weights(qtensor.quantizer("fp8"), shape, total)
        others = [q for q in quantizers(settings.quick) if q.canonical != first.name]
        weights = [first, *(our_weights(q, shape, total)[0] for q in others)]
        weights += [
            our_weights(qtensor.quantizer(right), shape, total, left)[0] for right, left in BOTH
        ]
        weights += [peer_weights(way, shape, total) for way in peers]
        for table in tables(shape, settings, chosen, one_thread):
            if not settings.out_of_time():
                rows += measure_table(table, weights, bandwidth.read_call(codes), settings.quick)
    return rows


def document(rows: Sequence[Row], settings: Settings, name: str = "decode") -> Report:
    """Return the report of measured rows."""
    peers, versions, absent = decode_peers.ways()
    named = "; ".join(f"*{way.name}*: {way.text}" for way in peers)
    total = COPIES_BYTES[settings.quick]
    cache = cache_text(read_between(rows, total), last_cache_bytes())
    text = TEXT.format(megabytes=total >> 20, cache=cache, peers=named)
    mode = " Quick run: few repeats, for orientation only." if settings.quick else ""
    reasons: dict[str, list[str]] = {}
    for way, reason in absent.items():
        reasons.setdefault(reason, []).append(way)
    return Report(
        name,
        TITLE,
        text + mode,
        machine.environment(settings.threads, versions),
        tuple(columns(peers)),
        ("size", "threads", "tokens"),
        tuple(rows),
        tuple(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()),
    )


def earlier(settings: Settings) -> Report | None:
    """Return this machine's results, whose tables a run of chosen tables keeps; None if none.

    Raises:
        SystemExit: they were measured with another version or setting, so that one heading cannot
            describe both.
    """
    versions = decode_peers.ways()[1]
    here = machine.environment(settings.threads, versions)
    path = data_path(settings.output, "decode", settings.quick, here)
    if not path.exists():
        return None
    found = read(path)
    for key in COMPARED:
        if found.environment[key] != here[key]:
            raise SystemExit(
                f"{path} was measured with {key} {found.environment[key]}, not {here[key]}: "
                "measure all rows again, or into another --output"
            )
    return found


def merged(old: Report, new: Report) -> Report:
    """Return a report of the tables of both; a table that both have is that of ``new``."""

    def table(row: Row) -> tuple[Any, ...]:
        return row["size"], row["threads"], int(row["tokens"].removeprefix("M = "))

    measured = {table(row) for row in new.rows}
    kept = [row for row in old.rows if table(row) not in measured]
    threads = max(report.environment["threads"] for report in (old, new))
    return replace(
        new,
        environment={**new.environment, "threads": threads},
        rows=tuple(sorted([*new.rows, *kept], key=table)),
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results."""
    words = parser("decode", __doc__)
    words.add_argument("--rows", default="", help="measure these alone, comma-separated: 1,16")
    words.add_argument(
        "--all-threads-only", action="store_true", help="leave out the tables with one thread"
    )
    options = words.parse_args(arguments)
    run = settings_of(options)
    chosen = [int(number) for number in peer_names(options.rows)]
    old = earlier(run) if chosen or options.all_threads_only else None
    measured = collect(run, decode_peers.ways()[0], chosen, not options.all_threads_only)
    new = document(measured, run)
    return suite.finish(merged(old, new) if old else new, run)


if __name__ == "__main__":
    sys.exit(main())
